//! The system calls the actor is made of. Descriptors are plain numbers here: what the actor opens, copies and
//! leaves open is the subject of the tests, so nothing may close itself.
mod memory;
mod signals;

use std::{
    ffi::{CString, OsStr},
    io,
    os::unix::ffi::OsStrExt as _,
    path::Path,
    ptr,
    sync::OnceLock,
    time::Duration,
};

pub use self::{
    memory::{PAGE, Page, map, map_at, take_memory, unmap, unmap_at},
    signals::{block_signals, fault, handle, raise, signal_default, signal_ignore, wait_signal},
};
pub use libc::{O_CLOEXEC, O_PATH, O_RDONLY, O_RDWR, SIGHUP, SIGINT, SIGKILL, SIGTERM};

pub type Fd = i32;
pub type Pid = i32;

pub const CLOSE_RANGE_UNSHARE: u32 = 2;
pub const CLOSE_RANGE_CLOEXEC: u32 = 4;

fn check(ret: i64) -> io::Result<i64> {
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(ret) }
}

fn must(what: &str, ret: i64) -> i32 {
    check(ret).unwrap_or_else(|error| panic!("{what}: {error}")) as i32
}

pub fn cstr(text: impl AsRef<OsStr>) -> CString {
    CString::new(text.as_ref().as_bytes()).expect("no NUL byte in a path or argument")
}

pub fn try_open(path: impl AsRef<Path>, flags: i32) -> io::Result<Fd> {
    let path = cstr(path.as_ref());
    // SAFETY: the path is NUL-terminated and outlives the call.
    check(unsafe { libc::open(path.as_ptr(), flags, 0o600) }.into()).map(|fd| fd as Fd)
}

pub fn open(path: impl AsRef<Path>, flags: i32) -> Fd {
    let path = path.as_ref();
    try_open(path, flags).unwrap_or_else(|error| panic!("open {}: {error}", path.display()))
}

pub fn close(fd: Fd) {
    // SAFETY: closing a number; nothing in this process owns it as an object.
    must("close", unsafe { libc::close(fd) }.into());
}

pub fn try_close(fd: Fd) -> io::Result<i64> {
    // SAFETY: as above.
    check(unsafe { libc::close(fd) }.into())
}

pub fn dup(fd: Fd) -> Fd {
    // SAFETY: no memory is passed.
    must("dup", unsafe { libc::dup(fd) }.into())
}

pub fn try_dup(fd: Fd) -> io::Result<i64> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::dup(fd) }.into())
}

pub fn try_dup2(from: Fd, to: Fd) -> io::Result<i64> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::dup2(from, to) }.into())
}

pub fn dup2(from: Fd, to: Fd) -> Fd {
    must("dup2", try_dup2(from, to).unwrap_or(-1))
}

pub fn dup3(from: Fd, to: Fd, flags: i32) -> Fd {
    // SAFETY: no memory is passed.
    must("dup3", unsafe { libc::dup3(from, to, flags) }.into())
}

pub fn fcntl(fd: Fd, command: i32, value: i32) -> io::Result<i64> {
    // SAFETY: only commands that take an integer are used.
    check(unsafe { libc::fcntl(fd, command, value) }.into())
}

/// `dup2` through the 32-bit system call gate. Kills the caller with SIGSEGV where the kernel has none.
pub fn dup2_int80(from: Fd, to: Fd) -> i64 {
    let mut ret: i64 = 63;
    // SAFETY: int 0x80 takes 32-bit register arguments and touches no memory; rbx, which LLVM keeps for itself,
    // is put back, and r8-r11, which the kernel may zero, are declared.
    unsafe {
        std::arch::asm!("xchg rbx, {from}", "int 0x80", "xchg rbx, {from}", from = inout(reg) i64::from(from) => _,
            inout("rax") ret, in("rcx") i64::from(to), out("r8") _, out("r9") _, out("r10") _, out("r11") _);
    }
    i64::from(ret as i32)
}

pub fn close_range(first: Fd, last: u32, flags: u32) -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) }).map(drop)
}

pub fn pipe() -> (Fd, Fd) {
    let mut ends = [0; 2];
    // SAFETY: the array has room for the two descriptors.
    must("pipe", unsafe { libc::pipe(ends.as_mut_ptr()) }.into());
    (ends[0], ends[1])
}

