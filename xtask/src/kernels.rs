//! A cache of Debian's kernels, each fetched and verified by apt into directories of our own.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};
use walkdir::WalkDir;

use crate::process::{self, root};

pub(crate) const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
pub(crate) const ARCHIVE: &str = "http://deb.debian.org/debian";
const SECURITY: &str = "http://deb.debian.org/debian-security";

/// A kernel that the tests may boot.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) name: &'static str,
    /// The archive and suite that carry it.
    sources: &'static [(&'static str, &'static str)],
    /// The package that always depends on the newest build.
    metapackage: &'static str,
}

/// Add a line to test another kernel.
pub(crate) const KERNELS: &[Kernel] = &[
    Kernel { name: "5.10", sources: &[(SECURITY, "bullseye-security")], metapackage: "linux-image-cloud-amd64" },
    Kernel {
        name: "6.1",
        sources: &[(ARCHIVE, "bookworm"), (SECURITY, "bookworm-security")],
        metapackage: "linux-image-cloud-amd64",
    },
    Kernel {
        name: "6.12",
        sources: &[(ARCHIVE, "trixie"), (SECURITY, "trixie-security")],
        metapackage: "linux-image-cloud-amd64",
    },
    Kernel {
        name: "backports",
        sources: &[(ARCHIVE, "trixie-backports"), (ARCHIVE, "trixie")],
        metapackage: "linux-image-cloud-amd64/trixie-backports",
    },
    Kernel { name: "forky", sources: &[(ARCHIVE, "forky")], metapackage: "linux-image-cloud-amd64" },
    Kernel {
        name: "6.1-rt",
        sources: &[(ARCHIVE, "bookworm"), (SECURITY, "bookworm-security")],
        metapackage: "linux-image-rt-amd64",
    },
    Kernel {
        name: "6.12-rt",
        sources: &[(ARCHIVE, "trixie"), (SECURITY, "trixie-security")],
        metapackage: "linux-image-rt-amd64",
    },
];

impl Kernel {
    pub(crate) fn named(name: &str) -> Result<&'static Self> {
        KERNELS.iter().find(|kernel| kernel.name == name).with_context(|| {
            let names: Vec<&str> = KERNELS.iter().map(|kernel| kernel.name).collect();
            format!("no kernel {name:?}; there are {}", names.join(", "))
        })
    }

    fn directory(&self) -> PathBuf {
        cache().join("kernels").join(self.name)
    }

    pub(crate) fn vmlinuz(&self) -> PathBuf {
        self.directory().join("vmlinuz")
    }

    /// The package it came from, if it is in the cache.
    pub(crate) fn cached(&self) -> Option<String> {
        let version = fs::read_to_string(self.directory().join("package")).ok()?;
        self.vmlinuz().exists().then(|| version.trim().to_owned())
    }

    /// Brings the kernel into the cache; `refresh` asks the archive even if one is there.
    pub(crate) fn fetch(&self, refresh: bool) -> Result<PathBuf> {
        if !refresh && self.cached().is_some() {
            return Ok(self.vmlinuz());
        }
        println!("fetching kernel {}", self.name);
        let apt = Apt::new(self)?;
        apt.run("apt-get", &["update", "-qq"])?;
        let work = tempfile::tempdir_in(cache())?;
        let unpacked = work.path().join("root");

        // The metapackage names the image; since 7.x the image package in turn names the one with the kernel in it.
        let mut wanted = kernel_depends(&apt.show(self.metapackage)?);
        while let Some(package) = wanted.pop() {
            let record = apt.show(&package)?;
            let deb = apt.download(&package, work.path())?;
            process::run(Command::new("dpkg").arg("-x").args([&deb, &unpacked]))?;
            fs::remove_file(deb)?;
            if let Some(vmlinuz) = find_file(&unpacked, "vmlinuz") {
                let directory = self.directory();
                fs::create_dir_all(&directory)?;
                if let Some(config) = find_file(&unpacked, "config-") {
                    fs::copy(config, directory.join("config"))?;
                }
                fs::copy(vmlinuz, self.vmlinuz())?;
                let version = field(&record, "Version").unwrap_or("?");
                fs::write(directory.join("package"), format!("{package} {version}\n"))?;
                println!("kernel {}: {package} {version}", self.name);
                return Ok(self.vmlinuz());
            }
            wanted.extend(kernel_depends(&record));
        }
        bail!("kernel {}: none of the packages below {} holds a vmlinuz", self.name, self.metapackage)
    }
}

/// Where kernels and apt's lists are kept between runs.
pub(crate) fn cache() -> PathBuf {
    std::env::var_os("GPUREAP_VM_CACHE").map_or_else(|| root().join("target/vm"), PathBuf::from)
}

pub(crate) fn list() {
    for kernel in KERNELS {
        let suites: Vec<&str> = kernel.sources.iter().map(|(_, suite)| *suite).collect();
        let cached = kernel.cached().unwrap_or_else(|| "not fetched".into());
        println!("{:<10} {:<32} {cached}", kernel.name, suites.join(", "));
    }
}

/// Apt with lists, cache and state of our own, so that the host's configuration does not matter and is not touched.
struct Apt {
    options: Vec<String>,
}

