//! Where a process belongs, from its cgroup path: systemd unit, container, Slurm job, Kubernetes pod.

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The innermost systemd unit; slices are no units here.
    pub unit: Option<String>,
    /// Container id, or name where the runtime uses names.
    pub container: Option<String>,
    pub slurm_job: Option<String>,
    /// Uid of a Kubernetes pod.
    pub pod: Option<String>,
}

impl Place {
    pub fn of(cgroup: &str) -> Self {
        let segments: Vec<&str> = cgroup.split('/').filter(|segment| !segment.is_empty()).collect();
        let mut place = Self::default();
        let mut slurm = false;
        for (index, segment) in segments.iter().enumerate() {
            let before = index.checked_sub(1).map_or("", |index| segments[index]);
            if let Some(pod) = pod(segment, before) {
                place.pod = Some(pod);
            }
            if let Some(container) = container(segment, before) {
                place.container = Some(container);
            }
            if [".service", ".scope"].iter().any(|suffix| segment.ends_with(suffix)) {
                place.unit = Some((*segment).to_owned());
            }
            slurm |= segment.starts_with("slurm") || segment.ends_with("slurmstepd.scope");
            let job = segment.strip_prefix("job_").filter(|job| slurm && job.starts_with(|c: char| c.is_ascii_digit()));
            if let Some(job) = job {
                place.slurm_job = Some(job.to_owned());
            }
        }
        place
    }
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
        Some(slice) if slice.starts_with("kubepods") => slice.rsplit_once("-pod")?.1.replace('_', "-"),
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
    if let Some(name) = segment.strip_prefix("lxc.payload.") {
        return Some(name.to_owned());
    }
    match before {
        "lxc" if !segment.is_empty() => Some(segment.to_owned()),
        "docker" | "libpod_parent" | "buildkit" if is_id(segment) => Some(segment.to_owned()),
        // cgroupfs driver: kubepods/burstable/pod<uid>/<id>.
        _ if before.starts_with("pod") && is_id(segment) => Some(segment.to_owned()),
        _ => None,
    }
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
            ("/slurm/uid_1000/job_123/step_0/task_1", "", "", "123", ""),
            ("/system.slice/slurmstepd.scope/job_42/step_batch/user/task_0", "slurmstepd.scope", "", "42", ""),
            ("/system.slice/node1_slurmstepd.scope/job_42", "node1_slurmstepd.scope", "", "42", ""),
            ("/jobs/job_7", "", "", "", ""),
            ("/slurm/job_x", "", "", "", ""),
            ("/docker/short", "", "", "", ""),
            ("/kubepods/podx/y", "", "", "", ""),
            ("/../../system.slice/a.service", "a.service", "", "", ""),
        ];
        for (path, unit, container, slurm_job, pod) in cases {
            let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
            let expected =
                Place { unit: text(unit), container: text(container), slurm_job: text(slurm_job), pod: text(pod) };
            assert_eq!(Place::of(path), expected, "{path}");
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
