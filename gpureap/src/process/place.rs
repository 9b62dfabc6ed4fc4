//! Where a process belongs, from its cgroup path: systemd unit, container, Slurm job, Kubernetes pod.

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The innermost systemd unit; slices are no units here.
    pub unit: Option<String>,
    /// Container id, or name where the runtime uses names.
    pub container: Option<String>,
    pub slurm_job: Option<String>,
    /// `0`, `batch`, `extern`, `interactive`.
    pub slurm_step: Option<String>,
    /// Uid of a Kubernetes pod.
    pub pod: Option<String>,
}

impl Place {
    pub fn of(cgroup: &str) -> Self {
        let mut place = Self::default();
        let mut slurm = false;
        let users_own = is_users_own(cgroup);
        for (before, segment) in segments(cgroup) {
            if let Some(pod) = pod(segment, before) {
                place.pod = Some(pod);
            }
            if let Some(container) = container(segment, before) {
                place.container = Some(container);
            }
            if is_unit(segment) {
                place.unit = Some(segment.to_owned());
            }
            slurm |= segment.starts_with("slurm") || segment.ends_with("slurmstepd.scope");
            let job = segment.strip_prefix("job_").filter(|job| slurm && job.starts_with(|c: char| c.is_ascii_digit()));
            // The outermost, and none that a user's own manager or a container may have named.
            if let Some(job) = job.filter(|_| !users_own && place.container.is_none() && place.slurm_job.is_none()) {
                place.slurm_job = Some(job.to_owned());
            }
            let is_of_job = place.slurm_job.is_some() && place.slurm_job.as_deref() == before.strip_prefix("job_");
            if let Some(step) = segment.strip_prefix("step_").filter(|_| is_of_job) {
                place.slurm_step = Some(step.to_owned());
            }
        }
        place
    }
}

/// Whether a user's own manager may have named all below it, or it lies outside of what is seen here.
fn is_users_own(cgroup: &str) -> bool {
    segments(cgroup).next().is_none_or(|(_, first)| first == "user.slice" || first == "..")
}

/// Each part of a path with the one before it.
fn segments(cgroup: &str) -> impl Iterator<Item = (&str, &str)> {
    cgroup
        .split('/')
        .filter(|segment| !segment.is_empty())
        .scan("", |before, segment| Some((std::mem::replace(before, segment), segment)))
}

fn is_unit(segment: &str) -> bool {
    [".service", ".scope"].iter().any(|suffix| segment.ends_with(suffix))
}

/// The unit of the host's own systemd that a process belongs to, where its cgroup proves it: slices alone lead to it,
/// none of them a user's, and the process is in no container and no job that merely runs below that unit. Making such a
/// group takes root; below `user.slice`, in a container or in a job anybody may name groups at will.
pub fn system_unit(cgroup: &str) -> Option<&str> {
    let Place { unit: _, container, slurm_job, slurm_step: _, pod } = Place::of(cgroup);
    if container.is_some() || slurm_job.is_some() || pod.is_some() {
        return None;
    }
    let mut segments = cgroup.strip_prefix('/')?.split('/');
    let first = segments.clone().next()?;
    if first == "user.slice" {
        return None;
    }
    segments.find(|segment| segment.strip_suffix(".slice").is_none()).filter(|segment| is_unit(segment))
}

/// The container that the host's runtime made: the outermost, and none that a user's own manager may have named. What
/// runs in a container may make groups below its own that look like any other container's.
pub fn host_container(cgroup: &str) -> Option<String> {
    if is_users_own(cgroup) {
        return None;
    }
    segments(cgroup).find_map(|(before, segment)| container(segment, before))
}

/// The paths in all hierarchies, each once.
pub fn cgroup_paths(file: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(file);
    let mut paths: Vec<String> =
        text.lines().filter_map(|line| line.splitn(3, ':').nth(2)).map(str::to_owned).collect();
    paths.sort();
    paths.dedup();
    paths
}

/// The path to go by: with version 2 alone there is one; on a mixed host the one that says most, version 2 first.
pub fn cgroup_path(file: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(file);
    let mut best: Option<(usize, &str)> = None;
    let lines = text.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        Some((number != "0", !controllers.starts_with("name="), path))
    });
    let mut lines: Vec<_> = lines.filter(|(.., path)| path.starts_with('/')).collect();
    lines.sort_by_key(|(old, unnamed, _)| (*old, *unnamed));
    for (.., path) in lines {
        let depth = path.split('/').filter(|segment| !segment.is_empty()).count();
        if best.is_none_or(|(deepest, _)| depth > deepest) {
            best = Some((depth, path));
        }
    }
    best.map(|(_, path)| path.to_owned())
}

