//! The daemon's metrics, with a real Prometheus that scrapes them.
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use gpureap_tests::harness::{Bench, Daemon, Device, Holder, PATIENCE, finish, settle, sys, wait_for};
use serde_json::Value;

const DEV: &str = "/dev/full";

/// A bench whose daemon serves metrics on a port that the kernel chooses.
fn bench(test: &str) -> Option<Bench> {
    let bench = Bench::new(&[Device::full()]);
    if !bench.is_free(test) {
        return None;
    }
    listen(&bench, "127.0.0.1:0");
    Some(bench)
}

fn listen(bench: &Bench, at: &str) {
    let text = fs::read_to_string(bench.path("config.toml")).expect("the configuration");
    bench.write_config(&format!("{text}[metrics]\nlisten = \"{at}\"\n"));
}

/// One that says what it does.
fn start(bench: &Bench) -> Daemon<&Bench> {
    Daemon::start_with(bench, &["daemon", "-v"])
}

/// Where the daemon says that it serves them.
fn address(daemon: &Daemon<&Bench>) -> SocketAddr {
    let mut found = None;
    wait_for("metrics are served", || {
        let log = daemon.log();
        let at = log.rsplit_once("metrics are served at http://").and_then(|(_, rest)| rest.split_once("/metrics"));
        found = at.and_then(|(at, _)| at.parse().ok());
        found.is_some()
    });
    found.expect("an address")
}

fn ask(at: SocketAddr, request: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(at).expect("connect");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a time limit");
    stream.write_all(request.as_bytes()).expect("ask");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let code = text.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_else(|| panic!("{text}"));
    (code, text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default())
}

fn scrape(at: SocketAddr) -> BTreeMap<String, f64> {
    let (code, text) = ask(at, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_eq!(code, 200, "{text}");
    parse(&text)
}

fn parse(text: &str) -> BTreeMap<String, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
            (name.to_owned(), value.parse().unwrap_or_else(|error| panic!("{error} in {line}")))
        })
        .collect()
}

#[track_caller]
fn until(at: SocketAddr, series: &str, value: f64) {
    let mut last = None;
    let outcome = settle(PATIENCE / 2, || {
        last = scrape(at).get(series).copied();
        (last != Some(value)).then_some(())
    });
    assert!(outcome.is_ok(), "{series} is {last:?} and not {value}");
}

fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").join("packaging")
}

/// What it prints is part of the complaint.
#[track_caller]
fn promtool(arguments: &[&str], input: &str) {
    let mut child = Command::new("promtool")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start promtool");
    child.stdin.take().expect("its input").write_all(input.as_bytes()).expect("write to promtool");
    let output = child.wait_with_output().expect("wait for promtool");
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(output.status.success(), "promtool {arguments:?}: {said}");
}

/// A Prometheus of our own, with a directory of its own.
struct Prometheus {
    child: Child,
    at: SocketAddr,
    log: PathBuf,
}

