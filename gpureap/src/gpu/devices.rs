//! Which device numbers matter, and what they are: from /proc/devices, the driver's /proc files and the nodes that exist.
//!
//! Majors other than 195 are handed out at module load, so nothing here outlives a reload of the driver; see
//! [`Devices::fingerprint`].

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io::{BufRead as _, BufReader},
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use gpureap_common::abi::{ANY_MINOR, MAX_SLOTS, MINOR_BITS, dev};

use crate::{
    config::{Paths, StandIn},
    error::Failure,
    model::{Device, DeviceKind, Slot, node_name},
};

/// Minors of the 195 major that are no GPU (`nv_linux.h`, `nv-modeset-interface.h` of the open kernel modules).
const CTL_MINOR: u32 = 255;
const MODESET_MINOR: u32 = 254;
/// `nvidia-nvswitchctl` (`linux_nvswitch.c`).
const NVSWITCH_CTL_MINOR: u32 = 255;

/// The device table: slots are dense from 0, in the order of [`Devices::list`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Devices {
    list: Vec<Device>,
    by_dev: HashMap<u32, Slot>,
    /// Slots whose node exists.
    present: BTreeSet<Slot>,
    notes: Vec<String>,
    /// Devices of this host that the tracer does not count.
    untraced: bool,
    fingerprint: u64,
}

impl Devices {
    /// A table that somebody else has made, as the daemon did for those who ask it.
    pub fn told(list: Vec<Device>, present: BTreeSet<Slot>, notes: Vec<String>) -> Self {
        let by_dev = list.iter().map(|device| (device.number(), device.slot)).collect();
        Self { list, by_dev, present, notes, untraced: false, fingerprint: 0 }
    }

    /// GPUs by minor, stand-ins as configured, ctl, modeset, uvm, uvm-tools, nvswitch, nvlink, caps, imex channels, and
    /// at the end one wildcard entry for each NVIDIA major.
    pub fn list(&self) -> &[Device] {
        &self.list
    }

    /// No driver and no stand-in.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub fn get(&self, slot: Slot) -> Option<&Device> {
        // Dense unless the kernel's table gave the slots, as after a reload of the driver.
        match self.list.get(slot as usize) {
            Some(device) if device.slot == slot => Some(device),
            _ => self.list.iter().find(|device| device.slot == slot),
        }
    }

    /// What people call it.
    pub fn node(&self, slot: Slot) -> String {
        node_name(self.get(slot), slot)
    }

    /// By device number; an unknown minor of an NVIDIA major belongs to the wildcard entry of that major.
    pub fn by_number(&self, major: u32, minor: u32) -> Option<&Device> {
        let slot = |minor| self.by_dev.get(&dev(major, minor));
        if major >= 1 << (32 - MINOR_BITS) || minor > ANY_MINOR {
            return None;
        }
        slot(minor).or_else(|| slot(ANY_MINOR)).and_then(|slot| self.get(*slot))
    }

    /// By `st_rdev` as stat(2) reports it.
    pub fn by_rdev(&self, rdev: u64) -> Option<&Device> {
        self.by_number(rustix::fs::major(rdev), rustix::fs::minor(rdev))
    }

    /// Whether the device's own node exists in /dev.
    pub fn is_present(&self, slot: Slot) -> bool {
        self.present.contains(&slot)
    }

    /// GPUs and stand-ins, what `all` means.
    pub fn gpus(&self) -> impl Iterator<Item = &Device> {
        self.list.iter().filter(|device| device.kind.is_gpu())
    }

    /// Capabilities to work in a part of a GPU: nobody maps one, so a handle is all that there is to count.
    pub fn by_handle(&self) -> BTreeSet<Slot> {
        let is_part = |device: &&Device| {
            device.kind == DeviceKind::Cap && device.model.as_ref().is_some_and(|name| name.starts_with("gpu"))
        };
        self.list.iter().filter(is_part).map(|device| device.slot).collect()
    }

    /// Plain sentences about what could not be told apart.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Whether a device of this host is not counted: nobody who holds it is seen.
    pub const fn has_untraced(&self) -> bool {
        self.untraced
    }

    /// Changes when the driver was reloaded or the table became another one.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
}

