//! A report for people: what happened, newest first; then who held each GPU, who descends from whom, and what is not known.

use std::collections::BTreeSet;

use unicode_width::UnicodeWidthStr as _;

use super::{
    family::{Branch, forest},
    report::{
        DeathReport, DeviceReport, Gap, HeldNode, HoldReport, Incident, IncidentCause, Member, OomReport, Part, Report,
        SenderReport, XidClass, XidReport,
    },
    rows::HoldOrigin,
    told::{
        End, Index, MANY, ancestors, gpu_title, host_lines, job_name, name, named, origin, rank, role, short_span,
        threads, user_of,
    },
};
use crate::out::{
    Style,
    sanitize::escape,
    text::{BOLD, DIM, RED, YELLOW, command as renamed_command, cut, paint},
    words::{plural, ranges, short_command, shorten, span, user, word},
};

pub fn render(report: &Report, style: Style) -> String {
    let index = Index::new(report);
    let mut page = Page { text: String::new(), style };
    page.painted(BOLD, 0, &index.headline());
    for line in host_lines(&index) {
        page.painted(YELLOW, 0, &line);
    }
    if report.at.is_none() && report.incidents.is_empty() && report.holds.is_empty() && report.xids.is_empty() {
        page.prose(0, super::told::NOTHING);
    }
    for incident in report.incidents.iter().rev().take(DETAILED) {
        page.text.push('\n');
        incident_lines(&mut page, &index, incident);
    }
    if report.incidents.len() > DETAILED {
        page.text.push('\n');
        for incident in report.incidents.iter().rev().skip(DETAILED) {
            page.row(None, &headline(&index, incident));
        }
        page.prose(0, "The older ones in full: a shorter --since and --until, --pid, --html FILE or --json");
    }
    timelines(&mut page, &index);
    lineage(&mut page, &index);
    if !report.xids.is_empty() {
        page.heading("Xids");
    }
    for xid in &report.xids {
        xid_lines(&mut page, &index, xid);
    }
    if !report.gaps.is_empty() || !report.notes.is_empty() {
        page.text.push('\n');
    }
    for gap in &report.gaps {
        page.prose(0, &gap_line(&index, gap));
    }
    for note in &report.notes {
        page.prose(0, &format!("note: {}", escape(note)));
    }
    page.text
}

/// Lines as they are made: rows of a table are cut at the terminal's edge, sentences go on in the next line.
struct Page {
    text: String,
    style: Style,
}

impl Page {
    fn row(&mut self, colour: Option<&str>, line: &str) {
        let line = cut(line.trim_end(), self.style.width);
        self.text += &colour.map_or_else(|| line.clone(), |colour| paint(self.style, colour, &line));
        self.text.push('\n');
    }

    fn heading(&mut self, title: &str) {
        self.text.push('\n');
        self.row(Some(BOLD), title);
    }

    fn prose(&mut self, indent: usize, line: &str) {
        for line in wrap(line, indent, self.style.width) {
            self.row(None, &line);
        }
    }

    fn painted(&mut self, colour: &str, indent: usize, line: &str) {
        for line in wrap(line, indent, self.style.width) {
            self.row(Some(colour), &line);
        }
    }
}

/// The lines after the first are indented by so much.
fn wrap(line: &str, indent: usize, width: Option<usize>) -> Vec<String> {
    let Some(width) = width else { return vec![line.to_owned()] };
    // Where there is no room for sentences they are cut.
    if width < indent + 20 {
        return vec![line.to_owned()];
    }
    let mut lines = Vec::new();
    let mut current = String::new();
    // Runs of spaces stand at the beginning of lines and between columns: they stay.
    for word in line.split_inclusive(' ') {
        let fits = (current.width() + word.trim_end().width()) <= width;
        if !fits && !current.trim().is_empty() {
            lines.push(current.trim_end().to_owned());
            current = " ".repeat(indent);
        }
        current.push_str(word);
    }
    lines.push(current.trim_end().to_owned());
    lines
}

