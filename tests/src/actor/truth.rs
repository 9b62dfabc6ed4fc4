//! What is true after a step, and the line protocol that says it.
use std::{collections::BTreeMap, fmt};

use serde_json::{Map, Value, json};

use super::sys::{self, Pid};

/// Why an operation cannot run here.
pub struct Skip(pub String);

impl<T: fmt::Display> From<T> for Skip {
    fn from(reason: T) -> Self {
        Self(reason.to_string())
    }
}

/// Who holds one device, by construction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Truth {
    /// Descriptors and mapped areas by process.
    pub procs: BTreeMap<Pid, (u32, u32)>,
    pub files: u32,
    pub in_flight: u32,
    pub io_uring: u32,
}

impl Truth {
    /// Nobody holds anything.
    pub fn none() -> Self {
        Self::default()
    }

    /// So many open files, however many descriptors refer to them.
    pub fn files(files: usize) -> Self {
        Self { files: files as u32, ..Self::default() }
    }

    /// The process has so many descriptors in all its tables.
    #[must_use]
    pub fn fds(mut self, pid: Pid, count: usize) -> Self {
        self.procs.entry(pid).or_default().0 = count as u32;
        self
    }

    /// The process maps the device so many times.
    #[must_use]
    pub fn maps(mut self, pid: Pid, count: usize) -> Self {
        self.procs.entry(pid).or_default().1 = count as u32;
        self
    }

    /// So many of the files are only in a socket's queue.
    #[must_use]
    pub fn in_flight(mut self, count: usize) -> Self {
        self.in_flight = count as u32;
        self
    }

    /// So many of the files are only in an io_uring table.
    #[must_use]
    pub fn io_uring(mut self, count: usize) -> Self {
        self.io_uring = count as u32;
        self
    }

    pub fn json(&self) -> Value {
        let Self { procs, files, in_flight, io_uring } = self;
        let procs: Vec<Value> = procs
            .iter()
            .filter(|(_, counts)| **counts != (0, 0))
            .map(|(pid, (fds, maps))| json!({"pid": pid, "fds": fds, "maps": maps}))
            .collect();
        json!({"procs": procs, "files": files, "in_flight": in_flight, "io_uring": io_uring})
    }
}

/// Reads a `devices` object.
pub fn parse(devices: &Value) -> BTreeMap<String, Truth> {
    let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("a number, not {value}")) as u32;
    let devices = devices.as_object().unwrap_or_else(|| panic!("a devices object, not {devices}"));
    let truth = |value: &Value| {
        let procs = value["procs"].as_array().expect("procs").iter();
        let procs = procs.map(|proc| (number(&proc["pid"]) as Pid, (number(&proc["fds"]), number(&proc["maps"]))));
        Truth {
            procs: procs.collect(),
            files: number(&value["files"]),
            in_flight: number(&value["in_flight"]),
            io_uring: number(&value["io_uring"]),
        }
    };
    devices.iter().map(|(device, value)| (device.clone(), truth(value))).collect()
}

/// What is true of several actors at once; none of them knows a process of another.
pub fn sum(truths: &[&BTreeMap<String, Truth>]) -> BTreeMap<String, Truth> {
    let mut sum: BTreeMap<String, Truth> = BTreeMap::new();
    for (device, truth) in truths.iter().copied().flatten() {
        let total = sum.entry(device.clone()).or_default();
        for (pid, counts) in &truth.procs {
            let before = total.procs.insert(*pid, *counts);
            assert_eq!(before, None, "process {pid} belongs to one actor");
        }
        total.files += truth.files;
        total.in_flight += truth.in_flight;
        total.io_uring += truth.io_uring;
    }
    sum
}

/// `major:minor` of a device number.
pub fn key(device: u64) -> String {
    format!("{}:{}", libc::major(device), libc::minor(device))
}

/// The `devices` object of a line.
pub fn devices<'a>(truths: impl IntoIterator<Item = (&'a str, &'a Truth)>) -> Value {
    let map: Map<String, Value> = truths.into_iter().map(|(device, truth)| (device.to_owned(), truth.json())).collect();
    Value::Object(map)
}

pub fn say(line: &Value) {
    sys::write_all(1, format!("{line}\n").as_bytes());
}

/// The device an operation works on, and the audience that watches each step.
pub struct Stage {
    pub dev: String,
    pub device: String,
}

impl Stage {
    pub fn new(dev: &str) -> Result<Self, Skip> {
        let number = sys::device_number(dev).map_err(|error| Skip(format!("{dev}: {error}")))?;
        Ok(Self { dev: dev.to_owned(), device: key(number) })
    }

    pub fn open(&self, flags: i32) -> sys::Fd {
        sys::open(&self.dev, flags)
    }

    /// Says what is true now and waits until it has been looked at.
    pub fn at(&self, step: &str, truth: &Truth) {
        self.at_all(step, [(self.device.as_str(), truth)]);
    }

    /// As [`Stage::at`], for several devices.
    pub fn at_all<'a>(&self, step: &str, truths: impl IntoIterator<Item = (&'a str, &'a Truth)>) {
        say(&json!({"step": step, "devices": devices(truths)}));
        sys::wait_byte(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truths_add_up_by_device() {
        let of = |device: &str, truth: Truth| BTreeMap::from([(device.to_owned(), truth)]);
        let (one, two) = (Truth::files(2).fds(1, 1).in_flight(1), Truth::files(3).maps(2, 2).in_flight(1).io_uring(1));
        let both = Truth::files(5).fds(1, 1).maps(2, 2).in_flight(2).io_uring(1);
        let mut expected = of("1:5", both);
        expected.extend(of("1:7", Truth::files(1).fds(3, 1)));
        let other = of("1:7", Truth::files(1).fds(3, 1));
        assert_eq!(sum(&[&of("1:5", one), &of("1:5", two), &other]), expected);
    }
}
