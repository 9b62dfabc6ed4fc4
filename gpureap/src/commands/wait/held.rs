//! A process that is waited for.

use std::{os::fd::OwnedFd, path::Path};

use crate::{
    model::Holder,
    process::{
        pidfd,
        stat::{Stat, all_exiting},
    },
    reap::{plan::Row, plan::same_process, report::Identity},
};

#[derive(Debug)]
pub(super) struct Held {
    pub(super) row: Row,
    /// As of the time when it was first seen: afterwards there is nobody left to ask.
    pub(super) identity: Identity,
    /// Tells of its end, and the end of what it held with it. `None` where there was no descriptor left for it.
    pub(super) pidfd: Option<OwnedFd>,
}

impl Held {
    /// `None` if it is gone already.
    pub(super) fn open(row: Row, identity: Identity, proc: &Path) -> Option<Self> {
        let pidfd = match pidfd::open(row.key.tgid) {
            Ok(Some(pidfd)) => Some(pidfd),
            Ok(None) => return None,
            Err(error) => {
                tracing::debug!("pidfd of {}: {error}", row.key.tgid);
                None
            }
        };
        // Of a process that /proc hides the number has to do: its end only means that one looks again.
        let stat = Stat::read(&proc.join(row.key.tgid.to_string()));
        if stat.is_some_and(|stat| !stat.started_at(row.key.start_ns)) {
            return None;
        }
        Some(Self { row, identity, pidfd })
    }

    /// Whether it still has one of the devices, by a look at it.
    pub(super) fn holds(&self, seen: Option<&Holder>) -> bool {
        seen.filter(|holder| same_process(holder.key, self.row.key))
            .is_some_and(|holder| holder.held().any(|slot| self.row.slots.contains(&slot)))
    }

    /// All its threads are on their way out: what it held is being released, and only its end tells when that is done.
    pub(super) fn is_exiting(&self, proc: &Path) -> bool {
        let Some(pidfd) = &self.pidfd else { return false };
        let ended = pidfd::has_ended(pidfd).unwrap_or(false);
        !ended && all_exiting(&proc.join(self.row.key.tgid.to_string())).unwrap_or(false)
    }
}
