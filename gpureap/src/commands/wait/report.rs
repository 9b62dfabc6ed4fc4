//! `gpureap.wait/1`: what `wait --json` prints. Fields may be added, never renamed within a schema number.

use std::{collections::BTreeSet, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    decide::{Outcome, Standing, Verdict},
    vigil::{Ended, Over},
};
use crate::{
    gpu::devices::Devices,
    host::Host,
    model::{Backend, Device, DeviceKind, How, Slot, Source, View},
    out::{
        sanitize::escape,
        words::{self, command, nodes, plural, took, user, word},
    },
    reap::{
        plan::{Class, Matching, Policy, Row},
        report::{Count, Identity, millis},
        stuck::Stuck,
    },
};

pub const SCHEMA: &str = "gpureap.wait/1";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub schema: String,
    pub host: String,
    pub boot_id: String,
    /// When the wait began, RFC 3339.
    pub time: String,
    pub outcome: Outcome,
    pub exit_code: u8,
    /// A full, complete sweep of the kernel at the end found no chosen holder.
    pub verified: bool,
    pub source: Source,
    pub backend: Option<Backend>,
    pub complete: bool,
    pub cannot_see: BTreeSet<How>,
    #[serde(rename = "match")]
    pub matching: Matched,
    pub ignore_monitors: bool,
    /// Null: for ever.
    pub timeout_ms: Option<f64>,
    pub waited_ms: f64,
    pub devices: Vec<DeviceState>,
    /// Those that still hold.
    pub holders: Vec<Waited>,
    /// Those that let go meanwhile, in their order.
    pub ended: Vec<Waited>,
    /// Files that no process has.
    pub orphans: u32,
    pub notes: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Matched {
    Attached,
    Any,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceState {
    pub node: String,
    pub kind: DeviceKind,
    pub gpu: Option<u32>,
    pub index: Option<u32>,
    pub uuid: Option<String>,
    pub bdf: Option<String>,
    /// At the end, whether they count or not.
    pub holders: u32,
    /// Null where the source cannot count files.
    pub open_files: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Waited {
    #[serde(flatten)]
    pub identity: Identity,
    pub class: Class,
    pub class_rule: String,
    pub nodes: Vec<String>,
    /// From the beginning of the wait; null while it holds.
    pub released_ms: Option<f64>,
    /// Why it does not end, when a SIGKILL waits for it.
    pub stuck: Option<Stuck>,
}

/// What the report is made beside the outcome.
pub(super) struct Scene<'a> {
    pub(super) host: &'a Host,
    pub(super) devices: &'a Devices,
    pub(super) policy: &'a Policy,
    pub(super) timeout: Option<Duration>,
    pub(super) ignore_monitors: bool,
}

impl Scene<'_> {
    pub(super) fn report(&self, over: Over) -> Report {
        let Over { verdict, view, standing, held, ended, at_ns } = over;
        let Verdict { outcome, exit, verified, notes } = verdict;
        let Standing { holders: _, ignored: _, orphans, undecided: _ } = standing;
        let Host { name, boot_id, now, boottime_ns: begun_ns } = self.host;
        Report {
            schema: SCHEMA.to_owned(),
            host: name.clone(),
            boot_id: boot_id.clone(),
            time: now.to_string(),
            outcome,
            exit_code: exit as u8,
            verified,
            source: view.source,
            backend: view.backend,
            complete: view.complete,
            cannot_see: view.cannot_see.clone(),
            matching: match self.policy.matching {
                Matching::Attached => Matched::Attached,
                Matching::Any => Matched::Any,
            },
            ignore_monitors: self.ignore_monitors,
            timeout_ms: self.timeout.map(|timeout| timeout.as_micros() as f64 / 1_000.0),
            waited_ms: millis(*begun_ns, at_ns),
            devices: self.states(&view),
            holders: held.into_iter().map(|(row, identity, stuck)| self.waited(row, identity, None, stuck)).collect(),
            ended: ended
                .into_iter()
                .map(|Ended { identity, row, at_ns }| self.waited(row, identity, Some(millis(*begun_ns, at_ns)), None))
                .collect(),
            orphans,
            notes: notes.into_iter().chain(view.notes).collect(),
        }
    }

    fn waited(&self, row: Row, identity: Identity, released_ms: Option<f64>, stuck: Option<Stuck>) -> Waited {
        let Row { key: _, via: _, slots, class, class_rule, action: _, stop_unit: _ } = row;
        let node = |slot: &Slot| self.devices.node(*slot);
        Waited { identity, class, class_rule, nodes: slots.iter().map(node).collect(), released_ms, stuck }
    }

    fn states(&self, view: &View) -> Vec<DeviceState> {
        let chosen = self.devices.list().iter().filter(|device| self.policy.wants(device.slot));
        let counted = chosen.map(|device| (device, Count::of(view, device.slot)));
        counted
            .filter(|(device, count)| device.kind.is_gpu() && device.minor.is_some() || count.holders > 0)
            .map(|(device, Count { holders, open_files })| {
                let Device { node, kind, gpu, index, uuid, bdf, .. } = device;
                DeviceState {
                    node: node.display().to_string(),
                    kind: *kind,
                    gpu: *gpu,
                    index: *index,
                    uuid: uuid.clone(),
                    bdf: bdf.clone(),
                    holders,
                    open_files,
                }
            })
            .collect()
    }
}

