//! What the text and the page say alike: who a process is, how a hold ended, which holds are alike, who descends from whom.
//! Everything that is returned as text is escaped for terminals already.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use jiff::{SignedDuration, Timestamp, civil::Date, tz::TimeZone};

use super::{
    report::{
        AncestorReport, DeathReport, DeviceReport, HoldReport, HostReport, HostState, ProcessReport, Report, Who,
    },
    rows::{Cause, HoldEnd, HoldOrigin},
};
use crate::{
    holders::report::{ExitReport, Role},
    out::{
        sanitize::escape,
        words::{ended, plural, ranges, user, word},
    },
};

/// Fewer of a kind are told one by one.
pub(super) const MANY: usize = 4;

/// How times are written: with the day where the window has more than one, or where it is another day. Always UTC.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    /// Where all times of the window are of one.
    day: Option<Date>,
}

impl Clock {
    pub(super) fn of(report: &Report) -> Self {
        let held = report.holds.iter().flat_map(|hold| [Some(hold.opened), hold.released]).flatten();
        let all: BTreeSet<Date> = held.chain([report.since, report.until]).map(day).collect();
        Self { day: if all.len() == 1 { all.first().copied() } else { None } }
    }

    pub(super) fn second(self, time: Timestamp) -> String {
        let same = self.day == Some(day(time));
        time.strftime(if same { "%H:%M:%S" } else { "%m-%d %H:%M:%S" }).to_string()
    }

    /// To the millisecond: the order of deaths.
    pub(super) fn exact(self, time: Timestamp) -> String {
        format!("{}{}", self.second(time), time.strftime("%.3f"))
    }
}

fn day(time: Timestamp) -> Date {
    time.to_zoned(TimeZone::UTC).date()
}

/// With the day, for where a time stands alone.
pub(super) fn date(time: Timestamp) -> String {
    time.strftime("%F %H:%M:%S").to_string()
}

/// `2026-03-14 02:50:00 to 03:20:00 UTC`.
pub(super) fn window(report: &Report) -> String {
    if let Some(at) = report.at {
        return format!("at {} UTC", date(at));
    }
    let until = if day(report.since) == day(report.until) {
        report.until.strftime("%T").to_string()
    } else {
        date(report.until)
    };
    format!("{} to {until} UTC", date(report.since))
}

/// `2.1 s`, `340 ms`, and from two minutes on as lengths of time are written elsewhere.
pub(super) fn short_span(span: SignedDuration) -> String {
    let ms = span.as_millis().max(0);
    match ms {
        0..1_000 => format!("{ms} ms"),
        1_000..120_000 => format!("{}.{} s", ms / 1_000, ms / 100 % 10),
        _ => crate::out::words::span(span),
    }
}

/// Processes, and the hosts and nodes of what they hold.
type Holders<'a> = (BTreeSet<&'a Who>, BTreeSet<(&'a str, &'a str)>);

/// The report with what is looked up in it.
pub(super) struct Index<'a> {
    pub(super) report: &'a Report,
    pub(super) clock: Clock,
    processes: BTreeMap<&'a Who, &'a ProcessReport>,
    hosts: BTreeMap<(&'a str, &'a str), &'a HostReport>,
    /// Hosts are named on lines only then.
    pub(super) several_hosts: bool,
}

impl<'a> Index<'a> {
    pub(super) fn new(report: &'a Report) -> Self {
        let names: BTreeSet<&str> = report.hosts.iter().map(|host| host.host.as_str()).collect();
        Self {
            report,
            clock: Clock::of(report),
            processes: report.processes.iter().map(|process| (&process.who, process)).collect(),
            hosts: report.hosts.iter().map(|host| ((host.host.as_str(), host.boot_id.as_str()), host)).collect(),
            several_hosts: names.len() > 1,
        }
    }

