//! The daemon's socket: others than root see the same, and nobody can harm the tracing through it.
use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::{
        fs::{MetadataExt as _, PermissionsExt as _},
        net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use gpureap_tests::harness::{
    Bench, Device, NOBODY, Output, Pid, Scene, Seen, World, anybody, finish, skip, sys, wait_for,
};
use serde_json::{Value, json};

const DEV: &str = "/dev/zero";

fn bench() -> Bench {
    let bench = Bench::new(&[Device::zero()]);
    bench.open_to_all();
    bench
}

fn socket(bench: &Bench) -> PathBuf {
    bench.path("run").join("gpureap.sock")
}

fn as_user(world: &World, bench: &Bench, arguments: &[&str]) -> Output {
    finish(world.clone().enter(bench.command(arguments)))
}

fn connect(bench: &Bench) -> UnixStream {
    let stream = UnixStream::connect(socket(bench)).expect("connect");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a time limit");
    stream
}

fn ask(stream: &mut UnixStream, request: &Value) -> Value {
    stream.write_all(format!("{request}\n").as_bytes()).expect("ask");
    let mut bytes = Vec::new();
    let mut byte = [0; 4096];
    while !bytes.ends_with(b"\n") {
        let count = stream.read(&mut byte).expect("an answer");
        assert!(count > 0, "an end instead of an answer to {request}: {bytes:?}");
        bytes.extend_from_slice(&byte[..count]);
    }
    serde_json::from_slice(&bytes).expect("JSON")
}

/// A process of that user that holds the device.
struct Holder(Child);

impl Holder {
    fn of(world: &World, dev: &str) -> Self {
        // In a session of its own: reap leaves that of its caller alone.
        let mut command = Command::new("setsid");
        command.args(["sh", "-c", &format!("exec 9<>{dev}; echo ready; exec sleep 1000")]).stdout(Stdio::piped());
        let mut child = world.clone().enter(command).spawn().expect("a shell");
        let mut line = [0; 6];
        child.stdout.as_mut().expect("its output").read_exact(&mut line).expect("it is ready");
        Self(child)
    }

    fn pid(&self) -> Pid {
        self.0.id() as Pid
    }

    fn lives(&mut self) -> bool {
        self.0.try_wait().expect("wait").is_none()
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.0.kill().and_then(|()| self.0.wait()));
    }
}

/// Without the times: two commands read the difference of the clocks anew, by some milliseconds on a busy machine.
fn timeless(devices: &Value) -> Value {
    let mut devices = devices.clone();
    for device in devices.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
        assert!(device.remove("first_open").is_some_and(|time| time.is_string()));
        assert!(device.remove("last_open").is_some_and(|time| time.is_string()));
    }
    devices
}

#[test]
fn a_user_sees_what_root_sees() {
    let bench = bench();
    let mut daemon = bench.daemon();
    let meta = fs::symlink_metadata(socket(&bench)).expect("the socket");
    assert_eq!((meta.mode() & 0o777, meta.uid()), (0o666, 0));
    let Some(world) = bench.user("socket") else { return };
    let scene = Scene::start("ghost", DEV, &[]);
    let root = bench.expect_truth(&scene, &[]);
    for rest in [&[][..], &["--sweep"], &["--source", "map"]] {
        let output = as_user(&world, &bench, &[&["holders", "--json"], rest].concat()).expect_code(0);
        let seen = Seen::new(output.json());
        assert_eq!((seen.source.as_str(), &seen.backend, seen.complete), ("map", &root.backend, true), "{rest:?}");
        let holder = seen.holder(scene.pid()).unwrap_or_else(|| panic!("{} in {:#}", scene.pid(), seen.json));
        let expected = &root.holder(scene.pid()).expect("seen by root")["devices"];
        assert_eq!(timeless(&holder["devices"]), timeless(expected));
        assert_eq!(holder["lineage"][0]["pid"], scene.numbers("dead")[0]);
        assert_eq!(holder["lineage"], root.holder(scene.pid()).expect("seen by root")["lineage"], "{rest:?}");
    }
    assert!(as_user(&world, &bench, &["holders", "--source", "snapshot"]).code == 7);
    let status = ask(&mut connect(&bench), &json!({"v": 1, "get": "status", "unknown": [1]}));
    assert_eq!(status["answer"]["pid"], daemon.pid());
    assert!(daemon.stop().success());
    assert!(!socket(&bench).exists(), "it goes with the daemon");
}