/// Incidents that are told in full; whoever reads this wants the last one.
const DETAILED: usize = 5;
/// Where the words of an incident begin.
const INDENT: usize = 4;
/// Where they go on beside the word that says what they are.
const HANGING: usize = 14;

fn headline(index: &Index<'_>, incident: &Incident) -> String {
    format!("#{}  {}  {}", incident.id, index.clock.second(incident.began), escape(&incident.title))
}

fn incident_lines(page: &mut Page, index: &Index<'_>, incident: &Incident) {
    let Incident { id: _, began: _, ended: _, title: _, cause, group, processes, devices, freed: _, xids, evidence } =
        incident;
    page.painted(RED, INDENT, &headline(index, incident));
    let mut facts = vec![word(cause), format!("{} {}", word(&group.by).replace('-', " "), escape(&group.name))];
    if !devices.is_empty() {
        facts.push(freed(index, incident));
    }
    if !xids.is_empty() {
        let numbers: BTreeSet<u32> =
            xids.iter().filter_map(|at| index.report.xids.get(*at as usize)).map(|xid| xid.xid.xid).collect();
        let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
        facts.push(format!("Xid {}", numbers.join(", ")));
    }
    page.painted(DIM, INDENT, &format!("    {}", facts.join("; ")));
    let mut senders = BTreeSet::new();
    for members in alike(processes) {
        member_lines(page, index, &members, &mut senders);
    }
    for (position, line) in evidence.iter().enumerate() {
        let because = if position == 0 { "because" } else { "" };
        page.prose(HANGING, &format!("    {because:<10}{}", escape(line)));
    }
}

/// When the GPUs came back.
pub(super) fn freed(index: &Index<'_>, incident: &Incident) -> String {
    let nodes = incident.devices.iter().map(|HeldNode { host, node }| (host.as_str(), node.as_str()));
    let gpus = index.gpu_names(nodes);
    let first_death = incident.processes.iter().find_map(|member| member.time);
    match (incident.freed, first_death) {
        (Some(time), Some(first)) => format!(
            "{gpus} free {}, {} after the first death",
            index.clock.second(time),
            short_span(time.duration_since(first))
        ),
        // Nobody died.
        _ if incident.processes.is_empty() => gpus,
        (Some(time), None) => format!("{gpus} free {}", index.clock.second(time)),
        (None, _) if incident.cause == IncidentCause::HostDown => format!("{gpus} held at the end"),
        (None, _) => format!("{gpus} held still"),
    }
}

/// Many with the same fate are one line.
pub(super) fn alike(members: &[Member]) -> Vec<Vec<&Member>> {
    let mut lists: Vec<Vec<&Member>> = Vec::new();
    for member in members {
        let same = |list: &&mut Vec<&Member>| {
            let first = list[0];
            (first.part, &first.comm, &first.why, &first.who.host)
                == (member.part, &member.comm, &member.why, &member.who.host)
        };
        match lists.iter_mut().find(same) {
            Some(list) => list.push(member),
            None => lists.push(vec![member]),
        }
    }
    lists
        .into_iter()
        .flat_map(
            |list| if list.len() < MANY { list.into_iter().map(|member| vec![member]).collect() } else { vec![list] },
        )
        .collect()
}

