//! The kernel's log, played by the test.
use std::{
    fs::{self, File, OpenOptions},
    io::Write as _,
    os::fd::AsRawFd as _,
};

use super::Bench;
use crate::actor::sys;

/// What the daemon of this bench reads in the place of /dev/kmsg, record by record.
pub struct Log {
    pipe: File,
    sequence: u64,
}

impl Log {
    /// Before the daemon starts, which opens it.
    pub fn of(bench: &Bench) -> Self {
        fs::create_dir(bench.path("dev")).expect("a directory");
        let path = bench.path("dev").join("kmsg");
        sys::make_fifo(&path).expect("a pipe with a name");
        // For reading too, so that it never ends.
        let pipe = OpenOptions::new().read(true).write(true).open(&path).expect("open the pipe");
        // A read gives one record, as that of the log does.
        sys::fcntl(pipe.as_raw_fd(), libc::F_SETFL, libc::O_DIRECT).expect("a pipe of packets");
        Self { pipe, sequence: 0 }
    }

    /// The kernel says this now.
    pub fn say(&mut self, line: &str) {
        self.sequence += 1;
        let now = sys::monotonic_us();
        let record = format!("6,{},{now},-;{line}\n SUBSYSTEM=pci\n", self.sequence);
        self.pipe.write_all(record.as_bytes()).expect("write a record");
    }
}
