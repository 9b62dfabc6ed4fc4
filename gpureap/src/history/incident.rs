//! Which deaths belong together, who died first, and who followed. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use jiff::{SignedDuration, Timestamp};

use super::{
    build::{Ask, Book, peers},
    event::{OomScope, Sender},
    report::{
        AncestorReport, Group, GroupBy, HeldNode, Incident, IncidentCause, Member, Part, Who, XidClass, XidReport,
    },
    rows::{Boot, Cause, Death, HoldRow, Key, ProcessRow, Thread},
};
use crate::out::{
    sanitize::escape,
    words::{plural, short_command},
};

/// Two deaths of one job that are farther apart are two incidents.
const APART: SignedDuration = SignedDuration::from_secs(120);
/// A watchdog waits for its time limit, by default 10 minutes and often more, before it ends its process.
const WATCHDOG_APART: SignedDuration = SignedDuration::from_mins(40);
/// An Xid belongs to the deaths that it is so close to.
const XID_NEAR: SignedDuration = SignedDuration::from_secs(60);
/// Threads that end their process because a collective operation did not come to its end (PyTorch, NCCL).
const WATCHDOGS: [&str; 3] = ["pt_nccl_watchdg", "pt_nccl_heartbt", "pt_watchdog"];
/// Where the tree of a job ends above: shells that somebody types into are told by their arguments, these by their names.
const NO_JOB: [&str; 18] = [
    "systemd",
    "init",
    "sshd",
    "login",
    "su",
    "sudo",
    "tmux",
    "tmux: server",
    "screen",
    "cron",
    "crond",
    "dockerd",
    "containerd",
    "containerd-shim",
    "conmon",
    "slurmd",
    "slurmstepd",
    "kubelet",
];
const SHELLS: [&str; 7] = ["bash", "sh", "dash", "zsh", "fish", "ksh", "tcsh"];

/// A group with the host and boot that it is of, unless it may reach over several.
type GroupKey<'a> = (GroupBy, String, Option<(&'a str, &'a str)>);

/// A process of the window.
struct Person<'a> {
    book: &'a Book<'a>,
    row: &'a ProcessRow,
    who: Who,
    rank: Option<u32>,
    group: Group,
    died: Option<(Timestamp, Death)>,
}

impl Person<'_> {
    fn is_abnormal(&self) -> bool {
        self.died
            .as_ref()
            .is_some_and(|(_, death)| death.cause != Cause::Exited || death.code.is_some_and(|code| code != 0))
    }

    fn by_watchdog(&self) -> bool {
        self.died.as_ref().and_then(|(_, death)| death.thread.as_ref()).is_some_and(is_watchdog)
    }

    /// `rank 3 (pid 976)`, `python3 (pid 976)`.
    fn name(&self) -> String {
        let host = if self.who.host.is_empty() { String::new() } else { format!(" on {}", escape(&self.who.host)) };
        match self.rank {
            Some(rank) => format!("rank {rank}, {} (pid {}{host})", escape(&self.row.comm), self.who.pid),
            None => format!("{} (pid {}{host})", escape(&self.row.comm), self.who.pid),
        }
    }
}

fn is_watchdog(thread: &Thread) -> bool {
    WATCHDOGS.contains(&thread.name.as_str())
}

/// By whichever launcher gave it.
pub(crate) fn rank(row: &ProcessRow) -> Option<u32> {
    ["RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"]
        .iter()
        .find_map(|name| row.env.get(*name)?.parse().ok())
}

/// By its cgroup, or by what it was given.
pub(crate) fn slurm_job(row: &ProcessRow) -> Option<&str> {
    row.place.slurm_job.as_deref().or_else(|| row.env.get("SLURM_JOB_ID").map(String::as_str))
}

/// Ranks that meet at one place are one job: `10.0.0.7:29500, 8 ranks`.
pub(crate) fn rank_set(row: &ProcessRow) -> Option<String> {
    let (address, port) = (row.env.get("MASTER_ADDR")?, row.env.get("MASTER_PORT")?);
    let size = row.env.get("WORLD_SIZE").map_or("?", String::as_str);
    Some(format!("{address}:{port}, {size} ranks"))
}

