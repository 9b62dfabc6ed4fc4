//! What `--gpu` means: minor or index, node path, UUID, PCI address, MIG UUID, or `all`.

use std::{collections::BTreeSet, fs, os::unix::fs::FileTypeExt as _, os::unix::fs::MetadataExt as _, path::Path};

use super::devices::{Devices, under};
use crate::{
    config::Paths,
    error::Failure,
    model::{Device, DeviceKind, Slot},
};

/// What a bare number means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum By {
    /// The N of /dev/nvidiaN.
    #[default]
    Minor,
    /// NVML's and nvidia-smi's number.
    Index,
}

/// A compute instance on a partitioned GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MigInstance {
    /// Minor of the GPU.
    pub gpu: u32,
    pub gi: u32,
    pub ci: u32,
}

/// Knows which instance a UUID `MIG-…` names. Only NVML does.
pub trait MigSource {
    /// `Err` is the end of a sentence that says what is missing; `Ok(None)`: there is no such instance.
    fn resolve(&self, uuid: &str) -> Result<Option<MigInstance>, String>;
}

/// Nobody to ask.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoMig;

impl MigSource for NoMig {
    fn resolve(&self, _uuid: &str) -> Result<Option<MigInstance>, String> {
        Err("NVML, which is not asked here".to_owned())
    }
}

impl Devices {
    /// The union of several `--gpu` values; none at all means every GPU. UUIDs that only NVML knows are refused.
    pub fn select_all(&self, paths: &Paths, values: &[String], by: By) -> Result<BTreeSet<Slot>, Failure> {
        self.select_all_with(paths, values, by, &NoMig)
    }

    /// As [`Devices::select_all`], with somebody who knows MIG UUIDs.
    pub fn select_all_with(
        &self,
        paths: &Paths,
        values: &[String],
        by: By,
        mig: &dyn MigSource,
    ) -> Result<BTreeSet<Slot>, Failure> {
        if values.is_empty() {
            return Ok(self.gpus().map(|device| device.slot).collect());
        }
        let mut slots = BTreeSet::new();
        for value in values {
            slots.extend(self.select(paths, value, by, mig)?);
        }
        Ok(slots)
    }

    /// One `--gpu` value.
    pub fn select(&self, paths: &Paths, value: &str, by: By, mig: &dyn MigSource) -> Result<BTreeSet<Slot>, Failure> {
        let found: Vec<&Device> = if value == "all" {
            // Nothing to choose from is not a wrong choice.
            return Ok(self.gpus().map(|device| device.slot).collect());
        } else if let Some(rest) = strip_prefix_ignoring_case(value, "MIG-") {
            vec![self.by_mig(value, rest, mig)?]
        } else if let Ok(number) = value.parse::<u32>() {
            self.by_position(number, by)
        } else if value.starts_with('/') {
            self.by_path(paths, Path::new(value)).into_iter().collect()
        } else if let Some(address) = Address::parse(value) {
            self.gpus().filter(|device| device.bdf.as_deref().is_some_and(|bdf| address.matches(bdf))).collect()
        } else {
            self.by_uuid(value)
        };
        match found.as_slice() {
            [] => Err(Failure::usage(format!("no such GPU: {value}; {}", self.choices()))),
            [device] => Ok(BTreeSet::from([device.slot])),
            several => {
                let names: Vec<String> = several.iter().map(|device| describe(device)).collect();
                Err(Failure::usage(format!("{value} fits more than one GPU: {}", names.join(", "))))
            }
        }
    }

    /// Numbers mean GPUs; where there are none, stand-ins by position.
    fn by_position(&self, number: u32, by: By) -> Vec<&Device> {
        let real = self.gpus().any(|device| device.kind == DeviceKind::Gpu && device.minor.is_some());
        let wanted = if real { DeviceKind::Gpu } else { DeviceKind::Standin };
        self.gpus()
            .filter(|device| device.kind == wanted)
            .filter(|device| match by {
                By::Index if real => device.index == Some(number),
                By::Minor | By::Index => device.gpu == Some(number),
            })
            .collect()
    }

    /// By the number behind the path, so that any other node of the same device will do; a node that is gone is still
    /// known by name.
    fn by_path(&self, paths: &Paths, path: &Path) -> Option<&Device> {
        match fs::metadata(under(&paths.dev, path)) {
            Ok(meta) if meta.file_type().is_char_device() => self.by_rdev(meta.rdev()),
            _ => self.list().iter().find(|device| device.node == path),
        }
    }

