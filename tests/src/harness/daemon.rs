//! A running `gpureap daemon`.
use std::{
    borrow::Borrow,
    fs::File,
    os::unix::net::UnixDatagram,
    process::{Child, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use super::{Bench, PATIENCE, bench::wait};
use crate::actor::sys::{self, Pid, SIGTERM};

/// Ends with this; its pins lie in the bench's own bpffs and go with that.
pub struct Daemon<B: Borrow<Bench>> {
    // Dropped after the child has ended.
    bench: B,
    child: Option<Child>,
    arguments: &'static [&'static str],
}

impl<B: Borrow<Bench>> Daemon<B> {
    /// Starts the daemon and waits until it says that it is ready.
    pub fn start(bench: B) -> Self {
        Self::start_with(bench, &["daemon"])
    }

    /// With arguments of its own.
    pub fn start_with(bench: B, arguments: &'static [&'static str]) -> Self {
        let mut daemon = Self { bench, child: None, arguments };
        daemon.start_again();
        daemon
    }

    /// A daemon, or how it ended without getting ready.
    pub fn try_start(bench: B, arguments: &'static [&'static str]) -> Result<Self, ExitStatus> {
        let mut daemon = Self { bench, child: None, arguments };
        daemon.launch().map(|()| daemon)
    }

    /// Starts the daemon of a bench whose daemon has ended.
    pub fn start_again(&mut self) {
        if let Err(status) = self.launch() {
            panic!("the daemon ended with {status} before it was ready:\n{}", self.log());
        }
    }

    fn launch(&mut self) -> Result<(), ExitStatus> {
        assert!(self.child.is_none(), "it runs");
        let bench = self.bench.borrow();
        let address = bench.path("notify");
        if address.exists() {
            std::fs::remove_file(&address).expect("remove the old socket");
        }
        let socket = UnixDatagram::bind(&address).expect("a socket for readiness");
        socket.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
        let log = File::options().create(true).append(true).open(bench.path("daemon.log")).expect("a log");
        let mut child = bench
            .command(self.arguments)
            .env("NOTIFY_SOCKET", &address)
            .stdout(log.try_clone().expect("a second handle of the log"))
            .stderr(Stdio::from(log))
            .spawn()
            .expect("start the daemon");
        let until = Instant::now() + PATIENCE * 2;
        let mut message = [0; 4096];
        loop {
            if let Ok(n) = socket.recv(&mut message)
                && message[..n].split(|byte| *byte == b'\n').any(|line| line == b"READY=1")
            {
                break;
            }
            if let Some(status) = child.try_wait().expect("wait for the daemon") {
                return Err(status);
            }
            if Instant::now() > until {
                child.kill().expect("kill the daemon");
                child.wait().expect("wait for the daemon");
                panic!("the daemon did not get ready:\n{}", self.log());
            }
        }
        self.child = Some(child);
        Ok(())
    }

    pub(super) fn bench(&self) -> &B {
        &self.bench
    }

    pub fn pid(&self) -> Pid {
        self.child.as_ref().expect("it runs").id() as Pid
    }

    pub fn runs(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| child.try_wait().expect("wait for the daemon").is_none())
    }

    /// Waits until it ends by itself.
    pub fn end(&mut self) -> ExitStatus {
        let mut child = self.child.take().expect("it runs");
        wait(&mut child, PATIENCE).unwrap_or_else(|| panic!("the daemon does not end:\n{}", self.log()))
    }

    /// What it has written.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.bench.borrow().path("daemon.log")).unwrap_or_default()
    }

    /// Kills it the hard way; its pins stay.
    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("it runs");
        child.kill().expect("kill the daemon");
        child.wait().expect("wait for the daemon");
    }

    /// Stops it as systemd does.
    pub fn stop(&mut self) -> ExitStatus {
        let mut child = self.child.take().expect("it runs");
        sys::kill(child.id() as Pid, SIGTERM);
        wait(&mut child, PATIENCE).unwrap_or_else(|| panic!("the daemon does not stop:\n{}", self.log()))
    }
}

impl<B: Borrow<Bench>> Drop for Daemon<B> {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take()
            && let Err(error) = child.kill().and_then(|()| child.wait())
        {
            eprintln!("daemon: {error}");
        }
        if std::thread::panicking() {
            eprintln!("the daemon's log:\n{}", self.log());
        }
    }
}
