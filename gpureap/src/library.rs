//! What other programs use gpureap for: who holds a GPU now ([`Holders`]), to free one ([`Reaper`]), and what was
//! recorded ([`Journal`]). Each takes a [`Config`], as the command line tool does, and answers with the document that the
//! tool prints with `--json`.
//!
//! Errors are sentences for people; [`exit_of`](crate::error::exit_of) says which kind it is. Nothing is printed and nobody is asked.
//! NVML is never loaded into the calling program: the gpureap that [`Nvml::program`](crate::config::Nvml::program) names is started for it, and where
//! there is none, device memory is not confirmed and the report says so.

use std::{path::PathBuf, time::Duration};

use jiff::Timestamp;

use crate::{
    choose::wish::SlurmJob,
    cli::{Choosing, HoldersArgs, Match, ReapArgs, ReportArgs},
    commands,
    config::Config,
    error::Failure,
    exit_code::Exit,
    eyes::{self, Opened},
    history, holders,
    reap::{self, Reaped, scope::Scope},
};

/// Who holds what, now.
///
/// ```
/// use gpureap::{Config, Holders, config::StandIn};
///
/// # fn main() -> anyhow::Result<()> {
/// // Any character device can stand in for a GPU; with `Config::of_this_host()` the real ones are seen.
/// let random = StandIn::new(1, 8, "/dev/random".into()).map_err(anyhow::Error::msg)?;
/// let config = Config { devices: vec![random], ..Config::default() };
/// let held = std::fs::File::open("/dev/random")?;
///
/// let report = Holders::snapshot(&config)?;
/// assert!(report.holders.iter().any(|holder| holder.pid == std::process::id()));
///
/// drop(held);
/// let report = Holders::of(&config).pid(std::process::id()).look()?;
/// assert!(report.holders.is_empty());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Holders<'a> {
    config: &'a Config,
    args: HoldersArgs,
}

impl<'a> Holders<'a> {
    /// Of all devices and processes: read from the tracer where one runs, else by a walk through all tasks.
    pub fn snapshot(config: &Config) -> anyhow::Result<holders::report::HoldersReport> {
        Holders::of(config).look()
    }

    #[must_use]
    pub fn of(config: &'a Config) -> Self {
        Self { config, args: HoldersArgs { json: true, ..HoldersArgs::default() } }
    }

    /// Only of this GPU: minor, node path, UUID or PCI address. May be called again for more.
    #[must_use]
    pub fn gpu(mut self, gpu: impl Into<String>) -> Self {
        self.args.choosing.gpu.push(gpu.into());
        self
    }

    /// Only this process. May be called again for more.
    #[must_use]
    pub fn pid(mut self, pid: u32) -> Self {
        self.args.choosing.pid.push(pid);
        self
    }

    /// The filters of the command line in place of those so far.
    #[must_use]
    pub fn choosing(mut self, choosing: Choosing) -> Self {
        self.args.choosing = choosing;
        self
    }

    pub fn look(&self) -> anyhow::Result<holders::report::HoldersReport> {
        commands::holders::report(&self.args, self.config)
    }
}

/// Frees GPUs: chooses holders, signals them, waits, and proves that they are free.
///
/// Without a word more it sends TERM to every job that uses a chosen GPU, KILL after 10 s, and waits 60 s. System daemons, monitors,
/// the caller's own session and its ancestors are left alone, as they are by `gpureap reap`.
///
/// ```
/// use std::{fs::File, process::Command};
///
/// use gpureap::{Config, Reaper, config::{Paths, StandIn}, exit_code::Exit};
///
/// # fn main() -> anyhow::Result<()> {
/// # let state = tempfile::tempdir()?;
/// let random = StandIn::new(1, 8, "/dev/random".into()).map_err(anyhow::Error::msg)?;
/// // The record of signals goes to the state directory.
/// let paths = Paths { state: state.path().into(), ..Paths::default() };
/// let config = Config { devices: vec![random], paths, ..Config::default() };
/// let mut job = Command::new("sleep").arg("1000").stdin(File::open("/dev/random")?).spawn()?;
///
/// let reaper = Reaper::of(&config).pid(job.id()).own_session().now();
/// let plan = reaper.plan()?;
/// assert_eq!((plan.processes.len(), plan.processes[0].identity.pid), (1, job.id()));
///
/// let (report, exit) = reaper.reap()?;
/// assert_eq!(exit, Exit::Done, "{report:#?}");
/// assert!(!job.wait()?.success());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Reaper<'a> {
    config: &'a Config,
    args: ReapArgs,
}

impl<'a> Reaper<'a> {
    #[must_use]
    pub fn of(config: &'a Config) -> Self {
        Self { config, args: ReapArgs { yes: true, json: true, ..ReapArgs::default() } }
    }

    /// Only the holders of this GPU: minor, node path, UUID or PCI address. May be called again for more.
    #[must_use]
    pub fn gpu(mut self, gpu: impl Into<String>) -> Self {
        self.args.choosing.gpu.push(gpu.into());
        self
    }

    /// Only this process. May be called again for more.
    #[must_use]
    pub fn pid(mut self, pid: u32) -> Self {
        self.args.choosing.pid.push(pid);
        self
    }