    /// A whole UUID or a beginning that only one GPU has.
    fn by_uuid(&self, value: &str) -> Vec<&Device> {
        let wanted = value.to_ascii_lowercase();
        if !wanted.starts_with("gpu-") || wanted.len() < "gpu-0".len() {
            return Vec::new();
        }
        self.gpus()
            .filter(|device| device.uuid.as_ref().is_some_and(|uuid| uuid.to_ascii_lowercase().starts_with(&wanted)))
            .collect()
    }

    /// The capability of the compute instance, which every process that works there has open, and nobody else. That of
    /// the GPU instance above it is open in the processes of the neighbours too.
    fn by_mig(&self, value: &str, rest: &str, mig: &dyn MigSource) -> Result<&Device, Failure> {
        let MigInstance { gpu, gi, ci } = match rest.split('/').collect::<Vec<_>>().as_slice() {
            // The form before driver 470: the GPU's UUID and both numbers.
            [uuid, gi, ci] => {
                let (Ok(gi), Ok(ci)) = (gi.parse(), ci.parse()) else {
                    return Err(Failure::usage(format!(
                        "{value} is not MIG-GPU-<uuid>/<GPU instance>/<compute instance>"
                    )));
                };
                match self.by_uuid(uuid).as_slice() {
                    [Device { gpu: Some(gpu), .. }] => MigInstance { gpu: *gpu, gi, ci },
                    _ => return Err(Failure::usage(format!("no such GPU: {uuid}; {}", self.choices()))),
                }
            }
            [""] => return Err(Failure::usage(format!("{value} is not the UUID of a MIG device"))),
            [_] => mig
                .resolve(value)
                .map_err(|missing| Failure::unsupported(format!("to find {value} takes {missing}")))?
                .ok_or_else(|| Failure::usage(format!("no such MIG device: {value}")))?,
            _ => {
                return Err(Failure::usage(format!("{value} is not MIG-GPU-<uuid>/<GPU instance>/<compute instance>")));
            }
        };
        let has_name =
            |device: &&Device, name: &str| device.kind == DeviceKind::Cap && device.model.as_deref() == Some(name);
        let find = |name: &str| self.list().iter().find(|device| has_name(device, name));
        find(&format!("gpu{gpu}/gi{gi}/ci{ci}/access")).ok_or_else(|| {
            // The driver makes a node for what exists.
            let what =
                if find(&format!("gpu{gpu}/gi{gi}/access")).is_some() { "compute instance" } else { "GPU instance" };
            Failure::usage(format!("no such MIG device: {value}; /dev/nvidia{gpu} has no node for that {what}"))
        })
    }

    fn choices(&self) -> String {
        let names: Vec<String> = self.gpus().filter(|device| device.minor.is_some()).map(describe).collect();
        if names.is_empty() { "this host has none".to_owned() } else { format!("there is {}", names.join(", ")) }
    }
}

fn strip_prefix_ignoring_case<'a>(text: &'a str, prefix: &str) -> Option<&'a str> {
    let (head, rest) = text.split_at_checked(prefix.len())?;
    head.eq_ignore_ascii_case(prefix).then_some(rest)
}

fn describe(device: &Device) -> String {
    let Device { node, index, uuid, bdf, .. } = device;
    let details: Vec<String> =
        [index.map(|index| format!("index {index}")), uuid.clone(), bdf.clone()].into_iter().flatten().collect();
    let node = node.display();
    if details.is_empty() { node.to_string() } else { format!("{node} ({})", details.join(", ")) }
}

/// A PCI address as people write it: `0000:00:06.0`, `00000000:00:06.0` (nvidia-smi), `00:06.0`, in any case.
struct Address {
    domain: Option<u32>,
    rest: (u32, u32, u32),
}

impl Address {
    fn parse(text: &str) -> Option<Self> {
        let hex = |part: &str, longest: usize| {
            let valid = !part.is_empty() && part.len() <= longest && part.bytes().all(|byte| byte.is_ascii_hexdigit());
            valid.then(|| u32::from_str_radix(part, 16).ok()).flatten()
        };
        let (head, function) = text.rsplit_once('.')?;
        let mut parts = head.rsplit(':');
        let device = hex(parts.next()?, 2)?;
        let bus = hex(parts.next()?, 2)?;
        let domain = match parts.next() {
            Some(domain) => Some(hex(domain, 8)?),
            None => None,
        };
        parts.next().is_none().then_some(())?;
        Some(Self { domain, rest: (bus, device, hex(function, 1)?) })
    }

