//! Logs of OpenTelemetry to a real receiver: `oteltap`, which prints what it takes.
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use gpureap_tests::harness::{Bench, Daemon, Device, Holder, PATIENCE, settle, skip, sys, wait_for};
use rusqlite::Connection;
use serde_json::Value;

const DEV: &str = "/dev/full";

/// Where `cargo xtask test --ops` puts it, or where the variable says.
fn oteltap() -> Option<PathBuf> {
    let path = std::env::var_os("GPUREAP_OTELTAP").map_or_else(
        || {
            let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
            workspace.join("target/vm/oteltap-1.0.0/bin/oteltap")
        },
        PathBuf::from,
    );
    path.exists().then_some(path)
}

struct Receiver {
    child: Child,
    output: PathBuf,
}

impl Receiver {
    fn start(program: &Path, at: SocketAddr, output: PathBuf) -> Self {
        let file = File::options().create(true).append(true).open(&output).expect("a file for its output");
        let child = Command::new(program)
            .args(["--port", &at.port().to_string()])
            .env("PYTHONUNBUFFERED", "1")
            .stdin(Stdio::null())
            .stdout(file.try_clone().expect("a second handle"))
            .stderr(file)
            .spawn()
            .expect("start oteltap");
        Self { child, output }
    }

    fn text(&self) -> String {
        fs::read_to_string(&self.output).unwrap_or_default()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        drop(self.child.kill().and_then(|()| self.child.wait()));
    }
}

