//! What container runtimes wrote down of a container: name, image, pod. Read from their files, for a daemon may hang.
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

/// The files of runtimes are a few to a hundred kilobytes; the list of all of podman's containers has one for each.
const MAX_FILE: u64 = 4 << 20;
const MAX_LIST: u64 = 64 << 20;
/// Names are at most 253 characters in Kubernetes and 128 in docker; images have no stated limit.
const MAX_NAME: usize = 512;

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
    /// Those that were asked for.
    known: RefCell<BTreeMap<String, ContainerNames>>,
}

impl Runtimes {
    pub const fn new(root: PathBuf) -> Self {
        Self { root, podman: OnceCell::new(), known: RefCell::new(BTreeMap::new()) }
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
        docker(&self.root, id).or_else(|| cri(&self.root, id)).or_else(podman).unwrap_or_default().bounded()
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
