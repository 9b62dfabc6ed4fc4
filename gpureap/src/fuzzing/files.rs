//! Files of /proc, in which processes choose names and users name groups; and the configuration.

use std::{path::Path, time::Duration};

use super::assert_shown;
use crate::{
    api::privacy::Hiding,
    config::{self, Config, StandIn},
    out::sanitize::escape,
    process::{
        Place,
        cgroup::{Hierarchies, job_path},
        place,
        stat::{Stat, Status},
        walk::Mapping,
    },
};

/// /proc/PID/stat: any bytes, and any bytes as the name in a line of the kernel's.
pub(super) fn proc_stat(input: &[u8]) {
    if let Some(stat) = Stat::parse(input) {
        assert!(stat.comm.len() < input.len());
        assert!(stat.started_at(stat.start_ns()) || stat.start_ns() == u64::MAX);
    }
    let rest = b") S 494 410 411 0 -1 4194560 90274 0 319 0 473 65 0 0 20 0 18 0 2666 18364227584 15\n";
    let stat = Stat::parse(&[b"498 (", input, rest].concat()).expect("a line of the kernel's");
    assert_eq!(stat.comm, input);
    assert_eq!((stat.pid, stat.state, stat.ppid, stat.start_ticks), (498, 'S', 494, 2666));
}

/// /proc/PID/status: any bytes, and any bytes without a line end as the name, which the kernel escapes.
pub(super) fn proc_status(input: &[u8]) {
    assert!(Status::parse(input).nspids.len() <= input.len());
    let name: Vec<u8> = input.iter().copied().filter(|byte| *byte != b'\n').collect();
    let rest = b"\nUmask:\t0022\nTgid:\t498\nUid:\t1000\t1001\t0\t0\nNSpid:\t498\t7\nNSpgid:\t410\n";
    let status = Status::parse(&[b"Name:\t", name.as_slice(), rest].concat());
    assert_eq!(status, Status { tgid: Some(498), uid: Some(1001), nspids: vec![498, 7] });
}

/// /proc/PID/cgroup.
pub(super) fn proc_cgroup(input: &[u8]) {
    let paths = place::cgroup_paths(input);
    let chosen = place::cgroup_path(input);
    assert!(chosen.as_ref().is_none_or(|path| path.starts_with('/') && paths.contains(path)));
    for path in &paths {
        let Place { unit, container, slurm_job, slurm_step, pod } = Place::of(path);
        assert!(slurm_step.is_none() || slurm_job.is_some());
        if let Some(unit) = place::system_unit(path) {
            assert!(path.split('/').any(|segment| segment == unit));
            assert!(container.is_none() && slurm_job.is_none() && pod.is_none() && !path.starts_with("/user.slice/"));
        }
        if place::host_container(path).is_some() {
            assert!(container.is_some() && !path.starts_with("/user.slice/"));
        }
        if let Some((job, _)) = job_path(path) {
            let below = path.strip_prefix(job).expect("a job's group is above");
            assert!(!job.is_empty() && job != "/" && (below.is_empty() || below.starts_with('/')), "{path} of {job}");
        }
        for text in [unit, container, slurm_job, slurm_step, pod].into_iter().flatten() {
            assert_shown(&escape(&text));
        }
    }
    let table = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
    for (directory, path) in Hierarchies::parse(table).of(&String::from_utf8_lossy(input)) {
        assert!(directory.starts_with("/sys/fs/cgroup"), "{} of {path}", directory.display());
    }
}

/// /proc/PID/maps.
pub(super) fn proc_maps(input: &[u8]) {
    for line in String::from_utf8_lossy(input).lines() {
        let Some(Mapping { range, file: (major, minor, inode), path }) = Mapping::parse(line) else { continue };
        assert!(path.starts_with('/') && line.ends_with(path));
        let written = format!("{range} rw-s 00000000 {major:02x}:{minor:02x} {inode}    {path}");
        assert_eq!(Mapping::parse(&written), Mapping::parse(line));
    }
}

/// /proc/PID/mountinfo: whom /proc hides, and where groups are.
pub(super) fn mountinfo(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let hiding = Hiding::parse(&text);
    if hiding == Hiding::Nobody {
        assert!(text.contains(" /proc ") && text.contains(" - proc "), "not knowing hides");
    }
    // Whatever lies on top of it.
    let over = format!("{text}\n40 22 0:50 / /proc rw - proc proc rw,hidepid=2\n");
    assert_eq!(Hiding::parse(&over), Hiding::AllBut(None));
    Hierarchies::parse(&text).of("0::/system.slice/a.service\n7:devices:/job");
}

/// The configuration, and the texts of options that are read in the same way.
pub(super) fn config(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    match Config::parse(text, Path::new("/etc/gpureap/config.toml")) {
        Ok(config) => {
            let numbers = |device: &StandIn| (device.major, device.minor);
            for (index, device) in config.devices.iter().enumerate() {
                assert!(device.node.is_absolute() && device.major > 0);
                assert!(config.devices[..index].iter().all(|other| numbers(other) != numbers(device)));
            }
            let second = Duration::from_secs(1);
            assert!(config.daemon.sweep_period >= second && config.journal.heartbeat >= second);
            assert!(config.journal.max_size >= 1 << 20 && !config.journal.keeps(""));
        }
        Err(failure) => {
            let message = failure.to_string();
            let place = message.strip_prefix("/etc/gpureap/config.toml:").expect("it tells the place");
            let (number, _) = place.split_once(": ").expect("and the line");
            let number: usize = number.parse().expect("which is a number");
            assert!((1..=text.matches('\n').count() + 1).contains(&number), "{message}");
            assert!(!message.contains('\n'), "{message}");
        }
    }
    if let Ok(device) = text.parse::<StandIn>() {
        let StandIn { major, minor, node } = &device;
        let written = format!("kind=standin,major={major},minor={minor},node={}", node.display());
        assert_eq!(written.parse(), Ok(device));
    }
    drop(config::duration(text));
}
