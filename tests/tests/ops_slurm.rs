//! The scripts of packaging/slurm, run by a real slurmd: munged, slurmctld and slurmd on loopback, jobs of two users, and two
//! stand-in GPUs in gres.conf. What no test can make a real gpureap or slurmctld say is said to the scripts by other programs.
use std::{
    collections::BTreeSet,
    fs::{self, File},
    net::TcpListener,
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use gpureap_tests::harness::{
    Bench, Daemon, Device, Freezer, NOBODY, Output, Pid, finish, note, settle, skip, sys, wait_for,
};

/// Debian's user with that number; Slurm takes jobs of users with a name alone.
const DAEMON: u32 = 1;
/// Seconds between two health checks, the least that Slurm knows.
const INTERVAL: u32 = 1;
const NODE: &str = "gpu1";
/// For slurmctld and slurmd, which look once a second at best, on a machine that has much else to do.
const PATIENCE: Duration = Duration::from_secs(40);

/// A server that ends with the test.
struct Server(Child);

impl Server {
    fn start(program: &str, arguments: &[&str], place: &Path) -> Self {
        let log = File::create(place.join(format!("{program}.log"))).expect("a log");
        let mut command = Command::new(Path::new("/usr/sbin").join(program));
        command
            .args(arguments)
            .env_clear()
            .env("SLURM_CONF", place.join("slurm.conf"))
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a second handle of the log"))
            .stderr(log);
        // As under systemd: what gpureap is started from in the end is not in the session of this test.
        let enter = || {
            sys::setsid();
            // It does not outlive a test that is killed.
            sys::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL.unsigned_abs().into()).map(drop)
        };
        // SAFETY: between fork and exec this only makes system calls.
        let child =
            unsafe { command.pre_exec(enter) }.spawn().unwrap_or_else(|error| panic!("start {program}: {error}"));
        Self(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        sys::kill(self.0.id() as Pid, libc::SIGTERM);
        let gone = settle(Duration::from_secs(5), || match self.0.try_wait() {
            Ok(Some(_)) => None,
            _ => Some(()),
        });
        if gone.is_err()
            && let Err(error) = self.0.kill().and_then(|()| self.0.wait())
        {
            note(&format!("a server: {error}"));
        }
    }
}

/// One node with two stand-in GPUs, with gpureap's scripts in it.
struct Cluster<'a> {
    place: &'a Path,
    // Dropped in this order, the first last started.
    _slurmd: Server,
    _slurmctld: Server,
    _munged: Server,
}

/// Ends whatever jobs left when the test fails in the middle.
struct Broom<'a>(&'a Path);

impl Drop for Broom<'_> {
    fn drop(&mut self) {
        let program = self.0.join("python3");
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let is_it = fs::read_link(entry.path().join("exe")).is_ok_and(|exe| exe == program);
            if let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()).filter(|_| is_it) {
                sys::kill(pid, libc::SIGKILL);
            }
        }
    }
}

