use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
};

use super::*;

fn rules(text: &str) -> Result<Rules, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        class: Vec<Rule>,
    }
    toml::from_str::<File>(text).map(|file| Rules::with(file.class)).map_err(|error| error.message().to_owned())
}

/// A daemon of root's, as the host's own file.
fn daemon(exe: &str) -> ClassInput {
    ClassInput {
        comm: exe.rsplit('/').next().unwrap().chars().take(15).collect(),
        uid: Some(0),
        user: Some("root".to_owned()),
        exe: Some(exe.into()),
        trust: Trust::Host,
        ..ClassInput::default()
    }
}

fn unit(name: &str) -> ClassInput {
    ClassInput { unit: Some(name.to_owned()), system_unit: Some(name.to_owned()), ..ClassInput::default() }
}

fn contained(exe: &str, image: &str) -> ClassInput {
    let container = ContainerNames { image: Some(image.to_owned()), ..ContainerNames::default() };
    ClassInput { trust: Trust::Container, contained: true, container, ..daemon(exe) }
}

fn shipped(input: &ClassInput) -> (Class, String) {
    let Classed { class, rule } = classify(input, &Rules::default());
    (class, rule)
}

#[test]
fn k7_k8_shipped_rules() {
    let user = |input: ClassInput| ClassInput { uid: Some(1000), user: None, ..input };
    let exporter = "nvcr.io/nvidia/k8s/dcgm-exporter:3.3.9-ubuntu22.04";
    for (input, class, rule) in [
        (daemon("/usr/bin/nvidia-persistenced"), Class::System, "nvidia-persistenced"),
        (ClassInput { uid: Some(143), ..daemon("/usr/bin/nvidia-persistenced") }, Class::System, "nvidia-persistenced"),
        (unit("nvidia-persistenced.service"), Class::System, "nvidia-persistenced"),
        (daemon("/usr/bin/nv-fabricmanager"), Class::System, "nvidia-fabricmanager"),
        (daemon("/usr/bin/nv-hostengine"), Class::System, "dcgm"),
        (unit("nvidia-dcgm.service"), Class::System, "dcgm"),
        (daemon("/usr/bin/dcgm-exporter"), Class::System, "dcgm-exporter"),
        (contained("/usr/bin/dcgm-exporter", exporter), Class::System, "dcgm-exporter"),
        (daemon("/usr/bin/nvidia-cuda-mps-control"), Class::System, "nvidia-mps"),
        (user(daemon("/usr/bin/nvidia-cuda-mps-server")), Class::System, "nvidia-mps"),
        (daemon("/usr/bin/nvidia-imex"), Class::System, "nvidia-imex"),
        (user(daemon("/usr/lib/xorg/Xorg")), Class::System, "display-server"),
        (user(daemon("/usr/bin/Xwayland")), Class::System, "display-server"),
        (user(daemon("/usr/bin/gnome-shell")), Class::System, "display-server"),
        (daemon("/usr/sbin/gdm3"), Class::System, "display-manager"),
        (daemon("/usr/libexec/gdm-wayland-session"), Class::System, "display-manager"),
        (daemon("/usr/bin/sddm"), Class::System, "display-manager"),
        (user(daemon("/usr/bin/weston")), Class::System, "display-server"),
        (daemon("/usr/bin/containerd"), Class::System, "container-runtime"),
        (daemon("/usr/bin/containerd-shim-runc-v2"), Class::System, "container-runtime"),
        (daemon("/usr/bin/dockerd"), Class::System, "container-runtime"),
        (daemon("/usr/bin/crio"), Class::System, "container-runtime"),
        (daemon("/usr/bin/conmon"), Class::System, "container-runtime"),
        (daemon("/usr/libexec/crio/conmonrs"), Class::System, "container-runtime"),
        (daemon("/usr/sbin/runc"), Class::System, "container-runtime"),
        (daemon("/usr/bin/kubelet"), Class::System, "kubelet"),
        (daemon("/usr/sbin/slurmd"), Class::System, "slurm"),
        (daemon("/opt/slurm/24.05/sbin/slurmstepd"), Class::System, "slurm"),
        (daemon("/usr/sbin/sshd"), Class::System, "sshd"),
        (user(daemon("/usr/lib/openssh/sshd-session")), Class::System, "sshd"),
        (daemon("/usr/lib/systemd/systemd"), Class::System, "init"),
        (daemon("/usr/lib/systemd/systemd-udevd"), Class::System, "system-service"),
        (daemon("/usr/lib/systemd/systemd-logind"), Class::System, "system-service"),
        (daemon("/usr/bin/dbus-daemon"), Class::System, "init"),
        (daemon("/usr/local/bin/gpud"), Class::Monitor, "gpud"),
        (user(daemon("/usr/bin/nvtop")), Class::Monitor, "nvtop"),
        (user(daemon("/usr/bin/nvidia-smi")), Class::Monitor, "nvidia-smi"),
        (ClassInput { comm: "nvitop".to_owned(), ..daemon("/usr/bin/python3.12") }, Class::Monitor, "nvitop"),
        (daemon("/usr/bin/cadvisor"), Class::Monitor, "cadvisor"),
        (contained("/usr/bin/cadvisor", "gcr.io/cadvisor/cadvisor:v0.49.1"), Class::Monitor, "cadvisor"),
        (daemon("/usr/local/bin/node_exporter"), Class::Monitor, "node-exporter"),
        (daemon("/usr/local/bin/nvidia_gpu_exporter"), Class::Monitor, "exporter"),
        (unit("prometheus-nvidia-exporter.service"), Class::Monitor, "exporter"),
        (unit("netdata.service"), Class::Monitor, "netdata"),
        (daemon("/usr/bin/telegraf"), Class::Monitor, "telegraf"),
        (daemon("/usr/sbin/zabbix_agent2"), Class::Monitor, "zabbix-agent"),
        (unit("datadog-agent-process.service"), Class::Monitor, "datadog-agent"),
        // Nobody's rule.
        (ClassInput::default(), Class::Job, "default"),
        (daemon("/usr/bin/python3.12"), Class::Job, "default"),
        (unit("slurmd.service"), Class::Job, "default"),
        (unit("ssh.service"), Class::Job, "default"),
        (unit("docker.service"), Class::Job, "default"),
        (unit("cron.service"), Class::Job, "default"),
    ] {
        assert_eq!(shipped(&input), (class, rule.to_owned()), "{input:?}");
    }
}

