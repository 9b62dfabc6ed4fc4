//! Where the screen's contents come from, and who does what it asks: a thread each, since each may have to wait.

use std::{
    ffi::OsString,
    io,
    path::Path,
    process::{Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, SendError, Sender, SyncSender},
    thread,
    time::{Duration, Instant},
};

use ratatui::crossterm::event;
use tokio::signal::unix::{SignalKind, signal};

use super::{
    app::{Deed, GRACE, TTL},
    rows::Memories,
};
use crate::{
    api::{self, client, client::Unanswered},
    cli::HoldersArgs,
    clock::boottime_ns,
    commands::holders,
    config::{self, Config},
    exit_code::Exit,
    gpu::nvml::{NvmlChild, NvmlTrouble},
    history::{
        event::{Event, What},
        line,
        rows::Key,
    },
    holders::report::HoldersReport,
    out::words::{took, word},
    reap::report::Report,
    watch::Watch,
};

/// What the threads tell the screen.
pub(super) enum Message {
    Report(Box<Result<HoldersReport, String>>),
    Memory(Result<Memories, String>),
    Event(String),
    /// Whether there are events from now on, and else why not.
    Events(Result<(), String>),
    Terminal(event::Event),
    /// The terminal is gone, or a signal ends this.
    Closed,
    Done(String),
}

/// Between two looks, however much happens.
const LEAST: Duration = Duration::from_millis(200);
/// Between two questions to NVML. Its start opens every GPU.
const MEMORY_PERIOD: Duration = Duration::from_secs(5);
/// For NVML's child to end.
const PATIENCE: Duration = Duration::from_secs(1);
/// Before a daemon that went is looked for again.
const AGAIN: Duration = Duration::from_secs(5);

fn start(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(name.to_owned()).spawn(body).map(drop)
}

/// Looks, and looks again when something has happened, when the time is up, or when it is told to.
pub(super) fn looks(
    config: Config,
    args: HoldersArgs,
    interval: Duration,
    asks: Receiver<()>,
    out: SyncSender<Message>,
) -> io::Result<()> {
    start("looks", move || {
        let mut watch = Watch::new(&config.paths.run);
        loop {
            let begun = Instant::now();
            let report = holders::report(&args, &config).map_err(|error| format!("{error:#}"));
            if out.send(Message::Report(Box::new(report))).is_err() {
                return;
            }
            match asks.recv_timeout(LEAST.max(begun.elapsed())) {
                Ok(()) => continue,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {}
            }
            let until = begun + interval;
            // In steps, so that a wish to look is not kept waiting.
            while Instant::now() < until && asks.try_recv().is_err() {
                let step = LEAST.min(until.saturating_duration_since(Instant::now()));
                let woken = watch.wait(&[], boottime_ns() + step.as_nanos() as u64);
                if woken.is_ok_and(|woken| woken.event) {
                    break;
                }
            }
            if !watch.hears() {
                watch = Watch::new(&config.paths.run);
            }
        }
    })
}

/// The record keeps more than anybody can read as it passes.
const fn matters(what: &What) -> bool {
    !matches!(what, What::Process(_) | What::Thread(_) | What::Held(_) | What::Memory(_) | What::Peer(_))
}

/// Until the daemon or the screen is gone.
fn tell(
    stream: impl Iterator<Item = Result<Event, Unanswered>>,
    out: &SyncSender<Message>,
) -> Result<(), SendError<Message>> {
    out.send(Message::Events(Ok(())))?;
    for event in stream.map_while(Result::ok).filter(|event| matters(&event.what)) {
        out.send(Message::Event(line::short(&event)))?;
    }
    out.send(Message::Events(Err("no events: the daemon is gone".to_owned())))
}

/// What the daemon sees, a line each.
pub(super) fn events(config: &Config, out: SyncSender<Message>) -> io::Result<()> {
    let path = api::path(&config.paths.run);
    start("events", move || {
        loop {
            let told = match client::follow(&path) {
                Ok(stream) => tell(stream, &out),
                Err(error) => out.send(Message::Events(Err(format!("no events: {error}")))),
            };
            if told.is_err() {
                return;
            }
            thread::sleep(AGAIN);
        }
    })
}

/// Memory by GPU and process.
pub(super) fn memory(nvml: config::Nvml, out: SyncSender<Message>) -> io::Result<()> {
    start("memory", move || {
        let ask = || -> Result<Memories, NvmlTrouble> {
            let mut child = NvmlChild::spawn(&nvml)?;
            let answer = child.ask(nvml.timeout);
            child.close(PATIENCE);
            answer.map(|snapshot| Memories::new(&snapshot))
        };
        loop {
            let answer = ask();
            let off = answer == Err(NvmlTrouble::Disabled);
            if out.send(Message::Memory(answer.map_err(|trouble| trouble.to_string()))).is_err() || off {
                return;
            }
            thread::sleep(MEMORY_PERIOD);
        }
    })
}

