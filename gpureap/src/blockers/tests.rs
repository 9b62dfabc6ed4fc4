//! The decision, in tables.

use serde_json::Value;

use super::{
    report::{BlockersReport, NvmlState, report},
    text::text,
    *,
};
use crate::{
    classify::Class,
    gpu::nvml::{Gpu, Mig, MigDevice, NvmlTrouble},
    holders::report::{HeldReport, Origin, ProcessName},
    model::How,
};

const SCHEMA: &str = include_str!("../../../docs/schema/blockers-1.json");
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
        pid,
        start_ns: 1,
        nspids: vec![pid],
        state: Some('S'),
        comm: "python3".to_owned(),
        argv: vec!["python3".to_owned(), "train.py".to_owned()],
        exe: Some("/home/u/venv/bin/python3".to_owned()),
        exe_deleted: false,
        uid: Some(1000),
        user: Some("u".to_owned()),
        class: Class::Job,
        class_rule: "default".to_owned(),
        cgroup: Some("/user.slice/user-1000.slice/session-3.scope".to_owned()),
        unit: Some("session-3.scope".to_owned()),
        container: None,
        container_name: None,
        image: None,
        slurm_job: None,
        slurm_step: None,
        pod: None,
        pod_name: None,
        pod_namespace: None,
        parent: None,
        lineage: Vec::new(),
        orphan_of: None,
        threads: Vec::new(),
        private_tids: BTreeSet::new(),
        devices: nodes.iter().map(held).collect(),
        how: [How::Fd].into(),
        origin: Origin::Traced,
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
fn each_is_released_in_its_own_way() {
    use Operation::{Mig, Reset, Unload};
    let node: &[&str] = &["/dev/nvidia0"];
    let at = |cgroup: &str, change: &dyn Fn(&mut HolderReport)| {
        let mut holder = HolderReport { cgroup: Some(cgroup.to_owned()), unit: None, ..holder(7, node) };
        change(&mut holder);
        holder
    };
    let container = |cgroup: &str, name: &str| at(cgroup, &|holder| holder.container = Some(name.to_owned()));
    let unit = |holder: &mut HolderReport, unit: &str| holder.unit = Some(unit.to_owned());
    let cases: Vec<(&str, HolderReport, Operation, Standing, &[&str])> = vec![
        ("a job", holder(7, node), Reset, Standing::Job, &["gpureap reap --gpu 0 --match any"]),
        ("a job, unload", holder(7, node), Unload, Standing::Job, &["gpureap reap"]),
        ("shared nodes alone", holder(7, &["/dev/nvidiactl"]), Reset, Standing::Job, &["gpureap reap --pid 7"]),
        (
            "Slurm",
            at("/slurm/uid_1/job_42/step_0", &|holder| holder.slurm_job = Some("42".to_owned())),
            Reset,
            Standing::Job,
            &["scancel 42"],
        ),
        (
            "a pod",
            at("/kubepods/pod/x", &|holder| {
                holder.pod = Some(POD.to_owned());
                holder.container = Some(ID.to_owned());
            }),
            Reset,
            Standing::Job,
            &["kubectl cordon node7", "crictl pods --label io.kubernetes.pod.uid=0a1b2c3d-1111-2222-3333-444455556666"],
        ),
        (
            "docker",
            container("/system.slice/docker-0123.scope", ID),
            Reset,
            Standing::Job,
            &["docker stop 0123456789ab"],
        ),
        (
            "podman",
            container("/machine.slice/libpod-0123.scope", ID),
            Mig,
            Standing::Job,
            &["podman stop 0123456789ab"],
        ),
        (
            "containerd",
            container("/x/cri-containerd-0123.scope", ID),
            Mig,
            Standing::Job,
            &["crictl stop 0123456789ab"],
        ),
        ("Proxmox", container("/lxc/101/ns", "101"), Reset, Standing::Job, &["pct shutdown 101"]),
        ("LXC", container("/lxc.payload.web", "web"), Reset, Standing::Job, &["lxc-stop -n web"]),
        ("an unknown runtime", container("/x", ID), Reset, Standing::Job, &[]),
        (
            "a unit",
            at("/system.slice/train.service", &|holder| unit(holder, "train.service")),
            Reset,
            Standing::Job,
            &["systemctl stop train"],
        ),
        (
            "a user's own unit",
            at("/user.slice/user-1000.slice/user@1000.service/app.slice/a.service", &|holder| {
                unit(holder, "a.service");
            }),
            Reset,
            Standing::Job,
            &["gpureap reap --gpu 0 --match any"],
        ),
        (
            "persistenced",
            daemon(7, "nvidia-persistenced", "nvidia-persistenced", node),
            Reset,
            Standing::System,
            &["nvidia-smi -i GPU-0 -pm 0"],
        ),
        (
            "persistenced, MIG",
            daemon(7, "nvidia-persistenced", "nvidia-persistenced", node),
            Mig,
            Standing::System,
            &["nvidia-smi -i GPU-0 -pm 0"],
        ),
        (
            "persistenced, unload",
            daemon(7, "nvidia-persistenced", "nvidia-persistenced", node),
            Unload,
            Standing::System,
            &["systemctl stop nvidia-persistenced"],
        ),
        (
            "DCGM",
            daemon(7, "nv-hostengine", "nvidia-dcgm", node),
            Mig,
            Standing::System,
            &["systemctl stop nvidia-dcgm"],
        ),
        (
            "DCGM, its old unit",
            daemon(7, "nv-hostengine", "dcgm", node),
            Mig,
            Standing::System,
            &["systemctl stop dcgm"],
        ),
        (
            "DCGM, started by hand",
            HolderReport { cgroup: None, unit: None, ..daemon(7, "nv-hostengine", "x", node) },
            Mig,
            Standing::System,
            &["systemctl stop nvidia-dcgm"],
        ),
        (
            "fabric manager",
            daemon(7, "nv-fabricmanager", "nvidia-fabricmanager", node),
            Reset,
            Standing::System,
            &["systemctl stop nvidia-fabricmanager"],
        ),
        (
            "MPS",
            HolderReport { cgroup: None, unit: None, ..daemon(7, "nvidia-cuda-mps-server", "x", node) },
            Reset,
            Standing::System,
            &["echo quit | nvidia-cuda-mps-control"],
        ),
        (
            "MPS as a unit",
            daemon(7, "nvidia-cuda-mps-server", "mps", node),
            Reset,
            Standing::System,
            &["systemctl stop mps"],
        ),
        (
            "X of a user",
            HolderReport { exe: Some("/usr/lib/xorg/Xorg".to_owned()), comm: "Xorg".to_owned(), ..holder(7, node) },
            Unload,
            Standing::System,
            &["systemctl stop display-manager"],
        ),
        (
            "dcgm-exporter in a pod",
            HolderReport {
                pod: Some(POD.to_owned()),
                container: Some(ID.to_owned()),
                class: Class::Monitor,
                class_rule: "image dcgm-exporter".to_owned(),
                ..daemon(7, "dcgm-exporter", "x", node)
            },
            Reset,
            Standing::Monitor,
            &["kubectl label node node7 --overwrite nvidia.com/gpu.deploy.dcgm-exporter=false"],
        ),
        (
            "a user's monitor",
            HolderReport { exe: Some("/usr/bin/nvtop".to_owned()), comm: "nvtop".to_owned(), ..holder(7, node) },
            Reset,
            Standing::Monitor,
            &["kill 7"],
        ),
        (
            "a system process that nobody here knows",
            HolderReport { class: Class::System, class_rule: "sshd".to_owned(), ..holder(7, node) },
            Reset,
            Standing::System,
            &[],
        ),
    ];
    for (name, holder, operation, standing, commands) in cases {
        let stage = Stage::new(operation, vec![holder]);
        let decision = stage.decide();
        let [blocker] = decision.blockers.as_slice() else { panic!("{name}: {decision:?}") };
        assert_eq!(
            (blocker.standing, blocker.release.commands.as_slice()),
            (standing, strings(commands).as_slice()),
            "{name}"
        );
        assert!(!commands.is_empty() || blocker.release.note.is_some(), "{name} is left without advice");
        let exit = if standing == Standing::Job { Exit::Held } else { Exit::Protected };
        assert_eq!(decision.exit, exit, "{name}");
        check(&serde_json::to_value(stage.report()).unwrap());
    }
}

