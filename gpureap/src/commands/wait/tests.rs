//! The decision in a table, and real reports against docs/schema/wait-1.json.

use std::{cell::RefCell, collections::BTreeSet, path::Path, process::Command, time::Duration};

use serde_json::Value;

use super::{
    decide::{Findings, Outcome, Standing, judge},
    report::{Report, Scene, text},
    vigil::{Ended, Over, Vigil},
};
use crate::{
    choose::Chooser,
    cli::Choosing,
    clock::{NANOS, boottime_ns},
    config::Paths,
    exit_code::Exit,
    gpu::devices::Devices,
    host::Host,
    model::{
        Backend, Device, DeviceKind, Eyes, Holder, How, LineageSource, NoLineage, Orphan, ProcKey, Source, Usage, View,
    },
    reap::{
        people::ProcPeople,
        plan::{Class, Matching, Policy, Subject, plan},
        report::Identity,
        stuck::{Coroner, Stuck},
    },
    watch::Watch,
};

fn policy(matching: Matching) -> Policy {
    Policy {
        slots: Some([0].into()),
        matching,
        by_handle: [].into(),
        contexts: [].into(),
        pids: [].into(),
        chosen: None,
        undecided: BTreeSet::new(),
        own: 99,
        own_session: 0,
        ancestors: [98].into(),
        include_own_session: true,
        stop_monitors: false,
        include_protected: BTreeSet::new(),
        privileged: true,
    }
}

fn holder(pid: u32, slot: u32, maps: u32) -> Holder {
    Holder {
        key: ProcKey::new(pid, u64::from(pid) * 1_000_000_000),
        usage: [(slot, Usage { fds: 1, maps, ever_mapped: maps > 0, ..Usage::default() })].into(),
        how: [How::Fd].into(),
        private_tids: [].into(),
        inherited_from: None,
        from_snapshot: false,
    }
}

fn view(holders: Vec<Holder>) -> View {
    View {
        source: Source::Map,
        backend: Some(Backend::Kprobe),
        complete: true,
        cannot_see: [].into(),
        lost_events: 0,
        swept_ns: Some(1),
        open_files: [(0, 1)].into(),
        holders,
        orphans: Vec::new(),
        notes: Vec::new(),
    }
}

fn orphan(slot: u32) -> Orphan {
    Orphan { slot, files: 2, how: How::InFlight, last_owner: None }
}

/// Pids from 10 on are jobs, 20 monitors, 30 of the system.
fn standing(view: &View, policy: &Policy, ignore_monitors: bool) -> Standing {
    let subject = |holder: &Holder| {
        let class = match holder.key.tgid {
            20..30 => Class::Monitor,
            30..40 => Class::System,
            _ => Class::Job,
        };
        (holder.key, Subject { class, ..Subject::default() })
    };
    let plan = plan(view, &view.holders.iter().map(subject).collect(), policy);
    Standing::of(view, &plan, policy, ignore_monitors)
}

/// What it is about, who holds, which handles count, whether monitors are left out, and the expected pids.
type Case = (&'static str, Vec<Holder>, Matching, bool, &'static [u32]);

#[test]
fn who_is_waited_for() {
    let both = Matching::Any;
    let cases: [Case; 9] = [
        ("nobody", vec![], both, false, &[]),
        ("a job", vec![holder(10, 0, 0)], both, false, &[10]),
        ("one on another device", vec![holder(10, 1, 9)], both, false, &[]),
        ("a handle does not count as use", vec![holder(10, 0, 0), holder(11, 0, 1)], Matching::Attached, false, &[11]),
        ("monitors and system", vec![holder(20, 0, 0), holder(30, 0, 0)], both, false, &[20, 30]),
        ("not by wish", vec![holder(10, 0, 0), holder(20, 0, 0), holder(30, 0, 0)], both, true, &[10]),
        ("an ancestor of gpureap", vec![holder(98, 0, 0)], both, false, &[98]),
        ("pid 1", vec![holder(1, 0, 0)], both, false, &[1]),
        ("gpureap itself", vec![holder(99, 0, 0)], both, false, &[]),
    ];
    for (case, holders, matching, ignore, expected) in cases {
        let standing = standing(&view(holders), &policy(matching), ignore);
        let pids: Vec<u32> = standing.holders.iter().map(|row| row.key.tgid).collect();
        assert_eq!(pids, expected, "{case}");
        assert_eq!(standing.is_free(), expected.is_empty(), "{case}");
    }
}

