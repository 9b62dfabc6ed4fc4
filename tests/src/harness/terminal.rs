//! A command on a terminal, which asks before it kills.
use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::fd::{FromRawFd as _, OwnedFd},
    process::{Child, Command, Stdio},
    sync::mpsc::{self, Receiver},
    time::{Duration, Instant},
};

use super::{PATIENCE, bench::wait};
use crate::actor::sys;

pub struct Terminal {
    child: Child,
    near: File,
    text: String,
    parts: Receiver<Vec<u8>>,
}

impl Terminal {
    pub fn start(mut command: Command) -> Self {
        let (near, far) = sys::terminal();
        // SAFETY: both descriptors were made a moment ago and nothing else owns them.
        let (near, far) = unsafe { (File::from_raw_fd(near), OwnedFd::from_raw_fd(far)) };
        let same = || Stdio::from(far.try_clone().expect("a copy of the terminal"));
        let child = command.stdin(same()).stdout(same()).stderr(same()).spawn().expect("start on a terminal");
        // The copies in the command would keep the terminal open after the program's end.
        drop(command);
        let mut reader = near.try_clone().expect("a copy of the terminal");
        let (sender, parts) = mpsc::channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = reader.read(&mut bytes) {
                if sender.send(bytes[..n].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self { child, near, text: String::new(), parts }
    }

    fn hear(&mut self, patience: Duration) {
        if let Ok(part) = self.parts.recv_timeout(patience) {
            self.text.push_str(&String::from_utf8_lossy(&part));
        }
    }

    /// Waits until the program has asked something.
    pub fn question(&mut self) {
        let until = Instant::now() + PATIENCE;
        while !self.text.contains('?') {
            self.hear(Duration::from_millis(50));
            let ended = self.child.try_wait().expect("wait for a child");
            assert!(ended.is_none(), "it ended without a question: {ended:?}:\n{}", self.text);
            assert!(Instant::now() < until, "it does not ask:\n{}", self.text);
        }
    }

    pub fn answer(&mut self, text: &str) {
        writeln!(self.near, "{text}").expect("write to the terminal");
    }

    /// Waits for the end; the exit code and all that was written.
    pub fn finish(mut self) -> (i32, String) {
        let status = wait(&mut self.child, PATIENCE * 2);
        self.hear(Duration::from_millis(200));
        let code = status.and_then(|status| status.code());
        (code.unwrap_or_else(|| panic!("no exit code: {status:?}:\n{}", self.text)), std::mem::take(&mut self.text))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait()
            && let Err(error) = self.child.kill().and_then(|()| self.child.wait())
        {
            eprintln!("terminal: {error}");
        }
    }
}