    /// Only processes of this Slurm job, or of a step of it: `4711`, `4711.0`. May be called again for more.
    pub fn slurm_job(mut self, job: &str) -> anyhow::Result<Self> {
        let job: SlurmJob = job.parse().map_err(Failure::usage)?;
        self.args.choosing.slurm_job.push(job);
        Ok(self)
    }

    /// The filters of the command line in place of those so far.
    #[must_use]
    pub fn choosing(mut self, choosing: Choosing) -> Self {
        self.args.choosing = choosing;
        self
    }

    /// Which handles count. By default with a GPU only those of who uses it, else all.
    #[must_use]
    pub fn matching(mut self, matching: Match) -> Self {
        self.args.matching = Some(matching);
        self
    }

    /// KILL at once.
    #[must_use]
    pub fn now(mut self) -> Self {
        self.args.now = true;
        self
    }

    /// Time between TERM and KILL.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.args.grace = grace;
        self
    }

    /// Time to wait after the last signal.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.args.timeout = timeout;
        self
    }

    /// Nobody opens the chosen GPUs meanwhile.
    #[must_use]
    pub fn fence(mut self) -> Self {
        self.args.fence = true;
        self
    }

    /// What goes with the holders.
    #[must_use]
    pub fn scope(mut self, scope: Scope) -> Self {
        self.args.scope = scope;
        self
    }

    /// Monitors too: services are stopped, other processes signalled.
    #[must_use]
    pub fn stop_monitors(mut self) -> Self {
        self.args.stop_monitors = true;
        self
    }

    /// Also processes of the session that the calling program runs in, but never its ancestors.
    #[must_use]
    pub fn own_session(mut self) -> Self {
        self.args.include_own_session = true;
        self
    }

    /// Also who is of the class system or monitor by this rule.
    #[must_use]
    pub fn include_protected(mut self, rule: impl Into<String>) -> Self {
        self.args.include_protected.push(rule.into());
        self
    }

    /// What would be done.
    pub fn plan(&self) -> anyhow::Result<reap::report::Report> {
        match self.carry_out(&ReapArgs { dry_run: true, ..self.args.clone() })? {
            Reaped::Planned(report) | Reaped::Done { report, .. } => Ok(report),
            Reaped::Declined => unreachable!("nobody is asked"),
        }
    }

    /// The exit is that of the command: [`Exit::Done`] says that the GPUs are free, and that it was seen.
    pub fn reap(&self) -> anyhow::Result<(reap::report::Report, Exit)> {
        match self.carry_out(&self.args)? {
            Reaped::Done { report, exit, recorded } => {
                reap::remember(&report, recorded, self.config);
                Ok((report, exit))
            }
            Reaped::Planned(_) | Reaped::Declined => unreachable!("it is no plan, and nobody is asked"),
        }
    }

    fn carry_out(&self, args: &ReapArgs) -> anyhow::Result<Reaped> {
        let Opened { eyes, devices, note } = eyes::open_configured(self.config)?;
        if devices.is_empty() {
            return Err(Failure::no_device(note.as_deref()).into());
        }
        reap::carry_out(args, self.config, &devices, eyes.as_ref(), note, None)
    }
}

/// What was recorded, of one host or of several.
///
/// ```no_run
/// use gpureap::{Config, Journal};
///
/// # fn main() -> anyhow::Result<()> {
/// let config = Config::of_this_host()?;
/// let report = Journal::of_this_host(&config).gpu("0").report()?;
/// for incident in &report.incidents {
///     println!("{}", incident.title);
/// }
/// // Of a fleet: the journals of its hosts, brought to one place.
/// let hosts = Journal::of_files(&config, ["gpu1.db", "gpu2.db"]);
/// let page = gpureap::history::html::render(&hosts.report()?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Journal<'a> {
    config: &'a Config,
    args: ReportArgs,
}

impl<'a> Journal<'a> {
    /// The last hour of what the daemon here recorded.
    #[must_use]
    pub fn of_this_host(config: &'a Config) -> Self {
        Self { config, args: ReportArgs::default() }
    }

    /// The last hour of these journals or recorded `events --json`, merged by host.
    #[must_use]
    pub fn of_files(config: &'a Config, files: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        let journal = files.into_iter().map(Into::into).collect();
        Self { config, args: ReportArgs { journal, ..ReportArgs::default() } }
    }

    #[must_use]
    pub fn since(mut self, time: Timestamp) -> Self {
        self.args.since = Some(time);
        self
    }

    #[must_use]
    pub fn until(mut self, time: Timestamp) -> Self {
        self.args.until = Some(time);
        self
    }

    /// Who held what at this instant.
    #[must_use]
    pub fn at(mut self, time: Timestamp) -> Self {
        self.args.at = Some(time);
        self
    }

    /// A boot: `0` for this one, `-1` for the one before, or its id.
    #[must_use]
    pub fn boot(mut self, boot: impl Into<String>) -> Self {
        self.args.boot = Some(boot.into());
        self
    }

    /// Only this GPU. May be called again for more.
    #[must_use]
    pub fn gpu(mut self, gpu: impl Into<String>) -> Self {
        self.args.gpu.push(gpu.into());
        self
    }

    /// Only this process, its job and its ancestors. May be called again for more.
    #[must_use]
    pub fn pid(mut self, pid: u32) -> Self {
        self.args.pid.push(pid);
        self
    }

    pub fn report(&self) -> anyhow::Result<history::report::Report> {
        commands::report::report(&self.args, self.config)
    }
}
