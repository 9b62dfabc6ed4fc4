//! The holders table for people.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

use super::{
    Style, raw,
    sanitize::escape,
    words::{self, ended, ranges, span, word},
};
use crate::{
    classify::Class,
    error::NO_DEVICE,
    holders::report::{DeviceReport, HeldReport, HolderReport, HoldersReport, Origin, ProcessName, Role},
};

/// From this many on, processes that one job left behind are one row for each GPU.
const CROWD: usize = 8;

pub fn print(report: &HoldersReport) -> anyhow::Result<()> {
    raw(holders(report, Style::of_stdout()).as_bytes())
}

/// The whole report as text.
pub fn holders(report: &HoldersReport, style: Style) -> String {
    let mut text = paint(style, DIM, &header(report)) + "\n";
    let groups = groups(report);
    let rows = rows(report, &groups);
    if report.devices.is_empty() && report.holders.is_empty() {
        text.extend(["This host has ", NO_DEVICE, ".\n"]);
    } else if rows.is_empty() {
        text += if report.complete { "No process holds a GPU.\n" } else { "No process that was seen holds a GPU.\n" };
    } else {
        text += &table(&rows, style);
    }
    for line in shared(report).into_iter().chain(below(report, &groups)) {
        text += &line;
        text.push('\n');
    }
    text
}

pub(crate) const DIM: &str = "2";
pub(crate) const BOLD: &str = "1";
pub(crate) const RED: &str = "31";
pub(crate) const YELLOW: &str = "33";

pub(crate) fn paint(style: Style, code: &str, text: &str) -> String {
    if style.colours { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
}

fn header(report: &HoldersReport) -> String {
    let HoldersReport { time, source, backend, complete, swept, lost_events, .. } = report;
    let mut parts = vec![format!("source: {}", word(source))];
    if let Some(backend) = backend {
        parts.push(format!("backend: {}", word(backend)));
    }
    if let Some(swept) = swept {
        parts.push(format!("swept {} ago", span(time.duration_since(*swept))));
    }
    if *lost_events > 0 {
        parts.push(format!("lost events: {lost_events}"));
    }
    if !complete {
        parts.push("incomplete".to_owned());
    }
    parts.join(", ")
}

/// Processes by the dead ancestor that names their job.
type Groups<'a> = BTreeMap<&'a ProcessName, Vec<&'a HolderReport>>;

fn groups(report: &HoldersReport) -> Groups<'_> {
    let mut groups = Groups::new();
    for holder in &report.holders {
        if let Some(root) = &holder.orphan_of {
            groups.entry(root).or_default().push(holder);
        }
    }
    groups
}

const COLUMNS: usize = 11;
/// Left out where all are jobs.
const CLASS: usize = 4;
const JOB: &str = Class::Job.name();
const TITLES: [&str; COLUMNS] =
    ["GPU", "NODE", "PID", "USER", "CLASS", "STATE", "ROLE", "FDS", "MAPS", "HELD FOR", "COMMAND"];
/// Numbers stand at the right.
const RIGHT: [bool; COLUMNS] = [true, false, true, false, false, false, false, true, true, true, false];

struct Row {
    cells: [String; COLUMNS],
    colour: Option<&'static str>,
}

fn rows(report: &HoldersReport, groups: &Groups<'_>) -> Vec<Row> {
    let crowds: Groups<'_> = groups
        .iter()
        .filter(|(_, members)| members.len() >= CROWD)
        .map(|(root, members)| (*root, members.clone()))
        .collect();
    let mut rows = Vec::new();
    for device in report.devices.iter().filter(|device| device.kind.is_gpu()) {
        for (root, members) in &crowds {
            rows.extend(crowd_row(device, root, members, report.time));
        }
        for holder in &report.holders {
            let crowded = holder.orphan_of.as_ref().is_some_and(|root| crowds.contains_key(root));
            let held = holder.devices.iter().find(|held| held.node == device.node);
            if let Some(held) = held.filter(|_| !crowded) {
                rows.push(row(Some(device), holder, &[held], report.time));
            }
        }
    }
    // Those that hold shared nodes alone, such as a monitor with /dev/nvidiactl.
    let gpus: BTreeSet<&str> =
        report.devices.iter().filter(|device| device.kind.is_gpu()).map(|device| device.node.as_str()).collect();
    let shown: BTreeSet<&str> = report.devices.iter().map(|device| device.node.as_str()).collect();
    for holder in &report.holders {
        let held: Vec<&HeldReport> = holder.devices.iter().filter(|held| shown.contains(held.node.as_str())).collect();
        if !held.is_empty() && held.iter().all(|held| !gpus.contains(held.node.as_str())) {
            rows.push(row(None, holder, &held, report.time));
        }
    }
    rows
}