pub fn socketpair(kind: i32) -> (Fd, Fd) {
    let mut ends = [0; 2];
    // SAFETY: the array has room for the two descriptors.
    must("socketpair", unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) }.into());
    (ends[0], ends[1])
}

pub fn write_all(fd: Fd, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        // SAFETY: the pointer and length describe a live slice.
        let n = unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) };
        if n <= 0 {
            exit(9);
        }
        bytes = &bytes[n as usize..];
    }
}

/// Reads up to the length of the buffer; 0 at the end.
pub fn read(fd: Fd, bytes: &mut [u8]) -> usize {
    loop {
        // SAFETY: the pointer and length describe a live slice.
        let n = unsafe { libc::read(fd, bytes.as_mut_ptr().cast(), bytes.len()) };
        if n >= 0 {
            return n as usize;
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return 0;
        }
    }
}

/// Waits for one byte on `fd`; ends the process when the standard input of the whole scenario has closed.
pub fn wait_byte(fd: Fd) -> u8 {
    loop {
        let mut set =
            [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }, libc::pollfd { fd: 0, events: 0, revents: 0 }];
        // SAFETY: the array holds two entries.
        unsafe { libc::poll(set.as_mut_ptr(), 2, -1) };
        if set[0].revents & libc::POLLIN != 0 {
            let mut byte = [0];
            return if read(fd, &mut byte) == 1 { byte[0] } else { exit(9) };
        }
        if (set[0].revents | set[1].revents) & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0 {
            exit(9);
        }
    }
}

/// Lives until the standard input closes or a signal kills.
pub fn live() -> ! {
    loop {
        if let Some(()) = stdin_closed_within(-1) {
            exit(0);
        }
    }
}

/// `Some` when the standard input has closed within the milliseconds (-1: no limit).
pub fn stdin_closed_within(ms: i32) -> Option<()> {
    let mut set = [libc::pollfd { fd: 0, events: 0, revents: 0 }];
    // SAFETY: the array holds one entry.
    let n = unsafe { libc::poll(set.as_mut_ptr(), 1, ms) };
    (n == 1).then_some(())
}

/// Lives until the standard input closes, whatever is written to it for others to read.
pub fn outlive_stdin() {
    let mut set = [libc::pollfd { fd: 0, events: 0, revents: 0 }];
    // SAFETY: the array holds one entry.
    while unsafe { libc::poll(set.as_mut_ptr(), 1, -1) } != 1 {}
}

pub fn sleep(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}

pub fn pid() -> Pid {
    // SAFETY: no memory is passed. The raw call, because a vfork child must not get a remembered number.
    unsafe { libc::syscall(libc::SYS_getpid) as Pid }
}

pub fn tid() -> Pid {
    // SAFETY: no memory is passed.
    unsafe { libc::syscall(libc::SYS_gettid) as Pid }
}

pub fn fork() -> Pid {
    // SAFETY: callers fork while single-threaded, or do only calls that a fork of a threaded process allows.
    must("fork", unsafe { libc::fork() }.into())
}

/// A process that shares the descriptor table, on a copy of the memory.
pub fn fork_sharing_files() -> Pid {
    let flags = i64::from(libc::CLONE_FILES | libc::SIGCHLD);
    // SAFETY: a null stack without CLONE_VM means a copy of this one, as in fork.
    must("clone", unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) })
}

/// Forks a child with exactly this pid, if it is free.
pub fn fork_as(pid: Pid) -> io::Result<Pid> {
    #[repr(C, align(8))]
    #[derive(Default)]
    struct Arguments {
        flags: u64,
        pidfd: u64,
        child_tid: u64,
        parent_tid: u64,
        exit_signal: u64,
        stack: u64,
        stack_size: u64,
        tls: u64,
        set_tid: u64,
        set_tid_size: u64,
    }
    let tids = [pid];
    let arguments = Arguments {
        exit_signal: libc::SIGCHLD as u64,
        set_tid: tids.as_ptr() as u64,
        set_tid_size: 1,
        ..Arguments::default()
    };
    // SAFETY: no stack and no CLONE_VM means a copy of this one, as in fork; the structure is live.
    check(unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of::<Arguments>()) })
        .map(|child| child as Pid)
}

