//! Resolves what the kernel programs need from BTF: Rust emits no CO-RE relocations, so user space looks the members
//! up and writes their offsets into the programs' read-only globals.

use gpureap_common::global::{ABSENT, FILE_REFS_BIAS, OFF_FILE_REFS, OFFSETS};

use super::btf::{Btf, BtfError, Member};

/// Values of the read-only globals, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offsets(pub Vec<(&'static str, u32)>);

#[derive(Debug, thiserror::Error)]
pub enum OffsetError {
    #[error(transparent)]
    Btf(#[from] BtfError),
    #[error("struct {structure}: member {member} has {found} bytes on this kernel, gpureap knows it with {known}")]
    Size { structure: &'static str, member: &'static str, found: u32, known: u32 },
}

impl Offsets {
    pub fn resolve(btf: &Btf) -> Result<Self, OffsetError> {
        let mut values = Vec::with_capacity(OFFSETS.len() + 2);
        for &(global, structure, member, known) in OFFSETS {
            let Member { offset, size } = btf.member(structure, member)?;
            if size != known {
                return Err(OffsetError::Size { structure, member, found: size, known });
            }
            values.push((global, offset));
        }
        // Only the gate's read needs reference counts; a kernel that keeps them elsewhere still runs.
        let (refs, bias) = match (btf.member("file", "f_ref"), btf.member("file", "f_count")) {
            (Ok(Member { offset, size: 8 }), _) => (offset, 1),
            (_, Ok(Member { offset, size: 8 })) => (offset, 0),
            _ => (ABSENT, 0),
        };
        values.push((OFF_FILE_REFS, refs));
        values.push((FILE_REFS_BIAS, bias));
        Ok(Self(values))
    }
}