#[test]
fn files_without_a_process_are_waited_for() {
    let seen = View { orphans: vec![orphan(0), orphan(1)], ..view(vec![]) };
    assert_eq!(standing(&seen, &policy(Matching::Any), true).orphans, 2);
    let named = Policy { pids: [7].into(), ..policy(Matching::Any) };
    assert!(standing(&seen, &named, true).is_free(), "they are none of a process that was named");
}

#[test]
fn the_first_of_several_causes_wins() {
    let (job, monitor, system) = (holder(10, 0, 0), holder(20, 0, 0), holder(30, 0, 0));
    let stuck = Findings { kill_pending: true, ..Findings::default() };
    let with_orphan = |holders| View { orphans: vec![orphan(0)], ..view(holders) };
    let proc = View { source: Source::Proc, complete: false, ..view(vec![]) };
    let cases = [
        ("free", view(vec![]), false, Findings::default(), Outcome::Free, Exit::Done, true),
        (
            "all",
            with_orphan(vec![job.clone(), monitor.clone()]),
            false,
            stuck,
            Outcome::Unkillable,
            Exit::Unkillable,
            false,
        ),
        (
            "held",
            with_orphan(vec![job.clone(), monitor.clone()]),
            false,
            Findings::default(),
            Outcome::Held,
            Exit::Held,
            false,
        ),
        ("ignored", view(vec![job, monitor.clone()]), true, Findings::default(), Outcome::Held, Exit::Held, false),
        (
            "monitor",
            with_orphan(vec![monitor.clone(), system]),
            false,
            Findings::default(),
            Outcome::Protected,
            Exit::Protected,
            false,
        ),
        ("not for it", view(vec![monitor]), true, Findings::default(), Outcome::Free, Exit::Done, true),
        (
            "orphan",
            with_orphan(vec![]),
            false,
            Findings::default(),
            Outcome::KernelReference,
            Exit::KernelReference,
            false,
        ),
        ("nobody left to kill", view(vec![]), false, stuck, Outcome::Free, Exit::Done, true),
        ("proc for root", proc.clone(), false, Findings::default(), Outcome::Free, Exit::Done, false),
        (
            "a full map",
            View { complete: false, ..view(vec![]) },
            false,
            Findings::default(),
            Outcome::NotPermitted,
            Exit::NotPermitted,
            false,
        ),
    ];
    for (case, seen, ignore, findings, outcome, exit, verified) in cases {
        let policy = policy(Matching::Any);
        let verdict = judge(&standing(&seen, &policy, ignore), &seen, &policy, findings);
        assert_eq!((verdict.outcome, verdict.exit, verdict.verified), (outcome, exit, verified), "{case}");
    }
    let blind = Findings { blind: true, ..Findings::default() };
    let policy_of_root = policy(Matching::Any);
    assert_eq!(judge(&Standing::default(), &proc, &policy_of_root, blind).exit, Exit::NotPermitted);
    let user = Policy { privileged: false, ..policy(Matching::Any) };
    let free = Standing::default();
    assert_eq!(judge(&free, &proc, &user, Findings::default()).exit, Exit::NotPermitted);
    let named = Policy { pids: [7].into(), ..user };
    assert_eq!(judge(&free, &proc, &named, Findings::default()).exit, Exit::Done);
    // Nobody may read what the filter asks of the only holder.
    let seen = view(vec![holder(10, 0, 1), holder(11, 1, 1)]);
    let key = |pid: u32| ProcKey::new(pid, u64::from(pid) * 1_000_000_000);
    for (undecided, exit) in [(10, Exit::NotPermitted), (11, Exit::Done), (12, Exit::Done)] {
        let policy =
            Policy { chosen: Some([].into()), undecided: [key(undecided)].into(), ..policy(Matching::Attached) };
        let standing = standing(&seen, &policy, false);
        let verdict = judge(&standing, &seen, &policy, Findings::default());
        assert!(standing.is_free(), "{undecided}");
        assert_eq!((verdict.exit, verdict.verified), (exit, exit == Exit::Done), "{undecided}");
    }
    let unseen = Findings { named_unseen: true, ..Findings::default() };
    assert_eq!(judge(&free, &proc, &named, unseen).exit, Exit::NotPermitted);
}

