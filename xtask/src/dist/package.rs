//! Lays out all files as they lie on a host, and packs them.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

use super::licences;
use crate::{
    artifacts,
    process::{self, root},
};

/// Debian 12 and Ubuntu 24.04 have it; what is built on a newer system may ask for more.
const NEWEST_GLIBC: (u32, u32) = (2, 36);
/// Of the package, after the program's version.
const REVISION: &str = "1";
/// Beside README.md, which links to them.
const PAGES: [&str; 5] = ["CHANGELOG.md", "CONTRIBUTING.md", "LICENSE-APACHE", "LICENSE-MIT", "SECURITY.md"];

/// Started by slurmd, and what they share.
const SLURM: [&str; 4] = ["prolog", "epilog", "health-check", "common.sh"];

pub(crate) struct Stage {
    /// What cargo-deb takes for cargo's target directory.
    target: PathBuf,
    /// Seconds since 1970 that all files and packages are dated with, so that the same sources give the same bytes.
    epoch: String,
}

impl Stage {
    fn tree(&self) -> PathBuf {
        self.target.join("release")
    }

    pub(crate) fn lay_out(binary: &Path) -> Result<Self> {
        let target = out()?.join("stage");
        if target.exists() {
            fs::remove_dir_all(&target).with_context(|| format!("cannot empty {}", target.display()))?;
        }
        let stage = Self { target, epoch: epoch() };
        let tree = stage.tree();
        let at = |path: &str| -> Result<PathBuf> {
            let path = tree.join(path);
            let directory = path.parent().expect("below the tree");
            fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
            Ok(path)
        };
        let copy = |from: &str, to: &str| -> Result<()> {
            fs::copy(root().join(from), at(to)?).with_context(|| format!("cannot copy {from}"))?;
            Ok(())
        };

        let program = at("usr/bin/gpureap")?;
        artifacts::strip_to(binary, &program)?;
        check_glibc(&program)?;
        copy("packaging/gpureap.service", "usr/lib/systemd/system/gpureap.service")?;
        let manual = at("usr/share/man/man1/gpureap.1")?;
        process::run(Command::new(&program).arg("man").arg(manual.parent().expect("a directory")))?;
        for (shell, place) in [
            ("bash", "usr/share/bash-completion/completions/gpureap"),
            ("zsh", "usr/share/zsh/vendor-completions/_gpureap"),
            ("fish", "usr/share/fish/vendor_completions.d/gpureap.fish"),
        ] {
            let script = process::output(Command::new(&program).args(["completions", shell]))?;
            fs::write(at(place)?, script).with_context(|| format!("cannot write {place}"))?;
        }

        let docs = "usr/share/doc/gpureap";
        for page in PAGES.iter().chain(&["README.md"]) {
            copy(page, &format!("{docs}/{page}"))?;
        }
        for (directory, extension) in [("docs", "md"), ("docs/schema", "json")] {
            for page in with_extension(&root().join(directory), extension)? {
                let name = page.file_name().expect("a file").to_string_lossy();
                copy(&format!("{directory}/{name}"), &format!("{docs}/{directory}/{name}"))?;
            }
        }
        copy("packaging/config.example.toml", &format!("{docs}/examples/config.toml"))?;
        // Where the pages' links lead.
        for name in ["config.example.toml", "gpureap.service"] {
            copy(&format!("packaging/{name}"), &format!("{docs}/packaging/{name}"))?;
        }
        for directory in ["grafana", "kubernetes", "prometheus", "slurm"] {
            for entry in fs::read_dir(root().join("packaging").join(directory))? {
                let path = format!("packaging/{directory}/{}", entry?.file_name().to_string_lossy());
                copy(&path, &format!("{docs}/{path}"))?;
            }
        }
        for name in SLURM {
            copy(&format!("packaging/slurm/{name}"), &format!("usr/libexec/gpureap/slurm/{name}"))?;
        }
        copy("packaging/debian/copyright", &format!("{docs}/copyright"))?;
        copy("CHANGELOG.md", &format!("{docs}/changelog"))?;
        fs::write(at(&format!("{docs}/changelog.Debian"))?, stage.debian_changelog()?)?;
        fs::write(at(&format!("{docs}/third-party"))?, licences::third_party()?)?;

        let mut packed = with_extension(&tree.join("usr/share/man/man1"), "1")?;
        packed.extend(["changelog", "changelog.Debian", "third-party"].map(|name| tree.join(docs).join(name)));
        process::run(Command::new("gzip").args(["-9", "--no-name"]).args(packed))?;
        for entry in walkdir::WalkDir::new(&tree) {
            let entry = entry?;
            let runs = entry.path() == program || entry.path().starts_with(tree.join("usr/libexec"));
            let mode = if entry.file_type().is_dir() || runs { 0o755 } else { 0o644 };
            fs::set_permissions(entry.path(), fs::Permissions::from_mode(mode))?;
        }
        Ok(stage)
    }

