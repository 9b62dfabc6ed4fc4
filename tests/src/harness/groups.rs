//! Cgroups that a test makes for its processes.
use std::{fs, path::PathBuf, time::Duration};

use super::{note, settle};
use crate::actor::sys::Pid;

/// Groups of our own in the cgroup2 hierarchy, removed at the end.
pub struct Groups {
    pub mount: PathBuf,
    /// Where they are, below the hierarchy's root.
    pub top: String,
    made: Vec<PathBuf>,
}

impl Groups {
    pub fn new() -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts").expect("the mounts");
        let mount = mounts.lines().find_map(|line| {
            let mut words = line.split(' ').skip(1);
            let (place, kind) = (words.next()?, words.next()?);
            (kind == "cgroup2").then(|| PathBuf::from(place))
        })?;
        // Deeper than what any other hierarchy may say of these processes.
        let top = format!("/gpureap-test-{}/a/b", std::process::id());
        Some(Self { mount, top, made: Vec::new() })
    }

    /// Puts a process into a group of ours; its path below the hierarchy's root.
    pub fn put(&mut self, pid: Pid, group: &str) -> String {
        let (path, place) = self.make(group);
        fs::write(place.join("cgroup.procs"), pid.to_string()).expect("move into the cgroup");
        path
    }

    /// Makes a group; its path below the hierarchy's root, and its directory.
    pub fn make(&mut self, group: &str) -> (String, PathBuf) {
        let path = format!("{}/{group}", self.top);
        let mut place = self.mount.clone();
        for part in path.split('/').filter(|part| !part.is_empty()) {
            place.push(part);
            if !place.exists() {
                fs::create_dir(&place).expect("make a cgroup");
                self.made.push(place.clone());
            }
        }
        (path, place)
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        for place in self.made.iter().rev() {
            let removed = settle(Duration::from_secs(10), || fs::remove_dir(place).err());
            if let Err(error) = removed {
                note(&format!("{}: {error}", place.display()));
            }
        }
    }
}
