//! Checks that run nothing: formatting, clippy for both targets, licences, documentation.

use std::{
    net::{TcpStream, ToSocketAddrs as _},
    time::Duration,
};

use anyhow::{Result, bail};

use crate::{
    ebpf::{self, Choice, Toolchain},
    process,
};

/// Everything that builds for the host.
const HOST: [&str; 3] = ["--workspace", "--exclude", "gpureap-ebpf"];

/// Runs all of them, so that one run names all that is wrong.
pub(crate) fn lint() -> Result<()> {
    let mut failed = Vec::new();
    let mut check = |name, result: Result<()>| {
        if let Err(error) = result {
            println!("lint: {name}: {error:#}");
            failed.push(name);
        }
    };
    check("fmt", format());
    check("fuzz/Cargo.lock", fuzz_lock());
    check("clippy", clippy());
    check("clippy for bpf", clippy_ebpf());
    check("deny", deny());
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}

fn format() -> Result<()> {
    process::run(process::cargo().args(["fmt", "--all", "--check"]))?;
    process::run(process::cargo().args(["fmt", "--manifest-path", "fuzz/Cargo.toml", "--", "--check"]))
}

/// A new dependency of ours is one of the fuzz targets too, which are built minutes later.
fn fuzz_lock() -> Result<()> {
    let manifest = ["--format-version=1", "--manifest-path", "fuzz/Cargo.toml"];
    process::output(process::cargo().args(["metadata", "--locked"]).args(manifest)).map(drop)
}

fn clippy() -> Result<()> {
    process::run(
        process::cargo().args(["clippy", "--quiet", "--locked", "--all-targets"]).args(HOST).args(["--", "-Dwarnings"]),
    )
}

/// The kernel programs, by the compiler that builds them.
fn clippy_ebpf() -> Result<()> {
    let toolchain = Toolchain::find(Choice::Auto)?;
    let flags = ebpf::encoded_rustflags()?;
    if let Some(mut clippy) = toolchain.clippy() {
        return process::run(
            clippy
                .arg("--quiet")
                .args(toolchain.target_args())
                .args(["--", "-Dwarnings"])
                .env("CARGO_ENCODED_RUSTFLAGS", flags),
        );
    }
    println!("lint: no clippy for the bpf compiler: its warnings only");
    process::run(
        toolchain
            .cargo()
            .args(["check", "--quiet"])
            .args(toolchain.target_args())
            .env("CARGO_ENCODED_RUSTFLAGS", format!("{flags}\x1f-Dwarnings")),
    )
}

fn deny() -> Result<()> {
    let mut command = process::cargo();
    command.args(["deny", "--log-level", "warn", "--locked", "check", "--hide-inclusion-graph"]);
    command.args(["licenses", "bans", "sources"]);
    if advisories_reachable() {
        command.arg("advisories");
    } else {
        println!("lint: advisories skipped, github.com with the database is out of reach");
    }
    process::run(&mut command)
}

fn advisories_reachable() -> bool {
    let Ok(addresses) = ("github.com", 443).to_socket_addrs() else { return false };
    addresses.into_iter().any(|address| TcpStream::connect_timeout(&address, Duration::from_secs(2)).is_ok())
}

pub(crate) fn docs() -> Result<()> {
    process::run(
        process::cargo().args(["doc", "--quiet", "--locked", "--no-deps"]).args(HOST).env("RUSTDOCFLAGS", "-Dwarnings"),
    )
}
