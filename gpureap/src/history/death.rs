//! Why a process ended: from its wait status and what was seen to happen to it. Where that does not decide, `unknown`
//! and what was seen.

use super::{
    event::{Oom, Reap, Sender, Signal},
    rows::{Cause, Death, HoldEnd, Key, OomDeath, Thread},
};
use crate::{
    clock::{self, NANOS},
    out::sanitize::escape,
};

/// What was seen to happen to one process.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    /// In the order of their times.
    pub signals: Vec<(u64, Signal)>,
    pub ooms: Vec<(u64, Oom)>,
    pub reaps: Vec<(u64, Reap)>,
    /// Its thread names, for signals that name a thread by its process's name.
    pub threads: Vec<Thread>,
}

/// Signals that the kernel raises in the thread that did it.
const FAULTS: [&str; 6] = ["SIGILL", "SIGTRAP", "SIGBUS", "SIGFPE", "SIGSEGV", "SIGSYS"];
/// A request to end that is older has nothing to do with an exit.
const REQUEST_NS: u64 = 600 * NANOS;

/// Numbers that are the same on x86-64 and arm64 (include/uapi/asm-generic/signal.h).
const NAMES: [&str; 32] = [
    "0",
    "SIGHUP",
    "SIGINT",
    "SIGQUIT",
    "SIGILL",
    "SIGTRAP",
    "SIGABRT",
    "SIGBUS",
    "SIGFPE",
    "SIGKILL",
    "SIGUSR1",
    "SIGSEGV",
    "SIGUSR2",
    "SIGPIPE",
    "SIGALRM",
    "SIGTERM",
    "SIGSTKFLT",
    "SIGCHLD",
    "SIGCONT",
    "SIGSTOP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGXCPU",
    "SIGXFSZ",
    "SIGVTALRM",
    "SIGPROF",
    "SIGWINCH",
    "SIGIO",
    "SIGPWR",
    "SIGSYS",
];

pub fn signal_name(number: u32) -> String {
    match NAMES.get(number as usize) {
        Some(name) if number > 0 => (*name).to_owned(),
        _ => format!("SIGRTMIN+{}", number.saturating_sub(34)),
    }
}

fn bare(cause: Cause, boot_ns: Option<u64>) -> Death {
    Death {
        cause,
        code: None,
        signal: None,
        core: false,
        boot_ns,
        sender: None,
        thread: None,
        oom: None,
        evidence: Vec::new(),
    }
}

/// How holds and processes of a boot ended whose record ends while they held: at its last sign of life, or when the daemon
/// was stopped.
pub fn of_boot(wall_offset_ns: i64, last_ns: u64, stopped_ns: Option<u64>) -> (HoldEnd, Death) {
    let said = |boot_ns| {
        let time = clock::wall(wall_offset_ns, boot_ns);
        time.round(jiff::Unit::Millisecond).unwrap_or(time)
    };
    let (ended, mut death, evidence) = if let Some(stopped_ns) = stopped_ns {
        let evidence = format!(
            "it held when the daemon was stopped at {}; the host went down at some later time, and nobody recorded what \
             happened in between",
            said(stopped_ns)
        );
        (HoldEnd::Unseen, bare(Cause::Unknown, None), evidence)
    } else {
        let evidence = format!(
            "it held at {}, the last sign of life of its boot; there is no record of that boot after it",
            said(last_ns)
        );
        (HoldEnd::HostDown, bare(Cause::HostDown, Some(last_ns)), evidence)
    };
    death.evidence.push(evidence);
    (ended, death)
}

/// Of one that ended at `exit_ns` with a wait status.
pub fn decide(key: Key, exit_ns: u64, status: u32, seen: &Seen) -> Death {
    let mut death = Death { core: status & 0x80 != 0, ..bare(Cause::Unknown, Some(exit_ns)) };
    match status & 0x7f {
        0 => by_itself(&mut death, exit_ns, status >> 8 & 0xff, seen),
        number => by_signal(&mut death, key, exit_ns, &signal_name(number), seen),
    }
    death
}

fn ago(exit_ns: u64, at_ns: u64) -> String {
    let seconds = exit_ns.saturating_sub(at_ns) as f64 / NANOS as f64;
    if seconds < 0.001 { "at once".to_owned() } else { format!("{seconds:.3} s before the end") }
}

