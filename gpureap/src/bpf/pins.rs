//! Pins under the pin directory: one subdirectory per (ABI, object, probe set), so that an upgrade can attach the new
//! set beside the old one, and a set of another ABI is never taken for ours.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use gpureap_common::abi::ABI_VERSION;
use rustix::io::Errno;

use super::{denied_or, distrusted, handles, load, object};
use crate::{error::Failure, model::Backend, trust};

/// `BPF_FS_MAGIC`, include/uapi/linux/magic.h.
const BPF_FS: i64 = 0xcafe_4a11;

/// A set that is being made (bpffs allows no dots in names); whoever finds one at start removes it.
const UNFINISHED: &str = "new";

/// Begins the name of a set that is being removed. A reader that met one half removed would find maps without links: counts
/// that stand still.
const RETIRED: &str = "old-";

/// To make a directory that others take away.
const ATTEMPTS: usize = 1000;

/// The pinned fence, which no tracer touches (`bpf/fence/pinned.rs`).
pub const FENCE: &str = "fence";

/// A set of pins in the pin directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    pub dir: PathBuf,
    pub abi: u32,
    pub object: u64,
    pub backend: Backend,
}

/// Name of the subdirectory of a set that this build makes.
pub fn set_name(backend: Backend) -> String {
    format!("abi{ABI_VERSION}-{:016x}-{}", object::object_id(), load::name(backend))
}

fn parse(dir: &Path) -> Option<Set> {
    let name = dir.file_name()?.to_str()?;
    let mut parts = name.strip_prefix("abi")?.splitn(3, '-');
    let abi = parts.next()?.parse().ok()?;
    let object = u64::from_str_radix(parts.next()?, 16).ok()?;
    let backend = match parts.next()? {
        "kprobe" => Backend::Kprobe,
        "fentry" => Backend::Fentry,
        "gate" => Backend::Gate,
        _ => return None,
    };
    Some(Set { dir: dir.to_owned(), abi, object, backend })
}

/// Finished sets, and whatever else lies in the pin directory. A fence is nobody's business here.
pub fn list(root: &Path) -> io::Result<(Vec<Set>, Vec<PathBuf>)> {
    let entries = match fs::read_dir(root) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), Vec::new())),
        Err(error) => return Err(error),
    };
    let (mut sets, mut others) = (Vec::new(), Vec::new());
    for entry in entries.flatten() {
        let path = entry.path();
        match parse(&path) {
            Some(set) => sets.push(set),
            None if path.file_name().is_some_and(|name| name == FENCE) || is_retired(&path) => {}
            None => others.push(path),
        }
    }
    sets.sort_by(|a, b| a.dir.cmp(&b.dir));
    Ok((sets, others))
}

fn require_bpffs(root: &Path) -> anyhow::Result<()> {
    let found = root.ancestors().find_map(|path| match rustix::fs::statfs(path) {
        Err(Errno::NOENT) => None,
        result => Some(result.map_err(|error| denied_or(path, error.into()))),
    });
    if found.transpose()?.is_none_or(|found| found.f_type != BPF_FS) {
        return Err(Failure::unsupported(format!(
            "{} is not on a bpf file system: mount -t bpf bpf /sys/fs/bpf",
            root.display()
        ))
        .into());
    }
    Ok(())
}

/// Checks that pins can be made under `root`, and that what is there is nobody else's.
pub fn check_root(root: &Path) -> anyhow::Result<()> {
    require_bpffs(root)?;
    match trust::place(root) {
        Err(error) if !error.is_absent() => Err(distrusted(error)),
        _ => Ok(()),
    }
}

/// Makes the pin directory, or takes one that nobody else could have made: bpffs is often mounted for all to write to,
/// and what is in here is removed by name. Nobody else may open it, as whoever can could hold its lock.
pub fn make_root(root: &Path) -> anyhow::Result<()> {
    require_bpffs(root)?;
    // Whoever takes the last set or fence away takes the directory with it, perhaps at this moment.
    for _ in 0..ATTEMPTS {
        match trust::make_directory(root, 0o700) {
            Err(error) if error.is_absent() => {}
            Err(error) => return Err(distrusted(error)),
            Ok(real) => match fs::set_permissions(&real, fs::Permissions::from_mode(0o700)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                result => return result.map_err(|error| denied_or(root, error)),
            },
        }
    }
    Err(Failure::unsupported(format!("{} goes as often as it is made", root.display())).into())
}

/// Where a set is made before it gets its name.
pub fn unfinished(root: &Path) -> PathBuf {
    root.join(UNFINISHED)
}

/// Makes the directories of a set.
pub fn make(dir: &Path) -> anyhow::Result<()> {
    remove(dir);
    for path in [dir.to_owned(), dir.join(handles::PROGRAMS), dir.join(handles::LINKS)] {
        fs::create_dir_all(&path).map_err(|error| denied_or(&path, error))?;
    }
    Ok(())
}