    pub(super) fn process(&self, who: &Who) -> Option<&'a ProcessReport> {
        self.processes.get(who).copied()
    }

    pub(super) fn host_names(&self) -> Vec<String> {
        let mut names = Vec::new();
        for host in &self.report.hosts {
            let name = escape(&host.host).into_owned();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    fn host_state(&self, who: &Who) -> Option<HostState> {
        self.hosts.get(&(who.host.as_str(), who.boot_id.as_str())).map(|host| host.state)
    }

    /// When the record of its boot ends, or the window.
    pub(super) fn end_of_record(&self, who: &Who) -> Timestamp {
        let last = self.hosts.get(&(who.host.as_str(), who.boot_id.as_str())).map(|host| host.last);
        last.map_or(self.report.until, |last| last.min(self.report.until))
    }

    /// ` (node7)` where there are several hosts.
    pub(super) fn on_host(&self, host: &str) -> String {
        if self.several_hosts { format!(" ({})", escape(host)) } else { String::new() }
    }

    /// The GPUs and what stands in for them; nodes that all share are left out of what people read.
    pub(super) fn gpus(&self) -> impl Iterator<Item = &'a DeviceReport> {
        self.report.devices.iter().filter(|device| device.kind.is_gpu())
    }

    pub(super) fn holds_of(&self, device: &DeviceReport) -> Vec<&'a HoldReport> {
        let mut holds: Vec<&HoldReport> = self
            .report
            .holds
            .iter()
            .filter(|hold| hold.who.host == device.host && hold.node == device.node)
            .filter(|hold| {
                self.report.at.is_none_or(|at| hold.opened <= at && hold.released.is_none_or(|end| end >= at))
            })
            .collect();
        holds.sort_by_key(|hold| (hold.opened, hold.who.pid));
        holds
    }

    pub(super) fn end(&self, hold: &HoldReport) -> End {
        let HoldReport { who, ended, released, .. } = hold;
        match (ended, released) {
            (Some(HoldEnd::Closed), _) => End::Closed,
            (Some(HoldEnd::HostDown), _) => End::HostDown,
            (Some(HoldEnd::Exited), _) => self.process(who).map_or(End::Exited, End::of_process),
            (Some(HoldEnd::Unseen), _) | (None, Some(_)) => End::Unknown,
            (None, None) if self.host_state(who) == Some(HostState::Down) => End::HostDown,
            (None, None) => End::Held,
        }
    }

    /// How a hold ended, in a clause.
    pub(super) fn how_ended(&self, hold: &HoldReport) -> String {
        let HoldReport { who, ended, .. } = hold;
        match (self.end(hold), ended) {
            (End::Held, _) if self.host_state(who) == Some(HostState::Running) => "held still".to_owned(),
            (End::Held, _) => "held when the record ends".to_owned(),
            (End::Closed, _) => "closed, lived on".to_owned(),
            (End::HostDown, _) => "host went down".to_owned(),
            (End::Unknown, Some(HoldEnd::Unseen)) => "gone when next looked".to_owned(),
            _ => self.process(who).map_or_else(|| "with the process".to_owned(), process_end),
        }
    }

    /// Who holds a GPU when the window ends, or at the instant: those who use it; where nobody does, those with handles
    /// alone. With the GPUs of theirs, and how many others have handles.
    fn holders_now(&self) -> (Holders<'a>, usize) {
        let mut all: BTreeMap<bool, Holders<'a>> = BTreeMap::new();
        for device in self.gpus() {
            for hold in self.holds_of(device) {
                if self.report.at.is_some() || self.end(hold) == End::Held {
                    let (who, nodes) = all.entry(hold.role == Some(Role::Attached)).or_default();
                    who.insert(&hold.who);
                    nodes.insert((device.host.as_str(), device.node.as_str()));
                }
            }
        }
        let (using, used) = all.remove(&true).unwrap_or_default();
        let (having, had) = all.remove(&false).unwrap_or_default();
        if using.is_empty() {
            return ((having, had), 0);
        }
        let others = having.difference(&using).count();
        ((using, used), others)
    }

    /// The first line.
    pub(super) fn headline(&self) -> String {
        let report = self.report;
        let hosts = crate::out::words::nodes(&self.host_names());
        let hosts = if hosts.is_empty() { "no host".to_owned() } else { hosts };
        format!("{hosts}, {}: {}", window(report), self.summary())
    }

    /// How many incidents, and who holds now.
    pub(super) fn summary(&self) -> String {
        let report = self.report;
        let ((who, nodes), others) = self.holders_now();
        // A few are named: often it is one, and it is the one that is looked for.
        let names =
            who.iter().map(|who| self.process(who).map_or_else(|| who.pid.to_string(), called)).collect::<Vec<_>>();
        let processes = match names.as_slice() {
            [one] => one.clone(),
            [one, two] => format!("{one} and {two}"),
            many => format!("{} {}", many.len(), plural(many.len(), "process", "processes")),
        };
        let gpus = self.gpu_names(nodes.iter().map(|(host, node)| (*host, *node)));
        let others = match others {
            0 => String::new(),
            1 => ", 1 other has handles".to_owned(),
            count => format!(", {count} others have handles"),
        };
        if report.at.is_some() {
            return if who.is_empty() {
                "nobody held a GPU".to_owned()
            } else {
                format!("{processes} held {gpus}{others}")
            };
        }
        let incidents = match report.incidents.len() {
            0 => "no incident".to_owned(),
            count => format!("{count} {}", plural(count, "incident", "incidents")),
        };
        // A window that is over tells of its end.
        let past = report.time.duration_since(report.until) > SignedDuration::from_mins(1);
        let running = report.hosts.iter().any(|host| host.state == HostState::Running);
        let holders = match (who.is_empty(), past || !running) {
            (true, false) => "nobody holds a GPU now".to_owned(),
            (true, true) => "nobody holds a GPU at its end".to_owned(),
            (false, false) => format!("{processes} {} {gpus} now", plural(who.len(), "holds", "hold")) + &others,
            (false, true) => format!("{processes} {} {gpus} at its end", plural(who.len(), "holds", "hold")) + &others,
        };
        format!("{incidents}; {holders}")
    }

    /// `GPU 0`, `GPUs 0-7`; of several hosts with their names.
    pub(super) fn gpu_names(&self, nodes: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
        let mut numbers: BTreeMap<&str, BTreeSet<u32>> = BTreeMap::new();
        let mut others = Vec::new();
        for (host, node) in nodes {
            let device = self.report.devices.iter().find(|device| device.host == host && device.node == node);
            match device.and_then(|device| device.gpu) {
                Some(gpu) => drop(numbers.entry(host).or_default().insert(gpu)),
                None => others.push(format!("{}{}", escape(node), self.on_host(host))),
            }
        }
        let mut parts: Vec<String> = numbers
            .into_iter()
            .map(|(host, gpus)| {
                let list: Vec<u32> = gpus.into_iter().collect();
                format!("{} {}{}", plural(list.len(), "GPU", "GPUs"), ranges(&list), self.on_host(host))
            })
            .collect();
        parts.extend(others);
        parts.join(", ")
    }

    /// Alike in all that a line says: user, job, end; and either at the same times or all of them brief, as the looks of a
    /// monitor are. Of those with handles alone the job is enough: a job has them on every GPU and uses one.
    pub(super) fn bundles(&self, holds: &[&'a HoldReport]) -> Vec<Vec<&'a HoldReport>> {
        let window = self.report.until.duration_since(self.report.since).as_millis();
        let near = (window / 50).max(5_000);
        let end = |hold: &HoldReport| self.released(hold);
        let brief = |hold: &HoldReport| end(hold).duration_since(hold.opened).as_millis() < near;
        let mut kinds: BTreeMap<_, Vec<Vec<&HoldReport>>> = BTreeMap::new();
        for hold in holds {
            let HoldReport { who, comm, origin, role, .. } = hold;
            let process = self.process(who);
            let job = process.map(|process| (&process.user, process.uid, job(process), process.incident));
            let of_a_job = process.is_some_and(|process| process.incident.is_some() || job_is_known(process));
            let handle = *role == Some(Role::Handle) && of_a_job;
            let detail = (!handle).then(|| (comm, word(origin), self.end(hold)));
            let lists = kinds.entry((&who.host, &who.boot_id, *role, detail, job)).or_default();
            let close = |a: Timestamp, b: Timestamp| a.duration_since(b).as_millis().abs() <= near;
            let like = |other: &HoldReport| {
                handle
                    || close(other.opened, hold.opened) && close(end(other), end(hold))
                    || brief(other) && brief(hold)
            };
            match lists.iter_mut().find(|list| list.first().is_some_and(|first| like(first))) {
                Some(list) => list.push(hold),
                None => lists.push(vec![hold]),
            }
        }
        let mut result = Vec::new();
        for list in kinds.into_values().flatten() {
            if list.len() < MANY {
                result.extend(list.into_iter().map(|hold| vec![hold]));
            } else {
                result.push(list);
            }
        }
        result.sort_by_key(|list| (list[0].opened, list[0].who.pid));
        result
    }

    /// When it was let go, or how far it is known to have been held.
    pub(super) fn released(&self, hold: &HoldReport) -> Timestamp {
        hold.released.unwrap_or_else(|| self.end_of_record(&hold.who)).max(hold.opened)
    }

    /// How the holds of a bundle ended, the most frequent first: `exited 1 and 2 other ways`.
    pub(super) fn how_all_ended(&self, bundle: &[&HoldReport]) -> String {
        let mut ways: BTreeMap<String, usize> = BTreeMap::new();
        for hold in bundle {
            *ways.entry(self.how_ended(hold)).or_default() += 1;
        }
        let most = ways.iter().max_by_key(|(_, count)| **count).map(|(way, _)| way.clone()).unwrap_or_default();
        match ways.len() {
            0 | 1 => most,
            2 => format!("{most}, or otherwise"),
            ways => format!("{most}, or {} other ways", ways - 1),
        }
    }
}

/// How a hold ended, as far as a colour or a shape tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum End {
    Held,
    Closed,
    /// With code 0.
    Exited,
    /// With another code.
    Failed,
    Killed,
    Oom,
    Fault,
    Reaped,
    HostDown,
    Unknown,
}

