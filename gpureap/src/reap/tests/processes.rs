//! The real pidfd signaller on real processes; who holds is made up.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{BufRead as _, BufReader},
    os::unix::process::ExitStatusExt as _,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use super::{Subjects, Workers, device, ladder_of, policy, world::Told};
use crate::{
    model::{Eyes, Holder, How, LineageSource, NoLineage, ProcKey, Source, Usage, View},
    reap::{
        ladder::Rungs,
        pidfd::Pidfds,
        reaper::Reaper,
        report::{Ending, Outcome, Report, Scene},
        scope::Scope,
        signaller::{Delivery, Opened, Signal, Signaller as _},
        stuck::Coroner,
    },
};

/// Says that these processes hold device 0 for as long as they live.
struct Living(RefCell<Vec<ProcKey>>);

/// Start time in nanoseconds if a thread of it is alive.
fn alive(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    let state = fields.next()?;
    let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?.count();
    let ticks: u64 = fields.nth(22 - 4)?.parse().ok()?;
    (state != "Z" || threads > 1).then_some(ticks * 10_000_000)
}

impl Eyes for Living {
    fn view(&self) -> anyhow::Result<View> {
        let mut holders = Vec::new();
        for key in self.0.borrow().iter() {
            holders.extend(self.look_at(key.tgid)?);
        }
        Ok(View {
            source: Source::Snapshot,
            backend: None,
            complete: true,
            cannot_see: BTreeSet::new(),
            lost_events: 0,
            swept_ns: None,
            open_files: BTreeMap::new(),
            holders,
            orphans: Vec::new(),
            notes: Vec::new(),
        })
    }
    fn sweep(&self) -> anyhow::Result<View> {
        self.view()
    }
    fn look_at(&self, tgid: u32) -> anyhow::Result<Option<Holder>> {
        let Some(key) = self.0.borrow().iter().find(|key| key.tgid == tgid).copied() else { return Ok(None) };
        Ok(alive(tgid).map(|_| Holder {
            key,
            usage: [(0, Usage { fds: 1, ..Usage::default() })].into(),
            how: [How::Fd].into(),
            private_tids: BTreeSet::new(),
            inherited_from: None,
            from_snapshot: false,
        }))
    }
    fn lineage(&self) -> &dyn LineageSource {
        &NoLineage
    }
}

/// A shell that has said that it is ready; it is killed when dropped.
struct Shell(Child);

