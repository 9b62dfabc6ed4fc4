//! The child's side: loads the library when it is told to, and answers each line with a line.

use std::{
    ffi::{OsStr, OsString},
    io::{self, BufRead as _, Write as _},
};

use nvml_wrapper::{
    Device, Nvml, enums::device::UsedGpuMemory, error::NvmlError, error::nvml_try, struct_wrappers::device as wrapped,
};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal, setsid};
use serde::{Deserialize, Serialize};

use super::{Context, Gpu, GpuProcess, Memory, Mig, MigDevice, NvmlTrouble, Snapshot};
use crate::exit_code::Exit;

/// The word that makes this program the child. What follows it: the parent's pid and the library.
pub const WORD: &str = "nvml-child";

/// A line that asks for nothing: load and initialise, to be ready when the question comes.
pub(super) const START: &str = "start";
pub(super) const ASK: &str = "ask";

/// What a question is answered with.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Answer {
    Snapshot(Snapshot),
    Trouble(NvmlTrouble),
}

/// Lives as long as its parent and its standard input.
pub fn run(words: &[OsString]) -> anyhow::Result<Exit> {
    let [parent, library] = words else { anyhow::bail!("{WORD} is started by gpureap itself") };
    close_inherited();
    // It is started as /proc/self/exe, which says nothing in a list of processes.
    rustix::thread::set_name(c"gpureap-nvml").ok();
    // The terminal's signals are for the parent, which ends this process when it ends. Refused only where this is a
    // session's leader already.
    setsid().ok();
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have died before the line above.
    if getppid().map(|pid: Pid| pid.as_raw_nonzero().to_string()).as_deref() != parent.to_str() {
        return Ok(Exit::Done);
    }
    serve(library)
}

/// What the parent was itself handed without close-on-exec: it might be a GPU.
fn close_inherited() {
    // SAFETY: this process has just begun, and nothing in it owns a descriptor above the standard ones.
    // A kernel before 5.9 has no such call; then they stay.
    unsafe { libc::close_range(3, libc::c_uint::MAX, 0) };
}

fn serve(library: &OsStr) -> anyhow::Result<Exit> {
    let mut stdout = io::stdout().lock();
    let mut nvml: Option<Result<Nvml, NvmlTrouble>> = None;
    for line in io::stdin().lock().lines() {
        let line = line?;
        // Nothing of NVIDIA's is touched before the first line: the parent may have to make way for this process.
        let nvml = nvml.get_or_insert_with(|| load(library));
        if line != ASK {
            continue;
        }
        let answer = match nvml {
            Ok(nvml) => snapshot(nvml).map_or_else(|error| Answer::Trouble(refused(&error)), Answer::Snapshot),
            Err(trouble) => Answer::Trouble(trouble.clone()),
        };
        let mut text = serde_json::to_string(&answer)?;
        text.push('\n');
        stdout.write_all(text.as_bytes())?;
        stdout.flush()?;
    }
    // The library's own clean-up can hang as well; the kernel's cannot be avoided.
    std::mem::forget(nvml);
    Ok(Exit::Done)
}

fn load(library: &OsStr) -> Result<Nvml, NvmlTrouble> {
    Nvml::builder().lib_path(library).init().map_err(|error| match &error {
        NvmlError::LibloadingError(inner) => missing(library, &inner.to_string()),
        error => refused(error),
    })
}

/// Tells the absent library from one that is there and cannot be loaded.
fn missing(library: &OsStr, reason: &str) -> NvmlTrouble {
    let name = library.to_string_lossy();
    // The loader's own words: a library that this one needs is named instead when that is what is missing.
    if reason.starts_with(&format!("{name}: cannot open shared object file: No such file")) {
        NvmlTrouble::NoLibrary(name.into_owned())
    } else {
        NvmlTrouble::Load(reason.to_owned())
    }
}

fn refused(error: &NvmlError) -> NvmlTrouble {
    NvmlTrouble::Refused(error.to_string())
}

fn snapshot(nvml: &Nvml) -> Result<Snapshot, NvmlError> {
    let count = nvml.device_count()?;
    Ok(Snapshot { driver: nvml.sys_driver_version().ok(), gpus: (0..count).map(|index| gpu(nvml, index)).collect() })
}

