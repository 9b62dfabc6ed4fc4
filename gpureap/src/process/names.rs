//! What container runtimes and the kubelet wrote down of a container: name, image, pod. Read from their files, for a daemon may hang.
//!
//! The files belong to root, and an id is digits alone, so no path leads elsewhere. What they hold was written by whoever
//! made the container: sizes are bounded, and nothing is trusted to be well-formed.

use std::{
    cell::{OnceCell, RefCell},
    collections::{BTreeMap, HashMap},
    io::Read as _,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use rustix::fs::{CWD, Mode, OFlags};
use serde::Deserialize;

use crate::trust;

/// The files of runtimes are a few to a hundred kilobytes; the list of all of podman's containers has one for each.
const MAX_FILE: u64 = 4 << 20;
const MAX_LIST: u64 = 64 << 20;
/// Names are at most 253 characters in Kubernetes and 128 in docker; images have no stated limit.
const MAX_NAME: usize = 512;
/// Logs of so many pods or containers are looked through; a node has some hundreds.
const MAX_LOGS: usize = 16 << 10;

/// All that is known besides the id; each is what the one who made the container chose to say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerNames {
    pub name: Option<String>,
    pub image: Option<String>,
    /// Kubernetes' name of the pod, and its namespace.
    pub pod: Option<String>,
    pub namespace: Option<String>,
}

/// What the files of a host's runtimes tell. Those that are of one container are read when it is asked for, those that are of
/// all of them once.
#[derive(Debug)]
pub struct Runtimes {
    /// The host's root.
    root: PathBuf,
    podman: OnceCell<HashMap<String, ContainerNames>>,
    pods: OnceCell<Option<HashMap<String, PodName>>>,
    logs: OnceCell<HashMap<String, ContainerNames>>,
    /// Those that were asked for.
    known: RefCell<BTreeMap<String, ContainerNames>>,
}

impl Runtimes {
    pub const fn new(root: PathBuf) -> Self {
        Self {
            root,
            podman: OnceCell::new(),
            pods: OnceCell::new(),
            logs: OnceCell::new(),
            known: RefCell::new(BTreeMap::new()),
        }
    }

    /// A pod's name by its uid, from the kubelet's directory of its logs; it outlives the containers, and is there with every
    /// runtime.
    pub fn pod(&self, uid: &str) -> Option<PodName> {
        self.pods().and_then(|pods| pods.get(uid)).cloned()
    }

    /// Whether the kubelet knows no pod of this uid any more; `None` where there is no kubelet.
    pub fn pod_is_gone(&self, uid: &str) -> Option<bool> {
        self.pods().map(|pods| !pods.contains_key(uid))
    }

    fn pods(&self) -> Option<&HashMap<String, PodName>> {
        self.pods.get_or_init(|| pods(&self.root)).as_ref()
    }

    /// The names of the container with this id, with those of its pod where only the kubelet has them.
    pub fn names_in_pod(&self, id: Option<&str>, pod: Option<&str>) -> ContainerNames {
        let mut names = id.map(|id| self.names(id)).unwrap_or_default();
        if names.pod.is_none()
            && let Some(PodName { namespace, name }) = pod.and_then(|uid| self.pod(uid))
        {
            names.pod = Some(name);
            names.namespace = Some(namespace);
        }
        names
    }

    /// Of the container with this id; empty where no runtime's files tell.
    pub fn names(&self, id: &str) -> ContainerNames {
        self.known.borrow_mut().entry(id.to_owned()).or_insert_with(|| self.read(id)).clone()
    }

    fn read(&self, id: &str) -> ContainerNames {
        if id.len() < 12 || !id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return ContainerNames::default();
        }
        let podman = || self.podman.get_or_init(|| podman(&self.root)).get(id).cloned();
        let logs = || self.logs.get_or_init(|| container_logs(&self.root)).get(id).cloned();
        docker(&self.root, id)
            .or_else(|| cri(&self.root, id))
            .or_else(podman)
            .or_else(logs)
            .unwrap_or_default()
            .bounded()
    }
}

