//! What is true against what `holders --json` says.
use std::collections::BTreeMap;

use serde_json::Value;

use crate::actor::{
    sys::{self, Pid},
    truth::Truth,
};

/// One device in the output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeenDevice {
    pub procs: BTreeMap<Pid, (u32, u32)>,
    /// `None` where the source cannot count files.
    pub open_files: Option<u32>,
    pub orphans: u32,
}

/// The output of `holders --json`, by `major:minor`.
#[derive(Clone, Debug)]
pub struct Seen {
    pub devices: BTreeMap<String, SeenDevice>,
    pub source: String,
    pub backend: String,
    pub complete: bool,
    pub cannot_see: String,
    pub lost_events: u64,
    pub json: Value,
}

fn number(value: &Value, what: &str) -> u32 {
    value.as_u64().unwrap_or_else(|| panic!("{what}: a number, not {value}")) as u32
}

fn list<'a>(value: &'a Value, what: &str) -> &'a [Value] {
    value.as_array().unwrap_or_else(|| panic!("{what}: a list, not {value}"))
}

impl Seen {
    pub fn new(json: Value) -> Self {
        assert_eq!(json["schema"], "gpureap.holders/1", "the schema of {json}");
        let mut devices = BTreeMap::new();
        let mut by_node = BTreeMap::new();
        for device in list(&json["devices"], "devices") {
            // One that stands for all other minors has none.
            let minor =
                if device["minor"].is_null() { "*".to_owned() } else { number(&device["minor"], "minor").to_string() };
            let key = format!("{}:{minor}", number(&device["major"], "major"));
            by_node.insert(device["node"].as_str().expect("node").to_owned(), key.clone());
            let open_files = device["open_files"].as_u64().map(|count| count as u32);
            devices.insert(key, SeenDevice { open_files, ..SeenDevice::default() });
        }
        let mut at = |node: &Value, add: &mut dyn FnMut(&mut SeenDevice)| {
            let node = node.as_str().expect("node");
            let key = by_node.get(node).unwrap_or_else(|| panic!("{node} is not among the devices"));
            add(devices.get_mut(key).expect("inserted above"));
        };
        for holder in list(&json["holders"], "holders") {
            let pid = number(&holder["pid"], "pid") as Pid;
            for device in list(&holder["devices"], "the holder's devices") {
                let counts = (number(&device["fds"], "fds"), number(&device["maps"], "maps"));
                at(&device["node"], &mut |seen| {
                    let before = seen.procs.insert(pid, counts);
                    assert_eq!(before, None, "process {pid} is listed once");
                });
            }
        }
        for orphan in list(&json["orphans"], "orphans") {
            let files = number(&orphan["files"], "files");
            at(&orphan["node"], &mut |seen| seen.orphans += files);
        }
        let text = |name: &str| json[name].as_str().unwrap_or_default().to_owned();
        Self {
            devices,
            source: text("source"),
            backend: text("backend"),
            complete: json["complete"].as_bool().expect("complete"),
            cannot_see: json["cannot_see"].to_string(),
            lost_events: json["lost_events"].as_u64().unwrap_or_default(),
            json,
        }
    }

    /// The entry of one process.
    pub fn holder(&self, pid: Pid) -> Option<&Value> {
        list(&self.json["holders"], "holders").iter().find(|holder| holder["pid"] == pid)
    }

    /// Whether this source knows files that are in no table and no mapping: the pinned map of a backend that counts
    /// open files.
    pub fn sees_files(&self) -> bool {
        self.source == "map" && self.backend != "gate"
    }
}

/// A comparison for some actors.
pub struct Compare {
    /// The actors' sessions: other processes of the host may hold the same device, and are no mistake.
    pub sessions: Vec<Pid>,
}

impl Compare {
    /// Every difference, one readable line each.
    pub fn differences(&self, truth: &BTreeMap<String, Truth>, seen: &Seen) -> Vec<String> {
        let mut wrong = Vec::new();
        for (device, truth) in truth {
            match seen.devices.get(device) {
                Some(found) => self.device(device, truth, found, seen, &mut wrong),
                None => wrong.push(format!("{device}: not among the devices")),
            }
        }
        wrong
    }

