//! From events to rows: who holds what since when, and how it ended. Pure and replayable: the same events give the same
//! rows, and events of different processes may come in any order.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{
    death::{self, Seen},
    event::{Event, Exit, FileEvent, Fork, Held, HeldDevice, Oom, Process, Signal, Start, ThreadEvent, What},
    rows::{Boot, Change, HoldEnd, HoldOrigin, HoldRow, Key, ProcessRow, Run, Thread},
};
use crate::clock::NANOS;

/// Evidence may come after the death: the kernel's log and the record of reaps are read apart from the ring.
const SETTLE_NS: u64 = 10 * NANOS;
/// Signals that are kept of one process: the first and the last ones.
const SIGNALS: usize = 32;
/// The dead of whom facts may still come, at most.
const CLOSED: usize = 512;
/// Ancestors that are kept for readers who come later, at most; then those of nobody who holds go.
const ANCESTORS: usize = 1024;
/// Thread names that are kept of one process.
const THREADS: usize = 1024;

/// What is going on at this moment. Bounded by the number of living holders and of deaths in the last seconds.
#[derive(Clone, Debug, Default)]
pub struct State {
    live: BTreeMap<Key, Life>,
    /// Who has closed everything, in that order: facts about them may still be on their way.
    closed: VecDeque<Key>,
    /// Out-of-memory victims whose process is not known yet, by thread.
    victims: BTreeMap<u32, (u64, Oom)>,
    /// Who holds nothing, and has or had descendants that do.
    ancestors: BTreeMap<Key, Process>,
}

/// A process that holds, may hold, or has just died.
#[derive(Clone, Debug, Default)]
struct Life {
    row: ProcessRow,
    /// Who it is was read.
    known: bool,
    /// Its row was written.
    told: bool,
    holds: BTreeMap<String, HoldRow>,
    /// Opens that no look has confirmed: when the first began, and files that have not failed.
    opens: BTreeMap<String, Opens>,
    /// When it closed its last descriptor of a device.
    closes: BTreeMap<String, u64>,
    seen: Seen,
    closed: bool,
}

#[derive(Clone, Debug, Default)]
struct Opens {
    first_ns: u64,
    files: Vec<u64>,
}

impl State {
    /// Goes on where an earlier daemon of this boot stopped.
    pub fn resume(processes: Vec<ProcessRow>, holds: Vec<HoldRow>) -> Self {
        let mut state = Self::default();
        for row in processes {
            let seen = Seen { threads: row.threads.clone(), ..Seen::default() };
            state.live.insert(row.key, Life { row, known: true, told: true, seen, ..Life::default() });
        }
        for hold in holds {
            let life = state.live.entry(hold.key).or_insert_with(|| Life::new(hold.key));
            life.told = true;
            life.holds.insert(hold.node.clone(), hold);
        }
        state
    }

    /// Everyone who holds or may hold.
    pub fn keys(&self) -> impl Iterator<Item = Key> {
        self.live.iter().filter(|(_, life)| !life.closed).map(|(key, _)| *key)
    }

    /// Everyone with a hold that is open.
    pub fn holders(&self) -> impl Iterator<Item = Key> {
        self.live.iter().filter(|(_, life)| !life.holds.is_empty() && !life.closed).map(|(key, _)| *key)
    }

    /// How many hold something so long after they were killed.
    pub fn unkillable(&self, now: u64, patience: u64) -> usize {
        let is_killed = |life: &&Life| {
            let kills =
                |(at, signal): &(u64, Signal)| signal.signal == "SIGKILL" && now.saturating_sub(*at) >= patience;
            !life.closed && !life.holds.is_empty() && life.seen.signals.iter().any(kills)
        };
        self.live.values().filter(is_killed).count()
    }

    /// Everything as it is now, for a journal that begins anew or has a gap.
    pub fn now(&self, boot_ns: u64) -> Change {
        let told = || self.live.values().filter(|life| life.told);
        let processes = told().map(|life| life.row.clone()).collect();
        let holds = told().flat_map(|life| life.holds.values().cloned()).collect();
        Change::Now { boot_ns, processes, holds }
    }

