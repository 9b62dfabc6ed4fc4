//! What the other tasks need on the machine, and installing it on Debian and Ubuntu.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::{
    ebpf::{Choice, Toolchain},
    kernels, process,
};

const BPF_LINKER: &str = "0.13.0";
const CARGO_DENY: &str = "0.20.2";
const CARGO_DEB: &str = "3.8.0";

/// A receiver of OTLP that prints what it takes, and what it needs (PyPI).
const OTELTAP: &str = "1.0.0";
const OTELTAP_NEEDS: [&str; 2] = ["opentelemetry-proto==1.45.2", "protobuf==7.36.2"];

/// One thing that must be here: how to see that it is, and who brings it.
struct Need {
    what: &'static str,
    present: fn() -> bool,
    packages: &'static [&'static str],
}

/// Programs and files rather than package names: whoever installed them by other means is fine too.
const NEEDS: &[Need] = &[
    Need { what: "a C compiler", present: || program("cc"), packages: &["gcc"] },
    Need { what: "a C++ compiler", present: || program("c++"), packages: &["g++"] },
    Need {
        what: "a static C library",
        present: || exists("/usr/lib/x86_64-linux-gnu/libc.a") || exists("/usr/lib64/libc.a"),
        packages: &["libc6-dev"],
    },
    Need {
        what: "a compiler for bpf",
        present: || Toolchain::find(Choice::Auto).is_ok(),
        packages: &["rustc-web", "cargo-web", "libstd-rust-web-dev-bpf"],
    },
    Need {
        what: "clippy for the bpf compiler",
        present: || Toolchain::find(Choice::Debian).is_err() || exists("/usr/bin/clippy-driver"),
        packages: &["rust-web-clippy"],
    },
    Need { what: "qemu-system-x86_64", present: || program("qemu-system-x86_64"), packages: &["qemu-system-x86"] },
    Need { what: "a static busybox", present: || exists("/bin/busybox"), packages: &["busybox-static"] },
    Need { what: "fuser", present: || program("fuser"), packages: &["psmisc"] },
    Need { what: "lsof", present: || program("lsof"), packages: &["lsof"] },
    Need { what: "dbus-daemon", present: || program("dbus-daemon"), packages: &["dbus-daemon"] },
    Need { what: "tmux", present: || program("tmux"), packages: &["tmux"] },
    Need { what: "cpio", present: || program("cpio"), packages: &["cpio"] },
    Need {
        what: "Debian's archive keys",
        present: || exists("/usr/share/keyrings/debian-archive-keyring.gpg"),
        packages: &["debian-archive-keyring"],
    },
];

/// The servers that the tests named `ops_…` start. Debian's packages start them at once where systemd runs; the tests use
/// their own configurations, directories and ports.
const SERVERS: &[Need] = &[
    Need { what: "Prometheus", present: || program("prometheus") && program("promtool"), packages: &["prometheus"] },
    Need { what: "munged", present: || program("munged"), packages: &["munge"] },
    Need {
        what: "Slurm",
        present: || ["slurmctld", "slurmd", "sbatch"].into_iter().all(program),
        packages: &["slurmctld", "slurmd", "slurm-client"],
    },
    Need { what: "Python with venv", present: python_works, packages: &["python3-venv"] },
];

/// For packages and their tests.
const PACKAGING: &[Need] = &[
    Need { what: "dpkg-shlibdeps", present: || program("dpkg-shlibdeps"), packages: &["dpkg-dev"] },
    Need { what: "xz", present: || program("xz"), packages: &["xz-utils"] },
    Need { what: "debootstrap", present: || exists("/usr/sbin/debootstrap"), packages: &["debootstrap"] },
    Need { what: "cpio", present: || program("cpio"), packages: &["cpio"] },
];

fn exists(path: &str) -> bool {
    Path::new(path).exists()
}

fn program(name: &str) -> bool {
    process::find_program(name).is_some()
}

pub(crate) fn servers() -> Result<()> {
    provide(SERVERS)?;
    if !oteltap_works() {
        install_oteltap()?;
    }
    Ok(())
}

/// Where the receiver of OTLP is, once it is installed.
pub(crate) fn oteltap() -> PathBuf {
    oteltap_directory().join("bin/oteltap")
}

/// Kept between runs, beside the kernels.
fn oteltap_directory() -> PathBuf {
    kernels::cache().join(format!("oteltap-{OTELTAP}"))
}

fn python_works() -> bool {
    process::probe(Command::new("python3").args(["-c", "import ensurepip, venv"])).is_some()
}

