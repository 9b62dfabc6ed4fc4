//! munged, slurmctld and slurmd on loopback, one node with two stand-in GPUs, and who holds these.
use std::{
    fs::{self, File},
    net::TcpListener,
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use gpureap_tests::harness::{Bench, Device, Output, Pid, finish, note, settle, skip, sys, wait_for};

/// Seconds between two health checks, the least that Slurm knows.
const INTERVAL: u32 = 1;
pub(crate) const NODE: &str = "gpu1";
/// For slurmctld and slurmd, which look once a second at best, on a machine that has much else to do.
pub(crate) const PATIENCE: Duration = Duration::from_secs(40);

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
pub(crate) struct Cluster<'a> {
    place: &'a Path,
    // Dropped in this order, the first last started.
    _slurmd: Server,
    _slurmctld: Server,
    _munged: Server,
}

/// Ends whatever jobs left when the test fails in the middle.
pub(crate) struct Broom<'a>(pub(crate) &'a Path);

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

pub(crate) fn write(path: &Path, text: &str, mode: u32) {
    fs::write(path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("chmod");
}

pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port").port()
}

impl<'a> Cluster<'a> {
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.place.join(name)
    }

    pub(crate) fn gpu(&self, number: u32) -> String {
        self.path(&format!("gpu{number}")).display().to_string()
    }

    /// `proctrack`: how slurmd knows a job's processes.
    pub(crate) fn start(place: &'a Path, bench: &Bench, proctrack: &str) -> Self {
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
    pub(crate) fn settings(&self, more: &str) {
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
    pub(crate) fn until(&self, what: &str, mut condition: impl FnMut() -> bool) {
        let outcome = settle(PATIENCE, || (!condition()).then_some(()));
        assert!(outcome.is_ok(), "{what}: not within {PATIENCE:?}\n{}", self.logs());
    }

    pub(crate) fn logs(&self) -> String {
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

    pub(crate) fn slurm(&self, words: &[&str]) -> Output {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).env("SLURM_CONF", self.path("slurm.conf"));
        finish(command)
    }

    pub(crate) fn node(&self) -> String {
        self.slurm(&["scontrol", "-o", "show", "node", NODE]).stdout
    }

    pub(crate) fn state(&self) -> String {
        let node = self.node();
        node.split(" State=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap_or_default().to_owned()
    }

    pub(crate) fn is_drained(&self) -> bool {
        self.state().contains("DRAIN")
    }

    pub(crate) fn reason(&self) -> String {
        self.node().split(" Reason=").nth(1).unwrap_or_default().trim().to_owned()
    }

    /// Gives a job of that user to the node, with one GPU; its number.
    pub(crate) fn submit(&self, user: u32, options: &[&str], script: &str) -> u32 {
        let file = self.path("job.sh");
        write(&file, &format!("#!/bin/sh\nhere={}\n{script}\n", self.place.display()), 0o755);
        let user = user.to_string();
        let file = file.display().to_string();
        let fixed = ["sbatch", "--parsable", "--uid", &user, "--gid", &user, "-D", "/", "-o", "/dev/null", "-n1"];
        let words = [&fixed[..], options, &[&file]].concat();
        self.slurm(&words).expect_code(0).stdout.trim().parse().expect("the number of a job")
    }

    pub(crate) fn job(&self, job: u32) -> String {
        let shown = self.slurm(&["scontrol", "-o", "show", "job", &job.to_string()]).stdout;
        shown.split(" JobState=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap_or_default().to_owned()
    }

    /// How the prologs or epilogs of a job ended.
    pub(crate) fn ran(&self, script: &str, job: u32) -> Vec<String> {
        let runs = fs::read_to_string(self.path("runs")).unwrap_or_default();
        let begin = format!("{script} {job} ");
        runs.lines().filter_map(|line| line.strip_prefix(&begin)).map(str::to_owned).collect()
    }

    pub(crate) fn wait_for_epilog(&self, job: u32) {
        self.until("the epilog has run", || !self.ran("epilog", job).is_empty());
        assert_eq!(self.ran("epilog", job), ["0"], "{}", self.logs());
    }

    /// As many health checks as that, beginning from now on.
    pub(crate) fn health_checks(&self, count: usize) {
        let runs = || fs::read_to_string(self.path("runs")).unwrap_or_default().matches("health-check").count();
        // One may be in the middle.
        let begun = runs() + 1;
        self.until("health checks run", || runs() >= begun + count);
    }

    /// What a job wrote down.
    pub(crate) fn pid(&self, name: &str) -> Pid {
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

pub(crate) fn alive(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim_start().is_empty() && !rest.trim_start().starts_with('Z'))
}

/// Two GPUs and a program named python3 for jobs; `None`, with a word on it, where Slurm is not installed.
pub(crate) fn stage(test: &str) -> Option<(tempfile::TempDir, Bench)> {
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
pub(crate) fn orphan(name: &str, environment: &str) -> String {
    format!(
        "setsid sh -c '{environment} \"$0/python3\" 600 <\"$0/gpu$SLURM_JOB_GPUS\" & echo $! >\"$0/pids/{name}\"' \"$here\" \
         </dev/null >/dev/null 2>&1\n"
    )
}

/// A process of no slurmd's, on that GPU.
pub(crate) struct Stray(Child);

impl Stray {
    pub(crate) fn start(cluster: &Cluster<'_>, gpu: u32, environment: &[(&str, &str)]) -> Self {
        let device = File::options().read(true).open(cluster.gpu(gpu)).expect("the stand-in");
        let mut command = Command::new(cluster.path("python3"));
        command.arg("600").env_clear().envs(environment.iter().copied()).stdin(device);
        Self(command.spawn().expect("start a stray"))
    }

    pub(crate) fn pid(&self) -> Pid {
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
pub(crate) struct Respawning(Child);

impl Respawning {
    pub(crate) fn start(cluster: &Cluster<'_>, gpu: u32) -> Self {
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
