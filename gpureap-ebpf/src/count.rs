//! Counting what happens and what is lost.

use crate::maps::COUNTERS;

/// Adds one to a counter of this CPU. A program that preempts this one between load and store can hide one count; the
/// counters are for "did it rise", and a burst always shows.
#[inline(always)]
pub(crate) fn up(index: u32) {
    if let Some(value) = COUNTERS.get_ptr_mut(index) {
        // SAFETY: the pointer is a live element of this CPU's array.
        unsafe { *value += 1 };
    }
}
