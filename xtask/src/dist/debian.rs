//! Tests of the package in a Debian 12 that debootstrap made: in a chroot, and booted with systemd in QEMU. What they do there
//! is in packaging/tests.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};

use super::package::Stage;
use crate::{
    kernels::{self, ARCHIVE, KEYRING, Kernel},
    libtest::Counts,
    process::{self, root},
    qemu::{Accel, Boot, End, Processors},
};

const SUITE: &str = "bookworm";
/// Beyond the smallest Debian: what hosts have, and what the tests read pages, completions and JSON with.
const INCLUDE: &str = "systemd,systemd-sysv,dbus,man-db,bash-completion,jq";
/// A version before any that there is.
const LOWER: &str = "0.0.1-1";
/// Debian 12's own.
const KERNEL: &str = "6.1";
/// In MiB. The root lies in memory, twice until the kernel has unpacked it.
const MEMORY: u32 = 3072;

/// Installs, upgrades, removes and purges in a chroot.
pub(crate) fn installed(stage: &Stage, package: &Path) -> Result<Counts> {
    let debian = Debian::fresh(stage, package)?;
    let mut counts = Counts::default();
    let script = "/packages/install.sh";
    let arguments = ["/packages/lower.deb", "/packages/gpureap.deb", env!("CARGO_PKG_VERSION")];
    let output = debian.command("bash").arg(script).args(arguments).stderr(Stdio::inherit()).output();
    let output = output.context("cannot start unshare")?;
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        println!("debian | {line}");
        counts += counted(line);
    }
    Ok(counts.with_status(output.status.success()))
}

/// Boots it, with the package installed before.
pub(crate) fn booted(stage: &Stage, package: &Path, accel: Accel) -> Result<Counts> {
    let debian = Debian::fresh(stage, package)?;
    process::run(debian.command("dpkg").args(["--install", "/packages/lower.deb"]).stdout(Stdio::null()))?;
    let standin = "[[device]]\nkind = \"standin\"\nmajor = 1\nminor = 7\nnode = \"/dev/full\"\n";
    debian.write("etc/gpureap/config.toml", standin)?;
    debian.write("etc/systemd/system/package-test.service", UNIT)?;
    let wants = debian.root().join("etc/systemd/system/multi-user.target.wants/package-test.service");
    symlink("../package-test.service", wants).context("cannot enable the tests")?;
    debian.write("init", INIT)?;
    process::run(Command::new("chmod").arg("755").arg(debian.root().join("init")))?;
    let initramfs = debian.work.path().join("initramfs");
    debian.pack(&initramfs)?;

    let kernel = Kernel::named(KERNEL)?;
    kernel.fetch(false)?;
    println!("dist: booting {SUITE} with systemd on {KERNEL} ({})", kernel.cached().unwrap_or_default());
    let append = ["quiet", "systemd.getty_auto=no", "systemd.firstboot=off"].map(str::to_owned);
    let boot = Boot {
        accel,
        kernel: &kernel.vmlinuz(),
        initramfs: &initramfs,
        processors: Processors::Two,
        memory: MEMORY,
        append: &append,
        timeout: Duration::from_mins(30),
        silence: Duration::from_mins(10),
    };
    let (mut counts, mut verdict, mut records) = (Counts::default(), None, Vec::new());
    let started = Instant::now();
    let end = boot.run(|line| {
        println!("systemd | {line}");
        counts += counted(line);
        match line {
            "success" => verdict = Some(true),
            "failure" => verdict = Some(false),
            _ => records.extend(line.strip_prefix("record: ").map(str::to_owned)),
        }
    })?;
    println!("dist: the VM ended after {:.1} s", started.elapsed().as_secs_f64());
    if let End::Killed(why) = &end {
        println!("dist: {why}");
    }
    let exposure = records.iter().find_map(|record| record.strip_prefix("exposure "));
    if let Some(exposure) = exposure {
        let page = fs::read_to_string(root().join("docs/rights.md")).context("cannot read docs/rights.md")?;
        let documented = page.contains(&format!("exposure level {exposure}"));
        println!(
            "dist: exposure level {exposure}, {} docs/rights.md",
            if documented { "as in" } else { "which is not in" }
        );
        counts += if documented { ONE_PASSED } else { Counts::ONE_FAILED };
    }
    Ok(counts.with_status(end == End::Off && verdict == Some(true)))
}

const ONE_PASSED: Counts = Counts { passed: 1, failed: 0, ignored: 0 };

/// What a line of a script counts for.
fn counted(line: &str) -> Counts {
    match line.split_once(": ") {
        Some(("ok", _)) => ONE_PASSED,
        Some(("WRONG", _)) => Counts::ONE_FAILED,
        _ => Counts::default(),
    }
}