/// What ties it to others: the strongest there is.
fn group(book: &Book<'_>, row: &ProcessRow) -> Group {
    let place = &row.place;
    let of = |by, name: &str| Group { by, name: name.to_owned() };
    if let Some(job) = slurm_job(row) {
        return of(GroupBy::SlurmJob, job);
    }
    if let Some(ranks) = rank_set(row) {
        return of(GroupBy::RankSet, &ranks);
    }
    if let Some(pod) = place.pod_name.as_deref().or(place.pod.as_deref()) {
        return of(GroupBy::Pod, pod);
    }
    if let Some(container) = place.container_name.as_deref().or(place.container.as_deref()) {
        return of(GroupBy::Container, container);
    }
    let mut root = None;
    for ancestor in book.lineage(row) {
        if ancestor.pid <= 1
            || NO_JOB.contains(&ancestor.comm.as_str())
            || is_typed_into(&ancestor.comm, &ancestor.argv)
        {
            break;
        }
        root = Some(ancestor);
    }
    // The root of a tree is one with those below it, if it has any.
    let (comm, argv, pid) = root.as_ref().map_or((&row.comm, &row.argv, row.key.pid), |root| {
        let AncestorReport { pid, start_ns: _, comm, argv, exit: _ } = root;
        (comm, argv, *pid)
    });
    of(GroupBy::Lineage, &format!("{} (pid {pid})", short_command(comm, argv)))
}

/// Whether a tree begins with it.
fn is_root(person: &Person<'_>) -> bool {
    person.group.name.ends_with(&format!("(pid {})", person.row.key.pid))
}

/// A shell without a script: `-bash`, `bash`, `bash -i`, `bash --login`.
fn is_typed_into(comm: &str, argv: &[String]) -> bool {
    SHELLS.contains(&comm.trim_start_matches('-'))
        && argv
            .iter()
            .skip(1)
            .all(|argument| matches!(argument.as_str(), "-i" | "-l" | "--login" | "--norc" | "--posix"))
}

pub(super) fn find(books: &[Book<'_>], chosen: &[BTreeSet<Key>], ask: &Ask, xids: &[XidReport]) -> Vec<Incident> {
    let mut groups: BTreeMap<GroupKey<'_>, Vec<Person<'_>>> = BTreeMap::new();
    let mut down: Vec<(usize, Vec<Person<'_>>)> = Vec::new();
    for (position, book) in books.iter().enumerate() {
        let mut at_the_end = Vec::new();
        let holders: BTreeSet<Key> = book.record.holds.iter().map(|hold| hold.key).collect();
        for row in holders.iter().filter_map(|key| book.row(*key)) {
            let died = book.death(row).and_then(|death| Some((book.wall(death.boot_ns?), death)));
            let who = book.who(row.key);
            let person = Person { book, row, who, rank: rank(row), group: group(book, row), died };
            if person.died.as_ref().is_some_and(|(_, death)| death.cause == Cause::HostDown) {
                at_the_end.push(person);
                continue;
            }
            // Jobs reach over hosts; a process, a tree or a container is one host's.
            let Boot { host, boot_id, .. } = &book.record.boot;
            let host = match person.group.by {
                GroupBy::SlurmJob | GroupBy::RankSet => None,
                _ => Some((host.as_str(), boot_id.as_str())),
            };
            groups.entry((person.group.by, person.group.name.clone(), host)).or_default().push(person);
        }
        if !at_the_end.is_empty() {
            down.push((position, at_the_end));
        }
    }
    // Nobody's tree.
    for people in groups.values_mut() {
        if let [person] = people.as_mut_slice()
            && person.group.by == GroupBy::Lineage
            && is_root(person)
        {
            person.group.by = GroupBy::Process;
        }
    }
    let in_window = |time: Timestamp| time >= ask.since && time <= ask.until;
    let is_chosen = |people: &[&Person<'_>]| {
        people.iter().any(|person| {
            books.iter().zip(chosen).any(|(book, keys)| book.is_of(&person.who) && keys.contains(&person.row.key))
        })
    };
    let mut incidents = Vec::new();
    for people in groups.values() {
        for deaths in apart(people) {
            let touches = deaths.iter().any(|person| person.died.as_ref().is_some_and(|(time, _)| in_window(*time)));
            if touches && is_chosen(&deaths) {
                incidents.push(of_deaths(people, &deaths, xids));
            }
        }
    }
    for (position, people) in &down {
        let book = &books[*position];
        let next = books.iter().find(|other| {
            other.record.boot.host == book.record.boot.host
                && other.record.boot.wall_offset_ns > book.record.boot.wall_offset_ns
        });
        let all: Vec<&Person<'_>> = people.iter().collect();
        if in_window(book.wall(book.record.boot.last_ns)) && is_chosen(&all) {
            incidents.push(host_down(book, people, next.map(|next| next.wall(0))));
        }
    }
    let taken: BTreeSet<u32> = incidents.iter().flat_map(|incident| incident.xids.iter().copied()).collect();
    for (position, xid) in xids.iter().enumerate() {
        if !taken.contains(&(position as u32)) {
            incidents.push(of_xid(position as u32, xid));
        }
    }
    incidents.sort_by(|a, b| (a.began, &a.title).cmp(&(b.began, &b.title)));
    for (position, incident) in incidents.iter_mut().enumerate() {
        incident.id = position as u32 + 1;
    }
    incidents
}

/// Runs of deaths, each with at least one that was not as it should be. Who had not begun when a run's first one died is the
/// next attempt, and belongs to another.
fn apart<'a, 'b>(people: &'b [Person<'a>]) -> Vec<Vec<&'b Person<'a>>> {
    let mut dead: Vec<&Person<'_>> = people.iter().filter(|person| person.died.is_some()).collect();
    dead.sort_by(|a, b| (time(a), &a.who).cmp(&(time(b), &b.who)));
    let mut runs: Vec<Vec<&Person<'_>>> = Vec::new();
    for person in dead {
        let near = if person.by_watchdog() { WATCHDOG_APART } else { APART };
        let began = person.book.wall(person.row.key.start_ns);
        let fits = |run: &Vec<&Person<'_>>| {
            run.last().is_some_and(|last| time(person).duration_since(time(last)) <= near)
                && run.iter().find(|other| other.is_abnormal()).is_none_or(|first| began <= time(first))
        };
        match runs.iter_mut().rev().find(|run| fits(run)) {
            Some(run) => run.push(person),
            None => runs.push(vec![person]),
        }
    }
    runs.retain(|run| run.iter().any(|person| person.is_abnormal()));
    runs
}

