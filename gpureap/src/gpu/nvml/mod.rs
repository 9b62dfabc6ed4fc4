//! What NVIDIA's management library tells: memory, contexts, MIG. It can hang in the driver and opens device nodes, so
//! gpureap never loads it: a child does, with a time limit on every answer.

pub mod child;
pub mod client;
pub mod memory;
pub mod mig;
pub mod proof;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

pub use client::NvmlChild;

/// Why there is no answer; its text is one sentence for a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", tag = "kind", content = "detail")]
pub enum NvmlTrouble {
    #[error("NVML is switched off in the configuration")]
    Disabled,
    #[error("{0} is not there")]
    NoLibrary(String),
    #[error("NVML could not be loaded: {0}")]
    Load(String),
    #[error("NVML answers: {0}")]
    Refused(String),
    #[error("NVML did not answer within {0}")]
    Silent(String),
    #[error("the process that asks NVML {0}")]
    Ended(String),
}

/// One answer, of all GPUs that NVML lists, in its order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    pub driver: Option<String>,
    pub gpus: Vec<Gpu>,
}

/// One GPU. What NVML would not tell is `None`, and `errors` says why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    pub index: u32,
    pub uuid: Option<String>,
    /// As the kernel writes it, `0000:00:06.0`.
    pub bdf: Option<String>,
    /// The N of `/dev/nvidiaN`.
    pub minor: Option<u32>,
    pub memory: Option<Memory>,
    /// Those with a context; one with several kinds of context comes once for each.
    pub processes: Option<Vec<GpuProcess>>,
    pub persistence: Option<bool>,
    /// `None` too where the GPU cannot be divided.
    pub mig: Option<Mig>,
    pub errors: Vec<String>,
}

/// Bytes of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    pub total: u64,
    pub used: u64,
    /// What the driver keeps for itself. `None`: an old library, whose `used` has it inside.
    pub reserved: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcess {
    pub pid: u32,
    /// Bytes; `None` where NVML says "not available".
    pub used: Option<u64>,
    pub context: Context,
    /// The instances of a divided GPU that it runs in.
    pub gi: Option<u32>,
    pub ci: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Context {
    Compute,
    Graphics,
    /// A client of the MPS server.
    Mps,
}

/// How a GPU is divided.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mig {
    pub enabled: bool,
    /// What it will be after a reset.
    pub pending: bool,
    pub devices: Vec<MigDevice>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigDevice {
    pub uuid: String,
    pub gi: Option<u32>,
    pub ci: Option<u32>,
    pub memory: Option<Memory>,
}

/// Where a MIG device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigPlace {
    pub uuid: String,
    pub parent_uuid: Option<String>,
    pub parent_minor: Option<u32>,
    pub gi: Option<u32>,
    pub ci: Option<u32>,
}

