//! From what the journal has to the report. Pure: the same records and the same question give the same report.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use jiff::Timestamp;

use super::{
    death::{self, Seen},
    event::{Event, Lost, Relative, Sender, What},
    incident,
    report::{
        AncestorReport, DeathReport, DeviceReport, Gap, HoldReport, HostReport, HostState, OomReport, ProcessReport,
        Report, SCHEMA, SenderReport, Who, XidReport,
    },
    rows::{Boot, Death, HoldEnd, HoldRow, Key, Place, ProcessRow, Record, Run},
    xid,
};
use crate::{
    clock::{self, NANOS},
    holders::report::ExitReport,
    model::DeviceKind,
};

/// Longer chains are a mistake or an attack.
const MAX_DEPTH: usize = 64;
/// A process that was killed so long before an Xid may have caused it.
const KILL_BEFORE_XID_NS: u64 = 10 * NANOS;

/// What is asked.
#[derive(Clone, Debug, PartialEq)]
pub struct Ask {
    pub now: Timestamp,
    pub since: Timestamp,
    pub until: Timestamp,
    pub at: Option<Timestamp>,
    /// The boot that this host is in: its record goes on.
    pub running: Option<String>,
    /// GPUs by node; `None`: all.
    pub nodes: Option<BTreeSet<String>>,
    /// Processes, with those below them and those of their incidents; none: all.
    pub pids: Vec<u32>,
}

/// One boot's record with what is looked up in it.
pub(super) struct Book<'a> {
    pub(super) record: &'a Record,
    pub(super) state: HostState,
    rows: HashMap<Key, &'a ProcessRow>,
}

pub fn wall(boot: &Boot, boot_ns: u64) -> Timestamp {
    to_microseconds(clock::wall(boot.wall_offset_ns, boot_ns))
}

/// As exactly as the two clocks can be compared.
pub fn to_microseconds(time: Timestamp) -> Timestamp {
    time.round(jiff::Unit::Microsecond).unwrap_or(time)
}

impl<'a> Book<'a> {
    fn new(record: &'a Record, ask: &Ask) -> Self {
        let ended = record.runs.last().is_some_and(|run| run.end_ns.is_some());
        let state = match (ask.running.as_ref() == Some(&record.boot.boot_id), ended) {
            (_, true) => HostState::Stopped,
            (true, false) => HostState::Running,
            (false, false) => HostState::Down,
        };
        let rows = record.processes.iter().map(|row| (row.key, row)).collect();
        Self { record, state, rows }
    }

    pub(super) fn wall(&self, boot_ns: u64) -> Timestamp {
        wall(&self.record.boot, boot_ns)
    }

    pub(super) fn who(&self, key: Key) -> Who {
        let Boot { boot_id, host, .. } = &self.record.boot;
        Who { host: host.clone(), boot_id: boot_id.clone(), pid: key.pid, start_ns: key.start_ns }
    }

    /// Machines that were cloned while they ran share the id of their boot.
    pub(super) fn is_of(&self, who: &Who) -> bool {
        let Boot { boot_id, host, .. } = &self.record.boot;
        (host, boot_id) == (&who.host, &who.boot_id)
    }

    pub(super) fn row(&self, key: Key) -> Option<&'a ProcessRow> {
        self.rows.get(&key).copied()
    }

    /// When a hold ended, as far as the record goes: a host that is down holds nothing any more.
    pub(super) fn end(&self, hold: &HoldRow) -> (Option<u64>, Option<HoldEnd>) {
        match (hold.released_ns, self.state) {
            (Some(at), _) => (Some(at), hold.ended),
            (None, HostState::Running) => (None, None),
            (None, HostState::Down) => (Some(self.record.boot.last_ns.max(hold.opened_ns)), Some(HoldEnd::HostDown)),
            // The daemon was told to stop; what came then nobody knows.
            (None, HostState::Stopped) => (None, Some(HoldEnd::Unseen)),
        }
    }

    /// How it ended; of one that held when the record ends, that.
    pub(super) fn death(&self, row: &ProcessRow) -> Option<Death> {
        if row.death.is_some() {
            return row.death.clone();
        }
        let held = || self.record.holds.iter().any(|hold| hold.key == row.key && hold.released_ns.is_none());
        if let (Some(exit_ns), Some(status)) = (row.exit_ns, row.status) {
            return Some(death::decide(row.key, exit_ns, status, &Seen::default()));
        }
        let Boot { wall_offset_ns, last_ns, .. } = self.record.boot;
        (self.state == HostState::Down && held()).then(|| death::of_boot(wall_offset_ns, last_ns, None).1)
    }

    /// From its parent upwards.
    pub(super) fn lineage(&self, row: &ProcessRow) -> Vec<AncestorReport> {
        let mut list = Vec::new();
        let mut seen = BTreeSet::from([row.key]);
        let mut next = row.parent;
        while let Some(row) =
            next.filter(|key| list.len() < MAX_DEPTH && seen.insert(*key)).and_then(|key| self.row(key))
        {
            next = row.parent;
            list.push(AncestorReport {
                pid: row.key.pid,
                start_ns: row.key.start_ns,
                comm: row.comm.clone(),
                argv: row.argv.clone(),
                exit: row.status.map(ExitReport::from_status),
            });
        }
        list
    }

    pub(super) fn is_gpu(&self, node: &str) -> bool {
        let device = self.record.devices.iter().find(|device| device.node == node);
        device.is_none_or(|device| device.kind.is_gpu())
    }
}

