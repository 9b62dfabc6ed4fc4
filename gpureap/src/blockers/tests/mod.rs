//! The decision, in tables.

mod driver;
mod releases;

use serde_json::Value;

use super::{
    report::{BlockersReport, NvmlState, report},
    text::text,
    *,
};
use crate::{
    classify::Class,
    gpu::nvml::{Gpu, Mig, MigDevice, NvmlTrouble},
    holders::report::{HeldReport, ProcessName},
    model::How,
};

const SCHEMA: &str = include_str!("../../../../docs/schema/blockers-1.json");
const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
const POD: &str = "0a1b2c3d-1111-2222-3333-444455556666";

fn device(slot: Slot, kind: DeviceKind, node: &str, minor: Option<u32>) -> Device {
    let gpu = minor.filter(|_| kind == DeviceKind::Gpu);
    Device {
        slot,
        node: node.into(),
        major: 195,
        minor,
        kind,
        gpu,
        index: gpu,
        uuid: gpu.map(|gpu| format!("GPU-{gpu}")),
        bdf: None,
        model: None,
    }
}

/// Two GPUs and what all share; with a switch too.
fn devices(switch: bool) -> Vec<Device> {
    let mut list = vec![
        device(0, DeviceKind::Gpu, "/dev/nvidia0", Some(0)),
        device(1, DeviceKind::Gpu, "/dev/nvidia1", Some(1)),
        device(2, DeviceKind::Ctl, "/dev/nvidiactl", Some(255)),
        device(3, DeviceKind::Uvm, "/dev/nvidia-uvm", Some(0)),
        device(4, DeviceKind::Nvswitch, "/dev/nvidia-nvswitchctl", Some(255)),
        Device {
            model: Some("gpu1/gi3/access".to_owned()),
            ..device(5, DeviceKind::Cap, "/dev/nvidia-caps/nvidia-cap30", Some(30))
        },
        Device {
            model: Some("mig/monitor".to_owned()),
            ..device(6, DeviceKind::Cap, "/dev/nvidia-caps/nvidia-cap2", Some(2))
        },
        device(7, DeviceKind::Gpu, "/dev/nvidia*", None),
    ];
    if switch {
        list.push(device(8, DeviceKind::Nvswitch, "/dev/nvidia-nvswitch0", Some(0)));
    }
    list
}

fn holder(pid: u32, nodes: &[&str]) -> HolderReport {
    let held = |node: &&str| HeldReport {
        node: (*node).to_owned(),
        fds: 1,
        maps: 0,
        role: None,
        inherited_from: None,
        first_open: None,
        last_open: None,
    };
    HolderReport {
        argv: vec!["python3".to_owned(), "train.py".to_owned()],
        exe: Some("/home/u/venv/bin/python3".to_owned()),
        user: Some("u".to_owned()),
        cgroup: Some("/user.slice/user-1000.slice/session-3.scope".to_owned()),
        unit: Some("session-3.scope".to_owned()),
        how: [How::Fd].into(),
        ..HolderReport::sample(pid, nodes.iter().map(held).collect())
    }
}

fn daemon(pid: u32, program: &str, unit: &str, nodes: &[&str]) -> HolderReport {
    HolderReport {
        comm: program.chars().take(15).collect(),
        argv: vec![format!("/usr/bin/{program}")],
        exe: Some(format!("/usr/bin/{program}")),
        uid: Some(0),
        user: Some("root".to_owned()),
        cgroup: Some(format!("/system.slice/{unit}.service")),
        unit: Some(format!("{unit}.service")),
        ..holder(pid, nodes)
    }
}