fn time(person: &Person<'_>) -> Timestamp {
    person.died.as_ref().map_or(Timestamp::MAX, |(time, _)| *time)
}

fn of_deaths(people: &[Person<'_>], deaths: &[&Person<'_>], xids: &[XidReport]) -> Incident {
    let first = *deaths.iter().find(|person| person.is_abnormal()).unwrap_or(&deaths[0]);
    let Some((began, death)) = &first.died else { unreachable!("only the dead are given") };
    let began = *began;
    let ended = deaths.iter().map(|person| time(person)).max().unwrap_or(began);
    let timeout = first.by_watchdog();
    let cause = match death.cause {
        Cause::Fault if timeout => IncidentCause::CollectiveTimeout,
        Cause::Exited => IncidentCause::Exited,
        Cause::KilledBy => IncidentCause::KilledBy,
        Cause::OomKill => IncidentCause::OomKill,
        Cause::Fault => IncidentCause::Fault,
        Cause::Reaped => IncidentCause::Reaped,
        Cause::HostDown => IncidentCause::HostDown,
        Cause::Unknown => IncidentCause::Unknown,
    };
    let seen = peers(first.book, &deaths.iter().map(|person| person.row.key).collect());
    let mut members: Vec<Member> = Vec::new();
    let mut evidence: Vec<String> = death.evidence.iter().map(|line| format!("{}: {line}", first.name())).collect();
    let lived = |person: &&Person<'_>| {
        person.died.as_ref().is_none_or(|(time, _)| *time > began)
            && person.who != first.who
            && person.book.wall(person.row.key.start_ns) <= began
    };
    let mut others: Vec<&Person<'_>> = people.iter().filter(lived).collect();
    others.sort_by(|a, b| (time(a), a.rank, &a.who).cmp(&(time(b), b.rank, &b.who)));
    let mut stalled = Vec::new();
    for person in std::iter::once(&first)
        .chain(&others)
        .copied()
        .chain(deaths.iter().copied().filter(|person| time(person) <= began && person.who != first.who))
    {
        let in_run = deaths.iter().any(|other| other.who == person.who);
        let peer = seen.get(&person.row.key).filter(|_| person.book.record.boot == first.book.record.boot);
        let is_stalled =
            timeout && person.who != first.who && !person.by_watchdog() && lived(&person) && person.rank != first.rank;
        let part = if person.who == first.who {
            Part::First
        } else if is_stalled {
            Part::Stalled
        } else if in_run {
            Part::Followed
        } else {
            Part::Survived
        };
        let doing = peer.map(|peer| {
            let wchan = peer.wchan.as_ref().map(|wchan| format!(" in {}", escape(wchan))).unwrap_or_default();
            format!("its main thread was in state {}{wchan} when {} was about to die", peer.state, first.name())
        });
        if is_stalled {
            stalled.push(person.name());
        }
        if let Some(doing) = doing.as_ref().filter(|_| is_stalled) {
            evidence.push(format!("{}: {doing}", person.name()));
        }
        let why = match (&person.died, part) {
            (Some((_, death)), _) if in_run => why(death),
            (_, Part::Stalled) => doing.unwrap_or_else(|| "it had not ended when the others gave up".to_owned()),
            _ => "it went on".to_owned(),
        };
        members.push(Member {
            who: person.who.clone(),
            comm: person.row.comm.clone(),
            rank: person.rank,
            part,
            time: person.died.as_ref().filter(|_| in_run).map(|(time, _)| *time),
            cause: person.died.as_ref().filter(|_| in_run).map(|(_, death)| death.cause),
            why,
        });
    }
    members.sort_by_key(|member| (member.time.is_none(), member.time, member.part != Part::First));
    let followers: Vec<&&Person<'_>> =
        deaths.iter().filter(|person| person.who != first.who && time(person) >= began).collect();
    let watchdogs = followers.iter().filter(|person| person.by_watchdog()).count();
    if watchdogs > 0 {
        let ended = plural(watchdogs, "process was", "processes were");
        evidence.push(format!(
            "{watchdogs} more {ended} ended by a watchdog thread of its own, which had waited for the others"
        ));
    }
    let held = |hold: &&HoldRow, book: &Book<'_>| book.is_gpu(&hold.node);
    let mut devices = BTreeSet::new();
    let mut freed = Some(began);
    for person in deaths {
        for hold in person.book.record.holds.iter().filter(|hold| hold.key == person.row.key && held(hold, person.book))
        {
            devices.insert(HeldNode { host: person.who.host.clone(), node: hold.node.clone() });
            let released = person.book.end(hold).0.map(|at| person.book.wall(at));
            freed = freed.zip(released).map(|(freed, released)| freed.max(released));
        }
    }
    // Whoever held the GPU at that instant, or is named, is touched by it.
    let near = |xid: &XidReport| {
        let touches = |person: &&Person<'_>| {
            xid.holders.contains(&person.who) || xid.host == person.who.host && xid.xid.pid == Some(person.who.pid)
        };
        xid.time >= began - XID_NEAR
            && xid.time <= ended + XID_NEAR
            && deaths.iter().copied().any(|person| touches(&person))
    };
    let near: Vec<u32> =
        xids.iter().enumerate().filter(|(_, xid)| near(xid)).map(|(position, _)| position as u32).collect();
    for xid in near.iter().filter_map(|position| xids.get(*position as usize)) {
        evidence.push(format!(
            "Xid {} on {}: {}",
            xid.xid.xid,
            xid.xid.node.as_deref().unwrap_or(&xid.xid.bdf),
            xid.meaning
        ));
    }
    let mut title = format!("{} {}", first.name(), why(death));
    if timeout {
        let waited = match stalled.as_slice() {
            [] => "a collective did not come to its end in time".to_owned(),
            [one] => format!("it had waited for {one}"),
            [one, rest @ ..] => format!("it had waited for {one} and {} more", rest.len()),
        };
        title = format!("{} was ended by its own watchdog: {waited}", first.name());
    }
    if let count @ 1.. = followers.len() {
        let within = ended.duration_since(began).as_secs_f64();
        let others = plural(count, "other", "others");
        let of = group_name(&first.group);
        write!(title, "; {count} {others} of {of} followed within {within:.1} s").expect("a string takes everything");
    }
    Incident {
        id: 0,
        began,
        ended,
        title,
        cause,
        group: first.group.clone(),
        processes: members,
        devices: devices.into_iter().collect(),
        freed,
        xids: near,
        evidence,
    }
}

