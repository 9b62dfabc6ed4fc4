//! Loads the object, attaches a probe set, pins everything, takes the first snapshot. Attach first, snapshot second.

use std::{
    fs::File,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
};

use anyhow::{Context as _, anyhow};
use aya::{
    Btf as AyaBtf, Ebpf, EbpfLoader,
    programs::{Program as AyaProgram, ProgramError, links::FdLink},
};
use aya_log::EbpfLogger;
use gpureap_common::{
    abi::{self, ABI_VERSION, MAGIC},
    record::{Device, Meta, backend},
};

use super::{
    handles::{Handles, LINKS, MAPS, Maps, PROGRAMS, Programs, object_map, program_fd},
    object::{self, Hook, ITERATORS, Program, When},
    sys,
};
use crate::{
    clock,
    config::Config,
    error::Failure,
    gpu::devices::Devices,
    kernel::{btf::Btf, offsets::Offsets, preemption, rights},
    model::{self, Backend},
};

/// The ring of aya-log, and its size in bytes where it is used.
const LOGS: &str = "AYA_LOGS";
const LOG_SIZE: u32 = 128 << 10;
/// The least that a ring can have.
const PAGE: u32 = 4096;

/// Debug lines of the kernel programs, in the daemon's own log.
pub type KernelLog = EbpfLogger<ToTracing>;

#[derive(Clone, Copy, Debug)]
pub struct ToTracing;

impl log::Log for ToTracing {
    fn enabled(&self, _metadata: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        tracing::info!("kernel: {}", record.args());
    }

    fn flush(&self) {}
}

/// What an attach gives.
pub struct Attached {
    pub handles: Handles,
    pub backend: Backend,
    /// Sets that were tried before.
    pub refusals: Vec<Refusal>,
    pub log: Option<KernelLog>,
}

/// A loaded object, before anything is attached.
#[derive(Debug)]
pub struct Loaded {
    ebpf: Ebpf,
    btf: Btf,
    aya_btf: AyaBtf,
}

/// The capabilities that iterators take, and those that programs take which are attached.
const LOOKS: &[&str] = &["CAP_BPF", "CAP_PERFMON"];
pub(super) const PROBES: &[&str] = &["CAP_BPF", "CAP_PERFMON", "CAP_NET_ADMIN"];

/// Why a probe set does not run here, in the kernel's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub backend: Backend,
    pub reason: String,
}

impl Loaded {
    /// Resolves offsets, creates the maps, tells the kernel which devices count.
    pub fn new(config: &Config, devices: &Devices) -> anyhow::Result<Self> {
        let sizes = &config.maps;
        let loaded = Self::sized(
            config,
            &[
                ("FILES", sizes.files),
                ("TABLES", sizes.tables),
                ("HOLDERS", sizes.holders),
                ("PROCS", sizes.procs),
                ("LINEAGE", sizes.lineage),
                // A fence has an object of its own.
                ("FENCE", 1),
                ("FENCE_TALLY", 1),
                ("EXEMPT", 1),
                ("DENIED", 1),
                (LOGS, if config.kernel_log { LOG_SIZE } else { PAGE }),
            ],
        )?;
        set_devices(&Maps::from_object(&loaded.ebpf)?, devices)?;
        Ok(loaded)
    }

    /// For the fence's program alone: what the tracer needs is as small as it can be.
    pub(super) fn for_fence(config: &Config) -> anyhow::Result<Self> {
        Self::sized(
            config,
            &[
                ("FILES", 1),
                ("TABLES", 1),
                ("HOLDERS", 1),
                ("PROCS", 1),
                ("LINEAGE", 1),
                ("EVENTS", PAGE),
                (LOGS, PAGE),
            ],
        )
    }

    fn sized(config: &Config, sizes: &[(&str, u32)]) -> anyhow::Result<Self> {
        let path = config.paths.sys.join("kernel/btf/vmlinux");
        let btf = Btf::read(&path).map_err(|error| Failure::unsupported(error.to_string()))?;
        let offsets = Offsets::resolve(&btf).map_err(|error| Failure::unsupported(error.to_string()))?;
        let aya_btf = AyaBtf::parse_file(&path, aya::Endianness::default())
            .map_err(|error| Failure::unsupported(format!("{} is damaged: {error}", path.display())))?;
        let mut loader = EbpfLoader::new();
        loader.btf(Some(&aya_btf));
        for (name, value) in &offsets.0 {
            loader.override_global(name, value, true);
        }
        // Frozen with the rest: the verifier drops what a level leaves out.
        let level = if config.kernel_log { aya_log::Level::Debug as u8 } else { 0 };
        loader.override_global(aya_log::LEVEL, &level, true);
        for (name, size) in sizes {
            loader.map_max_entries(name, *size);
        }
        let ebpf = loader.load(object::OBJECT).map_err(|error| explain_load(&error))?;
        Ok(Self { ebpf, btf, aya_btf })
    }