impl End {
    pub(super) fn of_process(process: &ProcessReport) -> Self {
        match (&process.death, process.exit) {
            (Some(DeathReport { cause, code, .. }), _) => match cause {
                Cause::Exited if code.is_none_or(|code| code == 0) => Self::Exited,
                Cause::Exited => Self::Failed,
                Cause::KilledBy => Self::Killed,
                Cause::OomKill => Self::Oom,
                Cause::Fault => Self::Fault,
                Cause::Reaped => Self::Reaped,
                Cause::HostDown => Self::HostDown,
                Cause::Unknown => Self::Unknown,
            },
            (None, Some(ExitReport { signal: Some(_), .. })) => Self::Killed,
            (None, Some(ExitReport { code: Some(1..), .. })) => Self::Failed,
            (None, _) => Self::Exited,
        }
    }

    /// Whether a process died of it that might have gone on.
    pub(super) const fn is_death(self) -> bool {
        matches!(self, Self::Failed | Self::Killed | Self::Oom | Self::Fault | Self::Reaped)
    }
}

/// Whose process it is, where it had a job.
fn job(process: &ProcessReport) -> (&Option<String>, &Option<String>, &Option<String>) {
    (&process.slurm_job, &process.pod, &process.container)
}

fn job_is_known(process: &ProcessReport) -> bool {
    let (slurm, pod, container) = job(process);
    slurm.is_some() || pod.is_some() || container.is_some()
}

