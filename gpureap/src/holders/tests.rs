use std::{collections::HashMap, path::Path};

use super::*;
use crate::{
    gpu::devices::discover,
    model::{Ancestor, Backend, How, NoLineage},
};

/// Start of the recorded process, a bit after the tick.
const START_NS: u64 = 26_664_321_000;

#[derive(Default)]
struct Memory(HashMap<ProcKey, Ancestor>);

impl LineageSource for Memory {
    fn lookup(&self, key: ProcKey) -> Option<Ancestor> {
        self.0.get(&key).cloned()
    }
}

fn key(pid: u32) -> ProcKey {
    ProcKey::new(pid, u64::from(pid) * 1_000_000_000)
}

fn remember(memory: &mut Memory, key: ProcKey, parent: ProcKey, exit: Option<u32>) {
    let ancestor = Ancestor {
        key,
        parent: Some(parent),
        comm: format!("p{}", key.tgid),
        argv: vec![format!("p{}", key.tgid), "--x".to_owned()],
        exit: exit.map(|status| (5, status)),
        ..Ancestor::default()
    };
    memory.0.insert(key, ancestor);
}

pub(crate) fn fixture() -> Paths {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/h200");
    Paths { proc: root.join("proc"), sys: root.join("sys"), dev: root.join("dev"), ..Paths::default() }
}

fn host() -> Host {
    Host {
        name: "node1".to_owned(),
        boot_id: "b".to_owned(),
        now: "2026-11-30T17:30:00Z".parse().unwrap(),
        boottime_ns: 600_000_000_000,
    }
}

/// The recorded job: a context on GPU 0.
fn job() -> Holder {
    let usage = |fds, maps| Usage {
        fds,
        maps,
        first_open_ns: Some(60_000_000_000),
        last_open_ns: Some(61_000_000_000),
        ever_mapped: maps > 0,
    };
    Holder {
        key: ProcKey::new(498, START_NS),
        usage: BTreeMap::from([(0, usage(23, 3)), (1, usage(8, 6)), (3, usage(3, 1))]),
        how: BTreeSet::from([How::Fd, How::Map]),
        private_tids: BTreeSet::new(),
        inherited_from: None,
        from_snapshot: false,
    }
}

fn view(holders: Vec<Holder>) -> View {
    View {
        source: Source::Map,
        backend: Some(Backend::Kprobe),
        complete: true,
        cannot_see: BTreeSet::new(),
        lost_events: 0,
        swept_ns: Some(599_000_000_000),
        open_files: BTreeMap::from([(0, 23), (1, 8), (3, 3)]),
        holders,
        orphans: vec![Orphan {
            slot: 0,
            files: 1,
            how: How::InFlight,
            last_owner: Some((key(12), "sender".to_owned())),
        }],
        notes: Vec::new(),
    }
}

/// A report with a bit of everything, for tests of what prints it.
pub(crate) fn sample() -> HoldersReport {
    let mut memory = Memory::default();
    remember(&mut memory, ProcKey::new(498, START_NS), key(400), None);
    remember(&mut memory, key(400), key(1), Some(9));
    let devices = discover(&fixture(), &[]).unwrap();
    build(&view(vec![job()]), &devices, &memory, &fixture(), &Options::all(host()))
}

/// Many processes of one job, left behind on GPU 0, from a source that remembers them.
pub(crate) fn left_behind(count: u32) -> HoldersReport {
    let mut memory = Memory::default();
    remember(&mut memory, key(50), key(1), Some(9));
    remember(&mut memory, key(51), key(50), Some(0));
    let holders = (0..count).map(|number| {
        let own = key(1000 + number);
        remember(&mut memory, own, key(51), None);
        Holder {
            key: own,
            usage: BTreeMap::from([(0, Usage { fds: 2, ever_mapped: true, ..Usage::default() })]),
            ..job()
        }
    });
    let holders = holders.collect();
    let devices = discover(&fixture(), &[]).unwrap();
    build(&view(holders), &devices, &memory, &fixture(), &Options::all(host()))
}

