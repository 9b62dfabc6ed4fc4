//! Modules and settings of the driver, and the order of it all.

use super::*;

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