fn member_lines<'a>(
    page: &mut Page,
    index: &Index<'a>,
    members: &[&Member],
    senders: &mut BTreeSet<(&'a str, u32, u64)>,
) {
    let Some(Member { who, comm, rank, part, time, cause: _, why }) = members.first().copied() else { return };
    let host = index.on_host(&who.host);
    let when = time.map_or_else(String::new, |time| format!("{}  ", index.clock.exact(time)));
    let what = match members.len() {
        1 => named(*rank, comm, who.pid),
        count => format!("{count} × {}", name(comm)),
    };
    page.prose(HANGING, &format!("    {:<10}{when}{what}{host}: {}", word(part), escape(why)));
    if members.len() > 1 {
        let mut pids: Vec<u32> = members.iter().map(|member| member.who.pid).collect();
        pids.sort_unstable();
        let last = members.iter().filter_map(|member| member.time).max();
        let until = last.map_or_else(String::new, |last| format!(", the last {}", index.clock.exact(last)));
        page.prose(HANGING, &format!("              pids {}{until}", ranges(&pids)));
    }
    let process = index.process(who);
    if *part == Part::First
        && let Some(process) = process
    {
        page.painted(DIM, HANGING, &format!("              {}", short_command(&process.comm, &process.argv)));
    }
    let Some(death) = process.and_then(|process| process.death.as_ref()) else { return };
    let DeathReport { thread, core, oom, sender, .. } = death;
    let thread = thread.as_ref().filter(|_| *part == Part::First);
    if let Some(thread) = thread {
        let core = if *core { ", core dumped" } else { "" };
        page.prose(HANGING, &format!("              thread {} {}{core}", escape(&thread.name), thread.tid));
    }
    if let Some(OomReport { scope: _, cgroup: Some(cgroup) }) = oom {
        page.prose(HANGING, &format!("              memory limit of {}", escape(cgroup)));
    }
    // Whoever killed many is told of once.
    if let Some(sender) = sender
        && let Some(process) = process
        && senders.insert((&process.who.host, sender.pid, sender.start_ns))
    {
        sender_lines(page, sender);
    }
}

fn sender_lines(page: &mut Page, sender: &SenderReport) {
    let SenderReport { pid, start_ns: _, tid: _, thread: _, comm, argv, uid, user: name, lineage } = sender;
    let by = user(name.as_deref(), Some(*uid));
    page.prose(HANGING, &format!("              sender {} {pid} of {by}: {}", escape(comm), short_command(comm, argv)));
    if !lineage.is_empty() {
        page.prose(HANGING, &format!("              started by {}", ancestors(lineage)));
    }
}

const COLUMNS: usize = 9;
/// Left out where no job is known.
const JOB: usize = 6;
const TITLES: [&str; COLUMNS] = ["FROM", "TO", "FOR", "ROLE", "PID", "USER", "JOB", "ENDED", "COMMAND"];
/// Numbers stand at the right.
const RIGHT: [bool; COLUMNS] = [false, false, true, false, true, false, false, false, false];

/// A longer clause would push the command off the screen; the incident has it in full.
const ENDED_WIDTH: usize = 48;

struct Row {
    cells: [String; COLUMNS],
    /// In a line of its own.
    below: Option<String>,
    colour: Option<&'static str>,
}

fn timelines(page: &mut Page, index: &Index<'_>) {
    let mut tables: Vec<(&DeviceReport, Vec<Row>)> = Vec::new();
    for device in index.gpus() {
        let holds = index.holds_of(device);
        tables.push((device, index.bundles(&holds).iter().map(|bundle| row(index, bundle)).collect()));
    }
    let titles = TITLES.map(str::to_owned);
    let has_jobs = tables.iter().flat_map(|(_, rows)| rows).any(|row| !row.cells[JOB].is_empty());
    let cells = tables.iter().flat_map(|(_, rows)| rows).map(|row| &row.cells).chain([&titles]);
    // One set of widths: the eye goes down all GPUs.
    let widths = cells.fold([0; COLUMNS], |widths: [usize; COLUMNS], cells| {
        std::array::from_fn(|column| widths[column].max(cells[column].width()))
    });
    let line = |cells: &[String; COLUMNS]| {
        let shown = cells.iter().enumerate().filter(|(column, _)| *column != JOB || has_jobs);
        let padded = shown.map(|(column, cell)| {
            let space = " ".repeat(widths[column].saturating_sub(cell.width()));
            if RIGHT[column] { space + cell } else { cell.clone() + &space }
        });
        format!("  {}", padded.collect::<Vec<_>>().join("  "))
    };
    let mut titled = false;
    for (device, rows) in &tables {
        let DeviceReport { host, node, kind: _, gpu: _, index: number, uuid, bdf, model } = *device;
        let mut parts = vec![format!("{}{}", gpu_title(device), index.on_host(host)), escape(node).into_owned()];
        parts.extend([model, bdf, uuid].into_iter().flatten().map(|part| escape(part).into_owned()));
        parts.extend(number.filter(|number| Some(*number) != device.gpu).map(|number| format!("index {number}")));
        if rows.is_empty() {
            parts.push("nobody held it".to_owned());
        }
        page.heading(&parts.join("  "));
        if !rows.is_empty() && !titled {
            page.row(Some(DIM), &line(&titles));
            titled = true;
        }
        for Row { cells, below, colour } in rows {
            page.row(*colour, &line(cells));
            if let Some(below) = below {
                page.painted(DIM, 4, &format!("    {below}"));
            }
        }
    }
}

