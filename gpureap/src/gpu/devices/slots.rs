//! Slots when the kernel has a device table already: counts in its maps are under the slots that it knows.

use std::collections::{BTreeMap, BTreeSet};

use gpureap_common::{
    abi::{ANY_MINOR, MAX_SLOTS, major, minor},
    record::Device as Traced,
};

use super::{Devices, plain};
use crate::model::{Device, DeviceKind, Slot};

const KINDS: [DeviceKind; 10] = [
    DeviceKind::Gpu,
    DeviceKind::Ctl,
    DeviceKind::Uvm,
    DeviceKind::UvmTools,
    DeviceKind::Modeset,
    DeviceKind::Cap,
    DeviceKind::Imex,
    DeviceKind::Nvswitch,
    DeviceKind::Nvlink,
    DeviceKind::Standin,
];

impl Devices {
    /// The same devices: those that the kernel's table has keep its slots, the others get free ones.
    #[must_use]
    pub fn with_slots_of(&self, table: &[(u32, Traced)]) -> Self {
        let known: BTreeMap<u32, Slot> = table.iter().map(|(number, traced)| (*number, traced.slot)).collect();
        let taken: BTreeSet<Slot> = known.values().copied().collect();
        let mut free = (0..MAX_SLOTS).filter(|slot| !taken.contains(slot));
        let mut notes = self.notes.clone();
        let mut list = Vec::with_capacity(self.list.len());
        for device in &self.list {
            let slot = known.get(&device.number()).copied().or_else(|| free.next());
            let Some(slot) = slot else {
                notes.push(format!("{} has no slot left and is not traced", device.node.display()));
                continue;
            };
            list.push((device.slot, Device { slot, ..device.clone() }));
        }
        self.renumbered(list, notes)
    }

    /// These devices and those of the kernel's table, whose slots stay.
    #[must_use]
    pub fn with_all_of(&self, table: &[(u32, Traced)]) -> Self {
        let own = self.with_slots_of(table);
        let mut all = table.to_vec();
        for device in &own.list {
            let number = device.number();
            if !table.iter().any(|(known, _)| *known == number) {
                all.push((number, Traced { slot: device.slot, kind: device.kind as u32 }));
            }
        }
        own.traced(&all)
    }

    /// What a running tracer counts, with the names that this host's discovery has for it.
    #[must_use]
    pub fn traced(&self, table: &[(u32, Traced)]) -> Self {
        let own: BTreeMap<u32, &Device> = self.list.iter().map(|device| (device.number(), device)).collect();
        let mut notes = self.notes.clone();
        let mut list = Vec::with_capacity(table.len());
        let mut table = table.to_vec();
        table.sort_by_key(|(_, traced)| traced.slot);
        let mut stand_ins = 0;
        for (number, traced) in &table {
            let mut device = own.get(number).copied().cloned().unwrap_or_else(|| {
                let (major, minor) = (major(*number), minor(*number));
                let kind = KINDS.into_iter().find(|kind| *kind as u32 == traced.kind).unwrap_or(DeviceKind::Standin);
                plain(kind, format!("/dev/char/{major}:{minor}"), major, (minor != ANY_MINOR).then_some(minor))
            });
            if device.kind == DeviceKind::Standin {
                device.gpu = Some(stand_ins);
                stand_ins += 1;
            }
            let before = own.get(number).map_or(Slot::MAX, |device| device.slot);
            list.push((before, Device { slot: traced.slot, ..device }));
        }
        for device in self.list.iter().filter(|device| !table.iter().any(|(known, _)| *known == device.number())) {
            notes.push(format!("{} is not traced by the running daemon", device.node.display()));
        }
        self.renumbered(list, notes)
    }

    fn renumbered(&self, list: Vec<(Slot, Device)>, notes: Vec<String>) -> Self {
        Self {
            by_dev: list.iter().map(|(_, device)| (device.number(), device.slot)).collect(),
            present: list
                .iter()
                .filter(|(before, _)| self.present.contains(before))
                .map(|(_, device)| device.slot)
                .collect(),
            list: list.into_iter().map(|(_, device)| device).collect(),
            // What was noted here are devices without a slot.
            untraced: self.untraced || notes.len() > self.notes.len(),
            notes,
            fingerprint: self.fingerprint,
        }
    }
}

#[cfg(test)]
mod tests {
    use gpureap_common::abi::dev;

    use super::*;
    use crate::config::{Paths, StandIn};

    fn devices(minors: &[u32]) -> Devices {
        let paths = Paths { proc: "/nonexistent".into(), ..Paths::default() };
        let stand_ins: Vec<StandIn> =
            minors.iter().map(|minor| StandIn::new(4, *minor, format!("/dev/tty{minor}").into()).unwrap()).collect();
        super::super::discover(&paths, &stand_ins).unwrap()
    }

    fn traced(slot: Slot) -> Traced {
        Traced { slot, kind: DeviceKind::Standin as u32 }
    }

    #[test]
    fn kinds_are_told_by_their_number() {
        for (position, kind) in KINDS.into_iter().enumerate() {
            assert_eq!(kind as usize, position);
        }
    }

    #[test]
    fn known_devices_keep_their_slots_and_new_ones_get_free_ones() {
        let table = [(dev(4, 21), traced(0)), (dev(4, 20), traced(2))];
        let now = devices(&[20, 21, 22]).with_slots_of(&table);
        let slot = |minor| now.by_number(4, minor).unwrap().slot;
        assert_eq!((slot(20), slot(21), slot(22)), (2, 0, 1));
        assert_eq!(now.get(2).unwrap().minor, Some(20));
    }

    #[test]
    fn devices_of_both_tables() {
        let table = [(dev(4, 30), traced(1)), (dev(4, 20), traced(0))];
        let both = devices(&[20, 21]).with_all_of(&table);
        let slot = |minor| both.by_number(4, minor).unwrap().slot;
        assert_eq!((both.list().len(), slot(20), slot(21), slot(30)), (3, 0, 2, 1));
        assert_eq!(both.by_number(4, 30).unwrap().node, std::path::Path::new("/dev/char/4:30"));
        assert_eq!(devices(&[20, 21]).with_all_of(&[]), devices(&[20, 21]));
    }

    #[test]
    fn a_reader_sees_what_the_daemon_traces_even_under_another_configuration() {
        let table = [(dev(4, 30), traced(0)), (dev(4, 20), traced(1))];
        let seen = devices(&[20, 21]).traced(&table);
        assert_eq!(seen.by_number(4, 20).unwrap().node, std::path::Path::new("/dev/tty20"));
        assert_eq!(seen.by_number(4, 30).unwrap().node, std::path::Path::new("/dev/char/4:30"));
        assert_eq!(seen.by_number(4, 21), None);
        assert!(seen.notes().iter().any(|note| note.contains("/dev/tty21 is not traced")), "{:?}", seen.notes());
        assert!(seen.has_untraced() && !devices(&[20]).traced(&table).has_untraced());
    }
}
