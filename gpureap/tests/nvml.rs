//! The child that asks NVML, with a library that answers from a file, hangs, crashes or is not there.

#![expect(clippy::unwrap_used, reason = "a test that panics has failed, in its helpers too")]

use std::{
    env, fs,
    io::{BufRead as _, BufReader, Write as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use fake_nvml::{Gpu, Kind, MigDevice, Process, VARIABLE, World};
use gpureap::{
    clock::boottime_ns,
    config::Nvml,
    gpu::nvml::{
        Context, NvmlChild, NvmlTrouble, Snapshot,
        memory::{Case, Inheritance, MemoryState, MemoryUser},
        proof::{Limits, MemoryProof, prove},
    },
};

const GPUREAP: &str = env!("CARGO_BIN_EXE_gpureap");
const NAME: &str = "libnvidia-ml.so.1";
/// Far above what anything here takes, so that a busy machine does not fail it.
const PATIENCE: Duration = Duration::from_secs(30);
/// What a client may take beyond its time limit: killing and burying the child.
const MARGIN: Duration = Duration::from_secs(2);

/// The variable is this process's: one test at a time.
static TURN: Mutex<()> = Mutex::new(());

struct Bench {
    dir: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Bench {
    /// The library under its one usual name, with functions that it does not have.
    fn new(world: &World, without: &[&str]) -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let bench = Self { dir: tempfile::tempdir().unwrap(), _turn: turn };
        let mut library = fs::read(fake_nvml()).unwrap();
        for name in without {
            rename(&mut library, name);
        }
        fs::write(bench.dir.path().join(NAME), library).unwrap();
        bench.write(world);
        // SAFETY: the tests of this executable that read or write the environment have their turn.
        unsafe { env::set_var(VARIABLE, bench.dir.path().join("world.json")) };
        bench
    }

    /// In one step: the child may be reading.
    fn write(&self, world: &World) {
        let (new, place) = (self.dir.path().join("new"), self.dir.path().join("world.json"));
        fs::write(&new, serde_json::to_vec(world).unwrap()).unwrap();
        fs::rename(new, place).unwrap();
    }

    fn library(&self) -> PathBuf {
        self.dir.path().join(NAME)
    }

    fn child(&self) -> NvmlChild {
        spawn(&self.library())
    }

    fn ask(&self) -> Snapshot {
        self.child().ask(PATIENCE).unwrap()
    }
}

/// Beside the tests, but not in a static build, which makes no shared libraries.
fn fake_nvml() -> PathBuf {
    let beside = || env::current_exe().unwrap().with_file_name("libfake_nvml.so");
    env::var_os("GPUREAP_FAKE_NVML_LIBRARY").map_or_else(beside, PathBuf::from)
}

fn nvml() -> Nvml {
    Nvml { program: GPUREAP.into(), ..Nvml::default() }
}

fn spawn(library: &Path) -> NvmlChild {
    NvmlChild::spawn(&Nvml { library: library.to_owned(), ..nvml() }).unwrap()
}

/// The name of a function becomes another one, which nobody looks for.
fn rename(library: &mut [u8], name: &str) {
    let wanted = [b"\0", name.as_bytes(), b"\0"].concat();
    let places: Vec<usize> =
        (0..library.len() - wanted.len()).filter(|place| library[*place..].starts_with(&wanted)).collect();
    assert!(!places.is_empty(), "{name} is in the library");
    for place in places {
        library[place + name.len()] = b'!';
    }
}

fn h200(minor: u32) -> Gpu {
    Gpu {
        uuid: format!("GPU-0000000{minor}-1111-2222-3333-444455556666"),
        bus: 6 + minor,
        minor,
        total: 143_771,
        reserved: 603,
        mig: Some(false),
        ..Gpu::default()
    }
}

fn of(gpus: &[Gpu]) -> World {
    World { gpus: gpus.to_vec(), ..World::default() }
}

/// A process to be looked at.
struct Sleeper(Child);

impl Sleeper {
    fn new() -> Self {
        Self(Command::new("sleep").arg("600").process_group(0).stdin(Stdio::null()).spawn().unwrap())
    }

    fn end(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn is_alive(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn every_fact_of_two_gpus() {
    let (compute, graphics, client) = (
        Process { pid: 11, used: Some(674), ..Process::default() },
        Process { pid: 12, kind: Kind::Graphics, ..Process::default() },
        Process { pid: 13, used: Some(9), kind: Kind::Mps, ..Process::default() },
    );
    // Index 0 is minor 1: the orders differ.
    let first = Gpu { used: 4, persistence: true, processes: vec![compute, graphics, client], ..h200(1) };
    let bench = Bench::new(&of(&[first, h200(0)]), &[]);
    let snapshot = bench.ask();
    assert_eq!(snapshot.driver.as_deref(), Some("580.159.04"));
    let [first, second] = snapshot.gpus.as_slice() else { panic!("{snapshot:?}") };
    assert_eq!((first.index, first.minor, first.bdf.as_deref()), (0, Some(1), Some("0000:07:00.0")));
    assert_eq!(first.uuid.as_deref(), Some("GPU-00000001-1111-2222-3333-444455556666"));
    let memory = first.memory.unwrap();
    assert_eq!(
        (memory.total >> 20, memory.used >> 20, memory.reserved.map(|size| size >> 20)),
        (143_771, 687, Some(603))
    );
    let processes: Vec<_> =
        first.processes.iter().flatten().map(|p| (p.pid, p.used.map(|u| u >> 20), p.context)).collect();
    assert_eq!(
        processes,
        [(11, Some(674), Context::Compute), (12, None, Context::Graphics), (13, Some(9), Context::Mps)]
    );
    assert_eq!((first.persistence, second.persistence), (Some(true), Some(false)));
    assert_eq!((second.minor, second.processes.as_deref()), (Some(0), Some([].as_slice())));
    assert!(first.errors.is_empty() && second.errors.is_empty(), "{snapshot:?}");
    assert_eq!(snapshot.contexts(), [(1, [11, 12, 13].into()), (0, [].into())].into());
}

#[test]
fn a_divided_gpu() {
    let part = |uuid: &str, gi| MigDevice { uuid: uuid.to_owned(), gi, ci: 0, total: 16_384, used: 100 };
    let process = Process { pid: 11, used: Some(90), gi: Some(9), ..Process::default() };
    let divided = Gpu {
        mig: Some(true),
        mig_devices: vec![part("MIG-aaaa", 9), part("MIG-bbbb", 10)],
        processes: vec![process],
        ..h200(0)
    };
    let undividable = Gpu { mig: None, ..h200(1) };
    let mut world = of(&[divided, undividable]);
    let bench = Bench::new(&world, &[]);
    let snapshot = bench.ask();
    let mig = snapshot.gpus[0].mig.clone().unwrap();
    assert!(mig.enabled && mig.pending && mig.devices.len() == 2, "{mig:?}");
    assert_eq!(mig.devices[1].memory.map(|memory| memory.used >> 20), Some(100));
    assert_eq!((snapshot.gpus[1].mig.as_ref(), snapshot.gpus[1].errors.as_slice()), (None, [].as_slice()));
    let [place] = snapshot.mig("MIG-bbbb").try_into().unwrap();
    assert_eq!((place.parent_minor, place.gi, place.ci), (Some(0), Some(10), Some(0)));
    assert_eq!(snapshot.gpus[0].processes.as_ref().unwrap()[0].gi, Some(9));

    // An ordinary user may not ask for the whole, and is refused the parts too here: an error, not an empty list.
    world.errors = vec![("nvmlDeviceGetComputeRunningProcesses_v3".to_owned(), 4)];
    bench.write(&world);
    let gpu = bench.ask().gpus.remove(0);
    assert_eq!(gpu.processes, None);
    assert!(gpu.errors.iter().any(|error| error.starts_with("processes: ")), "{:?}", gpu.errors);
}

#[test]
fn nothing_is_touched_before_the_first_line() {
    let bench = Bench::new(&of(&[h200(0)]), &[]);
    let mut child = bench.child();
    let maps = || fs::read_to_string(format!("/proc/{}/maps", child.pid())).unwrap();
    wait_for("the child is another program", || maps().contains("gpureap"));
    std::thread::sleep(Duration::from_millis(100));
    assert!(!maps().contains(NAME));
    let key = child.key();
    assert!(key.tgid == child.pid() && key.start_ns > 0);
    child.start().unwrap();
    let maps = || fs::read_to_string(format!("/proc/{}/maps", key.tgid)).unwrap();
    wait_for("the library is loaded", || maps().contains(NAME));
    assert_eq!(child.ask(PATIENCE).unwrap().gpus.len(), 1);
    assert!(child.close(PATIENCE));
    assert!(!is_alive(key.tgid));
}

/// It has no terminal, next to nothing of the environment, and no file of its parent.
#[test]
fn the_child_inherits_next_to_nothing() {
    let bench = Bench::new(&of(&[]), &[]);
    let _inheritable = fs::File::open("/dev/full").unwrap();
    // SAFETY: it has its turn, as all that touch the environment.
    unsafe { env::set_var("LD_PRELOAD_FOR_NOBODY", "1") };
    let mut child = bench.child();
    child.ask(PATIENCE).unwrap();
    let pid = child.pid();
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    assert_eq!((fields[3], fields[4]), (pid.to_string().as_str(), "0"), "its own session, no terminal: {stat}");
    let environment = fs::read_to_string(format!("/proc/{pid}/environ")).unwrap();
    for variable in environment.split('\0').filter(|variable| !variable.is_empty()) {
        assert!(variable.starts_with("GPUREAP_") || variable.starts_with("LD_LIBRARY_PATH="), "{variable}");
    }
    let files = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    assert_eq!(files, 3);
    assert_eq!(fs::read_to_string(format!("/proc/{pid}/comm")).unwrap().trim(), "gpureap-nvml");
}

#[test]
fn v4_a_library_that_hangs_is_left_behind() {
    for function in ["nvmlInit_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetMemoryInfo_v2"] {
        let world = World { hang: vec![function.to_owned()], ..of(&[h200(0)]) };
        let bench = Bench::new(&world, &[]);
        let mut child = bench.child();
        child.start().unwrap();
        let limit = Duration::from_millis(300);
        let begun = Instant::now();
        let trouble = child.ask(limit).unwrap_err();
        assert!(begun.elapsed() >= limit && begun.elapsed() < limit + MARGIN, "{function}: {:?}", begun.elapsed());
        assert_eq!(trouble.to_string(), "NVML did not answer within 300 ms", "{function}");
        wait_for("the child is killed", || !is_alive(child.pid()));
        // The answer stays the same, at once.
        let begun = Instant::now();
        assert_eq!(child.ask(PATIENCE).unwrap_err(), trouble);
        assert_eq!(child.start().unwrap_err(), trouble);
        assert!(begun.elapsed() < MARGIN);
    }
}

/// As one that is stuck in the driver: SIGKILL was sent, and the process does not end.
#[test]
fn v4_the_client_does_not_wait_for_a_child_that_cannot_die() {
    let world = World { hang: vec!["nvmlInit_v2".to_owned()], ..of(&[h200(0)]) };
    let bench = Bench::new(&world, &[]);
    for give_up in ["at a question", "when closed", "when dropped"] {
        let mut child = bench.child();
        let pid = child.pid();
        let Some(undying) = Undying::new(pid) else {
            eprintln!("SKIPPED: this host does not let a process be traced");
            return;
        };
        let limit = Duration::from_millis(200);
        let begun = Instant::now();
        match give_up {
            "at a question" => {
                let trouble = child.ask(limit).unwrap_err();
                assert_eq!(trouble, NvmlTrouble::Silent("200 ms".to_owned()));
            }
            "when closed" => assert!(!child.close(limit), "it is not gone"),
            _ => drop(child),
        }
        assert!(begun.elapsed() < limit + MARGIN, "{give_up}: {:?}", begun.elapsed());
        assert!(is_alive(pid), "{give_up}: it was to be stuck");
        undying.let_go();
        // As a zombie perhaps: the tracer's stop may have been what the one who buries it was told of.
        wait_for("it dies at last", || !is_alive(pid));
    }
}

/// A process that a tracer holds back on its way out, where no signal reaches it.
struct Undying {
    go: std::sync::mpsc::Sender<()>,
    tracer: std::thread::JoinHandle<()>,
}

impl Undying {
    fn new(pid: u32) -> Option<Self> {
        let (go, wait) = std::sync::mpsc::channel();
        let (report, seized) = std::sync::mpsc::channel();
        let tracer = std::thread::spawn(move || {
            // SAFETY: attaches to a child of this process; no memory is passed.
            let result = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, libc::PTRACE_O_TRACEEXIT) };
            report.send(result == 0).unwrap();
            // When this thread ends the kernel lets go of what it traces.
            wait.recv().ok();
        });
        seized.recv().unwrap().then_some(Self { go, tracer })
    }

    fn let_go(self) {
        drop(self.go);
        self.tracer.join().unwrap();
    }
}

#[test]
fn a_slow_answer_within_the_limit_is_an_answer() {
    let world = World { slow: vec![("nvmlInit_v2".to_owned(), 400)], ..of(&[h200(0)]) };
    let bench = Bench::new(&world, &[]);
    let begun = Instant::now();
    assert_eq!(bench.ask().gpus.len(), 1);
    assert!(begun.elapsed() >= Duration::from_millis(400));
}

#[test]
fn troubles_are_told_apart() {
    let bench = Bench::new(&of(&[h200(0)]), &[]);
    let ask = || bench.child().ask(PATIENCE).unwrap_err();

    bench.write(&World { errors: vec![("nvmlInit_v2".to_owned(), 9)], ..World::default() });
    assert_eq!(ask().to_string(), "NVML answers: NVIDIA driver is not loaded");
    bench.write(&World { errors: vec![("nvmlInit_v2".to_owned(), 18)], ..World::default() });
    assert!(ask().to_string().contains("version mismatch"), "{}", ask());
    bench.write(&World { crash: vec!["nvmlDeviceGetUUID".to_owned()], ..of(&[h200(0)]) });
    assert_eq!(ask().to_string(), "the process that asks NVML was killed by signal 6");

    let absent = spawn(&bench.dir.path().join("absent.so.1")).ask(PATIENCE).unwrap_err();
    assert!(matches!(&absent, NvmlTrouble::NoLibrary(name) if name.ends_with("absent.so.1")), "{absent}");
    let by_name = spawn(Path::new("libnvidia-ml-of-nobody.so.1")).ask(PATIENCE).unwrap_err();
    assert_eq!(by_name.to_string(), "libnvidia-ml-of-nobody.so.1 is not there");
    let text = bench.dir.path().join("world.json");
    let broken = spawn(&text).ask(PATIENCE).unwrap_err();
    assert!(broken.to_string().starts_with("NVML could not be loaded: "), "{broken}");
}

/// By its name alone, in a directory of the loader's path: the name without `.1` is not there on most hosts.
#[test]
fn the_library_is_found_by_its_one_usual_name() {
    let bench = Bench::new(&of(&[h200(0)]), &[]);
    // SAFETY: it has its turn.
    unsafe { env::set_var("LD_LIBRARY_PATH", bench.dir.path()) };
    let answer = NvmlChild::spawn(&nvml()).unwrap().ask(PATIENCE);
    // SAFETY: it has its turn.
    unsafe { env::remove_var("LD_LIBRARY_PATH") };
    assert_eq!(answer.unwrap().gpus.len(), 1);
}

#[test]
fn one_bad_gpu_does_not_hide_the_others() {
    let world = World { errors: vec![("nvmlDeviceGetMemoryInfo_v2".to_owned(), 15)], ..of(&[h200(0)]) };
    let bench = Bench::new(&world, &[]);
    let gpu = bench.ask().gpus.remove(0);
    assert_eq!((gpu.memory, gpu.minor), (None, Some(0)));
    assert_eq!(gpu.errors, ["memory: device fell off the bus or has otherwise become inacessible"]);
}

#[test]
fn an_older_library_without_newer_functions() {
    let process = Process { pid: 11, used: Some(674), ..Process::default() };
    let world = of(&[Gpu { processes: vec![process], ..h200(0) }]);
    let newer = [
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
    ];
    let bench = Bench::new(&world, &newer);
    let gpu = bench.ask().gpus.remove(0);
    let memory = gpu.memory.unwrap();
    assert_eq!((memory.used >> 20, memory.reserved), (674 + 603, None), "version 1 counts the reserve as used");
    assert_eq!(gpu.processes.unwrap().len(), 1);
    drop(bench);

    // Still older: no processes at all, which is not an empty list.
    let bench = Bench::new(&world, &[&newer[..], &["nvmlDeviceGetComputeRunningProcesses_v2"]].concat());
    let gpu = bench.ask().gpus.remove(0);
    assert_eq!(gpu.processes, None);
    assert!(gpu.errors.iter().any(|error| error.starts_with("processes: ")), "{:?}", gpu.errors);
}

#[test]
fn many_processes_make_a_long_line() {
    let process = |pid| Process { pid, used: Some(1), ..Process::default() };
    let bench = Bench::new(&of(&[Gpu { processes: (1..=3000).map(process).collect(), ..h200(0) }]), &[]);
    let mut child = bench.child();
    for _ in 0..2 {
        assert_eq!(child.ask(PATIENCE).unwrap().gpus[0].processes.as_ref().unwrap().len(), 3000);
    }
}

#[test]
fn the_child_ends_with_its_parent_and_with_the_client() {
    let bench = Bench::new(&World { hang: vec!["nvmlInit_v2".to_owned()], ..World::default() }, &[]);
    let child = bench.child();
    let pid = child.pid();
    drop(child);
    wait_for("dropped", || !is_alive(pid));

    // Killed while it hangs, with its standard input still open, under a parent that is killed too.
    let script = r#"exec 3<&0; "$0" nvml-child $$ "$1" <&3 & echo $!; wait"#;
    let mut parent = Command::new("sh")
        .args(["-c", script, GPUREAP])
        .arg(bench.library())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = parent.stdin.take().unwrap();
    let mut line = String::new();
    BufReader::new(parent.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let pid: u32 = line.trim().parse().unwrap();
    input.write_all(b"start\n").unwrap();
    let maps = || fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    wait_for("it hangs in the library", || maps().contains(NAME));
    parent.kill().unwrap();
    parent.wait().unwrap();
    wait_for("the parent is dead", || !is_alive(pid));
    drop(input);

    // By hand, under a parent that is another one than it was told.
    let status = Command::new(GPUREAP).args(["nvml-child", "1", "x"]).stdin(Stdio::piped()).status().unwrap();
    assert!(status.success());
    assert!(!Command::new(GPUREAP).arg("nvml-child").status().unwrap().success());
}

fn proof(child: &mut NvmlChild, case: &mut Case, patience: Duration) -> MemoryProof {
    let limits = Limits { until: Instant::now() + patience, timeout: PATIENCE, clock: boottime_ns };
    prove(child, case, &[0].into(), limits, &is_alive)
}

/// V1, V3: memory goes with the process, after some time; F7: the dead process's memory goes with its heir.
#[test]
fn v3_memory_is_watched_until_it_is_free_and_what_stays_has_a_name() {
    let (mut holder, mut heir) = (Sleeper::new(), Sleeper::new());
    let (pid, heir_pid) = (holder.0.id(), heir.0.id());
    let dead = {
        let mut dead = Sleeper::new();
        dead.end();
        dead.0.id()
    };
    let own = Process { pid, used: Some(674), until_gone: Some(pid), ..Process::default() };
    let ghost =
        Process { pid: dead, used: Some(683), unlisted: true, until_gone: Some(heir_pid), ..Process::default() };
    let bench = Bench::new(&of(&[Gpu { processes: vec![own, ghost], ..h200(0) }]), &[]);
    let mut child = bench.child();
    let mut case = Case {
        before: Some(child.ask(PATIENCE).unwrap()),
        inherited: vec![Inheritance { dead, living: heir_pid, minors: [0].into() }],
        ..Case::default()
    };
    let short = Duration::from_millis(50);
    let state = proof(&mut child, &mut case, short).gpus.remove(&0).unwrap();
    assert_eq!(state.free_ns, None);
    assert_eq!(
        state.state.sentence(),
        format!(
            "1357 MiB are still used: 674 MiB by process {pid}, 683 MiB charged to process {dead}, which is dead, and \
             kept by {heir_pid}, who inherited its files"
        )
    );

    holder.end();
    let state = proof(&mut child, &mut case, short).gpus.remove(&0).unwrap();
    let by = vec![MemoryUser { pid: dead, mib: Some(683), alive: false, inherited_by: [heir_pid].into() }];
    assert_eq!(state.state, MemoryState::StillUsed { mib: 683, by });

    let begun = boottime_ns();
    let ender = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        heir.end();
    });
    let state = proof(&mut child, &mut case, PATIENCE).gpus.remove(&0).unwrap();
    ender.join().unwrap();
    assert_eq!(state.state, MemoryState::Free);
    assert!(state.free_ns.unwrap() >= begun + 200_000_000);

    // Nobody has a file open and nobody is listed, and the memory stays.
    bench.write(&of(&[Gpu { used: 683, ..h200(0) }]));
    let state = proof(&mut child, &mut Case::default(), short).gpus.remove(&0).unwrap();
    assert_eq!(state.state, MemoryState::StillUsed { mib: 683, by: Vec::new() });
}

/// `blockers` on a recorded host: what NVML tells of its settings, and a library that hangs.
#[test]
fn blockers_ask_for_settings_and_do_not_wait_for_ever() {
    let bench = Bench::new(&of(&[Gpu { persistence: true, ..h200(0) }]), &[]);
    let host = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/h200");
    let config = bench.dir.path().join("config.toml");
    let library = bench.library();
    fs::write(&config, format!("[nvml]\nlibrary = {library:?}\ntimeout = \"500ms\"\n")).unwrap();
    let run = || {
        let mut command = Command::new(GPUREAP);
        for name in ["proc", "sys", "dev"] {
            command.env(format!("GPUREAP_{}", name.to_uppercase()), host.join(name));
        }
        let output = command.args(["blockers", "--for", "reset", "--json", "--config"]).arg(&config).output().unwrap();
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["exit_code"], output.status.code().unwrap());
        assert_eq!(report["devices"][0]["node"], "/dev/nvidia0");
        report
    };
    let report = run();
    assert_eq!(report["nvml"], serde_json::json!({"asked": true, "trouble": null}));
    let [setting] = &report["blockers"].as_array().unwrap()[..] else { panic!("{report:#}") };
    assert_eq!((setting["kind"].as_str(), setting["nodes"][0].as_str()), (Some("setting"), Some("/dev/nvidia0")));
    assert!(report["steps"][0]["command"].as_str().unwrap().ends_with("-pm 0"), "{report:#}");

    bench.write(&World { hang: vec!["nvmlDeviceGetPersistenceMode".to_owned()], ..of(&[h200(0)]) });
    let begun = Instant::now();
    let report = run();
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    let trouble = "NVML did not answer within 500 ms";
    assert_eq!((report["nvml"]["trouble"].as_str(), report["blockers"].as_array().unwrap().len()), (Some(trouble), 0));
    let notes: Vec<&str> = report["notes"].as_array().unwrap().iter().filter_map(|note| note.as_str()).collect();
    assert!(notes.iter().any(|note| note.ends_with(trouble)), "{notes:?}");
}

/// A plan of a recorded host with a library that hangs says what it does not know.
#[test]
fn a_plan_without_contexts_says_so() {
    let bench = Bench::new(&World { hang: vec!["nvmlDeviceGetUUID".to_owned()], ..of(&[h200(0)]) }, &[]);
    let host = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/h200");
    let config = bench.dir.path().join("config.toml");
    let library = bench.library();
    for (enabled, expected) in [(true, Some("NVML did not answer within 500 ms")), (false, None)] {
        let text = format!("[nvml]\nenabled = {enabled}\nlibrary = {library:?}\ntimeout = \"500ms\"\n");
        fs::write(&config, text).unwrap();
        let mut command = Command::new(GPUREAP);
        for name in ["proc", "sys", "dev"] {
            command.env(format!("GPUREAP_{}", name.to_uppercase()), host.join(name));
        }
        let output = command.args(["reap", "--dry-run", "--gpu", "0", "--json", "--config"]).arg(&config).output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let notes = report["notes"].as_array().unwrap().iter().filter_map(|note| note.as_str());
        let told: Vec<&str> = notes.filter(|note| note.contains("contexts")).collect();
        assert_eq!(told.len(), usize::from(expected.is_some()), "{report:#}");
        assert!(expected.is_none_or(|end| told[0].ends_with(end)), "{told:?}");
    }
}
