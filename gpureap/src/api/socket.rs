//! The socket's file: made beside a held lock, in a directory that only its owner can write to, taken away at the end.

use std::{
    fs, io,
    os::unix::{
        fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
};

use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Why there is no socket. The daemon goes on without one.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    #[error("{path} can be written to by others than its owner, so no socket is made in it")]
    Directory { path: String },
    #[error("{path} is not a socket and is left alone, so users who are not root cannot ask this daemon")]
    Foreign { path: String },
    #[error("another process answers on {path}; its socket is left to it")]
    Taken { path: String },
    #[error("{path}: {error}")]
    Io { path: String, error: io::Error },
}

/// The file of a listening socket; dropped, it is removed if it is still the same.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|found| found == self.identity) {
            fs::remove_file(&self.path).ok();
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino()))
}

/// Listens there, for everybody. A socket that nobody listens on any more is replaced; no link is followed, as neither
/// bind(2) nor unlink(2) follows one and nobody else can put one there in between.
pub fn listen(path: &Path) -> Result<(UnixListener, SocketFile), Refused> {
    let text = || path.display().to_string();
    let io = |error| Refused::Io { path: text(), error };
    let directory = path.parent().unwrap_or(Path::new("/"));
    let meta = fs::metadata(directory).map_err(io)?;
    let own = rustix::process::geteuid().as_raw();
    if meta.uid() != own || meta.mode() & 0o022 != 0 {
        return Err(Refused::Directory { path: directory.display().to_string() });
    }
    match fs::symlink_metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => return Err(Refused::Foreign { path: text() }),
        Ok(_) if is_alive(path) => return Err(Refused::Taken { path: text() }),
        Ok(_) => fs::remove_file(path).map_err(io)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(io(error)),
    }
    let listener = UnixListener::bind(path).map_err(io)?;
    let file = SocketFile { path: path.to_owned(), identity: identity(path).map_err(io)? };
    fs::set_permissions(path, fs::Permissions::from_mode(0o666)).map_err(io)?;
    listener.set_nonblocking(true).map_err(io)?;
    Ok((listener, file))
}

/// Connects without waiting; `WouldBlock` where somebody listens and does not take what is in his queue.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Whether somebody listens, even if his queue is full.
fn is_alive(path: &Path) -> bool {
    match connect(path) {
        Ok(_) => true,
        Err(error) => error.kind() != io::ErrorKind::ConnectionRefused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gpureap.sock");
        (dir, path)
    }

    #[test]
    fn a_socket_for_everybody_that_goes_with_the_daemon() {
        let (_dir, path) = place();
        let (listener, file) = listen(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o666);
        assert!(UnixStream::connect(&path).is_ok());
        drop((listener, file));
        assert!(!path.exists());
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let (_dir, path) = place();
        let old = UnixListener::bind(&path).unwrap();
        assert!(matches!(listen(&path), Err(Refused::Taken { .. })));
        assert!(UnixStream::connect(&path).is_ok(), "it is still there");
        // A daemon that is stopped takes nobody: its queue fills up, and it is alive all the same.
        let mut queue = Vec::new();
        let full = loop {
            match connect(&path) {
                Ok(stream) => queue.push(stream),
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        assert!(matches!(listen(&path), Err(Refused::Taken { .. })));
        drop(old);
        assert!(path.exists(), "nobody has removed it");
        let (_listener, _file) = listen(&path).unwrap();
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[test]
    fn what_is_no_socket_stays() {
        let (dir, path) = place();
        let target = dir.path().join("target");
        fs::write(&target, "precious").unwrap();
        for dangling in [false, true] {
            let to = if dangling { dir.path().join("nothing") } else { target.clone() };
            std::os::unix::fs::symlink(&to, &path).unwrap();
            assert!(matches!(listen(&path), Err(Refused::Foreign { .. })));
            assert_eq!(fs::read_link(&path).unwrap(), to);
            assert_eq!(to.exists(), !dangling);
            fs::remove_file(&path).unwrap();
        }
        fs::write(&path, "x").unwrap();
        assert!(matches!(listen(&path), Err(Refused::Foreign { .. })));
        assert_eq!(fs::read_to_string(&path).unwrap(), "x");
    }

    #[test]
    fn not_in_a_directory_that_others_write_to() {
        let (dir, path) = place();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(listen(&path), Err(Refused::Directory { .. })));
        assert!(!path.exists());
    }

    #[test]
    fn a_successors_socket_is_not_removed() {
        let (_dir, path) = place();
        let (_old, file) = listen(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let _new = UnixListener::bind(&path).unwrap();
        drop(file);
        assert!(path.exists());
    }
}
