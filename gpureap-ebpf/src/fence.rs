//! The fence: a `cgroup_device` program at the cgroup2 root that refuses opens of chosen devices, host-wide. What is open
//! stays open. It is no part of the tracer: each fence is loaded with maps of its own, so fences never mix, and one whose
//! process is killed goes with it.
//!
//! Other programs of this type (device filters of containers, the gate) run as well: a denial by one is a denial.

use aya_ebpf::{
    helpers::generated::{bpf_get_current_ancestor_cgroup_id, bpf_get_current_cgroup_id, bpf_get_current_uid_gid},
    macros::{cgroup_device, map},
    maps::{HashMap, LruHashMap},
    programs::DeviceContext,
};
use gpureap_common::{
    abi,
    fence::{Exempt, Fence, LEVELS, Tally, Trier, TrierKey, exempt, ticks},
};

use crate::{
    atomic, emit, file,
    gate::TYPE_CHAR,
    task::{self, Me},
};

/// Slot → deadline. Written by user space.
#[map]
static FENCE: HashMap<u32, Fence> = HashMap::with_max_entries(abi::MAX_SLOTS, 0);

/// Slot → counts. User space makes the entries, this program adds.
#[map]
static FENCE_TALLY: HashMap<u32, Tally> = HashMap::with_max_entries(abi::MAX_SLOTS, 0);

/// Who is let through. Written by user space.
#[map]
static EXEMPT: HashMap<Exempt, u32> = HashMap::with_max_entries(1024, 0);

/// Who tried. Full: the one that tried longest ago is forgotten.
#[map]
static DENIED: LruHashMap<TrierKey, Trier> = LruHashMap::with_max_entries(4096, 0);

/// Access in `bpf_cgroup_dev_ctx.access_type` (include/uapi/linux/bpf.h). Making a node is let through, and so is the
/// question whether one is there (`access(F_OK)` asks for nothing); `access(R_OK)` looks like an open and is refused.
const ACCESS_READ: u32 = 2;
const ACCESS_WRITE: u32 = 4;

/// `BPF_NOEXIST`
const NOEXIST: u64 = 1;

const LET_THROUGH: i32 = 1;
const REFUSED: i32 = 0;

#[cgroup_device]
pub(crate) fn node_open_fence(ctx: DeviceContext) -> i32 {
    // SAFETY: the kernel hands in a valid context.
    let (access_type, major, minor) = unsafe { ((*ctx.device).access_type, (*ctx.device).major, (*ctx.device).minor) };
    if access_type & 0xffff != TYPE_CHAR || access_type >> 16 & (ACCESS_READ | ACCESS_WRITE) == 0 {
        return LET_THROUGH;
    }
    let Some(device) = file::device(abi::dev(major, minor)) else { return LET_THROUGH };
    open(device.slot)
}

#[inline(always)]
fn open(slot: u32) -> i32 {
    // SAFETY: values are whole: user space replaces an element by another one.
    let Some(Fence { raised_ns: _, deadline_ns }) = (unsafe { FENCE.get(slot) }).copied() else { return LET_THROUGH };
    let now = emit::now_ns();
    if now >= deadline_ns {
        return LET_THROUGH;
    }
    let me = Me::current();
    // SAFETY: returns a number.
    let cgroup_id = unsafe { bpf_get_current_cgroup_id() };
    let through = is_exempt(&me, cgroup_id);
    if let Some(tally) = FENCE_TALLY.get_ptr_mut(slot) {
        // SAFETY: a live map value.
        unsafe {
            let count = if through { &raw mut (*tally).exempted } else { &raw mut (*tally).denied };
            atomic::add_u64(count, 1);
        }
    }
    if through {
        return LET_THROUGH;
    }
    note(&me, slot, now, cgroup_id);
    REFUSED
}

#[inline(always)]
fn is_exempt(me: &Me, cgroup_id: u64) -> bool {
    listed(Exempt { id: ticks(me.start_ns), tgid: me.tgid, kind: exempt::PROCESS })
        || listed(Exempt { id: cgroup_id, tgid: 0, kind: exempt::CGROUP })
        || in_exempt_cgroup(cgroup_id)
}

#[inline(always)]
fn listed(key: Exempt) -> bool {
    EXEMPT.get_ptr(key).is_some()
}

/// The ancestors from the root downwards, the process's own cgroup the last.
#[inline(always)]
fn in_exempt_cgroup(own: u64) -> bool {
    for level in 0..LEVELS {
        // SAFETY: returns a number, 0 below the process's own level. In this program type since 6.1.
        let id = unsafe { bpf_get_current_ancestor_cgroup_id(level) };
        if id == 0 || id == own {
            return false;
        }
        if listed(Exempt { id, tgid: 0, kind: exempt::CGROUP }) {
            return true;
        }
    }
    false
}

#[inline(always)]
fn note(me: &Me, slot: u32, now: u64, cgroup_id: u64) {
    let key = TrierKey { start_ns: me.start_ns, tgid: me.tgid, slot };
    if !again(key, now) {
        let record = Trier {
            count: 1,
            first_ns: now,
            last_ns: now,
            cgroup_id,
            // SAFETY: returns a number.
            uid: unsafe { bpf_get_current_uid_gid() } as u32,
            pad: 0,
            comm: task::process_comm(me.task),
        };
        // Refused when another thread of the process was faster; without room the tally has counted it.
        if DENIED.insert(key, record, NOEXIST).is_err() {
            again(key, now);
        }
    }
}

#[inline(always)]
fn again(key: TrierKey, now: u64) -> bool {
    let Some(entry) = DENIED.get_ptr_mut(key) else { return false };
    // SAFETY: a live map value.
    unsafe {
        atomic::add_u64(&raw mut (*entry).count, 1);
        (*entry).last_ns = now;
    }
    true
}
