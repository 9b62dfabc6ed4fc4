//! One process that holds, and how it takes signals.
use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use libc::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use serde_json::json;

use super::{
    super::{
        child::Child,
        sys::{self, O_CLOEXEC, O_RDWR},
        truth::{Skip, Truth, devices, key},
    },
    Kind, Report, Scene,
};

pub(super) const KINDS: &[Kind] = &[
    ("plain", plain),
    ("many", many),
    ("three-nodes", three_nodes),
    ("inherit-exec", inherit_exec),
    ("cloexec-exec", cloexec_exec),
    ("hostile-name", hostile_name),
    ("named", named),
    ("ignore-term", ignore_term),
    ("term-slow", term_slow),
    ("signal-count", signal_count),
    ("at-pid", at_pid),
    ("quick-exit", quick_exit),
];

/// `plain DEV`: one descriptor.
fn plain(scene: &Scene) -> Result<Report, Skip> {
    let child = scene.holder(|cue| {
        cue.done();
        sys::live();
    });
    Ok(scene.report(child.pid, &Truth::files(1).fds(child.pid, 1)))
}

/// `many DEV N`: one process that opened the device so many times.
fn many(scene: &Scene) -> Result<Report, Skip> {
    let count: usize = scene.argument(0, "N")?;
    let child = Child::fork(|cue| {
        for _ in 0..count {
            scene.open(O_RDWR);
        }
        cue.done();
        sys::live();
    });
    child.done();
    Ok(scene.report(child.pid, &Truth::files(count).fds(child.pid, count)))
}

/// `three-nodes DEV DEV2 DEV3`: one process, three devices.
fn three_nodes(scene: &Scene) -> Result<Report, Skip> {
    let nodes: [String; 3] = [scene.dev.to_owned(), scene.argument(0, "DEV2")?, scene.argument(1, "DEV3")?];
    for node in &nodes {
        sys::close(sys::try_open(node, O_RDWR).map_err(|error| Skip(format!("{node}: {error}")))?);
    }
    let child = Child::fork(|cue| {
        for node in &nodes {
            sys::open(node, O_RDWR | libc::O_NOCTTY);
        }
        cue.done();
        sys::live();
    });
    child.done();
    let truth = Truth::files(1).fds(child.pid, 1);
    let keys = nodes.map(|node| sys::device_number(node).map(key));
    let keys: Vec<String> = keys.into_iter().collect::<Result<_, _>>()?;
    Ok(Report::new(child.pid, devices(keys.iter().map(|device| (device.as_str(), &truth)))))
}

fn exec(scene: &Scene, flags: i32, after: usize) -> Report {
    let child = Child::fork(|cue| {
        scene.open(flags);
        cue.exec_live();
    });
    child.done();
    scene.report(child.pid, &Truth::files(after).fds(child.pid, after))
}

/// `inherit-exec DEV`: opened before an exec, without close-on-exec.
fn inherit_exec(scene: &Scene) -> Result<Report, Skip> {
    Ok(exec(scene, O_RDWR, 1))
}

/// `cloexec-exec DEV`: the same with close-on-exec; holds nothing.
fn cloexec_exec(scene: &Scene) -> Result<Report, Skip> {
    Ok(exec(scene, O_RDWR | O_CLOEXEC, 0))
}

/// `hostile-name DEV`: a name and arguments that break parsers and terminals. Fields `comm` (as the kernel keeps
/// it), `argv`.
fn hostile_name(scene: &Scene) -> Result<Report, Skip> {
    let comm = "a) R 1\n\x1b[31mXYZ";
    let arguments = ["evil\nname) S 1", "tab\there", "\x1b]0;title\x07", "\u{202e}txt.exe\u{2066}", "", "quote\"'\\"];
    let child = Child::fork(|cue| {
        scene.open(O_RDWR);
        cue.exec_live_named(comm, &arguments);
    });
    child.done();
    let report = scene.report(child.pid, &Truth::files(1).fds(child.pid, 1));
    Ok(report.with("comm", comm).with("argv", json!(arguments)))
}

/// `named DEV COMM`: a process that calls itself COMM. Field `comm`.
fn named(scene: &Scene) -> Result<Report, Skip> {
    let comm: String = scene.argument(0, "COMM")?;
    let child = scene.holder(|cue| {
        sys::set_comm(comm.as_bytes());
        cue.done();
        sys::live();
    });
    Ok(scene.report(child.pid, &Truth::files(1).fds(child.pid, 1)).with("comm", comm))
}

