//! A process that SIGKILL does not end.
use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::wait_for;
use crate::actor::sys::{self, Pid};

/// The freezer of version 1 keeps a process from dying, as a driver does that never returns.
pub struct Freezer {
    group: PathBuf,
    mounted: Option<PathBuf>,
}

impl Freezer {
    pub fn new(place: &Path) -> io::Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        let there = mounts.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(' ').collect();
            let freezer = fields[2] == "cgroup" && fields[3].split(',').any(|option| option == "freezer");
            freezer.then(|| PathBuf::from(fields[1]))
        });
        let (root, mounted) = if let Some(root) = there {
            (root, None)
        } else {
            fs::create_dir_all(place)?;
            rustix::mount::mount("none", place, "cgroup", rustix::mount::MountFlags::empty(), c"freezer")?;
            (place.to_owned(), Some(place.to_owned()))
        };
        let group = root.join(format!("gpureap-test-{}", std::process::id()));
        fs::create_dir(&group)?;
        Ok(Self { group, mounted })
    }

    pub fn freeze(&self, pid: Pid) {
        fs::write(self.group.join("cgroup.procs"), pid.to_string()).expect("move into the freezer");
        fs::write(self.group.join("freezer.state"), "FROZEN").expect("freeze");
        let frozen = || fs::read_to_string(self.group.join("freezer.state")).is_ok_and(|state| state == "FROZEN\n");
        wait_for("it is frozen", frozen);
    }

    pub fn thaw(&self) {
        fs::write(self.group.join("freezer.state"), "THAWED").expect("thaw");
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        self.thaw();
        wait_for("the freezer is empty", || fs::remove_dir(&self.group).is_ok());
        if let Some(place) = &self.mounted {
            sys::unmount(place).expect("unmount the freezer");
        }
    }
}