#[test]
fn recorded_job() {
    let report = sample();
    assert_eq!(report.holders.len(), 1);
    let holder = &report.holders[0];
    assert_eq!((holder.pid, holder.comm.as_str(), holder.state), (498, "python3", Some('S')));
    assert_eq!((holder.user.as_deref(), holder.unit.as_deref()), (Some("root"), Some("train.service")));
    assert_eq!(holder.threads, ["python3", "cuda00001400006", "cuda-EvtHandlr"]);
    let roles: Vec<_> = holder.devices.iter().map(|held| (held.node.as_str(), held.role)).collect();
    let expected = [("/dev/nvidia0", Some(Role::Attached)), ("/dev/nvidiactl", None), ("/dev/nvidia-uvm", None)];
    assert_eq!(roles, expected);
    assert_eq!(holder.devices[0].first_open.unwrap().to_string(), "2026-11-30T17:21:00Z");
    assert_eq!(holder.parent.as_ref().unwrap().pid, 494);
    assert_eq!(report.swept.unwrap().to_string(), "2026-11-30T17:29:59Z");
    assert_eq!(report.orphans[0].last_owner.as_ref().unwrap().comm, "sender");
    // Not there and not held: modeset, nvswitch, nvlink and the wildcards.
    let nodes: Vec<_> = report.devices.iter().map(|device| (device.node.as_str(), device.open_files)).collect();
    let expected = [
        ("/dev/nvidia0", Some(23)),
        ("/dev/nvidiactl", Some(8)),
        ("/dev/nvidia-uvm", Some(3)),
        ("/dev/nvidia-uvm-tools", Some(0)),
        ("/dev/nvidia-caps/nvidia-cap1", Some(0)),
        ("/dev/nvidia-caps/nvidia-cap2", Some(0)),
    ];
    assert_eq!(nodes, expected);
}

#[test]
fn roles_on_gpus() {
    let devices = discover(&fixture(), &[]).unwrap();
    let (gpu, ctl) = (devices.get(0).unwrap(), devices.get(1).unwrap());
    let usage = |maps, ever_mapped| Usage { fds: 3, maps, ever_mapped, ..Usage::default() };
    assert_eq!(role(gpu, &usage(0, false)), Some(Role::Handle));
    assert_eq!(role(gpu, &usage(2, false)), Some(Role::Attached));
    // F7: a forked child holds what its parent had mapped.
    assert_eq!(role(gpu, &usage(0, true)), Some(Role::Attached));
    assert_eq!(role(ctl, &usage(2, true)), None);
}

#[test]
fn dead_ancestors_are_told() {
    let report = sample();
    let holder = &report.holders[0];
    assert_eq!(holder.lineage.len(), 1);
    let ancestor = &holder.lineage[0];
    assert_eq!((ancestor.pid, ancestor.alive), (400, false));
    assert_eq!(ancestor.exit.unwrap().signal, Some(9));
    assert_eq!(holder.orphan_of.as_ref().unwrap().pid, 400);
    let report = left_behind(2);
    assert_eq!(report.holders[1].lineage.iter().map(|ancestor| ancestor.pid).collect::<Vec<_>>(), [51, 50]);
    assert_eq!(report.holders[1].orphan_of.as_ref().unwrap().pid, 50);
}

#[test]
fn each_process_is_read_once() {
    let proc = tempfile::tempdir().unwrap();
    let place = proc.path().join("7");
    std::fs::create_dir(&place).unwrap();
    std::fs::write(place.join("stat"), "7 (x) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 5 0 0").unwrap();
    let readings = Readings::new(proc.path());
    let facts = readings.any(7).unwrap();
    std::fs::remove_dir_all(&place).unwrap();
    assert_eq!(readings.of(ProcKey::new(7, facts.start_ns)), Some(facts));
    assert_eq!(readings.of(ProcKey::new(7, 0)), None, "another process that had this pid");
    assert_eq!(readings.any(8), None);
}

#[test]
fn loops_in_the_lineage_end() {
    let mut memory = Memory::default();
    remember(&mut memory, ProcKey::new(498, START_NS), key(400), None);
    remember(&mut memory, key(400), key(401), Some(0));
    remember(&mut memory, key(401), key(400), Some(0));
    let Chain { list, cut } =
        lineage::chain(ProcKey::new(498, START_NS), &memory, &Readings::new(&fixture().proc), None);
    assert!(!cut);
    assert_eq!(list.iter().map(|ancestor| ancestor.pid).collect::<Vec<_>>(), [400, 401]);
}