#[test]
fn k6_what_a_user_can_arrange_protects_nobody() {
    let hostengine = daemon("/usr/bin/nv-hostengine");
    let exporter = contained("/usr/bin/dcgm-exporter", "nvcr.io/nvidia/k8s/dcgm-exporter:3");
    for (what, input) in [
        ("a name", ClassInput { exe: Some("/home/u/train".into()), trust: Trust::None, ..hostengine.clone() }),
        ("a copy in his home", ClassInput { exe: Some("/home/u/nv-hostengine".into()), ..hostengine.clone() }),
        ("a mount over the path", ClassInput { trust: Trust::None, ..hostengine.clone() }),
        ("the program itself, as himself", ClassInput { uid: Some(1000), ..hostengine.clone() }),
        ("the host's program in his container", ClassInput { contained: true, ..hostengine }),
        ("a program in his own image", contained("/usr/bin/nv-hostengine", "docker.io/u/dcgm:latest")),
        (
            "an image that looks alike",
            contained("/usr/bin/dcgm-exporter", "evil.io/nvcr.io/nvidia/k8s/dcgm-exporter:3"),
        ),
        ("another program in that image", ClassInput { exe: Some("/usr/bin/python3".into()), ..exporter.clone() }),
        ("a volume over the program", ClassInput { trust: Trust::None, ..exporter.clone() }),
        ("a unit of his own manager", ClassInput { system_unit: None, ..unit("nvidia-dcgm.service") }),
        (
            "root's name for a python",
            ClassInput { uid: Some(1000), comm: "nvitop".to_owned(), ..daemon("/usr/bin/python3") },
        ),
    ] {
        assert_eq!(shipped(&input), (Class::Job, "default".to_owned()), "{what}");
    }
    assert_eq!(shipped(&exporter).0, Class::System);
}