/// Looks that come one after the other, then nobody answers any more.
struct Looks(RefCell<Vec<View>>);

impl Eyes for Looks {
    fn view(&self) -> anyhow::Result<View> {
        self.0.borrow_mut().pop().ok_or_else(|| anyhow::anyhow!("the daemon does not answer"))
    }

    fn sweep(&self) -> anyhow::Result<View> {
        self.view()
    }

    fn look_at(&self, _tgid: u32) -> anyhow::Result<Option<Holder>> {
        anyhow::bail!("the daemon does not answer")
    }

    fn lineage(&self) -> &dyn LineageSource {
        &NoLineage
    }
}

fn keep(looks: Vec<View>, timeout: Duration) -> anyhow::Result<Over> {
    let paths = Paths { proc: "/nonexistent".into(), host: "/nonexistent".into(), ..Paths::default() };
    let (eyes, people, policy) = (Looks(looks.into()), ProcPeople::new("/nonexistent"), policy(Matching::Any));
    let chooser = Chooser::new(&Choosing::default(), &paths, &NoLineage)?;
    let mut vigil = Vigil {
        eyes: &eyes,
        watch: Watch::of_exits(),
        run: Path::new("/nonexistent"),
        people: &people,
        policy: &policy,
        chooser: &chooser,
        ignore_monitors: false,
        proc: &paths.proc,
        begun_ns: boottime_ns(),
        told: BTreeSet::new(),
    };
    vigil.keep(Some(timeout), &Coroner::new(&paths.proc))
}

#[test]
fn what_was_known_is_told_when_nobody_can_look_any_more() {
    assert!(keep(vec![], Duration::ZERO).is_err(), "nothing was ever known");
    let mut child = Command::new("sleep").arg("60").spawn().unwrap();
    let held = view(vec![holder(child.id(), 0, 1)]);
    let over = keep(vec![held.clone()], Duration::from_millis(30)).unwrap();
    assert_eq!((over.verdict.exit, over.held.len(), over.view.complete), (Exit::Held, 1, false));
    assert!(over.view.notes[0].contains("the last look failed"), "{:?}", over.view.notes);
    // It has let go, and nobody can say whether others have.
    let begun = boottime_ns();
    let killer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        child.kill().unwrap();
        child.wait().unwrap();
    });
    let over = keep(vec![held], Duration::from_mins(1)).unwrap();
    killer.join().unwrap();
    assert_eq!((over.verdict.exit, over.held.len(), over.ended.len()), (Exit::NotPermitted, 0, 1));
    assert!(boottime_ns() - begun < 30 * NANOS);
}

const SCHEMA: &str = include_str!("../../../../docs/schema/wait-1.json");

fn faults(value: &Value) -> Vec<String> {
    crate::schema_check::mistakes(SCHEMA, value)
}

fn identity(holder: &Holder) -> Identity {
    Identity {
        pid: holder.key.tgid,
        start_ns: holder.key.start_ns,
        comm: "evil\u{1b}[31m".to_owned(),
        argv: vec!["train".to_owned(), "--all\u{7}".to_owned()],
        uid: Some(0),
        ..Identity::default()
    }
}