fn by_itself(death: &mut Death, exit_ns: u64, code: u32, seen: &Seen) {
    death.cause = Cause::Exited;
    death.code = Some(code);
    death.evidence.push(format!("exit code {code}"));
    let recent = |at: u64| exit_ns.saturating_sub(at) <= REQUEST_NS;
    let reap = seen.reaps.iter().rev().find(|(at, _)| recent(*at));
    let asked = seen.signals.iter().rev().find(|(at, signal)| {
        recent(*at)
            && signal.sender.as_ref().is_some_and(|sender| sender.key != signal.key)
            && matches!(signal.signal.as_str(), "SIGTERM" | "SIGINT" | "SIGHUP" | "SIGQUIT")
    });
    if let Some((at, reap)) = reap {
        // It handled the request of a reap and ended by itself: it was the reap that ended it.
        death.cause = Cause::Reaped;
        death.evidence.insert(0, reaped(exit_ns, *at, reap));
    } else if let Some((at, signal)) = asked {
        if signal.sender.as_ref().is_some_and(|sender| sender.gpureap) {
            death.cause = Cause::Reaped;
        }
        death.evidence.push(format!("{}, {}, which it handled", told(signal), ago(exit_ns, *at)));
        death.sender = signal.sender.as_deref().cloned();
    }
    if code > 128 && signal_name(code - 128).starts_with("SIG") && code < 160 {
        death.evidence.push(format!(
            "{code} is 128 + {}: a shell or a program tells so of a {} that it saw, but no signal ended this process",
            code - 128,
            signal_name(code - 128)
        ));
    }
}

fn by_signal(death: &mut Death, key: Key, exit_ns: u64, name: &str, seen: &Seen) {
    death.signal = Some(name.to_owned());
    let matching = || seen.signals.iter().filter(|(_, signal)| signal.signal == name);
    // The first KILL ends it, however long that takes. Of others an earlier one may have been handled.
    let decider = if name == "SIGKILL" { matching().next() } else { matching().next_back() };
    let reap = seen.reaps.iter().rev().find(|(_, reap)| reap.signal.as_deref() == Some(name) || reap.signal.is_none());
    if name == "SIGKILL"
        && let Some((at, oom)) = seen.ooms.iter().find(|(_, oom)| oom.scope.is_some()).or_else(|| seen.ooms.first())
    {
        death.cause = Cause::OomKill;
        death.oom = Some(OomDeath { scope: oom.scope, cgroup: oom.cgroup.clone() });
        death.evidence.push(format!(
            "the kernel's out-of-memory killer chose it ({}), {}",
            oom.source,
            ago(exit_ns, *at)
        ));
        if oom.tid != key.pid && oom.tid != 0 {
            let thread = thread_name(seen, oom.tid);
            death.evidence.push(format!("the kernel named thread {}{thread}", oom.tid));
        }
        if oom.scope.is_none() {
            death.evidence.push("whether a cgroup's limit or the host's memory was reached was not seen".to_owned());
        }
        if let Some((_, signal)) = decider {
            death.evidence.push(told(signal));
        }
        return;
    }
    let Some((at, signal)) = decider else {
        if let Some((at, reap)) = reap {
            death.cause = Cause::Reaped;
            death.evidence.push(reaped(exit_ns, *at, reap));
        } else {
            death.evidence.push(format!("its exit status says {name}; who sent it was not seen"));
        }
        return;
    };
    death.evidence.push(format!("{}, {}", told(signal), ago(exit_ns, *at)));
    match &signal.sender {
        Some(sender) if sender.key == key => {
            death.cause = Cause::Fault;
            death.thread = Some(Thread { tid: sender.tid, name: sender.thread.clone() });
        }
        Some(sender) => {
            let by_reap = seen.reaps.iter().find(|(_, reap)| reap.by_pid == sender.key.pid);
            death.cause = if sender.gpureap || by_reap.is_some() { Cause::Reaped } else { Cause::KilledBy };
            if let Some((at, reap)) = by_reap {
                death.evidence.push(reaped(exit_ns, *at, reap));
            }
            death.sender = Some(Sender::clone(sender));
        }
        None if FAULTS.contains(&name) => {
            death.cause = Cause::Fault;
            death.thread = Some(Thread { tid: signal.tid, name: signal.thread.clone() });
        }
        // From a terminal, or a limit of the process's own.
        None if matches!(name, "SIGINT" | "SIGQUIT" | "SIGHUP" | "SIGTSTP" | "SIGXCPU" | "SIGXFSZ" | "SIGALRM") => {
            death.cause = Cause::KilledBy;
        }
        None => {}
    }
    if death.core {
        death.evidence.push("it dumped core".to_owned());
    }
    let earlier = seen.signals.iter().rev().find(|(when, other)| {
        *when < *at && other.signal != name && other.sender.as_ref().is_some_and(|sender| sender.key != key)
    });
    if let Some((when, other)) = earlier {
        death.evidence.push(format!("before that {}, {}", told(other), ago(exit_ns, *when)));
    }
}

