//! What the daemon says of a pinned fence: who newly tried. A supervisor may try a thousand times a second, so of each
//! kind of trier there is a line at once and then one a minute at most.

use std::collections::{HashMap, HashSet};

use super::report::{HostNames, Names as _};
use crate::{
    bpf::fence::{
        Denied,
        pinned::{self, Pinned},
    },
    clock,
    config::Config,
    gpu::devices::Devices,
    model::{ProcKey, Slot},
    out::{complaint::Complaint, sanitize::escape, words::plural},
};

/// Between two lines about the same kind of trier.
const QUIET_NS: u64 = 60_000_000_000;

/// Processes of one name, user and cgroup, and one device.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Who {
    pub slot: Slot,
    pub comm: String,
    pub uid: u32,
    pub cgroup_id: u64,
}

/// What is to be said of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub who: Who,
    /// Since the line before.
    pub opens: u64,
    pub processes: usize,
    pub last: ProcKey,
}

#[derive(Debug, Default)]
struct Pending {
    opens: u64,
    processes: HashSet<ProcKey>,
    last: Option<(u64, ProcKey)>,
    told_ns: Option<u64>,
}

/// Remembers what was said.
#[derive(Debug, Default)]
pub struct Watch {
    /// As the last look saw them. The kernel forgets the oldest, and so does this.
    seen: HashMap<(ProcKey, Slot), u64>,
    pending: HashMap<Who, Pending>,
}

impl Watch {
    /// Takes what the kernel remembers now.
    pub fn note(&mut self, denied: &[Denied]) {
        let mut seen = HashMap::with_capacity(denied.len());
        for Denied { key, comm, uid, cgroup_id, slot, count, first_ns: _, last_ns } in denied {
            seen.insert((*key, *slot), *count);
            let new = count.saturating_sub(self.seen.get(&(*key, *slot)).copied().unwrap_or(0));
            if new == 0 {
                continue;
            }
            let who = Who { slot: *slot, comm: comm.clone(), uid: *uid, cgroup_id: *cgroup_id };
            let pending = self.pending.entry(who).or_default();
            pending.opens += new;
            pending.processes.insert(*key);
            pending.last = pending.last.max(Some((*last_ns, *key)));
        }
        self.seen = seen;
    }

    /// What is to be said now.
    pub fn lines(&mut self, now_ns: u64) -> Vec<Line> {
        let mut lines = Vec::new();
        for (who, pending) in &mut self.pending {
            let quiet = pending.told_ns.is_some_and(|told| now_ns.saturating_sub(told) < QUIET_NS);
            if let (false, Some((_, last))) = (quiet, pending.last) {
                lines.push(Line { who: who.clone(), opens: pending.opens, processes: pending.processes.len(), last });
                *pending = Pending { told_ns: Some(now_ns), ..Pending::default() };
            }
        }
        self.pending.retain(|_, pending| {
            pending.opens > 0 || pending.told_ns.is_some_and(|told| now_ns.saturating_sub(told) < QUIET_NS)
        });
        lines.sort_by_key(|line| (line.who.slot, line.last));
        lines
    }

    /// Whether something waits for the end of the quiet time.
    pub fn has_more(&self) -> bool {
        self.pending.values().any(|pending| pending.opens > 0)
    }
}

/// Follows the pinned fence, whoever raises and lowers it.
#[derive(Debug, Default)]
pub struct FenceWatch {
    pinned: Option<Pinned>,
    total: u64,
    watch: Watch,
    complaint: Complaint,
    /// Refused opens of all fences that were seen.
    denied: u64,
}

impl FenceWatch {
    /// Opens that were refused since this began, by whatever fence was pinned.
    pub const fn denied(&self) -> u64 {
        self.denied
    }

    /// One look: two or three system calls while nobody tries.
    pub fn look(&mut self, config: &Config, devices: &Devices) {
        match self.try_look(config, devices) {
            Ok(()) => drop(self.complaint.end()),
            Err(error) => {
                let reason = format!("{error:#}");
                if self.complaint.is_news(&reason) {
                    tracing::warn!("fence: {reason}");
                }
            }
        }
    }