/// `job 4711.0`, `pod ns/name`, `container name`: what people call it, recorded while it was there.
pub(super) fn job_name(process: &ProcessReport) -> Option<String> {
    let ProcessReport { slurm_job, slurm_step, pod, pod_name, pod_namespace, container, container_name, .. } = process;
    let short = |id: &str| escape(id).chars().take(12).collect::<String>();
    if let Some(job) = slurm_job {
        let step = slurm_step.as_deref().map_or_else(String::new, |step| format!(".{}", escape(step)));
        return Some(format!("job {}{step}", escape(job)));
    }
    if let Some(name) = pod_name {
        let namespace = pod_namespace.as_deref().map_or_else(String::new, |space| format!("{}/", escape(space)));
        return Some(format!("pod {namespace}{}", escape(name)));
    }
    if let Some(pod) = pod {
        return Some(format!("pod {}", escape(pod)));
    }
    if let Some(name) = container_name {
        return Some(format!("container {}", escape(name)));
    }
    container.as_deref().map(|id| format!("container {}", short(id)))
}

/// The job, or else the unit.
pub(super) fn place(process: &ProcessReport) -> Option<String> {
    job_name(process).or_else(|| process.unit.as_deref().map(|unit| escape(unit).into_owned()))
}

pub(super) fn rank(process: &ProcessReport) -> Option<u32> {
    process.env.get("RANK")?.parse().ok()
}

/// `rank 3 python3 20503`.
pub(super) fn named(rank: Option<u32>, comm: &str, pid: u32) -> String {
    let rank = rank.map_or_else(String::new, |rank| format!("rank {rank} "));
    format!("{rank}{} {pid}", name(comm))
}

/// `python3 5900 of alice`.
fn called(process: &ProcessReport) -> String {
    let ProcessReport { who, comm, .. } = process;
    format!("{} of {}", named(rank(process), comm, who.pid), name(&user_of(Some(process))))
}

/// The kernel keeps 15 bytes of a name; what is much longer is none, and would push all else aside.
pub(super) fn name(comm: &str) -> String {
    const LONGEST: usize = 40;
    crate::out::text::cut(&escape(comm), Some(LONGEST))
}

/// How a process ended, in a clause.
pub(super) fn process_end(process: &ProcessReport) -> String {
    match (&process.death, process.exit) {
        (Some(death), _) => death_clause(death),
        (None, Some(exit)) => ended(exit),
        (None, None) => "ended".to_owned(),
    }
}

