//! What this process may do, and in which world it looks.

use std::{fs, os::unix::fs::MetadataExt as _};

use crate::error::Failure;

/// Bits of the capability sets (include/uapi/linux/capability.h) that a tracer needs.
const NEEDED: &[(u32, &str)] = &[(21, "CAP_SYS_ADMIN"), (38, "CAP_PERFMON"), (39, "CAP_BPF")];

/// `PROC_PID_INIT_INO`, include/linux/proc_ns.h: the pid namespace of the host.
const HOST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Capabilities that a tracer needs and this process does not have.
pub fn lacking() -> Vec<&'static str> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    lacking_in(&status)
}

fn lacking_in(status: &str) -> Vec<&'static str> {
    let effective = effective(status);
    NEEDED.iter().filter(|(bit, _)| effective & 1 << bit == 0).map(|(_, name)| *name).collect()
}

/// `CAP_SYS_PTRACE`: without it, what other users' processes hold is not to be read in /proc.
const SYS_PTRACE: u32 = 19;

/// Whether /proc shows this caller what every process of the host holds: root, in the host's pid namespace, with the
/// capability. Root of a container is none of these.
pub fn sees_every_process() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    rustix::process::geteuid().is_root() && require_host_pids().is_ok() && effective(&status) & 1 << SYS_PTRACE != 0
}

fn effective(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|text| u64::from_str_radix(text.trim(), 16).ok()).unwrap_or(0)
}

/// The kernel shows an iterator only the tasks of the caller's pid namespace, and under other numbers: what it says there
/// of a host is wrong, and a resync by it would correct true counts away.
pub fn require_host_pids() -> Result<(), Failure> {
    match fs::metadata("/proc/self/ns/pid") {
        Ok(namespace) if namespace.ino() != HOST_PID_NAMESPACE => Err(Failure::unsupported(
            "this is a pid namespace of its own, where the kernel shows only the processes in it: run gpureap on the host, or in the host's pid namespace",
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::lacking_in;

    #[test]
    fn missing_capabilities_are_named() {
        assert_eq!(lacking_in("Name:\tx\nCapEff:\t000001ffffffffff\n"), <[&str; 0]>::default());
        assert_eq!(lacking_in("CapEff:\t000001ffffdfffff\n"), ["CAP_SYS_ADMIN"]);
        assert_eq!(lacking_in("CapEff:\t0000000000000000\n"), ["CAP_SYS_ADMIN", "CAP_PERFMON", "CAP_BPF"]);
        assert_eq!(lacking_in("").len(), 3);
    }
}
