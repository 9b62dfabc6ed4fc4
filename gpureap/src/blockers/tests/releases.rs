//! How each is released.

use super::*;

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
