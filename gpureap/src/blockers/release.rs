//! The right way to make somebody let go.

use serde::{Deserialize, Serialize};

use super::report::Standing;
use crate::holders::report::HolderReport;

/// Commands in their order, and what to know before one runs them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    pub commands: Vec<String>,
    pub note: Option<String>,
}

impl Release {
    pub fn note(text: &str) -> Self {
        Self { commands: Vec::new(), note: Some(text.to_owned()) }
    }
}

/// One word for a shell. Names of jobs, containers and units come from cgroup paths, in part of users' own making, and
/// commands are made to be pasted by root.
pub(super) fn quoted(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._:@%+,/=-".contains(&byte);
    if !word.is_empty() && !word.starts_with('-') && word.bytes().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// A process that is no known service: end what started it, so that it does not come back. `gpus`: those of the targets
/// that it holds, as `--gpu` takes them; `every`: all GPUs are meant.
pub fn job(holder: &HolderReport, gpus: &[String], every: bool, standing: Standing, host: &str) -> Release {
    let HolderReport { pid, unit, container, slurm_job, pod: in_pod, cgroup, .. } = holder;
    if in_pod.is_some() {
        return Release {
            commands: pod(holder, host),
            note: Some("the second command prints the pod's name; `kubectl delete pod` ends it".to_owned()),
        };
    }
    if let Some(job) = slurm_job {
        return Release { commands: vec![format!("scancel {}", quoted(job))], note: None };
    }
    if let Some(container) = container {
        return stop_container(container, cgroup.as_deref().unwrap_or_default());
    }
    // The units of users' own managers are not the system's to stop.
    let of_the_system = cgroup.as_deref().is_some_and(|cgroup| cgroup.starts_with("/system.slice/"));
    let service = unit.as_deref().filter(|unit| of_the_system && unit.ends_with(".service"));
    if let Some(service) = service {
        return Release {
            commands: vec![format!("systemctl stop {}", quoted(service.trim_end_matches(".service")))],
            note: Some("a signal alone might have it restarted".to_owned()),
        };
    }
    if standing != Standing::Job {
        return Release::note("it is part of the system, and gpureap does not know how it is stopped");
    }
    let command = if every {
        "gpureap reap".to_owned()
    } else if gpus.is_empty() {
        format!("gpureap reap --pid {pid}")
    } else {
        // One that only has handles is in the way too.
        let gpus: Vec<String> = gpus.iter().map(|gpu| quoted(gpu)).collect();
        format!("gpureap reap --gpu {} --match any", gpus.join(" --gpu "))
    };
    Release { commands: vec![command], note: None }
}

/// Keep others away from the node, then find the pod by its uid.
pub(super) fn pod(holder: &HolderReport, host: &str) -> Vec<String> {
    let uid = holder.pod.as_deref().unwrap_or_default();
    vec![
        format!("kubectl cordon {}", quoted(host)),
        format!("crictl pods --label {}", quoted(&format!("io.kubernetes.pod.uid={uid}"))),
    ]
}

/// The persistence mode of one GPU; where the daemon keeps it, nvidia-smi tells the daemon.
pub(super) fn persistence(gpu: &str, mode: u8) -> String {
    format!("nvidia-smi -i {gpu} -pm {mode}")
}

fn stop_container(id: &str, cgroup: &str) -> Release {
    // Runtimes take the beginning of an id; a name is whole.
    let is_id = id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    let short = &quoted(if is_id { &id[..12] } else { id });
    let has = |word: &str| cgroup.contains(word);
    let command = if has("docker") {
        format!("docker stop {short}")
    } else if has("libpod") {
        format!("podman stop {short}")
    } else if has("nerdctl") {
        format!("nerdctl stop {short}")
    } else if has("cri-containerd") || has("crio") {
        format!("crictl stop {short}")
    } else if has("lxc") && id.bytes().all(|byte| byte.is_ascii_digit()) {
        // Proxmox numbers its containers.
        format!("pct shutdown {id}")
    } else if has("lxc") {
        format!("lxc-stop -n {short}")
    } else {
        return Release::note("stop its container by the runtime that started it");
    };
    Release { commands: vec![command], note: None }
}

/// A kernel module; `console`: it drives displays.
pub(super) fn module(name: &str, console: bool, users: u64) -> (Vec<String>, Option<String>) {
    if name == crate::gpu::modules::ROOT {
        let note = "the kernel itself refers to it: persistence mode, the console, or a tracer attached to it";
        return (Vec::new(), Some(note.to_owned()));
    }
    let note = if console {
        Some("the console has to be unbound first: echo 0 > /sys/class/vtconsole/vtcon1/bind")
    } else if name == "nvidia_drm" && users > 0 {
        Some("`fuser -v /dev/dri/*` names who uses its displays")
    } else if super::services::is_for_transfers(name) && users > 0 {
        Some("the jobs that transfer through it have to end first")
    } else {
        None
    };
    (vec![format!("modprobe -r {}", quoted(name))], note.map(str::to_owned))
}