pub fn build(records: &[Record], ask: &Ask) -> Report {
    let Ask { now, since, until, at, running: _, nodes, pids } = ask;
    let mut books: Vec<Book<'_>> = records.iter().map(|record| Book::new(record, ask)).collect();
    books.sort_by_key(|book| (book.record.boot.wall_offset_ns, book.record.boot.host.clone()));
    let overlaps = |book: &Book<'_>, hold: &HoldRow| {
        let opened = book.wall(hold.opened_ns);
        let released = book.end(hold).0.map(|ns| book.wall(ns));
        match at {
            Some(at) => opened <= *at && released.is_none_or(|released| released > *at),
            None => opened <= *until && released.is_none_or(|released| released >= *since),
        }
    };
    let wanted = |book: &Book<'_>, hold: &HoldRow| {
        overlaps(book, hold) && nodes.as_ref().is_none_or(|nodes| nodes.contains(&hold.node))
    };
    let mut report = Report {
        schema: SCHEMA.to_owned(),
        time: *now,
        since: *since,
        until: *until,
        at: *at,
        hosts: books.iter().map(host).collect(),
        devices: Vec::new(),
        incidents: Vec::new(),
        holds: Vec::new(),
        processes: Vec::new(),
        xids: Vec::new(),
        gaps: Vec::new(),
        notes: Vec::new(),
    };
    // Whose life touches the window; with a choice of GPUs, who held one of them.
    let mut chosen: Vec<BTreeSet<Key>> = Vec::new();
    for book in &books {
        let mut keys: BTreeSet<Key> =
            book.record.holds.iter().filter(|hold| wanted(book, hold)).map(|hold| hold.key).collect();
        if !pids.is_empty() {
            let is_below = |key: &Key| {
                pids.contains(&key.pid)
                    || book.row(*key).is_some_and(|row| book.lineage(row).iter().any(|row| pids.contains(&row.pid)))
            };
            let named: BTreeSet<Key> = keys.iter().filter(|key| is_below(key)).copied().collect();
            keys = named;
        }
        chosen.push(keys);
    }
    for (book, keys) in books.iter().zip(&chosen) {
        xids(book, since, until, nodes.as_ref(), &mut report.xids);
        gaps(book, since, until, &mut report.gaps);
        for key in keys {
            if let Some(row) = book.row(*key) {
                report.processes.push(process(book, row));
            }
        }
    }
    report.xids.sort_by_key(|xid| xid.time);
    report.gaps.sort_by_key(|gap| gap.from);
    if at.is_none() {
        report.incidents = incident::find(&books, &chosen, ask, &report.xids);
    }
    // A process's incident may bring in others of its job.
    let members: BTreeSet<Who> = report.processes.iter().map(|process| process.who.clone()).collect();
    for member in report.incidents.iter().flat_map(|incident| &incident.processes) {
        if !members.contains(&member.who)
            && !report.processes.iter().any(|process| process.who == member.who)
            && let Some((book, row)) = find(&books, &member.who)
        {
            report.processes.push(process(book, row));
        }
    }
    for process in &mut report.processes {
        let has = |incident: &&super::report::Incident| {
            incident.processes.iter().any(|member| member.who == process.who && member.cause.is_some())
        };
        process.incident = report.incidents.iter().find(has).map(|incident| incident.id);
    }
    report.processes.sort_by(|a, b| (a.started, &a.who).cmp(&(b.started, &b.who)));
    let shown: BTreeSet<Who> = report.processes.iter().map(|process| process.who.clone()).collect();
    for book in &books {
        for row in &book.record.holds {
            if shown.contains(&book.who(row.key)) && overlaps(book, row) {
                report.holds.push(hold(book, row));
            }
        }
        let used: BTreeSet<&str> = book.record.holds.iter().map(|hold| hold.node.as_str()).collect();
        for device in &book.record.devices {
            let super::event::Device { node, major: _, minor: _, kind, gpu, index, uuid, bdf, model } = device.clone();
            let in_choice = nodes.as_ref().is_none_or(|nodes| nodes.contains(&node)) && device.kind.is_gpu();
            let known = report.devices.iter().any(|other| other.host == book.record.boot.host && other.node == node);
            if (in_choice || used.contains(node.as_str())) && !known {
                let host = book.record.boot.host.clone();
                report.devices.push(DeviceReport { host, node, kind, gpu, index, uuid, bdf, model });
            }
        }
    }
    report.holds.sort_by(|a, b| (a.opened, &a.who, &a.node).cmp(&(b.opened, &b.who, &b.node)));
    report.devices.sort_by(|a, b| {
        let rank = |device: &DeviceReport| {
            (device.host.clone(), device.kind != DeviceKind::Gpu, device.gpu, device.node.clone())
        };
        rank(a).cmp(&rank(b))
    });
    if books.iter().any(|book| book.record.runs.last().is_some_and(|run| run.backend == "gate")) {
        report.notes.push(
            "recorded with `gate`: the time at which a process that lives on closed a device is known to within seconds"
                .to_owned(),
        );
    }
    report
}