#[test]
fn own_rules_come_first() {
    let rules = rules(
        r#"
        [[class]]
        name = "our-daemon"
        class = "system"
        exe = "/opt/**/bin/gpu-broker"

        [[class]]
        name = "our-daemon"
        class = "system"
        uid = ["gpuadmin", 950]

        [[class]]
        name = "hostengine-may-go"
        class = "job"
        comm = "nv-hostengine"

        [[class]]
        name = "operators-namespace"
        class = "system"
        namespace = ["gpu-operator", "kube-*"]
        "#,
    )
    .unwrap();
    let class = |input: &ClassInput| classify(input, &rules).rule;
    assert_eq!(class(&daemon("/opt/a/b/bin/gpu-broker")), "our-daemon");
    assert_eq!(class(&ClassInput { uid: Some(950), ..ClassInput::default() }), "our-daemon");
    assert_eq!(class(&ClassInput { user: Some("gpuadmin".to_owned()), ..ClassInput::default() }), "our-daemon");
    assert_eq!(class(&daemon("/usr/bin/nv-hostengine")), "hostengine-may-go");
    let container = ContainerNames { namespace: Some("kube-system".to_owned()), ..ContainerNames::default() };
    assert_eq!(class(&ClassInput { container, contained: true, ..ClassInput::default() }), "operators-namespace");
    assert_eq!(class(&daemon("/usr/bin/dcgm-exporter")), "dcgm-exporter");
    assert!(rules.has("our-daemon") && rules.has("dcgm") && !rules.has("default"));
}

#[test]
fn mistakes_in_rules() {
    for (text, expected) in [
        (
            "name = \"a\"\nclass = \"system\"\ncomm = \"x\"",
            "whoever runs a process can choose what the rule `a` asks for: class `system` needs exe",
        ),
        ("name = \"a\"\nclass = \"monitor\"\npod = \"x\"", "whoever runs a process can choose"),
        ("name = \"a\"\nclass = \"system\"", "the rule `a` has no condition"),
        ("name = \"A b\"\nclass = \"job\"\ncomm = \"x\"", "a rule's name has small letters"),
        ("name = \"all\"\nclass = \"job\"\ncomm = \"x\"", "`all` has a meaning of its own"),
        ("name = \"default\"\nclass = \"job\"\ncomm = \"x\"", "`default` has a meaning of its own"),
        (
            "name = \"a\"\nclass = \"king\"\ncomm = \"x\"",
            "unknown variant `king`, expected one of `job`, `monitor`, `system`",
        ),
        ("name = \"a\"\nclass = \"job\"\nexe = \"bin/x\"", "exe `bin/x` is not an absolute path"),
        ("name = \"a\"\nclass = \"job\"\nexe = \"/a***\"", "`exe` has the pattern `/a***`: "),
        ("name = \"a\"\nclass = \"job\"\nexe = []", "`exe` is a list without patterns"),
        ("name = \"a\"\nclass = \"job\"\nexe = 3", "`exe` must be a pattern or a list of patterns"),
        ("name = \"a\"\nclass = \"job\"\nuid = -3", "`uid` must be a number, a user's name"),
        ("name = \"a\"\nclass = \"job\"\nexec = \"/x\"", "unknown field `exec`"),
        ("class = \"job\"", "missing field `name`"),
    ] {
        let message = rules(&format!("[[class]]\n{text}")).unwrap_err();
        assert!(message.starts_with(expected), "{text}: {message}");
        assert!(!message.contains('\n'), "{message}");
    }
}

#[test]
fn shipped_rules_are_in_order() {
    // What was compiled in is what the file says, and the file passes the checks of a user's.
    let read = rules(include_str!("rules.toml")).unwrap();
    let count = Rules::default().iter().count();
    assert!(count > 50 && read.iter().count() == 2 * count);
    assert!(read.iter().take(count).eq(Rules::default().iter()));
    let rules = Rules::default();
    assert!(rules.iter().all(|rule| rule.class != Class::Job));
    // Rules of one name are of one class: it is a name that people write.
    let names: BTreeSet<(&str, Class)> = rules.iter().map(|rule| (rule.name.as_str(), rule.class)).collect();
    let distinct: BTreeSet<&str> = names.iter().map(|(name, _)| *name).collect();
    assert_eq!(names.len(), distinct.len());
}

/// A root with one program in it, all of this user's; the checks are of root's files, so they need root.
fn root_with(exe: &str) -> Option<tempfile::TempDir> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: files of root's need root");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let path = dir.path().join(exe.trim_start_matches('/'));
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::copy("/bin/sleep", &path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    Some(dir)
}

/// A /proc with one process, whose program is that file.
fn proc_of(exe: &Path, root: &Path) -> tempfile::TempDir {
    let proc = tempfile::tempdir().unwrap();
    fs::create_dir_all(proc.path().join("7/ns")).unwrap();
    fs::create_dir_all(proc.path().join("1/ns")).unwrap();
    symlink(exe, proc.path().join("7/exe")).unwrap();
    symlink(root, proc.path().join("7/root")).unwrap();
    proc
}

