//! Blockers for people: who, why, how; then what to do in which order.

use super::report::{Blocker, BlockersReport, Outcome, ProcessReport, Standing};
use crate::out::{
    sanitize::escape,
    words::{plural, ranges, short_command, user, word},
};

/// From this many on, processes that are released the same way are one entry.
const CROWD: usize = 4;

pub fn text(report: &BlockersReport) -> String {
    let mut lines = vec![header(report)];
    let mut crowds: Vec<(&Blocker, Vec<&Blocker>)> = Vec::new();
    for blocker in &report.blockers {
        let alike = |first: &Blocker| {
            blocker.process.is_some()
                && first.process.is_some()
                && first.standing == blocker.standing
                && !blocker.release.commands.is_empty()
                && first.release == blocker.release
        };
        match crowds.iter_mut().find(|(first, _)| alike(first)) {
            Some((_, members)) => members.push(blocker),
            None => crowds.push((blocker, vec![blocker])),
        }
    }
    for (first, members) in crowds {
        if members.len() >= CROWD {
            lines.extend(crowd(first, &members));
        } else {
            lines.extend(members.into_iter().flat_map(entry));
        }
    }
    if !report.steps.is_empty() {
        lines.push("in this order:".to_owned());
        let numbered = report.steps.iter().enumerate();
        lines.extend(numbered.map(|(position, step)| format!("  {}. {}", position + 1, escape(&step.command))));
    }
    lines.extend(report.then.iter().map(|command| format!("then: {}", escape(command))));
    if !report.afterwards.is_empty() {
        lines.extend(report.afterwards.iter().map(|command| format!("afterwards: {}", escape(command))));
    }
    lines.extend(report.notes.iter().map(|note| format!("note: {}", escape(note))));
    lines.push(verdict(report));
    lines.join("\n") + "\n"
}

fn header(report: &BlockersReport) -> String {
    let names: Vec<String> = report
        .devices
        .iter()
        .map(|device| {
            let uuid = device.uuid.as_ref().map(|uuid| format!(" ({uuid})")).unwrap_or_default();
            escape(&format!("{}{uuid}", device.node)).into_owned()
        })
        .collect();
    let names = if names.is_empty() { "no GPU".to_owned() } else { names.join(", ") };
    format!("{} of {names}; source: {}", report.operation.name(), word(&report.source))
}

fn entry(blocker: &Blocker) -> Vec<String> {
    let Blocker { kind, standing, why, process, .. } = blocker;
    let first = match process {
        Some(process) => format!("{:<8} {}", word(standing), who(process)),
        None => format!("{:<8} {}: {}", word(standing), word(kind), escape(why)),
    };
    let mut lines = vec![first];
    if process.is_some() {
        lines.push(format!("         {}", escape(why)));
    }
    lines.extend(release(blocker));
    lines
}

fn crowd(first: &Blocker, members: &[&Blocker]) -> Vec<String> {
    let mut pids: Vec<u32> = members.iter().filter_map(|blocker| Some(blocker.process.as_ref()?.pid)).collect();
    pids.sort_unstable();
    let mut lines = vec![
        format!("{:<8} {} processes: {}", word(&first.standing), pids.len(), ranges(&pids)),
        format!("         like {}", first.process.as_ref().map(who).unwrap_or_default()),
        format!("         {}", escape(&first.why)),
    ];
    lines.extend(release(first));
    lines
}

fn release(blocker: &Blocker) -> Vec<String> {
    let commands = blocker.release.commands.iter().map(|command| format!("         release: {}", escape(command)));
    let note = blocker.release.note.iter().map(|note| format!("         note: {}", escape(note)));
    commands.chain(note).collect()
}

fn who(process: &ProcessReport) -> String {
    let ProcessReport { pid, comm, argv, uid, user: name, service, unit, container, slurm_job, pod, .. } = process;
    let places = [("", service), ("pod ", pod), ("Slurm job ", slurm_job), ("container ", container), ("unit ", unit)];
    let places: Vec<String> =
        places.into_iter().filter_map(|(what, name)| Some(format!("{what}{}", escape(name.as_deref()?)))).collect();
    let places = if places.is_empty() { String::new() } else { format!("  ({})", places.join(", ")) };
    format!("{pid:>7}  {:<10} {}{places}", user(name.as_deref(), *uid), short_command(comm, argv))
}

fn verdict(report: &BlockersReport) -> String {
    let count =
        |standings: &[Standing]| report.blockers.iter().filter(|blocker| standings.contains(&blocker.standing)).count();
    let parts: Vec<String> = [
        (count(&[Standing::Job]), "job process", "job processes"),
        (count(&[Standing::Monitor]), "monitor", "monitors"),
        (count(&[Standing::System]), "system process", "system processes"),
        (count(&[Standing::Kernel]), "kernel reference", "kernel references"),
    ]
    .into_iter()
    .filter(|(count, ..)| *count > 0)
    .map(|(count, one, many)| format!("{count} {}", plural(count, one, many)))
    .collect();
    match report.outcome {
        Outcome::Clear => "nothing is in the way".to_owned(),
        Outcome::Unknown if parts.is_empty() => "nothing that may be seen is in the way".to_owned(),
        _ => format!("in the way: {}", parts.join(", ")),
    }
}
