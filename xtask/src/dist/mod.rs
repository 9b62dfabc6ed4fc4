//! What is handed out: a Debian package and a tarball in target/dist, and tests of the package in a Debian of its own.

mod debian;
mod licences;
mod package;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use self::package::Stage;
use crate::{artifacts, libtest::Counts, setup};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Options {
    /// Build with this profile of Cargo.toml; `release` and `dev` take minutes less
    #[arg(long, value_name = "NAME", default_value = "dist")]
    profile: String,
    /// Pack this program, built before
    #[arg(long, value_name = "FILE", conflicts_with = "profile")]
    binary: Option<PathBuf>,
    /// Then install, upgrade, remove and purge the package in a fresh Debian 12 (as root)
    #[arg(long)]
    test: bool,
    /// Then do the same, and more, where systemd has booted: that Debian in QEMU, as root, minutes
    #[arg(long)]
    boot: bool,
    /// With --boot: how QEMU runs the guest
    #[arg(long, value_enum, default_value = "tcg")]
    accel: crate::qemu::Accel,
}

pub(crate) fn command(options: &Options) -> Result<()> {
    let Options { profile, binary, test, boot, accel } = options;
    setup::packaging()?;
    let binary = match binary {
        Some(binary) => binary.clone(),
        None => artifacts::program(profile)?,
    };
    let stage = Stage::lay_out(&binary)?;
    let made = stage.hand_out()?;
    let mut counts = Counts::default();
    if *test {
        counts += debian::installed(&stage, &made)?;
    }
    if *boot {
        counts += debian::booted(&stage, &made, *accel)?;
    }
    if *test || *boot {
        println!("{} passed, {} failed", counts.passed, counts.failed);
        ensure!(counts.failed == 0, "the package is not right");
    }
    Ok(())
}

/// For continuous integration: the program that the other tests run, packed, and the package tested without a boot.
pub(crate) fn test(binary: &Path) -> Result<Counts> {
    setup::packaging()?;
    let stage = Stage::lay_out(binary)?;
    let work = tempfile::tempdir().context("cannot make a temporary directory")?;
    let made = stage.deb(None, &work.path().join("gpureap.deb"))?;
    debian::installed(&stage, &made)
}
