//! A command in a world where something is missing.
use std::{
    fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use crate::actor::sys;

/// What a command is to find, or not to find.
#[derive(Clone, Debug, Default)]
pub struct World {
    unmount: Vec<PathBuf>,
    cover: Vec<PathBuf>,
    /// Of the option `hidepid`.
    hidepid: Option<String>,
    user: Option<u32>,
    capabilities: Option<u64>,
    no_new_privileges: bool,
}

impl World {
    /// No file system of this type is mounted.
    #[must_use]
    pub fn without_mounts(mut self, kind: &str) -> Self {
        let mounts = fs::read_to_string("/proc/self/mounts").expect("the mounts");
        let of_kind = mounts.lines().filter_map(|line| {
            let mut words = line.split(' ');
            let place = words.nth(1)?;
            (words.next()? == kind).then(|| PathBuf::from(place))
        });
        // Those mounted last lie on top.
        self.unmount.extend(of_kind.collect::<Vec<_>>().into_iter().rev());
        self
    }

    /// The file is empty.
    #[must_use]
    pub fn without_file(mut self, path: &str) -> Self {
        if Path::new(path).exists() {
            self.cover.push(path.into());
        }
        self
    }

    /// A /proc that hides the processes of others, as `hidepid` says.
    #[must_use]
    pub fn hiding_processes(mut self, level: &str) -> Self {
        self.hidepid = Some(format!("hidepid={level}"));
        self
    }

    /// An ordinary user.
    #[must_use]
    pub fn as_user(mut self, id: u32) -> Self {
        self.user = Some(id);
        self
    }

    /// Root with these capabilities, a bit for each, and no others.
    #[must_use]
    pub fn with_capabilities(mut self, set: u64) -> Self {
        self.capabilities = Some(set);
        self
    }

    /// Nothing that it starts has more rights.
    #[must_use]
    pub fn without_new_privileges(mut self) -> Self {
        self.no_new_privileges = true;
        self
    }

    /// Puts the command there, in a mount namespace of its own.
    pub fn enter(self, mut command: Command) -> Command {
        let enter = move || {
            let Self { unmount, cover, hidepid, user, capabilities, no_new_privileges } = &self;
            if !unmount.is_empty() || !cover.is_empty() || hidepid.is_some() {
                sys::unshare(libc::CLONE_NEWNS)?;
                sys::mount("none", Path::new("none"), Path::new("/"), libc::MS_REC | libc::MS_PRIVATE)?;
            }
            for place in unmount {
                sys::unmount(place)?;
            }
            for path in cover {
                sys::mount("none", Path::new("/dev/null"), path, libc::MS_BIND)?;
            }
            if let Some(options) = hidepid {
                sys::mount_with("proc", Path::new("proc"), Path::new("/proc"), 0, options)?;
            }
            if let Some(set) = capabilities {
                // The kernel refuses the numbers that it does not have.
                for number in (0..64).filter(|number| set & 1 << number == 0) {
                    sys::prctl(libc::PR_CAPBSET_DROP, number).ok();
                }
            }
            if *no_new_privileges {
                sys::prctl(libc::PR_SET_NO_NEW_PRIVS, 1)?;
            }
            user.map_or(Ok(()), sys::become_user)
        };
        // SAFETY: between fork and exec this only makes system calls; the strings they need are small allocations,
        // which glibc allows in the child of a threaded process.
        unsafe { command.pre_exec(enter) };
        command
    }
}
