//! A driver that is loaded again: its majors are other ones, its nodes have other numbers. /proc/devices and /dev are
//! played; the devices behind the numbers are terminals, as every kernel has them.
use std::{
    fs,
    path::{Path, PathBuf},
};

use gpureap_tests::harness::{Bench, Daemon, Player, Seen, skip, sys, wait_for};
use libc::SIGHUP;

/// Two kinds of terminals: the driver's major before and after.
const BEFORE: (u32, &str) = (4, "/dev/tty20");
const AFTER: (u32, &str) = (5, "/dev/ptmx");

/// A bench where the driver is what the test says.
struct Driver {
    // Unmounted before the bench goes.
    devices: PathBuf,
    bench: Bench,
}

impl Driver {
    /// `None` where these terminals cannot be opened.
    fn start(test: &str, period: &str) -> Option<Self> {
        for (_, node) in [BEFORE, AFTER] {
            if let Err(error) = sys::try_open(node, libc::O_RDWR | libc::O_NOCTTY).and_then(sys::try_close) {
                skip(test, &format!("{node}: {error}"));
                return None;
            }
        }
        let bench = Bench::new(&[]);
        bench.configure("sweep_period", &format!("\"{period}\""));
        for name in ["proc", "dev"] {
            fs::create_dir(bench.path(name)).expect("a directory");
        }
        sys::mount("proc", Path::new("proc"), &bench.path("proc"), 0).expect("mount a /proc of our own");
        let devices = bench.path("devices");
        fs::write(&devices, "").expect("write");
        let driver = Self { devices, bench };
        let over = driver.bench.path("proc/devices");
        sys::mount("none", &driver.devices, &over, libc::MS_BIND).expect("mount over /proc/devices");
        Some(driver)
    }

    /// What /proc/devices says of the driver from now on.
    fn load(&self, lines: &[(u32, &str)]) {
        let lines: Vec<String> = lines.iter().map(|(major, name)| format!("{major:3} {name}\n")).collect();
        fs::write(
            &self.devices,
            format!("Character devices:\n  1 mem\n{}\nBlock devices:\n  7 loop\n", lines.concat()),
        )
        .expect("write");
    }

    /// A node of this name, as udev makes it.
    fn node(&self, name: &str, major: u32, minor: u32) {
        let path = self.bench.path("dev").join(name);
        fs::remove_file(&path).ok();
        sys::mknod(&path, libc::makedev(major, minor)).expect("make a node");
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        for place in ["proc/devices", "proc"] {
            if let Err(error) = sys::unmount(&self.bench.path(place)) {
                gpureap_tests::harness::note(&format!("unmount {place}: {error}"));
            }
        }
    }
}

/// The nodes that the process holds, with the count of descriptors.
fn held(seen: &Seen, player: &Player) -> Vec<(String, u64)> {
    let devices = seen.holder(player.pid()).map(|holder| holder["devices"].clone()).unwrap_or_default();
    let row = |device: &serde_json::Value| {
        (device["node"].as_str().expect("a node").to_owned(), device["fds"].as_u64().expect("a count"))
    };
    let mut rows: Vec<(String, u64)> = devices.as_array().into_iter().flatten().map(row).collect();
    rows.sort_unstable();
    rows
}

/// What the map says, what a sweep says, and that it is this.
#[track_caller]
fn both(bench: &Bench, player: &Player, expected: &[(&str, u64)]) {
    let expected: Vec<(String, u64)> = expected.iter().map(|(node, fds)| ((*node).to_owned(), *fds)).collect();
    for source in ["map", "snapshot"] {
        let seen = bench.holders(&["--source", source]);
        assert_eq!(held(&seen, player), expected, "{source}: {:#}", seen.json);
    }
}

const UVM: &str = "/dev/nvidia-uvm*";