#[test]
fn no_socket_where_none_is_wanted() {
    let bench = bench();
    let config = fs::read_to_string(bench.path("config.toml")).expect("the configuration");
    bench.write_config(&config.replace("[daemon]\n", "[daemon]\nsocket = false\n"));
    let _daemon = bench.daemon();
    assert!(!socket(&bench).exists());
    let Some(world) = bench.user("no socket") else { return };
    assert_eq!(as_user(&world, &bench, &["holders", "--json"]).expect_code(0).json()["source"], "proc");
}

#[test]
fn clients_that_misbehave_stop_nothing() {
    let bench = bench();
    let mut daemon = bench.daemon();
    let daemon_pid = daemon.pid();
    let world = bench.user("hostile clients");
    let mut scene = Scene::start("churn", DEV, &["5", "300"]);
    bench.expect_truth(&scene, &[]);
    let descriptors = || fs::read_dir(format!("/proc/{daemon_pid}/fd")).expect("its descriptors").count();
    let before = descriptors();

    let deep = vec![b'['; 1 << 16];
    let garbage: [&[u8]; 6] =
        [b"\n", b"rubbish\n", b"\0\xff\xfe\n", b"{\"v\":1}\n", b"{\"v\":7,\"get\":\"view\"}\n", &deep];
    for bytes in garbage {
        let mut stream = connect(&bench);
        stream.write_all(bytes).ok();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).ok();
        assert!(answer.starts_with(b"{\"v\":1,\"error\""), "{:?}", String::from_utf8_lossy(&answer));
    }
    // A line without an end, as long as it is taken.
    let mut endless = connect(&bench);
    endless.set_write_timeout(Some(Duration::from_secs(5))).expect("a time limit");
    let written = (0..1000).take_while(|_| endless.write_all(&deep).is_ok()).count();
    assert!(written < 1000, "somebody reads 64 MB of a request");

    let mut crowd = Vec::new();
    for number in 0..400 {
        // The queue is shorter than the crowd, and so is the room: whoever comes too late is sent away.
        let Ok(mut stream) = UnixStream::connect(socket(&bench)) else { continue };
        match number % 3 {
            // Half of a request, none at all, or answers that nobody takes.
            0 => drop(stream.write_all(b"{\"v\":1,\"get\":")),
            1 => {}
            _ => {
                for _ in 0..50 {
                    drop(stream.write_all(b"{\"v\":1,\"get\":\"view\"}\n{\"v\":1,\"get\":\"sweep\"}\n"));
                }
            }
        }
        crowd.push(stream);
    }
    scene.resume();
    scene.pause();
    bench.expect_truth(&scene, &[]);
    assert!(daemon.runs());
    drop(crowd);
    if let Some(world) = &world {
        wait_for("a user is served again", || {
            as_user(world, &bench, &["holders", "--json"]).expect_code(0).json()["source"] == "map"
        });
    }
    scene.resume();
    scene.pause();
    bench.expect_truth(&scene, &[]);
    assert!(daemon.runs(), "{}", daemon.log());
    // Pidfds of those who come and go are among them.
    let after = descriptors();
    assert!(after < before + 40, "{after} descriptors are open, {before} before");
}

