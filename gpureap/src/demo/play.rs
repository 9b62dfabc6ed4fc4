//! The story that the demo tells. Every step is checked against what the demo itself knows of its actors.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use super::{actor::Kind, cast::Cast, stage::Stage, watch::Watch};
use crate::{
    clock::boottime_ns,
    exit_code::Exit,
    gpu::devices::{Devices, discover},
    history::{self, rows::Cause},
    holders::{self, Options},
    host::Host,
    model::{DeviceKind, Eyes, Holder, How, ProcKey, Slot, Source, View},
    out::{self, Style, words::plural},
    reap::{
        self,
        ladder::Rungs,
        people::ProcPeople,
        pidfd::Pidfds,
        plan::{Matching, Policy},
        reaper::Reaper,
        record::{FILE, Record},
        report::{Ending, Outcome, Report, Scene},
        scope::Scope,
        signaller::{Opened, Signaller as _},
        stuck::Coroner,
        text,
    },
};

/// fuser walks every descriptor of the host.
const FUSER_PATIENCE: Duration = Duration::from_secs(8);

/// Numbered by what was right and what was not.
pub struct Story<'a> {
    say: &'a mut dyn FnMut(&str) -> anyhow::Result<()>,
    wrong: usize,
}

impl<'a> Story<'a> {
    pub fn new(say: &'a mut dyn FnMut(&str) -> anyhow::Result<()>) -> Self {
        Self { say, wrong: 0 }
    }

    fn tell(&mut self, text: &str) -> anyhow::Result<()> {
        (self.say)(text)
    }

    fn table(&mut self, text: &str) -> anyhow::Result<()> {
        text.lines().try_for_each(|line| (self.say)(&format!("  {line}")))
    }

    fn title(&mut self, text: &str) -> anyhow::Result<()> {
        (self.say)(&format!("\n{text}"))
    }

    /// One claim and whether it holds; `Err` says what is wrong.
    fn check(&mut self, claim: &str, truth: Result<(), String>) -> anyhow::Result<()> {
        match truth {
            Ok(()) => (self.say)(&format!("  ✓ {claim}")),
            Err(wrong) => {
                self.wrong += 1;
                (self.say)(&format!("  ✗ {claim}: {wrong}"))
            }
        }
    }
}

fn expect(right: bool, wrong: impl FnOnce() -> String) -> Result<(), String> {
    if right { Ok(()) } else { Err(wrong()) }
}

