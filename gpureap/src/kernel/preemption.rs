//! Whether this kernel may skip kprobe programs without a word.
//!
//! While bpf(2) looks at a map, the kernel runs no kprobe program on that processor. Where it preempts its own code, other
//! tasks open and close files there meanwhile, and that has been counted in `recursion_misses` since 6.7 only.

use std::{fs, path::Path};

use super::btf::Btf;
use crate::config::Paths;

/// Why kprobes are not to be trusted here.
pub fn silent_skips(btf: &Btf, paths: &Paths) -> Option<&'static str> {
    // Added with the count.
    let counted = btf.has_members("bpf_link_info", &["perf_event", "kprobe", "missed"]);
    let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    let preempts = || {
        preempts(
            &read(&paths.proc.join("sys/kernel/version")),
            &read(&paths.sys.join("kernel/debug/sched/preempt")),
            &read(&paths.proc.join("cmdline")),
        )
    };
    (!counted && preempts()).then_some(
        "this kernel may preempt its own code, and then skips kprobe programs without counting them (it counts them since 6.7)",
    )
}

/// By its version line, what the scheduler says of itself (debugfs, for root) and how it was booted. What cannot be told is a yes.
fn preempts(version: &str, scheduler: &str, command_line: &str) -> bool {
    if version.contains("PREEMPT_RT") {
        return true;
    }
    let in_force = scheduler.split_once('(').and_then(|(_, rest)| rest.split_once(')')).map(|(mode, _)| mode);
    let booted = command_line.split_whitespace().rev().find_map(|word| word.strip_prefix("preempt="));
    match in_force.or(booted) {
        Some(mode) => !matches!(mode, "none" | "voluntary"),
        None => version.contains("PREEMPT"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_preempts_itself_unless_it_says_that_it_does_not() {
        let cases = [
            ("#1 SMP PREEMPT_DYNAMIC Debian 6.1.192-3", "none (voluntary) full", "quiet", false),
            ("#1 SMP PREEMPT_DYNAMIC Debian 6.1.192-3", "(none) voluntary full", "preempt=full", false),
            ("#1 SMP PREEMPT_DYNAMIC Debian 6.1.192-3", "none voluntary (full)", "quiet", true),
            ("#1 SMP PREEMPT_DYNAMIC Debian 7.2.12-1", "full (lazy)", "", true),
            ("#1 SMP PREEMPT_RT Debian 6.1.192-3", "", "", true),
            ("#1 SMP PREEMPT_RT Debian 6.12.118-1", "(none) voluntary full", "preempt=none", true),
            // No debugfs.
            ("#1 SMP PREEMPT_DYNAMIC Debian 6.1.192-3", "", "ro preempt=full preempt=voluntary", false),
            ("#1 SMP PREEMPT_DYNAMIC Debian 6.1.192-3", "", "ro quiet", true),
            ("#1 SMP PREEMPT Debian", "", "", true),
            ("#1 SMP Debian 5.10.262-1", "", "", false),
        ];
        for (version, scheduler, command_line, expected) in cases {
            assert_eq!(preempts(version, scheduler, command_line), expected, "{version} {scheduler} {command_line}");
        }
    }
}