    /// A second descriptor of a map.
    pub(super) fn map(&self, name: &str) -> anyhow::Result<OwnedFd> {
        Ok(object_map(&self.ebpf, name)?)
    }

    /// Loads one program.
    pub(super) fn program(&mut self, program: &Program) -> anyhow::Result<OwnedFd> {
        self.load_one(program).map_err(|error| explain_program(program, &error))?;
        Ok(sys::dup(&program_fd(self.get(program.name)?)?)?)
    }

    /// Loads the iterators alone: the one-shot snapshot.
    pub fn into_snapshot(mut self) -> anyhow::Result<Handles> {
        self.load_iterators()?;
        let maps = Maps::from_object(&self.ebpf)?;
        let programs = self.programs(&[])?;
        Ok(Handles { maps, programs })
    }

    /// Loads and attaches programs, in this order, and pins them under `dir`.
    fn attach(&mut self, set: &[Program], dir: &Path, cgroup_root: Option<&Path>) -> anyhow::Result<Vec<String>> {
        let links = dir.join(LINKS);
        let programs = dir.join(PROGRAMS);
        let mut attached = Vec::new();
        for program in set {
            if !self.applies(program.when) {
                // Of forms that differ in their parameters one must fit, or the hook would be missing unseen.
                let known = set.iter().any(|other| other.hook == program.hook && self.applies(other.when));
                let by_form = matches!(program.when, When::Parameters(..) | When::TracepointParameters(..));
                anyhow::ensure!(known || !by_form, "{} has other parameters on this kernel", describe(program));
                continue;
            }
            self.load_one(program).with_context(|| describe(program))?;
            let loaded = self.get(program.name)?;
            sys::pin(program_fd(loaded)?, &programs.join(program.name))
                .with_context(|| format!("pin program {}", program.name))?;
            if program.hook != Hook::OnDemand {
                self.attach_one(program, &links.join(program.name), cgroup_root).with_context(|| describe(program))?;
                attached.push(program.name.to_owned());
            }
        }
        Ok(attached)
    }

    fn applies(&self, when: When) -> bool {
        match when {
            When::Always => true,
            When::Has(function) => self.btf.has_function(function),
            When::Lacks(function) => !self.btf.has_function(function),
            When::Parameters(function, count) => self.btf.parameters(function) == Some(count),
            When::TracepointParameters(name, count) => self.btf.tracepoint_parameters(name) == Some(count),
        }
    }

    fn get(&mut self, name: &str) -> anyhow::Result<&mut AyaProgram> {
        self.ebpf.program_mut(name).ok_or_else(|| anyhow!("the object has no program {name}"))
    }

    fn load_iterators(&mut self) -> anyhow::Result<()> {
        for program in ITERATORS {
            match self.load_one(program) {
                Ok(()) => {}
                // Before 6.1 there is no task_vma, and mappings are out of sight.
                Err(_) if program.name == "sweep_maps" && !self.btf.has_function("bpf_iter_task_vma") => {}
                Err(error) => return Err(explain_program(program, &error)),
            }
        }
        Ok(())
    }

    fn load_one(&mut self, program: &Program) -> Result<(), ProgramError> {
        let Self { ebpf, btf: _, aya_btf } = self;
        let Some(loaded) = ebpf.program_mut(program.name) else { return Err(ProgramError::NotLoaded) };
        if loaded.fd().is_ok() {
            return Ok(());
        }
        match (program.hook, loaded) {
            (Hook::Kprobe(_) | Hook::Kretprobe(_), AyaProgram::KProbe(probe)) => probe.load(),
            (Hook::Fentry(function), AyaProgram::FEntry(probe)) => probe.load(function, aya_btf),
            (Hook::Fexit(function), AyaProgram::FExit(probe)) => probe.load(function, aya_btf),
            (Hook::Tracepoint(name), AyaProgram::BtfTracePoint(probe)) => probe.load(name, aya_btf),
            (Hook::CgroupDevice, AyaProgram::CgroupDevice(probe)) => probe.load(),
            (Hook::Iterator(name), AyaProgram::Iter(iterator)) => iterator.load(name, aya_btf),
            (Hook::OnDemand | Hook::RawTracepoint(_), AyaProgram::RawTracePoint(probe)) => probe.load(),
            _ => Err(ProgramError::UnexpectedProgramType),
        }
    }