fn group_name(group: &Group) -> String {
    let name = escape(&group.name);
    match group.by {
        GroupBy::SlurmJob => format!("Slurm job {name}"),
        GroupBy::Pod => format!("pod {name}"),
        GroupBy::Container => format!("container {name}"),
        GroupBy::RankSet => format!("the ranks of {name}"),
        GroupBy::Lineage => format!("the tree of {name}"),
        GroupBy::Process | GroupBy::Device | GroupBy::Host => name.into_owned(),
    }
}

/// One clause with the process as its subject.
fn why(death: &Death) -> String {
    let signal = death.signal.as_deref().unwrap_or("a signal");
    let core = if death.core { " and dumped core" } else { "" };
    let sender = |sender: &Sender| format!("{} (pid {}, uid {})", escape(&sender.comm), sender.key.pid, sender.uid);
    match death.cause {
        Cause::Exited => format!("ended with code {}", death.code.unwrap_or(0)),
        Cause::KilledBy => match &death.sender {
            Some(by) => format!("was killed by {signal} from {}{core}", sender(by)),
            None => format!("was killed by {signal} from the kernel{core}"),
        },
        Cause::OomKill => {
            let oom = death.oom.as_ref();
            match (oom.and_then(|oom| oom.scope), oom.and_then(|oom| oom.cgroup.as_deref())) {
                (Some(OomScope::Cgroup), Some(cgroup)) => {
                    format!("was killed for memory: the limit of cgroup {} was reached", escape(cgroup))
                }
                (Some(OomScope::Cgroup), None) => {
                    "was killed for memory: the limit of its cgroup was reached".to_owned()
                }
                (Some(OomScope::Global), _) => "was killed for memory: the host had none left".to_owned(),
                (None, _) => "was killed by the kernel's out-of-memory killer".to_owned(),
            }
        }
        Cause::Fault => match &death.thread {
            Some(thread) => format!("died of {signal} in its thread {} ({}){core}", thread.tid, escape(&thread.name)),
            None => format!("died of {signal}{core}"),
        },
        Cause::Reaped => match (&death.signal, death.code) {
            (Some(signal), _) => format!("was reaped by gpureap with {signal}"),
            (None, code) => format!("was reaped by gpureap and ended with code {}", code.unwrap_or(0)),
        },
        Cause::HostDown => "held when the host went down".to_owned(),
        Cause::Unknown => match &death.signal {
            Some(signal) => format!("was killed by {signal}; by whom was not seen"),
            None => "ended in a way that was not seen".to_owned(),
        },
    }
}