impl Shell {
    fn new(script: &str) -> Self {
        let mut child = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self(child)
    }
    fn key(&self) -> ProcKey {
        ProcKey::new(self.0.id(), alive(self.0.id()).unwrap())
    }
    fn status(&mut self) -> std::process::ExitStatus {
        self.0.wait().unwrap()
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

const OBEDIENT: &str = "echo ready; exec sleep 100";
const STUBBORN: &str = "trap '' TERM; echo ready; while :; do sleep 1; done";
const TIDY: &str = "trap 'exit 3' TERM; echo ready; while :; do sleep 0.05; done";

fn reap(keys: Vec<ProcKey>, rungs: Rungs) -> Report {
    let eyes = Living(RefCell::new(keys));
    let (mut signaller, mut told, policy) = (Pidfds::new(), Told::default(), policy());
    let scene = Scene::here("/proc".as_ref());
    let mut reaper = Reaper {
        eyes: &eyes,
        signaller: &mut signaller,
        ledger: &mut told,
        people: &Workers,
        kinship: &super::Alone,
        filter: &|_| None,
        scope: Scope::Process,
        fenced: false,
        memory: None,
        devices: &[device(0)],
        policy: &policy,
        scene,
    };
    let planned = reaper.plan(eyes.view().unwrap(), &Subjects::new());
    reaper.carry_out(planned, rungs, &Coroner::default()).unwrap().0
}

#[test]
fn term_then_kill() {
    let (mut obedient, mut stubborn, mut tidy) = (Shell::new(OBEDIENT), Shell::new(STUBBORN), Shell::new(TIDY));
    let report = reap(vec![obedient.key(), stubborn.key(), tidy.key()], ladder_of(500, 10_000));
    assert_eq!(report.outcome, Some(Outcome::Freed));
    assert!(report.verified);
    let sent = |shell: &Shell| {
        let entry = report.processes.iter().find(|entry| entry.identity.pid == shell.0.id()).unwrap();
        assert_eq!(entry.result, Some(Ending::Exited));
        assert!(entry.exited_ms.is_some() && entry.closed_ms.is_some());
        entry.signals.iter().map(|sent| sent.signal.clone()).collect::<Vec<_>>()
    };
    assert_eq!(sent(&obedient), ["SIGTERM"]);
    assert_eq!(sent(&tidy), ["SIGTERM"]);
    assert_eq!(sent(&stubborn), ["SIGTERM", "SIGKILL"]);
    assert_eq!(obedient.status().signal(), Some(libc::SIGTERM));
    assert_eq!(stubborn.status().signal(), Some(libc::SIGKILL));
    assert_eq!(tidy.status().code(), Some(3));
}

#[test]
fn eight_by_kill_within_the_bar() {
    // The best of ten: the bar is about gpureap, not about what else this host does.
    let best = (0..10)
        .map(|_| {
            let shells: Vec<Shell> = (0..8).map(|_| Shell::new(OBEDIENT)).collect();
            let keys = shells.iter().map(Shell::key).collect();
            let begun = Instant::now();
            let report = reap(keys, Rungs { now: true, ..ladder_of(0, 10_000) });
            assert_eq!(report.outcome, Some(Outcome::Freed));
            assert_eq!(report.processes.len(), 8);
            begun.elapsed()
        })
        .min()
        .unwrap();
    assert!(best <= Duration::from_millis(20), "{best:?}");
}

#[test]
fn a_young_process_under_an_old_pid_lives() {
    let mut innocent = Shell::new(OBEDIENT);
    let key = innocent.key();
    let old = ProcKey::new(key.tgid, key.start_ns - 20_000_000);
    assert_eq!(Pidfds::new().open(old).unwrap(), Opened::Reused);
    let report = reap(vec![old], ladder_of(100, 1_000));
    assert_eq!(report.processes[0].result, Some(Ending::PidReused));
    assert!(innocent.0.try_wait().unwrap().is_none());
}

#[test]
fn the_dead_are_gone_whether_collected_or_not() {
    let mut shell = Shell::new(OBEDIENT);
    let key = shell.key();
    shell.0.kill().unwrap();
    let begun = Instant::now();
    while alive(key.tgid).is_some() {
        assert!(begun.elapsed() < Duration::from_secs(10));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(Pidfds::new().open(key).unwrap(), Opened::Gone, "a zombie");
    shell.status();
    assert_eq!(Pidfds::new().open(key).unwrap(), Opened::Gone, "nobody");
    // A number that names a thread: EINVAL or ENOENT.
    let (answer, tid) = std::sync::mpsc::channel();
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        answer.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).unwrap();
        assert!(ended.recv().is_err(), "nothing is sent");
    });
    assert_eq!(Pidfds::new().open(ProcKey::new(tid.recv().unwrap(), 0)).unwrap(), Opened::Gone, "a thread");
    drop(end);
    thread.join().unwrap();
    assert_eq!(Pidfds::new().open(ProcKey::new(u32::MAX, 0)).unwrap(), Opened::Gone, "no pid at all");
}

#[test]
fn a_pidfd_never_reaches_a_later_process() {
    let mut shell = Shell::new(OBEDIENT);
    let mut pidfds = Pidfds::new();
    let Opened::Here(handle) = pidfds.open(shell.key()).unwrap() else { panic!("it lives") };
    assert_eq!(pidfds.exit_status(handle), None);
    shell.0.kill().unwrap();
    let until = pidfds.now_ns() + 10_000_000_000;
    assert_eq!(pidfds.wait(&[handle], until).unwrap(), [handle]);
    shell.status();
    assert_eq!(pidfds.send(handle, Signal::Kill).unwrap(), Delivery::Gone);
    // Kernels since 6.15 tell how it ended.
    assert!(matches!(pidfds.exit_status(handle), None | Some(9)));
}

#[test]
fn waiting_ends_in_time() {
    let shell = Shell::new(OBEDIENT);
    let mut pidfds = Pidfds::new();
    let Opened::Here(handle) = pidfds.open(shell.key()).unwrap() else { panic!("it lives") };
    let begun = Instant::now();
    let until = pidfds.now_ns() + 30_000_000;
    assert_eq!(pidfds.wait(&[handle], until).unwrap(), []);
    assert!(begun.elapsed() >= Duration::from_millis(29));
}
