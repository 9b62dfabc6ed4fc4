//! What this process may do, and in which world it looks.

use std::{fs, os::unix::fs::MetadataExt as _, path::Path};

use crate::error::Failure;

const SYS_ADMIN: u32 = 21;

/// Bits of the capability sets (include/uapi/linux/capability.h) that a tracer needs.
const NEEDED: &[(u32, &str)] = &[(12, "CAP_NET_ADMIN"), (38, "CAP_PERFMON"), (39, "CAP_BPF")];

/// `PROC_PID_INIT_INO`, include/linux/proc_ns.h: the pid namespace of the host.
const HOST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// `PROC_USER_INIT_INO`, in the same place: capabilities of any other user namespace are none over the host's processes.
const HOST_USER_NAMESPACE: u64 = 0xEFFF_FFFD;

/// `PROC_SUPER_MAGIC`, include/uapi/linux/magic.h.
const PROC_FS: i64 = 0x9fa0;

/// Capabilities that a tracer needs and this process does not have.
pub fn lacking() -> Vec<&'static str> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    lacking_in(&status)
}

fn lacking_in(status: &str) -> Vec<&'static str> {
    let effective = effective(status);
    // It stands for the others, and is far more than they are.
    if effective & 1 << SYS_ADMIN != 0 {
        return Vec::new();
    }
    NEEDED.iter().filter(|(bit, _)| effective & 1 << bit == 0).map(|(_, name)| *name).collect()
}

/// What the kernel did not permit, by what this process lacks of the rights for it.
pub fn refused(what: &str, needed: &[&str], detail: &str) -> Failure {
    let lacking: Vec<&str> = lacking().into_iter().filter(|name| needed.contains(name)).collect();
    refusal(what, &lacking, rustix::process::geteuid().is_root(), detail)
}

fn refusal(what: &str, lacking: &[&str], is_root: bool, detail: &str) -> Failure {
    let (names, root) = (lacking.join(", "), if is_root { "" } else { "; root has them" });
    Failure::not_permitted(match lacking.len() {
        0 => format!(
            "{what} is refused, and not for a lack of capabilities: by a seccomp filter, a lockdown or the like ({detail})"
        ),
        _ => format!("{what} needs {names}, which this process lacks{root} ({detail})"),
    })
}

/// `CAP_SYS_PTRACE`: without it, what other users' processes hold is not to be read in /proc.
const SYS_PTRACE: u32 = 19;

/// Whether /proc shows this caller what every process of the host holds: root, in the host's pid and user namespaces, with
/// the capability. Root of a container is none of these.
pub fn sees_every_process() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let sees = sees_all(&status, namespace("pid"), namespace("user"));
    rustix::process::geteuid().is_root() && sees
}

fn sees_all(status: &str, pids: Option<u64>, users: Option<u64>) -> bool {
    is_host(pids, HOST_PID_NAMESPACE) && is_host(users, HOST_USER_NAMESPACE) && effective(status) & 1 << SYS_PTRACE != 0
}

/// The number of one of this process's namespaces; `None` on a kernel without that kind.
fn namespace(kind: &str) -> Option<u64> {
    fs::metadata(format!("/proc/self/ns/{kind}")).ok().map(|namespace| namespace.ino())
}

fn is_host(namespace: Option<u64>, host: u64) -> bool {
    namespace.is_none_or(|namespace| namespace == host)
}

/// `CAP_DAC_OVERRIDE`: without it, root is asked for the permission bits of files as others are.
const DAC_OVERRIDE: u32 = 1;

/// Why a file of ours may not be used.
pub fn file_refused() -> &'static str {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    match (rustix::process::geteuid().is_root(), effective(&status) & 1 << DAC_OVERRIDE != 0) {
        (false, _) => "permission denied, run as root",
        (true, false) => "permission denied: this root lacks CAP_DAC_OVERRIDE, and the file is not its own",
        (true, true) => "permission denied, even to root",
    }
}

fn effective(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|text| u64::from_str_radix(text.trim(), 16).ok()).unwrap_or(0)
}

/// The kernel shows an iterator only the tasks of the caller's pid namespace, and under other numbers: what it says there
/// of a host is wrong, and a resync by it would correct true counts away.
fn require_host_pids() -> Result<(), Failure> {
    if is_host(namespace("pid"), HOST_PID_NAMESPACE) {
        return Ok(());
    }
    Err(Failure::unsupported(
        "this is a pid namespace of its own, where the kernel shows only the processes in it: run gpureap on the host, or in the host's pid namespace",
    ))
}

/// `PROC_TIME_INIT_INO`, in the same place.
const HOST_TIME_NAMESPACE: u64 = 0xEFFF_FFFA;

/// What the kernel says of processes and times holds here.
pub fn require_host_namespaces() -> Result<(), Failure> {
    require_host_pids()?;
    require_host_clock()
}