/// Runs `body` in a process that shares memory while the caller is suspended, as vfork does.
pub fn vfork<F: FnMut() -> i32>(body: &mut F) -> Pid {
    extern "C" fn enter<F: FnMut() -> i32>(argument: *mut libc::c_void) -> i32 {
        // SAFETY: the pointer is the caller's `body`, which is suspended until this process has exited or executed.
        let body = unsafe { &mut *argument.cast::<F>() };
        body()
    }
    let mut stack = vec![0_u8; 256 << 10];
    let top = stack.as_mut_ptr_range().end;
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the stack is ours and outlives the child, because CLONE_VFORK suspends us until it has left it.
    must("vfork", unsafe { libc::clone(enter::<F>, top.cast(), flags, ptr::from_mut(body).cast()) }.into())
}

pub fn exit(code: i32) -> ! {
    // SAFETY: ends the process at once, without the exit handlers of the parent's copy.
    unsafe { libc::_exit(code) }
}

/// Ends the calling thread only, the main thread included.
pub fn exit_thread() -> ! {
    // SAFETY: the thread leaves nothing behind that others use.
    unsafe {
        libc::syscall(libc::SYS_exit, 0);
        libc::_exit(99)
    }
}

pub fn kill(pid: Pid, signal: i32) {
    // SAFETY: no memory is passed.
    must("kill", unsafe { libc::kill(pid, signal) }.into());
}

/// Waits for the child and returns its raw status.
pub fn reap(pid: Pid) -> i32 {
    let mut status = 0;
    loop {
        // SAFETY: the status is a live integer.
        let ret = unsafe { libc::waitpid(pid, &raw mut status, 0) };
        if ret == pid {
            return status;
        }
        assert!(ret < 0 && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted, "waitpid {pid}");
    }
}

/// Waits for the end of a child by a process that ignores SIGCHLD: then there is nobody left to wait for.
pub fn await_end(pid: Pid) {
    // SAFETY: no memory is passed.
    while unsafe { libc::waitpid(pid, ptr::null_mut(), 0) } >= 0
        || io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
}

/// Takes the status of a process that has ended, if it is this one's child by now.
pub fn bury(pid: Pid) {
    // SAFETY: no memory is passed.
    unsafe { libc::waitpid(pid, ptr::null_mut(), libc::WNOHANG) };
}

/// Takes a POSIX lock for reading. A device may refuse locks; the kernel's path is the same.
pub fn lock(fd: Fd) {
    let range =
        libc::flock { l_type: libc::F_RDLCK as i16, l_whence: libc::SEEK_SET as i16, l_start: 0, l_len: 1, l_pid: 0 };
    // SAFETY: the structure is live.
    unsafe { libc::fcntl(fd, libc::F_SETLK, &raw const range) };
}

/// Where the executable of this process lies, read once.
pub fn own_path() -> &'static CString {
    static PATH: OnceLock<CString> = OnceLock::new();
    PATH.get_or_init(|| cstr(std::env::current_exe().expect("/proc/self/exe")))
}

fn vector(arguments: &[CString]) -> Vec<*const libc::c_char> {
    arguments.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
}

pub fn try_exec(path: &CString, arguments: &[CString]) -> io::Error {
    let arguments = vector(arguments);
    // SAFETY: the vector is terminated by a null pointer and its strings are live.
    unsafe { libc::execv(path.as_ptr(), arguments.as_ptr()) };
    io::Error::last_os_error()
}

/// Executes this program again with the arguments.
pub fn exec_self(arguments: &[CString]) -> ! {
    let error = try_exec(own_path(), arguments);
    write_all(1, format!("{{\"error\":\"exec: {error}\"}}\n").as_bytes());
    exit(8)
}

/// `posix_spawn` of this program, with an optional dup2 as a file action.
pub fn spawn_self(arguments: &[CString], action: Option<(Fd, Fd)>) -> Pid {
    unsafe extern "C" {
        static environ: *const *mut libc::c_char;
    }
    let arguments = vector(arguments);
    let mut pid = 0;
    // SAFETY: the action object is initialised before use and destroyed after; vectors are null-terminated.
    let ret = unsafe {
        let mut actions: libc::posix_spawn_file_actions_t = std::mem::zeroed();
        libc::posix_spawn_file_actions_init(&raw mut actions);
        if let Some((from, to)) = action {
            libc::posix_spawn_file_actions_adddup2(&raw mut actions, from, to);
        }
        let path = own_path().as_ptr();
        let ret =
            libc::posix_spawn(&raw mut pid, path, &raw const actions, ptr::null(), arguments.as_ptr().cast(), environ);
        libc::posix_spawn_file_actions_destroy(&raw mut actions);
        ret
    };
    assert_eq!(ret, 0, "posix_spawn");
    pid
}