/// `ignore-term DEV`: only SIGKILL ends it.
fn ignore_term(scene: &Scene) -> Result<Report, Skip> {
    let child = scene.holder(|cue| {
        for signal in [SIGTERM, SIGINT, SIGHUP] {
            sys::signal_ignore(signal);
        }
        cue.done();
        sys::live();
    });
    Ok(scene.report(child.pid, &Truth::files(1).fds(child.pid, 1)))
}

/// `term-slow DEV MS`: exits MS after SIGTERM, with status 0.
fn term_slow(scene: &Scene) -> Result<Report, Skip> {
    let ms: u64 = scene.argument(0, "MS")?;
    let child = scene.holder(|cue| {
        let set = sys::block_signals(&[SIGTERM]);
        cue.done();
        while sys::wait_signal(&set, 200).is_none() {
            if sys::stdin_closed_within(0).is_some() {
                sys::exit(0);
            }
        }
        sys::stdin_closed_within(ms as i32);
    });
    Ok(scene.report(child.pid, &Truth::files(1).fds(child.pid, 1)))
}

/// `signal-count DEV FILE [DEV…]`: holds each device once, stays alive, and writes `{"TERM":1,…}` to FILE at each
/// signal that can be counted.
fn signal_count(scene: &Scene) -> Result<Report, Skip> {
    let file: PathBuf = scene.argument::<String>(0, "FILE")?.into();
    let more = scene.arguments.get(1..).unwrap_or_default();
    let names =
        [(SIGTERM, "TERM"), (SIGINT, "INT"), (SIGHUP, "HUP"), (SIGQUIT, "QUIT"), (SIGUSR1, "USR1"), (SIGUSR2, "USR2")];
    let child = scene.holder(|cue| {
        for node in more {
            sys::open(node, O_RDWR);
        }
        let set = sys::block_signals(&names.map(|(signal, _)| signal));
        let mut counts = names.map(|(_, name)| (name, 0_u32));
        let write = |counts: &[(&str, u32)]| {
            let line: serde_json::Map<String, serde_json::Value> =
                counts.iter().map(|(name, count)| ((*name).to_owned(), json!(count))).collect();
            let next = file.with_extension("next");
            std::fs::write(&next, serde_json::Value::Object(line).to_string()).expect("write the counts");
            std::fs::rename(&next, &file).expect("rename the counts");
        };
        write(&counts);
        cue.done();
        while sys::stdin_closed_within(0).is_none() {
            if let Some(signal) = sys::wait_signal(&set, 100) {
                for (count, (known, _)) in counts.iter_mut().zip(names) {
                    count.1 += u32::from(known == signal);
                }
                write(&counts);
            }
        }
    });
    let truth = Truth::files(1).fds(child.pid, 1);
    let mut keys = vec![scene.device.clone()];
    for node in more {
        keys.push(key(sys::device_number(node)?));
    }
    Ok(Report::new(child.pid, devices(keys.iter().map(|device| (device.as_str(), &truth)))))
}

/// `at-pid DEV PID hold|idle`: a process with exactly this pid, which must be free; it holds the device or nothing.
fn at_pid(scene: &Scene) -> Result<Report, Skip> {
    let wanted: sys::Pid = scene.argument(0, "PID")?;
    let hold = match scene.argument::<String>(1, "hold|idle")?.as_str() {
        "hold" => true,
        "idle" => false,
        other => return Err(Skip(format!("hold or idle, not {other}"))),
    };
    let pipes = super::super::child::Pipes::new();
    let cue = pipes.cue();
    let pid = sys::fork_as(wanted).map_err(|error| Skip(format!("clone3 with pid {wanted}: {error}")))?;
    if pid == 0 {
        if hold {
            scene.open(O_RDWR);
        }
        cue.done();
        sys::live();
    }
    pipes.child(pid).done();
    let count = usize::from(hold);
    Ok(scene.report(pid, &Truth::files(count).fds(pid, count)))
}

/// `quick-exit DEV MS`: exits by itself MS after it is ready, with status 7.
fn quick_exit(scene: &Scene) -> Result<Report, Skip> {
    let ms: u64 = scene.argument(0, "MS")?;
    let until = Instant::now() + Duration::from_millis(ms);
    let child = scene.holder(|cue| {
        cue.done();
        let left = until.saturating_duration_since(Instant::now());
        sys::stdin_closed_within(left.as_millis() as i32);
        sys::exit(7);
    });
    Ok(scene.report(child.pid, &Truth::files(1).fds(child.pid, 1)))
}
