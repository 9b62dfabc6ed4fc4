//! A reader for BTF, as much of it as offsets need (format: Documentation/bpf/btf.rst of the kernel). aya's own parser
//! keeps structure members to itself.

use std::path::Path;

/// Why BTF could not be read or does not have what was asked for.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BtfError {
    #[error("{path} cannot be read ({reason}): the kernel must be built with CONFIG_DEBUG_INFO_BTF=y")]
    Unreadable { path: String, reason: String },
    #[error("BTF is damaged: {0}")]
    Damaged(&'static str),
    #[error("this kernel has no struct {0}")]
    NoStruct(String),
    #[error("struct {0} has no member {1} on this kernel")]
    NoMember(String, String),
    #[error("struct {0}: {1} is a bit field on this kernel")]
    BitField(String, String),
}

mod kind {
    pub(super) const INT: u32 = 1;
    pub(super) const PTR: u32 = 2;
    pub(super) const ARRAY: u32 = 3;
    pub(super) const STRUCT: u32 = 4;
    pub(super) const UNION: u32 = 5;
    pub(super) const ENUM: u32 = 6;
    pub(super) const TYPEDEF: u32 = 8;
    pub(super) const VOLATILE: u32 = 9;
    pub(super) const CONST: u32 = 10;
    pub(super) const RESTRICT: u32 = 11;
    pub(super) const FUNC: u32 = 12;
    pub(super) const FUNC_PROTO: u32 = 13;
    pub(super) const VAR: u32 = 14;
    pub(super) const DATASEC: u32 = 15;
    pub(super) const FLOAT: u32 = 16;
    pub(super) const DECL_TAG: u32 = 17;
    pub(super) const TYPE_TAG: u32 = 18;
    pub(super) const ENUM64: u32 = 19;
}

/// First member of the header.
const MAGIC: u16 = 0xeb9f;
/// Nested anonymous structures deeper than this are not in any kernel.
const MAX_DEPTH: u32 = 16;
/// Members that are looked at for one name. The largest structures have some hundred.
const MAX_MEMBERS: u32 = 1 << 16;
/// Typedefs and qualifiers on the way to a type.
const MAX_ALIASES: u32 = 64;

#[derive(Clone, Copy, Debug)]
struct Type {
    name: u32,
    kind: u32,
    vlen: u32,
    kind_flag: bool,
    /// Size of what has one, else the type that it is about.
    detail: u32,
    /// Where the kind's own data begin.
    at: usize,
}

/// Where a member is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    pub offset: u32,
    /// In bytes; 0 for a flexible array.
    pub size: u32,
}

/// Types of a kernel.
#[derive(Debug)]
pub struct Btf {
    data: Vec<u8>,
    types: Vec<Type>,
    strings: usize,
}

