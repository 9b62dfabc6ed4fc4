//! The processes of the demo: `gpureap actor KIND NODE...`. Each has a session of its own, says on stdout who holds, and
//! ends when its stdin ends, which it does when the demo ends in whatever way.

use std::{
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::Context as _;
use rustix::fd::OwnedFd;

use super::stage::open_node;
use crate::{error::Failure, exit_code::Exit, out};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Holds its nodes.
    Worker,
    /// Holds nothing and starts one worker for each node.
    Launcher,
    /// Forks a child that inherits its nodes, and dies.
    Orphan,
    /// Its main thread ends while another thread lives.
    ZombieLeader,
    /// Holds its nodes and ignores SIGTERM.
    Stubborn,
}

impl Kind {
    pub const ALL: [Self; 5] = [Self::Worker, Self::Launcher, Self::Orphan, Self::ZombieLeader, Self::Stubborn];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Worker => "worker",
            Self::Launcher => "launcher",
            Self::Orphan => "orphan",
            Self::ZombieLeader => "zombie-leader",
            Self::Stubborn => "stubborn",
        }
    }
}

/// Plays one of them.
pub fn play(args: &[String]) -> anyhow::Result<Exit> {
    let (kind, nodes) = args.split_first().ok_or_else(|| Failure::usage("actor KIND NODE..."))?;
    let kind = Kind::ALL
        .into_iter()
        .find(|one| one.name() == kind)
        .ok_or_else(|| Failure::usage(format!("no such actor: {kind}")))?;
    let nodes: Vec<PathBuf> = nodes.iter().map(PathBuf::from).collect();
    // A worker of the launcher leads no group yet; one that does already is fine as it is.
    if let Err(error) = rustix::process::setsid() {
        tracing::debug!(%error, "setsid");
    }
    // Started through /proc/self/exe, it would be called `exe`.
    rustix::thread::set_name(c"gpureap")?;
    match kind {
        Kind::Worker => {
            let _held = hold(&nodes)?;
            announce(kind)?;
            until_the_end();
        }
        Kind::Launcher => launch(&nodes)?,
        Kind::Orphan => orphan(&nodes)?,
        Kind::ZombieLeader => lose_the_leader(&nodes)?,
        Kind::Stubborn => {
            // SAFETY: SIG_IGN is a valid disposition, and no other thread runs yet.
            unsafe { libc::signal(libc::SIGTERM, libc::SIG_IGN) };
            let _held = hold(&nodes)?;
            announce(kind)?;
            until_the_end();
        }
    }
    Ok(Exit::Done)
}

fn hold(nodes: &[PathBuf]) -> anyhow::Result<Vec<OwnedFd>> {
    nodes.iter().map(|node| open_node(node).with_context(|| node.display().to_string())).collect()
}

fn announce(kind: Kind) -> anyhow::Result<()> {
    out::raw(format!("{} {}\n", kind.name(), std::process::id()).as_bytes())
}

/// Nothing is ever written to stdin: it is readable when the other end is gone.
fn until_the_end() {
    let mut byte = [0; 1];
    while let Ok(1..) | Err(rustix::io::Errno::INTR) = rustix::io::read(std::io::stdin(), &mut byte) {}
}

fn launch(nodes: &[PathBuf]) -> anyhow::Result<()> {
    let start = |node: &PathBuf| {
        Command::new("/proc/self/exe")
            .arg0("gpureap")
            .args([super::ACTOR, Kind::Worker.name()])
            .arg(node)
            .stdin(Stdio::inherit())
            .spawn()
    };
    let workers = nodes.iter().map(start).collect::<Result<Vec<_>, _>>()?;
    announce(Kind::Launcher)?;
    until_the_end();
    for mut worker in workers {
        worker.wait()?;
    }
    Ok(())
}

fn orphan(nodes: &[PathBuf]) -> anyhow::Result<()> {
    let _held = hold(nodes)?;
    // SAFETY: no other thread runs, so the child may go on as usual.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error().into()),
        0 => {
            announce(Kind::Orphan)?;
            until_the_end();
            Ok(())
        }
        _ => Ok(()),
    }
}

fn lose_the_leader(nodes: &[PathBuf]) -> anyhow::Result<()> {
    let held = hold(nodes)?;
    std::thread::Builder::new().name("survivor".to_owned()).spawn(move || {
        let _held = held;
        let leader = PathBuf::from(format!("/proc/self/task/{}/stat", std::process::id()));
        while !is_zombie(&leader) {
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Err(error) = announce(Kind::ZombieLeader) {
            out::diagnostic(&error);
        }
        until_the_end();
        // SAFETY: ends the process at once; nothing of it is needed any more.
        unsafe { libc::_exit(0) };
    })?;
    // SAFETY: ends this thread alone, without unwinding: its stack and what is on it are never used again.
    unsafe { libc::syscall(libc::SYS_exit, 0) };
    anyhow::bail!("the main thread is still here")
}

fn is_zombie(stat: &Path) -> bool {
    std::fs::read_to_string(stat).is_ok_and(|stat| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" Z")))
}