fn find<'a, 'b>(books: &'b [Book<'a>], who: &Who) -> Option<(&'b Book<'a>, &'a ProcessRow)> {
    let book = books.iter().find(|book| book.is_of(who))?;
    Some((book, book.row(Key { pid: who.pid, start_ns: who.start_ns })?))
}

fn host(book: &Book<'_>) -> HostReport {
    let Boot { boot_id, host, kernel, wall_offset_ns, last_ns } = &book.record.boot;
    let starts = book.record.events.iter().filter_map(|event| match &event.what {
        What::Start(start) => Some(start.wall_offset_ns),
        _ => None,
    });
    let first = starts.min_by_key(|offset| (offset - wall_offset_ns).abs()).unwrap_or(*wall_offset_ns);
    HostReport {
        host: host.clone(),
        boot_id: boot_id.clone(),
        kernel: kernel.clone(),
        booted: book.wall(0),
        last: book.wall(*last_ns),
        state: book.state,
        clock_moved_ms: (wall_offset_ns - first) / 1_000_000,
    }
}

fn hold(book: &Book<'_>, row: &HoldRow) -> HoldReport {
    let HoldRow { key, node, opened_ns, released_ns: _, ended: _, origin, fds, maps, role, inherited_from } = row;
    let (released, ended) = book.end(row);
    HoldReport {
        who: book.who(*key),
        comm: book.row(*key).map(|row| row.comm.clone()).unwrap_or_default(),
        node: node.clone(),
        opened: book.wall(*opened_ns),
        released: released.map(|at| book.wall(at)),
        ended,
        origin: *origin,
        fds: *fds,
        maps: *maps,
        role: *role,
        inherited_from: inherited_from.map(|key| key.pid),
    }
}

fn process(book: &Book<'_>, row: &ProcessRow) -> ProcessReport {
    let lineage = book.lineage(row);
    let death = book.death(row).map(|death| death_report(book, death));
    let ProcessRow {
        key,
        comm,
        argv,
        argv_cut,
        exe,
        uid,
        user,
        class,
        nspids,
        place,
        env,
        threads,
        parent: _,
        ancestor: _,
        exit_ns,
        status,
        death: _,
    } = row.clone();
    let Place { cgroup, unit, container, container_name, image, slurm_job, slurm_step, pod, pod_name, pod_namespace } =
        place;
    let own = || book.record.holds.iter().filter(|hold| hold.key == key);
    let open = own().any(|hold| book.end(hold).0.is_none());
    let closed = own().filter_map(|hold| book.end(hold).0).max().filter(|_| !open && exit_ns.is_some());
    ProcessReport {
        who: book.who(key),
        started: book.wall(key.start_ns),
        nspids,
        comm,
        argv,
        argv_cut,
        exe,
        uid,
        user,
        class,
        cgroup,
        unit,
        container,
        container_name,
        image,
        slurm_job,
        slurm_step,
        pod,
        pod_name,
        pod_namespace,
        env,
        threads,
        lineage,
        exited: exit_ns.map(|at| book.wall(at)),
        closed: closed.map(|at| book.wall(at)),
        exit: status.map(ExitReport::from_status),
        death,
        incident: None,
    }
}

fn death_report(book: &Book<'_>, death: Death) -> DeathReport {
    let Death { cause, code, signal, core, boot_ns, sender, thread, oom, evidence } = death;
    DeathReport {
        cause,
        code,
        signal,
        core,
        time: boot_ns.map(|at| book.wall(at)),
        sender: sender.map(sender_report),
        thread,
        oom: oom.map(|oom| OomReport { scope: oom.scope, cgroup: oom.cgroup }),
        evidence,
    }
}

