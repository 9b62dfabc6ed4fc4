//! Memory that runs out, for real.
use std::{
    fs,
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
};

use gpureap_tests::harness::{Groups, Player, skip};
use serde_json::{Value, json};

use crate::{
    DEV, in_vm,
    record::{died, incident, report, until_held},
    shared,
};

/// Makes `memory.max` appear below the root; the reason where the controller is elsewhere or cannot be had.
fn with_controller(groups: &mut Groups, pid: i32) -> Result<PathBuf, String> {
    let group = groups.put(pid, "job");
    let place = groups.mount.join(group.trim_start_matches('/'));
    let mut above: Vec<&Path> = place.ancestors().skip(1).take_while(|path| path.starts_with(&groups.mount)).collect();
    above.reverse();
    for path in above {
        fs::write(path.join("cgroup.subtree_control"), "+memory")
            .map_err(|error| format!("no memory controller in {}: {error}", path.display()))?;
    }
    if place.join("memory.max").exists() { Ok(place) } else { Err("memory.max is not there".to_owned()) }
}

/// Memory that the kernel sets aside for huge pages, which is done in no time, unlike filling it on an emulated processor.
struct Reserved;

impl Reserved {
    const PAGES: &str = "/proc/sys/vm/nr_hugepages";

    fn most_of_it() -> Self {
        let text = fs::read_to_string("/proc/meminfo").expect("/proc/meminfo");
        let kib = |name: &str| -> u64 {
            let line = text.lines().find_map(|line| line.strip_prefix(name)).expect("a line of /proc/meminfo");
            line.trim().trim_end_matches(" kB").parse().expect("a number")
        };
        let pages = kib("MemAvailable:").saturating_sub(256 << 10) / kib("Hugepagesize:");
        fs::write(Self::PAGES, pages.to_string()).expect("reserve memory");
        Self
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        fs::write(Self::PAGES, "0").expect("give memory back");
    }
}

#[test]
fn p2_memory_of_a_cgroup_runs_out() {
    let test = "P2 cgroup";
    let bench = shared();
    let Some(mut groups) = Groups::new() else { return skip(test, "no cgroup2 hierarchy is mounted") };
    let mut player = Player::holding(DEV);
    let place = match with_controller(&mut groups, player.pid()) {
        Ok(place) => place,
        Err(reason) => return skip(test, &reason),
    };
    fs::write(place.join("memory.max"), "33554432").expect("a limit");
    if place.join("memory.swap.max").exists() {
        fs::write(place.join("memory.swap.max"), "0").expect("a limit of swap");
    }
    until_held(&bench, &[player.pid()]);
    player.tell("eat");
    assert_eq!(player.end().signal(), Some(9));
    // The line of the log has the scope; it comes a moment after the kill.
    let process = died(&bench, player.pid(), "by the limit of a cgroup", |death| !death["oom"]["scope"].is_null());
    let death = &process["death"];
    let cgroup = format!("{}/job", groups.top);
    assert_eq!(death["oom"], json!({"scope": "cgroup", "cgroup": cgroup}), "{death:#}");
    assert_eq!((&death["cause"], &death["signal"]), (&json!("oom-kill"), &json!("SIGKILL")), "{death:#}");
    assert_eq!(death["sender"], Value::Null, "nobody sent it: {death:#}");
    let found = report(&bench, &[]);
    let incident = incident(&found, player.pid());
    assert_eq!(incident["cause"], "oom-kill", "{incident:#}");
    let title = incident["title"].as_str().expect("a title");
    assert!(title.contains(&format!("was killed for memory: the limit of cgroup {cgroup} was reached")), "{title}");
}

#[test]
fn p2_memory_of_the_host_runs_out() {
    let test = "P2 global";
    if !in_vm() {
        return skip(test, "it would take the memory of this machine, and whatever the kernel chooses with it");
    }
    let bench = shared();
    let mut player = Player::holding(DEV);
    fs::write(format!("/proc/{}/oom_score_adj", player.pid()), "1000").expect("make it the first to go");
    until_held(&bench, &[player.pid()]);
    let reserved = Reserved::most_of_it();
    player.tell("eat");
    assert_eq!(player.end().signal(), Some(9));
    drop(reserved);
    let process = died(&bench, player.pid(), "by the host's memory", |death| !death["oom"]["scope"].is_null());
    assert_eq!(process["death"]["cause"], "oom-kill", "{process:#}");
    assert_eq!(process["death"]["oom"], json!({"scope": "global", "cgroup": null}), "{process:#}");
    let found = report(&bench, &[]);
    let title = incident(&found, player.pid())["title"].as_str().expect("a title").to_owned();
    assert!(title.contains("was killed for memory: the host had none left"), "{title}");
}
