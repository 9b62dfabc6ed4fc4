//! Logs of OpenTelemetry to a real receiver: `oteltap`, which prints what it takes.
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use gpureap_tests::harness::{Bench, Daemon, Device, Holder, PATIENCE, settle, skip, sys, wait_for};
use serde_json::Value;

const DEV: &str = "/dev/full";

/// Where `cargo xtask setup` puts it, or where the variable says.
fn oteltap() -> Option<PathBuf> {
    let path = std::env::var_os("GPUREAP_OTELTAP").map_or_else(
        || {
            let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
            workspace.join("target/servers/oteltap-1.0.0/bin/oteltap")
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

#[test]
fn deaths_holds_and_reaps_reach_a_receiver_that_was_down() {
    let Some(program) = oteltap() else { return skip("otlp", "oteltap is not installed") };
    let at = free_port();
    let Some(bench) = bench("otlp", at) else { return };
    let daemon: Daemon<&Bench> = Daemon::start_with(&bench, &["daemon", "-v"]);
    // Nobody is there to take anything.
    let (victim, reaped) = (Holder::start(), Holder::start());
    let pids = [victim.pid(), reaped.pid()];
    wait_for("both are recorded", || {
        let report = bench.run(&["report", "--json"]).expect_code(0).json().to_string();
        pids.iter().all(|pid| report.contains(&format!("\"pid\":{pid}")))
    });
    sys::kill(pids[0], sys::SIGKILL);
    drop(victim);
    bench.run(&["reap", "--now", "--yes", "--json"]).expect_code(0);
    wait_for("it says that nobody is there", || daemon.log().contains("cannot be reached"));
    assert_eq!(cursor(&bench)["sent"], 0);

    let output = bench.path("received");
    let receiver = Receiver::start(&program, at, output.clone());
    let outcome = settle(PATIENCE, || {
        let names: Vec<String> = records(&receiver.text())
            .iter()
            .map(|record| record["eventName"].as_str().unwrap_or_default().to_owned())
            .collect();
        let count = |name: &str| names.iter().filter(|found| *found == name).count();
        let all = count("gpureap.death") == 2 && count("gpureap.hold") == 2 && count("gpureap.reap") == 1;
        (!all).then_some(names)
    });
    outcome.unwrap_or_else(|names| panic!("{names:?} in {}", receiver.text()));
    let found = records(&receiver.text());
    let ids: BTreeSet<String> = found.iter().map(|record| attributes(record)["log.record.uid"].to_string()).collect();
    assert_eq!(ids.len(), found.len(), "each has an id of its own: {found:#?}");
    let death = |pid: sys::Pid| {
        let is_it = |record: &&Value| {
            record["eventName"] == "gpureap.death"
                && attributes(record)["process.pid"]["intValue"] == pid.to_string().as_str()
        };
        attributes(found.iter().find(is_it).unwrap_or_else(|| panic!("the death of {pid} in {found:#?}")))
    };
    assert_eq!(death(pids[0])["gpureap.cause"]["stringValue"], "killed-by");
    assert_eq!(death(pids[1])["gpureap.cause"]["stringValue"], "reaped");

    // Down and up again: what happens meanwhile comes, and what was taken does not come again.
    drop(receiver);
    let third = Holder::start();
    let pid = third.pid();
    wait_for("it is recorded", || {
        bench.run(&["report", "--json"]).expect_code(0).json().to_string().contains(&format!("\"pid\":{pid}"))
    });
    drop(third);
    std::thread::sleep(Duration::from_secs(1));
    let receiver = Receiver::start(&program, at, output);
    let name = format!("\"{pid}\"");
    let outcome = settle(PATIENCE, || {
        let found = records(&receiver.text());
        let come = found.iter().filter(|record| attributes(record)["process.pid"].to_string().contains(&name)).count();
        (come < 2).then_some(come)
    });
    outcome.unwrap_or_else(|come| panic!("{come} records of {pid} in {}", receiver.text()));
    let all = records(&receiver.text());
    let ids: BTreeSet<String> = all.iter().map(|record| attributes(record)["log.record.uid"].to_string()).collect();
    assert_eq!(ids.len(), all.len(), "nothing came twice: {all:#?}");
    assert_eq!(cursor(&bench)["sent"].as_u64(), Some(all.len() as u64));
    assert_eq!((&cursor(&bench)["rejected"], &cursor(&bench)["gone"]), (&0.into(), &0.into()));
}

#[test]
fn a_receiver_that_never_answers_disturbs_nobody() {
    let deaf = TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = deaf.local_addr().expect("its address");
    let Some(bench) = bench("otlp deaf", at) else { return };
    let daemon: Daemon<&Bench> = Daemon::start_with(&bench, &["daemon", "-v"]);
    let holder = Holder::start();
    let pid = holder.pid();
    wait_for("it is recorded", || {
        bench.run(&["report", "--json"]).expect_code(0).json().to_string().contains(&format!("\"pid\":{pid}"))
    });
    wait_for("the receiver is given up", || daemon.log().contains("did not answer within 10 s"));
    assert_eq!(cursor(&bench)["sent"], 0);
    let seen = bench.holders(&[]);
    assert!(seen.holder(pid).is_some(), "{:#}", seen.json);
}