    fn matches(&self, bdf: &str) -> bool {
        Self::parse(bdf).is_some_and(|other| {
            self.rest == other.rest && (self.domain.is_none() || self.domain == other.domain.or(Some(0)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::StandIn, error::Failure, gpu::devices::discover};

    /// Two GPUs whose minors and PCI addresses are in opposite order, in two PCI domains.
    fn host() -> (tempfile::TempDir, Paths, Devices) {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths { proc: dir.path().join("proc"), dev: dir.path().join("dev"), ..Paths::default() };
        fs::create_dir_all(&paths.dev).unwrap();
        for (bdf, minor, uuid) in [("0000:C1:00.0", 1, "GPU-aaaa1111"), ("0001:c1:00.0", 0, "GPU-aaaa2222")] {
            let place = paths.proc.join("driver/nvidia/gpus").join(bdf.to_lowercase());
            fs::create_dir_all(&place).unwrap();
            let text = format!("GPU UUID: \t {uuid}\nBus Location: \t {bdf}\nDevice Minor: \t {minor}\n");
            fs::write(place.join("information"), text).unwrap();
        }
        fs::write(paths.proc.join("devices"), "Character devices:\n195 nvidia\n").unwrap();
        let devices = discover(&paths, &[StandIn::new(4, 20, "/dev/tty20".into()).unwrap()]).unwrap();
        (dir, paths, devices)
    }

    #[test]
    fn names_of_a_gpu() {
        let (_dir, paths, devices) = host();
        let select = |value: &str, by| -> Result<Vec<String>, String> {
            let slots = devices.select(&paths, value, by, &NoMig).map_err(|Failure { message, .. }| message)?;
            Ok(slots.iter().map(|slot| devices.get(*slot).unwrap().node.display().to_string()).collect())
        };
        for (value, by, expected) in [
            ("0", By::Minor, "/dev/nvidia0"),
            ("1", By::Minor, "/dev/nvidia1"),
            ("0", By::Index, "/dev/nvidia1"),
            ("1", By::Index, "/dev/nvidia0"),
            ("/dev/nvidia1", By::Minor, "/dev/nvidia1"),
            ("/dev/nvidiactl", By::Minor, "/dev/nvidiactl"),
            ("/dev/tty20", By::Minor, "/dev/tty20"),
            ("GPU-aaaa2222", By::Minor, "/dev/nvidia0"),
            ("gpu-AAAA1", By::Minor, "/dev/nvidia1"),
            ("0000:c1:00.0", By::Minor, "/dev/nvidia1"),
            ("00000001:C1:00.0", By::Minor, "/dev/nvidia0"),
        ] {
            assert_eq!(select(value, by), Ok(vec![expected.to_owned()]), "{value} {by:?}");
        }
        assert_eq!(select("all", By::Minor).unwrap(), ["/dev/nvidia0", "/dev/nvidia1", "/dev/tty20", "/dev/nvidia*"]);
        for (value, expected) in [
            ("GPU-aaaa", "GPU-aaaa fits more than one GPU: /dev/nvidia0 (index 1, GPU-aaaa2222, 0001:c1:00.0), "),
            ("c1:00.0", "c1:00.0 fits more than one GPU"),
            ("2", "no such GPU: 2; there is /dev/nvidia0 (index 1, GPU-aaaa2222, 0001:c1:00.0), /dev/nvidia1 ("),
            ("20", "no such GPU"),
            ("GPU-", "no such GPU"),
            ("", "no such GPU"),
            ("MIG-aaaa1111", "to find MIG-aaaa1111 takes NVML, which is not asked here"),
            ("/dev/null", "no such GPU: /dev/null"),
            ("é:é.é", "no such GPU"),
            ("::.", "no such GPU"),
            ("0000:00:c1:00.0", "no such GPU"),
        ] {
            let message = select(value, By::Minor).unwrap_err();
            assert!(message.starts_with(expected), "{value}: {message}");
        }
    }

    /// As /proc and /dev of two partitioned GPUs: of GPU 0 the GPU instances 1, with one compute instance, and 2, with
    /// two.
    fn partitioned() -> (tempfile::TempDir, Paths, Devices) {
        let (dir, paths, _) = host();
        let recorded =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/h200/proc/driver/nvidia-caps/mig-minors");
        let lists = paths.proc.join("driver/nvidia-caps");
        fs::create_dir_all(&lists).unwrap();
        fs::copy(recorded, lists.join("mig-minors")).unwrap();
        fs::write(paths.proc.join("devices"), "Character devices:\n195 nvidia\n508 nvidia-caps\n").unwrap();
        let nodes = paths.dev.join("nvidia-caps");
        fs::create_dir_all(&nodes).unwrap();
        for minor in [1, 2, 12, 13, 21, 22, 23] {
            fs::write(nodes.join(format!("nvidia-cap{minor}")), "").unwrap();
        }
        let devices = discover(&paths, &[]).unwrap();
        (dir, paths, devices)
    }

    struct Nvml;

    impl MigSource for Nvml {
        fn resolve(&self, uuid: &str) -> Result<Option<MigInstance>, String> {
            match uuid {
                "MIG-b1" => Ok(Some(MigInstance { gpu: 0, gi: 2, ci: 1 })),
                "MIG-elsewhere" => Ok(Some(MigInstance { gpu: 1, gi: 0, ci: 0 })),
                "MIG-hang" => Err("NVML, which does not answer".to_owned()),
                _ => Ok(None),
            }
        }
    }

    #[test]
    fn compute_instances() {
        let (_dir, paths, devices) = partitioned();
        let select = |value: &str, mig: &dyn MigSource| -> Result<Vec<String>, (u8, String)> {
            let slots = devices.select(&paths, value, By::Minor, mig);
            let slots = slots.map_err(|Failure { exit, message }| (exit as u8, message))?;
            assert!(slots.iter().all(|slot| devices.by_handle().contains(slot)), "{value} counts by handle");
            Ok(slots.iter().map(|slot| devices.get(*slot).unwrap().node.display().to_string()).collect())
        };
        for (value, minor) in [
            // Minor 0, index 1.
            ("MIG-GPU-aaaa2222/1/0", 13),
            ("mig-gpu-AAAA2222/2/0", 22),
            ("MIG-GPU-aaaa2222/2/1", 23),
            ("MIG-b1", 23),
        ] {
            assert_eq!(select(value, &Nvml), Ok(vec![format!("/dev/nvidia-caps/nvidia-cap{minor}")]), "{value}");
        }
        for (value, exit, expected) in [
            (
                "MIG-GPU-aaaa2222/2/2",
                2,
                "no such MIG device: MIG-GPU-aaaa2222/2/2; /dev/nvidia0 has no node for that compute",
            ),
            (
                "MIG-GPU-aaaa2222/3/0",
                2,
                "no such MIG device: MIG-GPU-aaaa2222/3/0; /dev/nvidia0 has no node for that GPU",
            ),
            ("MIG-elsewhere", 2, "no such MIG device: MIG-elsewhere; /dev/nvidia1 has no node for that GPU"),
            ("MIG-GPU-bbbb/1/0", 2, "no such GPU: GPU-bbbb; there is"),
            ("MIG-GPU-aaaa/1/0", 2, "no such GPU: GPU-aaaa; there is"),
            ("MIG-GPU-aaaa2222/1", 2, "MIG-GPU-aaaa2222/1 is not MIG-GPU-<uuid>/"),
            ("MIG-GPU-aaaa2222/x/0", 2, "MIG-GPU-aaaa2222/x/0 is not MIG-GPU-<uuid>/"),
            ("MIG-unknown", 2, "no such MIG device: MIG-unknown"),
            ("MIG-", 2, "MIG- is not the UUID of a MIG device"),
            ("MIG-hang", 8, "to find MIG-hang takes NVML, which does not answer"),
        ] {
            let (code, message) = select(value, &Nvml).unwrap_err();
            assert!(code == exit && message.starts_with(expected), "{value}: {code} {message}");
        }
        assert_eq!(select("MIG-b1", &NoMig).unwrap_err().0, 8);
        // The GPU itself is chosen as ever, and none of its instances.
        assert_eq!(devices.select(&paths, "0", By::Minor, &NoMig).unwrap().len(), 1);
    }

    #[test]
    fn any_node_of_the_same_number_will_do() {
        let paths = Paths { proc: "/nonexistent".into(), ..Paths::default() };
        let devices = discover(&paths, &[StandIn::new(1, 3, "/dev/other-null".into()).unwrap()]).unwrap();
        assert_eq!(devices.select(&paths, "/dev/null", By::Minor, &NoMig).unwrap().len(), 1);
        assert_eq!(devices.select(&paths, "/dev/other-null", By::Minor, &NoMig).unwrap().len(), 1);
        // Without a real GPU numbers mean stand-ins.
        assert_eq!(devices.select(&paths, "0", By::Index, &NoMig).unwrap().len(), 1);
        assert!(devices.select(&paths, "1", By::Minor, &NoMig).is_err());
    }

    #[test]
    fn a_host_without_devices() {
        let paths = Paths { proc: "/nonexistent".into(), ..Paths::default() };
        let devices = discover(&paths, &[]).unwrap();
        assert!(devices.select_all(&paths, &[], By::Minor).unwrap().is_empty());
        let message = devices.select(&paths, "0", By::Minor, &NoMig).unwrap_err().message;
        assert_eq!(message, "no such GPU: 0; this host has none");
    }
}