/// Runs the tests once everything has been started.
const UNIT: &str = "\
[Unit]
After=multi-user.target gpureap.service
[Service]
Type=exec
ExecStart=/bin/bash /packages/boot.sh
[Install]
WantedBy=multi-user.target
";

/// The kernel's first root cannot be left by pivot_root(2), which systemd does for each unit with a file system of its own:
/// a bind mount of it, moved over it, can.
const INIT: &str = "\
#!/bin/sh
mount -t proc proc /proc
mount --bind / /mnt
cd /mnt
mount --move . /
exec chroot . /sbin/init
";

/// A copy of the root that is kept in the cache, with the packages in it.
struct Debian {
    work: tempfile::TempDir,
}

impl Debian {
    fn fresh(stage: &Stage, package: &Path) -> Result<Self> {
        ensure!(rustix::process::geteuid().is_root(), "a Debian to install the package in takes root");
        let base = base()?;
        let debian = Self { work: tempfile::tempdir_in(kernels::cache())? };
        process::run(Command::new("cp").args(["--archive", "--reflink=auto"]).arg(base).arg(debian.root()))?;
        let packages = debian.root().join("packages");
        fs::create_dir(&packages).with_context(|| format!("cannot create {}", packages.display()))?;
        fs::copy(package, packages.join("gpureap.deb"))
            .with_context(|| format!("cannot copy {}", package.display()))?;
        stage.deb(Some(LOWER), &packages.join("lower.deb"))?;
        debian.write("packages/install.sh", include_str!("../../../packaging/tests/install.sh"))?;
        debian.write("packages/boot.sh", include_str!("../../../packaging/tests/boot.sh"))?;
        Ok(debian)
    }

    fn root(&self) -> PathBuf {
        self.work.path().join("root")
    }

    fn write(&self, path: &str, text: &str) -> Result<()> {
        let path = self.root().join(path);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// A command inside, with a /proc and nothing else of the host's: above all without its /sys, where its pins are.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--propagation=private", "--pid", "--fork", "--kill-child"])
            .arg(format!("--mount-proc={}", self.root().join("proc").display()))
            .arg("chroot")
            .arg(self.root())
            .args(["/usr/bin/env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", program])
            .stdin(Stdio::null());
        command
    }

    /// Not compressed, as the other initramfs is not; without what nobody reads there.
    fn pack(&self, to: &Path) -> Result<()> {
        let script = "cd \"$1\" && find . \\( -path ./usr/share/doc -o -path ./usr/share/locale -o -path ./usr/share/man -o -path \
                      ./var/cache/apt -o -path ./var/lib/apt/lists \\) -prune -o -print0 | cpio --quiet --null --create --format=newc > \"$2\"";
        process::run(Command::new("bash").args(["-o", "pipefail", "-c", script, "bash"]).arg(self.root()).arg(to))
    }
}

/// The root without the package, made once per machine.
fn base() -> Result<PathBuf> {
    let roots = kernels::cache().join("roots");
    let made = roots.join(SUITE);
    let stamp = roots.join(format!("{SUITE}.packages"));
    if made.is_dir() && fs::read_to_string(&stamp).is_ok_and(|text| text == INCLUDE) {
        return Ok(made);
    }
    println!("dist: making a Debian {SUITE} in {}", made.display());
    fs::create_dir_all(&roots).with_context(|| format!("cannot create {}", roots.display()))?;
    let work = tempfile::tempdir_in(&roots)?;
    let unfinished = work.path().join("root");
    let made_now = process::run(
        Command::new("debootstrap")
            .args(["--variant=minbase", &format!("--keyring={KEYRING}"), &format!("--include={INCLUDE}"), SUITE])
            .arg(&unfinished)
            .arg(ARCHIVE)
            .stdin(Stdio::null())
            .stdout(Stdio::null()),
    );
    made_now.with_context(|| format!("the log is {}", unfinished.join("debootstrap/debootstrap.log").display()))?;
    if made.exists() {
        fs::remove_dir_all(&made).with_context(|| format!("cannot remove {}", made.display()))?;
    }
    fs::rename(&unfinished, &made).with_context(|| format!("cannot move {}", unfinished.display()))?;
    fs::write(&stamp, INCLUDE).with_context(|| format!("cannot write {}", stamp.display()))?;
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_scripts() {
        assert_eq!(counted("ok: purge leaves nothing"), ONE_PASSED);
        assert_eq!(counted("WRONG: something: ok: no"), Counts::ONE_FAILED);
        for line in ["success", "record: exposure 3.9", "it is ok: yes", ""] {
            assert_eq!(counted(line), Counts::default(), "{line}");
        }
    }
}
