//! Everything shown of a process, each file read once, through one directory handle: the handle stays with the process,
//! so a pid that is reused meanwhile cannot mix two processes.

use std::{
    ffi::OsString,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::ffi::OsStringExt as _,
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{CWD, Dir, Mode, OFlags},
    io::Errno,
};

use super::{
    place::{Place, cgroup_path, cgroup_paths},
    stat::{self, Stat, Status},
    users,
};

/// What /proc tells of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    pub tgid: u32,
    /// Boottime of the start at clock-tick resolution.
    pub start_ns: u64,
    /// `R`, `S`, `D`, `Z` and so on.
    pub state: char,
    pub ppid: u32,
    pub session: u32,
    /// The pid in each pid namespace, outermost first.
    pub nspids: Vec<u32>,
    pub comm: String,
    /// Empty for kernel threads and where it may not be read.
    pub argv: Vec<String>,
    pub exe: Option<PathBuf>,
    pub exe_deleted: bool,
    pub uid: Option<u32>,
    pub user: Option<String>,
    pub cgroup: Option<String>,
    pub place: Place,
    pub thread_count: u32,
    pub is_kernel_thread: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thread {
    pub tid: u32,
    pub comm: String,
}

impl Facts {
    /// `None` when the process is gone, or when its pid belongs to another one by now.
    pub fn read(root: &Path, tgid: u32, start_ns: u64) -> Option<Self> {
        Self::read_if(root, tgid, |stat| stat.started_at(start_ns))
    }

    /// Whoever has that pid now.
    pub fn read_any(root: &Path, tgid: u32) -> Option<Self> {
        Self::read_if(root, tgid, |_| true)
    }

    fn read_if(root: &Path, tgid: u32, accept: impl FnOnce(&Stat) -> bool) -> Option<Self> {
        let dir = ProcDir::open(root, tgid)?;
        let stat = Stat::parse(&dir.read("stat")?).filter(accept)?;
        let start_ns = stat.start_ns();
        let Stat { comm, state, ppid, session, threads, kernel_thread, .. } = stat;
        let Status { tgid: _, uid, nspids } = dir.read("status").map(|bytes| Status::parse(&bytes)).unwrap_or_default();
        let mut cmdline = dir.read_to("cmdline", LONGEST_ARGUMENTS).unwrap_or_default();
        let mut exe = dir.link("exe");
        // A leader that has ended has given up its address space, its threads have not.
        if cmdline.is_empty() && state == 'Z' && threads > 1 {
            let other = dir.tids().into_iter().find(|tid| *tid != tgid);
            if let Some(tid) = other {
                cmdline = dir.read_to(&format!("task/{tid}/cmdline"), LONGEST_ARGUMENTS).unwrap_or_default();
                exe = exe.or_else(|| dir.link(&format!("task/{tid}/exe")));
            }
        }
        let (exe, exe_deleted) = exe.map_or((None, false), |exe| split_deleted(&exe));
        let cgroup = dir.read("cgroup").and_then(|bytes| cgroup_path(&bytes));
        Some(Self {
            tgid,
            start_ns,
            state,
            ppid,
            session,
            nspids,
            comm: lossy(&comm),
            argv: split_arguments(&cmdline),
            exe,
            exe_deleted,
            uid,
            user: uid.and_then(users::name_of),
            place: cgroup.as_deref().map(Place::of).unwrap_or_default(),
            cgroup,
            thread_count: threads,
            is_kernel_thread: kernel_thread,
        })
    }

    /// Its threads by tid, the leader included; empty when it is gone. Of a process with one thread all is read already.
    pub fn threads(&self, root: &Path) -> Vec<Thread> {
        if self.thread_count == 1 {
            return vec![Thread { tid: self.tgid, comm: self.comm.clone() }];
        }
        let Some(dir) = self.dir(root) else { return Vec::new() };
        let mut tids = dir.tids();
        tids.sort_unstable();
        tids.into_iter()
            .filter_map(|tid| {
                let comm = dir.read(&format!("task/{tid}/comm"))?;
                Some(Thread { tid, comm: lossy(comm.strip_suffix(b"\n").unwrap_or(&comm)) })
            })
            .collect()
    }