/// The kernel's programs tell times and starts by the host's boot clock. Where this process's is another one, nobody there
/// is the process that a start in /proc says, and no deadline is where it should be.
fn require_host_clock() -> Result<(), Failure> {
    let offsets = fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default();
    if is_host(namespace("time"), HOST_TIME_NAMESPACE) || !moves_boot_clock(&offsets) {
        return Ok(());
    }
    Err(Failure::unsupported(
        "this is a time namespace whose boot clock is not the host's, so no start time means the same here: run gpureap in the host's time namespace",
    ))
}

/// Of /proc/PID/timens_offsets, seconds and nanoseconds for each clock. What cannot be read moves it.
fn moves_boot_clock(offsets: &str) -> bool {
    let words = |line: &str| line.split_ascii_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let boot = offsets.lines().map(words).find(|words| words.first().is_some_and(|name| name == "boottime"));
    boot.is_none_or(|words| words.len() != 3 || words[1..].iter().any(|number| number != "0"))
}

/// A /proc of another pid namespace, or none, says nothing of who started this process, nor who any pid is: whoever
/// signals by it could end its own ancestors. Files that play /proc are for tests, and lie elsewhere.
pub fn require_own_proc(proc: &Path) -> Result<(), Failure> {
    let is_proc = rustix::fs::statfs(proc).is_ok_and(|stat| stat.f_type == PROC_FS);
    let own = fs::read_link(proc.join("self"));
    if own.is_ok_and(|own| own == Path::new(&std::process::id().to_string())) || !is_proc && proc != Path::new("/proc")
    {
        return Ok(());
    }
    Err(Failure::unsupported(format!(
        "{} is not the proc file system of this process's pid namespace, so nobody can be told from gpureap's own ancestors: mount -t proc proc {}",
        proc.display(),
        proc.display()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_capabilities_are_named() {
        assert_eq!(lacking_in("Name:\tx\nCapEff:\t000001ffffffffff\n"), <[&str; 0]>::default());
        assert_eq!(lacking_in("CapEff:\t000001ffffdfefff\n"), ["CAP_NET_ADMIN"]);
        assert_eq!(lacking_in("CapEff:\t000000c000001000\n"), <[&str; 0]>::default());
        assert_eq!(lacking_in("CapEff:\t0000000000200000\n"), <[&str; 0]>::default());
        assert_eq!(lacking_in("CapEff:\t0000000000000000\n"), ["CAP_NET_ADMIN", "CAP_PERFMON", "CAP_BPF"]);
        assert_eq!(lacking_in("").len(), 3);
    }

    #[test]
    fn what_is_refused_says_what_is_lacking() {
        for (lacking, is_root, expected) in [
            (vec!["CAP_BPF", "CAP_PERFMON"], true, "this needs CAP_BPF, CAP_PERFMON, which this process lacks (EPERM)"),
            (vec!["CAP_BPF"], false, "this needs CAP_BPF, which this process lacks; root has them (EPERM)"),
            (vec![], true, "this is refused, and not for a lack of capabilities: "),
        ] {
            let Failure { exit, message } = refusal("this", &lacking, is_root, "EPERM");
            assert_eq!(exit, crate::exit_code::Exit::NotPermitted);
            assert!(message.starts_with(expected), "{message}");
        }
    }

    #[test]
    fn root_of_a_namespace_does_not_see_everybody() {
        let (all, without) = ("CapEff:\t000001ffffffffff\n", "CapEff:\t000001fffff7ffff\n");
        let (pids, users) = (Some(HOST_PID_NAMESPACE), Some(HOST_USER_NAMESPACE));
        for (status, pids, users, expected) in [
            (all, pids, users, true),
            (without, pids, users, false),
            (all, Some(4_026_532_200), users, false),
            (all, pids, Some(4_026_532_201), false),
            // A kernel that has no such namespaces.
            (all, None, None, true),
            ("", pids, users, false),
        ] {
            assert_eq!(sees_all(status, pids, users), expected, "{status} {pids:?} {users:?}");
        }
    }

    #[test]
    fn a_time_namespace_that_moves_the_boot_clock() {
        require_host_clock().unwrap();
        for (offsets, expected) in [
            ("monotonic           0         0\nboottime            0         0\n", false),
            ("monotonic       86400         0\nboottime            0         0\n", false),
            ("monotonic           0         0\nboottime       604800         0\n", true),
            ("monotonic           0         0\nboottime            0       100\n", true),
            ("monotonic           0         0\nboottime           -1 999999999\n", true),
            ("", true),
        ] {
            assert_eq!(moves_boot_clock(offsets), expected, "{offsets}");
        }
    }

    #[test]
    fn a_proc_that_is_another_namespaces_is_refused() {
        require_own_proc(Path::new("/proc")).unwrap();
        let dir = tempfile::tempdir().unwrap();
        require_own_proc(dir.path()).unwrap();
        require_own_proc(Path::new("/nonexistent")).unwrap();
        // Proc by its file system, and not by its `self`.
        let failure = require_own_proc(Path::new("/proc/sys")).unwrap_err();
        assert_eq!(failure.exit, crate::exit_code::Exit::Unsupported);
        assert!(failure.message.contains("mount -t proc"), "{failure}");
    }
}