    /// Attaches and pins the link, so that it outlives this process.
    fn attach_one(&mut self, program: &Program, pin: &Path, cgroup_root: Option<&Path>) -> anyhow::Result<()> {
        let link: FdLink = match (program.hook, self.get(program.name)?) {
            (Hook::Kprobe(symbol) | Hook::Kretprobe(symbol), AyaProgram::KProbe(probe)) => {
                let id = probe.attach(symbol, 0)?;
                // A perf link (5.15); without one a probe cannot outlive the daemon.
                probe.take_link(id)?.try_into()?
            }
            (Hook::Fentry(_), AyaProgram::FEntry(probe)) => {
                let id = probe.attach()?;
                probe.take_link(id)?.into()
            }
            (Hook::Fexit(_), AyaProgram::FExit(probe)) => {
                let id = probe.attach()?;
                probe.take_link(id)?.into()
            }
            (Hook::Tracepoint(_), AyaProgram::BtfTracePoint(probe)) => {
                let id = probe.attach()?;
                probe.take_link(id)?.into()
            }
            (Hook::RawTracepoint(name), AyaProgram::RawTracePoint(probe)) => {
                let id = probe.attach(name)?;
                probe.take_link(id)?.into()
            }
            (Hook::CgroupDevice, loaded) => {
                let root = cgroup_root.ok_or_else(|| anyhow!(NO_CGROUP2))?;
                let cgroup = File::open(root).with_context(|| format!("open {}", root.display()))?;
                let link = sys::link_cgroup_device(program_fd(loaded)?, cgroup.as_fd())?;
                sys::pin(link.as_fd(), pin).with_context(|| format!("pin {}", pin.display()))?;
                return Ok(());
            }
            _ => return Err(anyhow!("the object's program has another type")),
        };
        link.pin(pin).with_context(|| format!("pin {}", pin.display()))?;
        Ok(())
    }

    fn programs(&mut self, attached: &[String]) -> anyhow::Result<Programs> {
        let mut take = |name: &str| -> anyhow::Result<_> { Ok(sys::dup(&program_fd(self.get(name)?)?)?) };
        Ok(Programs {
            sweep_fds: take("sweep_fds")?,
            sweep_maps: take("sweep_maps").ok(),
            sweep_lineage: take("sweep_lineage")?,
            fix: take("fix").ok(),
            attached: attached.iter().map(|name| Ok((name.clone(), take(name)?))).collect::<anyhow::Result<_>>()?,
        })
    }
}

/// A helper that programs of every set call (5.17). What else they take is there since 6.1.
const OLDEST: &str = "bpf_loop";

/// In a sentence, where the kernel would refuse some program or other with a number.
fn too_old(proc_root: &Path) -> String {
    let release = std::fs::read_to_string(proc_root.join("sys/kernel/osrelease")).unwrap_or_default();
    format!("tracing needs Linux 6.1 or later, and this is {}, which has no {OLDEST}", release.trim())
}

/// Loads the object and attaches the first probe set of `order` that this kernel takes, pinned under `dir`.
pub fn attach(config: &Config, devices: &Devices, order: &[Backend], dir: &Path) -> anyhow::Result<Attached> {
    let mut loaded = Loaded::new(config, devices)?;
    if !loaded.btf.has_function(OLDEST) {
        return Err(Failure::unsupported(too_old(&config.paths.proc)).into());
    }
    super::pins::make(dir)?;
    let result = attach_first(&mut loaded, config, order, dir);
    if result.is_err() {
        super::pins::remove(dir);
    }
    result
}