fn write(path: &Path, text: &str, mode: u32) {
    fs::write(path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("chmod");
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port").port()
}

impl<'a> Cluster<'a> {
    fn path(&self, name: &str) -> PathBuf {
        self.place.join(name)
    }

    fn gpu(&self, number: u32) -> String {
        self.path(&format!("gpu{number}")).display().to_string()
    }

    /// `proctrack`: how slurmd knows a job's processes.
    fn start(place: &'a Path, bench: &Bench, proctrack: &str) -> Self {
        let at = place;
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/slurm");
        let scripts = fs::canonicalize(&scripts).unwrap_or_else(|error| panic!("{}: {error}", scripts.display()));
        for name in ["state", "spool", "munge"] {
            fs::create_dir(at.join(name)).expect("a directory");
        }
        // munged asks for a way to its socket that everybody can go.
        fs::set_permissions(at.join("munge"), fs::Permissions::from_mode(0o711)).expect("chmod");
        let mut key = [0; 1024];
        std::io::Read::read_exact(&mut File::open("/dev/urandom").expect("urandom"), &mut key).expect("a key");
        fs::write(at.join("munge/key"), key).expect("the key");
        fs::set_permissions(at.join("munge/key"), fs::Permissions::from_mode(0o400)).expect("chmod");

        // What slurmd starts has next to no environment: gpureap's is in a wrapper, and the settings in a file.
        let command = bench.command(&[]);
        let variables: String = command
            .get_envs()
            .filter_map(|(name, value)| Some(format!("export {}='{}'\n", name.display(), value?.display())))
            .collect();
        let gpureap = command.get_program().display().to_string();
        write(&at.join("gpureap"), &format!("#!/bin/sh\n{variables}exec '{gpureap}' \"$@\"\n"), 0o755);
        let here = at.display();
        for (script, wrapper) in [("prolog", "prolog"), ("epilog", "epilog"), ("health-check", "health")] {
            let text = format!(
                "#!/bin/sh\nexport GPUREAP_SLURM_ENV={here}/slurm.env\nexec 2>>{here}/scripts.log\n'{}/{script}'\ncode=$?\n\
                 echo \"{script} ${{SLURM_JOB_ID:--}} $code\" >>{here}/runs\nexit $code\n",
                scripts.display()
            );
            write(&at.join(wrapper), &text, 0o755);
        }
        let hostname = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let hostname = hostname.split('.').next().expect("a name");
        let (controller, node) = (free_port(), free_port());
        write(
            &at.join("slurm.conf"),
            &format!(
                "ClusterName=test\nSlurmctldHost={hostname}(127.0.0.1)\nSlurmctldPort={controller}\nSlurmdPort={node}\n\
                 SlurmUser=root\nSlurmdUser=root\nAuthType=auth/munge\nAuthInfo=socket={here}/munge/socket\n\
                 CredType=cred/munge\nStateSaveLocation={here}/state\nSlurmdSpoolDir={here}/spool\n\
                 SlurmctldPidFile={here}/slurmctld.pid\nSlurmdPidFile={here}/slurmd.pid\nPlugStackConfig=/dev/null\n\
                 ProctrackType={proctrack}\nTaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\nMpiDefault=none\n\
                 SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nKillWait=1\nReturnToService=2\n\
                 SchedulerParameters=nohold_on_prolog_fail,batch_sched_delay=1,sched_interval=2\nGresTypes=gpu\n\
                 Prolog={here}/prolog\nEpilog={here}/epilog\nHealthCheckProgram={here}/health\n\
                 HealthCheckInterval={INTERVAL}\nHealthCheckNodeState=ANY\n\
                 SlurmdTimeout=300\nNodeName={NODE} NodeHostname={hostname} NodeAddr=127.0.0.1 CPUs=2 Gres=gpu:2 State=UNKNOWN\n\
                 PartitionName=all Nodes=ALL Default=YES State=UP\n"
            ),
            0o644,
        );
        write(&at.join("gres.conf"), &format!("NodeName={NODE} Name=gpu File={here}/gpu[0-1]\n"), 0o644);
        let munge = |name: &str| at.join("munge").join(name).display().to_string();
        let options = [("key", "key"), ("socket", "socket"), ("pid", "pid"), ("log", "log"), ("seed", "seed")];
        let mut arguments = vec!["--foreground".to_owned(), "--force".to_owned()];
        for (option, file) in options {
            let option = if option == "socket" { "socket".to_owned() } else { format!("{option}-file") };
            arguments.push(format!("--{option}={}", munge(file)));
        }
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let munged = Server::start("munged", &arguments, at);
        wait_for("munged listens", || at.join("munge/socket").exists());
        let slurmctld = Server::start("slurmctld", &["-D"], at);
        let slurmd = Server::start("slurmd", &["-D", "-N", NODE], at);
        let cluster = Self { place, _slurmd: slurmd, _slurmctld: slurmctld, _munged: munged };
        cluster.settings("");
        cluster.until("the node is idle", || cluster.state().starts_with("IDLE"));
        cluster
    }

    /// Stand-ins cannot be mapped, so that nobody is attached to them.
    fn settings(&self, more: &str) {
        let here = self.place.display();
        write(
            &self.path("slurm.env"),
            &format!(
                "GPUREAP={here}/gpureap\nGPUREAP_GRACE=500ms\nGPUREAP_TIMEOUT=1s\nGPUREAP_LIMIT=20\nGPUREAP_MATCH=any\n\
                 GPUREAP_STATE={here}/health-state\nSLURM_CONF={here}/slurm.conf\n{more}"
            ),
            0o644,
        );
    }

    #[track_caller]
    fn until(&self, what: &str, mut condition: impl FnMut() -> bool) {
        let outcome = settle(PATIENCE, || (!condition()).then_some(()));
        assert!(outcome.is_ok(), "{what}: not within {PATIENCE:?}\n{}", self.logs());
    }

    fn logs(&self) -> String {
        let read = |name: &str| fs::read_to_string(self.path(name)).unwrap_or_default();
        let last = |text: String| text.lines().rev().take(40).map(|line| format!("{line}\n")).collect::<Vec<_>>();
        let names = ["runs", "scripts.log", "slurmd.log", "slurmctld.log"];
        let parts = names.map(|name| {
            let mut lines = last(read(name));
            lines.reverse();
            format!("--- {name}\n{}", lines.concat())
        });
        format!("{}--- node\n{}", parts.concat(), self.node())
    }

    fn slurm(&self, words: &[&str]) -> Output {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).env("SLURM_CONF", self.path("slurm.conf"));
        finish(command)
    }

    fn node(&self) -> String {
        self.slurm(&["scontrol", "-o", "show", "node", NODE]).stdout
    }

    fn state(&self) -> String {
        let node = self.node();
        node.split(" State=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap_or_default().to_owned()
    }

    fn is_drained(&self) -> bool {
        self.state().contains("DRAIN")
    }

    fn reason(&self) -> String {
        self.node().split(" Reason=").nth(1).unwrap_or_default().trim().to_owned()
    }

    /// Gives a job of that user to the node, with one GPU; its number.
    fn submit(&self, user: u32, options: &[&str], script: &str) -> u32 {
        let file = self.path("job.sh");
        write(&file, &format!("#!/bin/sh\nhere={}\n{script}\n", self.place.display()), 0o755);
        let user = user.to_string();
        let file = file.display().to_string();
        let fixed = ["sbatch", "--parsable", "--uid", &user, "--gid", &user, "-D", "/", "-o", "/dev/null", "-n1"];
        let words = [&fixed[..], options, &[&file]].concat();
        self.slurm(&words).expect_code(0).stdout.trim().parse().expect("the number of a job")
    }

    fn job(&self, job: u32) -> String {
        let shown = self.slurm(&["scontrol", "-o", "show", "job", &job.to_string()]).stdout;
        shown.split(" JobState=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap_or_default().to_owned()
    }

    /// How the prologs or epilogs of a job ended.
    fn ran(&self, script: &str, job: u32) -> Vec<String> {
        let runs = fs::read_to_string(self.path("runs")).unwrap_or_default();
        let begin = format!("{script} {job} ");
        runs.lines().filter_map(|line| line.strip_prefix(&begin)).map(str::to_owned).collect()
    }

    fn wait_for_epilog(&self, job: u32) {
        self.until("the epilog has run", || !self.ran("epilog", job).is_empty());
        assert_eq!(self.ran("epilog", job), ["0"], "{}", self.logs());
    }

    /// As many health checks as that, beginning from now on.
    fn health_checks(&self, count: usize) {
        let runs = || fs::read_to_string(self.path("runs")).unwrap_or_default().matches("health-check").count();
        // One may be in the middle.
        let begun = runs() + 1;
        self.until("health checks run", || runs() >= begun + count);
    }

    /// What a job wrote down.
    fn pid(&self, name: &str) -> Pid {
        let path = self.path("pids").join(name);
        self.until(&format!("{name} has started"), || fs::read_to_string(&path).is_ok_and(|text| text.ends_with('\n')));
        fs::read_to_string(&path).expect("a pid").trim().parse().expect("a pid")
    }
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        // A job's slurmstepd outlives slurmd.
        if std::thread::panicking() {
            note(&format!("{:?}", self.slurm(&["scancel", "--partition=all"])));
            let ended = || self.slurm(&["squeue", "-h"]).stdout.trim().is_empty();
            if settle(Duration::from_secs(10), || (!ended()).then_some(())).is_err() {
                note("jobs are left");
            }
        }
    }
}

fn alive(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim_start().is_empty() && !rest.trim_start().starts_with('Z'))
}

