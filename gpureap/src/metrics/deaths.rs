//! Deaths, each counted once. A cause may be decided anew while evidence comes; a counter cannot take back.

use std::collections::{BTreeMap, VecDeque};

use crate::{
    clock::NANOS,
    history::rows::{Cause, Key},
};

/// As the recorder waits for evidence.
const SETTLE_NS: u64 = 10 * NANOS;
/// The dead that are remembered as counted, at most: of one that cannot let go evidence may come much later.
const REMEMBERED: usize = 8192;

#[derive(Debug, Default)]
pub struct Deaths {
    waiting: BTreeMap<Key, (Cause, u64)>,
    counted: VecDeque<Key>,
}

impl Deaths {
    /// What is believed now.
    pub fn decided(&mut self, key: Key, cause: Cause, now_ns: u64) {
        if let Some((before, _)) = self.waiting.get_mut(&key) {
            *before = cause;
        } else if !self.counted.contains(&key) {
            self.waiting.insert(key, (cause, now_ns));
        }
    }

    /// Those of which no more is expected.
    pub fn settled(&mut self, now_ns: u64) -> Vec<Cause> {
        let is_due = |_: &Key, (_, since): &mut (Cause, u64)| now_ns.saturating_sub(*since) >= SETTLE_NS;
        let ended: Vec<(Key, (Cause, u64))> = self.waiting.extract_if(.., is_due).collect();
        self.counted.extend(ended.iter().map(|(key, _)| *key));
        let over = self.counted.len().saturating_sub(REMEMBERED);
        self.counted.drain(..over);
        ended.into_iter().map(|(_, (cause, _))| cause).collect()
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEAD: Key = Key { pid: 7, start_ns: 70 };
    const OTHER: Key = Key { pid: 7, start_ns: 71 };

    #[test]
    fn a_death_is_counted_once_by_what_is_believed_in_the_end() {
        let mut deaths = Deaths::default();
        deaths.decided(DEAD, Cause::KilledBy, 5);
        deaths.decided(DEAD, Cause::Reaped, NANOS);
        // The same number is another process.
        deaths.decided(OTHER, Cause::Exited, 2 * NANOS);
        assert_eq!(deaths.settled(10 * NANOS), []);
        assert_eq!(deaths.settled(5 + 10 * NANOS), [Cause::Reaped]);
        assert!(!deaths.is_empty());
        // Evidence that comes too late changes nothing.
        deaths.decided(DEAD, Cause::OomKill, 11 * NANOS);
        assert_eq!(deaths.settled(100 * NANOS), [Cause::Exited]);
        assert_eq!(deaths.settled(200 * NANOS), []);
        assert!(deaths.is_empty());
    }

    #[test]
    fn the_memory_of_the_counted_is_bounded() {
        let mut deaths = Deaths::default();
        for pid in 0..2 * REMEMBERED as u32 {
            deaths.decided(Key { pid, start_ns: 1 }, Cause::Exited, 0);
        }
        assert_eq!(deaths.settled(SETTLE_NS).len(), 2 * REMEMBERED);
        assert_eq!(deaths.counted.len(), REMEMBERED);
    }
}