/// All of it, in the versions that are pinned here.
fn oteltap_works() -> bool {
    let names = OTELTAP_NEEDS.map(|need| need.split('=').next().unwrap_or_default());
    let code = "import sys, importlib.metadata as m; print(*[m.version(name) for name in sys.argv[1:]])";
    let python = oteltap_directory().join("bin/python");
    let found = process::probe(Command::new(python).args(["-c", code, "oteltap"]).args(names));
    let wanted = OTELTAP_NEEDS.map(|need| need.rsplit('=').next().unwrap_or_default());
    found.is_some_and(|found| found.split_whitespace().eq([OTELTAP].into_iter().chain(wanted))) && oteltap().exists()
}

fn install_oteltap() -> Result<()> {
    let directory = oteltap_directory();
    println!("setup: installing oteltap {OTELTAP} to {}", directory.display());
    process::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&directory))?;
    process::run(
        Command::new(directory.join("bin/pip"))
            .args(["install", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"])
            .arg(format!("oteltap=={OTELTAP}"))
            .args(OTELTAP_NEEDS)
            .stdin(Stdio::null()),
    )?;
    ensure!(oteltap_works(), "oteltap {OTELTAP} does not work after it was installed to {}", directory.display());
    Ok(())
}

/// What packages are made and tested with.
pub(crate) fn packaging() -> Result<()> {
    provide(PACKAGING)?;
    if !deb_works() {
        println!("setup: building cargo-deb {CARGO_DEB}");
        // It packs with programs of the system, so nothing waits for its own code.
        let quick = [("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0")];
        cargo_install(&["cargo-deb", "--version", CARGO_DEB, "--no-default-features"], &quick)?;
    }
    Ok(())
}

fn provide(needs: &'static [Need]) -> Result<()> {
    let missing: Vec<&Need> = needs.iter().filter(|need| !(need.present)()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let packages = |need: &&Need| format!("{} (Debian: apt-get install {})", need.what, need.packages.join(" "));
    ensure!(apt_usable(), "missing here: {}", missing.iter().map(packages).collect::<Vec<_>>().join(", "));
    let mut apt = Apt { updated: false };
    for Need { what, present, packages } in missing {
        println!("setup: {what} is missing");
        apt.install(packages)?;
        ensure!(present(), "{what} is still missing after installing {}", packages.join(" "));
    }
    Ok(())
}

pub(crate) fn setup() -> Result<()> {
    let mut apt = Apt { updated: false };
    let missing: Vec<&Need> = NEEDS.iter().filter(|need| !(need.present)()).collect();
    let linker = !linker_works();
    let deny = !deny_works();
    let components: Vec<&str> = ["rustfmt", "clippy"].into_iter().filter(|name| !component_works(name)).collect();
    if missing.is_empty() && !linker && !deny && components.is_empty() {
        println!("setup: everything is here");
        return Ok(());
    }

    if !apt_usable() {
        let mut lines = vec!["this is not Debian or Ubuntu, or you are not root; missing here:".to_owned()];
        for Need { what, present: _, packages } in &missing {
            lines.push(format!("  {what} (Debian: apt-get install {})", packages.join(" ")));
        }
        if missing.iter().any(|need| need.what == "a compiler for bpf") {
            lines.push(
                "    or: rustup toolchain install nightly --component rust-src (with bpf-linker built for its LLVM)"
                    .into(),
            );
        }
        if linker {
            lines.push(format!(
                "  bpf-linker {BPF_LINKER} (cargo install bpf-linker --version {BPF_LINKER} --no-default-features \
                 --features llvm-NN, with NN the LLVM of the bpf compiler and llvm-NN-dev installed)"
            ));
        }
        if deny {
            lines.push(format!("  cargo-deny {CARGO_DENY} (cargo install --locked cargo-deny --version {CARGO_DENY})"));
        }
        for component in components {
            lines.push(format!("  {component} (rustup component add {component})"));
        }
        bail!("{}", lines.join("\n"));
    }

    for Need { what, present, packages } in missing {
        println!("setup: {what} is missing");
        if let Err(error) = apt.install(packages) {
            if *what == "a compiler for bpf" {
                bail!(
                    "{error:#}\nthis release has no rustc-web; use rustup instead: \
                     rustup toolchain install nightly --component rust-src"
                );
            }
            return Err(error);
        }
        if !present() {
            bail!("{what} is still missing after installing {}", packages.join(" "));
        }
    }
    if linker {
        install_linker(&mut apt)?;
    }
    if deny {
        println!("setup: building cargo-deny {CARGO_DENY}");
        cargo_install(&["cargo-deny", "--version", CARGO_DENY], &[])?;
    }
    for component in components {
        let rustup = process::find_program("rustup").with_context(|| format!("{component} and rustup are missing"))?;
        process::run(Command::new(rustup).args(["component", "add", component]))?;
    }
    println!("setup: done");
    Ok(())
}

fn apt_usable() -> bool {
    exists("/etc/debian_version") && program("apt-get") && rustix::process::geteuid().is_root()
}

struct Apt {
    updated: bool,
}

impl Apt {
    fn install(&mut self, packages: &[&str]) -> Result<()> {
        if !self.updated {
            // A dead third-party source must not stop us: what we need is in the distribution's own.
            if let Err(error) = process::run(Command::new("apt-get").args(["update", "-qq"])) {
                println!("setup: {error:#}; going on with the lists at hand");
            }
            self.updated = true;
        }
        process::run(
            Command::new("apt-get")
                .args(["install", "-y", "-qq", "--no-install-recommends"])
                .args(packages)
                .env("DEBIAN_FRONTEND", "noninteractive")
                .stdin(Stdio::null()),
        )
    }
}

/// The major version of the LLVM inside the bpf compiler: bpf-linker must read what it writes.
fn llvm_major() -> Result<u32> {
    let verbose = process::output(Toolchain::find(Choice::Auto)?.rustc().arg("-vV"))?;
    parse_llvm_major(&verbose).context("`rustc -vV` names no LLVM version")
}

fn parse_llvm_major(verbose: &str) -> Option<u32> {
    verbose.lines().find_map(|line| line.strip_prefix("LLVM version: "))?.split('.').next()?.parse().ok()
}

/// Present, of the pinned version, with its LLVM, and that not older than the compiler's.
fn linker_works() -> bool {
    let Some(linker) = process::find_program("bpf-linker") else { return false };
    let version = process::probe(Command::new(&linker).arg("--version")).unwrap_or_default();
    if version.trim() != format!("bpf-linker {BPF_LINKER}") {
        return false;
    }
    let linked = process::probe(Command::new("ldd").arg(&linker)).unwrap_or_default();
    match (parse_linked_llvm(&linked), llvm_major()) {
        (Some(linked), Ok(wanted)) => linked >= wanted,
        // Linked statically, or no compiler yet: the build will tell.
        _ => true,
    }
}

fn parse_linked_llvm(ldd: &str) -> Option<u32> {
    ldd.split("libLLVM.so.").nth(1)?.split(['.', ' ']).next()?.parse().ok()
}

fn install_linker(apt: &mut Apt) -> Result<()> {
    let llvm = llvm_major()?;
    let names = [format!("llvm-{llvm}-dev"), format!("libpolly-{llvm}-dev")];
    let mut packages: Vec<&str> = names.iter().map(String::as_str).collect();
    packages.extend(["g++", "zlib1g-dev", "libzstd-dev"]);
    apt.install(&packages)?;
    println!("setup: building bpf-linker {BPF_LINKER} with LLVM {llvm}");
    cargo_install(
        &["bpf-linker", "--version", BPF_LINKER, "--no-default-features", "--features", &format!("llvm-{llvm}")],
        &[("LLVM_PREFIX", &format!("/usr/lib/llvm-{llvm}"))],
    )
}

/// Installs a program for our own use: quick to build matters more than quick to run.
fn cargo_install(args: &[&str], envs: &[(&str, &str)]) -> Result<()> {
    process::run(
        process::cargo()
            .args(["install", "--quiet", "--locked", "--force"])
            .args(args)
            .env("CARGO_PROFILE_RELEASE_LTO", "off")
            .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
            .envs(envs.iter().copied()),
    )
}

fn deny_works() -> bool {
    process::find_program("cargo-deny")
        .and_then(|deny| process::probe(Command::new(deny).arg("--version")))
        .is_some_and(|version| version.trim() == format!("cargo-deny {CARGO_DENY}"))
}

fn deb_works() -> bool {
    process::find_program("cargo-deb")
        .and_then(|deb| process::probe(Command::new(deb).arg("--version")))
        .is_some_and(|version| version.trim() == format!("cargo-deb {CARGO_DEB}"))
}

fn component_works(name: &str) -> bool {
    let task = name.strip_prefix("rust").unwrap_or(name);
    process::probe(process::cargo().args([task, "--version"])).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llvm_major_from_rustc() {
        assert_eq!(parse_llvm_major("rustc 1.96.0\nLLVM version: 22.1.8\n"), Some(22));
        assert_eq!(parse_llvm_major("rustc 1.96.0\n"), None);
    }

    #[test]
    fn linked_llvm_from_ldd() {
        assert_eq!(parse_linked_llvm("\tlibLLVM.so.22.1 => /usr/lib/llvm-22/lib/libLLVM.so.22.1 (0x7f)"), Some(22));
        assert_eq!(parse_linked_llvm("\tlibc.so.6 => /lib/libc.so.6"), None);
    }
}
