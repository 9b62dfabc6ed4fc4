//! A fence that one process holds, as `reap --fence` does.

use super::*;

/// A process that holds a fence of its own.
fn holder(bench: &Bench) -> Child {
    let mut child =
        bench.actor_command(&["fence"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start the actor");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
    assert!(line.contains("ready"), "{line}");
    child
}

#[test]
fn a_fence_goes_with_the_process_that_holds_it() {
    let bench = bench();
    let mut config = fs::read_to_string(bench.path("config.toml")).expect("the configuration");
    // Fences everything that it knows, which here is one device.
    let first = config.find("[[device]]").expect("devices");
    let second = first + config[first..].find("minor = 11\n").expect("the second device");
    config.truncate(config[..second].rfind("[[device]]").expect("its begin"));
    bench.write_config(&config);

    let mut child = holder(&bench);
    closed(DEV);
    // Two at once do not mix.
    let mut other = holder(&bench);
    child.kill().expect("kill -9");
    child.wait().expect("wait");
    closed(DEV);
    other.kill().expect("kill -9");
    other.wait().expect("wait");
    open(DEV);
    assert!(!bench.pins().exists(), "a held fence pins nothing");
    assert!(list(&bench)["devices"].as_array().expect("devices").is_empty());
}

#[test]
fn a_held_fence_says_who_tried_and_ends_at_once() {
    let bench = bench();
    let group = Cgroup::new("held");
    let fence = raise(&bench, 7, &Exemptions::default());
    closed(DEV);
    assert_eq!(group.attempt(DEV), libc::EPERM);
    open(SECOND);
    let denied = fence.denied().expect("denied");
    assert_eq!((denied.len(), fence.denied_total().expect("a number")), (2, 2));
    assert!(denied.iter().all(|denied| denied.count == 1 && denied.uid == 0 && denied.first_ns == denied.last_ns));
    let id = std::os::unix::fs::MetadataExt::ino(&fs::metadata(&group.0).expect("stat"));
    assert_eq!(denied[1].cgroup_id, id);

    fence.exempt_cgroup(id).expect("exempt");
    assert_eq!(group.attempt(DEV), 0);
    closed(DEV);
    let own = gpureap::process::Facts::read_any(Path::new("/proc"), std::process::id()).expect("this process");
    let own = ProcKey::new(own.tgid, own.start_ns);
    // Another process that had the same pid is not it.
    fence.exempt_process(ProcKey::new(own.tgid, own.start_ns - 50_000_000)).expect("exempt");
    File::open(DEV).expect_err("refused");
    fence.exempt_process(own).expect("exempt");
    File::open(DEV).expect("let through");
    drop(fence);
    open(DEV);
}

/// The acceptance test of `reap --fence`.
#[test]
fn no_open_of_a_respawned_worker_gets_through() {
    let rounds: u32 = if std::env::var_os("GPUREAP_TEST_VM").is_some() { 100 } else { 1_000 };
    let bench = bench();
    let (raised, stop) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let supervisor = thread::spawn({
        let (raised, stop) = (Arc::clone(&raised), Arc::clone(&stop));
        move || {
            let (mut before, mut refused, mut through) = (0, 0, 0);
            while refused + through < rounds && !stop.load(Ordering::SeqCst) {
                // Asked before the worker starts: what began before the fence may get through.
                let counts = raised.load(Ordering::SeqCst);
                // Not by fork, which copies the page tables of this process a thousand times.
                let worker = sys::vfork(&mut || {
                    sys::try_open(DEV, libc::O_RDONLY).map_or_else(|error| error.raw_os_error().unwrap_or(255), |_| 0)
                });
                let code = sys::reap(worker) >> 8;
                match (counts, code) {
                    (false, _) => before += 1,
                    (true, libc::EPERM) => refused += 1,
                    (true, _) => through += 1,
                }
            }
            (before, refused, through)
        }
    });
    thread::sleep(Duration::from_millis(50));
    let fence = raise(&bench, 7, &Exemptions::default());
    raised.store(true, Ordering::SeqCst);
    wait_for("the rounds", || supervisor.is_finished());
    stop.store(true, Ordering::SeqCst);
    let (before, refused, through) = supervisor.join().expect("the supervisor");
    assert!(before > 0, "it was at work before");
    assert_eq!((refused, through), (rounds, 0));
    assert!(fence.denied_total().expect("a number") >= u64::from(rounds));
    let denied = fence.denied().expect("denied");
    assert!(denied.len() > rounds as usize / 2, "each worker is remembered: {}", denied.len());
    drop(fence);
    open(DEV);
}