fn seen(holders: Vec<HolderReport>) -> HoldersReport {
    HoldersReport {
        schema: "gpureap.holders/1".to_owned(),
        host: "node7".to_owned(),
        boot_id: "b".to_owned(),
        time: "2026-11-30T12:00:00Z".parse().unwrap(),
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

/// What a test gives, and the scene made of it.
struct Stage {
    operation: Operation,
    chosen: BTreeSet<Slot>,
    devices: Vec<Device>,
    seen: HoldersReport,
    modules: Vec<Module>,
    nvml: Option<Snapshot>,
    sees_all: bool,
}

impl Stage {
    /// GPU 0 is chosen.
    fn new(operation: Operation, holders: Vec<HolderReport>) -> Self {
        Self {
            operation,
            chosen: [0].into(),
            devices: devices(false),
            seen: seen(holders),
            modules: Vec::new(),
            nvml: None,
            sees_all: false,
        }
    }

    fn decide(&self) -> Decision {
        let Self { operation, chosen, devices, seen, modules, nvml, sees_all } = self;
        let scene = Scene {
            operation: *operation,
            chosen,
            devices,
            holders: seen,
            modules,
            nvml: nvml.as_ref(),
            sees_all: *sees_all,
        };
        decide(&scene)
    }

    fn report(&self) -> BlockersReport {
        let state = NvmlState::of(self.nvml.is_none().then_some(&NvmlTrouble::Disabled), true);
        report(self.operation, self.decide(), &self.devices, &self.seen, &self.modules, state)
    }

    fn commands(&self) -> Vec<String> {
        self.decide().steps.into_iter().map(|step| step.command).collect()
    }
}

fn strings(list: &[&str]) -> Vec<String> {
    list.iter().map(|text| (*text).to_owned()).collect()
}

fn module(name: &str, refcnt: i64, holders: &[&str]) -> Module {
    Module {
        name: name.to_owned(),
        refcnt: Some(refcnt),
        holders: strings(holders).into_iter().collect(),
        modeset: (name == "nvidia_drm").then_some(false),
    }
}

/// What a compute host has loaded, idle.
fn loaded() -> Vec<Module> {
    vec![
        module("gdrdrv", 0, &[]),
        module("nvidia", 4, &["gdrdrv", "nvidia_modeset", "nvidia_peermem", "nvidia_uvm"]),
        module("nvidia_drm", 0, &[]),
        module("nvidia_modeset", 1, &["nvidia_drm"]),
        module("nvidia_peermem", 0, &[]),
        module("nvidia_uvm", 0, &["nvidia_peermem"]),
    ]
}

fn nvml(persistence: bool, mig: Option<usize>) -> Snapshot {
    let part = |number| MigDevice { uuid: format!("MIG-{number}"), gi: None, ci: None, memory: None };
    let gpu = |minor| Gpu {
        index: minor,
        minor: Some(minor),
        uuid: Some(format!("GPU-{minor}")),
        persistence: Some(persistence),
        mig: mig.map(|count| Mig { enabled: count > 0, pending: count > 0, devices: (0..count).map(part).collect() }),
        ..Gpu::default()
    };
    Snapshot { driver: None, gpus: vec![gpu(0), gpu(1)] }
}

fn pids(decision: &Decision) -> Vec<u32> {
    decision.blockers.iter().filter_map(|blocker| Some(blocker.process.as_ref()?.pid)).collect()
}

pub(crate) fn check(value: &Value) {
    crate::schema_check::check(SCHEMA, value);
}

#[test]
fn whose_files_are_in_the_way() {
    use Operation::{Mig, Reset, Unload};
    let (zero, one, ctl, uvm) = ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm");
    let (instance, monitor, unknown) =
        ("/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap2", "/dev/nvidia*");
    // What it holds; whether that is in the way of each on GPU 0, and of a reset of GPU 1.
    let cases: [(&[&str], [bool; 4]); 9] = [
        (&[zero, ctl, uvm], [true, true, true, false]),
        (&[zero, one, ctl], [true, true, true, true]),
        // A container that was given the other GPU alone.
        (&[one, ctl, uvm], [false, false, true, true]),
        (&[ctl], [true, true, true, true]),
        (&[uvm], [true, true, true, true]),
        (&[instance, ctl], [false, false, true, true]),
        (&[monitor], [true, true, true, true]),
        (&[unknown, ctl], [true, true, true, true]),
        (&["/dev/of-another-table"], [true, true, true, true]),
    ];
    for (nodes, expected) in cases {
        for (operation, gpu, expected) in
            [(Reset, 0, expected[0]), (Mig, 0, expected[1]), (Unload, 0, expected[2]), (Reset, 1, expected[3])]
        {
            let stage = Stage { chosen: [gpu].into(), ..Stage::new(operation, vec![holder(7, nodes)]) };
            let decision = stage.decide();
            assert_eq!(pids(&decision) == [7], expected, "{nodes:?} {operation:?} {gpu}");
            let exit = if expected { Exit::Held } else { Exit::Done };
            assert_eq!(decision.exit, exit, "{nodes:?} {operation:?} {gpu}");
            assert_eq!(decision.notes.len(), usize::from(!expected), "{:?}", decision.notes);
        }
    }
}

#[test]
fn with_switches_all_gpus_are_reset_together() {
    let other = || vec![holder(7, &["/dev/nvidia1", "/dev/nvidiactl"])];
    let stage = Stage { devices: devices(true), ..Stage::new(Operation::Reset, other()) };
    let decision = stage.decide();
    assert_eq!((pids(&decision), decision.targets.len()), (vec![7], 3));
    assert!(decision.notes[0].contains("NVSwitches"), "{:?}", decision.notes);
    assert_eq!(decision.then, ["nvidia-smi --gpu-reset -i GPU-0,GPU-1"]);
    // Their control node alone is on every host.
    assert_eq!(pids(&Stage::new(Operation::Reset, other()).decide()), [0; 0]);
    let mig = Stage { devices: devices(true), ..Stage::new(Operation::Mig, other()) };
    assert_eq!(pids(&mig.decide()), [0; 0]);
}

#[test]
fn files_without_a_process() {
    let orphan = |node: &str| OrphanReport {
        node: node.to_owned(),
        files: 2,
        how: How::InFlight,
        last_owner: Some(ProcessName { pid: 9, start_ns: None, comm: "sender".to_owned() }),
    };
    let mut stage = Stage::new(Operation::Reset, Vec::new());
    stage.seen.orphans = vec![orphan("/dev/nvidia0"), orphan("/dev/nvidia1"), orphan("/dev/nvidiactl")];
    let decision = stage.decide();
    let [blocker] = decision.blockers.as_slice() else { panic!("{decision:?}") };
    assert_eq!(blocker.why, "2 open files of /dev/nvidia0 with no process, last held by sender (pid 9)");
    assert_eq!((blocker.standing, decision.exit), (Standing::Kernel, Exit::KernelReference));
    stage.operation = Operation::Unload;
    assert_eq!(stage.decide().blockers.len(), 3);
    check(&serde_json::to_value(stage.report()).unwrap());
}

#[test]
fn who_may_not_see_everybody_is_told_so() {
    let mut stage = Stage::new(Operation::Reset, Vec::new());
    (stage.seen.source, stage.seen.complete) = (Source::Proc, false);
    assert_eq!((stage.decide().outcome, stage.decide().exit), (Outcome::Unknown, Exit::NotPermitted));
    // One kernel reference says nothing of jobs that may be there.
    stage.nvml = Some(nvml(true, None));
    assert_eq!(stage.decide().exit, Exit::NotPermitted);
    check(&serde_json::to_value(stage.report()).unwrap());
    assert!(text(&stage.report()).contains("note: not every process could be seen"), "{}", text(&stage.report()));
    // Root is shown everybody, with or without the kernel's iterators.
    stage.sees_all = true;
    assert_eq!(stage.decide().exit, Exit::KernelReference);
    stage.sees_all = false;
    // What is seen is in the way whatever else may be.
    stage.seen.holders = vec![holder(7, &["/dev/nvidia0"])];
    assert_eq!(stage.decide().exit, Exit::Held);
}

#[test]
fn as_text() {
    let mut holders: Vec<HolderReport> = (100..226).map(|pid| holder(pid, &["/dev/nvidia0"])).collect();
    holders.push(daemon(3, "nv-hostengine", "nvidia-dcgm", &["/dev/nvidia0", "/dev/nvidiactl"]));
    let mut evil = holder(50, &["/dev/nvidia0"]);
    evil.argv = vec!["\u{1b}[31mx".to_owned()];
    evil.slurm_job = Some("4\u{202e}2".to_owned());
    holders.push(evil);
    let stage = Stage { nvml: Some(nvml(true, Some(0))), ..Stage::new(Operation::Reset, holders) };
    let text = text(&stage.report());
    for line in [
        "GPU reset of /dev/nvidia0 (GPU-0); source: map",
        "job      126 processes: 100-225",
        "         like     100  u          python3 train.py  (unit session-3.scope)",
        "         release: gpureap reap --gpu 0 --match any",
        "system         3  root       /usr/bin/nv-hostengine  (DCGM, unit nvidia-dcgm.service)",
        "         has /dev/nvidia0 open",
        "         release: systemctl stop nvidia-dcgm",
        "kernel   setting: persistence mode is on for /dev/nvidia0",
        "in this order:",
        "  1. gpureap reap --gpu 0 --match any",
        "  3. systemctl stop nvidia-dcgm",
        "then: nvidia-smi --gpu-reset -i GPU-0",
        "afterwards: systemctl start nvidia-dcgm",
        "in the way: 127 job processes, 1 system process, 1 kernel reference",
    ] {
        assert!(text.lines().any(|found| found == line), "{line:?} in\n{text}");
    }
    assert!(!text.contains(['\u{1b}', '\u{202e}']), "{text}");
    let clear = Stage::new(Operation::Mig, Vec::new());
    assert!(text::text(&clear.report()).ends_with("\nnothing is in the way\n"));
}

#[test]
fn reports_come_back_from_json() {
    let stage = Stage {
        modules: loaded(),
        nvml: Some(nvml(true, Some(1))),
        ..Stage::new(Operation::Reset, vec![holder(7, &["/dev/nvidia0"])])
    };
    let report = stage.report();
    let value = serde_json::to_value(&report).unwrap();
    assert_eq!(value["for"], "reset");
    assert_eq!(value["exit_code"], Exit::Held as u8);
    assert_eq!(serde_json::from_value::<BlockersReport>(value).unwrap(), report);
    assert!(std::panic::catch_unwind(|| check(&serde_json::json!({"schema": "gpureap.blockers/1"}))).is_err());
}
