//! The maps of a fence.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
};

use anyhow::Context as _;
use gpureap_common::{
    fence::{Exempt, Fence, TICK_NS, Tally, Trier, TrierKey, exempt, ticks},
    record::{Device, Meta},
};

use super::{Denied, Exemptions, Standing};
use crate::{
    bpf::{
        handles::{PinError, check_meta, pinned_map},
        load::{self, Loaded},
        sys,
    },
    gpu::devices::Devices,
    model::{ProcKey, Slot},
    track::join::text,
};

/// Names, with the sizes of key and value that this build reads.
const MAPS: [(&str, usize, usize); 7] = [
    ("META", 4, size_of::<Meta>()),
    ("MAJORS", 4, 4),
    ("DEVICES", 4, size_of::<Device>()),
    ("FENCE", 4, size_of::<Fence>()),
    ("FENCE_TALLY", 4, size_of::<Tally>()),
    ("EXEMPT", size_of::<Exempt>(), 4),
    ("DENIED", size_of::<TrierKey>(), size_of::<Trier>()),
];

#[derive(Debug)]
pub(super) struct Maps {
    meta: OwnedFd,
    majors: OwnedFd,
    devices: OwnedFd,
    fence: OwnedFd,
    tally: OwnedFd,
    exempt: OwnedFd,
    denied: OwnedFd,
}

impl Maps {
    fn open<E>(mut one: impl FnMut(&str, usize, usize) -> Result<OwnedFd, E>) -> Result<Self, E> {
        let [meta, majors, devices, fence, tally, exempt, denied] =
            MAPS.map(|(name, key, value)| one(name, key, value));
        Ok(Self {
            meta: meta?,
            majors: majors?,
            devices: devices?,
            fence: fence?,
            tally: tally?,
            exempt: exempt?,
            denied: denied?,
        })
    }

    pub(super) fn from_object(loaded: &Loaded) -> anyhow::Result<Self> {
        Self::open(|name, _, _| loaded.map(name))
    }

    /// Opens pinned maps. Sizes are checked before anything is read through them, then the ABI record.
    pub(super) fn from_pins(dir: &Path) -> Result<Self, PinError> {
        let maps = Self::open(|name, key, value| pinned_map(dir, name, key, value))?;
        check_meta(maps.meta.as_fd(), dir)?;
        Ok(maps)
    }

    pub(super) fn pin(&self, dir: &Path) -> anyhow::Result<()> {
        let Self { meta, majors, devices, fence, tally, exempt, denied } = self;
        for ((name, ..), map) in MAPS.into_iter().zip([meta, majors, devices, fence, tally, exempt, denied]) {
            sys::pin(map.as_fd(), &dir.join(name)).with_context(|| format!("pin map {name}"))?;
        }
        Ok(())
    }

    pub(super) fn set_meta(&self, meta: &Meta) -> anyhow::Result<()> {
        sys::update(self.meta.as_fd(), &0_u32, meta, sys::ANY).context("map META")?;
        Ok(())
    }

    pub(super) fn table(&self) -> anyhow::Result<Vec<(u32, Device)>> {
        sys::dump(self.devices.as_fd()).context("map DEVICES")
    }

    /// Adds devices under their slots. None is ever removed: it may be fenced, and one that is not costs nothing.
    pub(super) fn add_devices(&self, devices: &Devices) -> anyhow::Result<()> {
        load::add_devices(self.majors.as_fd(), self.devices.as_fd(), devices)
    }

    pub(super) fn exempt(&self, exemptions: &Exemptions) -> anyhow::Result<()> {
        let Exemptions { processes, cgroups } = exemptions;
        let processes =
            processes.iter().map(|key| Exempt { id: ticks(key.start_ns), tgid: key.tgid, kind: exempt::PROCESS });
        let cgroups = cgroups.iter().map(|id| Exempt { id: *id, tgid: 0, kind: exempt::CGROUP });
        for key in processes.chain(cgroups) {
            sys::update(self.exempt.as_fd(), &key, &1_u32, sys::ANY).context("map EXEMPT")?;
        }
        Ok(())
    }

