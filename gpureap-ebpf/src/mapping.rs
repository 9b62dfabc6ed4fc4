//! Mappings of device files. Only their beginning can be hooked; what is still mapped, a reader asks `task_vma`.

use gpureap_common::{
    abi::MAX_SLOTS,
    record::{file_flag, proc_flag},
};

use crate::{atomic::or_u64, emit, file, maps::FILES, task::Me};

/// `security_mmap_file(file, prot, flags)`: before the mapping is made, so it may still fail.
#[inline(always)]
pub(crate) fn mapping(file: u64) {
    if file == 0 || FILES.get_ptr(file).is_none() {
        return;
    }
    let Some(entry) = file::lookup(file) else { return };
    let me = Me::current();
    // SAFETY: live map values.
    unsafe {
        if (*entry).flags & file_flag::MAPPED == 0 {
            (*entry).flags |= file_flag::MAPPED;
        }
        let slot = (*entry).slot & (MAX_SLOTS - 1);
        if let Some(process) = file::interest(&me, emit::now_ns(), proc_flag::MAY_MAP, 0) {
            or_u64(&raw mut (*process).mapped[(slot / 64) as usize], 1 << (slot % 64));
        }
    }
}
