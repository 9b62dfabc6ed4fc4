//! A reap for people: one line for each process, then the proof.

use std::collections::BTreeSet;

use super::{
    door::DoorReport,
    plan::Skip,
    report::{Ending, Entry, Identity, Outcome, Process, Report, Skipped, Unmatch, Unmatched},
};
use crate::{
    classify::DEFAULT_RULE,
    exit_code::Exit,
    out::{
        sanitize::escape,
        words::{self, ended, nodes, plural, ranges, short_command, took, user},
    },
};

fn who(identity: &Identity) -> String {
    counted(&identity.pid.to_string(), identity)
}

/// With something else where the pid would be.
fn counted(count: &str, identity: &Identity) -> String {
    format!("{count:>7}  {:<10}", user(identity.user.as_deref(), identity.uid))
}

fn command(identity: &Identity) -> String {
    short_command(&identity.comm, &identity.argv)
}

fn ending(process: &Process) -> String {
    let Process { result, reason, exited_ms, closed_ms, exit, stuck, .. } = process;
    let after = |time: &Option<f64>| time.map_or_else(String::new, |ms| format!(" after {}", took(ms)));
    let reason = reason.as_deref().unwrap_or("unknown reason");
    match result {
        None if process.class_rule == DEFAULT_RULE => "would be signalled".to_owned(),
        None => format!("would be signalled (class {} by rule {})", process.class.name(), escape(&process.class_rule)),
        Some(Ending::Exited) => {
            format!("{}{}", exit.map_or_else(|| "exited".to_owned(), ended), after(exited_ms))
        }
        Some(Ending::Released) => format!("let go{} and lives on", after(closed_ms)),
        Some(Ending::Vanished) => "had gone already".to_owned(),
        Some(Ending::PidReused) => "had gone already, its pid is another process's now".to_owned(),
        Some(Ending::NotPermitted) => "not permitted".to_owned(),
        Some(Ending::Failed) => format!("failed: {reason}"),
        Some(Ending::Survived) => stuck.as_ref().map_or_else(
            || "still holds".to_owned(),
            |stuck| {
                let wchan = stuck.wchan.as_ref().map_or_else(String::new, |wchan| format!(" in {wchan}"));
                let wchan = if stuck.in_kernel == Some(true) { " busy in the kernel".to_owned() } else { wchan };
                format!("still holds: thread {} in state {}{wchan}", stuck.tid, stuck.state)
            },
        ),
    }
}

/// What one line says of it, but for who it is.
fn line(who: &str, entry: &Process, first_signal: &str) -> String {
    let stop = entry.unit_stopped.iter().map(|_| "STOP");
    let signals = entry.signals.iter().map(|sent| sent.signal.strip_prefix("SIG").unwrap_or(&sent.signal));
    let sent: Vec<&str> = stop.chain(signals).collect();
    let sent = match (entry.result, sent.is_empty()) {
        (None, true) => first_signal.to_owned(),
        (Some(_), true) => "-".to_owned(),
        (_, false) => sent.join("+"),
    };
    format!("{sent:<9} {who}  {}  {}  {}", held(entry), command(&entry.identity), ending(entry))
}

fn process(text: &mut String, entry: &Process, first_signal: &str) {
    push(text, &line(&who(&entry.identity), entry, first_signal));
    if let Some(stuck) = &entry.stuck {
        push(
            text,
            &format!(
                "          {} {} of age {} s{}",
                escape(&stuck.thread),
                stuck.tid,
                stuck.age_s,
                if stuck.kill_pending { ", SIGKILL is pending" } else { "" }
            ),
        );
        for frame in &stuck.stack {
            push(text, &format!("            {frame}"));
        }
    }
}

/// What it holds, or why it goes along.
fn held(entry: &Process) -> String {
    match entry.via {
        Entry::Device => nodes(&entry.nodes),
        Entry::Tree => "(process tree)".to_owned(),
        Entry::Cgroup => "(cgroup)".to_owned(),
    }
}

fn push(text: &mut String, line: &str) {
    text.push_str(line.trim_end());
    text.push('\n');
}

/// The plan, before anything is done. `first_signal` is what the targets would get.
pub fn plan(report: &Report, first_signal: &str) -> String {
    let mut text = String::new();
    for entry in &report.processes {
        process(&mut text, entry, first_signal.strip_prefix("SIG").unwrap_or(first_signal));
    }
    skipped(&mut text, report);
    for entry in &report.unmatched {
        push(&mut text, &unmatched(entry, ""));
    }
    if text.is_empty() {
        let how = if used_only(report) { "uses" } else { "holds" };
        let whom = if report.complete { "nobody" } else { "nobody that was seen" };
        push(&mut text, &format!("{whom} {how} what was chosen"));
    }
    incomplete(&mut text, report);
    notes(&mut text, report);
    text
}

