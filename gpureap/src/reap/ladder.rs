//! Carries a plan out: take hold of every target, check it again, TERM, wait, KILL what is left, wait. All targets in
//! parallel, each signal at most once for each process, and nothing is signalled that no longer holds.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::Duration,
};

use super::{
    plan::{Row, Via, Whole, same_process},
    scope::Kinship,
    signaller::{Delivery, Handle, Opened, Signal, Signaller},
};
use crate::{
    clock::nanos,
    model::{Eyes, Holder, ProcKey, Slot},
};

/// First and longest pause between two looks for a process that lets go without exiting.
const LOOK_MIN: u64 = 1_000_000;
const LOOK_MAX: u64 = 20_000_000;

/// A process that closed its devices by itself after SIGTERM gets this long to end by itself before it counts as one
/// that let go and lives on. After SIGKILL only the exit counts.
const EXIT_AFTER_CLOSE: u64 = 50_000_000;

/// One that was killed and is not gone after this long has its memory taken away by the kernel.
const RELEASE_MEMORY_AFTER: u64 = 200_000_000;

#[derive(Clone, Copy, Debug)]
pub struct Rungs {
    /// KILL at once.
    pub now: bool,
    /// From TERM to KILL.
    pub grace: Duration,
    /// From the last signal on.
    pub timeout: Duration,
}

/// What is about to be done to processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act<'a> {
    Signal(Signal),
    /// By the kernel, to everybody in a cgroup.
    KillCgroup(&'a Path),
    StopUnit(&'a str),
}

/// Told of every act before it is done.
pub trait Ledger {
    fn before(&mut self, act: Act<'_>, to: &[ProcKey]);
}

/// How it ended for one target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// It had exited before any signal.
    Vanished,
    /// The pid belonged to another process, which was left alone.
    PidReused,
    /// It let go of the chosen devices and lives on; nothing was sent if it had done so before.
    Released,
    Exited,
    NotPermitted,
    /// It could not be opened, looked at or signalled; the reason.
    Failed(String),
    /// It still holds.
    Survived,
}

impl End {
    /// Nothing is left to be done about it.
    pub const fn is_over(&self) -> bool {
        matches!(self, Self::Exited | Self::Vanished | Self::PidReused | Self::Released)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    pub signal: Signal,
    /// Boottime.
    pub at_ns: u64,
}

#[derive(Clone, Debug)]
pub struct Fate {
    pub key: ProcKey,
    /// It was chosen for what it holds; otherwise only its exit counts.
    pub holder: bool,
    pub end: End,
    pub sent: Vec<Sent>,
    /// Boottime of the order to stop its unit.
    pub unit_stopped_ns: Option<u64>,
    /// Why its unit was not stopped.
    pub unit_error: Option<String>,
    pub exited_ns: Option<u64>,
    /// When each chosen device was seen to be let go.
    pub closed_ns: BTreeMap<Slot, u64>,
    /// The chosen devices that it still holds.
    pub holds: BTreeSet<Slot>,
    /// Wait status.
    pub status: Option<u32>,
    /// It was still on its way out when the time was up: its tables are gone, but the driver has not released what was
    /// in them.
    pub exiting: bool,
}

impl Fate {
    /// Whether anything was done to it.
    pub fn is_touched(&self) -> bool {
        !self.sent.is_empty() || self.unit_stopped_ns.is_some()
    }
    /// The first thing that was done to it.
    pub fn first_act_ns(&self) -> Option<u64> {
        self.sent.iter().map(|sent| sent.at_ns).chain(self.unit_stopped_ns).min()
    }
    pub fn was_sent(&self, signal: Signal) -> bool {
        self.sent.iter().any(|sent| sent.signal == signal)
    }
    /// When the last chosen device was let go.
    pub fn all_closed_ns(&self) -> Option<u64> {
        self.closed_ns.values().copied().max().filter(|_| self.holds.is_empty())
    }
}

struct Climber<'a> {
    row: &'a Row,
    fate: Fate,
    /// `None` once it needs no more attention.
    handle: Option<Handle>,
    opened: Option<Handle>,
}

impl Climber<'_> {
    fn end(&mut self, end: End) {
        self.fate.end = end;
        self.handle = None;
    }

    fn closed(&mut self, slots: impl IntoIterator<Item = Slot>, now: u64) {
        for slot in slots {
            if self.fate.holds.remove(&slot) {
                self.fate.closed_ns.insert(slot, now);
            }
        }
    }

    fn exited(&mut self, now: u64) {
        self.closed(self.fate.holds.clone(), now);
        if self.fate.is_touched() {
            self.fate.exited_ns = Some(now);
            self.end(End::Exited);
        } else {
            self.end(End::Vanished);
        }
    }

    /// Notes which devices are still held. An answer about another process under the same pid counts as nothing held.
    fn seen(&mut self, holder: Option<&Holder>, now: u64) {
        let held: BTreeSet<Slot> = holder
            .filter(|holder| same_process(holder.key, self.fate.key))
            .map(|holder| holder.held().collect())
            .unwrap_or_default();
        let gone: Vec<Slot> = self.fate.holds.difference(&held).copied().collect();
        self.closed(gone, now);
    }
}