#[test]
fn whose_program_it_is() {
    let exe = Path::new("/usr/bin/nv-hostengine");
    let Some(root) = root_with("/usr/bin/nv-hostengine") else { return };
    let file = root.path().join("usr/bin/nv-hostengine");
    let proc = proc_of(&file, root.path());
    let trusted = || program::is_hosts(proc.path(), 7, exe, root.path());
    assert!(trusted());
    let mode =
        |path: &str, mode| fs::set_permissions(root.path().join(path), fs::Permissions::from_mode(mode)).unwrap();
    for (path, wrong, right) in [
        ("usr/bin/nv-hostengine", 0o775, 0o755),
        ("usr/bin/nv-hostengine", 0o757, 0o755),
        ("usr/bin", 0o777, 0o755),
        ("usr", 0o1777, 0o755),
        ("", 0o775, 0o755),
    ] {
        mode(path, wrong);
        assert!(!trusted(), "{path} {wrong:o}");
        mode(path, right);
        assert!(trusted());
    }
    for path in ["usr/bin/nv-hostengine", "usr/bin", "usr"] {
        std::os::unix::fs::chown(root.path().join(path), Some(65_534), None).unwrap();
        assert!(!trusted(), "{path} is another user's");
        std::os::unix::fs::chown(root.path().join(path), Some(0), None).unwrap();
    }
    // Another file of root's that was mounted over the path in some namespace.
    let other = root.path().join("usr/bin/python3");
    fs::copy("/bin/sleep", &other).unwrap();
    assert!(!program::is_hosts(proc_of(&other, root.path()).path(), 7, exe, root.path()));
    // The host's file, given to a process with another root, as the driver's programs are to a container.
    assert!(!program::is_hosts(proc_of(&file, proc.path()).path(), 7, exe, root.path()));
    // A link on the way, and paths that are none.
    symlink("usr/bin", root.path().join("bin")).unwrap();
    assert!(!program::is_hosts(proc.path(), 7, Path::new("/bin/nv-hostengine"), root.path()));
    for path in ["", "/", "nv-hostengine", "/usr/../usr/bin/nv-hostengine"] {
        assert!(!program::is_hosts(proc.path(), 7, Path::new(path), root.path()), "{path}");
    }
    assert!(!program::is_hosts(proc.path(), 8, exe, root.path()), "nobody");
}

#[test]
fn a_containers_own_program() {
    let exe = Path::new("/usr/bin/dcgm-exporter");
    let Some(root) = root_with("/usr/bin/dcgm-exporter") else { return };
    let file = root.path().join("usr/bin/dcgm-exporter");
    let proc = proc_of(&file, root.path());
    assert!(program::is_containers(proc.path(), 7, exe));
    assert!(!program::is_containers(proc.path(), 7, Path::new("/usr/bin/python3")));
    std::os::unix::fs::chown(&file, Some(1000), None).unwrap();
    assert!(!program::is_containers(proc.path(), 7, exe), "a user's, as in a container with ids of its own");
    std::os::unix::fs::chown(&file, Some(0), None).unwrap();
    // From another mount than the container's root, as a volume is; everything else about it is in order.
    let elsewhere = Path::new("/sys/kernel/notes");
    let proc = proc_of(elsewhere, Path::new("/"));
    if program::is_hosts(proc.path(), 7, elsewhere, Path::new("/")) {
        assert!(!program::is_containers(proc.path(), 7, elsewhere));
    } else {
        eprintln!("SKIPPED: no file of root's on another mount");
    }
}

#[test]
fn a_program_that_was_replaced_by_an_upgrade() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: files of root's need root");
        return;
    }
    // Not in /tmp, which everybody may write.
    let Ok(dir) = tempfile::tempdir_in("/usr/local") else {
        eprintln!("SKIPPED: /usr/local cannot be written");
        return;
    };
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let exe = dir.path().join("nv-hostengine");
    fs::copy("/bin/sleep", &exe).unwrap();
    let mut child = std::process::Command::new(&exe).arg("100").spawn().unwrap();
    let is_hosts = || program::is_hosts(Path::new("/proc"), child.id(), &exe, Path::new("/"));
    // The child may not have executed the program yet when spawn returns on some kernels; it has on Linux with vfork.
    assert!(is_hosts());
    fs::remove_file(&exe).unwrap();
    assert!(is_hosts(), "gone, but its mounts are this host's");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    assert!(!is_hosts(), "anybody could have put it there");
    child.kill().unwrap();
    child.wait().unwrap();
}