/// The whole story on a stage that is set, with `program` playing the actors.
pub fn perform(stage: &Stage, watch: &dyn Watch, program: &Path, story: &mut Story<'_>) -> anyhow::Result<Exit> {
    let devices = discover(&stage.config.paths, &stage.config.devices)?;
    let slots: BTreeMap<PathBuf, Slot> = devices
        .list()
        .iter()
        .filter(|device| device.kind == DeviceKind::Standin)
        .map(|device| (device.node.clone(), device.slot))
        .collect();
    let eyes = watch.eyes();

    let numbers: Vec<String> = stage
        .devices
        .iter()
        .map(|device| format!("{} ({}:{})", device.node.display(), device.major, device.minor))
        .collect();
    story.title("1. Stand-in devices, seen by nobody else")?;
    story.tell(&format!("  {}; looking through {}", numbers.join(", "), watch.describe()))?;
    let before = holders_of(&eyes.sweep()?, &slots);
    story.check("nobody holds them", expect(before.is_empty(), || format!("{} holders", before.len())))?;

    story.title("2. A job that left its processes behind")?;
    let recording = watch.record(&stage.config)?;
    let mut cast = Cast::start(program, &stage.nodes())?;
    for (kind, count) in cast.by_kind() {
        story.tell(&format!("  {count} × {kind:<14} {}", meaning(kind)))?;
    }

    story.title("3. gpureap holders")?;
    let begun = Instant::now();
    let view = eyes.view()?;
    let took = begun.elapsed();
    let holders = holders_of(&view, &slots);
    story.table(&table(&view, eyes, &devices, stage, &slots))?;
    check_holders(story, &cast, &holders, &view, &slots, took)?;

    story.title("4. What fuser sees beside it")?;
    fuser(story, &cast, &stage.nodes())?;

    story.title("5. gpureap reap --grace 1s")?;
    if let Some(recording) = &recording {
        recording.until_known(&holders.iter().map(|holder| holder.key.tgid).collect())?;
    }
    let report = reap(stage, eyes, &cast, &slots, devices.list())?;
    story.table(&text::report(&report))?;
    check_reap(story, &mut cast, &report, &stage.config.paths.state)?;

    story.title("6. gpureap report")?;
    match recording {
        Some(recording) => {
            let told = recording.report()?;
            story.table(&history::text::render(&told, Style::of_stdout()))?;
            check_report(story, &cast, &told)?;
        }
        None => story.tell("  · nothing is recorded without a tracer")?,
    }

    story.title("7. Proof")?;
    let sweep = eyes.sweep()?;
    let after = holders_of(&sweep, &slots);
    let looked = if sweep.source == Source::Proc { "a walk through /proc" } else { "a full sweep of the kernel" };
    story
        .check(&format!("{looked} finds no holder"), expect(after.is_empty(), || format!("{} holders", after.len())))?;
    let mut pidfds = Pidfds::new();
    let alive: Vec<u32> = cast
        .roles
        .iter()
        .filter(|role| !matches!(pidfds.open(ProcKey::new(role.pid, role.start_ns)), Ok(Opened::Gone)))
        .map(|role| role.pid)
        .collect();
    story.check("every one of them is dead", expect(alive.is_empty(), || format!("{alive:?} live")))?;
    story.check("the demo's last process ends with it", expect(cast.dismiss(), || "it had to be killed".to_owned()))?;
    Ok(if story.wrong == 0 { Exit::Done } else { Exit::Internal })
}

fn check_report(story: &mut Story<'_>, cast: &Cast, told: &history::report::Report) -> anyhow::Result<()> {
    let reaped: BTreeSet<u32> = told
        .processes
        .iter()
        .filter(|process| process.death.as_ref().is_some_and(|death| death.cause == Cause::Reaped))
        .map(|process| process.who.pid)
        .collect();
    let truth = cast.pids();
    story.check(
        "each of them reaped by gpureap, in its own words",
        expect(truth.is_subset(&reaped), || {
            let of = |pid: &u32| told.processes.iter().find(|process| process.who.pid == *pid);
            let wrong: Vec<_> =
                truth.difference(&reaped).map(|pid| (pid, of(pid).and_then(|one| one.death.clone()))).collect();
            format!("{wrong:?}")
        }),
    )?;
    let holds: BTreeSet<(u32, PathBuf)> = told
        .holds
        .iter()
        .filter(|hold| hold.released.is_some())
        .map(|hold| (hold.who.pid, hold.node.clone().into()))
        .collect();
    let held = |role: &super::cast::Role| role.nodes.iter().map(|node| (role.pid, node.clone())).collect::<Vec<_>>();
    let truth: BTreeSet<(u32, PathBuf)> = cast.roles.iter().flat_map(held).collect();
    story.check(
        "what each had held, and that it was let go",
        expect(truth.is_subset(&holds), || format!("{:?} is missing", truth.difference(&holds).collect::<Vec<_>>())),
    )
}

/// The last words.
pub fn close(story: &mut Story<'_>, struck: bool, took: Duration) -> anyhow::Result<Exit> {
    story.check("devices and mounts are gone", expect(struck, || "something is left".to_owned()))?;
    let wrong = story.wrong;
    let took = took.as_secs_f64();
    if wrong == 0 {
        story.tell(&format!("\nEvery step was right, in {took:.1} s."))?;
        return Ok(Exit::Done);
    }
    story.tell(&format!("\n{wrong} {} wrong.", plural(wrong, "step was", "steps were")))?;
    Ok(Exit::Internal)
}