    /// Its group in every hierarchy.
    pub fn cgroups(&self, root: &Path) -> Vec<String> {
        self.dir(root).and_then(|dir| dir.read("cgroup")).map(|bytes| cgroup_paths(&bytes)).unwrap_or_default()
    }

    /// What it was started with, `KEY=VAL` and a zero each; `None` where the caller may not read it.
    pub fn environment(&self, root: &Path) -> Option<Vec<u8>> {
        let dir = self.dir(root)?;
        let bytes = dir.read("environ")?;
        // A leader that has ended has given up its address space, its threads have not.
        let other =
            (bytes.is_empty() && self.state == 'Z').then(|| dir.tids().into_iter().find(|tid| *tid != self.tgid));
        other.flatten().map_or(Some(bytes), |tid| dir.read(&format!("task/{tid}/environ")))
    }

    /// Where it belongs, by its cgroup, and by its environment where the caller may read that.
    pub fn whole_place(&self, root: &Path) -> Place {
        let mut place = self.place.clone();
        place.or_job_of(|| self.environment(root));
        place
    }

    /// The kernel function that a thread sleeps in.
    pub fn wchan(&self, root: &Path, tid: u32) -> Option<String> {
        wchan_in(&self.dir(root)?, tid)
    }

    /// A thread's kernel stack, innermost first, without addresses. Root only.
    pub fn kernel_stack(&self, root: &Path, tid: u32) -> Option<Vec<String>> {
        let text = lossy(&self.dir(root)?.read(&format!("task/{tid}/stack"))?);
        let frames = text.lines().map(|line| line.split_once("] ").map_or(line, |(_, frame)| frame).to_owned());
        Some(frames.collect())
    }

    /// Whether this is the process that started at that boottime, as far as /proc tells.
    pub fn started_at(&self, start_ns: u64) -> bool {
        stat::same_start(self.start_ns, start_ns)
    }

    /// The directory, if it still is this process's.
    fn dir(&self, root: &Path) -> Option<ProcDir> {
        let dir = ProcDir::open(root, self.tgid)?;
        let stat = Stat::parse(&dir.read("stat")?)?;
        (stat.start_ns() == self.start_ns).then_some(dir)
    }
}

/// The same of whoever has that pid.
pub fn wchan(root: &Path, pid: u32, tid: u32) -> Option<String> {
    wchan_in(&ProcDir::open(root, pid)?, tid)
}

fn wchan_in(dir: &ProcDir, tid: u32) -> Option<String> {
    let text = lossy(&dir.read(&format!("task/{tid}/wchan"))?);
    (!text.is_empty() && text != "0").then_some(text)
}

/// What the kernel writes into such a file at a time, and most of them whole.
const PAGE: usize = 4096;

/// More is not read of such a file. Arguments and environment have 6 MiB together (`bprm_stack_limits`, fs/exec.c), but a
/// process may point the kernel at as much of its memory as it likes (`PR_SET_MM_MAP`).
const LONGEST: usize = 8 << 20;
/// Of arguments, which take a multiple of that when they are many and empty.
const LONGEST_ARGUMENTS: usize = 1 << 20;

/// An open /proc/PID.
pub(super) struct ProcDir(OwnedFd);