    /// From now on opens of the slot are refused, if the program is attached.
    pub(super) fn close(&self, slot: Slot, fence: Fence) -> anyhow::Result<()> {
        // Counts of the device go on when its deadline moves.
        sys::update(self.tally.as_fd(), &slot, &Tally::default(), sys::NOEXIST).context("map FENCE_TALLY")?;
        sys::update(self.fence.as_fd(), &slot, &fence, sys::ANY).context("map FENCE")?;
        Ok(())
    }

    /// From now on opens of the slot are let through.
    pub(super) fn open_slot(&self, slot: Slot) -> anyhow::Result<()> {
        sys::delete(self.fence.as_fd(), &slot).context("map FENCE")?;
        Ok(())
    }

    pub(super) fn open_all(&self) -> anyhow::Result<()> {
        self.fences()?.into_keys().try_for_each(|slot| self.open_slot(slot))
    }

    /// Forgets what the fence of a slot did.
    pub(super) fn forget(&self, slot: Slot) -> anyhow::Result<()> {
        sys::delete(self.tally.as_fd(), &slot).context("map FENCE_TALLY")?;
        for (key, _) in self.triers()? {
            if key.slot == slot {
                sys::delete(self.denied.as_fd(), &key).context("map DENIED")?;
            }
        }
        Ok(())
    }

    pub(super) fn fences(&self) -> anyhow::Result<BTreeMap<Slot, Fence>> {
        Ok(sys::dump(self.fence.as_fd()).context("map FENCE")?.into_iter().collect())
    }

    pub(super) fn tallies(&self) -> anyhow::Result<BTreeMap<Slot, Tally>> {
        Ok(sys::dump(self.tally.as_fd()).context("map FENCE_TALLY")?.into_iter().collect())
    }

    fn triers(&self) -> anyhow::Result<Vec<(TrierKey, Trier)>> {
        sys::dump(self.denied.as_fd()).context("map DENIED")
    }

    /// The first that tried first.
    pub(super) fn denied(&self) -> anyhow::Result<Vec<Denied>> {
        let mut denied: Vec<Denied> = self
            .triers()?
            .into_iter()
            .map(
                |(
                    TrierKey { start_ns, tgid, slot },
                    Trier { count, first_ns, last_ns, cgroup_id, uid, pad: _, comm },
                )| {
                    Denied {
                        key: ProcKey::new(tgid, start_ns),
                        comm: text(&comm),
                        uid,
                        cgroup_id,
                        slot,
                        count,
                        first_ns,
                        last_ns,
                    }
                },
            )
            .collect();
        denied.sort_by_key(|denied| (denied.first_ns, denied.key, denied.slot));
        Ok(denied)
    }

    /// Who is exempt, and how many have room.
    pub(super) fn exempt_room(&self) -> anyhow::Result<(Exemptions, usize)> {
        let shape = sys::map_shape(self.exempt.as_fd()).context("map EXEMPT")?;
        Ok((self.exemptions()?, shape.max_entries as usize))
    }

    fn exemptions(&self) -> anyhow::Result<Exemptions> {
        let (mut processes, mut cgroups) = (BTreeSet::new(), BTreeSet::new());
        for (Exempt { id, tgid, kind }, _) in sys::dump::<Exempt, u32>(self.exempt.as_fd()).context("map EXEMPT")? {
            match kind {
                exempt::PROCESS => processes.insert(ProcKey::new(tgid, id.saturating_mul(TICK_NS))),
                _ => cgroups.insert(id),
            };
        }
        Ok(Exemptions { processes, cgroups })
    }

    pub(super) fn standing(&self) -> anyhow::Result<Standing> {
        Ok(Standing {
            table: self.table()?,
            fences: self.fences()?,
            tallies: self.tallies()?,
            exempt: self.exemptions()?,
            denied: self.denied()?,
        })
    }
}