impl ContainerNames {
    fn bounded(self) -> Self {
        let Self { name, image, pod, namespace } = self;
        let bounded = |text: Option<String>| text.filter(|text| !text.is_empty() && text.len() <= MAX_NAME);
        Self { name: bounded(name), image: bounded(image), pod: bounded(pod), namespace: bounded(namespace) }
    }

    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// As the kubelet names the directory of its logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodName {
    pub namespace: String,
    pub name: String,
}

/// Names in a directory in which only root (or the caller) can make any; `None` where there is none such, or too many.
fn names_in(dir: &Path) -> Option<Vec<String>> {
    let dir = trust::place(dir).ok()?;
    let entries = std::fs::read_dir(dir).ok()?.take(MAX_LOGS + 1);
    let names: Vec<String> =
        entries.map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned())).collect::<Option<_>>()?;
    (names.len() <= MAX_LOGS).then_some(names)
}

/// Names of namespaces, pods and containers are DNS labels or subdomains: no underscore is in them, nor anything that a terminal would
/// obey.
fn is_dns(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 253
        && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.'))
}

/// `NAMESPACE_POD_UID` (`BuildPodLogsDirectory`, pkg/kubelet/kuberuntime/helpers.go).
fn pod_of_logs(directory: &str) -> Option<(String, PodName)> {
    let mut parts = directory.split('_');
    let (namespace, name, uid) = (parts.next()?, parts.next()?, parts.next()?);
    let fits = parts.next().is_none() && is_dns(namespace) && is_dns(name) && is_dns(uid);
    fits.then(|| (uid.to_owned(), PodName { namespace: namespace.to_owned(), name: name.to_owned() }))
}

fn pods(root: &Path) -> Option<HashMap<String, PodName>> {
    let names = names_in(&root.join("var/log/pods"))?;
    Some(names.iter().filter_map(|name| pod_of_logs(name)).collect())
}

/// `POD_NAMESPACE_CONTAINER-ID.log` (`LogSymlink`, pkg/kubelet/kuberuntime/legacy.go).
fn container_of_log(file: &str) -> Option<(String, ContainerNames)> {
    let (rest, id) = file.strip_suffix(".log")?.rsplit_once('-')?;
    let mut parts = rest.split('_');
    let (pod, namespace, name) = (parts.next()?, parts.next()?, parts.next()?);
    let is_id = id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    let fits = is_id && parts.next().is_none() && is_dns(pod) && is_dns(namespace) && is_dns(name);
    let text = |text: &str| Some(text.to_owned());
    let names = ContainerNames { name: text(name), image: None, pod: text(pod), namespace: text(namespace) };
    fits.then(|| (id.to_owned(), names))
}

fn container_logs(root: &Path) -> HashMap<String, ContainerNames> {
    let names = names_in(&root.join("var/log/containers")).unwrap_or_default();
    names.iter().filter_map(|name| container_of_log(name)).collect()
}

