//! A process that does what the test tells it, and is the test's own child: its wait status is known.
use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::process::CommandExt as _,
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::mpsc::{self, Receiver},
};

use tempfile::TempDir;

use super::{PATIENCE, bench::wait, note, program};
use crate::actor::sys::{self, Pid};

/// How it is started.
#[derive(Clone, Copy, Debug, Default)]
pub struct Role<'a> {
    pub arguments: &'a [&'a str],
    pub environment: &'a [(&'a str, &'a str)],
    pub user: Option<u32>,
}

/// `gpureap-actor play`. It leads a session, which ends with this.
pub struct Player {
    child: Child,
    input: ChildStdin,
    answers: Receiver<String>,
    status: Option<ExitStatus>,
    _place: TempDir,
}

impl Player {
    pub fn start() -> Self {
        Self::with(&Role::default())
    }

    pub fn with(role: &Role<'_>) -> Self {
        let Role { arguments, environment, user } = *role;
        // Where it may dump core.
        let place = tempfile::Builder::new().prefix("gpureap-player-").tempdir().expect("a directory");
        let mut command = Command::new(program("GPUREAP_ACTOR", "gpureap-actor"));
        command
            .arg("play")
            .args(arguments)
            .env_clear()
            .envs(environment.iter().copied())
            .current_dir(place.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let enter = move || {
            sys::setsid();
            user.map_or(Ok(()), sys::become_user)
        };
        // SAFETY: between fork and exec this only makes system calls.
        let mut child = unsafe { command.pre_exec(enter) }.spawn().expect("start the actor");
        let (input, output) = (child.stdin.take().expect("its input"), child.stdout.take().expect("its output"));
        let (sender, answers) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let player = Self { child, input, answers, status: None, _place: place };
        player.answer("start");
        player
    }

    /// One that holds the node already.
    pub fn holding(node: &str) -> Self {
        let mut player = Self::start();
        player.ask(&format!("open {node}"));
        player
    }

    pub fn pid(&self) -> Pid {
        self.child.id() as Pid
    }

    /// Tells it something that it does not come back from.
    pub fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap_or_else(|error| panic!("{line}: {error}"));
    }

    /// Tells it something and waits until it is done.
    pub fn ask(&mut self, line: &str) -> i32 {
        self.tell(line);
        self.answer(line)
    }

    fn answer(&self, line: &str) -> i32 {
        let answer = self.answers.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{line}: no answer"));
        answer.parse().unwrap_or_else(|_| panic!("{line}: {answer}"))
    }

    /// Whether it has not ended.
    pub fn runs(&mut self) -> bool {
        if self.status.is_none() {
            self.status = self.child.try_wait().expect("wait for a child");
        }
        self.status.is_none()
    }

    /// Waits for its end.
    pub fn end(&mut self) -> ExitStatus {
        let status = self.status.or_else(|| wait(&mut self.child, PATIENCE)).expect("it ends");
        self.status = Some(status);
        status
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        // Its children may live on.
        sys::kill_group(self.pid());
        if self.status.is_none()
            && let Err(error) = self.child.kill().and_then(|()| self.child.wait())
        {
            note(&format!("player {}: {error}", self.pid()));
        }
    }
}