fn meaning(kind: &str) -> &'static str {
    match kind {
        "worker" => "started by a launcher that holds nothing itself",
        "orphan" => "forked by a process that opened the device and is dead",
        "zombie-leader" => "its main thread has ended, another lives: /proc shows no files",
        "stubborn" => "holds every device and ignores SIGTERM",
        _ => "",
    }
}

fn holders_of(view: &View, slots: &BTreeMap<PathBuf, Slot>) -> Vec<Holder> {
    let ours: BTreeSet<&Slot> = slots.values().collect();
    let holds = |holder: &&Holder| holder.usage.keys().any(|slot| ours.contains(slot));
    view.holders.iter().filter(holds).cloned().collect()
}

/// What `gpureap holders` prints.
fn table(view: &View, eyes: &dyn Eyes, devices: &Devices, stage: &Stage, slots: &BTreeMap<PathBuf, Slot>) -> String {
    let paths = &stage.config.paths;
    let slots = Some(slots.values().copied().collect());
    let options = Options { slots, ..Options::all(Host::read(&paths.proc)) };
    out::text::holders(&holders::build(view, devices, eyes.lineage(), paths, &options), Style::of_stdout())
}

fn check_holders(
    story: &mut Story<'_>,
    cast: &Cast,
    holders: &[Holder],
    view: &View,
    slots: &BTreeMap<PathBuf, Slot>,
    took: Duration,
) -> anyhow::Result<()> {
    let found: BTreeSet<u32> = holders.iter().map(|holder| holder.key.tgid).collect();
    let truth = cast.pids();
    story.check(
        &format!("all {} holders and nobody else, in {:.1} ms", truth.len(), took.as_secs_f64() * 1e3),
        expect(found == truth, || {
            let missed: Vec<_> = truth.difference(&found).collect();
            let extra: Vec<_> = found.difference(&truth).collect();
            format!("missed {missed:?}, too many {extra:?}")
        }),
    )?;
    let wrong: Vec<u32> = cast
        .roles
        .iter()
        .filter(|role| {
            let truth: BTreeMap<Slot, u32> = role.nodes.iter().map(|node| (slots[node], 1)).collect();
            let holder = holders.iter().find(|holder| holder.key.tgid == role.pid);
            let seen = |holder: &Holder| -> BTreeMap<Slot, u32> {
                holder.usage.iter().map(|(slot, usage)| (*slot, usage.fds)).collect()
            };
            holder.map(seen) != Some(truth)
        })
        .map(|role| role.pid)
        .collect();
    story.check("each with exactly its descriptors", expect(wrong.is_empty(), || format!("{wrong:?} are wrong")))?;
    for role in &cast.roles {
        let Some(holder) = holders.iter().find(|holder| holder.key.tgid == role.pid) else { continue };
        if role.kind == Kind::ZombieLeader {
            let named = holder.how.contains(&How::ZombieLeader);
            story.check(
                "the one without a main thread is named as such",
                expect(named, || format!("{:?}", holder.how)),
            )?;
        }
        if role.opened_by.is_some() && view.source == Source::Map {
            let from = holder.inherited_from.map(|key| key.tgid);
            story.check(
                "the orphan's dead parent is remembered",
                expect(from == role.opened_by, || format!("{from:?}")),
            )?;
        }
    }
    Ok(())
}

