//! What the kernel's log adds: Xids, and why the out-of-memory killer came.
use std::os::unix::process::ExitStatusExt as _;

use gpureap_tests::harness::{Log, Player, sys};
use serde_json::{Value, json};

use crate::{
    DEV, bench, elsewhere,
    record::{dead, list, until, until_held},
};

#[test]
fn p6_an_out_of_memory_line_that_names_a_thread() {
    if elsewhere("P6") {
        return;
    }
    let bench = bench();
    let mut log = Log::of(&bench);
    let _daemon = bench.daemon();
    let (mut before, mut after) = (Player::holding(DEV), Player::holding(DEV));
    let tids = [before.ask("thread pt_autograd_0"), after.ask("thread pt_autograd_0")];
    until_held(&bench, &[before.pid(), after.pid()]);
    let say = |log: &mut Log, tid: i32, pid: i32| {
        log.say(&format!(
            "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/slurm/job_{pid},\
             task_memcg=/slurm/job_{pid}/step_0,task=pt_autograd_0,pid={tid},uid=0"
        ));
    };
    // The line may come before the end of the process, or after it.
    let pid = before.pid();
    say(&mut log, tids[0], pid);
    sys::kill(pid, sys::SIGKILL);
    assert_eq!(before.end().signal(), Some(9));
    let pid = after.pid();
    sys::kill(pid, sys::SIGKILL);
    assert_eq!(after.end().signal(), Some(9));
    dead(&bench, pid, "killed-by");
    say(&mut log, tids[1], pid);
    for (player, tid) in [(&before, tids[0]), (&after, tids[1])] {
        let process = dead(&bench, player.pid(), "oom-kill");
        let death = &process["death"];
        assert_eq!(death["signal"], "SIGKILL", "{death:#}");
        let cgroup = format!("/slurm/job_{}", player.pid());
        assert_eq!(death["oom"], json!({"scope": "cgroup", "cgroup": cgroup}), "{death:#}");
        let evidence = death["evidence"].to_string();
        assert!(evidence.contains(&format!("the kernel named thread {tid} (pt_autograd_0)")), "{death:#}");
    }
}

#[test]
fn p7_xids_with_and_without_a_process() {
    if elsewhere("P7") {
        return;
    }
    let bench = bench();
    let mut log = Log::of(&bench);
    let _daemon = bench.daemon();
    let (mut killed, living) = (Player::holding(DEV), Player::holding(DEV));
    until_held(&bench, &[killed.pid(), living.pid()]);
    sys::kill(killed.pid(), sys::SIGKILL);
    killed.end();
    dead(&bench, killed.pid(), "killed-by");
    let fault = "channel 0x0000000a, intr 00000000. MMU Fault: ENGINE GRAPHICS faulted @ 0xdead_00000000";
    let lines = [
        (format!("NVRM: Xid (PCI:0000:00:06): 31, pid={}, name=python3, {fault}", living.pid()), 31, "application"),
        (
            format!("NVRM: Xid (PCI:0000:00:06): 31, pid={}, name=python3, {fault}", killed.pid()),
            31,
            "result-of-a-kill",
        ),
        ("NVRM: Xid (PCI:0000:D8:00): 79, GPU has fallen off the bus.".to_owned(), 79, "hardware"),
        (
            "NVRM: Xid (PCI:0000:00:06): 119, pid='<unknown>', name=<unknown>, Timeout after 6s".to_owned(),
            119,
            "driver",
        ),
        ("NVRM: Xid (PCI:0000:00:06): 45, pid=0, name=python3, Ch 00000008".to_owned(), 45, "result-of-a-kill"),
    ];
    for (line, ..) in &lines {
        log.say("NVRM: loading NVIDIA UNIX x86_64 Kernel Module");
        log.say(line);
    }
    let found = until(&bench, &[], "all are there", |report| list(report, "xids").len() == lines.len());
    for (xid, (line, number, class)) in list(&found, "xids").iter().zip(&lines) {
        assert_eq!((&xid["xid"], &xid["class"]), (&json!(number), &json!(class)), "{line}: {xid:#}");
        assert_eq!(xid["source"], "kmsg");
        // The address is of no device of this host.
        assert_eq!((&xid["node"], &xid["holders"]), (&Value::Null, &json!([])), "{xid:#}");
        let bdf = if line.contains("D8:00") { "0000:d8:00.0" } else { "0000:00:06.0" };
        assert_eq!(xid["bdf"], bdf);
    }
    let pids: Vec<&Value> = list(&found, "xids").iter().map(|xid| &xid["pid"]).collect();
    assert_eq!(pids[..2], [&json!(living.pid()), &json!(killed.pid())]);
    assert!(pids[2..].iter().all(|pid| pid.is_null()), "{pids:?}");
    // The one that names the dead process goes with its death; each of the others is an incident.
    let incidents: Vec<&Value> =
        list(&found, "incidents").iter().filter(|incident| incident["cause"] == "xid").collect();
    assert_eq!(incidents.len(), lines.len() - 1, "{incidents:#?}");
    let kill = list(&found, "incidents").iter().find(|incident| incident["cause"] == "killed-by");
    assert_eq!(kill.map(|kill| &kill["xids"]), Some(&json!([1])), "{found:#}");
    let title = incidents.iter().map(|incident| incident["title"].as_str().unwrap_or_default());
    let title: Vec<&str> = title.filter(|title| title.starts_with("Xid 79 on 0000:d8:00.0")).collect();
    assert!(matches!(title[..], [title] if title.ends_with("the GPU has fallen off the bus (hardware)")), "{title:?}");
    // Words of the log are data: the report can be read by people.
    let text = bench.run(&["report"]).expect_code(0).stdout;
    assert!(text.contains("Xid 79"), "{text}");
}
