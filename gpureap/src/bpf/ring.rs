//! Decodes the records of the ring. Bytes are copied out: nothing in the ring is aligned for us or stays.

use gpureap_common::event::{FileEvent, Header, ProcEvent, SignalEvent, kind};

use super::sys;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Open(FileEvent),
    Free(FileEvent),
    Gate(FileEvent),
    Fork(ProcEvent),
    Exec(ProcEvent),
    Exit(ProcEvent),
    Thread(ProcEvent),
    Signal(SignalEvent),
    Oom(ProcEvent),
    First(FileEvent),
    Last(FileEvent),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("a record of {0} bytes is shorter than its header")]
    Short(usize),
    #[error("a record says {said} bytes and has {has}")]
    Size { said: u16, has: usize },
    #[error("a record of the unknown kind {0}")]
    Kind(u16),
}

pub fn decode(bytes: &[u8]) -> Result<Event, DecodeError> {
    let header: Header = *sys::records(bytes.get(..size_of::<Header>()).ok_or(DecodeError::Short(bytes.len()))?)
        .first()
        .ok_or(DecodeError::Short(bytes.len()))?;
    let expected = match header.kind {
        kind::OPEN | kind::FREE | kind::GATE | kind::FIRST | kind::LAST => size_of::<FileEvent>(),
        kind::FORK | kind::EXEC | kind::EXIT | kind::THREAD | kind::OOM => size_of::<ProcEvent>(),
        kind::SIGNAL => size_of::<SignalEvent>(),
        other => return Err(DecodeError::Kind(other)),
    };
    // The ring rounds up to eight bytes; all records are multiples of that.
    if usize::from(header.size) != expected || bytes.len() != expected {
        return Err(DecodeError::Size { said: header.size, has: bytes.len() });
    }
    let file = || sys::records::<FileEvent>(bytes)[0];
    let process = || sys::records::<ProcEvent>(bytes)[0];
    Ok(match header.kind {
        kind::OPEN => Event::Open(file()),
        kind::FREE => Event::Free(file()),
        kind::GATE => Event::Gate(file()),
        kind::FORK => Event::Fork(process()),
        kind::EXEC => Event::Exec(process()),
        kind::FIRST => Event::First(file()),
        kind::LAST => Event::Last(file()),
        kind::THREAD => Event::Thread(process()),
        kind::OOM => Event::Oom(process()),
        kind::SIGNAL => Event::Signal(sys::records::<SignalEvent>(bytes)[0]),
        _ => Event::Exit(process()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(kind: u16, size: u16) -> Vec<u8> {
        let mut bytes = vec![0_u8; size.max(32).into()];
        bytes[..2].copy_from_slice(&kind.to_ne_bytes());
        bytes[2..4].copy_from_slice(&size.to_ne_bytes());
        bytes[16..20].copy_from_slice(&4711_u32.to_ne_bytes());
        bytes
    }

    #[test]
    fn known_records_are_decoded() {
        let Ok(Event::Open(event)) = decode(&bytes(kind::OPEN, 72)) else { panic!("not an open") };
        assert_eq!(event.header.tgid, 4711);
        assert!(matches!(decode(&bytes(kind::EXIT, 64)), Ok(Event::Exit(_))));
        let Ok(Event::Signal(event)) = decode(&bytes(kind::SIGNAL, 120)) else { panic!("not a signal") };
        assert_eq!(event.header.tgid, 4711);
    }

    /// A boot that lasts for years, by whatever unit 32 bits of it would be counted in.
    #[test]
    fn times_beyond_32_bits_are_whole() {
        const TICK: u64 = 10_000_000;
        for beyond in
            [1 << 32, (1 << 32) * 1_000, (1 << 32) * 1_000_000, (1 << 32) * TICK, 1 << 53, i64::MAX as u64 - 1]
        {
            for time in [beyond - 1, beyond, beyond + 1] {
                for (kind, size) in [(kind::OPEN, 72), (kind::EXIT, 64), (kind::SIGNAL, 120)] {
                    let mut bytes = bytes(kind, size);
                    bytes[8..16].copy_from_slice(&time.to_ne_bytes());
                    bytes[24..32].copy_from_slice(&(time - 1).to_ne_bytes());
                    let Ok(
                        Event::Open(FileEvent { header, .. })
                        | Event::Exit(ProcEvent { header, .. })
                        | Event::Signal(SignalEvent { header, .. }),
                    ) = decode(&bytes)
                    else {
                        panic!("{kind}")
                    };
                    assert_eq!((header.time_ns, header.start_ns), (time, time - 1));
                }
            }
        }
    }

    #[test]
    fn anything_else_is_an_error_and_not_a_panic() {
        assert_eq!(decode(&[]), Err(DecodeError::Short(0)));
        assert_eq!(decode(&bytes(kind::OPEN, 72)[..31]), Err(DecodeError::Short(31)));
        assert_eq!(decode(&bytes(kind::OPEN, 72)[..40]), Err(DecodeError::Size { said: 72, has: 40 }));
        assert_eq!(decode(&bytes(kind::OPEN, 8)), Err(DecodeError::Size { said: 8, has: 32 }));
        assert_eq!(decode(&bytes(99, 64)), Err(DecodeError::Kind(99)));
    }
}