fn host_down(book: &Book<'_>, people: &[Person<'_>], next: Option<Timestamp>) -> Incident {
    let last = book.wall(book.record.boot.last_ns);
    let host = &book.record.boot.host;
    let mut devices = BTreeSet::new();
    for person in people {
        let open = book.record.holds.iter().filter(|hold| hold.key == person.row.key && book.is_gpu(&hold.node));
        for hold in open.filter(|hold| book.end(hold).1 == Some(super::rows::HoldEnd::HostDown)) {
            devices.insert(HeldNode { host: host.clone(), node: hold.node.clone() });
        }
    }
    let bound = next
        .map_or_else(|| "it has not been seen again".to_owned(), |next| format!("the next boot began at {next:.0}"));
    let (count, gpus) = (people.len(), devices.len());
    let held = format!("{count} {} held {gpus} {}", plural(count, "process", "processes"), plural(gpus, "GPU", "GPUs"));
    let members = people.iter().map(|person| Member {
        who: person.who.clone(),
        comm: person.row.comm.clone(),
        rank: person.rank,
        part: Part::Followed,
        time: None,
        cause: Some(Cause::HostDown),
        why: "held at the last sign of life".to_owned(),
    });
    Incident {
        id: 0,
        began: last,
        ended: next.unwrap_or(last),
        title: format!("the host {} went down after {last:.0} while {held}; {bound}", escape(host)),
        cause: IncidentCause::HostDown,
        group: Group { by: GroupBy::Host, name: host.clone() },
        processes: members.collect(),
        devices: devices.into_iter().collect(),
        freed: next,
        xids: Vec::new(),
        evidence: vec![format!(
            "the last sign of life of this boot is of {last}; it was not ended by a shutdown of the daemon"
        )],
    }
}

fn of_xid(position: u32, xid: &XidReport) -> Incident {
    let node = xid.xid.node.as_deref().unwrap_or(&xid.xid.bdf).to_owned();
    let blame = match xid.class {
        XidClass::Application => "an application's doing",
        XidClass::Hardware => "hardware",
        XidClass::Driver => "the driver",
        XidClass::ResultOfAKill => "the result of a kill",
        XidClass::Unknown => "not known whose doing",
    };
    let members = xid.holders.iter().map(|who| Member {
        who: who.clone(),
        comm: String::new(),
        rank: None,
        part: Part::Survived,
        time: None,
        cause: None,
        why: "held the GPU at that instant".to_owned(),
    });
    Incident {
        id: 0,
        began: xid.time,
        ended: xid.time,
        title: format!("Xid {} on {}: {} ({blame})", xid.xid.xid, escape(&node), xid.meaning),
        cause: IncidentCause::Xid,
        group: Group { by: GroupBy::Device, name: node.clone() },
        processes: members.collect(),
        devices: vec![HeldNode { host: xid.host.clone(), node }],
        freed: None,
        xids: vec![position],
        evidence: vec![xid.xid.message.clone()],
    }
}