fn word(data: &[u8], at: usize) -> Result<u32, BtfError> {
    let bytes = data.get(at..at + 4).ok_or(BtfError::Damaged("cut short"))?;
    Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

impl Btf {
    /// The running kernel's, normally `/sys/kernel/btf/vmlinux`.
    pub fn read(path: &Path) -> Result<Self, BtfError> {
        let data = std::fs::read(path)
            .map_err(|error| BtfError::Unreadable { path: path.display().to_string(), reason: error.to_string() })?;
        Self::parse(data)
    }

    pub fn parse(data: Vec<u8>) -> Result<Self, BtfError> {
        let magic = data.get(..2).ok_or(BtfError::Damaged("empty"))?;
        if u16::from_le_bytes([magic[0], magic[1]]) != MAGIC {
            return Err(BtfError::Damaged("wrong magic number"));
        }
        let header = word(&data, 4)? as usize;
        let (type_at, type_len) = (word(&data, 8)? as usize, word(&data, 12)? as usize);
        let (string_at, string_len) = (word(&data, 16)? as usize, word(&data, 20)? as usize);
        let within = |at: usize, len: usize| {
            header.checked_add(at).and_then(|start| start.checked_add(len)).filter(|end| *end <= data.len())
        };
        let end = within(type_at, type_len).ok_or(BtfError::Damaged("types reach past the end"))?;
        within(string_at, string_len).ok_or(BtfError::Damaged("strings reach past the end"))?;
        let strings = header + string_at;

        // Type 0 is void and not stored.
        let mut types = vec![Type { name: 0, kind: 0, vlen: 0, kind_flag: false, detail: 0, at: 0 }];
        let mut at = header + type_at;
        while at < end {
            let info = word(&data, at + 4)?;
            let (kind, vlen) = (info >> 24 & 0x1f, info & 0xffff);
            let own = match kind {
                kind::INT | kind::VAR | kind::DECL_TAG => 4,
                kind::ARRAY => 12,
                kind::STRUCT | kind::UNION | kind::DATASEC | kind::ENUM64 => 12 * vlen as usize,
                kind::ENUM | kind::FUNC_PROTO => 8 * vlen as usize,
                _ => 0,
            };
            types.push(Type {
                name: word(&data, at)?,
                kind,
                vlen,
                kind_flag: info >> 31 != 0,
                detail: word(&data, at + 8)?,
                at: at + 12,
            });
            at += 12 + own;
        }
        Ok(Self { data, types, strings })
    }

    /// The first type of this kind and name. A kernel has over 100,000 types and some thirty are asked for, so looking
    /// through them is quicker than an index.
    fn named(&self, kind: u32, name: &str) -> Option<u32> {
        let wanted = name.as_bytes();
        let position = self.types.iter().position(|found| {
            found.kind == kind && {
                let at = self.strings + found.name as usize;
                let end = at + wanted.len();
                self.data.get(at..end) == Some(wanted) && self.data.get(end) == Some(&0)
            }
        });
        position.map(|id| id as u32)
    }

    /// Where `member` of `struct name` is; anonymous structures and unions inside are looked through.
    pub fn member(&self, name: &str, member: &str) -> Result<Member, BtfError> {
        let id = self.named(kind::STRUCT, name).ok_or_else(|| BtfError::NoStruct(name.to_owned()))?;
        let mut left = MAX_MEMBERS;
        match self.find(id, member, 0, 0, &mut left)? {
            Some((bits, type_id, bit_size)) => {
                if bits % 8 != 0 || bit_size != 0 {
                    return Err(BtfError::BitField(name.to_owned(), member.to_owned()));
                }
                Ok(Member { offset: bits / 8, size: self.size(type_id, 0)? })
            }
            None => Err(BtfError::NoMember(name.to_owned(), member.to_owned())),
        }
    }

    /// Whether `struct name` has the first of these members, that the second, and so on.
    pub fn has_members(&self, name: &str, path: &[&str]) -> bool {
        let inner = |id: u32, member: &&str| {
            let mut left = MAX_MEMBERS;
            let (_, type_id, _) = self.find(id, member, 0, 0, &mut left).ok()??;
            self.resolve(type_id).ok()
        };
        self.named(kind::STRUCT, name).and_then(|id| path.iter().try_fold(id, inner)).is_some()
    }

    /// Number of parameters of a kernel function; `None` if there is no such function.
    pub fn parameters(&self, function: &str) -> Option<u32> {
        let function = self.types.get(self.named(kind::FUNC, function)? as usize)?;
        let prototype = self.types.get(function.detail as usize)?;
        (prototype.kind == kind::FUNC_PROTO).then_some(prototype.vlen)
    }

    /// Number of values that a tracepoint hands to a program, by the type of its probes; `None` if there is no such
    /// tracepoint.
    pub fn tracepoint_parameters(&self, tracepoint: &str) -> Option<u32> {
        let alias = self.types.get(self.named(kind::TYPEDEF, &format!("btf_trace_{tracepoint}"))? as usize)?;
        let pointer = self.types.get(alias.detail as usize).filter(|found| found.kind == kind::PTR)?;
        let prototype = self.types.get(pointer.detail as usize)?;
        // The first parameter is the probe's own.
        (prototype.kind == kind::FUNC_PROTO).then(|| prototype.vlen.saturating_sub(1))
    }

    pub fn has_function(&self, function: &str) -> bool {
        self.named(kind::FUNC, function).is_some()
    }

    /// Bit offset, type and bit-field size of a member.
    fn find(
        &self,
        id: u32,
        member: &str,
        base: u32,
        depth: u32,
        left: &mut u32,
    ) -> Result<Option<(u32, u32, u32)>, BtfError> {
        let outer = *self.types.get(id as usize).ok_or(BtfError::Damaged("type number out of range"))?;
        if !matches!(outer.kind, kind::STRUCT | kind::UNION) || depth > MAX_DEPTH {
            return Ok(None);
        }
        for index in 0..outer.vlen as usize {
            *left = left.checked_sub(1).ok_or(BtfError::Damaged("structures without end"))?;
            let at = outer.at + 12 * index;
            let (name, type_id, raw) = (word(&self.data, at)?, word(&self.data, at + 4)?, word(&self.data, at + 8)?);
            let (offset, bit_size) = if outer.kind_flag { (raw & 0xff_ffff, raw >> 24) } else { (raw, 0) };
            let offset = base.checked_add(offset).ok_or(BtfError::Damaged("a member beyond all memory"))?;
            let name = string(&self.data, self.strings, name);
            if name == member {
                return Ok(Some((offset, type_id, bit_size)));
            }
            if name.is_empty()
                && let Some(found) = self.find(self.resolve(type_id)?, member, offset, depth + 1, left)?
            {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Follows typedefs and qualifiers.
    fn resolve(&self, mut id: u32) -> Result<u32, BtfError> {
        for _ in 0..MAX_ALIASES {
            let found = self.types.get(id as usize).ok_or(BtfError::Damaged("type number out of range"))?;
            match found.kind {
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                    id = found.detail;
                }
                _ => return Ok(id),
            }
        }
        Err(BtfError::Damaged("typedefs run in a circle"))
    }

    fn size(&self, id: u32, depth: u32) -> Result<u32, BtfError> {
        let found = self.types[self.resolve(id)? as usize];
        Ok(match found.kind {
            kind::PTR => 8,
            kind::ARRAY if depth < MAX_DEPTH => {
                let element = self.size(word(&self.data, found.at)?, depth + 1)?;
                element.saturating_mul(word(&self.data, found.at + 8)?)
            }
            kind::INT | kind::STRUCT | kind::UNION | kind::ENUM | kind::ENUM64 | kind::FLOAT => found.detail,
            _ => 0,
        })
    }
}

/// A name; what is not UTF-8 or not ended is nobody's name.
fn string(data: &[u8], strings: usize, at: u32) -> &str {
    let Some(rest) = data.get(strings + at as usize..) else { return "" };
    let end = rest.iter().position(|byte| *byte == 0).unwrap_or(0);
    std::str::from_utf8(&rest[..end]).unwrap_or("")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds BTF by hand, type by type.
    struct Maker {
        types: Vec<u8>,
        strings: Vec<u8>,
        count: u32,
    }

    impl Maker {
        fn new() -> Self {
            Self { types: Vec::new(), strings: vec![0], count: 0 }
        }
        fn name(&mut self, text: &str) -> u32 {
            if text.is_empty() {
                return 0;
            }
            let at = self.strings.len() as u32;
            self.strings.extend(text.bytes().chain([0]));
            at
        }
        fn add(&mut self, name: &str, kind: u32, vlen: u32, flag: bool, size: u32, own: &[u32]) -> u32 {
            let name = self.name(name);
            for value in [name, u32::from(flag) << 31 | kind << 24 | vlen, size].iter().chain(own) {
                self.types.extend(value.to_le_bytes());
            }
            self.count += 1;
            self.count
        }
        fn finish(self) -> Vec<u8> {
            let mut data = vec![0x9f, 0xeb, 1, 0];
            for value in [24, 0, self.types.len() as u32, self.types.len() as u32, self.strings.len() as u32] {
                data.extend(u32::to_le_bytes(value));
            }
            data.extend(self.types);
            data.extend(self.strings);
            data
        }
    }

    fn sample() -> Vec<u8> {
        let mut maker = Maker::new();
        let int = maker.add("unsigned int", kind::INT, 0, false, 4, &[32]);
        let alias = maker.add("u32", kind::TYPEDEF, 0, false, int, &[]);
        let array = maker.add("", kind::ARRAY, 0, false, 0, &[alias, int, 4]);
        let (inner_name, flag_name) = (maker.name("deep"), maker.name("bit"));
        let inner = maker.add("", kind::UNION, 2, false, 16, &[inner_name, array, 0, flag_name, int, 0]);
        let (first, last) = (maker.name("first"), maker.name("last"));
        let outer =
            maker.add("outer", kind::STRUCT, 3, true, 40, &[first, int, 0, 0, inner, 64, last, int, 3 << 24 | 0xc8]);
        let named = maker.name("named");
        let around = maker.add("", kind::UNION, 1, false, 40, &[named, outer, 0]);
        maker.add("around", kind::STRUCT, 1, false, 40, &[0, around, 0]);
        let prototype = maker.add("", kind::FUNC_PROTO, 3, false, 0, &[0, int, 0, int, 0, int]);
        maker.add("dup_fd", kind::FUNC, 1, false, prototype, &[]);
        let pointer = maker.add("", kind::PTR, 0, false, prototype, &[]);
        maker.add("btf_trace_mark_victim", kind::TYPEDEF, 0, false, pointer, &[]);
        maker.finish()
    }

    #[test]
    fn members_of_members() {
        let btf = Btf::parse(sample()).unwrap();
        assert!(btf.has_members("around", &["named", "deep"]));
        for path in [&["named", "absent"][..], &["deep"], &["named", "first", "deep"]] {
            assert!(!btf.has_members("around", path), "{path:?}");
        }
        assert!(!btf.has_members("absent", &["named"]));
    }

    #[test]
    fn members_are_found_through_anonymous_unions_and_typedefs() {
        let btf = Btf::parse(sample()).unwrap();
        assert_eq!(btf.member("outer", "first"), Ok(Member { offset: 0, size: 4 }));
        assert_eq!(btf.member("outer", "deep"), Ok(Member { offset: 8, size: 16 }));
    }

    #[test]
    fn what_is_not_there_is_named() {
        let btf = Btf::parse(sample()).unwrap();
        assert_eq!(btf.member("none", "x").unwrap_err().to_string(), "this kernel has no struct none");
        assert_eq!(btf.member("outer", "x").unwrap_err().to_string(), "struct outer has no member x on this kernel");
        assert_eq!(btf.member("outer", "last"), Err(BtfError::BitField("outer".into(), "last".into())));
    }

    #[test]
    fn parameters_are_counted() {
        let btf = Btf::parse(sample()).unwrap();
        assert_eq!(btf.parameters("dup_fd"), Some(3));
        assert_eq!(btf.parameters("fd_install"), None);
        assert_eq!(btf.tracepoint_parameters("mark_victim"), Some(2));
        assert_eq!(btf.tracepoint_parameters("dup_fd"), None);
    }

    #[test]
    fn structures_in_themselves_and_offsets_without_end() {
        let mut maker = Maker::new();
        let member = maker.name("member");
        // Eight times itself, without a name: sixteen levels of that would be looked at for years.
        let again: Vec<u32> = (0..8).flat_map(|_| [0, 1, 0]).collect();
        maker.add("round", kind::STRUCT, 8, false, 8, &again);
        let far = maker.add("", kind::STRUCT, 1, false, 8, &[member, 0, u32::MAX]);
        maker.add("outer", kind::STRUCT, 1, false, 8, &[0, far, 8]);
        let btf = Btf::parse(maker.finish()).unwrap();
        assert_eq!(btf.member("round", "member"), Err(BtfError::Damaged("structures without end")));
        assert_eq!(btf.member("outer", "member"), Err(BtfError::Damaged("a member beyond all memory")));
    }

    #[test]
    fn damage_never_panics() {
        let whole = sample();
        for length in 0..whole.len() {
            let cut = Btf::parse(whole[..length].to_vec());
            assert!(cut.is_err(), "cut to {length} bytes was taken as whole");
        }
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut damaged = whole.clone();
                damaged[at] ^= 1 << bit;
                if let Ok(btf) = Btf::parse(damaged) {
                    // Any answer is fine; an endless loop or a panic is not.
                    let _answer = (btf.member("outer", "deep"), btf.parameters("dup_fd"));
                }
            }
        }
    }
}