#[test]
fn a_lineage_that_lacks_somebody_is_told_to_be_cut() {
    /// With processes forgotten.
    struct Full(Memory);
    impl LineageSource for Full {
        fn lookup(&self, key: ProcKey) -> Option<Ancestor> {
            self.0.lookup(key)
        }
        fn forgotten(&self) -> Option<u64> {
            Some(7)
        }
    }
    let own = ProcKey::new(498, START_NS);
    let devices = discover(&fixture(), &[]).unwrap();
    let told = |memory: &dyn LineageSource| {
        let report = build(&view(vec![job()]), &devices, memory, &fixture(), &Options::all(host()));
        let [holder] = report.holders.as_slice() else { panic!("{report:#?}") };
        let note = report.notes.iter().find(|note| note.contains("lineage")).cloned().unwrap_or_default();
        (holder.lineage.iter().map(|ancestor| ancestor.pid).collect::<Vec<_>>(), holder.lineage_cut, note)
    };
    let memory = |links: &[(ProcKey, ProcKey)]| {
        let mut memory = Memory::default();
        for (child, parent) in links {
            remember(&mut memory, *child, *parent, (*child != own).then_some(9));
        }
        memory
    };
    let whole = [(own, key(400)), (key(400), key(1))];
    assert_eq!(told(&memory(&whole)), (vec![400], false, String::new()));
    // Who was dropped is of no interest as long as nobody is missed.
    assert!(!told(&Full(memory(&whole))).1);
    let (list, cut, note) = told(&memory(&[(own, key(400)), (key(400), key(401))]));
    assert_eq!((list, cut), (vec![400], true), "401 is dead and unknown");
    assert!(
        note.starts_with("the lineage of 1 holder is cut: ") && note.contains("longest; raise maps.lineage"),
        "{note}"
    );
    let (list, cut, note) = told(&Full(Memory::default()));
    assert_eq!((list, cut), (vec![], true), "its own record is gone, and its parent at the fork with it");
    assert!(note.contains("(7 processes so far)"), "{note}");
    assert!(!told(&Memory::default()).1, "a source that remembers nobody has nothing to lose");
    let mut renewed = memory(&whole);
    renewed.0.get_mut(&own).unwrap().renewed = true;
    assert!(told(&renewed).1, "the parent is that of a later time");
}

#[test]
fn filters() {
    let devices = discover(&fixture(), &[]).unwrap();
    let build = |slots: Option<&[Slot]>, chosen: Option<&[u64]>| {
        let slots = slots.map(|slots| slots.iter().copied().collect());
        let chosen = chosen.map(|starts| starts.iter().map(|start_ns| ProcKey::new(498, *start_ns)).collect());
        let options = Options { slots, chosen, ..Options::all(host()) };
        let report = build(&view(vec![job()]), &devices, &NoLineage, &fixture(), &options);
        (report.devices.len(), report.holders.len(), report.orphans.len())
    };
    assert_eq!(build(None, None), (6, 1, 1));
    // With the chosen device, the others of the holder that is shown: its rows refer to them.
    assert_eq!(build(Some(&[0]), None), (3, 1, 1));
    assert_eq!(build(Some(&[2]), None), (0, 0, 0));
    assert_eq!(build(None, Some(&[START_NS])), (6, 1, 0));
    assert_eq!(build(None, Some(&[START_NS + 1])), (6, 0, 0));
}

#[test]
fn a_holder_that_is_gone_is_none() {
    let devices = discover(&fixture(), &[]).unwrap();
    // Its pid is another process's by now.
    let reused = Holder { key: ProcKey::new(498, START_NS + 20_000_000), ..job() };
    // Known to have exited.
    let exited = Holder { key: key(77), ..job() };
    // Out of sight: /proc may hide others' processes.
    let hidden = Holder { key: key(78), ..job() };
    let mut memory = Memory::default();
    remember(&mut memory, key(77), key(1), Some(0));
    remember(&mut memory, key(78), key(1), None);
    let report = build(&view(vec![reused, exited, hidden]), &devices, &memory, &fixture(), &Options::all(host()));
    let seen: Vec<_> = report.holders.iter().map(|holder| (holder.pid, holder.comm.as_str(), holder.state)).collect();
    assert_eq!(seen, [(78, "p78", None)]);
    assert_eq!(report.devices[0].holders, 1);
}

#[test]
fn real_output_fits_the_schema() {
    let schema = include_str!("../../../docs/schema/holders-1.json");
    for report in [sample(), left_behind(3)] {
        let value = serde_json::to_value(&report).unwrap();
        crate::schema_check::check(schema, &value);
        assert_eq!(serde_json::from_value::<HoldersReport>(value).unwrap(), report);
    }
    let mut value = serde_json::to_value(sample()).unwrap();
    value["holders"][0]["devices"][0]["role"] = "owner".into();
    assert!(!crate::schema_check::mistakes(schema, &value).is_empty());
}
