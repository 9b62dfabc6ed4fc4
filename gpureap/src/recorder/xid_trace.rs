//! Xids from the driver's tracepoint, `nvidia:nvidia_dev_xid` (in the open kernel modules; seen with 580.159.04), through a
//! tracing instance of our own. Not by a program on the tracepoint: an attached program holds a reference to the module,
//! and nobody could unload the driver any more. An instance's event takes none, it goes with the module.

use std::{
    fs::{self, File, OpenOptions},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io::{self, Read as _},
    os::{fd::OwnedFd, unix::fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
    thread::{self, JoinHandle},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    pipe::PipeFlags,
};
use tokio::sync::mpsc;

use super::Input;
use crate::history::xid;

const EVENT: &str = "events/nvidia/nvidia_dev_xid";
/// For each processor: Xids are rare and a line has some hundred bytes.
const BUFFER_KIB: &str = "8";

/// Removed when it is dropped. After a kill -9 the next daemon of the same run directory takes its place.
#[derive(Debug)]
pub(super) struct XidTrace {
    instance: PathBuf,
    /// Closed, it ends the thread.
    reader: Option<(OwnedFd, JoinHandle<()>)>,
}

impl XidTrace {
    /// `None` where tracefs is not mounted, or the driver is not loaded or has no such tracepoint.
    pub(super) fn start(sys: &Path, run: &Path, out: mpsc::WeakSender<Input>) -> Option<Self> {
        let tracing = sys.join("kernel/tracing");
        if !tracing.join(EVENT).is_dir() {
            return None;
        }
        match Self::listen(&tracing, run, out) {
            Ok(trace) => Some(trace),
            Err(error) => {
                tracing::info!("Xids are read from the kernel's log: no tracing instance ({error})");
                None
            }
        }
    }

    fn listen(tracing: &Path, run: &Path, out: mpsc::WeakSender<Input>) -> io::Result<Self> {
        let mut hasher = DefaultHasher::new();
        run.hash(&mut hasher);
        let instance = tracing.join("instances").join(format!("gpureap-{:08x}", hasher.finish() as u32));
        // What one that was killed has left; its lines are old.
        fs::remove_dir(&instance).ok();
        fs::create_dir(&instance)?;
        let mut trace = Self { instance, reader: None };
        fs::write(trace.instance.join("buffer_size_kb"), BUFFER_KIB)?;
        trace.enable()?;
        let pipe =
            OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(trace.instance.join("trace_pipe"))?;
        let (ends, stop) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let thread = thread::Builder::new().name("xid-trace".to_owned()).spawn(move || listen(pipe, &ends, &out))?;
        trace.reader = Some((stop, thread));
        Ok(trace)
    }

    /// Again after the driver was loaded anew: its event is a new one.
    pub(super) fn enable(&self) -> io::Result<()> {
        fs::write(self.instance.join(EVENT).join("enable"), "1")
    }
}

impl Drop for XidTrace {
    fn drop(&mut self) {
        fs::write(self.instance.join(EVENT).join("enable"), "0").ok();
        // The directory is busy as long as the thread has its pipe.
        if let Some((stop, thread)) = self.reader.take() {
            drop(stop);
            drop(thread.join());
        }
        fs::remove_dir(&self.instance).ok();
    }
}

/// Hands lines on until the other end of `ends` is closed.
fn listen(mut pipe: File, ends: &OwnedFd, out: &mpsc::WeakSender<Input>) {
    let mut rest = String::new();
    let mut buffer = [0; 4096];
    loop {
        let mut fds = [PollFd::new(&pipe, PollFlags::IN), PollFd::new(ends, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
        if !fds[1].revents().is_empty() {
            return;
        }
        match pipe.read(&mut buffer) {
            Ok(length) => rest.push_str(&String::from_utf8_lossy(&buffer[..length])),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => return,
        }
        while let Some((line, after)) = rest.split_once('\n') {
            let xid = xid::parse(line, "tracepoint");
            rest = after.to_owned();
            let Some(xid) = xid else { continue };
            // Never waits: the thread that ends this one may be the one that takes what is sent.
            let sent = out.upgrade().is_some_and(|out| out.try_send(Input::Traced(Box::new(xid))).is_ok());
            if !sent {
                tracing::warn!("an Xid of the tracepoint found no room");
            }
        }
        // A line without an end is none of ours.
        if rest.len() > 1 << 16 {
            rest.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn lines_become_xids_until_it_is_told_to_end() {
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        let (ends, stop) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
        let (sender, mut inputs) = mpsc::channel(8);
        let out = sender.downgrade();
        let thread = thread::spawn(move || listen(File::from(read), &ends, &out));
        let mut write = File::from(write);
        // As an H200 with driver 580.159.04 told it, in two halves, between lines that are none.
        let line = "         python3-462     [003] d..1.    32.744309: nvidia_dev_xid: Xid (PCI:0000:00:06): 31, channel 0x0000000a, MMU Fault";
        write!(write, "# tracer: nop\n{}", &line[..60]).unwrap();
        writeln!(write, "{}", &line[60..]).unwrap();
        let Some(Input::Traced(xid)) = inputs.blocking_recv() else { panic!("no Xid") };
        assert_eq!((xid.bdf.as_str(), xid.xid, xid.pid), ("0000:00:06.0", 31, None));
        drop(stop);
        thread.join().unwrap();
    }
}