/// Collects the answers of one GPU and why there is none.
struct Asked {
    errors: Vec<String>,
}

impl Asked {
    fn ask<T>(&mut self, what: &str, answer: Result<T, NvmlError>) -> Option<T> {
        match answer {
            Ok(answer) => Some(answer),
            // Not every GPU has everything: no error.
            Err(NvmlError::NotSupported) => None,
            Err(error) => {
                self.errors.push(format!("{what}: {error}"));
                None
            }
        }
    }
}

fn gpu(nvml: &Nvml, index: u32) -> Gpu {
    let mut asked = Asked { errors: Vec::new() };
    let Some(device) = asked.ask("handle", nvml.device_by_index(index)) else {
        return Gpu { index, errors: asked.errors, ..Gpu::default() };
    };
    let mig = asked.ask("MIG mode", device.mig_mode()).map(|mode| Mig {
        enabled: mode.current == 1,
        pending: mode.pending == 1,
        devices: if mode.current == 1 { mig_devices(&device, &mut asked) } else { Vec::new() },
    });
    let processes = match processes(&device) {
        // A user without privileges is told the processes of a divided GPU only part by part.
        Err(NvmlError::NoPermission) if mig.as_ref().is_some_and(|mig| !mig.devices.is_empty()) => {
            asked.ask("processes", mig_processes(&device))
        }
        answer => asked.ask("processes", answer),
    };
    Gpu {
        index,
        uuid: asked.ask("UUID", device.uuid()),
        bdf: asked.ask("PCI address", device.pci_info()).map(|pci| address(&pci)),
        minor: asked.ask("minor number", device.minor_number()),
        memory: asked.ask("memory", memory(&device)),
        processes,
        persistence: asked.ask("persistence mode", device.is_in_persistent_mode()),
        mig,
        errors: asked.errors,
    }
}

/// `0000:00:06.0`: GPUs have one function.
fn address(pci: &wrapped::PciInfo) -> String {
    format!("{:04x}:{:02x}:{:02x}.0", pci.domain, pci.bus, pci.device)
}

/// Version 2, else version 1, which counts the driver's reserve as used.
fn memory(device: &Device<'_>) -> Result<Memory, NvmlError> {
    match device.memory_info() {
        Ok(info) => Ok(Memory { total: info.total, used: info.used, reserved: Some(info.reserved) }),
        Err(NvmlError::FailedToLoadSymbol(_) | NvmlError::NotSupported) => memory_v1(device),
        Err(error) => Err(error),
    }
}

fn memory_v1(device: &Device<'_>) -> Result<Memory, NvmlError> {
    let function = symbol(device.nvml().lib().nvmlDeviceGetMemoryInfo.as_ref())?;
    let mut info = nvml_wrapper_sys::bindings::nvmlMemory_t { total: 0, free: 0, used: 0 };
    // SAFETY: the handle lives as long as the library, and the structure is the one that this version fills.
    nvml_try(unsafe { function(device.handle(), &raw mut info) })?;
    Ok(Memory { total: info.total, used: info.used, reserved: None })
}

fn symbol<T, E: std::fmt::Display>(symbol: Result<&T, E>) -> Result<&T, NvmlError> {
    symbol.map_err(|error| NvmlError::FailedToLoadSymbol(error.to_string()))
}

type List = Result<Vec<wrapped::ProcessInfo>, NvmlError>;

fn processes(device: &Device<'_>) -> Result<Vec<GpuProcess>, NvmlError> {
    let mut all =
        list(device, Context::Compute, Device::running_compute_processes, Device::running_compute_processes_v2)?;
    all.extend(list(
        device,
        Context::Graphics,
        Device::running_graphics_processes,
        Device::running_graphics_processes_v2,
    )?);
    // Not every library and GPU knows of MPS: then it has no clients.
    match list(device, Context::Mps, Device::mps_running_compute_processes, |_| Ok(Vec::new())) {
        Ok(clients) => all.extend(clients),
        Err(NvmlError::NotSupported | NvmlError::InvalidArg) => {}
        Err(error) => return Err(error),
    }
    Ok(all)
}