/// `kubepods-burstable-pod<uid>.slice` (systemd) or `pod<uid>` under `kubepods/...` (cgroupfs).
fn pod(segment: &str, before: &str) -> Option<String> {
    let segment = segment.split(':').next().unwrap_or(segment);
    let uid = match segment.strip_suffix(".slice") {
        // A cluster in a container has `kubelet-kubepods-…`.
        Some(slice) if slice.contains("kubepods") => slice.rsplit_once("-pod")?.1.replace('_', "-"),
        None if ["kubepods", "besteffort", "burstable", "guaranteed"].contains(&before) => {
            segment.strip_prefix("pod")?.to_owned()
        }
        Some(_) | None => return None,
    };
    (uid.len() >= 32 && uid.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-')).then_some(uid)
}

fn container(segment: &str, before: &str) -> Option<String> {
    let is_id = |id: &str| id.len() >= 12 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    // `docker-<id>.scope`, `libpod-<id>.scope`, `cri-containerd-<id>.scope`, `crio-<id>.scope`, `nerdctl-<id>.scope`; a
    // monitor (`libpod-conmon-<id>`) is not in the container.
    let scope = segment.strip_suffix(".scope").unwrap_or(segment);
    for prefix in ["docker-", "libpod-", "cri-containerd-", "crio-", "nerdctl-", "libpod-payload-"] {
        if let Some(id) = scope.strip_prefix(prefix).filter(|id| is_id(id)) {
            return Some(id.to_owned());
        }
    }
    // `system.slice:cri-containerd:<id>`: a systemd path given to the cgroupfs driver.
    if let Some((head, id)) = segment.rsplit_once(':')
        && head.contains(':')
        && is_id(id)
    {
        return Some(id.to_owned());
    }
    if let Some(name) = segment.strip_prefix("lxc.payload.").filter(|name| !name.is_empty()) {
        return Some(name.to_owned());
    }
    // systemd-nspawn; libvirt registers its virtual machines in the same way.
    let machine = segment.strip_prefix("machine-").and_then(|name| name.strip_suffix(".scope"));
    let machine = machine.or_else(|| segment.strip_prefix("systemd-nspawn@")?.strip_suffix(".service"));
    if let Some(name) = machine.map(unescape).filter(|name| !name.is_empty() && !name.starts_with("qemu-")) {
        return Some(name);
    }
    // 64 digits are a container's id in whatever group its runtime puts it: `/ecs/<task>/<id>`, `/k8s.io/<id>`.
    if segment.len() == 64 && is_id(segment) {
        return Some(segment.to_owned());
    }
    match before {
        "lxc" | "lxc.payload" => Some(segment.to_owned()),
        "docker" | "libpod_parent" | "buildkit" if is_id(segment) => Some(segment.to_owned()),
        // cgroupfs driver: kubepods/burstable/pod<uid>/<id>.
        _ if before.starts_with("pod") && is_id(segment) => Some(segment.to_owned()),
        _ => None,
    }
}

/// Undoes systemd's `\x2d`.
fn unescape(name: &str) -> String {
    let mut bytes = Vec::with_capacity(name.len());
    let mut rest = name.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let escaped = rest.strip_prefix(b"\\x").and_then(|tail| std::str::from_utf8(tail.get(..2)?).ok());
        if let Some(byte) = escaped.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            bytes.push(byte);
            rest = &rest[4..];
        } else {
            bytes.push(*first);
            rest = tail;
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    const UID: &str = "0a1b2c3d-1111-2222-3333-444455556666";

    #[test]
    fn common_layouts() {
        let under = UID.replace('-', "_");
        // path, unit, container, slurm job, pod
        let cases: &[(&str, &str, &str, &str, &str)] = &[
            ("/", "", "", "", ""),
            ("/system.slice/train.service", "train.service", "", "", ""),
            ("/user.slice/user-1000.slice/session-3.scope", "session-3.scope", "", "", ""),
            ("/user.slice/user-1000.slice/user@1000.service/app.slice/a.service", "a.service", "", "", ""),
            (&format!("/system.slice/docker-{ID}.scope"), &format!("docker-{ID}.scope"), ID, "", ""),
            (&format!("/docker/{ID}"), "", ID, "", ""),
            (&format!("/docker/{ID}/system.slice/a.service"), "a.service", ID, "", ""),
            (&format!("/machine.slice/libpod-{ID}.scope/container"), &format!("libpod-{ID}.scope"), ID, "", ""),
            (&format!("/machine.slice/libpod-conmon-{ID}.scope"), &format!("libpod-conmon-{ID}.scope"), "", "", ""),
            (
                &format!(
                    "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{under}.slice/cri-containerd-{ID}.scope"
                ),
                &format!("cri-containerd-{ID}.scope"),
                ID,
                "",
                UID,
            ),
            (&format!("/kubepods/besteffort/pod{UID}/{ID}"), "", ID, "", UID),
            (&format!("/kubepods/pod{UID}/{ID}"), "", ID, "", UID),
            (
                &format!("/system.slice/containerd.service/kubepods-pod{under}.slice:cri-containerd:{ID}"),
                "containerd.service",
                ID,
                "",
                UID,
            ),
            ("/lxc.payload.web/system.slice/a.service", "a.service", "web", "", ""),
            ("/lxc/web", "", "web", "", ""),
            ("/lxc.monitor.web", "", "", "", ""),
            ("/slurm/uid_1000/job_123/step_0/task_1", "", "", "123.0", ""),
            ("/slurm_node1/uid_1000/job_123/step_extern", "", "", "123.extern", ""),
            ("/system.slice/slurmstepd.scope/job_42/step_batch/user/task_0", "slurmstepd.scope", "", "42.batch", ""),
            ("/system.slice/slurmstepd.scope/system", "slurmstepd.scope", "", "", ""),
            ("/slurm/job_1/x/step_0", "", "", "1", ""),
            // What a job or a user made below its own.
            ("/slurm/uid_1/job_1/step_0/slurm/job_2/step_1", "", "", "1.0", ""),
            ("/user.slice/user-1000.slice/user@1000.service/slurm/job_41", "user@1000.service", "", "", ""),
            ("/../slurm/job_41", "", "", "", ""),
            (
                "/user.slice/user-1000.slice/user@1000.service/user.slice/docker-0123456789abcdef.scope",
                "docker-0123456789abcdef.scope",
                "0123456789abcdef",
                "",
                "",
            ),
            (
                "/user.slice/user-1000.slice/user@1000.service/user.slice/apptainer-4711.scope",
                "apptainer-4711.scope",
                "",
                "",
                "",
            ),
            (&format!("/system.slice/nerdctl-{ID}.scope"), &format!("nerdctl-{ID}.scope"), ID, "", ""),
            (&format!("/default/{ID}"), "", ID, "", ""),
            (&format!("/k8s.io/{ID}"), "", ID, "", ""),
            (&format!("/ecs/0123456789abcdef0123456789abcdef/{ID}"), "", ID, "", ""),
            (&format!("/libpod_parent/libpod-{ID}"), "", ID, "", ""),
            (
                &format!("/machine.slice/machine-libpod_pod_{ID}.slice/libpod-{ID}.scope/container"),
                &format!("libpod-{ID}.scope"),
                ID,
                "",
                "",
            ),
            (
                &format!("/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container"),
                &format!("libpod-{ID}.scope"),
                ID,
                "",
                "",
            ),
            (&format!("/system.slice/app.service/libpod-payload-{ID}"), "app.service", ID, "", ""),
            (
                &format!("/kubepods.slice/kubepods-pod{under}.slice/crio-{ID}.scope/container"),
                &format!("crio-{ID}.scope"),
                ID,
                "",
                UID,
            ),
            (
                &format!("/kubepods.slice/kubepods-pod{under}.slice/crio-conmon-{ID}.scope"),
                &format!("crio-conmon-{ID}.scope"),
                "",
                "",
                UID,
            ),
            (&format!("/kubepods/burstable/pod{UID}/crio-{ID}"), "", ID, "", UID),
            (
                &format!(
                    "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{under}.slice/docker-{ID}.scope"
                ),
                &format!("docker-{ID}.scope"),
                ID,
                "",
                UID,
            ),
            // A static pod's uid is a hash without dashes.
            (
                &format!(
                    "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0123456789abcdef0123456789abcdef.slice/cri-containerd-{ID}.scope"
                ),
                &format!("cri-containerd-{ID}.scope"),
                ID,
                "",
                "0123456789abcdef0123456789abcdef",
            ),
            (
                &format!(
                    "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{under}.slice/cri-containerd-{ID}.scope"
                ),
                &format!("cri-containerd-{ID}.scope"),
                ID,
                "",
                UID,
            ),
            (
                &format!("/docker/{ID}/kubelet/kubepods/burstable/pod{UID}/{}", ID.replace('0', "f")),
                "",
                &ID.replace('0', "f"),
                "",
                UID,
            ),
            ("/lxc.payload/web", "", "web", "", ""),
            ("/lxc/129/ns/system.slice/a.service", "a.service", "129", "", ""),
            ("/lxc.payload.project_web", "", "project_web", "", ""),
            ("/machine.slice/machine-deb12.scope/payload", "machine-deb12.scope", "deb12", "", ""),
            (r"/machine.slice/machine-my\x2dbox.scope", r"machine-my\x2dbox.scope", "my-box", "", ""),
            (
                r"/machine.slice/systemd-nspawn@my\x2dbox.service/payload",
                r"systemd-nspawn@my\x2dbox.service",
                "my-box",
                "",
                "",
            ),
            (r"/machine.slice/machine-qemu\x2d1\x2dvm.scope/libvirt", r"machine-qemu\x2d1\x2dvm.scope", "", "", ""),
            ("/system.slice/node1_slurmstepd.scope/job_42", "node1_slurmstepd.scope", "", "42", ""),
            ("/jobs/job_7", "", "", "", ""),
            ("/slurm/job_x", "", "", "", ""),
            ("/docker/short", "", "", "", ""),
            ("/kubepods/podx/y", "", "", "", ""),
            ("/../../system.slice/a.service", "a.service", "", "", ""),
        ];
        for (path, unit, container, slurm_job, pod) in cases {
            let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
            let (job, step) = slurm_job.split_once('.').unwrap_or((slurm_job, ""));
            let expected = Place {
                unit: text(unit),
                container: text(container),
                slurm_job: text(job),
                slurm_step: text(step),
                pod: text(pod),
            };
            assert_eq!(Place::of(path), expected, "{path}");
        }
    }

    #[test]
    fn whose_name_can_be_believed() {
        for (path, unit, container) in [
            ("/system.slice/nvidia-persistenced.service", "nvidia-persistenced.service", ""),
            ("/system.slice/system-getty.slice/getty@tty1.service", "getty@tty1.service", ""),
            ("/monitoring.slice/netdata.service/worker", "netdata.service", ""),
            ("/init.scope", "init.scope", ""),
            // A user's manager names its units as it likes, and so does systemd in a container.
            ("/user.slice/user-1000.slice/user@1000.service/app.slice/nvidia-dcgm.service", "", ""),
            ("/user.slice/user-1000.slice/session-3.scope", "", ""),
            ("/lxc.payload.web/system.slice/nvidia-dcgm.service", "", "web"),
            ("/lxc/129/ns/system.slice/nvidia-dcgm.service", "", "129"),
            ("/../system.slice/nvidia-dcgm.service", "", ""),
            ("/x/system.slice/nvidia-dcgm.service", "", ""),
            ("/", "", ""),
            ("", "", ""),
            // What runs below a service without being part of it.
            ("/system.slice/slurmstepd.scope/job_4/step_0", "", ""),
            (&format!("/system.slice/containerd.service/a:cri-containerd:{ID}"), "", ID),
            (&format!("/system.slice/docker-{ID}.scope"), "", ID),
            // Made by what runs in a container, or by a user.
            (&format!("/docker/{ID}/docker/{}", ID.replace('0', "f")), "", ID),
            (&format!("/user.slice/user-1000.slice/user@1000.service/docker-{ID}.scope"), "", ""),
            (&format!("/../docker/{ID}"), "", ""),
        ] {
            assert_eq!(system_unit(path).unwrap_or_default(), unit, "{path}");
            assert_eq!(host_container(path).unwrap_or_default(), container, "{path}");
        }
    }

    #[test]
    fn which_path() {
        for (file, expected) in [
            ("0::/system.slice/train.service\n", Some("/system.slice/train.service")),
            ("0::/\n", Some("/")),
            ("", None),
            ("garbage\n1:2\n", None),
            (
                "5:memory:/slurm/uid_1/job_2\n1:name=systemd:/system.slice/slurmd.service\n0::/system.slice/slurmd.service\n",
                Some("/slurm/uid_1/job_2"),
            ),
            ("5:cpu,cpuacct:/a/b\n1:name=systemd:/c/d\n", Some("/c/d")),
            ("0::/a:b/c\n", Some("/a:b/c")),
        ] {
            assert_eq!(cgroup_path(file.as_bytes()).as_deref(), expected, "{file}");
        }
        assert_eq!(cgroup_path(b"0::/\xff\n").as_deref(), Some("/\u{fffd}"));
    }

    proptest::proptest! {
        #[test]
        fn any_path_is_survived(path in "(/(pod|lxc|docker|job_|kubepods-pod|:|é|[a-f0-9]{12}|\\PC){0,4}){0,6}") {
            proptest::prop_assert!(Place::of(&path).pod.is_none_or(|pod| pod.len() >= 32));
        }
    }
}