/// For people: a line for each process that still holds, then what the wait came to.
pub fn text(report: &Report) -> String {
    let Report { outcome, verified, source, cannot_see, waited_ms, devices, holders, ended, orphans, notes, .. } =
        report;
    let mut lines = Vec::new();
    for Waited { identity, class, class_rule, nodes: held, released_ms: _, stuck } in holders {
        let Identity { pid, comm, argv, user: name, uid, .. } = identity;
        let class =
            if *class == Class::Job { String::new() } else { format!("  ({}: {})", word(class), escape(class_rule)) };
        let (user, command) = (user(name.as_deref(), *uid), command(comm, argv));
        lines.push(format!("holds  {pid:>7}  {user:<10}  {}  {command}{class}", nodes(held)));
        if let Some(Stuck { tid, thread, state, in_kernel: _, wchan, stack, age_s, kill_pending: _ }) = stuck {
            let wchan = wchan.as_ref().map(|wchan| format!(" in {}", escape(wchan))).unwrap_or_default();
            let thread = escape(thread);
            lines.push(format!(
                "       SIGKILL does not end it: thread {tid} ({thread}) is in state {state}{wchan}, {age_s} s old"
            ));
            lines.extend(stack.iter().map(|frame| format!("         {}", escape(frame))));
        }
    }
    lines.extend(notes.iter().map(|note| format!("note: {}", escape(note))));
    let after = took(*waited_ms);
    let still: Vec<String> =
        devices.iter().filter(|device| device.holders > 0).map(|device| device.node.clone()).collect();
    let still = if still.is_empty() { "what was chosen".to_owned() } else { nodes(&still) };
    let count = format!("{} {}", holders.len(), plural(holders.len(), "process", "processes"));
    lines.push(match outcome {
        Outcome::Free => {
            let how = words::proof(*verified, *source, cannot_see);
            match ended.len() {
                0 => format!("free: nobody held what was chosen, {how}"),
                gone => format!("free after {after}: {gone} {} let go, {how}", plural(gone, "process", "processes")),
            }
        }
        Outcome::Held => format!("still held after {after}: {still}, by {count}"),
        Outcome::Unkillable => format!("still held after {after}: {still}, by a process that SIGKILL does not end"),
        Outcome::Protected => format!("still held after {after}: {still}, only by protected or monitor processes"),
        Outcome::KernelReference => {
            format!("no process holds what was chosen, but the kernel still has {orphans} open files after {after}")
        }
        Outcome::NotPermitted => {
            format!("nobody that was seen holds what was chosen, {}", words::proof(false, *source, cannot_see))
        }
    });
    lines.push(String::new());
    lines.join("\n")
}
