//! The services that are known to hold GPUs, and how each is told to let go.

use std::path::Path;

use super::{
    Operation,
    release::{Release, quoted},
    report::Standing,
};
use crate::holders::report::HolderReport;

/// A known service.
#[derive(Debug, PartialEq, Eq)]
pub struct Service {
    pub name: &'static str,
    pub standing: Standing,
    /// When its turn comes: those that depend on others first.
    pub rank: u32,
    /// Names of its executable.
    programs: &'static [&'static str],
    /// Its systemd units; the first is the usual one.
    units: &'static [&'static str],
    /// Its name in the label by which NVIDIA's GPU operator deploys it to a node.
    component: Option<&'static str>,
    warning: Option<&'static str>,
}

const fn service(name: &'static str, standing: Standing, rank: u32) -> Service {
    Service { name, standing, rank, programs: &[], units: &[], component: None, warning: None }
}

const SERVICES: [Service; 16] = [
    Service {
        programs: &["dcgm-exporter"],
        units: &["dcgm-exporter", "nvidia-dcgm-exporter"],
        component: Some("dcgm-exporter"),
        ..service("dcgm-exporter", Standing::Monitor, 20)
    },
    Service { programs: &["gpud"], units: &["gpud"], ..service("gpud", Standing::Monitor, 20) },
    Service { programs: &["nvtop"], ..service("nvtop", Standing::Monitor, 20) },
    Service { programs: &["nvitop"], ..service("nvitop", Standing::Monitor, 20) },
    Service { programs: &["nvidia-smi"], ..service("nvidia-smi", Standing::Monitor, 20) },
    Service { programs: &["cadvisor"], units: &["cadvisor"], ..service("cadvisor", Standing::Monitor, 20) },
    Service {
        programs: &["nvidia_gpu_exporter", "node_exporter", "telegraf", "netdata"],
        units: &["nvidia_gpu_exporter", "prometheus-node-exporter", "node_exporter", "telegraf", "netdata"],
        ..service("exporter", Standing::Monitor, 20)
    },
    Service {
        programs: &["nvidia-device-plugin", "gpu-feature-discovery", "nvidia-mig-manager"],
        component: Some("device-plugin"),
        warning: Some("the node offers no GPUs to Kubernetes until it is back"),
        ..service("device plugin", Standing::System, 25)
    },
    Service {
        programs: &["nvsm", "nvsm_core", "nvsm-core", "nvsm-api-gateway"],
        units: &["nvsm", "nvsm-core"],
        ..service("nvsm", Standing::Monitor, 30)
    },
    Service {
        programs: &["nv-hostengine", "dcgmi"],
        units: &["nvidia-dcgm", "dcgm"],
        component: Some("dcgm"),
        ..service("DCGM", Standing::System, 35)
    },
    Service {
        programs: &["nvidia-cuda-mps-server", "nvidia-cuda-mps-control"],
        units: &["nvidia-mps"],
        warning: Some("its clients end with it"),
        ..service(MPS, Standing::System, 40)
    },
    Service {
        programs: &[
            "Xorg",
            "X",
            "Xwayland",
            "gnome-shell",
            "kwin_wayland",
            "kwin_x11",
            "plasmashell",
            "weston",
            "sway",
            "gdm",
            "sddm",
            "lightdm",
            "sddm-greeter",
            "mutter",
            "cage",
        ],
        units: &["display-manager", "gdm", "gdm3", "sddm", "lightdm", "lxdm", "xdm"],
        warning: Some("every graphical session ends"),
        ..service(DISPLAY, Standing::System, 45)
    },
    Service { programs: &["nvidia-imex"], units: &["nvidia-imex"], ..service("nvidia-imex", Standing::System, 50) },
    Service {
        programs: &["nv-fabricmanager", "nvlsm"],
        units: &["nvidia-fabricmanager"],
        warning: Some("hosts with NVSwitches need it back before the GPUs can be used again"),
        ..service("nvidia-fabricmanager", Standing::System, 55)
    },
    Service {
        programs: &["nvidia-powerd", "nvidia-gridd", "nvidia-vgpu-mgr"],
        units: &["nvidia-powerd", "nvidia-gridd", "nvidia-vgpu-mgr"],
        ..service("NVIDIA service", Standing::System, 56)
    },
    Service {
        programs: &["nvidia-persistenced"],
        units: &["nvidia-persistenced"],
        ..service("nvidia-persistenced", Standing::System, PERSISTENCED)
    },
];

const PERSISTENCED: u32 = 65;
const MPS: &str = "MPS";
const DISPLAY: &str = "display server";

/// Directories where only the system's own programs are.
const SYSTEM_DIRECTORIES: [&str; 9] = [
    "/usr/bin",
    "/usr/sbin",
    "/usr/lib",
    "/usr/libexec",
    "/usr/local/bin",
    "/usr/local/sbin",
    "/usr/local/dcgm",
    "/bin",
    "/sbin",
];

/// The kernel keeps this many bytes of a process's name.
const COMM: usize = 15;

