use super::*;
use crate::{holders::report::SCHEMA as HOLDERS, model::Source};

fn held(node: &str, role: Role) -> HeldReport {
    HeldReport {
        node: node.to_owned(),
        fds: 1,
        maps: 0,
        role: Some(role),
        inherited_from: None,
        first_open: None,
        last_open: None,
    }
}

fn holder(pid: u32, class: Class, devices: Vec<HeldReport>) -> HolderReport {
    HolderReport { start_ns: u64::from(pid) * 1_000_000_000, class, ..HolderReport::sample(pid, devices) }
}

fn seen(holders: Vec<HolderReport>) -> HoldersReport {
    HoldersReport {
        schema: HOLDERS.to_owned(),
        host: "node1".to_owned(),
        boot_id: "b".to_owned(),
        time: "2026-12-01T00:00:00Z".parse().unwrap(),
        source: Source::Map,
        backend: None,
        complete: true,
        cannot_see: BTreeSet::new(),
        swept: None,
        devices: Vec::new(),
        holders,
        orphans: Vec::new(),
        lost_events: 0,
        notes: Vec::new(),
    }
}

fn fallen() -> Fault {
    Fault {
        bdf: "0000:d8:00.0".to_owned(),
        node: Some("/dev/nvidia7".to_owned()),
        xid: 79,
        meaning: "the GPU has fallen off the bus".to_owned(),
    }
}

#[test]
fn orphans() {
    let one = |pid| holder(pid, Class::Job, vec![held(GPU[0], Role::Attached)]);
    let left = crate::holders::report::ProcessName { pid: 5, start_ns: None, comm: "bash".to_owned() };
    let text = |text: &str| Some(text.to_owned());
    let all = seen(vec![
        one(10),
        HolderReport { orphan_of: Some(left.clone()), ..one(11) },
        // runc has forked the first process of every container and ended.
        HolderReport { orphan_of: Some(left.clone()), container: text("c"), ..one(12) },
        HolderReport { orphan_of: Some(left.clone()), cgroup: text("/slurm/uid_1/job_7"), ..one(13) },
        HolderReport { pod: text("uid"), container: text("c"), ..one(14) },
        HolderReport { pod: text("gone"), container: text("c"), pod_name: text("train-0"), ..one(15) },
        HolderReport { orphan_of: Some(left.clone()), class: Class::System, ..one(16) },
        // Of a job by its environment alone, which ends nothing.
        HolderReport { orphan_of: Some(left), slurm_job: text("7"), ..one(17) },
    ]);
    let known = Known { podless: [15].into(), ..Known::default() };
    let question = Question { orphans: true, ..Question::default() };
    let found = decide(&question, &all, &known);
    assert_eq!(found.iter().map(|finding| finding.pid).collect::<Vec<_>>(), [11, 15, 17]);
    assert_eq!(exit(&found, &[]), Exit::Held);
    assert_eq!(line(&found, &[], 80), "/dev/nvidia0 held by python3 (pid 11, alice, orphan); 2 more");
    assert_eq!(line(&found[1..2], &[], 80), "/dev/nvidia0 held by python3 (pid 15, alice, orphan, pod train-0)");
    assert_eq!(decide(&Question::default(), &all, &known), []);
}

#[test]
fn faults_stand_between_the_dying_and_the_others() {
    let one = || holder(11, Class::Job, vec![held(GPU[0], Role::Attached)]);
    let found = |dying: &[u32]| {
        let dying = dying.iter().map(|pid| (*pid, 'D')).collect();
        decide(
            &Question { free: true, ..Question::default() },
            &seen(vec![one()]),
            &Known { dying, ..Known::default() },
        )
    };
    assert_eq!(line(&[], &[fallen()], 80), "/dev/nvidia7: Xid 79, the GPU has fallen off the bus");
    assert_eq!(line(&[], &[Fault { node: None, ..fallen() }], 40), "0000:d8:00.0: Xid 79");
    assert_eq!(exit(&[], &[fallen()]), Exit::KernelReference);
    assert_eq!(exit(&found(&[]), &[fallen()]), Exit::KernelReference);
    assert!(line(&found(&[]), &[fallen()], 80).starts_with("/dev/nvidia7: Xid 79"));
    assert_eq!(exit(&found(&[11]), &[fallen()]), Exit::Unkillable);
    assert!(line(&found(&[11]), &[fallen()], 80).ends_with("D state); 1 more"));
}

const GPU: [&str; 2] = ["/dev/nvidia0", "/dev/nvidia3"];