    /// What a reader who comes now has to know: who holds what at this moment and came from whom. With the time of what
    /// happened before.
    pub fn preamble(&self) -> Vec<(Option<u64>, What)> {
        let ancestors = self.ancestors.values().cloned();
        let mut list: Vec<_> = ancestors.map(|process| (None, What::Process(Box::new(process)))).collect();
        for life in self.live.values().filter(|life| !life.closed && !life.holds.is_empty()) {
            let row = life.row.clone();
            for hold in life.holds.values().filter(|hold| hold.origin == HoldOrigin::Opened) {
                let (comm, node) = (row.comm.clone(), hold.node.clone());
                let open = FileEvent { key: Some(row.key), tid: None, comm, node, file: 0, failed: false };
                list.push((Some(hold.opened_ns), What::Open(open)));
            }
            let devices = life.holds.values().map(|hold| HeldDevice {
                node: hold.node.clone(),
                fds: hold.fds,
                maps: hold.maps,
                role: hold.role,
                first_ns: Some(hold.opened_ns),
            });
            let held = Held {
                key: row.key,
                inherited_from: life.holds.values().find_map(|hold| hold.inherited_from),
                from_snapshot: life.holds.values().any(|hold| hold.origin == HoldOrigin::Snapshot),
                devices: devices.collect(),
            };
            list.push((None, What::Held(held)));
            let process = Process {
                key: row.key,
                comm: row.comm,
                argv: row.argv,
                argv_cut: row.argv_cut,
                exe: row.exe,
                uid: row.uid,
                user: row.user,
                class: row.class,
                nspids: row.nspids,
                place: row.place,
                env: row.env,
                threads: life.seen.threads.clone(),
                parent: row.parent,
                ancestor: false,
                exit: None,
            };
            list.push((None, What::Process(Box::new(process))));
        }
        list
    }

    /// The ancestors of one who holds or has just died, as far as they hold nothing themselves, that are not known to have
    /// ended.
    pub fn living_ancestors(&self, key: Key) -> Vec<Process> {
        let mut list = Vec::new();
        let mut seen = BTreeSet::from([key]);
        let mut next = self.process(key).and_then(|row| row.parent);
        while let Some(key) = next.filter(|key| seen.insert(*key)) {
            next = self.process(key).and_then(|row| row.parent);
            if let Some(process) = self.ancestors.get(&key) {
                next = next.or(process.parent);
                if process.exit.is_none() {
                    list.push(process.clone());
                }
            }
        }
        list
    }

    pub fn has_exited(&self, key: Key) -> bool {
        self.live.get(&key).is_none_or(|life| life.row.exit_ns.is_some())
    }

    /// Whether who that is has been read.
    pub fn is_known(&self, key: Key) -> bool {
        self.live.get(&key).is_some_and(|life| life.known)
    }

    pub fn process(&self, key: Key) -> Option<&ProcessRow> {
        self.live.get(&key).map(|life| &life.row)
    }

    pub fn apply(&mut self, event: &Event) -> Vec<Change> {
        let Event { time: _, boot_ns, what } = event;
        let now = *boot_ns;
        let mut changes = Vec::new();
        let mut keep = true;
        match what {
            What::Start(start) => changes.push(begin(now, start)),
            What::Stop => changes.push(Change::Stop { boot_ns: now }),
            What::Open(open) => {
                keep = false;
                self.open(now, open);
            }
            What::Close(close) => {
                keep = false;
                if let Some(life) = close.key.and_then(|key| self.live.get_mut(&key)) {
                    life.closes.insert(close.node.clone(), now);
                }
            }
            What::Free(free) => {
                keep = false;
                self.free(free);
            }
            What::Held(held) => keep = self.held(now, held, &mut changes),
            What::Fork(fork) => keep = self.fork(fork),
            What::Exec(exec) => {
                keep = false;
                if let Some(life) = self.live.get_mut(&exec.key) {
                    // Who it is now is read anew.
                    life.known = false;
                    life.row.comm.clone_from(&exec.comm);
                    keep = true;
                    life.tell(&mut changes);
                }
            }
            What::Thread(thread) => {
                keep = false;
                self.thread(thread, &mut changes);
            }
            What::Process(process) => {
                keep = false;
                self.process_facts(process, &mut changes);
            }
            What::Signal(signal) => keep = self.signal(now, signal, &mut changes),
            What::Oom(oom) => self.oom(now, oom, &mut changes),
            What::Reap(reap) => {
                if let Some(life) = self.live.get_mut(&reap.key) {
                    life.seen.reaps.push((now, reap.clone()));
                    life.revise(&mut changes);
                }
            }
            What::Exit(exit) => keep = self.exit(now, exit, &mut changes),
            What::Closed(subject) => {
                if let Some(life) = self.live.get_mut(&subject.key) {
                    life.release(now, &mut changes);
                    if !life.closed {
                        life.closed = true;
                        self.closed.push_back(subject.key);
                    }
                } else {
                    keep = false;
                }
            }
            What::Xid(_) | What::Peer(_) | What::Memory(_) | What::Lost(_) => {}
        }
        if keep {
            changes.push(Change::Event(event.clone()));
        }
        self.settle(now);
        changes
    }

