//! One look at the kernel's side for those who ask for numbers, through pins of its own: neither the daemon's loop nor the
//! recorder waits for it.

use std::os::fd::AsFd as _;

use gpureap_common::counter;

use crate::{
    bpf::{
        eyes::{self, KernelEyes},
        sys,
    },
    clock::wall_offset_ns,
    config::Config,
    gpu::devices::Devices,
    model::{Device, Eyes as _, View},
    out::{complaint::Complaint, words::word},
    reap::report::Count,
};

/// As it was at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Look {
    pub devices: Vec<DeviceNumbers>,
    pub complete: bool,
    /// Nanoseconds since 1970.
    pub swept_unix_ns: Option<i64>,
    /// Since the programs were attached.
    pub lost: Vec<(&'static str, u64)>,
    pub maps: Vec<MapNumbers>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceNumbers {
    pub node: String,
    /// What else people call it.
    pub about: Vec<(&'static str, String)>,
    pub holders: u32,
    /// `None`: they cannot be counted.
    pub open_files: Option<u32>,
    pub orphan_files: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapNumbers {
    pub name: &'static str,
    pub entries: u64,
    pub capacity: u64,
}

impl Look {
    pub fn take(eyes: &KernelEyes) -> anyhow::Result<Self> {
        let view = eyes.view()?;
        let handles = eyes.handles();
        let maps = &handles.maps;
        let mut lost = Vec::new();
        for index in counter::LOSSES.into_iter().chain([counter::RING_FULL]) {
            lost.push((counter::NAMES[index as usize], maps.counter(index)?));
        }
        lost.push(("skipped", handles.skipped()?));
        let room = |map: &std::os::fd::OwnedFd| sys::map_shape(map.as_fd()).map(|shape| u64::from(shape.max_entries));
        let numbers = |name, entries: usize, capacity| MapNumbers { name, entries: entries as u64, capacity };
        let mut fill = vec![
            numbers("files", handles.files()?.len(), room(&maps.files)?),
            numbers("tables", handles.tables()?.len(), room(&maps.tables)?),
            numbers("holders", handles.holders()?.len(), room(&maps.holders)?),
            numbers("procs", handles.procs()?.len(), room(&maps.procs)?),
        ];
        // It has all processes, and drops the longest unused when it is full: it is not worth a walk through it.
        let capacity = room(&maps.lineage)?;
        let entries = maps.counter(counter::LINEAGE_INSERTS)?.min(capacity);
        fill.push(MapNumbers { name: "lineage", entries, capacity });
        let offset = wall_offset_ns();
        Ok(Self {
            devices: numbers_of(&view, eyes.devices().list()),
            complete: view.complete,
            swept_unix_ns: view.swept_ns.map(|at| offset.saturating_add_unsigned(at)),
            lost,
            maps: fill,
        })
    }
}

/// Of each device. One that stands for all other minors has its own line, as it is counted by itself.
pub fn numbers_of(view: &View, devices: &[Device]) -> Vec<DeviceNumbers> {
    devices
        .iter()
        .map(|device| {
            let Count { holders, open_files } = Count::of(view, device.slot);
            let orphans = view.orphans.iter().filter(|orphan| orphan.slot == device.slot);
            let text = |value: &Option<String>| value.clone().unwrap_or_default();
            let number = |value: Option<u32>| value.map(|value| value.to_string()).unwrap_or_default();
            DeviceNumbers {
                node: device.node.display().to_string(),
                about: vec![
                    ("kind", word(&device.kind)),
                    ("gpu", number(device.gpu)),
                    ("index", number(device.index)),
                    ("uuid", text(&device.uuid)),
                    ("pci_address", text(&device.bdf)),
                    ("model", text(&device.model)),
                ],
                holders,
                open_files: open_files.or_else(|| view.open_files.get(&device.slot).copied()),
                orphan_files: orphans.map(|orphan| orphan.files).sum(),
            }
        })
        .collect()
}

/// Keeps the pins open between two looks.
#[derive(Debug)]
pub struct Looker {
    config: Config,
    eyes: Option<KernelEyes>,
    complaint: Complaint,
}

impl Looker {
    pub const fn new(config: Config) -> Self {
        Self { config, eyes: None, complaint: Complaint::none() }
    }

    /// The devices are others than before.
    pub fn forget(&mut self) {
        self.eyes = None;
    }

    pub fn look(&mut self, devices: &Devices) -> Option<Look> {
        match self.try_look(devices) {
            Ok(look) => {
                self.complaint.end();
                Some(look)
            }
            Err(error) => {
                let reason = format!("{error:#}");
                if self.complaint.is_news(&reason) {
                    tracing::warn!("metrics: nobody can look: {reason}");
                }
                self.eyes = None;
                None
            }
        }
    }

    fn try_look(&mut self, devices: &Devices) -> anyhow::Result<Look> {
        let eyes = match self.eyes.take() {
            Some(eyes) => eyes,
            None => eyes::from_pins(&self.config, devices)?
                .map_err(|notes| anyhow::anyhow!("no pins to read: {}", notes.join("; ")))?,
        };
        let look = Look::take(&eyes)?;
        self.eyes = Some(eyes);
        Ok(look)
    }
}
