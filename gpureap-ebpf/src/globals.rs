//! Offsets and settings that user space writes into `.rodata` before the load, and the only code that adds an offset to
//! a kernel address. The map is frozen, so the verifier sees constants and prunes what a kernel lacks.

use core::{ffi::c_void, ptr::read_volatile};

use aya_ebpf::helpers::generated::bpf_probe_read_kernel;

macro_rules! offsets {
    ($($name:ident),* $(,)?) => {
        $(
            #[unsafe(no_mangle)]
            pub(crate) static $name: u32 = 0;
        )*
    };
}

offsets!(
    OFF_FILE_INODE,
    OFF_FILE_MODE,
    OFF_FILE_REFS,
    FILE_REFS_BIAS,
    OFF_INODE_MODE,
    OFF_INODE_RDEV,
    OFF_INODE_NLINK,
    OFF_TASK_FILES,
    OFF_TASK_TGID,
    OFF_TASK_PID,
    OFF_TASK_LEADER,
    OFF_TASK_REAL_PARENT,
    OFF_TASK_START,
    OFF_TASK_COMM,
    OFF_TASK_EXIT_CODE,
    OFF_TASK_MM,
    OFF_TASK_SIGNAL,
    OFF_SIGNAL_LIVE,
    OFF_SIGNAL_EXIT_CODE,
    OFF_SIGNAL_FLAGS,
    OFF_TASK_SIGHAND,
    OFF_SIGHAND_ACTION,
    OFF_FILES_COUNT,
    OFF_FILES_FDT,
    OFF_FDT_MAX_FDS,
    OFF_FDT_FD,
    OFF_VMA_FILE,
    OFF_MM_ARG_START,
    OFF_MM_ARG_END,
);

/// A plain read would be folded to the initial 0 by the compiler.
#[inline(always)]
pub(crate) fn setting(global: &'static u32) -> u32 {
    // SAFETY: a reference to a static is valid for reads.
    unsafe { read_volatile(global) }
}

/// The member at `offset` of the structure at `base`, through `bpf_probe_read_kernel`: for addresses that the verifier
/// does not know (kprobe arguments, map keys, the current task). The raw helper into a zeroed local, because aya's
/// wrapper hands out undefined bytes that 5.10 refuses.
#[inline(always)]
pub(crate) fn member<T: Copy + Default>(base: u64, offset: &'static u32) -> Option<T> {
    at(base + u64::from(setting(offset)))
}

#[inline(always)]
pub(crate) fn at<T: Copy + Default>(address: u64) -> Option<T> {
    let mut value = T::default();
    // SAFETY: the helper writes size_of::<T>() bytes into a local of that size and fails on a bad address.
    let failed = unsafe {
        bpf_probe_read_kernel((&raw mut value).cast::<c_void>(), size_of::<T>() as u32, address as *const c_void)
    };
    if failed == 0 { Some(value) } else { None }
}

/// The member at `offset` of a structure that the verifier knows by BTF (iterator arguments): a plain load.
///
/// # Safety
/// `base` must be a pointer that the verifier tracks, not null.
#[inline(always)]
pub(crate) unsafe fn direct<T: Copy>(base: *const u8, offset: &'static u32) -> T {
    // SAFETY: the caller's promise; the kernel's fault handler covers the rest.
    unsafe { *base.add(setting(offset) as usize).cast::<T>() }
}
