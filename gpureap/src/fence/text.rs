//! A fence for people: one row for each device, then who tried and who is exempt.

use jiff::SignedDuration;
use unicode_width::UnicodeWidthStr as _;

use super::report::{
    Action, Change, DeniedReport, ExemptCgroup, ExemptProcess, ExemptReport, FenceReport, FencedReport,
};
use crate::out::{
    sanitize::escape,
    words::{plural, span},
};

const TITLES: [&str; 8] = ["NODE", "INDEX", "UUID", "PCI", "STATE", "LEFT", "REFUSED", "LET THROUGH"];

pub fn fence(report: &FenceReport) -> String {
    let FenceReport { action, devices, exempt, denied, notes, .. } = report;
    let mut lines = Vec::new();
    if devices.is_empty() {
        // What was not to be read, or not fenced, the notes say.
        match action {
            Action::Unfence if !notes.is_empty() => {}
            Action::Unfence => lines.push("Nothing was fenced.".to_owned()),
            Action::Fence | Action::List => lines.push("Nothing is fenced.".to_owned()),
        }
    } else {
        lines.extend(table(devices));
    }
    lines.extend(denied.iter().map(tried));
    if devices.iter().any(|device| device.fenced) {
        lines.extend(let_through(exempt));
        if *action == Action::Fence {
            lines.push("New opens fail with EPERM, in containers too. What is open stays open.".to_owned());
        }
    }
    lines.extend(notes.iter().map(|note| format!("note: {}", escape(note))));
    lines.join("\n") + "\n"
}

/// A column in which nothing is known is left out.
fn table(devices: &[FencedReport]) -> Vec<String> {
    let mut rows: Vec<[String; 8]> = vec![TITLES.map(str::to_owned)];
    rows.extend(devices.iter().map(row));
    let known: Vec<usize> =
        (0..TITLES.len()).filter(|column| rows[1..].iter().any(|row| row[*column] != "-")).collect();
    let widths: Vec<usize> =
        known.iter().map(|column| rows.iter().map(|row| row[*column].width()).max().unwrap_or(0)).collect();
    rows.iter()
        .map(|row| {
            let cells = known.iter().zip(&widths).map(|(column, width)| {
                let cell = &row[*column];
                cell.clone() + &" ".repeat(width.saturating_sub(cell.width()))
            });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        })
        .collect()
}

fn row(device: &FencedReport) -> [String; 8] {
    let FencedReport { node, index, uuid, bdf, fenced, change, left_ms, denied, exempted, .. } = device;
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let state = match change {
        Some(Change::Lowered) => "opened",
        Some(Change::Updated) => "fenced, new deadline",
        _ if *fenced => "fenced",
        _ => "open",
    };
    [
        escape(node).into_owned(),
        or_dash(index.map(|index| index.to_string())),
        or_dash(uuid.as_deref().map(|uuid| escape(uuid).into_owned())),
        or_dash(bdf.as_deref().map(|bdf| escape(bdf).into_owned())),
        state.to_owned(),
        or_dash(left_ms.map(|left| span(SignedDuration::from_millis(left.div_ceil(1_000).cast_signed() * 1_000)))),
        denied.to_string(),
        exempted.to_string(),
    ]
}

/// `refused: 12 opens of /dev/nvidia0 by worker, 3 processes, the last pid 77, user alice, unit train.service`
fn tried(denied: &DeniedReport) -> String {
    let DeniedReport { node, comm, uid, user, cgroup, unit, container, slurm_job, pod, count, processes, pids, .. } =
        denied;
    let opens = format!("{count} {}", plural(*count as usize, "open", "opens"));
    let mut parts = vec![format!("refused: {opens} of {} by {}", escape(node), escape(comm))];
    let last = pids.first().map_or_else(String::new, ToString::to_string);
    parts.push(match processes {
        1 => format!("pid {last}"),
        _ => format!("{processes} processes, the last pid {last}"),
    });
    parts.push(format!("user {}", user.as_deref().map_or_else(|| uid.to_string(), |user| escape(user).into_owned())));
    for (what, name) in [("job", slurm_job), ("pod", pod), ("container", container), ("unit", unit)] {
        parts.extend(name.as_ref().map(|name| format!("{what} {}", escape(name))));
    }
    if let (None, None, None, None, Some(cgroup)) = (slurm_job, pod, container, unit, cgroup)
        && cgroup != "/"
    {
        parts.push(format!("cgroup {}", escape(cgroup)));
    }
    parts.join(", ")
}

fn let_through(exempt: &ExemptReport) -> Option<String> {
    let ExemptReport { processes, cgroups } = exempt;
    let processes = processes.iter().map(|ExemptProcess { pid, comm, .. }| match comm {
        Some(comm) => format!("{} (pid {pid})", escape(comm)),
        None => format!("pid {pid} (gone)"),
    });
    let cgroups = cgroups.iter().map(|ExemptCgroup { id, path }| match path {
        Some(path) => format!("cgroup {}", escape(path)),
        None => format!("cgroup {id} (gone)"),
    });
    let all: Vec<String> = processes.chain(cgroups).collect();
    (!all.is_empty()).then(|| format!("exempt: {}", all.join(", ")))
}