/// The parsed file, if it is a regular one of root's (or of the caller's) and not too long.
fn json<T: for<'de> Deserialize<'de>>(path: &Path, longest: u64) -> Option<T> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = std::fs::File::from(rustix::fs::openat(CWD, path, flags, Mode::empty()).ok()?);
    let meta = file.metadata().ok()?;
    let own = rustix::process::geteuid().as_raw();
    if !meta.is_file() || meta.len() > longest || (meta.uid() != 0 && meta.uid() != own) {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(longest).read_to_end(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok()
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Docker {
    name: Option<String>,
    config: Option<DockerConfig>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerConfig {
    image: Option<String>,
    #[serde(default)]
    labels: Option<BTreeMap<String, String>>,
}

/// dockerd's own record. cri-dockerd labels what it makes for Kubernetes.
fn docker(root: &Path, id: &str) -> Option<ContainerNames> {
    let Docker { name, config } =
        json(&root.join("var/lib/docker/containers").join(id).join("config.v2.json"), MAX_FILE)?;
    let DockerConfig { image, labels } = config.unwrap_or(DockerConfig { image: None, labels: None });
    let mut labels = labels.unwrap_or_default();
    let mut label = |key: &str| labels.remove(&format!("io.kubernetes.{key}"));
    let name = name.map(|name| name.trim_start_matches('/').to_owned());
    Some(ContainerNames {
        name: label("container.name").or(name),
        image,
        pod: label("pod.name"),
        namespace: label("pod.namespace"),
    })
}

#[derive(Deserialize)]
struct Oci {
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

/// The OCI configuration that containerd and CRI-O give to runc.
fn cri(root: &Path, id: &str) -> Option<ContainerNames> {
    let mut places: Vec<PathBuf> = Vec::new();
    for state in ["run/containerd", "run/k3s/containerd"] {
        let tasks = root.join(state).join("io.containerd.runtime.v2.task");
        // One directory for each of containerd's namespaces: `k8s.io`, `moby`, `default`.
        let namespaces = std::fs::read_dir(&tasks).into_iter().flatten().flatten().take(64);
        places.extend(namespaces.map(|namespace| namespace.path().join(id).join("config.json")));
    }
    places.push(root.join("run/containers/storage/overlay-containers").join(id).join("userdata/config.json"));
    places.into_iter().find_map(|place| {
        let Oci { annotations } = json(&place, MAX_FILE)?;
        let first = |keys: &[&str]| keys.iter().find_map(|key| annotations.get(*key).cloned());
        // containerd's words, then CRI-O's.
        let names = ContainerNames {
            name: first(&["io.kubernetes.cri.container-name", "io.kubernetes.container.name", "nerdctl/name"]),
            image: first(&["io.kubernetes.cri.image-name", "io.kubernetes.cri-o.ImageName"]),
            pod: first(&["io.kubernetes.cri.sandbox-name", "io.kubernetes.pod.name"]),
            namespace: first(&["io.kubernetes.cri.sandbox-namespace", "io.kubernetes.pod.namespace"]),
        };
        (!names.is_empty()).then_some(names)
    })
}

#[derive(Deserialize)]
struct Stored {
    id: String,
    #[serde(default)]
    names: Vec<String>,
    /// JSON in a string.
    #[serde(default)]
    metadata: String,
}

#[derive(Default, Deserialize)]
struct StoredMetadata {
    name: Option<String>,
    #[serde(rename = "image-name")]
    image: Option<String>,
}

/// The list that podman keeps of root's containers. A user's own are in that user's files, which nobody should believe.
fn podman(root: &Path) -> HashMap<String, ContainerNames> {
    let dir = root.join("var/lib/containers/storage/overlay-containers");
    let mut all = HashMap::new();
    for file in ["containers.json", "volatile-containers.json"] {
        let list: Vec<Stored> = json(&dir.join(file), MAX_LIST).unwrap_or_default();
        for Stored { id, names, metadata } in list {
            let StoredMetadata { name, image } = serde_json::from_str(&metadata).unwrap_or_default();
            let names = ContainerNames { name: names.into_iter().next().or(name), image, pod: None, namespace: None };
            all.entry(id).or_insert(names);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    fn names(name: &str, image: &str, pod: &str, namespace: &str) -> ContainerNames {
        let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        ContainerNames { name: text(name), image: text(image), pod: text(pod), namespace: text(namespace) }
    }

    #[test]
    fn each_runtime() {
        for (file, text, expected) in [
            (
                format!("var/lib/docker/containers/{ID}/config.v2.json"),
                r#"{"Name":"/train","Config":{"Image":"nvcr.io/nvidia/pytorch:25.01","Labels":{}},"State":{"Pid":7}}"#.to_owned(),
                names("train", "nvcr.io/nvidia/pytorch:25.01", "", ""),
            ),
            (
                format!("var/lib/docker/containers/{ID}/config.v2.json"),
                r#"{"Name":"/k8s_w_p_ns","Config":{"Image":"sha256:1","Labels":{"io.kubernetes.container.name":"w","io.kubernetes.pod.name":"p","io.kubernetes.pod.namespace":"ns"}}}"#.to_owned(),
                names("w", "sha256:1", "p", "ns"),
            ),
            (
                format!("run/containerd/io.containerd.runtime.v2.task/k8s.io/{ID}/config.json"),
                r#"{"ociVersion":"1.1.0","annotations":{"io.kubernetes.cri.container-name":"dcgm-exporter","io.kubernetes.cri.container-type":"container","io.kubernetes.cri.image-name":"nvcr.io/nvidia/k8s/dcgm-exporter:3.3","io.kubernetes.cri.sandbox-name":"dcgm-x7k","io.kubernetes.cri.sandbox-namespace":"gpu-operator"}}"#.to_owned(),
                names("dcgm-exporter", "nvcr.io/nvidia/k8s/dcgm-exporter:3.3", "dcgm-x7k", "gpu-operator"),
            ),
            (
                format!("run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io/{ID}/config.json"),
                r#"{"annotations":{"io.kubernetes.cri.container-name":"a"}}"#.to_owned(),
                names("a", "", "", ""),
            ),
            (
                format!("run/containerd/io.containerd.runtime.v2.task/default/{ID}/config.json"),
                r#"{"annotations":{"nerdctl/name":"web"}}"#.to_owned(),
                names("web", "", "", ""),
            ),
            (
                format!("run/containers/storage/overlay-containers/{ID}/userdata/config.json"),
                r#"{"annotations":{"io.kubernetes.container.name":"a","io.kubernetes.cri-o.ImageName":"i:1","io.kubernetes.pod.name":"p","io.kubernetes.pod.namespace":"n"}}"#.to_owned(),
                names("a", "i:1", "p", "n"),
            ),
            (
                "var/lib/containers/storage/overlay-containers/containers.json".to_owned(),
                format!(r#"[{{"id":"ff","names":["x"]}},{{"id":"{ID}","names":["pod1"],"metadata":"{{\"image-name\":\"docker.io/library/a:1\",\"name\":\"pod1\"}}"}}]"#),
                names("pod1", "docker.io/library/a:1", "", ""),
            ),
        ] {
            let root = tempfile::tempdir().unwrap();
            let path = root.path().join(&file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            assert_eq!(Runtimes::new(root.path().to_owned()).names(ID), expected, "{file}");
            assert_eq!(Runtimes::new(root.path().to_owned()).names(&ID.replace('0', "1")), ContainerNames::default(), "{file}");
        }
    }

    const UID: &str = "0a1b2c3d-1111-2222-3333-444455556666";

    #[test]
    fn names_of_logs() {
        let pod =
            |directory: &str| pod_of_logs(directory).map(|(uid, PodName { namespace, name })| [namespace, name, uid]);
        let expected = ["ml", "train-0", UID].map(str::to_owned);
        assert_eq!(pod(&format!("ml_train-0_{UID}")), Some(expected));
        let static_pod = "kube-system_kube-proxy-node1_0123456789abcdef0123456789abcdef";
        assert_eq!(pod(static_pod).unwrap()[1], "kube-proxy-node1");
        for wrong in ["", "ml_train-0", "ml__x", "a_b_c_d", "ml_tr\u{1b}ain_x", "ML_a_b", "../x_a_b", "a_b_"] {
            assert_eq!(pod(wrong), None, "{wrong:?}");
        }
        let (id, found) = container_of_log(&format!("train-0_ml_worker-a-{ID}.log")).unwrap();
        assert_eq!((id.as_str(), found), (ID, names("worker-a", "", "train-0", "ml")));
        for wrong in ["train-0_ml_worker-short.log", "x.log", "", &format!("train-0_worker-{ID}.log")] {
            assert_eq!(container_of_log(wrong), None, "{wrong:?}");
        }
    }

    /// The trees as a kubelet makes them.
    #[test]
    fn what_the_kubelet_s_logs_tell() {
        use std::os::unix::fs::{PermissionsExt as _, symlink};
        let root = tempfile::tempdir().unwrap();
        let (pods, containers) = (root.path().join("var/log/pods"), root.path().join("var/log/containers"));
        let runtimes = || Runtimes::new(root.path().to_owned());
        assert_eq!((runtimes().pod_is_gone(UID), runtimes().pod(UID)), (None, None), "no kubelet");
        fs::create_dir_all(pods.join(format!("ml_train-0_{UID}/worker"))).unwrap();
        fs::write(pods.join(format!("ml_train-0_{UID}/worker/0.log")), "").unwrap();
        fs::create_dir_all(&containers).unwrap();
        let log = format!("/var/log/pods/ml_train-0_{UID}/worker/0.log");
        symlink(log, containers.join(format!("train-0_ml_worker-{ID}.log"))).unwrap();
        let found = PodName { namespace: "ml".to_owned(), name: "train-0".to_owned() };
        assert_eq!((runtimes().pod_is_gone(UID), runtimes().pod(UID)), (Some(false), Some(found)));
        assert_eq!(runtimes().pod_is_gone(&UID.replace('0', "1")), Some(true));
        assert_eq!(runtimes().names(ID), names("worker", "", "train-0", "ml"));
        assert_eq!(runtimes().names_in_pod(None, Some(UID)), names("", "", "train-0", "ml"));
        assert_eq!(runtimes().names_in_pod(Some(&ID.replace('0', "1")), Some(UID)), names("", "", "train-0", "ml"));
        assert_eq!(runtimes().names_in_pod(None, None), ContainerNames::default());
        // Where others may make names, none is believed, and no pod is said to be gone.
        fs::set_permissions(&pods, fs::Permissions::from_mode(0o777)).unwrap();
        fs::set_permissions(&containers, fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!((runtimes().pod_is_gone(UID), runtimes().pod(UID)), (None, None));
        assert_eq!(runtimes().names(ID), ContainerNames::default());
    }

    #[test]
    fn hostile_files_tell_nothing() {
        let root = tempfile::tempdir().unwrap();
        let place = root.path().join("var/lib/docker/containers").join(ID);
        fs::create_dir_all(&place).unwrap();
        let file = place.join("config.v2.json");
        let long = format!(r#"{{"Name":"/{}","Config":{{"Image":"ok"}}}}"#, "x".repeat(MAX_NAME));
        let deep = "[".repeat(100_000);
        let huge = format!(r#"{{"Name":"/{}"}}"#, "x".repeat(MAX_FILE as usize));
        for (text, expected) in [
            (long.as_str(), names(&"x".repeat(MAX_NAME), "ok", "", "")),
            (&long.replace("/x", "/xx"), names("", "ok", "", "")),
            (&deep, names("", "", "", "")),
            (&huge, names("", "", "", "")),
            (r#"{"Name":7}"#, names("", "", "", "")),
            ("", names("", "", "", "")),
            (r#"{"Config":null}"#, names("", "", "", "")),
        ] {
            fs::write(&file, text).unwrap();
            assert_eq!(Runtimes::new(root.path().to_owned()).names(ID), expected);
        }
        fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", &file).unwrap();
        assert_eq!(Runtimes::new(root.path().to_owned()).names(ID), ContainerNames::default());
        // Nothing that could lead elsewhere is an id.
        for id in ["", "..", "../../../etc", "0123456789a", "0123456789ag"] {
            assert_eq!(Runtimes::new(root.path().to_owned()).names(id), ContainerNames::default(), "{id}");
        }
    }
}