#[test]
fn a_major_that_changes_is_followed_at_once_when_asked() {
    let Some(driver) = Driver::start("driver", "1h") else { return };
    let bench = &driver.bench;
    driver.load(&[(BEFORE.0, "nvidia-uvm")]);
    let daemon = Daemon::start_with(bench, &["daemon", "-v"]);
    let mut player = Player::holding(BEFORE.1);
    both(bench, &player, &[(UVM, 1)]);
    player.ask(&format!("open {}", AFTER.1));
    both(bench, &player, &[(UVM, 1)]);
    driver.load(&[(AFTER.0, "nvidia-uvm")]);
    // Until the daemon has looked, whoever looks at its map is told what is missing there.
    let seen = bench.holders(&[]);
    let notes = seen.json["notes"].to_string();
    assert!(!seen.complete && notes.contains("/dev/nvidia-uvm is not traced by the running daemon"), "{notes}");
    sys::kill(daemon.pid(), SIGHUP);
    wait_for("it is followed", || daemon.log().contains("the device table was read again as asked"));
    wait_for("the new major counts and the old does not", || {
        held(&bench.holders(&[]), &player) == [(UVM.to_owned(), 1)]
    });
    both(bench, &player, &[(UVM, 1)]);
    let seen = bench.holders(&[]);
    assert!(seen.complete, "{:#}", seen.json["notes"]);
    // It is the new one that is counted.
    let fd = player.ask(&format!("open {}", AFTER.1));
    player.ask(&format!("open {}", BEFORE.1));
    both(bench, &player, &[(UVM, 2)]);
    player.ask(&format!("close {fd}"));
    both(bench, &player, &[(UVM, 1)]);
}

#[test]
fn a_major_that_changes_is_followed_within_the_period() {
    let Some(driver) = Driver::start("driver", "1s") else { return };
    driver.load(&[(BEFORE.0, "nvidia-uvm")]);
    let daemon = Daemon::start_with(&driver.bench, &["daemon", "-v"]);
    let player = Player::holding(AFTER.1);
    assert_eq!(held(&driver.bench.holders(&[]), &player), []);
    driver.load(&[(AFTER.0, "nvidia-uvm")]);
    wait_for("it is followed", || daemon.log().contains("the device table changed"));
    wait_for("the hold is found", || held(&driver.bench.holders(&[]), &player) == [(UVM.to_owned(), 1)]);
    both(&driver.bench, &player, &[(UVM, 1)]);
}

#[test]
fn nodes_with_other_numbers_are_other_devices() {
    let Some(driver) = Driver::start("nodes", "1h") else { return };
    let bench = &driver.bench;
    driver.load(&[(BEFORE.0, "nvidia")]);
    driver.node("nvidia20", BEFORE.0, 20);
    let daemon = Daemon::start_with(bench, &["daemon", "-v"]);
    let mut player = Player::holding(bench.path("dev/nvidia20").to_str().expect("a path"));
    both(bench, &player, &[("/dev/nvidia20", 1)]);
    // The nodes are made again: that number is another GPU's, and the old one has no node.
    fs::remove_file(bench.path("dev/nvidia20")).expect("remove");
    driver.node("nvidia21", BEFORE.0, 21);
    sys::kill(daemon.pid(), SIGHUP);
    wait_for("it is followed", || daemon.log().contains("the device table was read again as asked"));
    // A device is its number: what is held is held, whether it has a node or not.
    wait_for("the old one is of no known GPU", || {
        held(&bench.holders(&[]), &player) == [("/dev/nvidia*".to_owned(), 1)]
    });
    both(bench, &player, &[("/dev/nvidia*", 1)]);
    player.ask(&format!("open {}", bench.path("dev/nvidia21").display()));
    both(bench, &player, &[("/dev/nvidia*", 1), ("/dev/nvidia21", 1)]);
    let of = |gpu: &str| bench.run(&["holders", "--json", "--gpu", gpu]);
    of("20").expect_code(2);
    assert!(of("21").expect_code(0).stdout.contains(&player.pid().to_string()));
}