fn attach_first(loaded: &mut Loaded, config: &Config, order: &[Backend], dir: &Path) -> anyhow::Result<Attached> {
    loaded.load_iterators()?;
    let maps = Maps::from_object(&loaded.ebpf)?;
    for (name, ..) in MAPS {
        let map = loaded.ebpf.map(name).ok_or_else(|| anyhow!("the object has no map {name}"))?;
        map.pin(dir.join(name)).with_context(|| format!("pin map {name}"))?;
    }
    for program in ITERATORS {
        if let Ok(fd) = program_fd(loaded.get(program.name)?) {
            sys::pin(fd, &dir.join(PROGRAMS).join(program.name))?;
        }
    }
    let cgroup_root = cgroup2_root(&config.paths.proc);
    let mut attached =
        loaded.attach(object::COMMON, dir, cgroup_root.as_deref()).map_err(|error| explain_common(&error))?;
    let mut refusals = Vec::new();
    for &backend in order {
        let unfit = match backend {
            Backend::Kprobe => preemption::silent_skips(&loaded.btf, &config.paths),
            Backend::Fentry | Backend::Gate => None,
        };
        // A set that is refused has counted nothing: what puts files into the map is attached last.
        let outcome = match unfit {
            Some(reason) => Err(anyhow!(reason)),
            None => loaded.attach(object::set(backend), dir, cgroup_root.as_deref()),
        };
        match outcome {
            Ok(own) => {
                attached.extend(own);
                maps.set_meta(&Meta {
                    magic: MAGIC,
                    abi: ABI_VERSION,
                    backend: number(backend),
                    attached_ns: clock::boottime_ns(),
                    object: object::object_id(),
                    snapshot_ns: 0,
                    wall_offset_ns: clock::wall_offset_ns(),
                })?;
                let programs = loaded.programs(&attached)?;
                let handles = Handles { maps, programs };
                // All programs that write there are loaded by now.
                let log = config.kernel_log.then(|| EbpfLogger::init_with_logger(&mut loaded.ebpf, ToTracing));
                return Ok(Attached { handles, backend, refusals, log: log.transpose()? });
            }
            Err(error) => {
                for program in object::set(backend) {
                    super::pins::remove_program(dir, program.name);
                }
                refusals.push(Refusal { backend, reason: refusal(&error) });
            }
        }
    }
    let reasons: Vec<String> =
        refusals.iter().map(|refusal| format!("`{}`: {}", name(refusal.backend), refusal.reason)).collect();
    if !rights::lacking().is_empty() {
        return Err(rights::refused("the tracer", PROBES, &reasons.join("; ")).into());
    }
    Err(Failure::unsupported(format!("no probe set runs on this kernel: {}", reasons.join("; "))).into())
}

/// Enters devices under their slots into a `MAJORS` and a `DEVICES`, of the tracer or of a fence.
pub(super) fn add_devices(majors: BorrowedFd<'_>, table: BorrowedFd<'_>, devices: &Devices) -> anyhow::Result<()> {
    for device in devices.list() {
        let record = Device { slot: device.slot, kind: device.kind as u32 };
        sys::update(table, &device.number(), &record, sys::ANY).context("map DEVICES")?;
        sys::update(majors, &device.major, &1_u32, sys::ANY).context("map MAJORS")?;
    }
    Ok(())
}

/// Fills `MAJORS` and `DEVICES`. Entries are added before old ones go, so that a reload of the driver loses no open.
pub fn set_devices(maps: &Maps, devices: &Devices) -> anyhow::Result<()> {
    add_devices(maps.majors.as_fd(), maps.devices.as_fd(), devices)?;
    let wanted: Vec<u32> = devices.list().iter().map(model::Device::number).collect();
    for (number, _) in sys::dump::<u32, Device>(maps.devices.as_fd())? {
        if !wanted.contains(&number) {
            sys::delete(maps.devices.as_fd(), &number)?;
            let major = abi::major(number);
            if !wanted.iter().any(|other| abi::major(*other) == major) {
                sys::update(maps.majors.as_fd(), &major, &0_u32, sys::ANY)?;
            }
        }
    }
    Ok(())
}

/// Where the root of the cgroup2 hierarchy is mounted. In a cgroup namespace the mount shows a part of it, and a program
/// there would see the opens of that part alone; the real root is inode 1 of its kernfs.
pub fn cgroup2_root(proc_root: &Path) -> Option<PathBuf> {
    let mounts = std::fs::read_to_string(proc_root.join("self/mounts")).ok()?;
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let (_, at, kind) = (fields.next()?, fields.next()?, fields.next()?);
        let at = (kind == "cgroup2").then(|| PathBuf::from(at.replace("\\040", " ")))?;
        (std::fs::metadata(&at).ok()?.ino() == 1).then_some(at)
    })
}

