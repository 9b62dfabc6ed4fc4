//! Packs files into a newc archive, the format that the kernel unpacks as its first root.
//!
//! Not compressed: under emulation the kernel needs seconds to inflate what QEMU maps for nothing.

use std::{
    collections::BTreeMap,
    fs,
    io::{Cursor, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use cpio::{newc, write_cpio};

const DIRECTORY: u32 = 0o040_755;
const SYMLINK: u32 = 0o120_777;
const CHARACTER_DEVICE: u32 = 0o020_600;
const FILE: u32 = 0o100_000;

enum Node {
    Directory,
    File { mode: u32, contents: Vec<u8> },
    Symlink(String),
    Device { major: u32, minor: u32 },
}

/// A tree in memory, keyed by path without the leading slash; the order puts parents first.
#[derive(Default)]
pub(crate) struct Initramfs {
    nodes: BTreeMap<String, Node>,
}

impl Initramfs {
    pub(crate) fn directory(&mut self, path: &str) {
        self.insert(path, Node::Directory);
    }

    pub(crate) fn text(&mut self, path: &str, contents: &str) {
        self.insert(path, Node::File { mode: 0o644, contents: contents.into() });
    }

    pub(crate) fn program(&mut self, path: &str, from: &Path) -> Result<()> {
        let contents = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
        self.insert(path, Node::File { mode: 0o755, contents });
        Ok(())
    }

    pub(crate) fn symlink(&mut self, path: &str, to: &str) {
        self.insert(path, Node::Symlink(to.into()));
    }

    pub(crate) fn device(&mut self, path: &str, major: u32, minor: u32) {
        self.insert(path, Node::Device { major, minor });
    }

    pub(crate) fn contains(&self, path: &str) -> bool {
        self.nodes.contains_key(path.trim_start_matches('/'))
    }

    /// Adds the node and the directories above it; a later node of the same name wins.
    fn insert(&mut self, path: &str, node: Node) {
        let path = path.trim_start_matches('/');
        for (slash, _) in path.match_indices('/') {
            self.nodes.entry(path[..slash].to_owned()).or_insert(Node::Directory);
        }
        self.nodes.insert(path.to_owned(), node);
    }

    pub(crate) fn write_to<W: Write>(self, out: W) -> Result<()> {
        let inputs = self.nodes.into_iter().zip(1..).map(|((path, node), inode)| {
            let builder = newc::Builder::new(&path).ino(inode).nlink(1);
            let (builder, contents) = match node {
                Node::Directory => (builder.mode(DIRECTORY).nlink(2), Vec::new()),
                Node::File { mode, contents } => (builder.mode(FILE | mode), contents),
                Node::Symlink(to) => (builder.mode(SYMLINK), to.into_bytes()),
                Node::Device { major, minor } => {
                    (builder.mode(CHARACTER_DEVICE).rdev_major(major).rdev_minor(minor), Vec::new())
                }
            };
            (builder, Cursor::new(contents))
        });
        write_cpio(inputs, out).context("cannot write the initramfs")?.flush()?;
        Ok(())
    }

    pub(crate) fn write_file(self, path: PathBuf) -> Result<PathBuf> {
        let file = fs::File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        self.write_to(std::io::BufWriter::new(file))?;
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::PermissionsExt as _,
        process::{Command, Stdio},
    };

    use super::*;

    fn example() -> Initramfs {
        let mut tree = Initramfs::default();
        tree.text("/etc/motd", "hello\n");
        tree.program("/bin/true", Path::new("/bin/true")).unwrap();
        tree.symlink("/bin/sh", "true");
        tree.directory("proc");
        tree
    }

    #[test]
    fn parents_come_before_children() {
        let mut tree = Initramfs::default();
        tree.text("/a/b/c", "");
        let names: Vec<&str> = tree.nodes.keys().map(String::as_str).collect();
        assert_eq!(names, ["a", "a/b", "a/b/c"]);
    }

    #[test]
    fn headers_have_the_layout_the_kernel_expects() {
        let mut tree = Initramfs::default();
        tree.device("/dev/console", 5, 1);
        let mut bytes = Vec::new();
        tree.write_to(&mut bytes).unwrap();
        let text = String::from_utf8_lossy(&bytes);
        let console = text.find("dev/console").expect("the name is in the archive") - 110;
        assert_eq!(&text[console..console + 6], "070701");
        let field = |index: usize| u32::from_str_radix(&text[console + 6 + 8 * index..][..8], 16).unwrap();
        assert_eq!((field(1), field(6), field(9), field(10), field(11)), (CHARACTER_DEVICE, 0, 5, 1, 12));
        assert!(text.contains("TRAILER!!!"));
        assert_eq!(bytes.len() % 4, 0);
    }

    #[test]
    fn cpio_unpacks_what_we_pack() {
        if crate::process::find_program("cpio").is_none() {
            eprintln!("skipping: no cpio on this machine");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let archive = example().write_file(directory.path().join("archive")).unwrap();
        let status = Command::new("cpio")
            .args(["--extract", "--quiet", "--no-absolute-filenames"])
            .current_dir(directory.path())
            .stdin(Stdio::from(fs::File::open(archive).unwrap()))
            .status()
            .unwrap();
        assert!(status.success());
        let at = |name: &str| directory.path().join(name);
        assert_eq!(fs::read_to_string(at("etc/motd")).unwrap(), "hello\n");
        assert_eq!(fs::read(at("bin/true")).unwrap(), fs::read("/bin/true").unwrap());
        assert_eq!(fs::metadata(at("bin/true")).unwrap().permissions().mode() & 0o777, 0o755);
        assert_eq!(fs::read_link(at("bin/sh")).unwrap(), Path::new("true"));
        assert!(at("proc").is_dir());
    }
}
