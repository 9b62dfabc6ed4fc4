//! An event as one line for people.

use super::event::{
    Event, Exit, FileEvent, Fork, Held, HeldDevice, Lost, Memory, Oom, OomScope, Peer, Process, Reap, Sender, Signal,
    Start, What, Xid,
};
use crate::{
    holders::report::ExitReport,
    out::{
        sanitize::escape,
        words::{self, plural, word},
    },
};

/// `2026-12-01T01:02:03.123456Z  exit      976 python3: killed by SIGKILL`
pub fn line(event: &Event) -> String {
    let Event { time, boot_ns: _, what } = event;
    let (kind, text) = words_of(what);
    format!("{time:.6}  {kind:<7} {text}\n")
}

/// The same for a screen that has little room: `01:02:03  exit    976 python3: killed by SIGKILL`.
pub fn short(event: &Event) -> String {
    let Event { time, boot_ns: _, what } = event;
    let (kind, text) = words_of(what);
    format!("{}  {kind:<7} {text}", time.strftime("%H:%M:%S"))
}

fn words_of(what: &What) -> (&'static str, String) {
    match what {
        What::Start(Start { version, backend, adopted, daemon_pid, devices, .. }) => {
            let how = if *adopted { ", which went on tracing meanwhile" } else { "" };
            let devices = format!("{} {}", devices.len(), plural(devices.len(), "device", "devices"));
            ("start", format!("daemon {version} (pid {daemon_pid}) records {devices} with {}{how}", word(backend)))
        }
        What::Stop => ("stop", "the daemon ends".to_owned()),
        What::Open(file) => ("open", format!("{} opens {}", who(file), escape(&file.node))),
        What::Close(file) => {
            let pid = file.key.map_or_else(|| "?".to_owned(), |key| key.pid.to_string());
            ("close", format!("{pid} has closed its last descriptor of {}", escape(&file.node)))
        }
        What::Free(FileEvent { node, failed, .. }) => {
            let text = if *failed { "an open has failed" } else { "a file is gone, the driver has let go" };
            ("free", format!("{}: {text}", escape(node)))
        }
        What::Held(held) => ("held", held_words(held)),
        What::Fork(Fork { key, parent, comm }) => {
            ("fork", format!("{} forks {} {}", parent.pid, key.pid, escape(comm)))
        }
        What::Exec(named) => ("exec", format!("{} is now {}", named.key.pid, escape(&named.comm))),
        What::Thread(thread) => {
            ("thread", format!("{} has thread {} {}", thread.key.pid, thread.thread.tid, escape(&thread.thread.name)))
        }
        What::Process(process) => {
            let Process { key, comm, argv, uid, user, ancestor, .. } = process.as_ref();
            let role = if *ancestor { " (an ancestor)" } else { "" };
            let command = words::short_command(comm, argv);
            ("process", format!("{}{role}: {command}, user {}", key.pid, words::user(user.as_deref(), *uid)))
        }
        What::Signal(signal) => ("signal", signal_words(signal)),
        What::Oom(Oom { key, tid, comm, scope, cgroup, source }) => {
            let pid = key.map_or(*tid, |key| key.pid);
            let where_ = match (scope, cgroup) {
                (Some(OomScope::Cgroup), Some(cgroup)) => format!(", limit of {}", escape(cgroup)),
                (Some(OomScope::Cgroup), None) => ", limit of a cgroup".to_owned(),
                (Some(OomScope::Global), _) => ", memory of the host".to_owned(),
                (None, _) => String::new(),
            };
            ("oom", format!("{pid} {} is chosen by the out-of-memory killer{where_} ({source})", escape(comm)))
        }
        What::Xid(Xid { bdf, node, xid, pid, name: _, message, source }) => {
            let node = node.as_deref().unwrap_or(bdf);
            let pid = pid.map(|pid| format!(" pid {pid}")).unwrap_or_default();
            ("xid", format!("{}: Xid {xid}{pid}: {} ({source})", escape(node), escape(message)))
        }
        What::Reap(Reap { key, signal, unit, cgroup, by_pid, by_uid: _ }) => {
            let what = match (signal, unit, cgroup) {
                (_, Some(unit), _) => format!("stops {}", escape(unit)),
                (_, _, Some(cgroup)) => format!("kills {}", escape(cgroup)),
                (Some(signal), ..) => format!("sends {}", escape(signal)),
                (None, None, None) => "signals".to_owned(),
            };
            ("reap", format!("gpureap (pid {by_pid}) {what} for {}", key.pid))
        }
        What::Exit(Exit { key, tid: _, comm, status }) => {
            let report = ExitReport::from_status(*status);
            let ended = words::ended(report);
            let core = if report.core { ", core dumped" } else { "" };
            ("exit", format!("{} {}: {ended}{core}", key.pid, escape(comm)))
        }
        What::Closed(subject) => ("closed", format!("{} has let go of everything", subject.key.pid)),
        What::Peer(Peer { key, of, state, wchan }) => {
            let wchan = wchan.as_ref().map(|wchan| format!(" in {}", escape(wchan))).unwrap_or_default();
            ("peer", format!("{} of the same job as {} is in state {state}{wchan}", key.pid, of.pid))
        }
        What::Memory(Memory { node, used_bytes, total_bytes, processes }) => {
            let count = processes.len();
            let processes = plural(count, "process", "processes");
            let (used, total) = (used_bytes >> 20, total_bytes >> 20);
            ("memory", format!("{}: {used} of {total} MiB used, {count} {processes}", escape(node)))
        }
        What::Lost(Lost { events, at, note }) => ("lost", format!("{events} at the {at}: {}", escape(note))),
    }
}