/// One user takes all that a user may have; another one is served.
#[test]
fn a_user_who_asks_too_much_is_told_to_wait() {
    let bench = bench();
    let _daemon = bench.daemon();
    let Some(world) = bench.user("too much") else { return };
    // As the user: fast sweeps by a shell are not fast enough, so the requests are written before they are sent.
    let requests = bench.path("requests");
    fs::write(&requests, "{\"v\":1,\"get\":\"sweep\"}\n".repeat(500)).expect("write");
    let script = format!(
        "exec 3<{}; python3 -c 'import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(\"{}\"); f=s.makefile(\"rwb\")
for line in open(3,\"rb\"):
    f.write(line); f.flush(); sys.stdout.buffer.write(f.readline())'",
        requests.display(),
        socket(&bench).display()
    );
    let mut command = Command::new("sh");
    command.args(["-c", &script]);
    let output = finish(world.clone().enter(command));
    if output.code != 0 {
        return skip("too much", &format!("needs python3: {}", output.stderr));
    }
    let answers: Vec<Value> = output.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(answers.len(), 500);
    let busy = answers.iter().filter(|answer| answer["error"]["code"] == "busy").count();
    assert!(busy > 100, "{busy} of 500 sweeps are refused");
    assert!(
        answers
            .iter()
            .filter(|answer| answer["error"]["code"] == "busy")
            .all(|answer| answer["error"]["retry_ms"].is_u64())
    );
    assert!(answers[0]["answer"]["holders"].is_array(), "{}", answers[0]);
    // gpureap itself takes its time, and root is not counted.
    as_user(&world, &bench, &["holders", "--sweep", "--json"]).expect_code(0);
    let mut stream = connect(&bench);
    for _ in 0..50 {
        assert!(ask(&mut stream, &json!({"v": 1, "get": "sweep"}))["answer"].is_object());
    }
}

#[test]
fn a_daemon_that_does_not_answer_holds_nobody_up() {
    let bench = bench();
    let daemon = bench.daemon();
    let Some(world) = bench.user("stopped daemon") else { return };
    let mut own = Holder::of(&world, DEV);
    sys::kill(daemon.pid(), libc::SIGSTOP);
    let begun = Instant::now();
    let output = as_user(&world, &bench, &["holders", "--json"]).expect_code(0);
    let took = begun.elapsed();
    let root = bench.holders(&[]);
    // Where nothing is known without it, its silence is the reason.
    bench.write_config("");
    let blind = as_user(&world, &bench, &["reap", "--yes"]);
    sys::kill(daemon.pid(), libc::SIGCONT);
    if !std::path::Path::new("/proc/driver/nvidia").exists() {
        assert!(blind.expect_code(8).complaint().ends_with("does not answer)"));
    }
    let json = output.json();
    assert_eq!(json["source"], "proc");
    assert!(json["notes"].to_string().contains("does not answer"), "{:#}", json["notes"]);
    assert!(Seen::new(json).holder(own.pid()).is_some());
    assert!(took < Duration::from_secs(20), "{took:?}");
    assert_eq!(root.source, "map", "root reads the pins");
    assert!(own.lives());
    wait_for("it answers again", || {
        as_user(&world, &bench, &["holders", "--json"]).expect_code(0).json()["source"] == "map"
    });
}

#[test]
fn the_socket_of_a_dead_daemon_is_replaced() {
    let bench = bench();
    let mut daemon = bench.daemon();
    daemon.kill();
    assert!(socket(&bench).exists());
    if let Some(world) = bench.user("dead daemon") {
        let json = as_user(&world, &bench, &["holders", "--json"]).expect_code(0).json();
        assert_eq!(json["source"], "proc");
    }
    daemon.start_again();
    assert_eq!(ask(&mut connect(&bench), &json!({"v": 1, "get": "status"}))["answer"]["pid"], daemon.pid());
}

#[test]
fn a_live_socket_is_never_taken_and_a_link_never_followed() {
    let bench = bench();
    let path = socket(&bench);
    let target = bench.path("target");
    fs::write(&target, "precious").expect("write");
    std::os::unix::fs::symlink(&target, &path).expect("a link");
    let mut daemon = bench.daemon();
    assert_eq!(fs::read_link(&path).expect("still a link"), target);
    assert_eq!(fs::read_to_string(&target).expect("still there"), "precious");
    assert_eq!(fs::metadata(&target).expect("still there").mode() & 0o022, 0, "nobody has opened it to others");
    assert!(daemon.log().contains("is not a socket and is left alone"), "{}", daemon.log());
    let scene = Scene::start("plain", DEV, &[]);
    assert_eq!(bench.expect_truth(&scene, &[]).source, "map", "tracing goes on without a socket");
    assert!(daemon.stop().success());
    assert!(fs::symlink_metadata(&path).is_ok());

    fs::remove_file(&path).expect("remove the link");
    let other = UnixListener::bind(&path).expect("another server");
    daemon.start_again();
    assert!(daemon.log().contains("another process answers"), "{}", daemon.log());
    let _client = UnixStream::connect(&path).expect("connect");
    other.accept().expect("the other server is asked");
    assert!(daemon.stop().success());
    assert!(path.exists());
}

#[test]
fn a_socket_of_somebody_else_is_not_believed() {
    let bench = bench();
    fs::set_permissions(bench.path("run"), fs::Permissions::from_mode(0o777)).expect("chmod");
    let path = socket(&bench);
    let listener = std::thread::spawn(move || {
        // SAFETY: it changes the user of this thread alone, which ends soon.
        let changed = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
        assert_eq!(changed, 0, "become another user");
        UnixListener::bind(path).expect("listen")
    });
    let _listener = listener.join().expect("the listener");
    let output = bench.run(&["events", "--follow"]).expect_code(8);
    assert!(output.complaint().contains("belongs to user 65534 and is not believed"), "{output:#?}");
}

#[test]
fn where_proc_hides_processes_their_names_are_not_told() {
    let bench = bench();
    let Some(world) = bench.user("hidepid") else { return };
    let daemon = bench.command(&["daemon"]);
    let mut hiding = Command::new("unshare");
    hiding.args(["-m", "sh", "-c", "mount -t proc -o hidepid=2 proc /proc && exec \"$0\" daemon"]);
    hiding.arg(daemon.get_program());
    for (name, value) in daemon.get_envs() {
        match value {
            Some(value) => hiding.env(name, value),
            None => hiding.env_remove(name),
        };
    }
    let mut child = hiding.stderr(Stdio::null()).spawn().expect("start the daemon");
    wait_for("it listens or ends", || socket(&bench).exists() || child.try_wait().expect("wait").is_some());
    if child.try_wait().expect("wait").is_some() {
        return skip("hidepid", "/proc cannot be mounted with hidepid");
    }
    let scene = Scene::start("ghost", DEV, &[]);
    let mut own = Holder::of(&world, DEV);
    let look = |root: bool| {
        let arguments = ["holders", "--json"];
        let output = if root { bench.run(&arguments) } else { as_user(&world, &bench, &arguments) };
        Seen::new(output.expect_code(0).json())
    };
    let (seen, by_root) = (look(false), look(true));
    let told = |seen: &Seen, pid| seen.holder(pid).map(|holder| holder["lineage"][0].clone());
    let (dead, known) = (told(&seen, scene.pid()).expect("who holds"), told(&by_root, scene.pid()).expect("who holds"));
    assert_eq!(dead["pid"], known["pid"], "numbers are told");
    assert_eq!((&dead["comm"], &dead["argv"]), (&json!(""), &json!([])), "names are not");
    assert_ne!(known["comm"], "", "to root they are");
    let key = |holder: &Value| json!([{"pid": holder["pid"], "start_ns": holder["start_ns"]}]);
    let mine = seen.holder(own.pid()).expect("one's own");
    let request = json!({"v": 1, "get": "lineage", "of": key(mine)}).to_string();
    let script = format!(
        "import socket; s=socket.socket(socket.AF_UNIX); s.connect('{}'); s.sendall(b'{request}\\n'); print(s.makefile().readline())",
        socket(&bench).display()
    );
    // By way of a shell, which says that there is none where there is none.
    let mut command = Command::new("sh");
    command.args(["-c", "exec python3 -c \"$0\"", &script]);
    let output = finish(world.enter(command));
    assert!(own.lives());
    child.kill().and_then(|()| child.wait()).expect("kill the daemon");
    if output.code != 0 {
        return skip("hidepid", &format!("one's own lineage needs python3: {}", output.stderr));
    }
    let answer = output.json();
    let names: Vec<(&Value, bool)> = answer["answer"]["processes"]
        .as_array()
        .expect("processes")
        .iter()
        .map(|process| (&process["uid"], process["comm"] != ""))
        .collect();
    assert!(names.contains(&(&json!(NOBODY), true)), "one's own names are told: {answer}");
    assert!(names.iter().all(|(uid, named)| **uid == json!(NOBODY) || !named), "and no others: {answer}");
}

#[test]
fn k12_a_user_sees_all_holders_and_reaps_its_own() {
    let bench = Bench::new(&[Device::full()]);
    if !bench.is_free("K12") {
        return;
    }
    let _daemon = bench.daemon();
    let Some(world) = bench.user("K12") else { return };
    let scene = Scene::start("plain", "/dev/full", &[]);
    let mut own = Holder::of(&world, "/dev/full");

    let reap = |rest: &[&str]| as_user(&world, &bench, &[&["reap", "--yes", "--now", "--json"], rest].concat());
    let ending = |report: &Value, pid: Pid| {
        let list = report["processes"].as_array().expect("processes").clone();
        let entry = list.into_iter().find(|process| process["pid"] == pid);
        entry.unwrap_or_else(|| panic!("{pid} in {report:#}"))
    };
    let output = reap(&[]).expect_code(3);
    let report = output.json();
    assert_eq!((&report["source"], &report["outcome"]), (&json!("map"), &json!("held")), "{report:#}");
    assert_eq!(ending(&report, own.pid())["result"], "exited");
    let other = ending(&report, scene.pid());
    assert_eq!((&other["result"], &other["signals"]), (&json!("not-permitted"), &json!([])), "{report:#}");
    assert!(report["notes"].to_string().contains("not permitted to signal 1 of 2"), "{report:#}");
    assert!(!own.lives());
    assert!(sys::signal(scene.pid(), 0), "root's lives");

    let report = reap(&[]).expect_code(7).json();
    assert_eq!(ending(&report, scene.pid())["result"], "not-permitted", "nothing could be done");
    assert!(sys::signal(scene.pid(), 0));

    // Alone with its own process it can even prove that the device is free.
    sys::kill(scene.pid(), sys::SIGKILL);
    wait_for("root's has ended", || anybody(&Device::full().key()).is_empty());
    let mut own = Holder::of(&world, "/dev/full");
    let report = reap(&[]).expect_code(0).json();
    assert_eq!((&report["outcome"], &report["verified"]), (&json!("freed"), &json!(true)), "{report:#}");
    assert!(!own.lives());
}