pub fn unshare(flags: i32) -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::unshare(flags) }.into()).map(drop)
}

/// Of the caller's UTS namespace.
pub fn set_host_name(name: &str) -> io::Result<()> {
    // SAFETY: the bytes live, and their number is right.
    check(unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) }.into()).map(drop)
}

pub fn setsid() {
    // SAFETY: no memory is passed; a failure means that this process leads a group already.
    unsafe { libc::setsid() };
}

pub fn prctl(option: i32, value: u64) -> io::Result<i64> {
    // SAFETY: only options that take an integer are used.
    check(unsafe { libc::prctl(option, value, 0, 0, 0) }.into())
}

pub fn set_comm(name: &[u8]) {
    let mut buffer = [0_u8; 16];
    let n = name.len().min(15);
    buffer[..n].copy_from_slice(&name[..n]);
    // SAFETY: the buffer holds sixteen bytes and ends with NUL.
    must("PR_SET_NAME", unsafe { libc::prctl(libc::PR_SET_NAME, buffer.as_ptr()) }.into());
}

pub fn limit(resource: libc::__rlimit_resource_t, value: u64) {
    let limit = libc::rlimit { rlim_cur: value, rlim_max: value };
    // SAFETY: the structure is live.
    must("setrlimit", unsafe { libc::setrlimit(resource, &raw const limit) }.into());
}

/// Sets the soft limit of open descriptors of a process, 0 for this one, and returns the old one.
pub fn soft_limit_files_of(pid: Pid, value: u64) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is live in both calls, and what is not asked for is null.
    unsafe {
        must("prlimit", libc::prlimit(pid, libc::RLIMIT_NOFILE, ptr::null(), &raw mut limit).into());
        let old = limit.rlim_cur;
        limit.rlim_cur = value.min(limit.rlim_max);
        must("prlimit", libc::prlimit(pid, libc::RLIMIT_NOFILE, &raw const limit, ptr::null_mut()).into());
        old
    }
}

/// Lets this process dump core, as far as it may decide that, or forbids it.
pub fn dump_core(may: bool) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is live in both calls.
    unsafe {
        must("getrlimit", libc::getrlimit(libc::RLIMIT_CORE, &raw mut limit).into());
        limit.rlim_cur = if may { limit.rlim_max } else { 0 };
        must("setrlimit", libc::setrlimit(libc::RLIMIT_CORE, &raw const limit).into());
    }
}

/// Of this process.
pub fn soft_limit_files(value: u64) -> u64 {
    soft_limit_files_of(0, value)
}

pub fn pidfd_open(pid: Pid) -> io::Result<Fd> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) }).map(|fd| fd as Fd)
}

pub fn pidfd_getfd(pidfd: Fd, fd: Fd) -> io::Result<Fd> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd, fd, 0) }).map(|fd| fd as Fd)
}

/// The device number of a node.
pub fn device_number(path: impl AsRef<Path>) -> io::Result<u64> {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata(path).map(|meta| meta.rdev())
}

pub fn mknod(path: &Path, device: u64) -> io::Result<()> {
    let path = cstr(path);
    // SAFETY: the path is NUL-terminated and outlives the call.
    check(unsafe { libc::mknod(path.as_ptr(), libc::S_IFCHR | 0o600, device) }.into()).map(drop)
}

pub fn make_fifo(path: &Path) -> io::Result<()> {
    let path = cstr(path);
    // SAFETY: the path is NUL-terminated and outlives the call.
    check(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }.into()).map(drop)
}

/// The clock of the kernel's log.
pub fn monotonic_us() -> i64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is live.
    must("clock_gettime", unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) }.into());
    now.tv_sec * 1_000_000 + now.tv_nsec / 1_000
}

/// Sets the wall clock by so many seconds forward, or back. For a machine that is the test's own.
pub fn move_wall_clock(seconds: i64) {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is live in both calls.
    unsafe {
        must("clock_gettime", libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut now).into());
        now.tv_sec += seconds;
        must("clock_settime", libc::clock_settime(libc::CLOCK_REALTIME, &raw const now).into());
    }
}

