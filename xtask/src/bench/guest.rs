//! The first process of a virtual machine that measurements run in: mounts, measures, tells the host, powers off.

use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    path::Path,
};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::{
    mount::{MountFlags, mount},
    system::{RebootCommand, reboot},
};
use serde::{Deserialize, Serialize};

use super::{
    churn,
    conditions::{self, Set, Visit},
    cost_vm::CONDITIONS,
    lookup::{Lookup, look_up},
    place::Place,
    work::Site,
};

#[derive(clap::Subcommand, Clone, Debug)]
pub(crate) enum Measure {
    Cost {
        #[arg(long)]
        rounds: u32,
    },
    Churn {
        #[command(flatten)]
        plan: churn::Plan,
    },
}

const MOUNTS: [(&str, &str); 7] = [
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("devtmpfs", "/dev"),
    ("tmpfs", "/tmp"),
    ("tmpfs", "/run"),
    ("bpf", "/sys/fs/bpf"),
    ("cgroup2", "/sys/fs/cgroup"),
];

/// The port that the host listens to, so that the kernel's messages cannot split a line.
const CHANNEL: &str = "/dev/ttyS1";
/// What a line to the host begins with, and the last line of a measurement that went well.
pub(super) const TOLD: &str = "bench: ";
pub(super) const DONE: &str = "done";

/// Where the programs are.
pub(super) const XTASK: &str = "/bin/xtask";
pub(super) const GPUREAP: &str = "/bin/gpureap";
pub(super) const LOOKUP: &str = "/bin/lookup_time";

/// A result of a measurement of costs.
#[derive(Serialize, Deserialize)]
pub(super) enum Cost {
    Visit(Visit),
    Lookup(Set, Lookup),
}

/// Does not return where it is meant to run.
pub(super) fn serve(measure: &Measure) -> Result<()> {
    ensure!(std::process::id() == 1, "this is for the first process of a virtual machine");
    let outcome = boot(measure);
    if let Err(error) = &outcome {
        println!("{error:#}");
    }
    if let Err(error) = say(&outcome.map_or_else(|error| format!("{error:#}"), |()| DONE.to_owned())) {
        println!("{error:#}");
    }
    bail!("cannot power off: {:?}", reboot(RebootCommand::PowerOff))
}

fn boot(measure: &Measure) -> Result<()> {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    for (kind, at) in MOUNTS {
        fs::create_dir_all(at).with_context(|| format!("create {at}"))?;
        mount(kind, at, kind, MountFlags::empty(), None).with_context(|| format!("mount {at}"))?;
    }
    let mut place = Place::without_daemon(Path::new(GPUREAP))?;
    match measure {
        Measure::Cost { rounds } => {
            let site = Site::new(&place.files(), &place.node(), true)?;
            let plan =
                conditions::Plan { conditions: CONDITIONS.to_vec(), rounds: *rounds, repeats: 3, stop_daemon: true };
            conditions::measure(&mut place, &site, &plan, |visit| tell(&Cost::Visit(visit)))?;
            for set in Set::ALL {
                place.start_daemon(Some(set.name()))?;
                tell(&Cost::Lookup(set, look_up(&place, Path::new(LOOKUP))?))?;
                place.stop_daemon()?;
            }
            Ok(())
        }
        Measure::Churn { plan } => churn::in_guest(&mut place, plan),
    }
}

/// One result for the host.
pub(super) fn tell(result: &impl Serialize) -> Result<()> {
    say(&serde_json::to_string(result)?)
}

fn say(line: &str) -> Result<()> {
    let mut channel = OpenOptions::new().write(true).open(CHANNEL).with_context(|| format!("open {CHANNEL}"))?;
    writeln!(channel, "{TOLD}{}", line.replace('\n', " "))?;
    // What is still in the port's buffer would be lost when the power goes.
    Ok(rustix::termios::tcdrain(&channel)?)
}