    fn device(&self, device: &str, truth: &Truth, found: &SeenDevice, seen: &Seen, wrong: &mut Vec<String>) {
        let Truth { procs, files, in_flight, io_uring } = truth;
        let mut foreign = false;
        for (pid, counts) in procs.iter().filter(|(_, counts)| **counts != (0, 0)) {
            let got = found.procs.get(pid).copied().unwrap_or_default();
            if got != *counts {
                wrong.push(format!(
                    "{device}: process {pid} holds {} fds and {} maps, seen {} and {}",
                    counts.0, counts.1, got.0, got.1
                ));
            }
        }
        for (pid, counts) in &found.procs {
            if procs.get(pid).is_some_and(|counts| *counts != (0, 0)) {
                continue;
            }
            match sys::session(*pid) {
                Some(session) if !self.sessions.contains(&session) => foreign = true,
                state => wrong.push(format!(
                    "{device}: process {pid}{} holds nothing, seen {} fds and {} maps",
                    if state.is_none() { ", which has ended," } else { "" },
                    counts.0,
                    counts.1
                )),
            }
        }
        let hidden = in_flight + io_uring;
        let expected = if seen.sees_files() { *files } else { files - hidden };
        // A foreign holder's files are counted with ours, and only its descriptors are known.
        if !foreign && (found.open_files.is_some() || seen.sees_files()) && found.open_files != Some(expected) {
            wrong.push(format!("{device}: {expected} open files, seen {:?}", found.open_files));
        }
        if seen.sees_files() {
            if !foreign && found.orphans != hidden {
                wrong.push(format!("{device}: {hidden} files in no process, seen {} as orphans", found.orphans));
            }
        } else {
            for (count, word) in [(in_flight, "in-flight"), (io_uring, "io_uring")] {
                if *count > 0 && !seen.cannot_see.contains(word) {
                    wrong.push(format!("{device}: {word} files are out of sight, and cannot_see does not say so"));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const COMPARE: Compare = Compare { sessions: Vec::new() };
    /// A pid beyond the kernel's limit.
    const GONE: Pid = 1 << 30;

    fn seen(backend: &str, source: &str, fds: u32, open_files: Option<u32>, orphans: u32, cannot_see: &[&str]) -> Seen {
        let mut holders = Vec::new();
        if fds > 0 {
            holders.push(json!({"pid": GONE, "devices": [{"node": "/dev/zero", "fds": fds, "maps": 0}]}));
        }
        let orphans = json!([{"node": "/dev/zero", "files": orphans}]);
        Seen::new(json!({"schema": "gpureap.holders/1", "source": source, "backend": backend, "complete": true,
            "cannot_see": cannot_see, "lost_events": 0, "holders": holders, "orphans": orphans,
            "devices": [{"node": "/dev/zero", "major": 1, "minor": 5, "open_files": open_files}]}))
    }

    fn wrong(truth: &Truth, seen: &Seen) -> Vec<String> {
        COMPARE.differences(&BTreeMap::from([("1:5".to_owned(), truth.clone())]), seen)
    }

    #[test]
    fn what_is_right_has_no_differences() {
        let truth = Truth::files(2).fds(GONE, 3).in_flight(1);
        assert_eq!(wrong(&truth, &seen("kprobe", "map", 3, Some(2), 1, &[])), Vec::<String>::new());
        assert_eq!(wrong(&truth, &seen("gate", "map", 3, Some(1), 0, &["in-flight"])), Vec::<String>::new());
        assert_eq!(wrong(&truth, &seen("gate", "snapshot", 3, None, 0, &["in-flight"])), Vec::<String>::new());
    }

    #[test]
    fn each_mistake_is_a_difference() {
        let truth = Truth::files(2).fds(GONE, 3).in_flight(1);
        let cases = [
            ("a wrong count", seen("kprobe", "map", 2, Some(2), 1, &[])),
            ("a missing holder", seen("kprobe", "map", 0, Some(2), 1, &[])),
            ("a wrong number of files", seen("kprobe", "map", 3, Some(3), 1, &[])),
            ("a missing orphan", seen("kprobe", "map", 3, Some(2), 0, &[])),
            ("files that a map has to count", seen("fentry", "map", 3, None, 1, &[])),
            ("silence about what is out of sight", seen("gate", "map", 3, Some(1), 0, &["io_uring"])),
        ];
        for (case, seen) in cases {
            assert_eq!(wrong(&truth, &seen).len(), 1, "{case}: {:?}", wrong(&truth, &seen));
        }
        let stale = wrong(&Truth::none(), &seen("kprobe", "map", 1, Some(0), 0, &[]));
        assert!(stale.len() == 1 && stale[0].contains("which has ended"), "{stale:?}");
        let unknown = BTreeMap::from([("1:7".to_owned(), Truth::none())]);
        assert_eq!(COMPARE.differences(&unknown, &seen("kprobe", "map", 0, Some(0), 0, &[])).len(), 1);
    }
}
