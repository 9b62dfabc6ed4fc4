//! A scripted host for tests: processes that react to signals on a virtual clock, seen through [`Eyes`] and a recording
//! [`Signaller`].

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    io,
    rc::Rc,
};

use super::{
    ladder::Ledger,
    signaller::{Delivery, Handle, Opened, Signal, Signaller},
};
use crate::model::{Ancestor, Eyes, Holder, How, LineageSource, Orphan, ProcKey, Slot, Source, Usage, View};

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
        let exit = self.0.borrow().exits.get(&key.tgid).copied();
        Some(Ancestor { key, exit, ..Ancestor::default() })
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
pub(super) struct Told(pub(super) Vec<(Signal, Vec<u32>)>);

impl Ledger for Told {
    fn before(&mut self, signal: Signal, to: &[ProcKey]) {
        self.0.push((signal, to.iter().map(|key| key.tgid).collect()));
    }
}