    /// Lets go of whom no evidence is waited for any more.
    fn settle(&mut self, now: u64) {
        while let Some(key) = self.closed.front().copied() {
            let old = |at: u64| now.saturating_sub(at) > SETTLE_NS;
            let waits = self.live.get(&key).is_some_and(|life| !life.known || !life.row.exit_ns.is_none_or(old));
            // Who closed later has waited less.
            if waits && self.closed.len() <= CLOSED {
                break;
            }
            self.live.remove(&key);
            self.closed.pop_front();
        }
        self.victims.retain(|_, (at, _)| now.saturating_sub(*at) <= SETTLE_NS);
    }

    fn life(&mut self, key: Key) -> &mut Life {
        self.live.entry(key).or_insert_with(|| Life::new(key))
    }

    fn open(&mut self, now: u64, open: &FileEvent) {
        let Some(key) = open.key else { return };
        let life = self.life(key);
        if life.row.comm.is_empty() {
            life.row.comm.clone_from(&open.comm);
        }
        let opens = life.opens.entry(open.node.clone()).or_insert_with(|| Opens { first_ns: now, files: Vec::new() });
        opens.first_ns = opens.first_ns.min(now);
        // One file is enough to know that something was opened.
        if opens.files.len() < 4 {
            opens.files.push(open.file);
        }
    }

    /// A file that failed to open was never held.
    fn free(&mut self, free: &FileEvent) {
        if !free.failed {
            return;
        }
        let Some(life) = free.key.and_then(|key| self.live.get_mut(&key)) else { return };
        if let Some(opens) = life.opens.get_mut(&free.node) {
            opens.files.retain(|file| *file != free.file);
            if opens.files.is_empty() {
                life.opens.remove(&free.node);
            }
        }
    }

    /// A look. Says whether anything is different from the last one.
    fn held(&mut self, now: u64, held: &Held, changes: &mut Vec<Change>) -> bool {
        let Held { key, inherited_from, from_snapshot, devices } = held;
        if devices.is_empty() && !self.live.contains_key(key) {
            return false;
        }
        let life = self.life(*key);
        if life.row.exit_ns.is_some() {
            // It was looked at before its exit was read: what it held ends with that.
            return false;
        }
        let mut differs = false;
        let gone: Vec<String> =
            life.holds.keys().filter(|node| !devices.iter().any(|device| device.node == **node)).cloned().collect();
        for node in gone {
            let Some(mut hold) = life.holds.remove(&node) else { continue };
            let closed = life.closes.remove(&node).filter(|at| *at >= hold.opened_ns && *at <= now);
            hold.released_ns = Some(closed.unwrap_or(now));
            hold.ended = Some(HoldEnd::Closed);
            changes.push(Change::Hold(hold));
            differs = true;
        }
        for HeldDevice { node, fds, maps, role, first_ns } in devices {
            if let Some(hold) = life.holds.get_mut(node) {
                let before = hold.clone();
                hold.fds = hold.fds.max(*fds);
                hold.maps = hold.maps.max(*maps);
                hold.role = role.map_or(hold.role, |role| Some(hold.role.map_or(role, |old| old.min(role))));
                if *hold != before {
                    changes.push(Change::Hold(hold.clone()));
                }
                continue;
            }
            let opens = life.opens.remove(node);
            let origin = match (&opens, inherited_from, from_snapshot) {
                (Some(_), ..) => HoldOrigin::Opened,
                (None, _, true) => HoldOrigin::Snapshot,
                (None, Some(_), _) => HoldOrigin::Inherited,
                (None, None, _) => HoldOrigin::Received,
            };
            let opened_ns = opens.map(|opens| opens.first_ns).or(*first_ns).unwrap_or(now).min(now);
            let hold = HoldRow {
                key: *key,
                node: node.clone(),
                opened_ns,
                released_ns: None,
                ended: None,
                origin,
                fds: *fds,
                maps: *maps,
                role: *role,
                inherited_from: *inherited_from,
            };
            life.holds.insert(node.clone(), hold.clone());
            if !life.told {
                life.tell(changes);
            }
            changes.push(Change::Hold(hold));
            differs = true;
        }
        // What was opened and is not held is closed again, or failed.
        life.opens.retain(|_, opens| opens.first_ns > now);
        if life.holds.is_empty() && life.opens.is_empty() {
            // Nothing keeps it here; if it opens again it comes back.
            if life.seen.signals.is_empty() {
                self.live.remove(key);
            }
        }
        differs
    }