/// Two GPUs and a program named python3 for jobs; `None`, with a word on it, where Slurm is not installed.
fn stage(test: &str) -> Option<(tempfile::TempDir, Bench)> {
    for program in ["munged", "slurmctld", "slurmd", "sbatch"] {
        let there = ["/usr/sbin", "/usr/bin"].iter().any(|dir| Path::new(dir).join(program).exists());
        if !there {
            skip(test, &format!("there is no {program}"));
            return None;
        }
    }
    let place = tempfile::Builder::new().prefix("gpureap-slurm-").tempdir().expect("a directory");
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).expect("chmod");
    let mut devices = Vec::new();
    for number in 0..2 {
        let node = place.path().join(format!("gpu{number}"));
        sys::mknod(&node, libc::makedev(4, 20 + number)).expect("a node");
        fs::set_permissions(&node, fs::Permissions::from_mode(0o666)).expect("chmod");
        devices.push(Device::new(4, 20 + number, &node.display().to_string()));
    }
    let bench = Bench::new(&devices);
    bench.open_to_all();
    fs::copy("/bin/sleep", place.path().join("python3")).expect("copy sleep");
    let pids = place.path().join("pids");
    fs::create_dir(&pids).expect("a directory");
    fs::set_permissions(&pids, fs::Permissions::from_mode(0o777)).expect("chmod");
    bench.is_free(test).then_some((place, bench))
}

