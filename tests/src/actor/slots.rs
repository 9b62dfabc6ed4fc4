//! A range of descriptor numbers that one thread changes at random, knowing at every moment what each holds.
use std::time::{SystemTime, UNIX_EPOCH};

use super::sys::{self, Fd};
use crate::random::Random;

/// One open file, named so that copies in other processes can be recognised.
pub(super) type FileId = u64;

fn new_id() -> FileId {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
    (now << 16) | (sys::tid() as u64 & 0xffff)
}

#[derive(Clone, Copy)]
pub(super) struct Held {
    pub(super) id: FileId,
    cloexec: bool,
}

/// The numbers from `first`, and what they hold. Nothing else in the process uses these numbers.
#[derive(Clone)]
pub(super) struct Slots {
    dev: String,
    pub(super) first: Fd,
    held: Vec<Option<Held>>,
    pub(super) random: Random,
}

impl Slots {
    pub(super) const LENGTH: usize = 24;

    pub(super) fn new(dev: &str, first: Fd, random: Random) -> Self {
        Self { dev: dev.to_owned(), first, held: vec![None; Self::LENGTH], random }
    }

    pub(super) fn end(&self) -> Fd {
        self.first + Self::LENGTH as Fd
    }

    fn any(&mut self) -> usize {
        self.random.below(Self::LENGTH as u64) as usize
    }

    fn number(&self, slot: usize) -> Fd {
        self.first + slot as Fd
    }

    /// What is held, by number.
    pub(super) fn held(&self) -> impl Iterator<Item = (Fd, Held)> {
        self.held.iter().enumerate().filter_map(|(slot, held)| held.map(|held| (self.number(slot), held)))
    }

    pub(super) fn count(&self) -> usize {
        self.held().count()
    }

    /// A random number that holds something.
    pub(super) fn pick(&mut self) -> Option<(Fd, Held)> {
        let from = self.any();
        (0..Self::LENGTH)
            .map(|step| (from + step) % Self::LENGTH)
            .find_map(|slot| self.held[slot].map(|held| (self.number(slot), held)))
    }

    /// Moves a descriptor that came from elsewhere to a number of this range.
    pub(super) fn adopt(&mut self, fd: Fd, id: FileId) {
        let slot = self.any();
        self.place(fd, slot, id, false);
    }

    fn place(&mut self, fd: Fd, slot: usize, id: FileId, cloexec: bool) {
        sys::dup3(fd, self.number(slot), if cloexec { sys::O_CLOEXEC } else { 0 });
        sys::close(fd);
        self.held[slot] = Some(Held { id, cloexec });
    }

    /// Forgets what an exec closes.
    pub(super) fn exec(&mut self) {
        for held in &mut self.held {
            *held = held.filter(|held| !held.cloexec);
        }
    }

    /// One random operation.
    pub(super) fn step(&mut self) {
        let (a, b) = (self.any(), self.any());
        match self.random.below(11) {
            0..=2 => {
                let cloexec = self.random.below(2) == 0;
                let fd = sys::open(&self.dev, sys::O_RDWR | if cloexec { sys::O_CLOEXEC } else { 0 });
                self.place(fd, a, new_id(), cloexec);
            }
            3 => {
                if let Some(held) = self.held[a] {
                    sys::dup2(self.number(a), self.number(b));
                    if a != b {
                        self.held[b] = Some(Held { cloexec: false, ..held });
                    }
                }
            }
            4 => {
                if let (Some(held), true) = (self.held[a], a != b) {
                    sys::dup3(self.number(a), self.number(b), sys::O_CLOEXEC);
                    self.held[b] = Some(Held { cloexec: true, ..held });
                }
            }
            5 => {
                if self.held[a].take().is_some() {
                    sys::close(self.number(a));
                }
            }
            6 => {
                let free = self.held.iter().position(Option::is_none);
                if let (Some(held), Some(free)) = (self.held[a], free) {
                    let fd = sys::fcntl(self.number(a), libc::F_DUPFD, self.first).expect("F_DUPFD") as Fd;
                    assert_eq!(fd, self.number(free), "F_DUPFD gives the lowest free number");
                    self.held[free] = Some(Held { cloexec: false, ..held });
                }
            }
            7 => {
                let (low, high) = (a.min(b), a.max(b).min(a.min(b) + 3));
                sys::close_range(self.number(low), self.number(high) as u32, 0).expect("close_range");
                self.held[low..=high].fill(None);
            }
            8 => {
                if self.held[a].is_some() {
                    sys::close(sys::dup(self.number(a)));
                }
            }
            9 => {
                if self.held[a].take().is_some() {
                    sys::dup2(0, self.number(a));
                    sys::close(self.number(a));
                }
            }
            _ => {
                let (low, high) = (a.min(b), a.max(b));
                let flags = sys::CLOSE_RANGE_CLOEXEC;
                if sys::close_range(self.number(low), self.number(high) as u32, flags).is_ok() {
                    self.held[low..=high].iter_mut().flatten().for_each(|held| held.cloexec = true);
                }
            }
        }
    }
}