/// Looks at the host. Without a driver and stand-ins the table is empty, which is no error.
pub fn discover(paths: &Paths, stand_ins: &[StandIn]) -> Result<Devices, Failure> {
    let majors = Majors::read(&paths.proc);
    let mut notes = Vec::new();
    let mut named: Vec<Device> = Vec::new();
    if let Some(major) = majors.gpu {
        named.extend(gpus(paths, major, &mut notes));
    }
    let gpu_count = named.len();
    for (position, StandIn { major, minor, node }) in stand_ins.iter().enumerate() {
        named.push(Device {
            gpu: Some(position as u32),
            ..plain(DeviceKind::Standin, node.clone(), *major, Some(*minor))
        });
    }
    named.extend(shared(paths, &majors));

    let wildcards = majors.wildcards();
    let room = MAX_SLOTS as usize - wildcards.len();
    if stand_ins.len() > room.saturating_sub(gpu_count) {
        return Err(Failure::usage(format!(
            "{} stand-in devices are too many: {room} devices have room",
            stand_ins.len()
        )));
    }
    if named.len() > room {
        notes.push(format!(
            "{} device nodes have no entry of their own and are counted together with others of their kind",
            named.len() - room
        ));
        named.truncate(room);
    }
    let mut devices = Devices { notes, ..Devices::default() };
    for mut device in named.into_iter().chain(wildcards) {
        let slot = devices.list.len() as Slot;
        let number = device.number();
        if devices.by_dev.contains_key(&number) {
            if device.kind == DeviceKind::Standin {
                let (node, Device { major, minor, .. }) = (device.node.display(), &device);
                let minor = minor.unwrap_or(ANY_MINOR);
                return Err(Failure::usage(format!("the stand-in {node} ({major}:{minor}) is a real NVIDIA device")));
            }
            continue;
        }
        device.slot = slot;
        if device.minor.is_some() && under(&paths.dev, &device.node).exists() {
            devices.present.insert(slot);
        }
        devices.by_dev.insert(number, slot);
        devices.list.push(device);
    }
    devices.fingerprint = fingerprint(paths, &devices.list);
    Ok(devices)
}

/// A table of stand-ins and nothing else, whatever driver is loaded.
pub fn stand_ins_alone(stand_ins: &[StandIn]) -> Result<Devices, Failure> {
    let paths = Paths { proc: PathBuf::from("/nonexistent"), ..Paths::default() };
    discover(&paths, stand_ins)
}

/// Where a `/dev/...` path really is when the dev root was moved.
pub(super) fn under(root: &Path, node: &Path) -> PathBuf {
    node.strip_prefix("/dev").map_or_else(|_| node.to_owned(), |rest| root.join(rest))
}

fn plain(kind: DeviceKind, node: impl Into<PathBuf>, major: u32, minor: Option<u32>) -> Device {
    Device {
        slot: 0,
        node: node.into(),
        major,
        minor,
        kind,
        gpu: None,
        index: None,
        uuid: None,
        bdf: None,
        model: None,
    }
}

/// The NVIDIA majors of this boot.
#[derive(Default)]
struct Majors {
    gpu: Option<u32>,
    uvm: Option<u32>,
    nvswitch: Option<u32>,
    nvlink: Option<u32>,
    caps: Option<u32>,
    imex: Option<u32>,
}

