//! The committed object, and the table of the programs in it.

use crate::model::Backend;

/// Built by `cargo xtask ebpf`, so that gpureap builds with stable Rust alone.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("CARGO_MANIFEST_DIR"), "/bpf/gpureap.bpf.o"));

/// Names the sources that the object was built from.
static SOURCES: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/bpf/SOURCES.sha256"));

/// The first eight bytes of the hash of the object's sources: pins of another object are replaced, not adopted.
pub fn object_id() -> u64 {
    SOURCES
        .lines()
        .find(|line| !line.starts_with('#'))
        .and_then(|line| line.get(..16))
        .and_then(|digits| u64::from_str_radix(digits, 16).ok())
        .unwrap_or(0)
}

/// What a program is attached to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    Kprobe(&'static str),
    Kretprobe(&'static str),
    Fentry(&'static str),
    Fexit(&'static str),
    /// `tp_btf`
    Tracepoint(&'static str),
    RawTracepoint(&'static str),
    /// `cgroup_device` at the cgroup2 root
    CgroupDevice,
    /// Pinned, run when asked
    Iterator(&'static str),
    /// Run by `BPF_PROG_TEST_RUN` alone
    OnDemand,
}

/// On which kernels a program of a set is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    Always,
    /// BTF has this function.
    Has(&'static str),
    Lacks(&'static str),
    /// BTF says that the function has so many parameters.
    Parameters(&'static str, u32),
    /// As above, of a tracepoint.
    TracepointParameters(&'static str, u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    pub name: &'static str,
    pub hook: Hook,
    pub when: When,
}

const fn program(name: &'static str, hook: Hook, when: When) -> Program {
    Program { name, hook, when }
}

/// Where 5.10 inlines `fd_install` into its callers, this one fires on all of them, and on open too: hooking both
/// would count opens twice.
const FD_INSTALL_FILES: &str = "__fd_install";

/// Attached with every set. All are required.
pub const COMMON: &[Program] = &[
    program("process_fork", Hook::Tracepoint("sched_process_fork"), When::Always),
    program("process_exec", Hook::Tracepoint("sched_process_exec"), When::Always),
    program("process_exit", Hook::Tracepoint("sched_process_exit"), When::Always),
    program("signal_generate", Hook::Tracepoint("signal_generate"), When::Always),
    program("oom_victim_task", Hook::Tracepoint("mark_victim"), When::TracepointParameters("mark_victim", 2)),
    program("oom_victim_tid", Hook::Tracepoint("mark_victim"), When::TracepointParameters("mark_victim", 1)),
    program("thread_new", Hook::Tracepoint("task_newtask"), When::Always),
    program("thread_rename", Hook::RawTracepoint("task_rename"), When::Always),
    program("fix", Hook::OnDemand, When::Always),
];

/// Loaded for every source but /proc; they attach to nothing.
pub const ITERATORS: &[Program] = &[
    program("sweep_fds", Hook::Iterator("task_file"), When::Always),
    program("sweep_maps", Hook::Iterator("task_vma"), When::Always),
    program("sweep_lineage", Hook::Iterator("task"), When::Always),
];

const KPROBE: &[Program] = &[
    program("file_free_kprobe", Hook::Kprobe("security_file_free"), When::Always),
    program("fd_close_kprobe", Hook::Kprobe("locks_remove_posix"), When::Always),
    program("table_copy_kretprobe", Hook::Kretprobe("dup_fd"), When::Always),
    program("fd_dup2_kprobe", Hook::Kprobe("do_dup2"), When::Always),
    program("fd_install_kprobe", Hook::Kprobe("fd_install"), When::Lacks(FD_INSTALL_FILES)),
    program("fd_install_files_kprobe", Hook::Kprobe(FD_INSTALL_FILES), When::Has(FD_INSTALL_FILES)),
    program("file_map_kprobe", Hook::Kprobe("security_mmap_file"), When::Always),
    // Last: only a file that it puts into FILES is counted by the others.
    program("file_open_kprobe", Hook::Kprobe("chrdev_open"), When::Always),
];

const FENTRY: &[Program] = &[
    program("file_free_fentry", Hook::Fentry("security_file_free"), When::Always),
    program("fd_close_fentry", Hook::Fentry("locks_remove_posix"), When::Always),
    program("table_copy_3_fexit", Hook::Fexit("dup_fd"), When::Parameters("dup_fd", 3)),
    program("table_copy_2_fexit", Hook::Fexit("dup_fd"), When::Parameters("dup_fd", 2)),
    program("fd_dup2_fentry", Hook::Fentry("do_dup2"), When::Always),
    program("fd_install_fentry", Hook::Fentry("fd_install"), When::Lacks(FD_INSTALL_FILES)),
    program("fd_install_files_fentry", Hook::Fentry(FD_INSTALL_FILES), When::Has(FD_INSTALL_FILES)),
    program("file_map_fentry", Hook::Fentry("security_mmap_file"), When::Always),
    program("file_open_fentry", Hook::Fentry("chrdev_open"), When::Always),
];

const GATE: &[Program] = &[program("node_open_gate", Hook::CgroupDevice, When::Always)];

/// Of no probe set: a fence loads it alone.
pub const FENCE: Program = program("node_open_fence", Hook::CgroupDevice, When::Always);

/// The programs of a set that are its own.
pub const fn set(backend: Backend) -> &'static [Program] {
    match backend {
        Backend::Kprobe => KPROBE,
        Backend::Fentry => FENTRY,
        Backend::Gate => GATE,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_object_names_its_sources() {
        assert_ne!(object_id(), 0, "SOURCES.sha256 begins with the hash of the sources");
    }

    #[test]
    fn every_program_of_the_tables_is_in_the_object() {
        let object = aya_obj::Object::parse(OBJECT).expect("the committed object parses");
        let present: BTreeSet<&str> = object.programs.keys().map(String::as_str).collect();
        let sets = [COMMON, ITERATORS, KPROBE, FENTRY, GATE, &[FENCE]];
        let known: BTreeSet<&str> = sets.iter().flat_map(|set| set.iter().map(|program| program.name)).collect();
        assert_eq!(present, known);
    }
}
