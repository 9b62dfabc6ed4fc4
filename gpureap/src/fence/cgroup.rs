//! Cgroups by path, by unit, and by the id under which the kernel knows them: the inode number of their directory.

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use crate::{bpf::load, error::Failure};

/// The cgroup2 hierarchy of the host.
#[derive(Clone, Debug)]
pub struct Cgroups {
    root: PathBuf,
}

impl Cgroups {
    pub const fn new(root: PathBuf) -> Self {
        Self { root }
    }

    pub fn find(proc: &Path) -> Result<Self, Failure> {
        load::cgroup2_root(proc)
            .map(Self::new)
            .ok_or_else(|| Failure::unsupported("the root of the host's cgroup2 is not mounted here"))
    }

    /// A path as /proc/PID/cgroup shows it or below the mount, or the name of a running unit or of another cgroup that
    /// there is once; `.service` may be left out.
    pub fn resolve(&self, text: &str) -> Result<(u64, String), Failure> {
        let path = if text.starts_with('/') {
            let text = Path::new(text);
            let below = text.strip_prefix(&self.root).or_else(|_| text.strip_prefix("/")).unwrap_or(text);
            if below.components().any(|part| !matches!(part, std::path::Component::Normal(_))) {
                return Err(Failure::usage(format!("{} is not the path of a cgroup", text.display())));
            }
            self.root.join(below)
        } else {
            self.by_name(text)?
        };
        let meta = fs::metadata(&path).ok().filter(fs::Metadata::is_dir);
        let Some(meta) = meta else {
            return Err(Failure::usage(format!("no such cgroup: {text}; looked for {}", path.display())));
        };
        if path == self.root {
            return Err(Failure::usage(
                "the root cgroup has every process in it: a fence that exempts it fences nobody",
            ));
        }
        Ok((meta.ino(), self.shown(&path)))
    }

    fn by_name(&self, name: &str) -> Result<PathBuf, Failure> {
        let service = format!("{name}.service");
        let mut found = Vec::new();
        self.walk(&mut |path, _| {
            if path.file_name().is_some_and(|last| last == name || last == service.as_str()) {
                found.push(path.to_owned());
            }
        });
        match found.as_slice() {
            [path] => Ok(path.clone()),
            [] => Err(Failure::usage(format!(
                "no such cgroup: {name}; a unit has one only while it runs, other cgroups are named by their path"
            ))),
            several => {
                let paths: Vec<String> = several.iter().map(|path| self.shown(path)).collect();
                Err(Failure::usage(format!("{name} is the name of several cgroups: {}", paths.join(", "))))
            }
        }
    }

    /// All there are, by id, as /proc/PID/cgroup shows them.
    pub fn paths(&self) -> HashMap<u64, String> {
        let mut paths = HashMap::new();
        if let Ok(meta) = fs::metadata(&self.root) {
            paths.insert(meta.ino(), "/".to_owned());
        }
        self.walk(&mut |path, id| {
            paths.insert(id, self.shown(path));
        });
        paths
    }

    fn shown(&self, path: &Path) -> String {
        let below = path.strip_prefix(&self.root).unwrap_or(path);
        format!("/{}", below.to_string_lossy())
    }

    /// Every cgroup but the root; one that goes meanwhile is left out.
    fn walk(&self, visit: &mut dyn FnMut(&Path, u64)) {
        let mut left = vec![self.root.clone()];
        while let Some(dir) = left.pop() {
            for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
                if entry.file_type().is_ok_and(|kind| kind.is_dir())
                    && let Ok(meta) = entry.metadata()
                {
                    visit(&entry.path(), meta.ino());
                    left.push(entry.path());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_a_cgroup() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for path in ["system.slice/dcgm.service", "system.slice/a.service/sub", "user.slice/u1/a.service", "lxc/web"] {
            fs::create_dir_all(root.join(path)).unwrap();
        }
        fs::write(root.join("lxc/cgroup.procs"), "").unwrap();
        let cgroups = Cgroups::new(root.to_owned());
        let below = |path: &str| root.join(path).display().to_string();
        for (text, expected) in [
            ("/system.slice/dcgm.service", Ok("/system.slice/dcgm.service")),
            (&below("system.slice/dcgm.service"), Ok("/system.slice/dcgm.service")),
            ("/lxc/web/", Ok("/lxc/web")),
            ("dcgm", Ok("/system.slice/dcgm.service")),
            ("dcgm.service", Ok("/system.slice/dcgm.service")),
            ("web", Ok("/lxc/web")),
            ("system.slice", Ok("/system.slice")),
            ("a", Err("a is the name of several cgroups: /")),
            ("dcgm.scope", Err("no such cgroup: dcgm.scope; a unit has one only while it runs")),
            ("/nowhere", Err("no such cgroup: /nowhere; looked for ")),
            ("/lxc/cgroup.procs", Err("no such cgroup")),
            ("/", Err("the root cgroup")),
            (&below(""), Err("the root cgroup")),
            ("/../etc", Err("/../etc is not the path of a cgroup")),
            ("..", Err("no such cgroup")),
            ("", Err("no such cgroup")),
        ] {
            match (cgroups.resolve(text), expected) {
                (Ok((id, path)), Ok(expected)) => {
                    assert_eq!(path, expected, "{text}");
                    assert_eq!(id, fs::metadata(root.join(&path[1..])).unwrap().ino(), "{text}");
                    assert_eq!(cgroups.paths()[&id], path, "{text}");
                }
                (Err(Failure { message, .. }), Err(expected)) => {
                    assert!(message.starts_with(expected), "{text}: {message}");
                }
                (found, _) => panic!("{text}: {found:?}"),
            }
        }
        assert_eq!(cgroups.paths().len(), 10);
    }
}
