//! A scripted host for tests: processes that react to signals on a virtual clock, seen through [`Eyes`] and a recording
//! [`Signaller`].

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    io,
    path::Path,
    rc::Rc,
};

use crate::{
    model::{Ancestor, Eyes, Holder, How, LineageSource, Orphan, ProcKey, Slot, Source, Usage, View},
    process::{
        cgroup::{JobCgroup, Kind},
        table::{Kin, Table},
    },
    reap::{
        ladder::{Act, Ledger},
        plan::{Class, Subject, Via},
        scope::Kinship,
        signaller::{Delivery, Handle, Opened, Signal, Signaller},
    },
};

pub(super) const MS: u64 = 1_000_000;

/// What a process does when a signal reaches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum React {
    Ignore,
    /// Exits after some milliseconds.
    Exit(u64),
    /// Closes everything after some milliseconds and lives on.
    Close(u64),
    /// Closes one device, then exits.
    CloseThenExit(Slot, u64, u64),
    Refuse,
}

#[derive(Clone, Debug)]
pub(super) struct Actor {
    pub(super) key: ProcKey,
    pub(super) slots: BTreeSet<Slot>,
    pub(super) mapped: bool,
    pub(super) on_term: React,
    pub(super) on_kill: React,
    /// Appears when that process exits.
    pub(super) after: Option<u32>,
    /// Exits before anyone can open it.
    pub(super) vanishes: bool,
    /// The pid belongs to a younger process by the time it is opened.
    pub(super) reused: bool,
    /// Lets go by itself between view and signal.
    pub(super) lets_go: bool,
    pub(super) unreadable: bool,
    /// Takes the devices again after it was seen to have let go.
    pub(super) reopens: bool,
    /// Its parent, as the kernel remembers it and as the table of processes shows it.
    pub(super) parent: u32,
    pub(super) subject: Subject,
    /// In the one cgroup that the world has.
    pub(super) in_cgroup: bool,
    /// Left the tree or the cgroup after the plan was made.
    pub(super) left: bool,
}

pub(super) fn actor(pid: u32) -> Actor {
    Actor {
        key: ProcKey::new(pid, u64::from(pid) * 1_000 * MS),
        slots: [0].into(),
        mapped: true,
        on_term: React::Exit(5),
        on_kill: React::Exit(3),
        after: None,
        vanishes: false,
        reused: false,
        lets_go: false,
        unreadable: false,
        reopens: false,
        parent: 0,
        subject: Subject::default(),
        in_cgroup: false,
        left: false,
    }
}

#[derive(Debug, Default)]
struct State {
    now: u64,
    actors: Vec<Actor>,
    /// Exit time and wait status.
    exits: BTreeMap<u32, (u64, u32)>,
    closes: Vec<(u32, Option<Slot>, u64)>,
    sent: Vec<(u32, Signal, u64)>,
    looked: u32,
    orphans_until: u64,
    complete: bool,
    blind: BTreeSet<How>,
    source: Option<Source>,
    /// Of the one cgroup.
    cgroup: Option<Kind>,
    killable_cgroup: bool,
    cgroups_killed: u32,
    units: BTreeMap<String, Result<(), String>>,
    released: Vec<u32>,
    blind_to_sweeps: bool,
}

impl State {
    fn exited(&self, pid: u32) -> bool {
        self.exits.get(&pid).is_some_and(|(at, _)| *at <= self.now)
    }

    fn held(&self, actor: &Actor) -> BTreeSet<Slot> {
        let pid = actor.key.tgid;
        let born = actor.after.is_none_or(|other| self.exited(other));
        if !born || self.exited(pid) {
            return BTreeSet::new();
        }
        let closed = |slot: Slot| {
            self.closes
                .iter()
                .any(|(who, which, at)| *who == pid && which.is_none_or(|which| which == slot) && *at <= self.now)
        };
        actor.slots.iter().copied().filter(|slot| !closed(*slot)).collect()
    }
}

/// Cheap to clone; all clones are one host.
#[derive(Clone, Debug)]
pub(super) struct World(Rc<RefCell<State>>);

impl World {
    pub(super) fn new(actors: Vec<Actor>) -> Self {
        Self(Rc::new(RefCell::new(State { now: 100_000 * MS, actors, complete: true, ..State::default() })))
    }

    pub(super) fn sent(&self) -> Vec<(u32, Signal)> {
        self.0.borrow().sent.iter().map(|(pid, signal, _)| (*pid, *signal)).collect()
    }

    pub(super) fn looked(&self) -> u32 {
        self.0.borrow().looked
    }

    pub(super) fn orphans_for(&self, ms: u64) {
        let mut state = self.0.borrow_mut();
        state.orphans_until = state.now + ms * MS;
    }

    pub(super) fn incomplete(&self) {
        self.0.borrow_mut().complete = false;
    }

    /// A look through /proc: never complete, and blind to what is in flight.
    pub(super) fn proc_only(&self) {
        let mut state = self.0.borrow_mut();
        (state.complete, state.source) = (false, Some(Source::Proc));
        state.blind = [How::InFlight].into();
    }

