//! How large a journal gets and how long a question takes: fills one with 30 days of a busy host in a temporary directory
//! and prints bytes and milliseconds as JSON. The first argument is the number of holds. The command `gpureap report` is
//! measured too if it was built beside this: `cargo build --release --bins --examples`.

#![expect(clippy::print_stdout, reason = "the result")]

use std::{
    env,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use gpureap::{
    history::{
        event::{Device, Event, Exit, FileEvent, Named, What},
        rows::{Boot, Change, HoldEnd, HoldOrigin, HoldRow, Key, Place, ProcessRow, Run, Thread},
    },
    holders::report::Role,
    journal::{FILE, Limits, Question, Writer, read},
    model::DeviceKind,
};
use jiff::{SignedDuration, Timestamp};
use serde_json::json;

const SECOND: u64 = 1_000_000_000;
const DAYS: u64 = 30;
/// A GPU and three nodes that all share.
const NODES: [&str; 4] = ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1"];

fn main() -> anyhow::Result<()> {
    let holds: u64 = env::args().nth(1).map_or(Ok(300_000), |count| count.parse())?;
    let with_events = env::args().nth(2).as_deref() != Some("without-events");
    let dir = env::temp_dir().join(format!("gpureap-journal-size-{}", std::process::id()));
    let path = dir.join(FILE);
    let result = measure(&path, holds, with_events);
    std::fs::remove_dir_all(&dir)?;
    println!("{}", result?);
    Ok(())
}

fn measure(path: &Path, holds: u64, with_events: bool) -> anyhow::Result<serde_json::Value> {
    let started: Timestamp = "2026-11-01T00:00:00Z".parse()?;
    let mut writer = Writer::open(path, "b1")?.writer;
    let boot = Boot {
        boot_id: "b1".to_owned(),
        host: "n1".to_owned(),
        kernel: "6.8.0".to_owned(),
        wall_offset_ns: i64::try_from(started.as_nanosecond())?,
        last_ns: 0,
    };
    let run = Run {
        version: "0.1.0".to_owned(),
        pid: 700,
        backend: "kprobe".to_owned(),
        adopted: false,
        begin_ns: 0,
        end_ns: None,
    };
    writer.apply(&[Change::Start { boot, run, devices: NODES.iter().map(|node| device(node)).collect() }])?;

    let jobs = holds / NODES.len() as u64;
    let apart = DAYS * 86400 * SECOND / jobs;
    let filling = Instant::now();
    let (mut batch, mut changes) = (Vec::new(), 0_usize);
    for job in 0..jobs {
        batch.extend(one_job(job, job * apart, started, with_events));
        if batch.len() >= 256 {
            changes += batch.len();
            writer.apply(&batch)?;
            batch.clear();
        }
    }
    writer.apply(&batch)?;
    changes += batch.len();
    let filled = filling.elapsed();
    writer.checkpoint()?;
    let bytes = writer.size();

    let end = started + SignedDuration::from_hours(24 * DAYS as i64);
    let ask = |question: &Question| -> anyhow::Result<_> {
        let mut times: Vec<Duration> = Vec::new();
        let mut found = 0;
        for _ in 0..10 {
            let asked = Instant::now();
            found = read(path, question)?.iter().map(|record| record.holds.len()).sum();
            times.push(asked.elapsed());
        }
        times.sort();
        Ok(json!({ "holds": found, "median_ms": ms(times[times.len() / 2]), "most_ms": ms(times[times.len() - 1]) }))
    };
    let hour = SignedDuration::from_hours(1);
    let last_hour = ask(&Question { since: Some(end - hour), ..Question::default() })?;
    let middle = end - hour * 24 * 15;
    let middle_hour = ask(&Question { since: Some(middle), until: Some(middle + hour), ..Question::default() })?;
    let at = ask(&Question::at(middle))?;
    let command = command(path, end - hour, end)?;
    let opening = Instant::now();
    drop(writer);
    let mut writer = Writer::open(path, "b1")?.writer;
    let opened = opening.elapsed();
    // The last five days' worth go.
    let limits = Limits { max_age: Duration::from_hours(24 * 25), max_size: u64::MAX };
    let (mut steps, mut longest) = (0_u32, Duration::ZERO);
    loop {
        let step = Instant::now();
        let tidied = writer.tidy(limits, end)?;
        longest = longest.max(step.elapsed());
        steps += 1;
        if !tidied.more {
            break;
        }
    }
    Ok(json!({
        "holds": holds,
        "changes": changes,
        "bytes": bytes,
        "bytes_per_hold": bytes / holds,
        "changes_per_second": (changes as f64 / filled.as_secs_f64()).round(),
        "last_hour": last_hour,
        "hour_15_days_ago": middle_hour,
        "instant_15_days_ago": at,
        "report_of_last_hour": command,
        "open_ms": ms(opened),
        "retention": { "steps": steps, "longest_ms": ms(longest), "bytes_after": writer.size() },
    }))
}

/// The whole command for an hour, from its start to its end.
fn command(path: &Path, since: Timestamp, until: Timestamp) -> anyhow::Result<serde_json::Value> {
    let own = env::current_exe()?;
    let program = own.parent().and_then(Path::parent).map(|dir| dir.join("gpureap")).filter(|program| program.exists());
    let Some(program) = program else { return Ok(serde_json::Value::Null) };
    let mut times: Vec<Duration> = Vec::new();
    let mut bytes = 0;
    for _ in 0..20 {
        let started = Instant::now();
        let output = Command::new(&program)
            .args(["report", "--json", "--since", &since.to_string(), "--until", &until.to_string(), "--journal"])
            .arg(path)
            .stderr(Stdio::inherit())
            .output()?;
        times.push(started.elapsed());
        anyhow::ensure!(output.status.success(), "{}: {}", program.display(), output.status);
        bytes = output.stdout.len();
    }
    times.sort();
    let (median, most) = (ms(times[times.len() / 2]), ms(times[times.len() - 1]));
    Ok(json!({ "runs": times.len(), "bytes": bytes, "median_ms": median, "most_ms": most }))
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 100_000.0).round() / 100.0
}