fn who(file: &FileEvent) -> String {
    let pid = file.key.map_or_else(|| "?".to_owned(), |key| key.pid.to_string());
    format!("{pid} {}", escape(&file.comm))
}

fn held_words(held: &Held) -> String {
    let Held { key, inherited_from, from_snapshot, devices } = held;
    if devices.is_empty() {
        return format!("{} holds nothing any more", key.pid);
    }
    let list: Vec<String> = devices
        .iter()
        .map(|HeldDevice { node, fds, maps, role: _, first_ns: _ }| {
            format!("{} ({fds} fds, {maps} maps)", escape(node))
        })
        .collect();
    let origin = match (inherited_from, from_snapshot) {
        (_, true) => ", since before the tracer".to_owned(),
        (Some(from), false) => format!(", inherited from {}", from.pid),
        (None, false) => String::new(),
    };
    format!("{} holds {}{origin}", key.pid, words::nodes(&list))
}

fn signal_words(signal: &Signal) -> String {
    let Signal { key, tid, thread, signal, code: _, sender, running } = signal;
    let target = format!("{} (thread {tid} {})", key.pid, escape(thread));
    let by = |sender: &Sender| format!("{} {}", sender.key.pid, escape(&sender.comm));
    match (sender, running) {
        (Some(sender), _) if sender.key == *key => format!("{signal} raised by {target} itself"),
        (Some(sender), _) => format!("{signal} to {target} from {}", by(sender)),
        (None, Some(running)) if running.key != *key => {
            format!("{signal} to {target} from the kernel while {} ran", by(running))
        }
        (None, _) => format!("{signal} to {target} from the kernel"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rows::{Key, Thread};

    #[test]
    fn one_line_each_and_nothing_for_the_terminal() {
        let key = Key { pid: 976, start_ns: 5 };
        let evil = "py\u{1b}[31m\n".to_owned();
        let sender = Sender { key: Key { pid: 812, start_ns: 1 }, comm: evil.clone(), ..Sender::default() };
        let signal = Signal {
            key,
            tid: 976,
            thread: evil.clone(),
            signal: "SIGKILL".to_owned(),
            code: None,
            sender: Some(Box::new(sender)),
            running: None,
        };
        for (what, expected) in [
            (
                What::Exit(Exit { key, tid: 976, comm: evil.clone(), status: 9 }),
                "exit    976 py\\x1b[31m\\n: killed by SIGKILL",
            ),
            (
                What::Exit(Exit { key, tid: 976, comm: "x".into(), status: 0x8b }),
                "exit    976 x: killed by SIGSEGV, core dumped",
            ),
            (What::Signal(signal), "signal  SIGKILL to 976 (thread 976 py\\x1b[31m\\n) from 812 py\\x1b[31m\\n"),
            (
                What::Thread(super::super::event::ThreadEvent { key, thread: Thread { tid: 980, name: evil } }),
                "thread  976 has thread 980 py\\x1b[31m\\n",
            ),
        ] {
            let event = Event { time: jiff::Timestamp::UNIX_EPOCH, boot_ns: 0, what };
            assert_eq!(line(&event), format!("1970-01-01T00:00:00.000000Z  {expected}\n"));
        }
    }
}