/// In the script of a job: a process that has left the session and lost its parents, and holds the job's GPU.
fn orphan(name: &str, environment: &str) -> String {
    format!(
        "setsid sh -c '{environment} \"$0/python3\" 600 <\"$0/gpu$SLURM_JOB_GPUS\" & echo $! >\"$0/pids/{name}\"' \"$here\" \
         </dev/null >/dev/null 2>&1\n"
    )
}

/// A process of no slurmd's, on that GPU.
struct Stray(Child);

impl Stray {
    fn start(cluster: &Cluster<'_>, gpu: u32, environment: &[(&str, &str)]) -> Self {
        let device = File::options().read(true).open(cluster.gpu(gpu)).expect("the stand-in");
        let mut command = Command::new(cluster.path("python3"));
        command.arg("600").env_clear().envs(environment.iter().copied()).stdin(device);
        Self(command.spawn().expect("start a stray"))
    }

    fn pid(&self) -> Pid {
        self.0.id() as Pid
    }
}

impl Drop for Stray {
    fn drop(&mut self) {
        if let Err(error) = self.0.kill().and_then(|()| self.0.wait()) {
            note(&format!("a stray: {error}"));
        }
    }
}

/// Holds that GPU, in a process that begins anew whenever it ends.
struct Respawning(Child);

impl Respawning {
    fn start(cluster: &Cluster<'_>, gpu: u32) -> Self {
        let mut command = Command::new("/bin/sh");
        // In a subshell, for dash opens what a command is redirected to in itself.
        command.args(["-c", "while :; do (exec \"$0\" 600 <\"$1\"); done"]).arg(cluster.path("python3"));
        command.arg(cluster.gpu(gpu)).env_clear().process_group(0);
        Self(command.spawn().expect("start one that begins anew"))
    }
}

impl Drop for Respawning {
    fn drop(&mut self) {
        sys::kill(-(self.0.id() as Pid), libc::SIGKILL);
        if let Err(error) = self.0.wait() {
            note(&format!("one that begins anew: {error}"));
        }
    }
}