    /// Gives the world a cgroup; whether it has `cgroup.kill`.
    pub(super) fn cgroup(&self, kind: Kind, killable: bool) {
        let mut state = self.0.borrow_mut();
        (state.cgroup, state.killable_cgroup) = (Some(kind), killable);
    }

    pub(super) fn cgroups_killed(&self) -> u32 {
        self.0.borrow().cgroups_killed
    }

    /// What systemd says when that unit is to be stopped.
    pub(super) fn unit(&self, name: &str, answer: Result<(), String>) {
        self.0.borrow_mut().units.insert(name.to_owned(), answer);
    }

    /// From now on there is nobody who could make a sweep.
    pub(super) fn sweeps_fail(&self) {
        self.0.borrow_mut().blind_to_sweeps = true;
    }

    /// Whose memory was asked to be freed.
    pub(super) fn released(&self) -> Vec<u32> {
        self.0.borrow().released.clone()
    }

    pub(super) fn blind(&self, to: &[How]) {
        self.0.borrow_mut().blind = to.iter().copied().collect();
    }

    fn holder(actor: &Actor, slots: &BTreeSet<Slot>) -> Option<Holder> {
        let usage = |slot: &Slot| {
            (*slot, Usage { fds: 1, maps: u32::from(actor.mapped), ever_mapped: actor.mapped, ..Usage::default() })
        };
        (!slots.is_empty()).then(|| Holder {
            key: actor.key,
            usage: slots.iter().map(usage).collect(),
            how: [How::Fd].into(),
            private_tids: BTreeSet::new(),
            inherited_from: None,
            from_snapshot: false,
        })
    }

    fn actor(&self, pid: u32) -> Option<Actor> {
        let state = self.0.borrow();
        state.actors.iter().find(|actor| actor.key.tgid == pid && !state.exited(pid)).cloned()
    }
}

impl Kinship for World {
    fn table(&self) -> Table {
        let kin = |actor: &Actor| {
            let key = actor.key;
            (key.tgid, Kin { key, ppid: actor.parent, leads_terminal: false, kernel_thread: false })
        };
        let state = self.0.borrow();
        Table(state.actors.iter().filter(|actor| !state.exited(actor.key.tgid)).map(kin).collect())
    }

    fn job_cgroup(&self, pid: u32) -> Result<JobCgroup, String> {
        let member = self.actor(pid).is_some_and(|actor| actor.in_cgroup);
        let kind = self.0.borrow().cgroup.filter(|_| member).ok_or("/ is no job's cgroup")?;
        Ok(JobCgroup { dir: "/cg/job".into(), path: "/job".to_owned(), kind })
    }

    fn members(&self, _cgroup: &JobCgroup) -> BTreeSet<u32> {
        let state = self.0.borrow();
        let members = state.actors.iter().filter(|actor| actor.in_cgroup && !state.exited(actor.key.tgid));
        members.map(|actor| actor.key.tgid).collect()
    }

    fn subject(&self, pid: u32) -> Option<(ProcKey, Subject)> {
        self.actor(pid).map(|actor| (actor.key, actor.subject))
    }

    fn belongs(&self, pid: u32, _via: &Via) -> bool {
        self.actor(pid).is_some_and(|actor| !actor.left)
    }

    fn can_kill(&self, _cgroup: &JobCgroup) -> bool {
        self.0.borrow().killable_cgroup
    }
}

impl Eyes for World {
    fn view(&self) -> anyhow::Result<View> {
        let state = self.0.borrow();
        let holders = state.actors.iter().filter_map(|actor| Self::holder(actor, &state.held(actor))).collect();
        let orphan = Orphan { slot: 0, files: 1, how: How::InFlight, last_owner: None };
        Ok(View {
            source: state.source.unwrap_or(Source::Map),
            backend: None,
            complete: state.complete,
            cannot_see: state.blind.clone(),
            lost_events: 0,
            swept_ns: None,
            open_files: BTreeMap::new(),
            holders,
            orphans: if state.now < state.orphans_until { vec![orphan] } else { Vec::new() },
            notes: Vec::new(),
        })
    }

    fn sweep(&self) -> anyhow::Result<View> {
        anyhow::ensure!(!self.0.borrow().blind_to_sweeps, "no daemon listens any more");
        for actor in &mut self.0.borrow_mut().actors {
            if actor.reopens {
                actor.lets_go = false;
            }
        }
        let reopened: Vec<u32> =
            self.0.borrow().actors.iter().filter(|actor| actor.reopens).map(|actor| actor.key.tgid).collect();
        self.0.borrow_mut().closes.retain(|(pid, _, _)| !reopened.contains(pid));
        self.view()
    }

    fn look_at(&self, tgid: u32) -> anyhow::Result<Option<Holder>> {
        let mut state = self.0.borrow_mut();
        state.looked += 1;
        let Some(actor) = state.actors.iter().find(|actor| actor.key.tgid == tgid) else { return Ok(None) };
        anyhow::ensure!(!actor.unreadable, "no luck");
        let held = if actor.lets_go { BTreeSet::new() } else { state.held(actor) };
        Ok(Self::holder(actor, &held))
    }