impl ProcDir {
    pub(super) fn open(root: &Path, pid: u32) -> Option<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat(CWD, root.join(pid.to_string()), flags, Mode::empty()).ok().map(Self)
    }

    pub(super) fn read(&self, name: &str) -> Option<Vec<u8>> {
        self.read_to(name, LONGEST)
    }

    /// As much as `limit`, and a little more.
    pub(super) fn read_to(&self, name: &str, limit: usize) -> Option<Vec<u8>> {
        let file = self.open_file(name, OFlags::RDONLY).ok()?;
        // These files tell no size: asking for it, as `read_to_end` does, is wasted.
        let mut bytes = Vec::with_capacity(PAGE);
        while bytes.len() < limit {
            if bytes.capacity() - bytes.len() < PAGE / 2 {
                bytes.reserve(bytes.capacity());
            }
            match rustix::io::read(&file, rustix::buffer::spare_capacity(&mut bytes)) {
                Ok(0) => return Some(bytes),
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return None,
            }
        }
        Some(bytes)
    }

    pub(super) fn open_file(&self, name: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        rustix::fs::openat(self.0.as_fd(), name, flags | OFlags::CLOEXEC, Mode::empty())
    }

    fn link(&self, name: &str) -> Option<Vec<u8>> {
        let target = rustix::fs::readlinkat(self.0.as_fd(), name, Vec::new()).ok()?;
        Some(target.into_bytes())
    }

    pub(super) fn tids(&self) -> Vec<u32> {
        self.entries("task").unwrap_or_default().iter().filter_map(|name| name.parse().ok()).collect()
    }

    /// Names in a directory below; numbers are all that matters there.
    pub(super) fn entries(&self, name: &str) -> rustix::io::Result<Vec<String>> {
        let dir = Dir::new(self.open_file(name, OFlags::RDONLY | OFlags::DIRECTORY)?)?;
        let names = dir.filter_map(Result::ok).filter_map(|entry| entry.file_name().to_str().ok().map(str::to_owned));
        Ok(names.filter(|name| !name.starts_with('.')).collect())
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Arguments end in a zero each. A process may overwrite them (`setproctitle`): then trailing zeros are padding.
fn split_arguments(cmdline: &[u8]) -> Vec<String> {
    let Some(last) = cmdline.iter().rposition(|byte| *byte != 0) else { return Vec::new() };
    // An empty last argument looks like one zero too many.
    let text =
        if cmdline.len() - last <= 3 { cmdline.strip_suffix(b"\0").unwrap_or(cmdline) } else { &cmdline[..=last] };
    text.split(|byte| *byte == 0).map(lossy).collect()
}

/// The kernel appends this to the path of an unlinked file.
fn split_deleted(exe: &[u8]) -> (Option<PathBuf>, bool) {
    let plain = exe.strip_suffix(b" (deleted)");
    (Some(OsString::from_vec(plain.unwrap_or(exe).to_vec()).into()), plain.is_some())
}

#[cfg(test)]
mod tests {
    use std::{fs, time::Instant};

    use super::*;

    fn fixture() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/h200/proc")
    }

    /// 2666 ticks of 10 ms and a bit.
    const START_NS: u64 = 26_664_321_000;

    #[test]
    fn recorded_process() {
        let facts = Facts::read(&fixture(), 498, START_NS).unwrap();
        assert_eq!((facts.state, facts.ppid, facts.session), ('S', 494, 410));
        assert_eq!((facts.comm.as_str(), facts.nspids.as_slice()), ("python3", [498].as_slice()));
        assert_eq!(facts.argv[..2], ["/opt/venv/bin/python3", "-c"]);
        assert!(facts.argv[2].starts_with("import torch\n") && facts.argv.len() == 3);
        assert_eq!((facts.uid, facts.user.as_deref()), (Some(0), Some("root")));
        assert_eq!(facts.cgroup.as_deref(), Some("/system.slice/train.service"));
        assert_eq!(facts.place.unit.as_deref(), Some("train.service"));
        assert_eq!((facts.exe.as_ref(), facts.thread_count, facts.is_kernel_thread), (None, 18, false));
        let threads = facts.threads(&fixture());
        let expected = [(498, "python3"), (562, "cuda00001400006"), (570, "cuda-EvtHandlr")];
        assert_eq!(threads, expected.map(|(tid, comm)| Thread { tid, comm: comm.to_owned() }));
        assert_eq!(facts.wchan(&fixture(), 498).as_deref(), Some("hrtimer_nanosleep"));
        assert_eq!(facts.kernel_stack(&fixture(), 498).unwrap()[0], "hrtimer_nanosleep+0x7a/0x100");
    }

    #[test]
    fn another_process_with_the_same_pid_is_not_it() {
        assert_eq!(Facts::read(&fixture(), 498, START_NS + 10_000_000), None);
        assert_eq!(Facts::read(&fixture(), 499, START_NS), None);
        assert!(Facts::read_any(&fixture(), 498).is_some());
    }

    #[test]
    fn this_process_within_the_budget() {
        let root = Path::new("/proc");
        let me = Facts::read_any(root, std::process::id()).unwrap();
        assert_eq!(me.exe.as_deref(), std::env::current_exe().ok().as_deref());
        assert!(me.threads(root).iter().any(|thread| thread.tid == me.tgid));
        let begin = Instant::now();
        for _ in 0..8 {
            assert_eq!(Facts::read(root, me.tgid, me.start_ns).unwrap().argv, me.argv);
        }
        // Far above what it takes, so that a busy machine does not fail it.
        assert!(begin.elapsed().as_millis() < 200, "{:?}", begin.elapsed());
    }

    #[test]
    fn arguments() {
        for (bytes, expected) in [
            (b"".as_slice(), [].as_slice()),
            (b"\0\0", &[]),
            (b"a\0b c\0", &["a", "b c"]),
            (b"a\0\0b\0", &["a", "", "b"]),
            (b"a\0\0", &["a", ""]),
            (b"title\0\0\0\0\0", &["title"]),
            (b"no end", &["no end"]),
            (b"\xff\0", &["\u{fffd}"]),
        ] {
            assert_eq!(split_arguments(bytes), expected, "{bytes:?}");
        }
    }

    #[test]
    fn deleted_programs() {
        assert_eq!(split_deleted(b"/bin/a (deleted)"), (Some("/bin/a".into()), true));
        assert_eq!(split_deleted(b"/bin/a"), (Some("/bin/a".into()), false));
    }

    #[test]
    fn a_process_cannot_make_us_read_gigabytes() {
        use std::os::unix::fs::FileExt as _;
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("7");
        fs::create_dir(&place).unwrap();
        fs::write(place.join("stat"), "7 (x) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 5 0 0").unwrap();
        for name in ["cmdline", "environ"] {
            let file = fs::File::create(place.join(name)).unwrap();
            file.write_all_at(b"job\0", 0).unwrap();
            file.write_all_at(b"end\0", 1 << 36).unwrap();
        }
        let facts = Facts::read_any(dir.path(), 7).unwrap();
        assert_eq!(facts.argv, ["job"]);
        let environment = facts.environment(dir.path()).unwrap();
        assert!(environment.starts_with(b"job\0") && environment.len() < 2 * LONGEST, "{}", environment.len());
    }

    #[test]
    fn a_leader_that_ended_still_has_arguments() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("7");
        fs::create_dir_all(place.join("task/7")).unwrap();
        fs::create_dir_all(place.join("task/9")).unwrap();
        let stat = "7 (x) Z 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 2 0 5 0 0";
        fs::write(place.join("stat"), stat).unwrap();
        fs::write(place.join("cmdline"), "").unwrap();
        fs::write(place.join("task/9/cmdline"), "job\0--all\0").unwrap();
        let facts = Facts::read_any(dir.path(), 7).unwrap();
        assert_eq!((facts.state, facts.argv), ('Z', vec!["job".to_owned(), "--all".to_owned()]));
        assert_eq!((facts.uid, facts.cgroup, facts.nspids), (None, None, Vec::new()));
    }
}