impl Prometheus {
    fn scraping(target: SocketAddr, place: &Path) -> Self {
        fs::create_dir_all(place).expect("a directory");
        let config = place.join("prometheus.yml");
        let rules = packaging().join("prometheus/alerts.yml");
        let text = format!(
            "global: {{scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}}\n\
             rule_files: ['{}']\n\
             scrape_configs:\n  - job_name: gpureap\n    static_configs: [{{targets: ['{target}']}}]\n",
            rules.display()
        );
        fs::write(&config, text).expect("write its configuration");
        let log = place.join("log");
        // It takes no port 0. Another's port between here and its start is an end with a word in its log.
        let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port");
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", place.join("data").display()))
            .arg(format!("--web.listen-address={port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).expect("a log"))
            .spawn()
            .expect("start Prometheus");
        Self { child, at: port, log }
    }

    /// `None` while it does not answer.
    fn get(&self, path: &str) -> Option<Value> {
        let mut stream = TcpStream::connect(self.at).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
        write!(stream, "GET {path} HTTP/1.0\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        serde_json::from_str(text.split_once("\r\n\r\n")?.1).ok()
    }

    /// The values of an instant query, by one label.
    fn query(&self, query: &str, label: &str) -> BTreeMap<String, f64> {
        let escaped = query.bytes().fold(String::new(), |text, byte| text + &format!("%{byte:02x}"));
        let Some(answer) = self.get(&format!("/api/v1/query?query={escaped}")) else { return BTreeMap::new() };
        assert_eq!(answer["status"], "success", "{query}: {answer}");
        let result = answer["data"]["result"].as_array().expect("a vector").iter();
        let one = |sample: &Value| {
            let label = sample["metric"][label].as_str().unwrap_or_default().to_owned();
            Some((label, sample["value"][1].as_str()?.parse().ok()?))
        };
        result.filter_map(one).collect()
    }

    #[track_caller]
    fn until(&mut self, query: &str, label: &str, expected: &[(&str, f64)]) {
        let expected: BTreeMap<String, f64> =
            expected.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        let outcome = settle(PATIENCE / 2, || {
            if let Some(status) = self.child.try_wait().expect("wait for Prometheus") {
                panic!("Prometheus ended with {status}:\n{}", fs::read_to_string(&self.log).unwrap_or_default());
            }
            Some(self.query(query, label)).filter(|found| *found != expected)
        });
        outcome.unwrap_or_else(|found| panic!("{query}: {found:?} and not {expected:?}"));
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        drop(self.child.kill().and_then(|()| self.child.wait()));
    }
}

#[test]
fn a_prometheus_sees_holders_deaths_and_reaps() {
    let Some(bench) = bench("metrics") else { return };
    let daemon = start(&bench);
    let at = address(&daemon);
    let place = tempfile::tempdir().expect("a directory");
    let mut prometheus = Prometheus::scraping(at, place.path());
    prometheus.until("up", "job", &[("gpureap", 1.0)]);
    let held = format!("gpureap_holders{{node=\"{DEV}\"}}");
    prometheus.until(&held, "node", &[(DEV, 0.0)]);

    // Holders come, one by one.
    let mut holders = vec![Holder::start()];
    prometheus.until(&held, "node", &[(DEV, 1.0)]);
    holders.extend([Holder::start(), Holder::start(), Holder::start()]);
    prometheus.until(&held, "node", &[(DEV, 4.0)]);
    prometheus.until("sum by (node) (gpureap_open_files)", "node", &[(DEV, 4.0)]);
    let text = ask(at, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").1;
    promtool(&["check", "metrics"], &text);

    // One is killed by somebody, one ends by itself, two are reaped.
    let victim = holders.remove(0);
    sys::kill(victim.pid(), sys::SIGKILL);
    let killed = Instant::now();
    drop(victim);
    prometheus.until(&held, "node", &[(DEV, 3.0)]);
    let report = bench.run(&["reap", "--now", "--yes", "--json"]).expect_code(0).json();
    assert_eq!(report["outcome"], "freed", "{report:#}");
    prometheus.until(&held, "node", &[(DEV, 0.0)]);
    prometheus.until("gpureap_reaps_total > 0", "outcome", &[("freed", 1.0)]);
    prometheus.until("gpureap_signals_total > 0", "signal", &[("SIGKILL", 3.0)]);
    prometheus.until("gpureap_reap_time_to_free_seconds_count", "job", &[("gpureap", 1.0)]);
    let sum = prometheus.query("gpureap_reap_time_to_free_seconds_sum", "job")["gpureap"];
    let closed = report["devices"][0]["closed_ms"].as_f64().expect("a time");
    assert!((sum * 1_000.0 - closed).abs() < 0.001, "{sum} s are {closed} ms");
    // Deaths are counted when no more evidence is waited for.
    prometheus.until("gpureap_deaths_total > 0", "cause", &[("killed-by", 1.0), ("reaped", 3.0)]);
    assert!(killed.elapsed() >= Duration::from_secs(10), "after {:?}", killed.elapsed());
    prometheus.until("sum by (job) (gpureap_unkillable_holders)", "job", &[("gpureap", 0.0)]);
    // The recorder's journal is what the daemon says of it.
    let written = scrape(at)["gpureap_journal_records_total"];
    assert!(written > 8.0, "{written} records");
    // The shipped alerts are loaded, and nothing is wrong.
    let rules = prometheus.get("/api/v1/rules").expect("an answer");
    let rules = rules["data"]["groups"][0]["rules"].as_array().expect("rules").clone();
    assert!(rules.len() >= 10, "{rules:#?}");
    for rule in &rules {
        assert_eq!((rule["health"].as_str(), rule["lastError"].as_str()), (Some("ok"), None), "{rule:#}");
    }
}

#[test]
fn the_shipped_alerts_hold() {
    let alerts = packaging().join("prometheus");
    let path = |name: &str| alerts.join(name).display().to_string();
    promtool(&["check", "rules", &path("alerts.yml")], "");
    promtool(&["test", "rules", &path("alerts.test.yml")], "");
}

#[test]
fn losses_fences_and_maps_are_told() {
    let Some(bench) = bench("metrics of losses") else { return };
    let daemon = start(&bench);
    let at = address(&daemon);
    let mut holder = Holder::start();
    until(at, &format!("gpureap_holders{{node=\"{DEV}\"}}"), 1.0);
    let before = scrape(at);
    assert_eq!(before.get("gpureap_map_capacity{map=\"procs\"}"), Some(&2048.0));
    assert!(before["gpureap_map_entries{map=\"procs\"}"] >= 1.0, "{before:#?}");
    assert_eq!(before.get("gpureap_view_complete"), Some(&1.0));
    let probe_set = format!("gpureap_probe_set_info{{probe_set=\"{}\",adopted=\"false\"}}", bench.backend);
    assert_eq!(before.get(&probe_set), Some(&1.0));
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs_f64();
    for when in ["gpureap_start_time_seconds", "gpureap_last_sweep_timestamp_seconds"] {
        assert!((now - 120.0..=now + 1.0).contains(&before[when]), "{when} is {} at {now}", before[when]);
    }
    // What the kernel counts as lost is told, and the resync that heals it.
    let maps = bench.maps();
    let value = vec![3_u64; aya::util::nr_cpus().expect("processors")];
    set_counter(&maps, gpureap_common::counter::READ_FAULT, &value);
    let lost = 3.0 * value.len() as f64;
    until(at, "gpureap_events_lost_total{kind=\"read_fault\"}", lost);
    until(at, "gpureap_resyncs_total{reason=\"loss\"}", 1.0);
    // Who stands before a fence is counted.
    bench.run(&["fence", "--gpu", DEV, "--ttl", "1m"]).expect_code(0);
    for _ in 0..3 {
        assert!(File::open(DEV).is_err(), "{DEV} is fenced");
    }
    until(at, "gpureap_fence_denials_total", 3.0);
    bench.run(&["unfence"]).expect_code(0);
    assert!(File::open(DEV).is_ok());
    until(at, "gpureap_fence_denials_total", 3.0);
    assert!(holder.lives());
}

/// As the kernel programs would have left it.
fn set_counter(maps: &gpureap::bpf::handles::Maps, index: u32, values: &[u64]) {
    use std::os::fd::AsFd as _;
    let map = aya::maps::MapData::from_fd(maps.counters.as_fd().try_clone_to_owned().expect("a descriptor"));
    let mut array = aya::maps::PerCpuArray::<_, u64>::try_from(aya::maps::Map::PerCpuArray(map.expect("a map")))
        .expect("an array for each processor");
    let values = aya::maps::PerCpuValues::try_from(values.to_vec()).expect("a value for each processor");
    array.set(index, values, 0).expect("set a counter");
}

#[test]
fn what_is_served_names_no_process() {
    let Some(bench) = bench("metrics name nobody") else { return };
    let daemon = start(&bench);
    let at = address(&daemon);
    let holder = Holder::with(&gpureap_tests::harness::Wanted {
        comm: "secret-job",
        user: Some(gpureap_tests::harness::NOBODY),
        ..Default::default()
    });
    until(at, &format!("gpureap_holders{{node=\"{DEV}\"}}"), 1.0);
    let text = ask(at, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").1;
    for word in ["secret-job", "nobody", &holder.pid().to_string()] {
        assert!(!text.contains(word), "{word} in {text}");
    }
    assert_eq!(ask(at, "GET / HTTP/1.1\r\nHost: x\r\n\r\n").0, 404);
    assert_eq!(ask(at, "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n").0, 405);
}

#[test]
fn without_listen_there_is_no_port() {
    let bench = Bench::new(&[Device::zero()]);
    let daemon = bench.daemon();
    // The daemon's sockets against those of the host's tables.
    let own: Vec<String> = fs::read_dir(format!("/proc/{}/fd", daemon.pid()))
        .expect("its descriptors")
        .filter_map(|entry| {
            fs::read_link(entry.ok()?.path())
                .ok()?
                .to_str()?
                .strip_prefix("socket:[")?
                .strip_suffix(']')
                .map(str::to_owned)
        })
        .collect();
    assert!(!own.is_empty(), "it has its own socket at least");
    for table in ["tcp", "tcp6", "udp", "udp6"] {
        let text = fs::read_to_string(format!("/proc/net/{table}")).unwrap_or_default();
        let inodes: Vec<&str> = text.lines().filter_map(|line| line.split_whitespace().nth(9)).collect();
        assert!(own.iter().all(|inode| !inodes.contains(&inode.as_str())), "a socket of {table}");
    }
}

#[test]
fn a_port_of_somebody_else_is_told_and_tried_again() {
    let bench = Bench::new(&[Device::full()]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = taken.local_addr().expect("its address");
    listen(&bench, &at.to_string());
    let daemon = start(&bench);
    wait_for("it is told", || daemon.log().contains(&format!("no metrics for now: {at} cannot be listened on")));
    // Tracing goes on all the same.
    bench.holders(&[]);
    drop(taken);
    assert_eq!(address(&daemon), at);
    assert_eq!(scrape(at).get("gpureap_look_errors_total"), Some(&0.0));
    assert_eq!(daemon.log().matches("no metrics for now").count(), 1, "{}", daemon.log());
}

#[test]
fn an_address_that_is_none_is_one_sentence() {
    let bench = Bench::new(&[Device::zero()]);
    listen(&bench, "somewhere");
    let output = finish(bench.command(&["daemon"])).expect_code(2);
    let told = output.complaint();
    assert!(told.contains("`somewhere` is not an address with a port such as 127.0.0.1:9840"), "{told}");
}

#[test]
fn clients_that_are_slow_or_talk_nonsense_disturb_nobody() {
    let Some(bench) = bench("metrics and slow clients") else { return };
    let daemon = start(&bench);
    let at = address(&daemon);
    // Twice as many as there are places, all silent; one that begins and does not end; and one that asks and never reads.
    let mut silent: Vec<TcpStream> = (0..32).map(|_| TcpStream::connect(at).expect("connect")).collect();
    silent[0].write_all(b"GET /metrics HTTP/1.1\r\nX: ").expect("begin");
    let mut deaf = TcpStream::connect(at).expect("connect");
    deaf.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").expect("ask");
    // Tracing goes on meanwhile: what is opened now is recorded.
    let holder = Holder::start();
    let pid = holder.pid();
    wait_for("it is recorded", || {
        let report = bench.run(&["report", "--json"]).expect_code(0).json();
        report.to_string().contains(&format!("\"pid\":{pid}"))
    });
    // All of them are got rid of, and then whoever asks is answered.
    let begun = Instant::now();
    assert_eq!(scrape(at).get(&format!("gpureap_holders{{node=\"{DEV}\"}}")), Some(&1.0));
    assert!(begun.elapsed() < Duration::from_secs(25), "{:?}", begun.elapsed());
    let mut byte = [0; 512];
    for stream in &mut silent {
        stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a time limit");
        let end = stream.read(&mut byte);
        assert!(end.is_ok(), "a client that says nothing is hung up on: {end:?}");
    }
    // More than a request may have, and what is none.
    let long = format!("GET /metrics HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(100_000));
    let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(100));
    for (request, code) in
        [(long.as_str(), 431), (many.as_str(), 431), ("nonsense\r\n\r\n", 400), ("\0\u{1}\u{2}\r\n\r\n", 400)]
    {
        let mut stream = TcpStream::connect(at).expect("connect");
        stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a time limit");
        // It may be hung up on before all is sent.
        drop(stream.write_all(request.as_bytes()));
        let mut bytes = Vec::new();
        drop(stream.read_to_end(&mut bytes));
        let text = String::from_utf8_lossy(&bytes);
        assert!(bytes.is_empty() || text.starts_with(&format!("HTTP/1.1 {code} ")), "{text}");
    }
    assert_eq!(scrape(at).get("gpureap_look_errors_total"), Some(&0.0));
}