/// The case from the field, and all that follows from it, one after the other on one cluster, which takes seconds to start.
#[test]
fn a_node_of_a_cluster_that_tracks_processes_by_descent() {
    let test = "slurm";
    let Some((place, bench)) = stage(test) else { return };
    let freezer = match Freezer::new(&bench.path("freezer")) {
        Ok(freezer) => freezer,
        Err(error) => return skip(test, &format!("no freezer of version 1: {error}")),
    };
    let _broom = Broom(place.path());
    let _daemon = Daemon::start(&bench);
    let cluster = Cluster::start(place.path(), &bench, "proctrack/linuxproc");
    let gpu0 = cluster.gpu(0);

    // Two users' jobs. The one goes on, the other leaves processes behind, and one of those has no environment either.
    let hold = "\"$here/python3\" 600 <\"$here/gpu$SLURM_JOB_GPUS\" & echo $! >\"$here/pids/worker\"; wait\n";
    let ends = format!("{}{}", orphan("orphan", ""), orphan("hidden", "env -i"));
    let ended =
        cluster.submit(NOBODY, &["--gres=gpu:1"], &format!("{ends}until [ -e \"$here/go\" ]; do sleep 0.1; done"));
    let (left, hidden) = (cluster.pid("orphan"), cluster.pid("hidden"));
    let goes_on = cluster.submit(DAEMON, &["--gres=gpu:1"], &format!("{}{hold}", orphan("neighbour", "")));
    let (worker, neighbour) = (cluster.pid("worker"), cluster.pid("neighbour"));
    let cgroup = fs::read_to_string(format!("/proc/{left}/cgroup")).expect("its cgroups");
    assert!(!cgroup.contains("job_"), "no cgroup tells its job: {cgroup}");
    let job = |pid: Pid, job: Option<u32>| (pid, job.map(|job| job.to_string()));
    let expected: BTreeSet<_> =
        [job(left, Some(ended)), job(hidden, None), job(worker, Some(goes_on)), job(neighbour, Some(goes_on))].into();
    let seen = || -> BTreeSet<_> {
        let seen = bench.holders(&[]).json;
        let all = seen["holders"].as_array().expect("holders").iter();
        all.map(|one| {
            let pid = one["pid"].as_i64().and_then(|pid| pid.try_into().ok()).expect("a pid");
            (pid, one["slurm_job"].as_str().map(str::to_owned))
        })
        .collect()
    };
    let outcome = settle(PATIENCE, || Some(seen()).filter(|seen| *seen != expected));
    assert_eq!(outcome, Ok(()), "instead of {expected:?}");
    fs::write(cluster.path("go"), "").expect("let it end");
    cluster.wait_for_epilog(ended);
    assert!(!alive(left) && !alive(hidden), "{}", cluster.logs());
    assert!(alive(worker) && alive(neighbour), "the other user's are not touched: {}", cluster.logs());
    cluster.until("the job has ended well", || cluster.job(ended) == "COMPLETED");
    assert!(!cluster.is_drained(), "{}", cluster.node());

    // The prolog ends whoever holds the GPU that a job gets, and the job runs. The GPU of a running job is no business of it.
    let stray = Stray::start(&cluster, 0, &[]);
    let next = cluster.submit(NOBODY, &["--gres=gpu:1"], "exit 0");
    cluster.wait_for_epilog(next);
    assert_eq!(cluster.ran("prolog", next), ["0"], "{}", cluster.logs());
    cluster.until("the job has ended well", || cluster.job(next) == "COMPLETED");
    assert!(!alive(stray.pid()) && alive(worker) && !cluster.is_drained(), "{}", cluster.logs());
    drop(stray);

    // One that cannot die: the epilog drains the node, and says who it is.
    fs::remove_file(cluster.path("go")).expect("the next one waits");
    let stuck = cluster.submit(
        NOBODY,
        &["--gres=gpu:1"],
        &format!("{}until [ -e \"$here/go\" ]; do sleep 0.1; done", orphan("stuck", "")),
    );
    let pid = cluster.pid("stuck");
    freezer.freeze(pid);
    fs::write(cluster.path("go"), "").expect("let it end");
    cluster.wait_for_epilog(stuck);
    // Once its memory is taken nobody can read which job's it is.
    let begins = format!("gpureap: {gpu0} held by python3 (pid {pid}, nobody, ");
    let ends = [format!("{begins}job {stuck}, D state) ["), format!("{begins}D state) [")];
    let told = || cluster.is_drained() && ends.iter().any(|end| cluster.reason().starts_with(end));
    assert!(told(), "{ends:?}: {}", cluster.logs());
    assert_eq!(cluster.job(stuck), "COMPLETED", "the job itself is not to blame");
    // As long as that is so, it stays; then the health check takes it back.
    let reason = cluster.reason();
    cluster.health_checks(2);
    assert!(told(), "{}", cluster.node());
    assert_eq!(cluster.reason(), reason, "said once");
    freezer.thaw();
    cluster.until("it dies", || !alive(pid));
    cluster.until("the node is taken back", || !cluster.is_drained());
    assert!(alive(worker));

    // What an epilog has not seen, the health check finds: at the second look, for an epilog may be at work.
    let stray = Stray::start(&cluster, 0, &[("SLURM_JOB_ID", "999999")]);
    cluster.until("the node is drained", || cluster.is_drained());
    let expected = format!("gpureap: {gpu0} held by python3 (pid {}, root, job 999999) ", stray.pid());
    assert!(cluster.reason().starts_with(&expected), "{expected}: {}", cluster.node());
    drop(stray);
    cluster.until("the node is taken back", || !cluster.is_drained());

    // A node that an operator drained is the operator's.
    cluster
        .slurm(&["scontrol", "update", &format!("NodeName={NODE}"), "State=DRAIN", "Reason=broken fan"])
        .expect_code(0);
    let stray = Stray::start(&cluster, 0, &[("SLURM_JOB_ID", "999999")]);
    cluster.health_checks(2);
    assert!(cluster.reason().starts_with("broken fan"), "{}", cluster.node());
    drop(stray);
    cluster.health_checks(1);
    assert!(cluster.is_drained() && cluster.reason().starts_with("broken fan"), "{}", cluster.node());
    cluster.slurm(&["scontrol", "update", &format!("NodeName={NODE}"), "State=RESUME"]).expect_code(0);

    // A job does not begin on a GPU that cannot be freed.
    let stray = Stray::start(&cluster, 0, &[]);
    freezer.freeze(stray.pid());
    let waits = cluster.submit(NOBODY, &["--gres=gpu:1"], "echo >\"$here/pids/ran\"");
    cluster.until("the prolog has run", || !cluster.ran("prolog", waits).is_empty());
    assert_eq!(cluster.ran("prolog", waits), ["1"], "{}", cluster.logs());
    let expected = format!("gpureap: {gpu0} held by python3 (pid {}, root, D state) ", stray.pid());
    assert!(cluster.is_drained() && cluster.reason().starts_with(&expected), "{expected}: {}", cluster.node());
    assert!(!cluster.path("pids/ran").exists());
    // Slurm puts it back into the queue, where it waits for minutes before it is tried again.
    cluster.until("it is in the queue again", || cluster.job(waits) == "PENDING");
    assert!(!cluster.path("pids/ran").exists());
    cluster.slurm(&["scancel", &waits.to_string()]).expect_code(0);
    freezer.thaw();
    drop(stray);
    cluster.until("the node is taken back", || !cluster.is_drained());

    // Nor on one that somebody takes again and again, who is of no job: as long as that is so, no health check gives the node back.
    let stray = Respawning::start(&cluster, 0);
    let waits = cluster.submit(NOBODY, &["--gres=gpu:1"], "echo >\"$here/pids/ran\"");
    cluster.until("the prolog has run", || !cluster.ran("prolog", waits).is_empty());
    assert_eq!(cluster.ran("prolog", waits), ["1"], "{}", cluster.logs());
    let told = || cluster.is_drained() && cluster.reason().starts_with(&format!("gpureap: {gpu0} held by "));
    assert!(told(), "{}", cluster.logs());
    cluster.health_checks(2);
    assert!(told(), "{}", cluster.logs());
    cluster.slurm(&["scancel", &waits.to_string()]).expect_code(0);
    drop(stray);
    cluster.until("the node is taken back", || !cluster.is_drained());
    assert!(!cluster.path("pids/ran").exists() && alive(worker));

    // With a node to itself, a job leaves nobody on any GPU.
    cluster.slurm(&["scancel", &goes_on.to_string()]).expect_code(0);
    cluster.wait_for_epilog(goes_on);
    assert!(!alive(worker) && !alive(neighbour), "{}", cluster.logs());
    let exclusive = cluster.submit(NOBODY, &["--exclusive"], "until [ -e \"$here/stray\" ]; do sleep 0.1; done");
    cluster.until("it runs", || cluster.job(exclusive) == "RUNNING");
    let stray = Stray::start(&cluster, 1, &[]);
    fs::write(cluster.path("stray"), "").expect("let it end");
    cluster.wait_for_epilog(exclusive);
    assert!(!alive(stray.pid()), "{}", cluster.logs());
    drop(stray);

    // Without gpureap, and with one that does nothing, jobs run as before.
    for settings in ["GPUREAP=/nonexistent/gpureap\n", "GPUREAP=/bin/false\n"] {
        cluster.settings(settings);
        let job = cluster.submit(NOBODY, &["--gres=gpu:1"], "exit 0");
        cluster.wait_for_epilog(job);
        assert_eq!(cluster.ran("prolog", job), ["0"], "{}", cluster.logs());
        cluster.until("the job has ended well", || cluster.job(job) == "COMPLETED");
        assert!(!cluster.is_drained(), "{}", cluster.node());
    }
}