    fn fork(&mut self, fork: &Fork) -> bool {
        let Fork { key, parent, comm } = fork;
        let Some(from) = self.live.get(parent) else { return false };
        if from.holds.is_empty() && from.opens.is_empty() {
            return false;
        }
        let life = self.life(*key);
        life.row.comm.clone_from(comm);
        life.row.parent = Some(*parent);
        true
    }

    fn thread(&mut self, event: &ThreadEvent, changes: &mut Vec<Change>) {
        let ThreadEvent { key, thread } = event;
        let Some(life) = self.live.get_mut(key) else { return };
        if thread.tid == key.pid {
            life.row.comm.clone_from(&thread.name);
        }
        if life.name_thread(thread) && life.told {
            // Names come in bursts; they are written with the next change of the process, at the latest with its death.
            life.row.threads.clone_from(&life.seen.threads);
            if life.row.threads.len().is_multiple_of(64) {
                life.tell(changes);
            }
        }
    }

    fn process_facts(&mut self, process: &Process, changes: &mut Vec<Change>) {
        let found = ProcessRow::from(process.clone());
        if found.ancestor {
            self.remember_ancestor(process);
            if !self.live.contains_key(&found.key) {
                changes.push(Change::Process(Box::new(found)));
            }
            return;
        }
        let ProcessRow {
            key, comm, argv, argv_cut, exe, uid, user, class, nspids, place, env, threads, parent, ..
        } = found;
        let Some(life) = self.live.get_mut(&key) else { return };
        let row = &mut life.row;
        row.comm = comm;
        if !argv.is_empty() {
            (row.argv, row.argv_cut) = (argv, argv_cut);
        }
        row.exe = exe.or(row.exe.take());
        row.uid = uid.or(row.uid);
        row.user = user.or(row.user.take());
        row.class = class.or(row.class.take());
        if !nspids.is_empty() {
            row.nspids = nspids;
        }
        row.place = place;
        if !env.is_empty() {
            row.env = env;
        }
        row.parent = row.parent.or(parent);
        for thread in &threads {
            life.name_thread(thread);
        }
        life.known = true;
        if life.told || !life.holds.is_empty() {
            life.tell(changes);
        }
    }

    fn remember_ancestor(&mut self, process: &Process) {
        if self.ancestors.len() >= ANCESTORS {
            let mut used = BTreeSet::new();
            for life in self.live.values() {
                let mut next = life.row.parent;
                while let Some(key) = next.filter(|key| used.insert(*key)) {
                    next = self.ancestors.get(&key).and_then(|process| process.parent);
                }
            }
            self.ancestors.retain(|key, _| used.contains(key));
        }
        if self.ancestors.len() < ANCESTORS {
            self.ancestors.insert(process.key, process.clone());
        }
    }

    fn signal(&mut self, now: u64, signal: &Signal, changes: &mut Vec<Change>) -> bool {
        let Some(life) = self.live.get_mut(&signal.key) else { return false };
        let signals = &mut life.seen.signals;
        if signals.len() == SIGNALS {
            // The first ones and the last ones tell most.
            signals.remove(SIGNALS / 2);
        }
        signals.push((now, signal.clone()));
        signals.sort_by_key(|(at, _)| *at);
        // An out-of-memory victim may be told as a thread, which this says the process of.
        if let Some((at, oom)) = self.victims.remove(&signal.tid) {
            life.seen.ooms.push((at, oom));
        }
        life.revise(changes);
        true
    }

