//! Xids from the driver's tracepoint, `nvidia:nvidia_dev_xid` (in the open kernel modules; seen with 580.159.04), through a
//! tracing instance of our own. Not by a program on the tracepoint: an attached program holds a reference to the module,
//! and nobody could unload the driver any more. An instance's event takes none, it goes with the module.

use std::{
    fs::{self, File},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io::{self, BufRead as _, BufReader},
    path::{Path, PathBuf},
    thread,
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
        let trace = Self { instance };
        fs::write(trace.instance.join("buffer_size_kb"), BUFFER_KIB)?;
        trace.enable()?;
        let pipe = BufReader::new(File::open(trace.instance.join("trace_pipe"))?);
        thread::Builder::new().name("xid-trace".to_owned()).spawn(move || {
            for line in pipe.lines() {
                let line = match line {
                    Ok(line) => line,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(_) => return,
                };
                let Some(xid) = xid::parse(&line, "tracepoint") else { continue };
                let Some(out) = out.upgrade() else { return };
                if out.blocking_send(Input::Traced(Box::new(xid))).is_err() {
                    return;
                }
            }
        })?;
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
        // Busy as long as the thread reads; it ends with the process, and the directory is reused.
        fs::remove_dir(&self.instance).ok();
    }
}