/// The scripts with a scontrol and a gpureap that say what a test wants, and write down what they were asked.
struct Alone(tempfile::TempDir);

/// State and reason of the node are in files.
const SCONTROL: &str = r#"#!/bin/sh
here=${0%/*}
case $* in
    listpids) cat "$here/listpids" ;;
    "-o show node "*)
        reason=
        [ ! -s "$here/reason" ] || reason=" Reason=$(cat "$here/reason") [root@2026-12-01T13:04:12]"
        echo "NodeName=gpu1 OS=Linux 6.18 State=$(cat "$here/state") ThreadsPerCore=1$reason" ;;
    *State=RESUME) echo IDLE >"$here/state"; : >"$here/reason" ;;
    *State=DRAIN*) echo IDLE+DRAIN >"$here/state"; echo "${4#Reason=}" >"$here/reason" ;;
    *) exit 1 ;;
esac
"#;
const GPUREAP: &str = "#!/bin/sh\necho \"$*\" >>\"${0%/*}/asked\"\n. \"${0%/*}/answer\"\n";
const LOGGER: &str = "#!/bin/sh\necho \"$*\" >>\"${0%/*}/said\"\n";

impl Alone {
    /// `answer` is sh, with what gpureap was given in `$*`.
    fn new(answer: &str) -> Self {
        let place = tempfile::Builder::new().prefix("gpureap-slurm-").tempdir().expect("a directory");
        for (name, text) in [("scontrol", SCONTROL), ("gpureap", GPUREAP), ("logger", LOGGER)] {
            write(&place.path().join(name), text, 0o755);
        }
        let alone = Self(place);
        alone.put("state", "IDLE\n");
        alone.put("reason", "");
        alone.put("listpids", "");
        alone.put("answer", answer);
        alone.settings("");
        alone
    }

    fn settings(&self, more: &str) {
        self.put(
            "slurm.env",
            &format!("GPUREAP_WHOLE_NODE=no\nGPUREAP_STATE={}/kept\n{more}", self.0.path().display()),
        );
    }

    fn put(&self, name: &str, text: &str) {
        write(&self.0.path().join(name), text, 0o644);
    }

    fn get(&self, name: &str) -> String {
        fs::read_to_string(self.0.path().join(name)).unwrap_or_default()
    }

    /// The exit code.
    fn run(&self, script: &str) -> i32 {
        let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/slurm").join(script));
        command.env_clear().env("PATH", format!("{}:/usr/bin:/bin", self.0.path().display()));
        command.env("GPUREAP_SLURM_ENV", self.0.path().join("slurm.env"));
        command.envs([("SLURMD_NODENAME", "gpu1"), ("SLURM_JOB_ID", "7"), ("SLURM_JOB_GPUS", "0,2-3")]);
        finish(command).code
    }

    #[track_caller]
    fn expect_drained(&self, drained: bool) {
        assert_eq!(self.get("state").contains("DRAIN"), drained, "{}", self.get("said"));
    }
}

/// Answers on who holds GPU 0, to those who ask for all GPUs or this one, and not for a job.
fn held_by(holder: &str) -> String {
    format!(
        "case $* in *reap*|*--slurm-job*any*|'-q check') ;; *) echo '/dev/nvidia0 held by {holder}'; exit 3 ;; esac\n"
    )
}

#[test]
fn a_node_is_given_back_when_what_it_was_drained_for_is_over() {
    // Its name must not be taken for a field of what scontrol shows.
    let alone = Alone::new(&held_by("a State=X Reason=Y (pid 5, root)"));
    alone.put("listpids", "PID JOBID STEPID LOCALID GLOBALID\n100 41 0 0 0\n101 41 0 - -\n");
    assert_eq!(alone.run("prolog"), 1);
    alone.expect_drained(true);
    alone.put("asked", "");
    alone.put("listpids", "PID JOBID STEPID LOCALID GLOBALID\n102 42 0 0 0\n");
    for _ in 0..2 {
        assert_eq!(alone.run("health-check"), 0);
        alone.expect_drained(true);
    }
    let asked = alone.get("asked");
    let question = "-q check --free --gpu 0 --gpu 2 --gpu 3 --match attached --except-slurm-job 42";
    assert_eq!(asked.lines().filter(|line| *line == question).count(), 2, "{asked}");
    // Another one holds it now, and is named.
    alone.put("answer", &held_by("b (pid 6, root)"));
    assert_eq!(alone.run("health-check"), 0);
    assert!(alone.get("reason").contains("held by b (pid 6"), "{}", alone.get("reason"));
    alone.put("answer", "");
    assert_eq!(alone.run("health-check"), 0);
    alone.expect_drained(false);
    assert!(!alone.0.path().join("kept/drained").exists());
}

#[test]
fn an_operator_who_takes_a_node_back_is_not_overruled() {
    let alone = Alone::new(&held_by("a (pid 5, root)"));
    assert_eq!(alone.run("prolog"), 1);
    alone.put("state", "IDLE\n");
    alone.put("reason", "");
    assert_eq!(alone.run("health-check"), 0);
    alone.expect_drained(false);
    // Nor one who drains it.
    assert_eq!(alone.run("prolog"), 1);
    alone.put("reason", "not gpureap: fan\n");
    alone.put("answer", "");
    assert_eq!(alone.run("health-check"), 0);
    alone.expect_drained(true);
}

#[test]
fn settings_that_are_no_sh_fail_no_job() {
    let alone = Alone::new("");
    let scripts = ["prolog", "epilog", "health-check"];
    // Without settings a health check has its state in /var/lib.
    let cases = [
        ("GPUREAP_MATCH='any\n", &scripts[..2]),
        ("GPUREAP_LIMIT=09\n", &scripts),
        ("GPUREAP_DEADLINE=2m\n", &scripts),
    ];
    for (settings, scripts) in cases {
        alone.put("said", "");
        alone.settings(settings);
        for script in scripts {
            assert_eq!(alone.run(script), 0, "{script} with {settings}");
        }
        let said = alone.get("said");
        assert!(said.contains("is no sh; ") || said.contains("is no number of seconds; "), "{settings}: {said}");
        assert!(alone.get("asked").contains("-q check --free"), "with the defaults");
    }
}

#[test]
fn a_gpureap_that_hangs_is_given_up_at_the_deadline() {
    let alone = Alone::new("exec sleep 100\n");
    alone.settings("GPUREAP_DEADLINE=2\n");
    let begun = std::time::Instant::now();
    assert_eq!(alone.run("epilog"), 0);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert_eq!(alone.get("asked").lines().count(), 1, "one call, and it took all the time: {}", alone.get("asked"));
    assert!(alone.get("said").contains("check ended with 124"), "{}", alone.get("said"));
    alone.expect_drained(false);
}

#[test]
fn a_job_that_is_suspended_for_one_with_a_whole_node_is_left_alone() {
    let alone = Alone::new("");
    alone.settings("GPUREAP_WHOLE_NODE=yes\n");
    alone.put("listpids", "PID JOBID STEPID LOCALID GLOBALID\n100 41 0 0 0\n");
    assert_eq!(alone.run("epilog"), 0);
    let asked = alone.get("asked");
    let on_all: Vec<&str> = asked.lines().filter(|line| !line.contains(" --slurm-job 7")).collect();
    assert_eq!(on_all.len(), 2, "{asked}");
    assert!(on_all.iter().all(|line| line.ends_with("--match any --except-slurm-job 41")), "{asked}");
}

#[test]
fn what_a_job_left_must_be_there_at_two_looks() {
    let left = |pid: u32, more: u32| {
        format!(
            "case $* in *any*) echo '/dev/nvidia0, /dev/nvidia1 held by a (pid {pid}, root, job 3); {more} more'; exit 3 ;; esac\n"
        )
    };
    let alone = Alone::new(&left(5, 1));
    let look = |drained: bool| {
        assert_eq!(alone.run("health-check"), 0);
        alone.expect_drained(drained);
    };
    look(false);
    // Another process.
    alone.put("answer", &left(6, 1));
    look(false);
    // The same, but an hour and more ago.
    let seen = alone.get("kept/seen");
    let (_, holder) = seen.split_once(' ').expect("a time and a holder");
    assert_eq!(holder, "/dev/nvidia0 6\n");
    alone.put("kept/seen", &format!("1700000000 {holder}"));
    look(false);
    // Whoever else comes and goes.
    alone.put("answer", &left(6, 2));
    look(true);
}