/// Whoever may make cgroups may name them, and root pastes what is printed.
#[test]
fn commands_are_safe_to_paste() {
    let job = |change: &dyn Fn(&mut HolderReport)| {
        let mut holder = holder(7, &["/dev/nvidia0"]);
        change(&mut holder);
        Stage::new(Operation::Reset, vec![holder]).commands().remove(0)
    };
    assert_eq!(job(&|holder| holder.slurm_job = Some("1;reboot".to_owned())), "scancel '1;reboot'");
    let container = |holder: &mut HolderReport, name: &str| {
        holder.container = Some(name.to_owned());
        holder.cgroup = Some(format!("/lxc.payload.{name}"));
    };
    assert_eq!(job(&|holder| container(holder, "a$(b)'c")), r"lxc-stop -n 'a$(b)'\''c'");
    assert_eq!(job(&|holder| container(holder, "-k")), "lxc-stop -n '-k'");
    // As long as an id, and none: not cut within a character.
    let long = "é".repeat(32);
    assert_eq!(job(&|holder| container(holder, &long)), format!("lxc-stop -n '{long}'"));
}

fn strings(list: &[&str]) -> Vec<String> {
    list.iter().map(|text| (*text).to_owned()).collect()
}

/// K6: names and places that anybody can choose.
#[test]
fn nobody_is_a_service_by_name_alone() {
    let node: &[&str] = &["/dev/nvidia0"];
    let real = || daemon(7, "nv-hostengine", "nvidia-dcgm", node);
    let own = || HolderReport { uid: Some(1000), cgroup: None, unit: None, ..real() };
    let cases = [
        ("renamed", HolderReport { comm: "nv-hostengine".to_owned(), ..holder(7, node) }),
        ("in a home directory", HolderReport { exe: Some("/home/u/nv-hostengine".to_owned()), ..own() }),
        ("in root's", HolderReport { exe: Some("/root/nv-hostengine".to_owned()), uid: Some(0), ..own() }),
        ("run by a user", own()),
        ("unlinked", HolderReport { exe_deleted: true, uid: Some(0), ..own() }),
        (
            "a user's unit of that name",
            HolderReport {
                unit: Some("nvidia-dcgm.service".to_owned()),
                cgroup: Some("/user.slice/user-1000.slice/user@1000.service/app.slice/nvidia-dcgm.service".to_owned()),
                ..holder(7, node)
            },
        ),
        (
            "a unit in a container",
            HolderReport {
                container: Some("web".to_owned()),
                cgroup: Some("/lxc.payload.web/system.slice/nvidia-dcgm.service".to_owned()),
                ..real()
            },
        ),
        ("a rule says job", HolderReport { class_rule: "mine".to_owned(), ..real() }),
    ];
    for (name, holder) in cases {
        let decision = Stage::new(Operation::Reset, vec![holder]).decide();
        assert_eq!((decision.blockers[0].standing, decision.exit), (Standing::Job, Exit::Held), "{name}");
    }
    assert_eq!(Stage::new(Operation::Reset, vec![real()]).decide().exit, Exit::Protected);
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

#[test]
fn modules_are_unloaded_in_their_order() {
    let stage = Stage { modules: loaded(), ..Stage::new(Operation::Unload, Vec::new()) };
    let decision = stage.decide();
    let order = ["gdrdrv", "nvidia_drm", "nvidia_peermem", "nvidia_modeset", "nvidia_uvm"];
    assert_eq!(stage.commands(), order.map(|name| format!("modprobe -r {name}")));
    assert_eq!(
        (decision.exit, decision.then.as_slice()),
        (Exit::KernelReference, strings(&["modprobe -r nvidia"]).as_slice())
    );
    // Idle modules are in nobody's way otherwise.
    for operation in [Operation::Reset, Operation::Mig] {
        let stage = Stage { modules: loaded(), ..Stage::new(operation, Vec::new()) };
        assert_eq!((stage.decide().exit, stage.decide().blockers.len()), (Exit::Done, 0), "{operation:?}");
    }
}

#[test]
fn modules_that_use_the_gpu_themselves() {
    let mut stage = Stage { modules: loaded(), ..Stage::new(Operation::Reset, Vec::new()) };
    stage.modules[2].modeset = Some(true);
    stage.modules[4].refcnt = Some(2);
    let decision = stage.decide();
    assert_eq!(
        (decision.exit, stage.commands()),
        (Exit::KernelReference, strings(&["modprobe -r nvidia_drm", "modprobe -r nvidia_peermem"]))
    );
    assert!(decision.blockers[0].why.contains("console") && decision.blockers[1].why.contains("2 users"));
    assert_eq!(decision.afterwards, ["modprobe nvidia_peermem", "modprobe nvidia_drm"]);

    // Nobody has a file open, and the driver counts more than its modules.
    let mut stage = Stage { modules: loaded(), ..Stage::new(Operation::Unload, Vec::new()) };
    stage.modules[1].refcnt = Some(5);
    let last = stage.decide().blockers.pop().unwrap();
    assert!(
        last.why.starts_with("nvidia: 5 references, held by gdrdrv") && last.why.contains("1 of them by neither"),
        "{}",
        last.why
    );
    // Not so where somebody has: those are the references.
    stage.seen = seen(vec![holder(7, &["/dev/nvidia0"])]);
    assert!(!stage.decide().blockers.iter().any(|blocker| blocker.why.contains("neither")));
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

#[test]
fn settings_that_nvml_tells() {
    use Operation::{Mig, Reset, Unload};
    let pm = |gpu| format!("nvidia-smi -i GPU-{gpu} -pm 0");
    let divided = strings(&["nvidia-smi mig -i GPU-0 -dci", "nvidia-smi mig -i GPU-0 -dgi"]);
    let cases = [
        (Reset, true, Some(0), vec![pm(0)], "nvidia-smi --gpu-reset -i GPU-0"),
        (Reset, false, Some(0), Vec::new(), "nvidia-smi --gpu-reset -i GPU-0"),
        (Unload, true, Some(0), vec![pm(0), pm(1)], "modprobe -r nvidia"),
        (Mig, true, Some(0), Vec::new(), "nvidia-smi -i GPU-0 -mig 1"),
        (Mig, false, Some(2), divided.clone(), "nvidia-smi -i GPU-0 -mig 0"),
        (Reset, false, Some(1), divided, "nvidia-smi --gpu-reset -i GPU-0"),
        (Unload, false, Some(2), Vec::new(), "modprobe -r nvidia"),
        (Mig, false, None, Vec::new(), "nvidia-smi -i GPU-0 -mig 0|1"),
    ];
    for (operation, persistence, mig, commands, then) in cases {
        let stage = Stage { nvml: Some(nvml(persistence, mig)), ..Stage::new(operation, Vec::new()) };
        let name = format!("{operation:?} {persistence} {mig:?}");
        let decision = stage.decide();
        assert_eq!(
            (stage.commands(), decision.then.as_slice()),
            (commands.clone(), strings(&[then]).as_slice()),
            "{name}"
        );
        let exit = if commands.is_empty() { Exit::Done } else { Exit::KernelReference };
        assert_eq!(decision.exit, exit, "{name}");
        let undividable = operation == Mig && mig.is_none();
        assert_eq!(decision.notes.iter().any(|note| note.contains("cannot be divided")), undividable, "{name}");
        check(&serde_json::to_value(stage.report()).unwrap());
    }
}

/// A whole host: who goes first, what comes back, and each command once.
#[test]
fn everything_at_once_in_order() {
    let all: &[&str] = &["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"];
    let holders = vec![
        daemon(1, "nvidia-persistenced", "nvidia-persistenced", all),
        daemon(2, "nv-fabricmanager", "nvidia-fabricmanager", all),
        daemon(3, "nv-hostengine", "nvidia-dcgm", all),
        daemon(4, "dcgm-exporter", "dcgm-exporter", all),
        holder(5, all),
        holder(6, all),
        HolderReport { slurm_job: Some("42".to_owned()), ..holder(8, all) },
    ];
    let mut stage = Stage {
        chosen: [0, 1].into(),
        nvml: Some(nvml(true, Some(0))),
        modules: loaded(),
        ..Stage::new(Operation::Reset, holders)
    };
    let expected = [
        "gpureap reap --gpu 0 --gpu 1 --match any",
        "scancel 42",
        "systemctl stop dcgm-exporter",
        "systemctl stop nvidia-dcgm",
        "systemctl stop nvidia-fabricmanager",
        "nvidia-smi -i GPU-0 -pm 0",
        "nvidia-smi -i GPU-1 -pm 0",
    ];
    assert_eq!(stage.commands(), expected);
    let decision = stage.decide();
    assert_eq!(decision.steps[0].releases, ["python3 (5)", "python3 (6)"]);
    assert_eq!(decision.steps[5].releases[0], "nvidia-persistenced (1)");
    let back = [
        "nvidia-smi -i GPU-1 -pm 1",
        "nvidia-smi -i GPU-0 -pm 1",
        "systemctl start nvidia-fabricmanager",
        "systemctl start nvidia-dcgm",
        "systemctl start dcgm-exporter",
    ];
    assert_eq!(decision.afterwards, back);
    assert_eq!((decision.outcome, decision.exit), (Outcome::Jobs, Exit::Held));
    check(&serde_json::to_value(stage.report()).unwrap());

    // Of several kinds the first counts.
    stage.seen.holders.truncate(4);
    assert_eq!(stage.decide().exit, Exit::Protected);
    stage.seen.holders.clear();
    assert_eq!(stage.decide().exit, Exit::KernelReference);
    stage.nvml = None;
    assert_eq!(stage.decide().exit, Exit::Done);
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
