//! The life of a `struct file` on a device: from the driver's open to the end of the driver's release.

use gpureap_common::{
    abi::{self, ANY_MINOR, MINOR_BITS},
    counter, event,
    record::{Device, File, Proc, proc_flag},
};

use aya_log_ebpf::debug;

use crate::{
    count, emit,
    globals::{OFF_FILE_INODE, OFF_INODE_RDEV, member},
    maps::{DEVICES, FILES, MAJORS, PROCS},
    task::{self, Me},
};

/// What `rdev` is to us; `None` for a device that nobody asked for.
#[inline(always)]
pub(crate) fn device(rdev: u32) -> Option<Device> {
    let major = rdev >> MINOR_BITS;
    if *MAJORS.get(major)? == 0 {
        return None;
    }
    // SAFETY: `Device` values are written by user space before they are looked up and never removed while in use.
    unsafe {
        match DEVICES.get(rdev) {
            Some(device) => Some(*device),
            None => DEVICES.get(abi::dev(major, ANY_MINOR)).copied(),
        }
    }
}

/// `chrdev_open(inode, file)` is about to call the driver. Entered here and not at its return: a kretprobe can run out
/// of instances while opens sleep in the driver, and a process that hangs in the driver's open holds the GPU too. When
/// the open fails, `security_file_free` follows and removes the entry.
#[inline(always)]
pub(crate) fn opening(inode: u64, file: u64) {
    let Some(rdev) = member::<u32>(inode, &OFF_INODE_RDEV) else {
        count::up(counter::READ_FAULT);
        return;
    };
    let Some(device) = device(rdev) else { return };
    let me = Me::current();
    let comm = task::comm(me.task);
    let now = emit::now_ns();
    let record = File {
        opened_ns: now,
        opener_start_ns: me.start_ns,
        opener_tgid: me.tgid,
        opener_tid: me.tid,
        slot: device.slot,
        dev: rdev,
        comm,
        ..File::default()
    };
    count::up(counter::FILE_OPENS);
    if FILES.insert(file, record, 0).is_err() {
        count::up(counter::FILES_FULL);
    }
    interest(&me, now, 0, 1);
    debug!((), "open of {}:{} begins in {}, file {:x}", abi::major(rdev), abi::minor(rdev), me.tgid, file);
    emit::file(
        event::kind::OPEN,
        now,
        me.key(),
        me.tid,
        emit::Of { file, dev: rdev, slot: device.slot, flags: 0 },
        comm,
    );
}

/// `security_file_free(file)`: the driver's release has returned. Runs for every file of the host, sometimes in a
/// kworker, so the running task says nothing about the holder.
#[inline(always)]
pub(crate) fn freed(file: u64) {
    let Some(entry) = FILES.get_ptr(file) else { return };
    // SAFETY: this file's entry is removed only here and by a reader that proved it stale.
    let File { dev, slot, flags, .. } = unsafe { *entry };
    if FILES.remove(file).is_ok() {
        count::up(counter::FILE_FREES);
        let me = Me::current();
        debug!((), "file {:x} of {}:{} is gone", file, abi::major(dev), abi::minor(dev));
        emit::file(event::kind::FREE, emit::now_ns(), me.key(), me.tid, emit::Of { file, dev, slot, flags }, [0; 16]);
    }
}

/// The entry of `file`, if it is a device file. An entry whose file was freed unseen and whose address now is another
/// file's is dropped and counted.
#[inline(always)]
pub(crate) fn lookup(file: u64) -> Option<*mut File> {
    let entry = FILES.get_ptr_mut(file)?;
    let inode = member::<u64>(file, &OFF_FILE_INODE)?;
    let rdev = member::<u32>(inode, &OFF_INODE_RDEV)?;
    // SAFETY: a live map value.
    if unsafe { (*entry).dev } == rdev {
        return Some(entry);
    }
    count::up(counter::STALE_FILE);
    if FILES.remove(file).is_err() {
        count::up(counter::READ_FAULT);
    }
    None
}

/// Notes that the running process has to do with a device.
#[inline(always)]
pub(crate) fn interest(me: &Me, now: u64, flags: u32, opens: u32) -> Option<*mut Proc> {
    if let Some(entry) = PROCS.get_ptr_mut(me.tgid) {
        // SAFETY: a live map value; two threads of one process may both write, and either result is right.
        unsafe {
            if (*entry).start_ns == me.start_ns {
                (*entry).last_ns = now;
                (*entry).opens = (*entry).opens.wrapping_add(opens);
                if (*entry).flags & flags != flags {
                    (*entry).flags |= flags;
                }
                return Some(entry);
            }
        }
    }
    let record = Proc { start_ns: me.start_ns, first_ns: now, last_ns: now, flags, opens, ..Proc::default() };
    if PROCS.insert(me.tgid, record, 0).is_err() {
        count::up(counter::PROCS_FULL);
        return None;
    }
    PROCS.get_ptr_mut(me.tgid)
}

/// A process that got a descriptor without opening the device itself.
#[inline(always)]
pub(crate) fn received(me: &Me, now: u64) {
    if let Some(entry) = PROCS.get_ptr(me.tgid) {
        // SAFETY: a live map value.
        if unsafe { (*entry).start_ns } == me.start_ns {
            return;
        }
    }
    interest(me, now, proc_flag::RECEIVED, 0);
}