/// One climb of the ladder.
pub struct Ladder<'a> {
    pub eyes: &'a dyn Eyes,
    pub kinship: &'a dyn Kinship,
    pub signaller: &'a mut dyn Signaller,
    pub ledger: &'a mut dyn Ledger,
    pub rungs: Rungs,
}

impl Ladder<'_> {
    /// Returns one fate for each row, in their order. Failures of single processes are fates, not errors.
    pub fn climb(&mut self, targets: &[&Row], whole: &[Whole]) -> anyhow::Result<Vec<Fate>> {
        let Rungs { now, grace, timeout } = self.rungs;
        let mut climbers: Vec<Climber<'_>> = targets.iter().map(|row| self.open(row)).collect();
        for climber in climbers.iter_mut().filter(|climber| climber.handle.is_some()) {
            self.check(climber)?;
        }
        self.stop_units(&mut climbers);
        if !now {
            self.send(&mut climbers, Signal::Term);
            let kill_at = self.after(grace);
            self.wait(&mut climbers, kill_at, false)?;
        }
        self.kill_whole(&mut climbers, whole);
        self.send(&mut climbers, Signal::Kill);
        let give_up = self.after(timeout);
        self.wait(&mut climbers, give_up, true)?;
        Ok(self.finish(climbers))
    }

    fn after(&self, time: Duration) -> u64 {
        self.signaller.now_ns().saturating_add(nanos(time))
    }

    fn open<'r>(&mut self, row: &'r Row) -> Climber<'r> {
        let fate = Fate {
            key: row.key,
            holder: row.via == Via::Device,
            unit_stopped_ns: None,
            unit_error: None,
            end: End::Survived,
            sent: Vec::new(),
            exited_ns: None,
            closed_ns: BTreeMap::new(),
            holds: row.slots.clone(),
            status: None,
            exiting: false,
        };
        let mut climber = Climber { row, fate, handle: None, opened: None };
        let opened = self.signaller.open(row.key);
        let now = self.signaller.now_ns();
        match opened {
            Ok(Opened::Here(handle)) => {
                climber.handle = Some(handle);
                climber.opened = Some(handle);
            }
            Ok(Opened::Gone) => climber.exited(now),
            Ok(Opened::Reused) => {
                climber.closed(row.slots.clone(), now);
                climber.end(End::PidReused);
            }
            Err(error) => climber.end(End::Failed(format!("cannot take hold of it: {error}"))),
        }
        climber
    }

    /// The last check before anything is done: it is the process of the plan, and what put it there still holds. The handle
    /// was open before, so if it is alive afterwards, its pid was nobody else's meanwhile.
    fn check(&mut self, climber: &mut Climber<'_>) -> anyhow::Result<()> {
        if climber.fate.holder {
            self.look(climber);
        } else if !self.kinship.belongs(climber.fate.key.tgid, &climber.row.via) {
            climber.end(End::Released);
        }
        let opened = climber.opened.into_iter().collect::<Vec<_>>();
        let now = self.signaller.now_ns();
        if !self.signaller.wait(&opened, now)?.is_empty() && climber.fate.end != End::PidReused {
            climber.exited(now);
        }
        Ok(())
    }

    /// Looks at what a process holds. One that has let go before any signal is done with.
    fn look(&self, climber: &mut Climber<'_>) {
        let answer = self.eyes.look_at(climber.fate.key.tgid);
        let now = self.signaller.now_ns();
        match answer {
            Ok(Some(other)) if !climber.fate.is_touched() && !same_process(other.key, climber.fate.key) => {
                climber.closed(climber.fate.holds.clone(), now);
                climber.end(End::PidReused);
            }
            // An exit takes the tables down first; what was in them is free only when the exit is complete.
            Ok(_) if climber.fate.is_touched() && climber.handle.is_some_and(|h| self.signaller.exiting(h)) => {}
            Ok(holder) => {
                climber.seen(holder.as_ref(), now);
                if climber.fate.holds.is_empty() && !climber.fate.is_touched() {
                    climber.end(End::Released);
                }
            }
            // Without a signal sent, not knowing that it still holds means not to signal.
            Err(error) if !climber.fate.is_touched() => {
                climber.end(End::Failed(format!("cannot see whether it still holds: {error:#}")));
            }
            Err(error) => tracing::debug!(pid = climber.fate.key.tgid, "look: {error:#}"),
        }
    }

    /// Orders the units of monitors and daemons to be stopped: a process that is only killed is started again.
    fn stop_units(&mut self, climbers: &mut [Climber<'_>]) {
        let waiting = climbers.iter().filter(|climber| climber.handle.is_some());
        let units: BTreeSet<String> = waiting.filter_map(|climber| climber.row.stop_unit.clone()).collect();
        for unit in units {
            let of_unit =
                |climber: &&mut Climber<'_>| climber.handle.is_some() && climber.row.stop_unit.as_ref() == Some(&unit);
            let to: Vec<ProcKey> = climbers.iter_mut().filter(of_unit).map(|climber| climber.fate.key).collect();
            self.ledger.before(Act::StopUnit(&unit), &to);
            let at_ns = self.signaller.now_ns();
            let outcome = self.signaller.stop_unit(&unit);
            for climber in climbers.iter_mut().filter(of_unit) {
                match &outcome {
                    Ok(()) => climber.fate.unit_stopped_ns = Some(at_ns),
                    Err(reason) => climber.fate.unit_error = Some(reason.clone()),
                }
            }
        }
    }

    /// KILL to whole cgroups: what is being forked there at this moment is killed too.
    fn kill_whole(&mut self, climbers: &mut [Climber<'_>], whole: &[Whole]) {
        for Whole { dir, pids } in whole {
            let waiting =
                |climber: &&mut Climber<'_>| climber.handle.is_some() && pids.contains(&climber.fate.key.tgid);
            let to: Vec<ProcKey> = climbers.iter_mut().filter(waiting).map(|climber| climber.fate.key).collect();
            if to.is_empty() {
                continue;
            }
            self.ledger.before(Act::KillCgroup(dir), &to);
            let at_ns = self.signaller.now_ns();
            match self.signaller.kill_cgroup(dir) {
                Ok(()) => {
                    for climber in climbers.iter_mut().filter(waiting) {
                        climber.fate.sent.push(Sent { signal: Signal::Kill, at_ns });
                    }
                }
                // Then each of them gets its own.
                Err(error) => tracing::debug!("cgroup.kill in {}: {error}", dir.display()),
            }
        }
    }

    /// To each process that is still waited for, unless it got that signal in another way.
    fn send(&mut self, climbers: &mut [Climber<'_>], signal: Signal) {
        let due = |climber: &Climber<'_>| {
            let stopping = signal == Signal::Term && climber.fate.unit_stopped_ns.is_some();
            climber.handle.filter(|_| !stopping && !climber.fate.was_sent(signal))
        };
        let to: Vec<ProcKey> = climbers.iter().filter(|c| due(c).is_some()).map(|c| c.fate.key).collect();
        if to.is_empty() {
            return;
        }
        self.ledger.before(Act::Signal(signal), &to);
        for climber in climbers {
            let Some(handle) = due(climber) else { continue };
            let at_ns = self.signaller.now_ns();
            match self.signaller.send(handle, signal) {
                Ok(Delivery::Delivered) => climber.fate.sent.push(Sent { signal, at_ns }),
                Ok(Delivery::Gone) => climber.exited(at_ns),
                Ok(Delivery::NotPermitted) => climber.end(End::NotPermitted),
                Err(error) => climber.end(End::Failed(format!("{signal} failed: {error}"))),
            }
        }
    }

    /// Waits until no process needs attention, or until a boottime. The exits wake it; the looks only notice who lets
    /// go and lives on.
    fn wait(&mut self, climbers: &mut [Climber<'_>], until_ns: u64, killed: bool) -> anyhow::Result<()> {
        let mut pause = LOOK_MIN;
        // After SIGKILL only exits count, and who looks at the files of a dying process has them in hand for a moment: the
        // last close, with the driver's release, could then be ours.
        let mut look_at = if killed { u64::MAX } else { self.signaller.now_ns() + pause };
        let mut release_at = killed.then(|| self.signaller.now_ns() + RELEASE_MEMORY_AFTER);
        loop {
            let waiting: Vec<Handle> = climbers.iter().filter_map(|climber| climber.handle).collect();
            if waiting.is_empty() {
                return Ok(());
            }
            let wake = look_at.min(release_at.unwrap_or(u64::MAX)).min(until_ns);
            let ready: BTreeSet<Handle> = self.signaller.wait(&waiting, wake)?.into_iter().collect();
            let now = self.signaller.now_ns();
            let mut living = climbers.iter_mut().filter(|climber| climber.handle.is_some());
            for climber in living.by_ref() {
                if climber.handle.is_some_and(|handle| ready.contains(&handle)) {
                    climber.exited(now);
                }
            }
            if release_at.is_some_and(|at| now >= at) {
                release_at = None;
                climbers.iter().filter_map(|climber| climber.handle).for_each(|h| self.signaller.release_memory(h));
            }
            let last = now >= until_ns;
            if last || now >= look_at {
                for climber in climbers.iter_mut().filter(|climber| climber.handle.is_some()) {
                    if climber.fate.holder {
                        self.look(climber);
                    }
                    climber.fate.exiting = last && climber.handle.is_some_and(|h| self.signaller.exiting(h));
                    let alone = !killed && !climber.fate.exiting;
                    if alone
                        && climber.fate.all_closed_ns().is_some_and(|closed| last || now >= closed + EXIT_AFTER_CLOSE)
                    {
                        climber.end(End::Released);
                    }
                }
                pause = (pause * 2).min(LOOK_MAX);
                look_at = self.signaller.now_ns() + pause;
            }
            if last {
                return Ok(());
            }
        }
    }

    fn finish(&self, climbers: Vec<Climber<'_>>) -> Vec<Fate> {
        let finish = |mut climber: Climber<'_>| {
            let told = climber.opened.filter(|_| climber.fate.end == End::Exited);
            climber.fate.status = told.and_then(|handle| {
                self.signaller
                    .exit_status(handle)
                    .or_else(|| Some(self.eyes.lineage().lookup(climber.fate.key)?.exit?.1))
            });
            if climber.fate.end == End::Survived && climber.fate.holder && climber.fate.holds.is_empty() {
                climber.fate.end = End::Released;
            }
            climber.fate
        };
        climbers.into_iter().map(finish).collect()
    }
}