#[test]
fn who_counts() {
    let all = seen(vec![
        holder(10, Class::Job, vec![held(GPU[0], Role::Handle), held(GPU[1], Role::Attached)]),
        holder(11, Class::Job, vec![held(GPU[0], Role::Attached)]),
        holder(12, Class::System, vec![held(GPU[0], Role::Attached)]),
        holder(13, Class::Monitor, vec![held(GPU[1], Role::Attached)]),
        holder(14, Class::System, vec![held(GPU[1], Role::Handle)]),
    ]);
    let nodes = |list: &[&str]| Some(list.iter().map(|&node| node.to_owned()).collect());
    let dying = |pids: &[u32]| Known { dying: pids.iter().map(|pid| (*pid, 'D')).collect(), ..Known::default() };
    for (question, dead, expected, code) in [
        (Question::default(), &[][..], &[][..], Exit::Done),
        (Question { free: true, ..Question::default() }, &[], &[11, 10], Exit::Held),
        (Question { free: true, nodes: nodes(&[GPU[1]]), attached: true, orphans: false }, &[], &[10], Exit::Held),
        (Question { free: true, nodes: nodes(&[GPU[0]]), attached: true, orphans: false }, &[], &[11], Exit::Held),
        (Question { free: true, nodes: nodes(&[GPU[0]]), attached: false, orphans: false }, &[], &[10, 11], Exit::Held),
        (
            Question { free: true, nodes: nodes(&["/dev/nvidia7"]), attached: false, orphans: false },
            &[],
            &[],
            Exit::Done,
        ),
        // One that cannot die counts whoever it is, and before those that only hold.
        (Question::default(), &[12], &[12], Exit::Unkillable),
        (Question { free: true, ..Question::default() }, &[11], &[11, 10], Exit::Unkillable),
        (Question { nodes: nodes(&[GPU[1]]), attached: true, ..Question::default() }, &[14], &[], Exit::Done),
    ] {
        let found = decide(&question, &all, &dying(dead));
        let pids: Vec<u32> = found.iter().map(|finding| finding.pid).collect();
        assert_eq!((pids.as_slice(), exit(&found, &[])), (expected, code), "{question:?} {dead:?}");
    }
}

#[test]
fn one_line() {
    let job = |job: &str| Some(job.to_owned());
    let one = || holder(4711, Class::Job, vec![held(GPU[1], Role::Attached)]);
    let line_of = |holders: Vec<HolderReport>, dead: &[(u32, char)], most: usize| {
        let question = Question { free: true, ..Question::default() };
        let known = Known { dying: dead.iter().copied().collect(), ..Known::default() };
        line(&decide(&question, &seen(holders), &known), &[], most)
    };
    assert_eq!(line_of(vec![], &[], 80), "");
    assert_eq!(line_of(vec![one()], &[(4711, 'D')], 80), "/dev/nvidia3 held by python3 (pid 4711, alice, D state)");
    let with_job = || HolderReport { slurm_job: job("41"), ..one() };
    assert_eq!(line_of(vec![with_job()], &[], 80), "/dev/nvidia3 held by python3 (pid 4711, alice, job 41)");
    assert_eq!(
        line_of(vec![with_job(), holder(9, Class::Job, vec![held(GPU[0], Role::Handle)])], &[(4711, 'R')], 200),
        "/dev/nvidia3 held by python3 (pid 4711, alice, job 41, R state); 1 more"
    );
    let in_pod = HolderReport { pod_name: job("train-0"), pod_namespace: job("ml"), container: job("c"), ..one() };
    assert_eq!(
        line_of(vec![in_pod.clone()], &[], 80),
        "/dev/nvidia3 held by python3 (pid 4711, alice, pod ml/train-0)"
    );
    // The place goes first, then the end.
    assert_eq!(line_of(vec![in_pod.clone()], &[], 50), "/dev/nvidia3 held by python3 (pid 4711, alice)");
    assert_eq!(line_of(vec![in_pod], &[], 30), "/dev/nvidia3 held by python...");
    let nameless = HolderReport { user: None, uid: None, comm: "a\nb\u{202e}".to_owned(), ..one() };
    let text = line_of(vec![nameless], &[], 80);
    assert!(!text.contains(['\n', '\u{202e}']) && text.contains("(pid 4711, ?)"), "{text}");
    let many =
        HolderReport { devices: (0..8).map(|n| held(&format!("/dev/nvidia{n}"), Role::Attached)).collect(), ..one() };
    assert_eq!(line_of(vec![many], &[], 80), "/dev/nvidia0 and 7 more held by python3 (pid 4711, alice)");
}

proptest::proptest! {
    #[test]
    fn no_line_is_longer_than_it_may_be(comm in "\\PC{0,15}", user in "\\PC{0,64}", most in 16..200usize, dead: bool) {
        let one = HolderReport { comm, user: Some(user), ..holder(1, Class::Job, vec![held(GPU[0], Role::Attached)]) };
        let known = Known { dying: if dead { [(1, 'D')].into() } else { BTreeMap::new() }, ..Known::default() };
        let text = line(&decide(&Question { free: true, ..Question::default() }, &seen(vec![one]), &known), &[], most);
        proptest::prop_assert!(text.len() <= most && !text.contains('\n'), "{text:?}");
    }
}

#[test]
fn a_report_fits_its_schema() {
    let findings = decide(
        &Question { free: true, ..Question::default() },
        &seen(vec![holder(1, Class::Job, vec![held(GPU[0], Role::Attached)])]),
        &Known::default(),
    );
    let report = report::CheckReport {
        schema: report::SCHEMA.to_owned(),
        host: "node1".to_owned(),
        time: "2026-12-01T00:00:00Z".to_owned(),
        exit_code: 3,
        message: line(&findings, &[], 80),
        findings,
        xids: vec![fallen()],
        complete: true,
        notes: vec!["a note".to_owned()],
    };
    crate::schema_check::check(
        include_str!("../../../docs/schema/check-1.json"),
        &serde_json::to_value(report).unwrap(),
    );
}