pub fn fd_argument(text: &str) -> Fd {
    text.parse().unwrap_or_else(|_| panic!("not a descriptor number: {text}"))
}

/// The session of a process; `None` when there is no such process.
pub fn session(pid: Pid) -> Option<Pid> {
    // SAFETY: no memory is passed.
    let session = unsafe { libc::getsid(pid) };
    (session >= 0).then_some(session)
}

/// Kills a process group; that there is none is no error.
pub fn kill_group(group: Pid) {
    assert!(group > 1, "a group of its own");
    // SAFETY: no memory is passed.
    unsafe { libc::kill(-group, SIGKILL) };
}

/// Sends a signal; `false` when there is no such process.
pub fn signal(pid: Pid, signal: i32) -> bool {
    // SAFETY: no memory is passed.
    unsafe { libc::kill(pid, signal) == 0 }
}

/// Whether two threads have one descriptor table; an error where the kernel has no kcmp.
pub fn same_table(a: Pid, b: Pid) -> io::Result<bool> {
    const KCMP_FILES: i32 = 2;
    // SAFETY: no memory is passed.
    check(unsafe { libc::syscall(libc::SYS_kcmp, a, b, KCMP_FILES, 0, 0) }).map(|order| order == 0)
}

pub fn mount(kind: &str, source: &Path, target: &Path, flags: u64) -> io::Result<()> {
    let (kind, source, target) = (cstr(kind), cstr(source), cstr(target));
    // SAFETY: the strings are live; no data is passed.
    check(unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, ptr::null()) }.into()).map(drop)
}

/// As [`mount`], with options of the file system's own.
pub fn mount_with(kind: &str, source: &Path, target: &Path, flags: u64, options: &str) -> io::Result<()> {
    let (kind, source, target, options) = (cstr(kind), cstr(source), cstr(target), cstr(options));
    // SAFETY: the strings are live.
    check(
        unsafe {
            libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, options.as_ptr().cast::<libc::c_void>())
        }
        .into(),
    )
    .map(drop)
}

pub fn unmount(target: &Path) -> io::Result<()> {
    let target = cstr(target);
    // SAFETY: the string is live.
    check(unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) }.into()).map(drop)
}

/// Becomes an ordinary user, for good.
pub fn become_user(id: u32) -> io::Result<()> {
    // SAFETY: no memory is passed; the group goes first, while that is still allowed.
    unsafe {
        check(libc::setgroups(0, ptr::null()).into())?;
        check(libc::setresgid(id, id, id).into())?;
        check(libc::setresuid(id, id, id).into()).map(drop)
    }
}

pub fn is_root() -> bool {
    // SAFETY: no memory is passed.
    unsafe { libc::geteuid() == 0 }
}

/// A new terminal: the side for the test, the side for the program.
pub fn terminal() -> (Fd, Fd) {
    let (mut near, mut far) = (0, 0);
    // SAFETY: both integers are live; name, settings and size are left to the kernel.
    must("openpty", unsafe {
        libc::openpty(&raw mut near, &raw mut far, ptr::null_mut(), ptr::null(), ptr::null()).into()
    });
    for fd in [near, far] {
        fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC).expect("close-on-exec");
    }
    (near, far)
}

/// Pins a BPF array of one small element: something that is not gpureap's.
pub fn pin_foreign_map(path: &Path) -> io::Result<()> {
    const BPF_MAP_CREATE: i32 = 0;
    const BPF_OBJ_PIN: i32 = 6;
    const ARRAY: u32 = 2;
    #[repr(C, align(8))]
    struct Pin {
        path: u64,
        fd: u32,
        flags: u32,
    }
    let (create, path) = ([ARRAY, 4, 4, 1, 0], cstr(path));
    // SAFETY: each attribute is live and of the length given; the path is NUL-terminated.
    unsafe {
        let fd = check(libc::syscall(libc::SYS_bpf, BPF_MAP_CREATE, create.as_ptr(), size_of_val(&create)))? as Fd;
        let pin = Pin { path: path.as_ptr() as u64, fd: fd as u32, flags: 0 };
        let pinned = check(libc::syscall(libc::SYS_bpf, BPF_OBJ_PIN, &raw const pin, size_of::<Pin>()));
        close(fd);
        pinned.map(drop)
    }
}