impl Majors {
    fn read(proc: &Path) -> Self {
        let mut majors = Self::default();
        let text = fs::read(proc.join("devices")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        // Block devices have majors of their own: the same number there means something else.
        for line in text.lines().take_while(|line| !line.starts_with("Block devices")) {
            let Some((number, name)) = line.trim().split_once(' ') else { continue };
            let Ok(number) = number.parse::<u32>() else { continue };
            let place = match name.trim() {
                // `nvidia-frontend` until driver 545.
                "nvidia" | "nvidia-frontend" | "nvidiactl" | "nvidia-modeset" => &mut majors.gpu,
                "nvidia-uvm" => &mut majors.uvm,
                "nvidia-nvswitch" => &mut majors.nvswitch,
                "nvidia-nvlink" => &mut majors.nvlink,
                "nvidia-caps" => &mut majors.caps,
                "nvidia-caps-imex-channels" => &mut majors.imex,
                _ => continue,
            };
            *place = Some(number);
        }
        majors
    }

    /// One entry for each major, so that a minor nobody told us about is never missed. On the GPUs' major it counts as
    /// a GPU: what is unknown there can only be one.
    fn wildcards(&self) -> Vec<Device> {
        let Self { gpu, uvm, nvswitch, nvlink, caps, imex } = *self;
        [
            (gpu, DeviceKind::Gpu, "/dev/nvidia*"),
            (uvm, DeviceKind::Uvm, "/dev/nvidia-uvm*"),
            (nvswitch, DeviceKind::Nvswitch, "/dev/nvidia-nvswitch*"),
            (nvlink, DeviceKind::Nvlink, "/dev/nvidia-nvlink*"),
            (caps, DeviceKind::Cap, "/dev/nvidia-caps/*"),
            (imex, DeviceKind::Imex, "/dev/nvidia-caps-imex-channels/*"),
        ]
        .into_iter()
        .filter_map(|(major, kind, node)| Some(plain(kind, node, major?, None)))
        .collect()
    }
}

/// GPUs by minor: those that the driver lists, with or without a node, and those that only have a node (the driver's
/// files may be hidden from a container).
fn gpus(paths: &Paths, major: u32, notes: &mut Vec<String>) -> Vec<Device> {
    let mut found: BTreeMap<u32, Device> = BTreeMap::new();
    for entry in fs::read_dir(paths.proc.join("driver/nvidia/gpus")).into_iter().flatten().flatten() {
        let address = entry.file_name().to_string_lossy().into_owned();
        let text = fs::read(entry.path().join("information")).unwrap_or_default();
        let Information { minor, uuid, bdf, model } = Information::parse(&String::from_utf8_lossy(&text));
        let Some(minor) = minor else {
            notes.push(format!("the driver tells no device minor of the GPU at {address}; it counts as /dev/nvidia*"));
            continue;
        };
        let device = plain(DeviceKind::Gpu, format!("/dev/nvidia{minor}"), major, Some(minor));
        found.insert(minor, Device { gpu: Some(minor), uuid, bdf: bdf.or(Some(address)), model, ..device });
    }
    // NVML numbers the GPUs in the order of their PCI addresses.
    let mut addresses: Vec<String> = found.values().filter_map(|device| device.bdf.clone()).collect();
    addresses.sort();
    for device in found.values_mut() {
        let position = addresses.iter().position(|address| Some(address) == device.bdf.as_ref());
        device.index = position.map(|position| position as u32);
    }
    for minor in numbered(&paths.dev, "nvidia", major) {
        if minor < MODESET_MINOR {
            let device = plain(DeviceKind::Gpu, format!("/dev/nvidia{minor}"), major, Some(minor));
            found.entry(minor).or_insert(Device { gpu: Some(minor), ..device });
        }
    }
    found.into_values().collect()
}

#[derive(Default)]
struct Information {
    minor: Option<u32>,
    uuid: Option<String>,
    bdf: Option<String>,
    model: Option<String>,
}

impl Information {
    fn parse(text: &str) -> Self {
        let mut result = Self::default();
        for line in text.lines() {
            let Some((name, value)) = line.split_once(':') else { continue };
            let value = value.trim();
            match name.trim() {
                "Device Minor" => result.minor = value.parse().ok().filter(|minor| *minor < MODESET_MINOR),
                // Question marks until the GPU has been initialised once.
                "GPU UUID" if !value.is_empty() && !value.contains('?') => result.uuid = Some(value.to_owned()),
                "Bus Location" if !value.is_empty() => result.bdf = Some(value.to_ascii_lowercase()),
                "Model" if !value.is_empty() => result.model = Some(value.to_owned()),
                _ => {}
            }
        }
        result
    }
}

/// The nodes that all GPUs share.
fn shared(paths: &Paths, majors: &Majors) -> Vec<Device> {
    let mut list = Vec::new();
    if let Some(major) = majors.gpu {
        list.push(plain(DeviceKind::Ctl, "/dev/nvidiactl", major, Some(CTL_MINOR)));
        list.push(plain(DeviceKind::Modeset, "/dev/nvidia-modeset", major, Some(MODESET_MINOR)));
    }
    if let Some(major) = majors.uvm {
        list.push(plain(DeviceKind::Uvm, "/dev/nvidia-uvm", major, Some(0)));
        list.push(plain(DeviceKind::UvmTools, "/dev/nvidia-uvm-tools", major, Some(1)));
    }
    if let Some(major) = majors.nvswitch {
        for minor in numbered(&paths.dev, "nvidia-nvswitch", major) {
            list.push(plain(DeviceKind::Nvswitch, format!("/dev/nvidia-nvswitch{minor}"), major, Some(minor)));
        }
        list.push(plain(DeviceKind::Nvswitch, "/dev/nvidia-nvswitchctl", major, Some(NVSWITCH_CTL_MINOR)));
    }
    if let Some(major) = majors.nvlink {
        list.push(plain(DeviceKind::Nvlink, "/dev/nvidia-nvlink", major, Some(0)));
    }
    if let Some(major) = majors.caps {
        // The driver has thousands of capabilities; the few with a node are the few that can be held.
        let minors = numbered(&paths.dev.join("nvidia-caps"), "nvidia-cap", major);
        let names = capability_names(&paths.proc, &minors);
        for minor in minors {
            let device = plain(DeviceKind::Cap, format!("/dev/nvidia-caps/nvidia-cap{minor}"), major, Some(minor));
            list.push(Device { model: names.get(&minor).cloned(), ..device });
        }
    }
    if let Some(major) = majors.imex {
        for minor in numbered(&paths.dev.join("nvidia-caps-imex-channels"), "channel", major) {
            let node = format!("/dev/nvidia-caps-imex-channels/channel{minor}");
            list.push(plain(DeviceKind::Imex, node, major, Some(minor)));
        }
    }
    list
}

/// Minors of the nodes PREFIX<N> in a directory. A node left over from an earlier load has another major and is no device.
fn numbered(dir: &Path, prefix: &str, major: u32) -> BTreeSet<u32> {
    let mut minors = BTreeSet::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let digits = name.to_str().and_then(|name| name.strip_prefix(prefix));
        let Some(minor) = digits.and_then(|digits| digits.parse::<u32>().ok()).filter(|minor| *minor < ANY_MINOR)
        else {
            continue;
        };
        match fs::metadata(entry.path()) {
            Ok(meta) if meta.file_type().is_char_device() => {
                if rustix::fs::major(meta.rdev()) == major {
                    minors.insert(rustix::fs::minor(meta.rdev()));
                }
            }
            _ => {
                minors.insert(minor);
            }
        }
    }
    minors
}