fn thread_name(seen: &Seen, tid: u32) -> String {
    let found = seen.threads.iter().find(|thread| thread.tid == tid);
    found.map(|thread| format!(" ({})", escape(&thread.name))).unwrap_or_default()
}

fn reaped(exit_ns: u64, at_ns: u64, reap: &Reap) -> String {
    let Reap { key: _, signal, unit, cgroup, by_pid, by_uid } = reap;
    let what = match (signal, unit, cgroup) {
        (_, Some(unit), _) => format!("stopped the unit {}", escape(unit)),
        (_, _, Some(cgroup)) => format!("killed the cgroup {}", escape(cgroup)),
        (Some(signal), ..) => format!("sent {}", escape(signal)),
        (None, None, None) => "signalled it".to_owned(),
    };
    format!("gpureap (pid {by_pid}, uid {by_uid}) {what}, {}", ago(exit_ns, at_ns))
}

/// `SIGKILL from pkill (pid 812, uid 0)`, `SIGSEGV in thread 7 (worker)`.
fn told(signal: &Signal) -> String {
    let Signal { key, tid, thread, signal, code: _, sender, running } = signal;
    match sender {
        Some(sender) if sender.key == *key => {
            format!("{signal} raised by its own thread {} ({})", sender.tid, escape(&sender.thread))
        }
        Some(sender) => {
            let Sender { key, comm, thread, tid, uid, .. } = sender.as_ref();
            let by = if tid == &key.pid || thread == comm {
                String::new()
            } else {
                format!(", thread {tid} {}", escape(thread))
            };
            format!("{signal} from {} (pid {}{by}, uid {uid})", escape(comm), key.pid)
        }
        None if FAULTS.contains(&signal.as_str()) => {
            format!("{signal} by the kernel for what thread {tid} ({}) did", escape(thread))
        }
        None => {
            let during = running.as_ref().filter(|running| running.key != *key);
            let during =
                during.map(|running| format!(" while {} (pid {}) ran", escape(&running.comm), running.key.pid));
            format!("{signal} from the kernel{}", during.unwrap_or_default())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::event::OomScope;

    const ME: Key = Key { pid: 100, start_ns: 5 };
    const END: u64 = 1_000 * NANOS;

    fn sender(pid: u32, comm: &str) -> Sender {
        let (thread, comm) = (comm.to_owned(), comm.to_owned());
        Sender { key: Key { pid, start_ns: 7 }, tid: pid, thread, comm, ..Sender::default() }
    }

    fn own(tid: u32, thread: &str) -> Sender {
        Sender { key: ME, tid, thread: thread.to_owned(), comm: "python3".to_owned(), ..Sender::default() }
    }

    fn signal(name: &str, sender: impl Into<Option<Sender>>) -> Signal {
        let sender = sender.into().map(Box::new);
        Signal { key: ME, tid: 101, thread: "worker".into(), signal: name.into(), code: None, sender, running: None }
    }

    fn seen(signals: Vec<(u64, Signal)>) -> Seen {
        Seen { signals, ..Seen::default() }
    }

    fn oom(tid: u32, scope: Option<OomScope>, source: &str) -> (u64, Oom) {
        let cgroup = scope.map(|_| "/job".to_owned());
        (END, Oom { key: Some(ME), tid, comm: "python3".into(), scope, cgroup, source: source.into() })
    }

    fn reap(name: &str, by_pid: u32) -> (u64, Reap) {
        (END - NANOS, Reap { key: ME, signal: Some(name.into()), unit: None, cgroup: None, by_pid, by_uid: 0 })
    }

    #[test]
    fn causes() {
        let gpureap = Sender { gpureap: true, ..sender(9, "gpureap") };
        let killed = |comm| seen(vec![(END, signal("SIGKILL", sender(9, comm)))]);
        let table: Vec<(&str, u32, Seen, Cause)> = vec![
            ("code 0", 0, Seen::default(), Cause::Exited),
            ("code 137 by itself is no kill", 137 << 8, Seen::default(), Cause::Exited),
            ("pkill", 9, killed("pkill"), Cause::KilledBy),
            ("gpureap by its program", 9, seen(vec![(END, signal("SIGKILL", gpureap))]), Cause::Reaped),
            ("by its record", 9, Seen { reaps: vec![reap("SIGKILL", 9)], ..killed("x") }, Cause::Reaped),
            ("by its record alone", 9, Seen { reaps: vec![reap("SIGKILL", 9)], ..Seen::default() }, Cause::Reaped),
            (
                "another's kill beside a reap",
                9,
                Seen { reaps: vec![reap("SIGKILL", 8)], ..killed("x") },
                Cause::KilledBy,
            ),
            (
                "a reap's TERM that was handled",
                0,
                Seen { reaps: vec![reap("SIGTERM", 9)], ..Seen::default() },
                Cause::Reaped,
            ),
            ("nobody seen", 9, Seen::default(), Cause::Unknown),
            ("the kernel without a reason", 9, seen(vec![(END, signal("SIGKILL", None))]), Cause::Unknown),
            ("watchdog", 6, seen(vec![(END, signal("SIGABRT", own(103, "pt_nccl_watchdg")))]), Cause::Fault),
            ("segmentation fault", 0x8b, seen(vec![(END, signal("SIGSEGV", None))]), Cause::Fault),
            ("a SEGV that somebody sent", 11, seen(vec![(END, signal("SIGSEGV", sender(9, "kill")))]), Cause::KilledBy),
            ("terminal", 2, seen(vec![(END, signal("SIGINT", None))]), Cause::KilledBy),
            ("memory", 9, Seen { ooms: vec![oom(101, None, "tracepoint")], ..killed("x") }, Cause::OomKill),
            (
                "memory, but ended otherwise",
                15,
                Seen { ooms: vec![oom(100, None, "tracepoint")], ..Seen::default() },
                Cause::Unknown,
            ),
        ];
        for (name, status, seen, cause) in table {
            let death = decide(ME, END, status, &seen);
            assert_eq!(death.cause, cause, "{name}: {death:?}");
            assert!(!death.evidence.is_empty(), "{name}");
            assert_eq!(death.code.is_some(), death.signal.is_none(), "{name}");
            assert_eq!(death.core, status & 0x80 != 0, "{name}");
        }
    }

    #[test]
    fn who_and_which_thread() {
        let death = decide(ME, END, 6, &seen(vec![(END - 2_000_000, signal("SIGABRT", own(103, "pt_nccl_watchdg")))]));
        assert_eq!(death.thread, Some(Thread { tid: 103, name: "pt_nccl_watchdg".into() }));
        assert_eq!(death.evidence[0], "SIGABRT raised by its own thread 103 (pt_nccl_watchdg), 0.002 s before the end");
        assert_eq!(death.sender, None);

        let death = decide(ME, END, 11, &seen(vec![(END, signal("SIGSEGV", None))]));
        assert_eq!(death.thread, Some(Thread { tid: 101, name: "worker".into() }));

        // TERM first, KILL later, and a second KILL that found nothing to do.
        let signals = vec![
            (END - 3 * NANOS, signal("SIGTERM", sender(9, "slurmd"))),
            (END - NANOS, signal("SIGKILL", sender(9, "slurmd"))),
            (END, signal("SIGKILL", sender(10, "bash"))),
        ];
        let death = decide(ME, END, 9, &seen(signals));
        assert_eq!(death.sender.unwrap().comm, "slurmd");
        assert_eq!(death.evidence[1], "before that SIGTERM from slurmd (pid 9, uid 0), 3.000 s before the end");
    }

    #[test]
    fn an_oom_line_that_names_a_thread() {
        let threads = vec![Thread { tid: 101, name: "pt_autograd_0".into() }];
        let ooms = vec![oom(101, None, "tracepoint"), oom(100, Some(OomScope::Cgroup), "kmsg")];
        let death = decide(ME, END, 9, &Seen { ooms, threads, ..Seen::default() });
        assert_eq!(death.oom, Some(OomDeath { scope: Some(OomScope::Cgroup), cgroup: Some("/job".into()) }));
        let death = decide(
            ME,
            END,
            9,
            &Seen {
                ooms: vec![oom(101, None, "tracepoint")],
                ..Seen { threads: vec![Thread { tid: 101, name: "pt_autograd_0".into() }], ..Seen::default() }
            },
        );
        assert!(death.evidence.contains(&"the kernel named thread 101 (pt_autograd_0)".to_owned()), "{death:?}");
    }

    #[test]
    fn a_handled_request_is_told() {
        let death = decide(ME, END, 0, &seen(vec![(END - NANOS, signal("SIGTERM", sender(9, "kill")))]));
        assert_eq!((death.cause, death.code), (Cause::Exited, Some(0)));
        assert_eq!(death.evidence[1], "SIGTERM from kill (pid 9, uid 0), 1.000 s before the end, which it handled");
        let death = decide(ME, END, 137 << 8, &Seen::default());
        assert!(death.evidence[1].contains("no signal ended this process"), "{death:?}");
    }

    #[test]
    fn names_of_signals() {
        for (number, name) in
            [(1, "SIGHUP"), (9, "SIGKILL"), (11, "SIGSEGV"), (31, "SIGSYS"), (34, "SIGRTMIN+0"), (64, "SIGRTMIN+30")]
        {
            assert_eq!(signal_name(number), name);
        }
    }
}