/// Why a process that was named is not reaped.
fn unmatched(entry: &Unmatched, how: &str) -> String {
    let Unmatched { pid, reason, process } = entry;
    match (reason, process) {
        (Unmatch::NoSuchProcess, _) => format!("no process {pid}"),
        (Unmatch::HoldsNothing, _) => format!("process {pid} holds nothing of what was chosen{how}"),
        (Unmatch::LeftOut, _) => format!("process {pid} is left out by the other filters"),
        (Unmatch::NotVisible, _) => {
            format!("process {pid}: not permitted, what it holds is not visible to this caller; root may look")
        }
        (Unmatch::Thread, Some(process)) => format!("{pid} is a thread of process {process}; name the process"),
        (Unmatch::Thread, None) => format!("{pid} is a thread; name its process"),
    }
}

/// Whether there are processes that have what was chosen open without using it.
fn used_only(report: &Report) -> bool {
    report.skipped.iter().any(|entry| entry.reason == Skip::HandleOnly)
}

fn incomplete(text: &mut String, report: &Report) {
    if !report.complete {
        push(text, "incomplete: there may be holders that were not seen");
    }
}

fn notes(text: &mut String, report: &Report) {
    for note in &report.notes {
        push(text, &format!("note: {}", escape(note)));
    }
}

/// Those with a handle alone are in a note, all in one line.
fn skipped_holders(report: &Report) -> impl Iterator<Item = &Skipped> {
    report.skipped.iter().filter(|entry| entry.reason != Skip::HandleOnly)
}

fn skipped(text: &mut String, report: &Report) {
    for entry in skipped_holders(report) {
        push(
            text,
            &format!(
                "skipped   {}  {}  {}  {}",
                who(&entry.identity),
                nodes(&entry.nodes),
                command(&entry.identity),
                reason(entry)
            ),
        );
    }
}

/// With the rule that protects, by which it can be taken along.
fn reason(entry: &Skipped) -> String {
    let Skipped { reason, class_rule, .. } = entry;
    match reason {
        Skip::Protected | Skip::Monitor => {
            let rule = escape(class_rule);
            let or = if *reason == Skip::Monitor { "--stop-monitors or " } else { "" };
            format!("{} by rule {rule}; {or}--include-protected {rule} takes it along", reason.sentence())
        }
        _ => reason.sentence().to_owned(),
    }
}

/// Fewer of a kind get a line each.
const MANY: usize = 4;

/// The processes of a job differ in nothing but their pids and times: many of a kind share a line.
fn processes(text: &mut String, entries: &[Process]) {
    // What the line of one says, but for pid and time; `None`: it is told alone.
    let kind = |entry: &Process| {
        let Process { identity, result, stuck, signals, exit, via, nodes, unit_stopped, reason, .. } = entry;
        let Identity { comm, argv, uid, .. } = identity;
        let signals: Vec<&str> = signals.iter().map(|sent| sent.signal.as_str()).collect();
        let alone = stuck.is_some() || *result == Some(Ending::Survived);
        (!alone).then(|| {
            let ending = format!("{result:?} {exit:?} {reason:?} {unit_stopped:?} {via:?}");
            (argv.clone(), comm.clone(), *uid, nodes.clone(), signals.join("+"), ending)
        })
    };
    let kinds: Vec<_> = entries.iter().map(kind).collect();
    let mut told: BTreeSet<usize> = BTreeSet::new();
    for (position, entry) in entries.iter().enumerate() {
        if told.contains(&position) {
            continue;
        }
        let own = &kinds[position];
        let same: Vec<usize> = (position..entries.len())
            .filter(|other| *other == position || own.is_some() && kinds[*other] == *own)
            .collect();
        if same.len() < MANY {
            process(text, entry, "");
            continue;
        }
        told.extend(&same);
        several(text, &same.iter().map(|other| &entries[*other]).collect::<Vec<_>>());
    }
}