impl Apt {
    fn new(kernel: &Kernel) -> Result<Self> {
        let base = cache().join("apt").join(kernel.name);
        for directory in ["lists/partial", "cache/archives/partial", "state", "empty"] {
            fs::create_dir_all(base.join(directory))
                .with_context(|| format!("cannot create {}/{directory}", base.display()))?;
        }
        let mut sources = String::new();
        for (archive, suite) in kernel.sources {
            writeln!(sources, "deb [arch=amd64 signed-by={KEYRING}] {archive} {suite} main")?;
        }
        fs::write(base.join("sources.list"), sources)?;
        // Nothing is installed there: dependencies resolve to the archive's own packages.
        fs::write(base.join("state/status"), "")?;

        let base = base.canonicalize()?;
        let at = |key: &str, path: &str| format!("{key}={}", base.join(path).display());
        Ok(Self {
            options: vec![
                at("Dir::Etc::SourceList", "sources.list"),
                at("Dir::Etc::SourceParts", "empty"),
                at("Dir::Etc::Preferences", "empty/preferences"),
                at("Dir::Etc::PreferencesParts", "empty"),
                at("Dir::State", "state"),
                at("Dir::State::Lists", "lists"),
                at("Dir::State::Status", "state/status"),
                at("Dir::Cache", "cache"),
                "APT::Architecture=amd64".into(),
                "APT::Architectures=amd64".into(),
                "APT::Sandbox::User=root".into(),
                "Acquire::Languages=none".into(),
                "Acquire::Check-Valid-Until=false".into(),
            ],
        })
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        for option in &self.options {
            command.args(["-o", option]);
        }
        command.stdin(Stdio::null());
        command
    }

    fn run(&self, program: &str, args: &[&str]) -> Result<()> {
        process::run(self.command(program).args(args))
    }

    /// The control record of the package's newest version.
    fn show(&self, package: &str) -> Result<String> {
        let (name, release) = package.split_once('/').map_or((package, None), |(name, suite)| (name, Some(suite)));
        let mut command = self.command("apt-cache");
        if let Some(release) = release {
            command.args(["-o", &format!("APT::Default-Release={release}")]);
        }
        process::output(command.args(["show", "--no-all-versions", name]))
    }

    fn download(&self, package: &str, into: &Path) -> Result<PathBuf> {
        process::run(self.command("apt-get").args(["download", "-qq", package]).current_dir(into))?;
        find_file(into, "linux-").with_context(|| format!("apt-get download {package} left no package"))
    }
}

/// The first file below `directory` whose name starts with `prefix`, in the order of names.
fn find_file(directory: &Path, prefix: &str) -> Option<PathBuf> {
    WalkDir::new(directory)
        .sort_by_file_name()
        .into_iter()
        .filter_map(Result::ok)
        .find(|entry| entry.file_type().is_file() && entry.file_name().to_string_lossy().starts_with(prefix))
        .map(walkdir::DirEntry::into_path)
}

/// A field of a control record, without its continuation lines.
fn field<'a>(record: &'a str, name: &str) -> Option<&'a str> {
    record.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// The packages in `Depends:` that may hold the kernel itself: not its modules, headers, or what installs it.
fn kernel_depends(record: &str) -> Vec<String> {
    let holds_kernel = |name: &&str| {
        let versioned = |prefix: &str| {
            name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
        };
        versioned("linux-image-") || versioned("linux-binary-")
    };
    field(record, "Depends")
        .unwrap_or_default()
        .split([',', '|'])
        .filter_map(|dependency| dependency.split_whitespace().next())
        .map(|name| name.split(':').next().unwrap_or(name))
        .filter(holds_kernel)
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metapackage_leads_to_its_image() {
        let record = "Package: linux-image-cloud-amd64\nVersion: 6.1.192-3\n\
                      Depends: linux-image-6.1.0-57-cloud-amd64 (= 6.1.192-3)\nSection: kernel\n";
        assert_eq!(kernel_depends(record), ["linux-image-6.1.0-57-cloud-amd64"]);
        assert_eq!(field(record, "Version"), Some("6.1.192-3"));
    }

    #[test]
    fn split_image_leads_to_its_binary() {
        let record = "Package: linux-image-7.3.4-cloud-amd64\nDepends: linux-binary-7.3.4-cloud-amd64:amd64 (= 7.3.4-1), \
                      linux-base-7.3.4-cloud-amd64, linux-modules-7.3.4-cloud-amd64 (= 7.3.4-1), linux-base (>= 4.12~)\n";
        assert_eq!(kernel_depends(record), ["linux-binary-7.3.4-cloud-amd64"]);
    }

    #[test]
    fn old_images_depend_on_no_other_kernel() {
        let record = "Depends: kmod, linux-base (>= 4.3~), initramfs-tools (>= 0.120+deb8u2) | linux-initramfs-tool\n";
        assert!(kernel_depends(record).is_empty());
        assert!(kernel_depends("Package: x\n").is_empty());
    }

    #[test]
    fn unknown_kernels_are_answered_with_the_known_ones() {
        let error = Kernel::named("4.4").unwrap_err().to_string();
        assert!(error.contains("6.12"), "{error}");
    }
}
