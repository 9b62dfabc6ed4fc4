//! The file's place: whether it may be trusted, and where a damaged one goes.

use std::{
    fs::{self, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use jiff::Timestamp;

use super::Error;
use crate::trust::{self, Distrust};

/// Damaged files that are kept, for whoever wants to know what happened to the disk.
const KEPT: usize = 3;

/// What SQLite keeps beside a database. First, as a log must not be left to be taken for that of a new file.
const BESIDE: [&str; 3] = ["-wal", "-shm", ""];

/// Makes the directory and the file if they are missing and refuses what somebody else could have put there. The path
/// that comes back has no symbolic link in it.
pub(super) fn prepare(path: &Path) -> Result<PathBuf, Error> {
    let unwritable = |error: io::Error| Error::Unwritable(format!("{}: {error}", path.display()));
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Error::Refused(format!("{} is not the path of a file", path.display())));
    };
    // Whoever may write there may put another file in its place, or a log beside it.
    let dir = trust::make_directory(dir, 0o750).map_err(refused)?;
    let path = dir.join(name);
    loop {
        match fs::symlink_metadata(&path) {
            Ok(meta) if !meta.is_file() => {
                return Err(Error::Refused(format!("{} is not a plain file", path.display())));
            }
            Ok(meta) => {
                // No descriptor is opened to look at it: a close would take away the locks that this process has on it.
                trust::no_others(&path, &meta).map_err(refused)?;
                return Ok(path);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                match OpenOptions::new().write(true).create_new(true).mode(0o640).open(&path) {
                    Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(unwritable(error)),
                    _ => {}
                }
            }
            Err(error) => return Err(unwritable(error)),
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "as map_err hands it in")]
fn refused(error: Distrust) -> Error {
    match error {
        Distrust::Io { .. } => Error::Unwritable(error.to_string()),
        Distrust::Owner { .. } | Distrust::Writable { .. } | Distrust::Links { .. } => {
            Error::Refused(error.to_string())
        }
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// The database's log, which is there while it is open.
pub(super) fn log(path: &Path) -> PathBuf {
    with_suffix(path, "-wal")
}

/// With its log.
pub(super) fn size(path: &Path) -> u64 {
    BESIDE.iter().filter_map(|suffix| fs::metadata(with_suffix(path, suffix)).ok()).map(|meta| meta.len()).sum()
}

/// Moves a damaged file out of the way; where to.
pub(super) fn move_aside(path: &Path, now: Timestamp) -> Result<PathBuf, Error> {
    let stem = format!(".damaged-{}", now.strftime("%Y%m%dT%H%M%SZ"));
    let mut aside = with_suffix(path, &stem);
    // Several in one second: a broken disk.
    let mut count = 1;
    while aside.exists() {
        count += 1;
        aside = with_suffix(path, &format!("{stem}.{count}"));
    }
    for suffix in BESIDE {
        match fs::rename(with_suffix(path, suffix), with_suffix(&aside, suffix)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Error::Unwritable(format!("{} cannot be moved aside: {error}", path.display())));
            }
            _ => {}
        }
    }
    remove_oldest(path);
    Ok(aside)
}

/// More is not worth a word: what cannot be removed stays.
fn remove_oldest(path: &Path) {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else { return };
    let prefix = format!("{}.damaged-", name.to_string_lossy());
    let Ok(entries) = fs::read_dir(dir) else { return };
    let mut old: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with(&prefix) && !name.ends_with("-wal") && !name.ends_with("-shm"))
        .collect();
    // The date makes the order, and `.2` comes after none.
    old.sort();
    for name in old.iter().rev().skip(KEPT) {
        for suffix in BESIDE {
            drop(fs::remove_file(with_suffix(&dir.join(name), suffix)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn directory_and_file_are_made_for_owner_and_group() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/journal.db");
        let made = prepare(&path).unwrap();
        assert_eq!(made, dir.path().canonicalize().unwrap().join("a/b/journal.db"));
        assert_eq!(mode(&made) & 0o027, 0, "{:o}", mode(&made));
        assert_eq!(mode(path.parent().unwrap()) & 0o027, 0);
        assert_eq!(prepare(&path), Ok(made));
    }

    #[test]
    fn what_others_could_have_made_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.db");
        let refused = || match prepare(&path) {
            Err(Error::Refused(message)) => message,
            other => panic!("{other:?}"),
        };
        fs::write(dir.path().join("other"), "").unwrap();
        symlink(dir.path().join("other"), &path).unwrap();
        assert!(refused().ends_with("journal.db is not a plain file"));
        fs::remove_file(&path).unwrap();

        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o660)).unwrap();
        assert!(refused().ends_with("may be written by others than its owner"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(prepare(&path).is_ok());
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
            assert!(refused().ends_with("journal.db belongs to user 12345, not to root"));
            fs::remove_file(&path).unwrap();
        }
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(refused().ends_with("may be written by others than its owner"));
    }

    #[test]
    fn three_damaged_files_are_kept_with_their_logs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.db");
        let now: Timestamp = "2026-11-30T12:00:00Z".parse().unwrap();
        let times = [0, 0, 1, 2, 3];
        for (round, second) in times.into_iter().enumerate() {
            fs::write(&path, round.to_string()).unwrap();
            fs::write(log(&path), round.to_string()).unwrap();
            move_aside(&path, now + jiff::SignedDuration::from_secs(second)).unwrap();
        }
        let mut left: Vec<String> =
            fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        left.sort();
        let expected: Vec<String> = ["20261130T120001Z", "20261130T120002Z", "20261130T120003Z"]
            .iter()
            .flat_map(|time| [format!("journal.db.damaged-{time}"), format!("journal.db.damaged-{time}-wal")])
            .collect();
        assert_eq!(left, expected);
        assert_eq!(fs::read_to_string(dir.path().join("journal.db.damaged-20261130T120003Z-wal")).unwrap(), "4");
    }
}
