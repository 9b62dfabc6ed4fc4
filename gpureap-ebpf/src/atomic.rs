//! Atomic updates of map values. The BPF target has no compare-and-swap in Rust's `core`, so its atomics lack the
//! read-modify-write methods; these are the instructions themselves, in their non-fetching form: the fetched value is
//! not needed, and relaxed fetches were miscompiled (llvm#210371).

use core::arch::asm;

/// # Safety
/// `value` must point into a live map value.
#[inline(always)]
pub(crate) unsafe fn add_i32(value: *mut i32, delta: i32) {
    // SAFETY: the caller's promise; records keep their fields aligned.
    unsafe { asm!("lock *(u32 *)({0} + 0) += {1}", in(reg) value, in(reg) i64::from(delta)) };
}

/// # Safety
/// `value` must point into a live map value.
#[inline(always)]
pub(crate) unsafe fn add_u64(value: *mut u64, delta: u64) {
    // SAFETY: as in `add_i32`.
    unsafe { asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) value, in(reg) delta) };
}

/// # Safety
/// `value` must point into a live map value.
#[inline(always)]
pub(crate) unsafe fn or_u64(value: *mut u64, bits: u64) {
    // SAFETY: as in `add_i32`.
    unsafe { asm!("lock *(u64 *)({0} + 0) |= {1}", in(reg) value, in(reg) bits) };
}
