//! `gpureap.check/1`: what `check --json` prints. Fields may be added, never renamed within a schema number.

use serde::{Deserialize, Serialize};

pub const SCHEMA: &str = "gpureap.check/1";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    pub schema: String,
    pub host: String,
    /// RFC 3339.
    pub time: String,
    pub exit_code: u8,
    /// The line that the command prints without `--json`.
    pub message: String,
    /// The worst first.
    pub findings: Vec<Finding>,
    /// Of the hardware or the driver, within the time that was asked for.
    pub xids: Vec<Fault>,
    /// Whether the look saw all that its source can see.
    pub complete: bool,
    pub notes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    pub why: Why,
    /// Those of the chosen ones that it holds.
    pub nodes: Vec<String>,
    pub pid: u32,
    pub start_ns: u64,
    pub comm: String,
    pub uid: Option<u32>,
    pub user: Option<String>,
    /// As in /proc/PID/stat, of the thread that keeps a dying process.
    pub state: Option<char>,
    pub slurm_job: Option<String>,
    pub pod: Option<String>,
    pub pod_namespace: Option<String>,
    pub container: Option<String>,
}

/// The worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Why {
    /// It was told to die and does not.
    Dying,
    /// It is a job, and belongs to nothing that still runs.
    Orphan,
    /// It is a job, and the GPU was to be free.
    Held,
}

/// What a GPU reported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// PCI address.
    pub bdf: String,
    pub node: Option<String>,
    pub xid: u32,
    /// What NVIDIA's catalogue calls it.
    pub meaning: String,
}