fn sender_report(sender: Sender) -> SenderReport {
    let Sender { key, tid, thread, comm, argv, uid, gpureap: _, lineage } = sender;
    let lineage = lineage.into_iter().map(|Relative { key, comm, argv }| AncestorReport {
        pid: key.pid,
        start_ns: key.start_ns,
        comm,
        argv,
        exit: None,
    });
    let user = crate::process::users::name_of(uid);
    SenderReport {
        pid: key.pid,
        start_ns: key.start_ns,
        tid,
        thread,
        comm,
        argv,
        uid,
        user,
        lineage: lineage.collect(),
    }
}

fn xids(
    book: &Book<'_>,
    since: &Timestamp,
    until: &Timestamp,
    nodes: Option<&BTreeSet<String>>,
    list: &mut Vec<XidReport>,
) {
    for event in &book.record.events {
        let Event { time: _, boot_ns, what: What::Xid(xid) } = event else { continue };
        let time = book.wall(*boot_ns);
        let in_choice = nodes.is_none_or(|nodes| xid.node.as_ref().is_some_and(|node| nodes.contains(node)));
        if time < *since || time > *until || !in_choice {
            continue;
        }
        let holds = |hold: &&HoldRow| {
            Some(&hold.node) == xid.node.as_ref()
                && hold.opened_ns <= *boot_ns
                && book.end(hold).0.is_none_or(|at| at >= *boot_ns)
        };
        let holders: BTreeSet<Key> = book.record.holds.iter().filter(holds).map(|hold| hold.key).collect();
        let killed = |row: &&ProcessRow| {
            row.exit_ns.is_some_and(|at| at <= *boot_ns && boot_ns - at <= KILL_BEFORE_XID_NS)
                && row.status.is_some_and(|status| status & 0x7f != 0)
        };
        let named = |row: &&ProcessRow| xid.pid.map_or_else(|| holders.contains(&row.key), |pid| row.key.pid == pid);
        let was_killed = book.record.processes.iter().filter(named).any(|row| killed(&row));
        let (class, meaning) = xid::classify(xid.xid, was_killed);
        list.push(XidReport {
            host: book.record.boot.host.clone(),
            time,
            xid: xid.clone(),
            class,
            meaning: meaning.to_owned(),
            holders: holders.into_iter().map(|key| book.who(key)).collect(),
        });
    }
}

/// Times without a daemon, and losses.
fn gaps(book: &Book<'_>, since: &Timestamp, until: &Timestamp, list: &mut Vec<Gap>) {
    let Boot { boot_id, host, .. } = &book.record.boot;
    let mut add = |from: u64, to: Option<u64>, events, note: String| {
        let (from, to) = (book.wall(from), to.map(|to| book.wall(to)));
        if from <= *until && to.is_none_or(|to| to >= *since) {
            list.push(Gap { host: host.clone(), boot_id: boot_id.clone(), from, to, events, note });
        }
    };
    for pair in book.record.runs.windows(2) {
        let [before, after] = pair else { continue };
        let Run { begin_ns, end_ns, .. } = before;
        // What the ring had kept is recorded after the start, with the times at which it happened.
        let events = &book.record.events;
        let start = events
            .iter()
            .position(|event| matches!(event.what, What::Start(_)) && event.boot_ns == after.begin_ns)
            .unwrap_or(events.len());
        let last = events[..start].iter().map(|event| event.boot_ns).filter(|at| *at < after.begin_ns).max();
        let from = end_ns.or(last).unwrap_or(*begin_ns);
        let note = if after.adopted {
            "no daemon ran; the kernel went on counting, and what its ring had room for was recorded afterwards"
        } else {
            "no daemon ran and nothing was traced"
        };
        add(from, Some(after.begin_ns), None, note.to_owned());
    }
    for event in &book.record.events {
        if let What::Lost(Lost { events, at: _, note }) = &event.what {
            add(event.boot_ns, Some(event.boot_ns), Some(*events), note.clone());
        }
    }
}

/// What others did when one of these was about to die, by process; the first look at each tells most.
pub(super) fn peers<'a>(book: &Book<'a>, of: &BTreeSet<Key>) -> BTreeMap<Key, &'a super::event::Peer> {
    let mut peers = BTreeMap::new();
    for event in &book.record.events {
        if let What::Peer(peer) = &event.what
            && of.contains(&peer.of)
        {
            peers.entry(peer.key).or_insert(peer);
        }
    }
    peers
}

#[cfg(test)]
mod tests;
