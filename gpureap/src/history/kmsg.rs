//! The kernel's log, as far as it tells of GPUs: Xids, and why the out-of-memory killer came.

use super::{
    event::{Oom, OomScope, What},
    xid,
};

/// One record of /dev/kmsg: `level,sequence,microseconds,flags;text`, then lines of details that begin with a space
/// (Documentation/ABI/testing/dev-kmsg).
pub fn text(record: &str) -> Option<(u64, &str)> {
    let (head, body) = record.split_once(';')?;
    let sequence = head.split(',').nth(1)?.parse().ok()?;
    Some((sequence, body.lines().next().unwrap_or("")))
}

/// What a line tells, if anything.
pub fn parse(line: &str) -> Option<What> {
    xid::parse(line, "kmsg").map(What::Xid).or_else(|| oom(line).map(What::Oom))
}

/// `oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/job,task_memcg=/job/x,
/// task=python3,pid=123,uid=0` (`dump_oom_summary`, mm/oom_kill.c, since 5.0). A global one has `global_oom` in the place of
/// `oom_memcg`. The names in it are anybody's, so fields are looked for from the ends.
fn oom(line: &str) -> Option<Oom> {
    let rest = line.trim_start().strip_prefix("oom-kill:constraint=")?;
    let (constraint, rest) = rest.split_once(',')?;
    let (rest, uid) = rest.rsplit_once(",uid=")?;
    uid.trim().parse::<u32>().ok()?;
    let (rest, pid) = rest.rsplit_once(",pid=")?;
    let tid = pid.parse().ok()?;
    let (rest, comm) = rest.rsplit_once(",task=")?;
    let limited = rest.find(",oom_memcg=").map(|at| &rest[at + ",oom_memcg=".len()..]);
    let cgroup = limited.map(|rest| rest.split_once(",task_memcg=").map_or(rest, |(cgroup, _)| cgroup).to_owned());
    let scope = match (constraint, &cgroup) {
        ("CONSTRAINT_MEMCG", _) | (_, Some(_)) => OomScope::Cgroup,
        _ => OomScope::Global,
    };
    Some(Oom { key: None, tid, comm: comm.to_owned(), scope: Some(scope), cgroup, source: "kmsg".to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records() {
        assert_eq!(text("6,339,5140900,-;NVRM: x\n SUBSYSTEM=pci\n"), Some((339, "NVRM: x")));
        assert_eq!(text("4,1,0,c,extra=1;a;b"), Some((1, "a;b")));
        for record in ["", "x", "6,x,1,-;y", ";"] {
            assert_eq!(text(record), None, "{record}");
        }
    }

    #[test]
    fn why_memory_ran_out() {
        let line = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/slurm/job_7,\
                    task_memcg=/slurm/job_7/step_0,task=py,pid=9,x,pid=123,uid=1000";
        let Some(What::Oom(oom)) = parse(line) else { panic!("not an OOM") };
        assert_eq!((oom.tid, oom.comm.as_str()), (123, "py,pid=9,x"));
        assert_eq!((oom.scope, oom.cgroup.as_deref()), (Some(OomScope::Cgroup), Some("/slurm/job_7")));
        let line = "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/a,\
                    task=python3,pid=55,uid=0";
        let Some(What::Oom(oom)) = parse(line) else { panic!("not an OOM") };
        assert_eq!((oom.tid, oom.scope, oom.cgroup), (55, Some(OomScope::Global), None));
        for line in ["", "oom-kill:", "oom-kill:constraint=X,pid=1", "python3 invoked oom-killer: gfp_mask=0x0"] {
            assert_eq!(parse(line), None, "{line}");
        }
        assert!(matches!(parse("NVRM: Xid (PCI:0000:06:00): 79, gone"), Some(What::Xid(_))));
    }

    proptest::proptest! {
        #[test]
        fn any_record_is_survived(record in "\\PC{0,60}", line in "(oom-kill:constraint=)?[A-Z_]{0,16}(,[a-z_]{1,9}=?\\PC{0,9}){0,8}") {
            text(&record);
            parse(&line);
        }
    }
}