impl Snapshot {
    /// The GPU behind `/dev/nvidiaN`.
    pub fn gpu(&self, minor: u32) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.minor == Some(minor))
    }

    /// Who has a context, by minor. A GPU is missing where NVML did not tell, which is not the same as nobody.
    pub fn contexts(&self) -> BTreeMap<u32, BTreeSet<u32>> {
        let pids = |gpu: &Gpu| Some(gpu.processes.as_ref()?.iter().map(|process| process.pid).collect());
        self.gpus.iter().filter_map(|gpu| Some((gpu.minor?, pids(gpu)?))).collect()
    }

    /// A MIG device by its UUID: `MIG-<uuid>`, or `MIG-GPU-<uuid>/<gi>/<ci>` as drivers before 470 wrote it; a beginning
    /// that more than one device has finds all of them.
    pub fn mig(&self, name: &str) -> Vec<MigPlace> {
        let wanted = name.to_ascii_lowercase();
        if !wanted.starts_with("mig-") || wanted.len() < "mig-0".len() {
            return Vec::new();
        }
        let mut found: Vec<MigPlace> =
            self.mig_places().filter(|place| place.uuid.to_ascii_lowercase() == wanted).collect();
        if found.is_empty() {
            let old = |place: &MigPlace| {
                let (parent, gi, ci) = (place.parent_uuid.as_ref()?, place.gi?, place.ci?);
                Some(format!("mig-{parent}/{gi}/{ci}").to_ascii_lowercase())
            };
            found = self
                .mig_places()
                .filter(|place| {
                    place.uuid.to_ascii_lowercase().starts_with(&wanted) || old(place).as_ref() == Some(&wanted)
                })
                .collect();
        }
        found
    }

    /// All MIG devices.
    pub fn mig_places(&self) -> impl Iterator<Item = MigPlace> {
        self.gpus.iter().flat_map(|gpu| {
            gpu.mig.iter().flat_map(|mig| &mig.devices).map(|device| MigPlace {
                uuid: device.uuid.clone(),
                parent_uuid: gpu.uuid.clone(),
                parent_minor: gpu.minor,
                gi: device.gi,
                ci: device.ci,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot() -> Snapshot {
        let process = |pid, context| GpuProcess { pid, used: None, context, gi: None, ci: None };
        let device = |uuid: &str, gi| MigDevice { uuid: uuid.to_owned(), gi: Some(gi), ci: Some(0), memory: None };
        let gpu =
            |index, minor| Gpu { index, minor: Some(minor), uuid: Some(format!("GPU-aa0{minor}")), ..Gpu::default() };
        Snapshot {
            driver: None,
            gpus: vec![
                Gpu {
                    processes: Some(vec![
                        process(7, Context::Compute),
                        process(7, Context::Graphics),
                        process(9, Context::Mps),
                    ]),
                    ..gpu(0, 1)
                },
                Gpu {
                    mig: Some(Mig {
                        enabled: true,
                        pending: true,
                        devices: vec![device("MIG-1111aaaa", 1), device("MIG-1111bbbb", 2)],
                    }),
                    ..gpu(1, 0)
                },
                Gpu { processes: Some(Vec::new()), ..gpu(2, 2) },
            ],
        }
    }

    #[test]
    fn contexts_by_minor() {
        let expected = BTreeMap::from([(1, BTreeSet::from([7, 9])), (2, BTreeSet::new())]);
        assert_eq!(snapshot().contexts(), expected);
        assert_eq!(snapshot().gpu(0).unwrap().index, 1);
    }

    #[test]
    fn mig_devices_by_name() {
        let found = |name: &str| snapshot().mig(name).iter().map(|place| place.uuid.clone()).collect::<Vec<_>>();
        assert_eq!(found("MIG-1111aaaa"), ["MIG-1111aaaa"]);
        assert_eq!(found("mig-1111AAAA"), ["MIG-1111aaaa"]);
        assert_eq!(found("MIG-1111b"), ["MIG-1111bbbb"]);
        assert_eq!(found("MIG-1111"), ["MIG-1111aaaa", "MIG-1111bbbb"]);
        assert_eq!(found("MIG-GPU-aa00/2/0"), ["MIG-1111bbbb"]);
        for none in ["MIG-", "MIG-2", "1111aaaa", "GPU-aa00", "MIG-GPU-aa00/2/1", ""] {
            assert_eq!(found(none), Vec::<String>::new(), "{none}");
        }
        let place = snapshot().mig("MIG-1111bbbb").remove(0);
        assert_eq!(
            (place.parent_minor, place.parent_uuid.as_deref(), place.gi, place.ci),
            (Some(0), Some("GPU-aa00"), Some(2), Some(0))
        );
    }

    #[test]
    fn troubles_are_sentences_and_survive_the_pipe() {
        for (trouble, sentence) in [
            (NvmlTrouble::Disabled, "NVML is switched off in the configuration"),
            (NvmlTrouble::NoLibrary("libnvidia-ml.so.1".to_owned()), "libnvidia-ml.so.1 is not there"),
            (NvmlTrouble::Silent("2s".to_owned()), "NVML did not answer within 2s"),
            (
                NvmlTrouble::Refused("NVIDIA driver is not loaded".to_owned()),
                "NVML answers: NVIDIA driver is not loaded",
            ),
        ] {
            assert_eq!(trouble.to_string(), sentence);
            let json = serde_json::to_string(&trouble).unwrap();
            assert_eq!(serde_json::from_str::<NvmlTrouble>(&json).unwrap(), trouble, "{json}");
        }
    }
}