/// Keys, and that the terminal has another size.
pub(super) fn terminal(out: SyncSender<Message>) -> io::Result<()> {
    start("terminal", move || {
        loop {
            let message = event::read().map_or(Message::Closed, Message::Terminal);
            let last = matches!(message, Message::Closed);
            if out.send(message).is_err() || last {
                return;
            }
        }
    })
}

/// Signals that end a program: the terminal is put back first.
pub(super) fn signals(out: SyncSender<Message>) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    start("signals", move || {
        let next = runtime.block_on(async {
            let mut terminate = signal(SignalKind::terminate())?;
            let mut hangup = signal(SignalKind::hangup())?;
            let mut interrupt = signal(SignalKind::interrupt())?;
            let mut quit = signal(SignalKind::quit())?;
            tokio::select! {
                _ = terminate.recv() => {}
                _ = hangup.recv() => {}
                _ = interrupt.recv() => {}
                _ = quit.recv() => {}
            }
            io::Result::Ok(())
        });
        match next {
            Ok(()) => drop(out.send(Message::Closed)),
            Err(error) => tracing::debug!(%error, "signals are not watched"),
        }
    })
}

/// Does what was confirmed with the very commands that do it without a screen, so that nothing is done in two ways.
pub(super) fn deed(
    config: &Config,
    words: &[OsString],
    deed: Deed,
    looks: Sender<()>,
    out: SyncSender<Message>,
) -> io::Result<()> {
    let (config, words) = (config.clone(), words.to_vec());
    start("deed", move || {
        let said = still_there(&config, &deed).and_then(|()| carry_out(&words, &deed));
        let said = said.unwrap_or_else(|trouble| trouble);
        // Whoever is gone needs to know no more.
        looks.send(()).ok();
        out.send(Message::Done(said)).ok();
    })
}

/// A pid that was on the screen may be somebody else's by the time of the yes.
fn still_there(config: &Config, deed: &Deed) -> Result<(), String> {
    let Deed::Reap { who: Key { pid, start_ns }, comm, .. } = deed else { return Ok(()) };
    let mut args = HoldersArgs::default();
    args.choosing.pid = vec![*pid];
    let report = holders::report(&args, config).map_err(|error| format!("{error:#}"))?;
    if report.holders.iter().any(|holder| (holder.pid, holder.start_ns) == (*pid, *start_ns)) {
        Ok(())
    } else {
        Err(format!("{comm} (pid {pid}) holds nothing any more"))
    }
}

fn carry_out(words: &[OsString], deed: &Deed) -> Result<String, String> {
    let mut command = Command::new(Path::new("/proc/self/exe"));
    match deed {
        Deed::Reap { who, now, .. } => {
            command.args(["reap", "--yes", "--json", "--include-own-session", "--pid", &who.pid.to_string()]);
            if *now {
                command.arg("--now");
            } else {
                command.args(["--grace", &format!("{}s", GRACE.as_secs())]);
            }
        }
        Deed::Fence { node } => {
            command.args(["fence", "--ttl", &format!("{}s", TTL.as_secs()), "--gpu", node]);
        }
        Deed::Unfence { node } => {
            command.args(["unfence", "--gpu", node]);
        }
    }
    let done =
        command.args(words).stdin(Stdio::null()).output().map_err(|error| format!("cannot be started: {error}"))?;
    let complaint = String::from_utf8_lossy(&done.stderr);
    let complaint = complaint.lines().last().unwrap_or("nothing was said").trim_start_matches("gpureap: ");
    match deed {
        Deed::Reap { who, comm, .. } => serde_json::from_slice(&done.stdout)
            .map(|report| format!("{comm} (pid {}): {}", who.pid, sentence(&report, done.status.code())))
            .map_err(|_not_a_report| complaint.to_owned()),
        Deed::Fence { node } if done.status.success() => Ok(format!("{node} is fenced for {} min", TTL.as_secs() / 60)),
        Deed::Unfence { node } if done.status.success() => Ok(format!("{node} can be opened again")),
        _ => Err(complaint.to_owned()),
    }
}

/// What fits a line.
fn sentence(report: &Report, code: Option<i32>) -> String {
    let outcome = word(&report.outcome);
    if code == Some(Exit::NotPermitted as i32) {
        return format!("{outcome}, not permitted");
    }
    match report.skipped.first() {
        Some(skipped) => format!("{outcome}, skipped: {}", word(&skipped.reason)),
        None => format!("{outcome}, after {}", took(report.elapsed_ms)),
    }
}
