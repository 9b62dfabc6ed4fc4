//! Programs that hold a device, with the name, user, environment and session that a test wants them to have.
use std::{
    fs::{self, File},
    io::Read as _,
    os::unix::{
        fs::{PermissionsExt as _, chown},
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use tempfile::TempDir;

use super::{note, program};
use crate::actor::sys::{self, Pid};

/// The actor's program, as a process that holds one device with its standard error and lives until its input closes.
pub struct Holder(Child);

pub struct Wanted<'a> {
    pub program: PathBuf,
    pub device: &'a str,
    /// Held as well.
    pub more: &'a [&'a str],
    /// It maps its device.
    pub maps: bool,
    pub comm: &'a str,
    pub user: Option<u32>,
    pub environment: &'a [(&'a str, &'a str)],
    pub own_session: bool,
    /// In a user and mount namespace of its own, this file lies over that one.
    pub mounted: Option<(&'a Path, &'a Path)>,
}

impl Default for Wanted<'_> {
    fn default() -> Self {
        Self {
            program: program("GPUREAP_ACTOR", "gpureap-actor"),
            device: "/dev/full",
            more: &[],
            maps: false,
            comm: "worker",
            user: None,
            environment: &[],
            own_session: true,
            mounted: None,
        }
    }
}

impl Holder {
    pub fn start() -> Self {
        Self::with(&Wanted::default())
    }

    pub fn with(wanted: &Wanted<'_>) -> Self {
        Self::try_with(wanted).unwrap_or_else(|error| panic!("{}: {error}", wanted.program.display()))
    }

    pub fn try_with(wanted: &Wanted<'_>) -> std::io::Result<Self> {
        let Wanted { program, device, more, maps, comm, user, environment, own_session, mounted } = wanted;
        let (user, own_session) = (*user, *own_session);
        let more: Vec<String> = more.iter().map(|&node| node.to_owned()).collect();
        let mounted = mounted.map(|(from, over)| (from.to_owned(), over.to_owned()));
        let mut command = Command::new(program);
        command
            .args([if *maps { "live-mapped" } else { "live-named" }, "1", comm])
            .env_clear()
            .envs(environment.iter().copied())
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::options().read(true).write(true).open(device).expect("the device"));
        let enter = move || {
            if own_session {
                sys::setsid();
            }
            for node in &more {
                sys::try_open(node, libc::O_RDWR)?;
            }
            user.map_or(Ok(()), sys::become_user)?;
            if let Some((from, over)) = &mounted {
                sys::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS)?;
                sys::mount("none", from, over, libc::MS_BIND)?;
            }
            Ok(())
        };
        // SAFETY: between fork and exec this only makes system calls; the strings they need are small allocations,
        // which glibc allows in the child of a threaded process.
        let mut child = unsafe { command.pre_exec(enter) }.spawn()?;
        let mut byte = [0];
        child.stdout.as_mut().expect("its output").read_exact(&mut byte).expect("it says that it is ready");
        Ok(Self(child))
    }

    pub fn pid(&self) -> Pid {
        self.0.id() as Pid
    }

    pub fn lives(&mut self) -> bool {
        self.0.try_wait().expect("wait for it").is_none()
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        if let Err(error) = self.0.kill().and_then(|()| self.0.wait()) {
            note(&format!("holder {}: {error}", self.pid()));
        }
    }
}

/// A copy of the actor's program, root's, at a path that only root can change, or in a directory that is somebody's.
pub struct Copy {
    pub path: PathBuf,
    _place: Option<TempDir>,
}

impl Copy {
    pub fn at(path: PathBuf, place: Option<TempDir>) -> Self {
        fs::create_dir_all(path.parent().expect("a directory")).expect("make the directory");
        assert!(!path.exists(), "{} is somebody's", path.display());
        fs::copy(program("GPUREAP_ACTOR", "gpureap-actor"), &path).expect("copy the program");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("chmod");
        Self { path, _place: place }
    }

    /// In a directory below one that nobody but root can write; /tmp is none.
    pub fn guarded(name: &str) -> Self {
        fs::create_dir_all("/usr/local").expect("/usr/local");
        let place = tempfile::Builder::new().prefix("gpureap-test-").tempdir_in("/usr/local").expect("a directory");
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).expect("chmod");
        Self::at(place.path().join("bin").join(name), Some(place))
    }

    pub fn in_home(name: &str, owner: u32) -> Self {
        let place = tempfile::Builder::new().prefix("gpureap-test-").tempdir().expect("a directory");
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).expect("chmod");
        let copy = Self::at(place.path().join(name), Some(place));
        for path in [copy.path.as_path(), copy.path.parent().expect("a directory")] {
            chown(path, Some(owner), Some(owner)).expect("chown");
        }
        copy
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            note(&format!("{}: {error}", self.path.display()));
        }
    }
}
