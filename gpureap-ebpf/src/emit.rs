//! The single way to user space: reserve, fill, submit, or count.

use aya_ebpf::helpers::generated::{bpf_get_smp_processor_id, bpf_ktime_get_boot_ns};
use gpureap_common::{
    counter,
    event::{self, FileEvent, Header, ProcEvent, SignalEvent},
    record::ProcKey,
};

use crate::{count, maps::EVENTS};

#[inline(always)]
pub(crate) fn now_ns() -> u64 {
    // SAFETY: returns a number.
    unsafe { bpf_ktime_get_boot_ns() }
}

#[inline(always)]
fn header(kind: u16, now: u64, size: usize, key: ProcKey, tid: u32) -> Header {
    Header {
        kind,
        size: size as u16,
        // SAFETY: returns a number.
        cpu: unsafe { bpf_get_smp_processor_id() },
        time_ns: now,
        tgid: key.tgid,
        tid,
        start_ns: key.start_ns,
    }
}

#[inline(always)]
fn submit<T: 'static>(record: T) {
    if let Some(mut entry) = EVENTS.reserve::<T>(0) {
        entry.write(record);
        entry.submit(0);
        count::up(counter::EVENTS);
    } else {
        count::up(counter::RING_FULL);
    }
}

/// `now`: what the maps have too, as of one event there is one time.
#[inline(always)]
pub(crate) fn file(kind: u16, now: u64, key: ProcKey, tid: u32, of: Of, comm: [u8; 16]) {
    let Of { file, dev, slot, flags } = of;
    submit(FileEvent {
        header: header(kind, now, size_of::<FileEvent>(), key, tid),
        file,
        dev,
        slot,
        flags,
        pad: 0,
        comm,
    });
}

/// The file that a record is about.
#[derive(Clone, Copy)]
pub(crate) struct Of {
    pub(crate) file: u64,
    pub(crate) dev: u32,
    pub(crate) slot: u32,
    pub(crate) flags: u32,
}

/// `told` has everything but the header's time and size.
#[inline(always)]
pub(crate) fn signal(target: ProcKey, tid: u32, told: SignalEvent) {
    submit(SignalEvent {
        header: header(event::kind::SIGNAL, now_ns(), size_of::<SignalEvent>(), target, tid),
        ..told
    });
}

#[inline(always)]
pub(crate) fn process(kind: u16, now: u64, key: ProcKey, tid: u32, parent: ProcKey, exit_code: u32, comm: [u8; 16]) {
    submit(ProcEvent {
        header: header(kind, now, size_of::<ProcEvent>(), key, tid),
        parent_start_ns: parent.start_ns,
        parent_tgid: parent.tgid,
        exit_code,
        comm,
    });
}