    /// The package and the tarball, with their sums, in target/dist; the package's path.
    pub(crate) fn hand_out(&self) -> Result<PathBuf> {
        let out = out()?;
        let version = env!("CARGO_PKG_VERSION");
        let deb = self.deb(None, &out.join(format!("gpureap_{version}-{REVISION}_amd64.deb")))?;
        let name = format!("gpureap-{version}-x86_64-linux-gnu");
        let tarball = out.join(format!("{name}.tar.gz"));
        // A link, for the tree's own name is cargo-deb's wish.
        let named = self.target.join(&name);
        symlink("release", &named).with_context(|| format!("cannot link {}", named.display()))?;
        process::run(
            Command::new("tar")
                .args(["--create", "--gzip", "--sort=name", "--owner=0", "--group=0", "--numeric-owner"])
                .arg(format!("--mtime=@{}", self.epoch))
                .arg("--file")
                .arg(&tarball)
                .arg("--directory")
                .arg(&self.target)
                .arg(format!("{name}/usr")),
        )?;
        fs::remove_file(&named)?;
        let files = [&deb, &tarball].map(|file| file.file_name().expect("a file"));
        let sums = process::output(Command::new("sha256sum").args(files).current_dir(&out))?;
        let list = out.join("SHA256SUMS");
        fs::write(&list, sums).with_context(|| format!("cannot write {}", list.display()))?;
        println!("dist: {}, {}, {}", deb.display(), tarball.display(), list.display());
        Ok(deb)
    }

    /// Packs the tree, as this version or another.
    pub(crate) fn deb(&self, version: Option<&str>, to: &Path) -> Result<PathBuf> {
        let mut command = process::cargo();
        command.args(["deb", "--quiet", "--locked", "--package", "gpureap", "--no-build", "--no-strip"]);
        command.args(["--compress-system", "--maintainer", &maintainer()]);
        match version {
            Some(version) => command.args(["--deb-version", version, "--fast"]),
            None => command.args(["--deb-revision", REVISION]),
        };
        command.arg("--output").arg(to).env("CARGO_TARGET_DIR", &self.target).env("SOURCE_DATE_EPOCH", &self.epoch);
        process::run(&mut command)?;
        ensure!(to.exists(), "cargo-deb made no {}", to.display());
        Ok(to.to_owned())
    }

    fn debian_changelog(&self) -> Result<String> {
        let date =
            process::output(Command::new("date").args(["--utc", "--rfc-email", &format!("--date=@{}", self.epoch)]))?;
        let version = env!("CARGO_PKG_VERSION");
        Ok(format!(
            "gpureap ({version}-{REVISION}) unstable; urgency=medium\n\n  * What is new is in changelog.gz.\n\n -- {}  {}\n",
            maintainer(),
            date.trim()
        ))
    }
}

fn out() -> Result<PathBuf> {
    let out = root().join("target/dist");
    fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
    Ok(out)
}

/// Whoever builds the package, by the variables that Debian's own tools read.
fn maintainer() -> String {
    let variable = |name: &str, usual: &str| {
        std::env::var(name).ok().filter(|value| !value.is_empty()).unwrap_or_else(|| usual.to_owned())
    };
    format!("{} <{}>", variable("DEBFULLNAME", "The gpureap authors"), variable("DEBEMAIL", "gpureap@localhost"))
}

/// When the sources were last changed.
fn epoch() -> String {
    std::env::var("SOURCE_DATE_EPOCH")
        .ok()
        .or_else(|| process::probe(Command::new("git").args(["log", "-1", "--format=%ct"]).current_dir(root())))
        .map(|text| text.trim().to_owned())
        .filter(|text| !text.is_empty())
        .unwrap_or_else(|| "0".to_owned())
}

fn with_extension(directory: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .collect();
    found.sort();
    Ok(found)
}

/// The program is dynamic, for NVML is loaded at run time: so it asks for the C library that it was linked against, or an older one.
fn check_glibc(program: &Path) -> Result<()> {
    let headers = process::output(Command::new("objdump").arg("--private-headers").arg(program).env("LC_ALL", "C"))?;
    let Some(wanted) = glibc(&headers) else {
        println!("dist: a static program, which cannot load NVML: for tests alone");
        return Ok(());
    };
    let (major, minor) = wanted;
    println!("dist: needs glibc {major}.{minor}");
    ensure!(
        wanted <= NEWEST_GLIBC,
        "the program needs glibc {major}.{minor}, which Debian 12 does not have: build it on Debian 12 or older"
    );
    Ok(())
}

/// The newest version of the C library's symbols that a program asks for.
fn glibc(headers: &str) -> Option<(u32, u32)> {
    let versions = headers.split_whitespace().filter_map(|word| {
        let mut numbers = word.strip_prefix("GLIBC_")?.split('.').map(|number| number.parse().ok());
        Some((numbers.next()??, numbers.next()??))
    });
    versions.max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_glibc() {
        let headers = "Version References:\n  required from libgcc_s.so.1:\n    0x0b792650 0x00 12 GCC_3.0\n  required from \
                       libc.so.6:\n    0x09691974 0x00 11 GLIBC_2.3.4\n    0x069691b4 0x00 10 GLIBC_2.34\n    0x09691972 0x00 \
                       09 GLIBC_2.3.2\n";
        assert_eq!(glibc(headers), Some((2, 34)));
        assert_eq!(glibc("Program Header:\n"), None);
    }

    #[test]
    fn the_readmes_pages_come_along() {
        for page in PAGES {
            assert!(root().join(page).is_file(), "{page}");
        }
    }
}