fn report(seen: &View, gone: &[Holder], stuck: bool, timeout: Option<Duration>) -> Report {
    let policy = policy(Matching::Any);
    let standing = standing(seen, &policy, false);
    let device = Device {
        slot: 0,
        node: "/dev/nvidia0".into(),
        major: 195,
        minor: Some(0),
        kind: DeviceKind::Gpu,
        gpu: Some(0),
        index: Some(0),
        uuid: Some("GPU-1".to_owned()),
        bdf: Some("0000:00:06.0".to_owned()),
        model: None,
    };
    let devices = Devices::told(vec![device], [0].into(), Vec::new());
    let host = Host {
        name: "host".to_owned(),
        boot_id: "boot".to_owned(),
        now: "2026-11-30T12:00:00Z".parse().unwrap(),
        boottime_ns: 1_000_000_000,
    };
    let why = Stuck {
        tid: 11,
        thread: "t".to_owned(),
        state: "D".to_owned(),
        in_kernel: None,
        wchan: Some("nv_lock".to_owned()),
        stack: vec!["nv_lock".to_owned()],
        kill_pending: true,
        age_s: 60,
    };
    let held = standing.holders.iter().zip(&seen.holders);
    let held = held.map(|(row, holder)| (row.clone(), identity(holder), stuck.then(|| why.clone()))).collect();
    let before = self::standing(&view(gone.to_vec()), &policy, false);
    let ended = before.holders.into_iter().zip(gone);
    let ended = ended.map(|(row, holder)| Ended { row, identity: identity(holder), at_ns: 1_500_000_000 }).collect();
    let verdict = judge(&standing, seen, &policy, Findings { kill_pending: stuck, ..Findings::default() });
    let scene = Scene { host: &host, devices: &devices, policy: &policy, timeout, ignore_monitors: false };
    scene.report(Over { verdict, view: seen.clone(), standing, held, ended, at_ns: 3_000_000_000 })
}

#[test]
fn reports_fit_their_schema_and_are_safe_on_a_terminal() {
    let (job, monitor) = (holder(10, 0, 1), holder(20, 0, 0));
    let minute = Some(Duration::from_mins(1));
    let proc = View {
        source: Source::Proc,
        backend: None,
        cannot_see: [How::InFlight].into(),
        open_files: [].into(),
        ..view(vec![])
    };
    let reports = [
        (
            report(&view(vec![]), std::slice::from_ref(&job), false, None),
            "free after 2.00 s: 1 process let go, verified by a full sweep",
        ),
        (report(&view(vec![]), &[], false, minute), "free: nobody held what was chosen"),
        (report(&proc, &[], false, minute), "as far as /proc shows"),
        (
            report(&view(vec![job.clone(), monitor.clone()]), &[], false, minute),
            "still held after 2.00 s: /dev/nvidia0, by 2 processes",
        ),
        (report(&view(vec![job]), &[], true, minute), "state D in nv_lock, 60 s old"),
        (report(&view(vec![monitor]), &[], false, minute), "only by protected or monitor"),
        (report(&View { orphans: vec![orphan(0)], ..view(vec![]) }, &[], false, minute), "still has 2 open files"),
        (report(&View { complete: false, ..view(vec![]) }, &[], false, minute), "nobody that was seen"),
    ];
    let mut outcomes = BTreeSet::new();
    for (report, words) in &reports {
        let value = serde_json::to_value(report).unwrap();
        assert_eq!(faults(&value), Vec::<String>::new(), "{value:#}");
        assert_eq!(&serde_json::from_value::<Report>(value.clone()).unwrap(), report);
        outcomes.insert(value["outcome"].as_str().unwrap().to_owned());
        let text = text(report);
        assert!(text.contains(words) && text.ends_with('\n'), "{words}: {text}");
        assert!(!text.contains('\u{1b}') && !text.contains('\u{7}'), "{text:?}");
    }
    assert_eq!(outcomes.len(), 6, "every outcome: {outcomes:?}");
    assert!(!faults(&serde_json::json!({"schema": "gpureap.wait/1"})).is_empty(), "the check finds mistakes");
}
