//! Starts the actors and keeps the truth about them, which the demo measures gpureap against.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::actor::Kind;
use crate::process::Facts;

/// How long an actor may take to say that it holds.
const PATIENCE: Duration = Duration::from_secs(5);

/// One who holds.
#[derive(Clone, Debug)]
pub struct Role {
    pub kind: Kind,
    pub pid: u32,
    pub start_ns: u64,
    pub nodes: BTreeSet<PathBuf>,
    /// The dead process that opened what it holds.
    pub opened_by: Option<u32>,
}

struct Company {
    child: Child,
    /// Closed, it ends the actor and all that it started.
    stdin: Option<ChildStdin>,
}

pub struct Cast {
    companies: Vec<Company>,
    pub roles: Vec<Role>,
    /// Started the workers and holds nothing.
    pub launcher: u32,
}

impl Cast {
    /// Starts one of each, `program` being gpureap. Workers hold one node each, the others one, the stubborn one all.
    pub fn start(program: &Path, nodes: &[PathBuf]) -> anyhow::Result<Self> {
        let mut cast = Self { companies: Vec::new(), roles: Vec::new(), launcher: 0 };
        cast.add(program, Kind::Launcher, nodes, nodes.len() + 1)?;
        cast.add(program, Kind::Orphan, &nodes[..1], 1)?;
        cast.add(program, Kind::ZombieLeader, &nodes[..1], 1)?;
        cast.add(program, Kind::Stubborn, nodes, 1)?;
        Ok(cast)
    }

    fn add(&mut self, program: &Path, kind: Kind, nodes: &[PathBuf], lines: usize) -> anyhow::Result<()> {
        let mut child = Command::new(program)
            .arg0("gpureap")
            .args([super::ACTOR, kind.name()])
            .args(nodes)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take().context("no stdout")?);
        let started = child.id();
        let stdout = File::from(std::os::fd::OwnedFd::from(stdout));
        self.companies.push(Company { child, stdin });
        for line in announcements(stdout, lines)? {
            let (name, pid) = line.trim().split_once(' ').context("an actor says something else")?;
            let pid: u32 = pid.parse().context("an actor says something else")?;
            let facts = Facts::read_any("/proc".as_ref(), pid).with_context(|| format!("{name} is gone"))?;
            if name == Kind::Launcher.name() {
                self.launcher = pid;
                continue;
            }
            let worker = name == Kind::Worker.name();
            // Workers speak in any order: each has its node as its last argument.
            let own = facts.argv.last().map(PathBuf::from);
            self.roles.push(Role {
                kind: if worker { Kind::Worker } else { kind },
                pid,
                start_ns: facts.start_ns,
                nodes: if worker { own.into_iter().collect() } else { nodes.iter().cloned().collect() },
                opened_by: (kind == Kind::Orphan).then_some(started),
            });
        }
        if kind == Kind::Orphan {
            // The parent has to be dead and collected before the play begins.
            self.companies.last_mut().context("just added")?.child.wait()?;
        }
        Ok(())
    }

    pub fn pids(&self) -> BTreeSet<u32> {
        self.roles.iter().map(|role| role.pid).collect()
    }

    pub fn by_kind(&self) -> BTreeMap<&'static str, usize> {
        let mut kinds = BTreeMap::new();
        for role in &self.roles {
            *kinds.entry(role.kind.name()).or_default() += 1;
        }
        kinds
    }

    /// Whether the launcher still runs.
    pub fn launcher_lives(&mut self) -> bool {
        let launcher = self.launcher;
        let company = self.companies.iter_mut().find(|company| company.child.id() == launcher);
        company.is_some_and(|company| company.child.try_wait().is_ok_and(|status| status.is_none()))
    }

    /// Ends whoever is left. True when all of them are gone in time.
    pub fn dismiss(mut self) -> bool {
        self.end()
    }

    fn end(&mut self) -> bool {
        for company in &mut self.companies {
            drop(company.stdin.take());
        }
        let begun = Instant::now();
        loop {
            self.companies.retain_mut(|company| !company.child.try_wait().is_ok_and(|status| status.is_some()));
            if self.companies.is_empty() {
                return true;
            }
            if begun.elapsed() > PATIENCE {
                for company in &mut self.companies {
                    drop(company.child.kill());
                }
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Cast {
    fn drop(&mut self) {
        self.end();
    }
}

/// Reads so many lines, in time.
fn announcements(stdout: File, count: usize) -> anyhow::Result<Vec<String>> {
    let until = Instant::now() + PATIENCE;
    let mut reader = BufReader::new(stdout);
    let mut lines = Vec::new();
    while lines.len() < count {
        if reader.buffer().is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            let mut fds = [PollFd::new(reader.get_ref(), PollFlags::IN)];
            ensure!(poll(&mut fds, Some(&timeout))? > 0, "an actor does not say that it holds");
        }
        let mut line = String::new();
        ensure!(reader.read_line(&mut line)? > 0, "an actor ended early");
        lines.push(line);
    }
    Ok(lines)
}
