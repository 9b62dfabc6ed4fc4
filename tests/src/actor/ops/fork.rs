//! Copies of a whole table, and the ends of processes.
use super::{
    super::{
        child::{Child, Cue, Pipes},
        sys::{self, O_CLOEXEC, O_RDWR, SIGKILL, pid},
        truth::{Skip, Stage, Truth},
    },
    Named,
};

pub(super) const OPS: &[Named] = &[
    ("fork_child_closes", fork_child_closes),
    ("fork_child_exits", fork_child_exits),
    ("fork_parent_closes_first", fork_parent_closes_first),
    ("exit_with_open", exit_with_open),
    ("sigkill", sigkill),
    ("sigsegv", sigsegv),
    ("vfork_exit", vfork_exit),
    ("vfork_exec", vfork_exec),
    ("spawn_cloexec", spawn_cloexec),
    ("spawn_inherit", spawn_inherit),
    ("spawn_dup2", spawn_dup2),
    ("oom_kill", oom_kill),
];

fn fork_child_closes(s: &Stage) -> Result<(), Skip> {
    let a = s.open(O_RDWR);
    let child = Child::fork(|cue| {
        cue.pause();
        sys::close(a);
        cue.pause();
    });
    child.done();
    s.at("fork", &Truth::files(1).fds(pid(), 1).fds(child.pid, 1));
    child.step();
    s.at("child_close", &Truth::files(1).fds(pid(), 1));
    child.finish();
    s.at("child_exit", &Truth::files(1).fds(pid(), 1));
    sys::close(a);
    s.at("parent_close", &Truth::none());
    Ok(())
}

fn fork_child_exits(s: &Stage) -> Result<(), Skip> {
    let (a, b) = (s.open(O_RDWR), s.open(O_RDWR));
    let child = Child::fork(Cue::pause);
    child.done();
    s.at("fork", &Truth::files(2).fds(pid(), 2).fds(child.pid, 2));
    child.finish();
    s.at("child_exit", &Truth::files(2).fds(pid(), 2));
    sys::close(a);
    sys::close(b);
    s.at("parent_close", &Truth::none());
    Ok(())
}

fn fork_parent_closes_first(s: &Stage) -> Result<(), Skip> {
    let a = s.open(O_RDWR);
    let child = Child::fork(Cue::pause);
    child.done();
    sys::close(a);
    s.at("parent_close", &Truth::files(1).fds(child.pid, 1));
    child.finish();
    s.at("child_exit", &Truth::none());
    Ok(())
}

fn exit_with_open(s: &Stage) -> Result<(), Skip> {
    let child = Child::fork(|cue| {
        let a = s.open(O_RDWR);
        sys::dup(a);
        cue.pause();
    });
    child.done();
    s.at("child_open_dup", &Truth::files(1).fds(child.pid, 2));
    child.finish();
    s.at("child_exit", &Truth::none());
    Ok(())
}

fn sigkill(s: &Stage) -> Result<(), Skip> {
    let child = Child::fork(|cue| {
        s.open(O_RDWR);
        cue.pause();
    });
    child.done();
    s.at("child_open", &Truth::files(1).fds(child.pid, 1));
    sys::kill(child.pid, SIGKILL);
    assert_eq!(child.reap(), SIGKILL);
    s.at("sigkill", &Truth::none());
    Ok(())
}

fn sigsegv(s: &Stage) -> Result<(), Skip> {
    let child = Child::fork(|cue| {
        s.open(O_RDWR);
        cue.pause();
        sys::signal_default(libc::SIGSEGV);
        // SAFETY: the fault is the point; the process ends here.
        unsafe { std::ptr::without_provenance_mut::<u8>(8).write_volatile(1) };
    });
    child.done();
    s.at("child_open", &Truth::files(1).fds(child.pid, 1));
    assert_eq!(child.finish() & 0x7f, libc::SIGSEGV);
    s.at("sigsegv", &Truth::none());
    Ok(())
}

fn vfork_exit(s: &Stage) -> Result<(), Skip> {
    let a = s.open(O_RDWR);
    let parent = pid();
    let child = sys::vfork(&mut || {
        s.at("vfork", &Truth::files(1).fds(parent, 1).fds(pid(), 1));
        sys::close(a);
        s.at("child_close", &Truth::files(1).fds(parent, 1));
        sys::exit(0)
    });
    sys::reap(child);
    s.at("child_exit", &Truth::files(1).fds(parent, 1));
    sys::close(a);
    s.at("close", &Truth::none());
    Ok(())
}

fn vfork_exec(s: &Stage) -> Result<(), Skip> {
    let (a, b) = (s.open(O_RDWR), s.open(O_RDWR | O_CLOEXEC));
    let parent = pid();
    let pipes = Pipes::new();
    let cue = pipes.cue();
    let arguments = cue.pause_arguments();
    let child = pipes.child(sys::vfork(&mut || sys::exec_self(&arguments)));
    child.done();
    s.at("child_exec", &Truth::files(2).fds(parent, 2).fds(child.pid, 1));
    child.finish();
    s.at("child_exit", &Truth::files(2).fds(parent, 2));
    sys::close(a);
    sys::close(b);
    s.at("close", &Truth::none());
    Ok(())
}

fn spawn(s: &Stage, flags: i32, action: Option<i32>, child_fds: usize) {
    let a = s.open(flags);
    let pipes = Pipes::new();
    let arguments = pipes.cue().pause_arguments();
    let child = pipes.child(sys::spawn_self(&arguments, action.map(|to| (a, to))));
    child.done();
    s.at("spawn", &Truth::files(1).fds(pid(), 1).fds(child.pid, child_fds));
    child.finish();
    s.at("child_exit", &Truth::files(1).fds(pid(), 1));
    sys::close(a);
    s.at("close", &Truth::none());
}

fn spawn_cloexec(s: &Stage) -> Result<(), Skip> {
    spawn(s, O_RDWR | O_CLOEXEC, None, 0);
    Ok(())
}

fn spawn_inherit(s: &Stage) -> Result<(), Skip> {
    spawn(s, O_RDWR, None, 1);
    Ok(())
}

fn spawn_dup2(s: &Stage) -> Result<(), Skip> {
    spawn(s, O_RDWR | O_CLOEXEC, Some(60), 1);
    Ok(())
}

/// The global out-of-memory killer, asked by sysrq: only where losing a process is agreed to.
fn oom_kill(s: &Stage) -> Result<(), Skip> {
    if std::env::var_os("GPUREAP_ALLOW_OOM").is_none() {
        return Err(Skip("GPUREAP_ALLOW_OOM is not set: the kernel might choose another process".into()));
    }
    let trigger = sys::try_open("/proc/sysrq-trigger", libc::O_WRONLY)
        .map_err(|error| Skip(format!("/proc/sysrq-trigger: {error}")))?;
    let child = Child::fork(|cue| {
        let memory = vec![1_u8; 96 << 20];
        std::fs::write("/proc/self/oom_score_adj", "1000").expect("oom_score_adj");
        s.open(O_RDWR);
        cue.pause();
        drop(std::hint::black_box(memory));
    });
    child.done();
    s.at("child_open", &Truth::files(1).fds(child.pid, 1));
    sys::write_all(trigger, b"f");
    assert_eq!(child.reap(), SIGKILL);
    sys::close(trigger);
    s.at("oom_kill", &Truth::none());
    Ok(())
}