/// One hold, or many alike.
fn row(index: &Index<'_>, bundle: &[&HoldReport]) -> Row {
    let first = bundle[0];
    let process = index.process(&first.who);
    let last = bundle.iter().map(|hold| index.released(hold)).max().unwrap_or(first.opened);
    let end = index.end(first);
    let since_before = if first.origin == HoldOrigin::Snapshot { "<" } else { "" };
    let longest = bundle.iter().map(|hold| index.released(hold).duration_since(hold.opened)).max().unwrap_or_default();
    let longer = if first.origin == HoldOrigin::Snapshot { ">" } else { "" };
    let below = if bundle.len() > 1 {
        let pids: BTreeSet<u32> = bundle.iter().map(|hold| hold.who.pid).collect();
        let more = if pids.len() < bundle.len() { format!(", {} times", bundle.len()) } else { String::new() };
        Some(format!("pids {}{more}", ranges(&pids.into_iter().collect::<Vec<_>>())))
    } else {
        origin(first)
    };
    let origin_of_many = if bundle.len() > 1 { origin(first).map(|_| word(&first.origin)) } else { None };
    let number = process.and_then(rank).filter(|_| bundle.len() == 1);
    let number = number.map_or_else(String::new, |rank| format!("rank {rank}: "));
    Row {
        cells: [
            format!("{since_before}{}", index.clock.second(first.opened)),
            if end == End::Held { "-".to_owned() } else { index.clock.second(last) },
            format!("{longer}{}", span(longest)),
            role(first.role),
            if bundle.len() > 1 { format!("{} ×", bundle.len()) } else { first.who.pid.to_string() },
            name(&user_of(process)),
            process.and_then(job_name).map(|job| name(&job)).unwrap_or_default(),
            cut(&index.how_all_ended(bundle), Some(ENDED_WIDTH)),
            number + &told_command(index, bundle),
        ],
        below: below.map(|below| origin_of_many.map_or(below.clone(), |origin| format!("{below}, {origin}"))),
        colour: match end {
            End::Held => Some(YELLOW),
            end if end.is_death() || end == End::HostDown => Some(RED),
            _ => None,
        },
    }
}

/// With the names too where the processes were renamed, or differ.
fn told_command(index: &Index<'_>, bundle: &[&HoldReport]) -> String {
    let comms: BTreeSet<&str> = bundle.iter().map(|hold| hold.comm.as_str()).collect();
    if comms.len() > 1 {
        return comms.into_iter().map(name).collect::<Vec<_>>().join(", ");
    }
    let first = bundle[0];
    let argv = index.process(&first.who).map_or(&[][..], |process| &process.argv);
    shorten(&renamed_command(&first.comm, argv))
}