fn gpu_number(device: &DeviceReport) -> String {
    device.gpu.map_or_else(|| "?".to_owned(), |gpu| gpu.to_string())
}

fn row(device: Option<&DeviceReport>, holder: &HolderReport, held: &[&HeldReport], now: Timestamp) -> Row {
    let HolderReport { pid, state, comm, argv, uid, user, class, class_rule, origin, .. } = holder;
    let nodes: Vec<&str> = held.iter().map(|held| held.node.as_str()).collect();
    let first = held.iter().filter_map(|held| held.first_open).min();
    let role = held.iter().find_map(|held| held.role);
    Row {
        cells: [
            device.map_or_else(|| "-".to_owned(), gpu_number),
            escape(&nodes.join(",")).into_owned(),
            pid.to_string(),
            words::user(user.as_deref(), *uid).into_owned(),
            class_cell(*class, class_rule),
            state.map_or_else(|| "?".to_owned(), |state| state.to_string()),
            role.map_or_else(|| "-".to_owned(), |role| word(&role)),
            held.iter().map(|held| held.fds).sum::<u32>().to_string(),
            held.iter().map(|held| held.maps).sum::<u32>().to_string(),
            held_for(first, *origin, now),
            command(comm, argv),
        ],
        colour: match (state, role) {
            (Some('D' | 'Z'), _) => Some(RED),
            (_, Some(Role::Attached)) => Some(YELLOW),
            _ => None,
        },
    }
}

/// With the rule that protects it.
fn class_cell(class: Class, rule: &str) -> String {
    match class {
        Class::Job => JOB.to_owned(),
        Class::Monitor | Class::System => format!("{}/{}", class.name(), escape(rule)),
    }
}

fn held_for(first: Option<Timestamp>, origin: Origin, now: Timestamp) -> String {
    match (first, origin) {
        (None, _) => "-".to_owned(),
        (Some(first), Origin::Traced) => span(now.duration_since(first)),
        // First seen then, held longer.
        (Some(first), Origin::Snapshot) => format!(">{}", span(now.duration_since(first))),
    }
}

/// With the name too when the process was renamed.
pub(crate) fn command(comm: &str, argv: &[String]) -> String {
    let line = words::command(comm, argv);
    let Some(program) = argv.first() else { return line };
    let base = program.rsplit('/').next().unwrap_or(program);
    // The kernel keeps 15 bytes of the name.
    let renamed = !base.starts_with(comm) && !line.contains(comm);
    if renamed && !comm.is_empty() { format!("[{}] {line}", escape(comm)) } else { line }
}

fn crowd_row(device: &DeviceReport, root: &ProcessName, members: &[&HolderReport], now: Timestamp) -> Option<Row> {
    let held: Vec<(&HolderReport, &HeldReport)> = members
        .iter()
        .filter_map(|member| Some((*member, member.devices.iter().find(|held| held.node == device.node)?)))
        .collect();
    let (example, _) = held.first()?;
    let same = |value: &dyn Fn(&HolderReport, &HeldReport) -> String| {
        let values: BTreeSet<String> = held.iter().map(|(member, held)| value(member, held)).collect();
        values.into_iter().collect::<Vec<_>>().join(",")
    };
    let oldest = held.iter().filter_map(|(_, held)| held.first_open).min();
    Some(Row {
        cells: [
            gpu_number(device),
            escape(&device.node).into_owned(),
            format!("{} pids", held.len()),
            same(&|member, _| escape(member.user.as_deref().unwrap_or("?")).into_owned()),
            same(&|member, _| class_cell(member.class, &member.class_rule)),
            same(&|member, _| member.state.map_or_else(|| "?".to_owned(), |state| state.to_string())),
            same(&|_, held| held.role.map_or_else(|| "-".to_owned(), |role| word(&role))),
            held.iter().map(|(_, held)| held.fds).sum::<u32>().to_string(),
            held.iter().map(|(_, held)| held.maps).sum::<u32>().to_string(),
            held_for(oldest, example.origin, now),
            format!("{} (left behind by {} {})", command(&example.comm, &example.argv), escape(&root.comm), root.pid),
        ],
        colour: Some(YELLOW),
    })
}