impl Service {
    /// Which service a holder is, if it really is one: the classification says so, or its unit, or its program in a
    /// directory of the system, run by root. A name alone is anybody's to take.
    pub fn of(holder: &HolderReport) -> Option<&'static Self> {
        let HolderReport { class, class_rule, uid, exe, exe_deleted, unit, container, cgroup, .. } = holder;
        let classed = Standing::of(*class) != Standing::Job;
        // A rule that calls it a job on purpose has the last word.
        if !classed && class_rule != "default" {
            return None;
        }
        // A unit's name is the host's only outside containers and users' own managers.
        let of_the_host =
            container.is_none() && cgroup.as_deref().is_some_and(|path| path.starts_with("/system.slice/"));
        let by_unit = SERVICES.iter().find(|service| unit.as_deref().is_some_and(|unit| service.has_unit(unit)));
        if let Some(service) = by_unit.filter(|_| of_the_host) {
            return Some(service);
        }
        let installed = container.is_none()
            && !exe_deleted
            && exe.as_deref().is_some_and(|exe| SYSTEM_DIRECTORIES.iter().any(|dir| Path::new(exe).starts_with(dir)));
        let as_usual = |service: &&Self| {
            // Display servers run as the user of the session, monitors as anybody.
            installed && (*uid == Some(0) || service.name == DISPLAY || service.standing == Standing::Monitor)
        };
        SERVICES.iter().find(|service| service.runs(holder) && (classed || as_usual(service)))
    }

    fn has_unit(&self, unit: &str) -> bool {
        unit.strip_suffix(".service").is_some_and(|name| self.units.contains(&name))
    }

    fn runs(&self, holder: &HolderReport) -> bool {
        let base = |path: &str| path.rsplit('/').next().map(str::to_owned);
        let exe = holder.exe.as_deref().and_then(base);
        self.programs.iter().any(|program| match &exe {
            Some(exe) => exe == program,
            // Not to be read: the name, as far as the kernel keeps it.
            None => holder.comm == program[..program.len().min(COMM)],
        })
    }

    /// `gpus`: the GPUs that the operation is about, as nvidia-smi takes them.
    pub fn release(&self, holder: &HolderReport, operation: Operation, gpus: &[String], host: &str) -> Release {
        let mut notes: Vec<&str> = self.warning.into_iter().collect();
        let commands = match self.way(holder, operation) {
            Way::Pod => {
                notes.push("its DaemonSet starts it again unless it is kept off this node");
                match self.component {
                    Some(component) => vec![label(host, component, false)],
                    None => super::release::pod(holder, host),
                }
            }
            Way::Persistence => {
                notes.push("the daemon lets go of the GPUs; `systemctl stop nvidia-persistenced` ends it");
                persistence(gpus, 0)
            }
            Way::Mps => vec!["echo quit | nvidia-cuda-mps-control".to_owned()],
            Way::Unit(unit) => vec![format!("systemctl stop {}", quoted(&unit))],
            Way::Signal => vec![format!("kill {}", holder.pid)],
        };
        Release { commands, note: (!notes.is_empty()).then(|| notes.join("; ")) }
    }

    /// What brings it back afterwards.
    pub fn start(&self, holder: &HolderReport, operation: Operation, gpus: &[String], host: &str) -> Vec<String> {
        match self.way(holder, operation) {
            Way::Pod => self.component.map(|component| label(host, component, true)).into_iter().collect(),
            Way::Persistence => persistence(gpus, 1),
            Way::Mps => vec!["nvidia-cuda-mps-control -d".to_owned()],
            Way::Unit(unit) => vec![format!("systemctl start {}", quoted(&unit))],
            Way::Signal => Vec::new(),
        }
    }

    fn way(&self, holder: &HolderReport, operation: Operation) -> Way {
        let own = holder.unit.as_deref().and_then(|unit| unit.strip_suffix(".service"));
        let own = own.filter(|_| holder.cgroup.as_deref().is_some_and(|cgroup| cgroup.starts_with("/system.slice/")));
        if holder.pod.is_some() {
            Way::Pod
        } else if self.rank == PERSISTENCED && operation != Operation::Unload {
            Way::Persistence
        } else if self.name == DISPLAY {
            // Whichever of them it is: this name is an alias of it.
            Way::Unit("display-manager".to_owned())
        } else if let Some(unit) = own {
            Way::Unit(unit.to_owned())
        } else if self.name == MPS {
            Way::Mps
        } else if self.standing == Standing::System
            && let Some(unit) = self.units.first()
        {
            Way::Unit((*unit).to_owned())
        } else {
            // Somebody started it by hand.
            Way::Signal
        }
    }
}

enum Way {
    Pod,
    Persistence,
    Mps,
    /// Without `.service`.
    Unit(String),
    Signal,
}

fn persistence(gpus: &[String], mode: u8) -> Vec<String> {
    if gpus.is_empty() {
        return vec![format!("nvidia-smi -pm {mode}")];
    }
    gpus.iter().map(|gpu| super::release::persistence(gpu, mode)).collect()
}

/// NVIDIA's GPU operator deploys by such labels.
fn label(host: &str, component: &str, on: bool) -> String {
    format!("kubectl label node {} --overwrite nvidia.com/gpu.deploy.{component}={on}", quoted(host))
}

/// Modules for transfers between GPUs and other devices, with users of their own.
pub fn is_for_transfers(module: &str) -> bool {
    matches!(module, "nvidia_peermem" | "gdrdrv" | "nvidia_fs" | "nv_peer_mem")
}