    fn try_look(&mut self, config: &Config, devices: &Devices) -> anyhow::Result<()> {
        if self.pinned.as_ref().is_none_or(|pinned| !pinned.is_current(config)) {
            *self = Self { complaint: std::mem::take(&mut self.complaint), denied: self.denied, ..Self::default() };
            self.pinned = Pinned::open(config)?;
        }
        let Some(pinned) = &self.pinned else {
            // What a killed command left half made.
            pinned::remove_expired(config)?;
            return Ok(());
        };
        let (total, over) = pinned.glance()?;
        if total != self.total || self.watch.has_more() {
            let standing = pinned.standing()?;
            self.watch.note(&standing.denied);
            self.denied += total.saturating_sub(self.total);
            self.total = total;
            let devices = devices.with_all_of(&standing.table);
            let names = HostNames::new(config);
            for line in self.watch.lines(clock::boottime_ns()) {
                let node = devices.get(line.who.slot).map(|device| device.node.display().to_string());
                let living = names.process(line.last.tgid, line.last.start_ns).and_then(|(_, cgroup)| cgroup);
                let cgroup = living.or_else(|| names.cgroup(line.who.cgroup_id));
                tracing::warn!("{}", say(&line, node.as_deref(), cgroup.as_deref()));
            }
        }
        if over && pinned::remove_expired(config)? {
            tracing::info!("the fence is over: its time has passed");
            self.pinned = None;
        }
        Ok(())
    }
}

fn say(line: &Line, node: Option<&str>, cgroup: Option<&str>) -> String {
    let Line { who: Who { slot, comm, uid, cgroup_id }, opens, processes, last } = line;
    let opens = format!("{opens} {}", plural(*opens as usize, "open", "opens"));
    let node = node.map_or_else(|| format!("slot {slot}"), |node| escape(node).into_owned());
    let pid = last.tgid;
    let processes = if *processes == 1 { format!("pid {pid}") } else { format!("{processes} processes, last {pid}") };
    let cgroup = cgroup.map_or_else(|| format!("cgroup {cgroup_id}"), |path| format!("cgroup {}", escape(path)));
    format!("the fence refused {opens} of {node} by {} ({processes}, uid {uid}, {cgroup})", escape(comm))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn denied(tgid: u32, count: u64, last_ns: u64) -> Denied {
        Denied {
            key: ProcKey::new(tgid, 7),
            comm: "worker".to_owned(),
            uid: 1000,
            cgroup_id: 5,
            slot: 0,
            count,
            first_ns: 1,
            last_ns,
        }
    }

    fn told(watch: &mut Watch, now_ns: u64) -> Vec<(u64, usize, u32)> {
        watch.lines(now_ns).iter().map(|line| (line.opens, line.processes, line.last.tgid)).collect()
    }

    #[test]
    fn the_first_try_is_told_at_once_and_the_rest_once_a_minute() {
        let mut watch = Watch::default();
        assert_eq!(told(&mut watch, 0), []);
        watch.note(&[denied(10, 3, 5)]);
        assert_eq!(told(&mut watch, 10), [(3, 1, 10)]);
        // The same again is no news; more of it waits.
        watch.note(&[denied(10, 3, 5)]);
        assert!(!watch.has_more());
        watch.note(&[denied(10, 5, 20), denied(11, 1, 30)]);
        watch.note(&[denied(11, 1, 30), denied(12, 1, 25)]);
        assert_eq!(told(&mut watch, 40), []);
        assert!(watch.has_more());
        assert_eq!(told(&mut watch, 10 + QUIET_NS), [(4, 3, 11)]);
        assert!(!watch.has_more());
        // Another kind of trier is told at once.
        watch.note(&[Denied { uid: 0, ..denied(13, 1, 50) }]);
        assert_eq!(told(&mut watch, 11 + QUIET_NS), [(1, 1, 13)]);
        assert_eq!(told(&mut watch, 20 + 3 * QUIET_NS), []);
        assert!(watch.pending.is_empty());
    }

    #[test]
    fn lines_escape_what_a_process_calls_itself() {
        let who = Who { slot: 3, comm: "a\u{1b}[2Jb".to_owned(), uid: 5, cgroup_id: 9 };
        let line = Line { who, opens: 2, processes: 1, last: ProcKey::new(77, 1) };
        let text = say(&line, Some("/dev/nvidia0"), None);
        assert!(text.starts_with("the fence refused 2 opens of /dev/nvidia0 by a"), "{text}");
        assert!(text.ends_with("b (pid 77, uid 5, cgroup 9)") && !text.contains('\u{1b}'), "{text}");
        let many = Line { opens: 1, processes: 2, ..line };
        assert!(say(&many, None, Some("/x")).contains("1 open of slot 3 by "), "{many:?}");
    }
}
