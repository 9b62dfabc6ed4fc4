//! Whose a path is. Root writes to, and believes, only what nobody else could have put there: every directory on the way, and
//! every symbolic link, belongs to root or to the caller, and whoever else may write to a directory may not take away what
//! is in it (the sticky bit). Then nobody can change afterwards what was found here.

use std::{
    ffi::OsString,
    fs::{self, DirBuilder, Metadata},
    io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Component, Path, PathBuf},
};

/// As the kernel follows at most (`MAXSYMLINKS`, include/linux/namei.h).
const MAX_LINKS: usize = 40;

const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// Why a path is not trusted, as a sentence, or cannot be looked at.
#[derive(Debug, thiserror::Error)]
pub enum Distrust {
    #[error("{path} belongs to user {uid}, not to {}", owner())]
    Owner { path: String, uid: u32 },
    #[error("{path} may be written by others than its owner")]
    Writable { path: String },
    #[error("{path} has too many symbolic links")]
    Links { path: String },
    #[error("{path}: {error}")]
    Io { path: String, error: io::Error },
}

impl Distrust {
    /// Nothing is there.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Io { error, .. } if error.kind() == io::ErrorKind::NotFound)
    }
}

fn own() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn owner() -> String {
    if own() == 0 { "root".to_owned() } else { format!("root or user {}", own()) }
}

/// A directory or a file that only root and the caller can write to. The path that comes back has no symbolic link in it.
pub fn place(path: &Path) -> Result<PathBuf, Distrust> {
    let real = resolve(path)?;
    no_others(&real, &lstat(&real)?)?;
    Ok(real)
}

/// As [`place`], of a directory that is made, with those above it, if it is missing.
pub fn make_directory(path: &Path, mode: u32) -> Result<PathBuf, Distrust> {
    let existing = path.ancestors().find(|path| fs::symlink_metadata(path).is_ok());
    resolve(existing.unwrap_or(Path::new("/")))?;
    DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
        .map_err(|error| Distrust::Io { path: path.display().to_string(), error })?;
    place(path)
}

/// What is there belongs to root or to the caller, and nobody else may write to it.
pub fn no_others(path: &Path, meta: &Metadata) -> Result<(), Distrust> {
    is_ours(path, meta)?;
    if meta.mode() & OTHERS_WRITE != 0 {
        return Err(Distrust::Writable { path: path.display().to_string() });
    }
    Ok(())
}

fn is_ours(path: &Path, meta: &Metadata) -> Result<(), Distrust> {
    if meta.uid() != 0 && meta.uid() != own() {
        return Err(Distrust::Owner { path: path.display().to_string(), uid: meta.uid() });
    }
    Ok(())
}

fn lstat(path: &Path) -> Result<Metadata, Distrust> {
    fs::symlink_metadata(path).map_err(|error| Distrust::Io { path: path.display().to_string(), error })
}

/// Goes the way step by step and checks each.
fn resolve(path: &Path) -> Result<PathBuf, Distrust> {
    let absolute =
        std::path::absolute(path).map_err(|error| Distrust::Io { path: path.display().to_string(), error })?;
    let names = |path: &Path| -> Vec<OsString> {
        let normal = |component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
        };
        path.components().rev().filter_map(normal).collect()
    };
    let mut rest = names(&absolute);
    let mut at = PathBuf::from("/");
    let mut links = 0;
    while let Some(name) = rest.pop() {
        if name == ".." {
            at.pop();
            continue;
        }
        let next = at.join(&name);
        let meta = lstat(&next)?;
        is_ours(&next, &meta)?;
        if meta.is_symlink() {
            links += 1;
            if links > MAX_LINKS {
                return Err(Distrust::Links { path: path.display().to_string() });
            }
            let target =
                fs::read_link(&next).map_err(|error| Distrust::Io { path: next.display().to_string(), error })?;
            if target.is_absolute() {
                at = PathBuf::from("/");
            }
            rest.extend(names(&target));
            continue;
        }
        // The last one may be stricter; the caller says.
        if meta.is_dir() && meta.mode() & OTHERS_WRITE != 0 && meta.mode() & STICKY == 0 {
            return Err(Distrust::Writable { path: next.display().to_string() });
        }
        at = next;
    }
    Ok(at)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, chown, symlink};

    use super::*;

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn said(result: Result<PathBuf, Distrust>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn a_directory_of_ones_own_under_a_sticky_one() {
        let top = tempfile::tempdir().unwrap();
        let inner = top.path().join("state");
        fs::create_dir(&inner).unwrap();
        assert_eq!(place(&inner).unwrap(), inner.canonicalize().unwrap());
        set_mode(top.path(), 0o1777);
        assert!(place(&inner).is_ok(), "as /tmp is");
        set_mode(top.path(), 0o777);
        assert!(said(place(&inner)).ends_with("may be written by others than its owner"), "it can be replaced");
        set_mode(top.path(), 0o700);
        for mode in [0o777, 0o770, 0o1777] {
            set_mode(&inner, mode);
            assert!(place(&inner).is_err(), "{mode:o}");
        }
    }

    #[test]
    fn the_way_through_links_is_that_of_the_kernel() {
        let top = tempfile::tempdir().unwrap();
        let real = top.path().canonicalize().unwrap();
        fs::create_dir_all(real.join("a/b")).unwrap();
        symlink("../a/b", real.join("a/link")).unwrap();
        symlink(real.join("a"), real.join("absolute")).unwrap();
        for path in ["a/b", "a/link", "absolute/b", "absolute/link", "a/b/../b", "./a/./b"] {
            assert_eq!(place(&real.join(path)).unwrap(), real.join("a/b"), "{path}");
        }
        symlink("round", real.join("round")).unwrap();
        assert!(said(place(&real.join("round"))).ends_with("has too many symbolic links"));
        assert!(matches!(place(&real.join("none")), Err(Distrust::Io { .. })));
        assert_eq!(make_directory(&real.join("a/link/new/one"), 0o750).unwrap(), real.join("a/b/new/one"));
        assert_eq!(fs::metadata(real.join("a/b/new/one")).unwrap().mode() & 0o777, 0o750);
    }

    #[test]
    fn what_belongs_to_somebody_else_is_not_trusted() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let top = tempfile::tempdir().unwrap();
        let inner = top.path().join("theirs/state");
        fs::create_dir_all(&inner).unwrap();
        chown(top.path().join("theirs"), Some(65534), None).unwrap();
        assert!(said(place(&inner)).ends_with("theirs belongs to user 65534, not to root"));
        // A link of theirs, wherever it leads.
        let link = top.path().join("link");
        symlink("/etc", &link).unwrap();
        assert!(place(&link).is_ok());
        std::os::unix::fs::lchown(&link, Some(65534), None).unwrap();
        assert!(said(place(&link)).ends_with("link belongs to user 65534, not to root"));
        assert!(said(make_directory(&link.join("made"), 0o750)).ends_with("link belongs to user 65534, not to root"));
        assert!(!Path::new("/etc/made").exists());
        // And a file.
        let config = top.path().join("config.toml");
        fs::write(&config, "").unwrap();
        assert!(place(&config).is_ok());
        set_mode(&config, 0o666);
        assert!(said(place(&config)).ends_with("config.toml may be written by others than its owner"));
        set_mode(&config, 0o644);
        chown(&config, Some(65534), None).unwrap();
        assert!(said(place(&config)).ends_with("config.toml belongs to user 65534, not to root"));
    }
}