/// One line for all of a kind, and one with their pids.
fn several(text: &mut String, entries: &[&Process]) {
    let mut first = entries[0].clone();
    let times: Vec<f64> = entries.iter().filter_map(|entry| entry.exited_ms.or(entry.closed_ms)).collect();
    let (least, most) = (times.iter().copied().fold(f64::MAX, f64::min), times.iter().copied().fold(0.0, f64::max));
    (first.exited_ms, first.closed_ms) = (None, None);
    let line = line(&counted(&format!("{} ×", entries.len()), &first.identity), &first, "");
    let span = if times.is_empty() { String::new() } else { format!(" after {} to {}", took(least), took(most)) };
    push(text, &format!("{line}{span}"));
    let pids: BTreeSet<u32> = entries.iter().map(|entry| entry.identity.pid).collect();
    push(text, &format!("          pids {}", ranges(&pids.into_iter().collect::<Vec<_>>())));
}

/// Everything that was done, and what it came to.
pub fn report(report: &Report) -> String {
    let mut text = String::new();
    processes(&mut text, &report.processes);
    skipped(&mut text, report);
    for entry in &report.respawned {
        let by = entry.identity.unit.as_ref().or(entry.identity.container.as_ref()).map_or_else(
            || {
                let parent = entry.identity.parent.as_ref();
                parent
                    .map_or_else(String::new, |parent| format!(", started by {} {}", parent.pid, escape(&parent.comm)))
            },
            |unit| format!(", started by {}", escape(unit)),
        );
        push(
            &mut text,
            &format!("appeared  {}  {}  {}{by}", who(&entry.identity), nodes(&entry.nodes), command(&entry.identity)),
        );
    }
    if let Some(DoorReport { denied, tried }) = &report.fence
        && *denied > 0
    {
        let names: BTreeSet<String> = tried.iter().map(|one| escape(&one.comm).into_owned()).collect();
        let names: Vec<String> = names.into_iter().take(3).collect();
        push(
            &mut text,
            &format!("fenced    {denied} {} refused ({})", plural(*denied as usize, "open", "opens"), names.join(", ")),
        );
    }
    // Where nothing else was to be done, they are the last line.
    if report.outcome != Some(Outcome::NothingToDo) {
        for entry in &report.unmatched {
            push(&mut text, &format!("note: {}", unmatched(entry, "")));
        }
    }
    incomplete(&mut text, report);
    notes(&mut text, report);
    push(&mut text, &proof(report));
    text
}

/// The last line.
fn proof(report: &Report) -> String {
    let Report { outcome, processes, devices, respawned, elapsed_ms, .. } = report;
    let time = took(*elapsed_ms);
    let held: Vec<String> = devices
        .iter()
        .filter(|device| device.after.is_some_and(|after| after.holders > 0))
        .map(|device| device.node.clone())
        .collect();
    let held = if held.is_empty() { "what was chosen".to_owned() } else { nodes(&held) };
    match outcome {
        None => "nothing was done".to_owned(),
        Some(Outcome::NothingToDo) => nothing_to_do(report),
        Some(Outcome::Freed) => {
            let gone = processes.len();
            let what = plural(gone, "process", "processes");
            format!("freed in {time}: {gone} {what} gone{}", how(report))
        }
        Some(Outcome::Held) => {
            let mut causes = Vec::new();
            let still = processes
                .iter()
                .filter(|entry| matches!(entry.result, Some(Ending::Survived | Ending::NotPermitted | Ending::Failed)))
                .count();
            for (count, what) in [
                (still, "not freed"),
                (respawned.len(), "appeared meanwhile"),
                (skipped_holders(report).count(), "skipped"),
            ] {
                if count > 0 {
                    causes.push(format!("{count} {what}"));
                }
            }
            format!("still held after {time}: {held} ({})", causes.join(", "))
        }
        Some(Outcome::Unkillable) => format!("still held after {time}: {held}, by a process that SIGKILL does not end"),
        Some(Outcome::Protected) => format!("still held: {held}, only by protected or monitor processes"),
        Some(Outcome::KernelReference) => {
            format!("no process holds what was chosen, but something in the kernel still does ({time})")
        }
    }
}

fn nothing_to_do(report: &Report) -> String {
    let how = how(report);
    if !report.unmatched.is_empty() {
        let sentences: Vec<String> = report.unmatched.iter().map(|entry| unmatched(entry, &how)).collect();
        sentences.join("; ")
    } else if report.exit_code != Exit::Done as u8 {
        format!("nothing was done: nobody that was seen holds what was chosen{how}")
    } else if used_only(report) {
        format!("nothing to do: nobody uses what was chosen{how}")
    } else {
        format!("free: nobody held what was chosen{how}")
    }
}

fn how(report: &Report) -> String {
    format!(", {}", words::proof(report.verified, report.source, &report.cannot_see))
}
