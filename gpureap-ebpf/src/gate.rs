//! The `gate` set: a `cgroup_device` program at the cgroup2 root sees every open of a device node on the host, before
//! the driver does, and nothing else. The process becomes a candidate that every read verifies.

use aya_ebpf::{macros::cgroup_device, programs::DeviceContext};
use gpureap_common::{abi, counter, event};

use crate::{
    count, emit, file,
    task::{self, Me},
};

/// Type and access in `bpf_cgroup_dev_ctx.access_type` (include/uapi/linux/bpf.h).
pub(crate) const TYPE_CHAR: u32 = 2;
const ACCESS_MKNOD: u32 = 1;

#[cgroup_device]
pub(crate) fn node_open_gate(ctx: DeviceContext) -> i32 {
    // SAFETY: the kernel hands in a valid context.
    let (access_type, major, minor) = unsafe { ((*ctx.device).access_type, (*ctx.device).major, (*ctx.device).minor) };
    let access = access_type >> 16;
    if access_type & 0xffff == TYPE_CHAR
        && access != ACCESS_MKNOD
        && let Some(device) = file::device(abi::dev(major, minor))
    {
        let me = Me::current();
        count::up(counter::GATE_OPENS);
        let now = emit::now_ns();
        file::interest(&me, now, 0, 1);
        let of = emit::Of { file: 0, dev: abi::dev(major, minor), slot: device.slot, flags: 0 };
        emit::file(event::kind::GATE, now, me.key(), me.tid, of, task::comm(me.task));
    }
    1
}