/// What the wanted capabilities are for: `gpu0/gi1/access`. The list is long, reading ends with the last one wanted.
fn capability_names(proc: &Path, wanted: &BTreeSet<u32>) -> BTreeMap<u32, String> {
    let mut names = BTreeMap::new();
    for list in ["sys-minors", "mig-minors"] {
        if names.len() == wanted.len() {
            break;
        }
        let Ok(file) = fs::File::open(proc.join("driver/nvidia-caps").join(list)) else { continue };
        for line in BufReader::new(file).lines().map_while(Result::ok) {
            let Some((name, minor)) = line.rsplit_once(' ') else { continue };
            if let Some(minor) = minor.parse().ok().filter(|minor| wanted.contains(minor)) {
                names.insert(minor, name.to_owned());
                if names.len() == wanted.len() {
                    break;
                }
            }
        }
    }
    names
}

/// The table and the identity of the loaded modules: their sysfs and proc directories are made anew at each load.
fn fingerprint(paths: &Paths, list: &[Device]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for Device { slot, node, major, minor, kind, gpu: _, index: _, uuid, bdf, model: _ } in list {
        (slot, node, major, minor, kind, uuid, bdf).hash(&mut hasher);
    }
    for place in
        [paths.sys.join("module/nvidia"), paths.sys.join("module/nvidia_uvm"), paths.proc.join("driver/nvidia")]
    {
        fs::metadata(place).ok().map(|meta| (meta.ino(), meta.dev())).hash(&mut hasher);
    }
    hasher.finish()
}

mod slots;
#[cfg(test)]
mod tests;
