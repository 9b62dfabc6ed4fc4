//! New entries of `LINEAGE`. A whole record does not fit the program stack of 512 bytes, so it is copied from an
//! element that stays zero, and filled in place.

use aya_ebpf::{macros::map, maps::Array};
use gpureap_common::{
    counter,
    record::{Lineage, ProcKey},
};

use crate::{count, maps::LINEAGE};

/// Never written.
#[map]
static BLANK: Array<Lineage> = Array::with_max_entries(1, 0);

/// The entry of `key`, made if it is not there.
#[inline(always)]
pub(crate) fn entry(key: ProcKey) -> Option<*mut Lineage> {
    if let Some(entry) = LINEAGE.get_ptr_mut(key) {
        return Some(entry);
    }
    LINEAGE.insert(key, BLANK.get(0)?, 0).ok()?;
    count::up(counter::LINEAGE_INSERTS);
    LINEAGE.get_ptr_mut(key)
}