    fn oom(&mut self, now: u64, oom: &Oom, changes: &mut Vec<Change>) {
        let found = oom.key.filter(|key| self.live.contains_key(key)).or_else(|| {
            let has = |life: &Life| {
                life.row.key.pid == oom.tid
                    || life.seen.signals.iter().any(|(_, signal)| signal.tid == oom.tid)
                    || life.seen.threads.iter().any(|thread| thread.tid == oom.tid)
            };
            self.live.iter().find(|(_, life)| has(life)).map(|(key, _)| *key)
        });
        match found.and_then(|key| self.live.get_mut(&key)) {
            Some(life) => {
                life.seen.ooms.push((now, oom.clone()));
                life.revise(changes);
            }
            None => {
                self.victims.insert(oom.tid, (now, oom.clone()));
            }
        }
    }

    fn exit(&mut self, now: u64, exit: &Exit, changes: &mut Vec<Change>) -> bool {
        let Exit { key, tid: _, comm, status } = exit;
        let Some(life) = self.live.get_mut(key) else { return false };
        // What has been recorded of an end stays.
        life.row.exit_ns.get_or_insert(now);
        life.row.status.get_or_insert(*status);
        if life.row.comm.is_empty() {
            life.row.comm.clone_from(comm);
        }
        // Over before anybody could look.
        for (node, Opens { first_ns, files }) in std::mem::take(&mut life.opens) {
            let origin = if files.iter().any(|file| *file != 0) { HoldOrigin::Opened } else { HoldOrigin::Unconfirmed };
            let hold = HoldRow {
                key: *key,
                node: node.clone(),
                opened_ns: first_ns,
                released_ns: None,
                ended: None,
                origin,
                fds: 0,
                maps: 0,
                role: None,
                inherited_from: None,
            };
            life.holds.entry(node).or_insert_with(|| {
                changes.push(Change::Hold(hold.clone()));
                hold
            });
        }
        if life.holds.is_empty() && !life.told {
            // It was forked by a holder and held nothing.
            self.live.remove(key);
            return false;
        }
        life.revise(changes);
        // The process comes before its holds in the journal.
        if let Some(at) = changes.iter().position(|change| matches!(change, Change::Process(_))) {
            changes[..=at].rotate_right(1);
        }
        true
    }
}

impl Life {
    fn new(key: Key) -> Self {
        Self { row: ProcessRow { key, ..ProcessRow::default() }, ..Self::default() }
    }

    fn tell(&mut self, changes: &mut Vec<Change>) {
        self.told = true;
        self.row.threads.clone_from(&self.seen.threads);
        changes.push(Change::Process(Box::new(self.row.clone())));
    }

    /// Says whether the name is new.
    fn name_thread(&mut self, thread: &Thread) -> bool {
        let threads = &mut self.seen.threads;
        if let Some(known) = threads.iter_mut().find(|known| known.tid == thread.tid) {
            let new = known.name != thread.name;
            known.name.clone_from(&thread.name);
            return new;
        }
        if threads.len() < THREADS {
            threads.push(thread.clone());
        }
        true
    }

    /// Decides again how it ended, if it has.
    fn revise(&mut self, changes: &mut Vec<Change>) {
        let (Some(exit_ns), Some(status)) = (self.row.exit_ns, self.row.status) else { return };
        let death = death::decide(self.row.key, exit_ns, status, &self.seen);
        if self.row.death.as_ref() != Some(&death) {
            self.row.death = Some(death);
            self.tell(changes);
        }
    }

    fn release(&mut self, now: u64, changes: &mut Vec<Change>) {
        let ended = if self.row.exit_ns.is_some() { HoldEnd::Exited } else { HoldEnd::Unseen };
        for (_, mut hold) in std::mem::take(&mut self.holds) {
            hold.released_ns = Some(now);
            hold.ended = Some(ended);
            changes.push(Change::Hold(hold));
        }
    }
}

fn begin(now: u64, start: &Start) -> Change {
    let Start { boot_id, host, kernel, version, backend, adopted, daemon_pid, wall_offset_ns, devices } = start.clone();
    let boot = Boot { boot_id, host, kernel, wall_offset_ns, last_ns: now };
    let backend = crate::out::words::word(&backend);
    let run = Run { version, pid: daemon_pid, backend, adopted, begin_ns: now, end_ns: None };
    Change::Start { boot, run, devices }
}

#[cfg(test)]
mod tests;