fn device(node: &str) -> Device {
    Device {
        node: node.to_owned(),
        major: 195,
        minor: None,
        kind: DeviceKind::Gpu,
        gpu: None,
        index: None,
        uuid: None,
        bdf: None,
        model: None,
    }
}

/// A rank of a training: five minutes, four devices, 24 threads.
fn one_job(job: u64, begin: u64, started: Timestamp, with_events: bool) -> Vec<Change> {
    let pid = 1000 + (job % 4_000_000) as u32;
    let key = Key { pid, start_ns: begin };
    let (opened, closed) = (begin + 2 * SECOND, begin + 302 * SECOND);
    let argv =
        ["python3", "-u", "/home/eve/llm/train.py", "--config", "configs/7b.yaml", "--resume", "/data/ckpt/0017"];
    let text = |text: &str| Some(text.to_owned());
    let process = |exit_ns| ProcessRow {
        key,
        comm: "python3".to_owned(),
        argv: argv.map(str::to_owned).to_vec(),
        exe: text("/usr/bin/python3.11"),
        uid: Some(1000),
        user: text("eve"),
        class: text("job"),
        nspids: vec![pid],
        place: Place {
            cgroup: text("/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0"),
            slurm_job: text("4711"),
            slurm_step: text("0"),
            ..Place::default()
        },
        env: ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_PROCID"]
            .map(|name| (name.to_owned(), "node-0017".to_owned()))
            .into(),
        threads: (0..24).map(|tid| Thread { tid: pid + tid, name: "pt_nccl_watchdg".to_owned() }).collect(),
        exit_ns,
        status: exit_ns.map(|_| 0),
        ..ProcessRow::default()
    };
    let holds = |released: Option<u64>| {
        NODES.map(|node| {
            Change::Hold(HoldRow {
                key,
                node: node.to_owned(),
                opened_ns: opened,
                released_ns: released,
                ended: released.map(|_| HoldEnd::Exited),
                origin: HoldOrigin::Opened,
                fds: 4,
                maps: 12,
                role: Some(Role::Attached),
                inherited_from: None,
            })
        })
    };
    let mut changes = vec![Change::Process(Box::new(process(None)))];
    changes.extend(holds(None));
    changes.push(Change::Process(Box::new(process(Some(closed)))));
    changes.extend(holds(Some(closed)));
    if with_events {
        let at = |boot_ns: u64, what| {
            let time = started + SignedDuration::from_nanos(boot_ns as i64);
            Change::Event(Event { time, boot_ns, what })
        };
        changes.push(at(begin, What::Exec(Named { key, comm: "python3".to_owned() })));
        for (number, node) in NODES.iter().cycle().take(16).enumerate() {
            let file = |key: Option<Key>, comm: &str| FileEvent {
                key,
                tid: key.map(|key| key.pid),
                comm: comm.to_owned(),
                node: (*node).to_owned(),
                file: 0xffff_8881_0000_0000 + number as u64 * 256,
                failed: false,
            };
            changes.push(at(opened, What::Open(file(Some(key), "python3"))));
            changes.push(at(closed, What::Free(file(None, ""))));
        }
        changes.push(at(closed, What::Exit(Exit { key, tid: pid, comm: "python3".to_owned(), status: 0 })));
    }
    changes
}