fn table(rows: &[Row], style: Style) -> String {
    let shows_class = rows.iter().any(|row| row.cells[CLASS] != JOB);
    let widths: Vec<usize> = (0..COLUMNS)
        .map(|column| {
            rows.iter().map(|row| row.cells[column].width()).chain([TITLES[column].width()]).max().unwrap_or(0)
        })
        .collect();
    let line = |cells: &[String]| {
        let shown = cells.iter().enumerate().filter(|(column, _)| shows_class || *column != CLASS);
        let padded = shown.map(|(column, cell)| {
            let space = " ".repeat(widths[column].saturating_sub(cell.width()));
            match (column + 1 == cells.len(), RIGHT[column]) {
                (true, _) => cell.clone(),
                (_, true) => space + cell,
                (_, false) => cell.clone() + &space,
            }
        });
        cut(&padded.collect::<Vec<_>>().join("  "), style.width)
    };
    let mut text = paint(style, BOLD, &line(&TITLES.map(str::to_owned))) + "\n";
    for Row { cells, colour } in rows {
        let line = line(cells);
        text += &colour.map_or_else(|| line.clone(), |colour| paint(style, colour, &line));
        text.push('\n');
    }
    text
}

/// To the terminal's width, marked with an ellipsis.
pub(crate) fn cut(line: &str, width: Option<usize>) -> String {
    let Some(width) = width.filter(|width| line.width() > *width) else { return line.to_owned() };
    let mut used = 1;
    let mut result: String = line
        .chars()
        .take_while(|character| {
            used += character.width().unwrap_or(0);
            used <= width
        })
        .collect();
    result.push('…');
    result
}

/// One line for the nodes that all GPUs share.
fn shared(report: &HoldersReport) -> Option<String> {
    let parts: Vec<String> = report
        .devices
        .iter()
        .filter(|device| !device.kind.is_gpu())
        .filter(|device| device.holders > 0 || device.open_files.is_some_and(|files| files > 0))
        .map(|device| {
            let files = device.open_files.map(|files| count(files, "file") + ", ").unwrap_or_default();
            format!("{} ({files}{})", escape(&device.node), count(device.holders, "process"))
        })
        .collect();
    (!parts.is_empty()).then(|| format!("shared: {}", parts.join(", ")))
}

fn count(number: u32, noun: &str) -> String {
    match (number, noun.ends_with('s')) {
        (1, _) => format!("1 {noun}"),
        (_, true) => format!("{number} {noun}es"),
        (_, false) => format!("{number} {noun}s"),
    }
}

/// What does not fit a table.
fn below(report: &HoldersReport, groups: &Groups<'_>) -> Vec<String> {
    let HoldersReport { devices, complete, cannot_see, orphans, notes, .. } = report;
    let mut lines = Vec::new();
    let fenced: Vec<_> = devices.iter().filter(|device| device.fenced).map(|device| escape(&device.node)).collect();
    if !fenced.is_empty() {
        lines.push(format!("fenced, new opens fail: {}", fenced.join(", ")));
    }
    for (root, members) in groups {
        let end = members.iter().flat_map(|member| &member.lineage).find(|ancestor| ancestor.pid == root.pid);
        let end = end.and_then(|ancestor| ancestor.exit).map_or_else(|| "is gone".to_owned(), ended);
        let pids: Vec<u32> = members.iter().map(|member| member.pid).collect();
        lines.push(format!("left behind by {} (pid {}, {end}): {}", escape(&root.comm), root.pid, ranges(&pids)));
    }
    for orphan in orphans {
        let owner = orphan
            .last_owner
            .as_ref()
            .map_or_else(String::new, |owner| format!(", last held by {} (pid {})", escape(&owner.comm), owner.pid));
        let files = count(orphan.files, "file");
        lines.push(format!("held by no process: {} {files} {}{owner}", escape(&orphan.node), word(&orphan.how)));
    }
    if !complete {
        lines.push("incomplete: there may be holders that were not seen".to_owned());
    }
    if !cannot_see.is_empty() {
        let kinds: Vec<String> = cannot_see.iter().map(word).collect();
        lines.push(format!("cannot see: {}", kinds.join(", ")));
    }
    lines.extend(notes.iter().map(|note| format!("note: {}", escape(note))));
    lines
}

#[cfg(test)]
mod tests;