/// Information only: what another tool finds is not for us to assert.
fn fuser(story: &mut Story<'_>, cast: &Cast, nodes: &[PathBuf]) -> anyhow::Result<()> {
    let begun = Instant::now();
    let started =
        Command::new("fuser").args(nodes).stdout(Stdio::piped()).stderr(Stdio::null()).stdin(Stdio::null()).spawn();
    let Ok(mut child) = started else { return story.tell("  · fuser is not installed here") };
    while child.try_wait()?.is_none() {
        if begun.elapsed() > FUSER_PATIENCE {
            child.kill()?;
            child.wait()?;
            return story.tell(&format!("  · fuser did not answer within {} s", FUSER_PATIENCE.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let took = begun.elapsed();
    let output = child.wait_with_output()?;
    let words = String::from_utf8_lossy(&output.stdout).into_owned();
    let found: BTreeSet<u32> = words.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let truth = cast.pids();
    let missed: Vec<String> = cast
        .roles
        .iter()
        .filter(|role| !found.contains(&role.pid))
        .map(|role| format!("{} ({})", role.pid, role.kind.name()))
        .collect();
    story.tell(&format!(
        "  · {} of {} in {:.1} ms{}",
        found.intersection(&truth).count(),
        truth.len(),
        took.as_secs_f64() * 1e3,
        if missed.is_empty() { String::new() } else { format!("; it misses {}", missed.join(", ")) }
    ))
}

fn reap(
    stage: &Stage,
    eyes: &dyn Eyes,
    cast: &Cast,
    slots: &BTreeMap<PathBuf, Slot>,
    devices: &[crate::model::Device],
) -> anyhow::Result<Report> {
    let mut signaller = Pidfds::new();
    let scene = Scene::here(&stage.config.paths.proc);
    let people = ProcPeople::new(&stage.config.paths.proc);
    // Whatever else may hold these devices by now, only the demo's own processes are signalled.
    let policy = Policy {
        pids: cast.pids(),
        own_session: people.session(std::process::id()),
        include_own_session: false,
        privileged: true,
        ..reap::choice(Some(slots.values().copied().collect()), Matching::Any, &Devices::default(), &people)
    };
    let mut record = Record::new(&stage.config.paths.state, scene.clone(), boottime_ns);
    let view = eyes.view()?;
    let subjects = people.subjects(&view);
    let mut reaper = Reaper {
        eyes,
        signaller: &mut signaller,
        ledger: &mut record,
        people: &people,
        kinship: &people,
        devices,
        policy: &policy,
        filter: &|_| None,
        scope: Scope::Process,
        fenced: false,
        memory: None,
        scene,
    };
    let planned = reaper.plan(view, &subjects);
    let rungs = Rungs { now: false, grace: Duration::from_secs(1), timeout: Duration::from_secs(5) };
    Ok(reaper.carry_out(planned, rungs, &Coroner::default())?.0)
}

fn check_reap(story: &mut Story<'_>, cast: &mut Cast, report: &Report, state: &Path) -> anyhow::Result<()> {
    let killed: BTreeSet<u32> = report.processes.iter().map(|entry| entry.identity.pid).collect();
    let truth = cast.pids();
    story.check(
        "exactly the holders were signalled",
        expect(killed == truth && report.skipped.is_empty(), || format!("{killed:?} instead of {truth:?}")),
    )?;
    let wrong: Vec<u32> = report
        .processes
        .iter()
        .filter(|entry| {
            let stubborn = cast.roles.iter().any(|role| role.pid == entry.identity.pid && role.kind == Kind::Stubborn);
            let expected: &[&str] = if stubborn { &["SIGTERM", "SIGKILL"] } else { &["SIGTERM"] };
            let sent: Vec<&str> = entry.signals.iter().map(|sent| sent.signal.as_str()).collect();
            sent != expected || entry.result != Some(Ending::Exited)
        })
        .map(|entry| entry.identity.pid)
        .collect();
    story.check(
        "one SIGTERM each, one SIGKILL for the stubborn one alone",
        expect(wrong.is_empty(), || format!("{wrong:?} went otherwise")),
    )?;
    let lines = std::fs::read_to_string(state.join(FILE)).unwrap_or_default().lines().count();
    story.check(
        "every signal was on record before it was sent",
        expect(lines == truth.len() + 1, || format!("{lines} records of {} signals", truth.len() + 1)),
    )?;
    story.check(
        "the launcher, which holds nothing, lives on",
        expect(cast.launcher_lives(), || "it is gone".to_owned()),
    )?;
    story.check(
        "freed",
        expect(report.outcome == Some(Outcome::Freed), || format!("{:?}; {}", report.outcome, report.notes.join("; "))),
    )
}