/// All log records in the output, wherever in it they are.
fn records(text: &str) -> Vec<Value> {
    fn find(value: &Value, found: &mut Vec<Value>) {
        match value {
            Value::Object(map) if map.contains_key("eventName") => found.push(value.clone()),
            Value::Object(map) => map.values().for_each(|value| find(value, found)),
            Value::Array(list) => list.iter().for_each(|value| find(value, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    for value in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        find(&value, &mut found);
    }
    found
}

fn attributes(record: &Value) -> BTreeMap<String, Value> {
    let list = record["attributes"].as_array().into_iter().flatten();
    list.map(|pair| (pair["key"].as_str().expect("a key").to_owned(), pair["value"].clone())).collect()
}

/// A port that is nobody's.
fn free_port() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port")
}

fn bench(test: &str, at: SocketAddr) -> Option<Bench> {
    let bench = Bench::new(&[Device::full()]);
    if !bench.is_free(test) {
        return None;
    }
    let text = fs::read_to_string(bench.path("config.toml")).expect("the configuration");
    bench.write_config(&format!("{text}[otlp]\nendpoint = \"http://{at}\"\nheaders = {{ \"x-tenant\" = \"gpu\" }}\n"));
    Some(bench)
}

fn cursor(bench: &Bench) -> Value {
    let text = fs::read(bench.path("state").join("otlp.json")).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

fn journal(bench: &Bench) -> Connection {
    let journal = Connection::open(bench.path("state").join("journal.db")).expect("open the journal");
    journal.busy_timeout(PATIENCE).expect("a time limit");
    journal
}

fn count(journal: &Connection, condition: &str) -> u64 {
    let query = format!("SELECT count(*) FROM events WHERE {condition}");
    journal.query_row(&query, [], |row| row.get::<_, i64>(0)).expect("count").cast_unsigned()
}

/// Until the journal has it.
fn recorded(bench: &Bench, what: &str, pid: sys::Pid) {
    let journal = journal(bench);
    wait_for(what, || count(&journal, &format!("pid = {pid} AND event = '{what}'")) > 0);
}

/// All records so far, of which no two have one id.
#[track_caller]
fn unique(receiver: &Receiver) -> Vec<Value> {
    let found = records(&receiver.text());
    let ids: BTreeSet<String> = found.iter().map(|record| attributes(record)["log.record.uid"].to_string()).collect();
    assert_eq!(ids.len(), found.len(), "each has an id of its own, and none came twice: {found:#?}");
    found
}

fn of<'a>(records: &'a [Value], name: &str, pid: sys::Pid) -> Vec<&'a Value> {
    let pid = pid.to_string();
    let is_it =
        |record: &&Value| record["eventName"] == name && attributes(record)["process.pid"]["intValue"] == pid.as_str();
    records.iter().filter(is_it).collect()
}

#[track_caller]
fn until(receiver: &Receiver, what: &str, done: impl Fn(&[Value]) -> bool) {
    let outcome = settle(PATIENCE, || (!done(&records(&receiver.text()))).then_some(()));
    assert!(outcome.is_ok(), "{what}: not in {}", receiver.text());
}

/// One daemon and its receiver, which at first accepts and never answers, then is down, up, down and up again.
#[test]
fn nothing_is_lost_and_nothing_comes_twice_whatever_the_receiver_does() {
    let Some(program) = oteltap() else { return skip("otlp", "oteltap is not installed") };
    let deaf = TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = deaf.local_addr().expect("its address");
    let Some(bench) = bench("otlp", at) else { return };
    let mut daemon: Daemon<&Bench> = Daemon::start_with(&bench, &["daemon", "-v"]);
    // The kernel accepts for it.
    deaf.set_nonblocking(true).expect("a listener that does not wait");
    let mut caught = None;
    wait_for("the daemon connects", || {
        caught = deaf.accept().ok();
        caught.is_some()
    });

    let connected = Instant::now();
    // While it waits for an answer all goes on as ever.
    let (victim, reaped) = (Holder::start(), Holder::start());
    let pids = [victim.pid(), reaped.pid()];
    let seen = bench.holders(&[]);
    assert!(pids.iter().all(|pid| seen.holder(*pid).is_some()), "{:#}", seen.json);
    for pid in pids {
        recorded(&bench, "held", pid);
    }
    sys::kill(pids[0], sys::SIGKILL);
    drop(victim);
    recorded(&bench, "closed", pids[0]);
    bench.run(&["reap", "--now", "--yes", "--json"]).expect_code(0);
    recorded(&bench, "closed", pids[1]);
    recorded(&bench, "reap", pids[1]);
    assert!(!daemon.log().contains("otlp:"), "it still waits:\n{}", daemon.log());
    // Its death is sent 12 s after it, so that another receiver gets it than the first two.
    let third = Holder::start();
    let third_pid = third.pid();
    recorded(&bench, "held", third_pid);
    std::thread::sleep(Duration::from_secs(8).saturating_sub(connected.elapsed()));
    drop(third);
    recorded(&bench, "closed", third_pid);
    wait_for("the receiver is given up", || daemon.log().contains("did not answer within 10 s"));
    drop((deaf, caught));
    wait_for("it says that nobody is there", || daemon.log().contains("cannot be reached"));
    assert_eq!(cursor(&bench)["sent"], 0);

    let output = bench.path("received");
    let receiver = Receiver::start(&program, at, output.clone());
    until(&receiver, "both deaths", |records| pids.iter().all(|pid| of(records, "gpureap.hold", *pid).len() == 1));
    let found = unique(&receiver);
    let death = |pid: sys::Pid| {
        let deaths = of(&found, "gpureap.death", pid);
        assert_eq!(deaths.len(), 1, "the death of {pid} in {found:#?}");
        attributes(deaths[0])
    };
    assert_eq!(death(pids[0])["gpureap.cause"]["stringValue"], "killed-by");
    assert_eq!(death(pids[1])["gpureap.cause"]["stringValue"], "reaped");
    assert_eq!(of(&found, "gpureap.reap", pids[1]).len(), 1, "{found:#?}");
    assert_eq!(attributes(of(&found, "gpureap.hold", pids[0])[0])["gpureap.node"]["stringValue"], DEV);
    assert_eq!(found.iter().filter(|record| record["eventName"] == "gpureap.start").count(), 1, "{found:#?}");
    wait_for("the cursor is written", || cursor(&bench)["sent"].as_u64() == Some(found.len() as u64));

    // Down and up again, and a daemon that was killed meanwhile: what was taken does not come again.
    drop(receiver);
    daemon.kill();
    daemon.start_again();
    let receiver = Receiver::start(&program, at, output);
    until(&receiver, "the third death", |records| of(records, "gpureap.hold", third_pid).len() == 1);
    let all = unique(&receiver);
    assert_eq!(of(&all, "gpureap.death", third_pid).len(), 1, "{all:#?}");
    assert_eq!(all.iter().filter(|record| record["eventName"] == "gpureap.start").count(), 2, "{all:#?}");
    wait_for("the cursor is written", || cursor(&bench)["sent"].as_u64() == Some(all.len() as u64));
    let Value::Object(end) = cursor(&bench) else { panic!("a cursor") };
    assert_eq!((&end["rejected"], &end["gone"], &end["replaced"]), (&0.into(), &0.into(), &0.into()));
}

/// The journal's retention, by its own rules: what it takes away is of a boot of two months ago.
#[test]
fn what_retention_takes_before_it_is_sent_is_counted_and_told() {
    const MONTHS_NS: i64 = 60 * 86400 * 1_000_000_000;
    let Some(program) = oteltap() else { return skip("otlp retention", "oteltap is not installed") };
    let at = free_port();
    let Some(bench) = bench("otlp retention", at) else { return };
    let mut daemon: Daemon<&Bench> = Daemon::start_with(&bench, &["daemon", "-v"]);
    let holder = Holder::start();
    let pid = holder.pid();
    recorded(&bench, "held", pid);
    drop(holder);
    recorded(&bench, "closed", pid);
    wait_for("it says that nobody is there", || daemon.log().contains("cannot be reached"));
    assert!(daemon.stop().success(), "{}", daemon.log());
    assert_eq!(cursor(&bench)["id"], 0);

    let journal = journal(&bench);
    let lost = count(&journal, "true");
    assert!(lost > 4, "{lost}");
    // One event of it is from today, so that the numbers go on.
    let change = "UPDATE boots SET boot_id = 'two-months-ago', wall_offset_ns = wall_offset_ns - ?1;";
    journal.execute(change, [MONTHS_NS]).expect("change the journal");
    let change = "UPDATE events SET boot_ns = boot_ns + ?1 WHERE id = (SELECT max(id) FROM events)";
    journal.execute(change, [MONTHS_NS]).expect("change the journal");
    daemon.start_again();
    wait_for("retention takes them", || count(&journal, &format!("id < {lost}")) == 0);
    let receiver = Receiver::start(&program, at, bench.path("received"));
    until(&receiver, "a start", |records| records.iter().any(|record| record["eventName"] == "gpureap.start"));
    wait_for("it is told", || {
        daemon.log().contains(&format!("{} events left the journal before they were sent", lost - 1))
    });
    wait_for("it is counted", || cursor(&bench)["gone"].as_u64() == Some(lost - 1));
    let found = unique(&receiver);
    assert_eq!(of(&found, "gpureap.death", pid).len(), 0, "{found:#?}");
    assert_eq!(cursor(&bench)["replaced"], 0);
}