/// What is missing where [`cgroup2_root`] finds nothing.
pub const NO_CGROUP2: &str = "the root of the host's cgroup2 is not mounted here: mount -t cgroup2 none /sys/fs/cgroup, in the host's cgroup namespace";

pub const fn name(backend: Backend) -> &'static str {
    match backend {
        Backend::Kprobe => "kprobe",
        Backend::Fentry => "fentry",
        Backend::Gate => "gate",
    }
}

pub const fn number(backend: Backend) -> u32 {
    match backend {
        Backend::Kprobe => backend::KPROBE,
        Backend::Fentry => backend::FENTRY,
        Backend::Gate => backend::GATE,
    }
}

pub const fn from_number(number: u32) -> Option<Backend> {
    match number {
        backend::KPROBE => Some(Backend::Kprobe),
        backend::FENTRY => Some(Backend::Fentry),
        backend::GATE => Some(Backend::Gate),
        _ => None,
    }
}

/// The order in which sets are tried.
pub fn order(config: &Config) -> Vec<Backend> {
    config.backend.map_or_else(|| vec![Backend::Kprobe, Backend::Fentry, Backend::Gate], |forced| vec![forced])
}

/// The place of a program in the kernel.
pub fn describe(program: &Program) -> String {
    match program.hook {
        Hook::Kprobe(symbol) => format!("kprobe {symbol}"),
        Hook::Kretprobe(symbol) => format!("kretprobe {symbol}"),
        Hook::Fentry(symbol) => format!("fentry {symbol}"),
        Hook::Fexit(symbol) => format!("fexit {symbol}"),
        Hook::Tracepoint(name) | Hook::RawTracepoint(name) => format!("tracepoint {name}"),
        Hook::CgroupDevice => "cgroup_device".to_owned(),
        Hook::Iterator(name) => format!("iterator {name}"),
        Hook::OnDemand => format!("program {}", program.name),
    }
}

/// Why a set is refused, in words that say what the kernel lacks.
fn refusal(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    if text.contains("event_source/devices/kprobe") {
        return "this kernel has no kprobes (CONFIG_KPROBES, CONFIG_KPROBE_EVENTS)".to_owned();
    }
    // A verifier's log may follow; the first line says it.
    let line = text.lines().next().unwrap_or_default();
    line.split(". Verifier output:").next().unwrap_or_default().trim_end_matches(['.', ' ', ':']).to_owned()
}

/// Failures that no other probe set would cure.
fn explain_load(error: &aya::EbpfError) -> anyhow::Error {
    let text = chain(error);
    if denied(error) {
        // Only root traces and fences, for which a look is not enough.
        let needed = if rustix::process::geteuid().is_root() { PROBES } else { LOOKS };
        return rights::refused("this", needed, &text).into();
    }
    Failure::unsupported(format!("the kernel does not take gpureap's maps ({text})")).into()
}

fn explain_common(error: &anyhow::Error) -> anyhow::Error {
    if rights::lacking().is_empty() {
        return Failure::unsupported(format!("no probe set runs on this kernel: {}", refusal(error))).into();
    }
    rights::refused("the tracer", PROBES, &refusal(error)).into()
}

fn explain_program(program: &Program, error: &ProgramError) -> anyhow::Error {
    if denied(error) {
        let needed = if matches!(program.hook, Hook::Iterator(_)) { LOOKS } else { PROBES };
        return rights::refused(&describe(program), needed, &chain(error)).into();
    }
    Failure::unsupported(format!("{} does not load on this kernel ({})", describe(program), chain(error))).into()
}

/// Whether an operating-system "permission denied" is at the root of an error.
fn denied(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(current) = cause {
        if let Some(io) = current.downcast_ref::<std::io::Error>()
            && io.kind() == std::io::ErrorKind::PermissionDenied
        {
            return true;
        }
        cause = current.source();
    }
    false
}

/// An error and its causes in one line; verifier logs are cut to their last line.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut parts = Vec::new();
    let mut cause = Some(error);
    while let Some(current) = cause {
        let text = current.to_string();
        let line = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("").trim();
        let line = line.trim_end_matches("Verifier output:").trim_end_matches(['.', ' ']).to_owned();
        if !parts.iter().any(|part: &String| part.contains(&line)) {
            parts.push(line);
        }
        cause = current.source();
    }
    parts.join(": ")
}
