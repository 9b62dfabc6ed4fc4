//! One job on several hosts: their journals, read together.
use std::os::unix::process::ExitStatusExt as _;

use gpureap_tests::harness::{Bench, Daemon, Device, Player, Role, sys};
use serde_json::{Value, json};

use crate::{
    bench, elsewhere,
    record::{dead, incident, list, member, report, until_held},
};

/// A rank with the GPU of its host.
fn rank(number: &str, device: &Device) -> Player {
    let environment = [("RANK", number), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29503")];
    let mut player = Player::with(&Role { environment: &environment, ..Role::default() });
    player.ask(&format!("open {}", device.node));
    player
}

/// Three daemons with network, host name, state and device of their own.
#[test]
fn the_merged_record_of_three_hosts_tells_which_host_and_process_went_first() {
    if elsewhere("three hosts") {
        return;
    }
    let here = bench();
    let devices = [Device::full(), Device::new(4, 20, "/dev/tty20"), Device::new(4, 21, "/dev/tty21")];
    if devices.iter().any(|device| !device.is_free("three hosts")) {
        return;
    }
    let names = ["alpha", "beta", "gamma"];
    let hosts: Vec<Bench> =
        names.iter().zip(&devices).map(|(name, device)| here.beside(name, std::slice::from_ref(device))).collect();
    let _daemons: Vec<Daemon<&Bench>> = hosts.iter().map(Daemon::start).collect();
    let mut ranks: Vec<Player> =
        ["0", "1", "2"].iter().zip(&devices).map(|(number, device)| rank(number, device)).collect();
    let pids: Vec<_> = ranks.iter().map(Player::pid).collect();
    for (host, pid) in hosts.iter().zip(&pids) {
        until_held(host, &[*pid]);
    }
    // Each sees its own.
    assert!(hosts.iter().zip(&pids).all(|(host, pid)| host.holders(&[]).holder(*pid).is_some()));
    assert_eq!(list(&report(&hosts[0], &[]), "processes").len(), 1);

    for at in [0, 2] {
        ranks[at].ask("thread pt_nccl_watchdg");
    }
    sys::kill(pids[1], sys::SIGKILL);
    assert_eq!(ranks[1].end().signal(), Some(9));
    dead(&hosts[1], pids[1], "killed-by");
    for at in [2, 0] {
        ranks[at].tell("raise pt_nccl_watchdg 6");
        assert_eq!(ranks[at].end().signal(), Some(6));
        dead(&hosts[at], pids[at], "fault");
    }

    let journals: Vec<String> = hosts.iter().map(|host| host.path("state/journal.db").display().to_string()).collect();
    let arguments: Vec<&str> = std::iter::once("--journal").chain(journals.iter().map(String::as_str)).collect();
    let merged = report(&here, &arguments);
    let mut seen: Vec<&Value> = list(&merged, "hosts").iter().map(|host| &host["host"]).collect();
    seen.sort_by_key(ToString::to_string);
    assert_eq!(seen, ["alpha", "beta", "gamma"], "{merged:#}");
    assert_eq!(list(&merged, "incidents").len(), 1, "{merged:#}");
    let one = incident(&merged, pids[1]);
    assert_eq!(one["cause"], "killed-by", "{one:#}");
    assert_eq!(one["group"], json!({"by": "rank-set", "name": "10.0.0.1:29503, 3 ranks"}), "{one:#}");
    let parts = |at: usize| {
        let member = member(one, pids[at]);
        (member["host"].clone(), member["rank"].clone(), member["part"].clone())
    };
    assert_eq!(parts(1), (json!("beta"), json!(1), json!("first")), "{one:#}");
    assert_eq!(parts(2), (json!("gamma"), json!(2), json!("followed")), "{one:#}");
    assert_eq!(parts(0), (json!("alpha"), json!(0), json!("followed")), "{one:#}");
    let title = one["title"].as_str().expect("a title");
    assert!(title.contains("rank 1") && title.contains("on beta"), "{title}");

    // A part of it is the whole of it: who asks for the host that followed is told of the one that went first.
    let asked = report(&here, &[&arguments[..], &["--pid", &pids[2].to_string()]].concat());
    assert_eq!(member(incident(&asked, pids[2]), pids[1])["part"], "first", "{asked:#}");
    // And for people.
    let text = here.run(&[&["report"], &arguments[..]].concat()).expect_code(0).stdout;
    assert!(text.lines().take(6).any(|line| line.contains("on beta")), "{text}");
}