    fn lineage(&self) -> &dyn LineageSource {
        self
    }
}

impl LineageSource for World {
    fn lookup(&self, key: ProcKey) -> Option<Ancestor> {
        let state = self.0.borrow();
        let exit = state.exits.get(&key.tgid).copied();
        let of = |pid: u32| state.actors.iter().find(|actor| actor.key.tgid == pid);
        let parent = of(key.tgid).and_then(|actor| of(actor.parent)).map(|parent| parent.key);
        Some(Ancestor { key, parent, exit, ..Ancestor::default() })
    }
}

impl Signaller for World {
    fn now_ns(&self) -> u64 {
        self.0.borrow().now
    }

    fn exiting(&self, handle: Handle) -> bool {
        // One that closes by itself first is not exiting yet.
        let (state, pid) = (self.0.borrow(), handle.0 as u32);
        state.exits.contains_key(&pid) && !state.closes.iter().any(|(closer, ..)| *closer == pid)
    }

    fn open(&mut self, key: ProcKey) -> io::Result<Opened> {
        let mut state = self.0.borrow_mut();
        let now = state.now;
        let Some(actor) = state.actors.iter().find(|actor| actor.key == key).cloned() else { return Ok(Opened::Gone) };
        if actor.vanishes || actor.reused {
            state.exits.insert(key.tgid, (now, 0));
        }
        Ok(match actor {
            Actor { vanishes: true, .. } => Opened::Gone,
            Actor { reused: true, .. } => Opened::Reused,
            _ => Opened::Here(Handle(key.tgid as usize)),
        })
    }

    fn send(&mut self, handle: Handle, signal: Signal) -> io::Result<Delivery> {
        let mut state = self.0.borrow_mut();
        let (pid, now) = (handle.0 as u32, state.now);
        state.sent.push((pid, signal, now));
        if state.exited(pid) {
            return Ok(Delivery::Gone);
        }
        let actor = state.actors.iter().find(|actor| actor.key.tgid == pid).unwrap();
        let (reaction, status) = match signal {
            Signal::Term => (actor.on_term, 15),
            Signal::Kill => (actor.on_kill, 9),
        };
        match reaction {
            React::Ignore => {}
            React::Exit(ms) => {
                state.exits.insert(pid, (now + ms * MS, status));
            }
            React::Close(ms) => state.closes.push((pid, None, now + ms * MS)),
            React::CloseThenExit(slot, close, exit) => {
                state.closes.push((pid, Some(slot), now + close * MS));
                state.exits.insert(pid, (now + exit * MS, 0));
            }
            React::Refuse => return Ok(Delivery::NotPermitted),
        }
        Ok(Delivery::Delivered)
    }

    fn kill_cgroup(&mut self, dir: &Path) -> io::Result<()> {
        assert_eq!(dir, Path::new("/cg/job"));
        let mut state = self.0.borrow_mut();
        state.cgroups_killed += 1;
        let now = state.now;
        let members: Vec<u32> =
            state.actors.iter().filter(|actor| actor.in_cgroup).map(|actor| actor.key.tgid).collect();
        for pid in members {
            state.exits.entry(pid).or_insert((now + MS, 9));
        }
        Ok(())
    }

    fn stop_unit(&mut self, unit: &str) -> Result<(), String> {
        let mut state = self.0.borrow_mut();
        let answer = state.units.get(unit).cloned().unwrap_or_else(|| Err("Unit not loaded.".to_owned()));
        if answer.is_ok() {
            let now = state.now;
            let pids: Vec<u32> = state
                .actors
                .iter()
                .filter(|actor| actor.subject.class != Class::Job)
                .map(|actor| actor.key.tgid)
                .collect();
            for pid in pids {
                state.exits.insert(pid, (now + 30 * MS, 15));
            }
        }
        answer
    }

    fn release_memory(&mut self, handle: Handle) {
        self.0.borrow_mut().released.push(handle.0 as u32);
    }

    fn wait(&mut self, handles: &[Handle], until_ns: u64) -> io::Result<Vec<Handle>> {
        let mut state = self.0.borrow_mut();
        let exits = handles.iter().filter_map(|handle| state.exits.get(&(handle.0 as u32))).map(|(at, _)| *at);
        state.now = exits.min().unwrap_or(u64::MAX).min(until_ns).max(state.now);
        Ok(handles.iter().copied().filter(|handle| state.exited(handle.0 as u32)).collect())
    }

    fn exit_status(&self, _handle: Handle) -> Option<u32> {
        None
    }
}

/// Keeps what it was told.
#[derive(Debug, Default)]
pub(super) struct Told(pub(super) Vec<(String, Vec<u32>)>);

impl Ledger for Told {
    fn before(&mut self, act: Act<'_>, to: &[ProcKey]) {
        let act = match act {
            Act::Signal(signal) => signal.to_string(),
            Act::KillCgroup(dir) => format!("kill {}", dir.display()),
            Act::StopUnit(unit) => format!("stop {unit}"),
        };
        self.0.push((act, to.iter().map(|key| key.tgid).collect()));
    }
}