fn is_retired(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(RETIRED.as_bytes()))
}

/// Takes a finished set out of the sight of readers; where it is then.
pub fn retire(dir: &Path) -> PathBuf {
    let name = dir.file_name().filter(|_| parse(dir).is_some()).and_then(|name| name.to_str());
    let away = name.map(|name| dir.with_file_name(format!("{RETIRED}{name}")));
    away.filter(|away| fs::rename(dir, away).is_ok()).unwrap_or_else(|| dir.to_owned())
}

/// Removes what somebody who was killed had begun to remove.
pub fn remove_retired(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        if is_retired(&entry.path()) {
            remove(&entry.path());
        }
    }
}

/// Removes a set: out of sight, then links first, so that nothing runs on maps that are going away. What cannot be removed
/// is left to the next start.
pub fn remove(dir: &Path) {
    remove_whole(&retire(dir)).ok();
}

/// As [`remove`], for those who say that it is gone.
pub fn remove_whole(dir: &Path) -> io::Result<()> {
    let mut trouble = None;
    let mut tried = |outcome: io::Result<()>| match outcome {
        Err(error) if error.kind() != io::ErrorKind::NotFound => trouble = trouble.take().or(Some(error)),
        _ => {}
    };
    for sub in [Some(handles::LINKS), Some(handles::PROGRAMS), None] {
        let dir = sub.map_or_else(|| dir.to_owned(), |sub| dir.join(sub));
        if let Ok(entries) = fs::read_dir(&dir) {
            for entry in entries.flatten() {
                tried(fs::remove_file(entry.path()));
            }
        }
        tried(fs::remove_dir(&dir));
    }
    trouble.map_or(Ok(()), Err)
}

/// Detaches and unpins one program of a set.
pub fn remove_program(dir: &Path, name: &str) {
    for sub in [handles::LINKS, handles::PROGRAMS] {
        fs::remove_file(dir.join(sub).join(name)).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_known_by_its_name() {
        for backend in [Backend::Kprobe, Backend::Fentry, Backend::Gate] {
            let dir = Path::new("/pins").join(set_name(backend));
            let set = parse(&dir).unwrap();
            assert_eq!((set.abi, set.object, set.backend), (ABI_VERSION, object::object_id(), backend));
        }
        for name in ["new", "abi1", "abiX-0000000000000000-gate", "abi1-zz-gate", "abi1-00-other", "maps"] {
            assert_eq!(parse(&Path::new("/pins").join(name)), None, "{name}");
        }
    }

    #[test]
    fn a_fence_is_no_set_and_not_foreign() {
        let dir = tempfile::tempdir().unwrap();
        for name in [FENCE, "maps", &set_name(Backend::Gate)] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let (sets, others) = list(dir.path()).unwrap();
        assert_eq!((sets.len(), others), (1, vec![dir.path().join("maps")]));
    }

    #[test]
    fn a_set_that_is_being_removed_is_none() {
        let root = tempfile::tempdir().unwrap();
        let set = root.path().join(set_name(Backend::Gate));
        let new = unfinished(root.path());
        for dir in [&set, &new] {
            make(dir).unwrap();
        }
        let away = retire(&set);
        assert!(away != set && away.join(handles::LINKS).exists() && !set.exists());
        assert_eq!(list(root.path()).unwrap(), (Vec::new(), vec![new.clone()]), "nobody's business");
        // What was never a set keeps its name.
        assert_eq!(retire(&new), new);
        assert_eq!(retire(&set), set, "it is not there any more");
        remove_retired(root.path());
        assert!(!away.exists() && new.exists());
        make(&set).unwrap();
        remove(&set);
        assert!(!set.exists() && !away.exists());
    }

    #[test]
    fn a_set_that_cannot_be_removed_is_told() {
        let place = tempfile::tempdir().unwrap();
        let set = place.path().join("set");
        assert!(remove_whole(&set).is_ok(), "it was never there");
        for path in [handles::LINKS, handles::PROGRAMS, "strange"] {
            fs::create_dir_all(set.join(path)).unwrap();
        }
        fs::write(set.join("META"), "").unwrap();
        assert!(remove_whole(&set).is_err() && set.exists());
        fs::remove_dir(set.join("strange")).unwrap();
        assert!(remove_whole(&set).is_ok() && !set.exists());
    }

    #[test]
    fn a_directory_that_is_not_bpffs_is_refused_with_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let error = check_root(&dir.path().join("gpureap")).unwrap_err();
        assert_eq!(crate::error::exit_of(&error), crate::exit_code::Exit::Unsupported);
        assert!(error.to_string().contains("mount -t bpf bpf /sys/fs/bpf"), "{error}");
    }
}