/// Processes may start between the question how many there are and the question who: then once more.
fn list<'nvml>(
    device: &Device<'nvml>,
    context: Context,
    newer: impl Fn(&Device<'nvml>) -> List,
    older: impl Fn(&Device<'nvml>) -> List,
) -> Result<Vec<GpuProcess>, NvmlError> {
    let mut answer = newer(device);
    for _ in 0..3 {
        if !matches!(answer, Err(NvmlError::InsufficientSize(_))) {
            break;
        }
        answer = newer(device);
    }
    if matches!(answer, Err(NvmlError::FailedToLoadSymbol(_))) {
        answer = older(device);
    }
    let process = |info: wrapped::ProcessInfo| GpuProcess {
        pid: info.pid,
        used: match info.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        },
        context,
        gi: info.gpu_instance_id,
        ci: info.compute_instance_id,
    };
    Ok(answer?.into_iter().map(process).collect())
}

fn mig_processes(device: &Device<'_>) -> Result<Vec<GpuProcess>, NvmlError> {
    let mut all = Vec::new();
    for part in parts(device)? {
        let (gi, ci) = (instance(&part, Instance::Gpu).ok(), instance(&part, Instance::Compute).ok());
        all.extend(processes(&part)?.into_iter().map(|process| GpuProcess {
            gi: process.gi.or(gi),
            ci: process.ci.or(ci),
            ..process
        }));
    }
    Ok(all)
}

fn mig_devices(device: &Device<'_>, asked: &mut Asked) -> Vec<MigDevice> {
    let parts = asked.ask("MIG devices", parts(device)).unwrap_or_default();
    let device = |part: &Device<'_>| {
        Some(MigDevice {
            uuid: asked.ask("MIG UUID", part.uuid())?,
            gi: asked.ask("GPU instance", instance(part, Instance::Gpu)),
            ci: asked.ask("compute instance", instance(part, Instance::Compute)),
            memory: asked.ask("MIG memory", memory(part)),
        })
    };
    parts.iter().filter_map(device).collect()
}

/// The places for MIG devices are numbered; those without one are not found.
fn parts<'nvml>(device: &Device<'nvml>) -> Result<Vec<Device<'nvml>>, NvmlError> {
    let mut parts = Vec::new();
    for index in 0..device.mig_device_count()? {
        match device.mig_device_by_index(index) {
            Ok(part) => parts.push(part),
            Err(NvmlError::NotFound) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(parts)
}

#[derive(Clone, Copy)]
enum Instance {
    Gpu,
    Compute,
}

fn instance(part: &Device<'_>, which: Instance) -> Result<u32, NvmlError> {
    let library = part.nvml().lib();
    let function = match which {
        Instance::Gpu => symbol(library.nvmlDeviceGetGpuInstanceId.as_ref())?,
        Instance::Compute => symbol(library.nvmlDeviceGetComputeInstanceId.as_ref())?,
    };
    let mut id = 0;
    // SAFETY: the handle lives as long as the library; the function writes one number.
    nvml_try(unsafe { function(part.handle(), &raw mut id) })?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_library_is_told_from_one_that_cannot_be_loaded() {
        let of = |reason: &str| missing(OsStr::new("libnvidia-ml.so.1"), reason).to_string();
        assert_eq!(
            of("libnvidia-ml.so.1: cannot open shared object file: No such file or directory"),
            "libnvidia-ml.so.1 is not there"
        );
        for reason in [
            "libother.so: cannot open shared object file: No such file or directory",
            "/x/libnvidia-ml.so.1: file too short",
        ] {
            assert_eq!(of(reason), format!("NVML could not be loaded: {reason}"));
        }
    }

    #[test]
    fn addresses_are_written_as_the_kernel_does() {
        let pci = wrapped::PciInfo {
            bus: 0xc1,
            bus_id: "00000001:C1:00.0".to_owned(),
            device: 0,
            domain: 1,
            pci_device_id: 0,
            pci_sub_system_id: None,
        };
        assert_eq!(address(&pci), "0001:c1:00.0");
    }
}