fn lineage(page: &mut Page, index: &Index<'_>) {
    let forest = forest(&index.report.processes);
    if forest.is_empty() {
        return;
    }
    page.heading("Lineage");
    for branch in &forest {
        branch_lines(page, index, branch, 1);
    }
}

fn branch_lines(page: &mut Page, index: &Index<'_>, branch: &Branch<'_>, depth: usize) {
    let Branch { host, pids, process, comm, argv, ended, children } = branch;
    let what = match pids.as_slice() {
        [pid] => named(process.and_then(rank), comm, *pid),
        many => {
            let mut sorted = many.to_vec();
            sorted.sort_unstable();
            format!("{} × {} {}", many.len(), name(comm), ranges(&sorted))
        }
    };
    let ended = ended.as_ref().map_or_else(String::new, |ended| format!(" ✕ {ended}"));
    let on = if depth == 1 { index.on_host(host) } else { String::new() };
    let indent = "  ".repeat(depth);
    let colour = if process.is_none() { Some(DIM) } else { None };
    // The arguments last: they are what may be cut.
    let shown = if argv.is_empty() { String::new() } else { format!("  {}", short_command(comm, argv)) };
    page.row(colour, &format!("{indent}{what}{on}{ended}{shown}"));
    let threads = process.map(threads).unwrap_or_default();
    if !threads.is_empty() {
        page.painted(DIM, indent.len() + 4, &format!("{indent}    threads: {threads}"));
    }
    for child in children {
        branch_lines(page, index, child, depth + 1);
    }
}

fn xid_lines(page: &mut Page, index: &Index<'_>, report: &XidReport) {
    let XidReport { host, time, xid, class, meaning, holders } = report;
    let gpu = match &xid.node {
        Some(node) => index.gpu_names([(host.as_str(), node.as_str())]),
        None => format!("{}{}", escape(&xid.bdf), index.on_host(host)),
    };
    let named_pid = xid.pid.map_or_else(
        || "names no process".to_owned(),
        |pid| {
            format!(
                "names pid {pid}{}",
                xid.name.as_deref().map_or_else(String::new, |comm| format!(" ({})", name(comm)))
            )
        },
    );
    let line = format!(
        "  {}  {gpu}  Xid {} {}, {}; {named_pid}",
        index.clock.exact(*time),
        xid.xid,
        escape(meaning),
        class_words(*class)
    );
    page.painted(RED, HANGING, &line);
    let holders: Vec<String> = holders
        .iter()
        .map(|who| {
            index.process(who).map_or_else(|| who.pid.to_string(), |process| named(None, &process.comm, who.pid))
        })
        .collect();
    let holders = match holders.as_slice() {
        [] => "nobody held it then".to_owned(),
        [first, second, third, rest @ ..] if !rest.is_empty() => {
            format!("held by {first}, {second}, {third} and {} more", rest.len())
        }
        few => format!("held by {}", few.join(", ")),
    };
    page.prose(HANGING, &format!("              {holders}"));
    page.painted(DIM, HANGING, &format!("              {}", escape(&xid.message)));
}

/// Who is to blame.
pub(super) const fn class_words(class: XidClass) -> &'static str {
    match class {
        XidClass::Application => "the application",
        XidClass::Hardware => "the hardware",
        XidClass::Driver => "the driver",
        XidClass::ResultOfAKill => "the result of a kill",
        XidClass::Unknown => "cause not known",
    }
}

pub(super) fn gap_line(index: &Index<'_>, gap: &Gap) -> String {
    let Gap { host, boot_id: _, from, to, events, note } = gap;
    let until = to.map_or_else(|| " on".to_owned(), |to| format!(" to {}", index.clock.second(to)));
    let lost = events
        .map_or_else(String::new, |events| format!(" ({events} {} lost)", plural(events as usize, "event", "events")));
    format!("gap{}: from {}{until}, {}{lost}", index.on_host(host), index.clock.second(*from), escape(note))
}

#[cfg(test)]
mod tests;