pub(super) fn death_clause(death: &DeathReport) -> String {
    let DeathReport { cause, code, signal, core: _, time: _, sender, thread, oom, evidence: _ } = death;
    let signal = signal.as_deref().map_or_else(|| "a signal".to_owned(), name);
    match cause {
        Cause::Exited => format!("exited {}", code.unwrap_or(0)),
        Cause::KilledBy => match sender {
            Some(sender) => format!("{signal} from {} {}", name(&sender.comm), sender.pid),
            None => format!("killed by {signal}"),
        },
        Cause::OomKill => {
            let scope = oom.as_ref().and_then(|oom| oom.scope);
            format!("out of memory{}", scope.map_or_else(String::new, |scope| format!(" ({})", word(&scope))))
        }
        Cause::Fault => match thread {
            Some(thread) => format!("{signal} by its thread {}", name(&thread.name)),
            None => format!("{signal} by itself"),
        },
        Cause::Reaped => format!("reaped with {signal}"),
        Cause::HostDown => "host went down".to_owned(),
        Cause::Unknown => "ended, nobody saw how".to_owned(),
    }
}

/// `pkill 812 < sudo 810 < bash 700 (exited 0)`, from a process's parent upwards.
pub(super) fn ancestors(lineage: &[AncestorReport]) -> String {
    let parts: Vec<String> = lineage
        .iter()
        .map(|AncestorReport { pid, start_ns: _, comm, argv: _, exit }| {
            let exit = exit.map_or_else(String::new, |exit| format!(" ({})", ended(exit)));
            format!("{} {pid}{exit}", name(comm))
        })
        .collect();
    parts.join(" < ")
}

/// Where a hold comes from, if not from an open of its own.
pub(super) fn origin(hold: &HoldReport) -> Option<String> {
    match hold.origin {
        HoldOrigin::Opened => None,
        HoldOrigin::Inherited => {
            Some(hold.inherited_from.map_or_else(|| "inherited".to_owned(), |from| format!("inherited from {from}")))
        }
        HoldOrigin::Received => Some("received from another process".to_owned()),
        HoldOrigin::Snapshot => Some("held since before the record".to_owned()),
        HoldOrigin::Unconfirmed => Some("its open may have failed".to_owned()),
    }
}

pub(super) fn role(role: Option<Role>) -> String {
    role.map_or_else(|| "-".to_owned(), |role| word(&role))
}

pub(super) fn user_of(process: Option<&ProcessReport>) -> Cow<'_, str> {
    process.map_or("?".into(), |process| user(process.user.as_deref(), process.uid))
}

/// `python3, 3 × pt_autograd_0`; empty where there is nothing but the main thread.
pub(super) fn threads(process: &ProcessReport) -> String {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for thread in process.threads.iter().filter(|thread| thread.tid != process.who.pid) {
        match counts.iter_mut().find(|(name, _)| *name == thread.name) {
            Some((_, count)) => *count += 1,
            None => counts.push((&thread.name, 1)),
        }
    }
    let names = counts.iter().map(|(name, count)| match count {
        1 => self::name(name),
        count => format!("{count} × {}", self::name(name)),
    });
    names.collect::<Vec<_>>().join(", ")
}

/// `GPU 3`, or the node where it has no number.
pub(super) fn gpu_title(device: &DeviceReport) -> String {
    device.gpu.map_or_else(|| escape(&device.node).into_owned(), |gpu| format!("GPU {gpu}"))
}

/// What limits what is known of a host.
pub(super) fn host_lines(index: &Index<'_>) -> Vec<String> {
    let mut lines = Vec::new();
    for HostReport { host, boot_id: _, kernel: _, booted: _, last, state, clock_moved_ms } in &index.report.hosts {
        let name = escape(host);
        match state {
            HostState::Running => {}
            HostState::Stopped => lines.push(format!("{name}: the recorder was stopped at {} UTC", date(*last))),
            HostState::Down => {
                lines.push(format!("{name}: went down; the last sign of life is of {} UTC", date(*last)));
            }
        }
        if *clock_moved_ms != 0 {
            let seconds = *clock_moved_ms as f64 / 1_000.0;
            lines.push(format!("{name}: its clock was moved by {seconds:+.3} s while it was recorded"));
        }
    }
    lines
}

/// What to try where there is nothing to tell.
pub(super) const NOTHING: &str = "Nothing is recorded of this time. Try an earlier --since, for example --since 7d, or --boot -1 for the boot before.";
