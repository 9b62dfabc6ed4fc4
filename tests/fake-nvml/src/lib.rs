//! NVML's C functions, as far as gpureap calls them, over a file: `GPUREAP_FAKE_NVML` names it, and it is read anew at
//! each call, so that a test can change the answers under way. Only the name of the library is left to the test: it
//! puts this one into a directory as `libnvidia-ml.so.1`.

use std::{
    env,
    ffi::{c_char, c_uint},
    fs, ptr, thread,
    time::Duration,
};

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlMemory_t, nvmlMemory_v2_t, nvmlPciInfo_t, nvmlProcessInfo_v2_t, nvmlReturn_t,
};
use serde::{Deserialize, Serialize};

/// Where the file is.
pub const VARIABLE: &str = "GPUREAP_FAKE_NVML";

const SUCCESS: nvmlReturn_t = 0;
const INVALID_ARGUMENT: nvmlReturn_t = 2;
const NOT_SUPPORTED: nvmlReturn_t = 3;
const NOT_FOUND: nvmlReturn_t = 6;
const INSUFFICIENT_SIZE: nvmlReturn_t = 7;
const UNKNOWN: nvmlReturn_t = 999;
/// `NVML_VALUE_NOT_AVAILABLE`, and the id of no instance.
const NOT_AVAILABLE: u64 = u64::MAX;
const NO_INSTANCE: u32 = u32::MAX;

/// The whole file.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct World {
    /// Functions that never return.
    pub hang: Vec<String>,
    /// Functions that end the process.
    pub crash: Vec<String>,
    /// Functions that take some milliseconds.
    pub slow: Vec<(String, u64)>,
    /// Functions that return this code.
    pub errors: Vec<(String, u32)>,
    pub gpus: Vec<Gpu>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Gpu {
    pub uuid: String,
    pub bus: u32,
    pub minor: u32,
    /// MiB, as version 2 tells them: `used` without `reserved`, and without that of the processes below.
    pub total: u64,
    pub reserved: u64,
    pub used: u64,
    pub persistence: bool,
    /// `None`: not a GPU that can be divided.
    pub mig: Option<bool>,
    pub mig_devices: Vec<MigDevice>,
    pub processes: Vec<Process>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MigDevice {
    pub uuid: String,
    pub gi: u32,
    pub ci: u32,
    pub total: u64,
    pub used: u64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Process {
    pub pid: u32,
    /// MiB; `None`: "not available".
    pub used: Option<u64>,
    pub kind: Kind,
    pub gi: Option<u32>,
    /// NVML lists no dead process, and still counts what is charged to it.
    pub unlisted: bool,
    /// The memory goes with this process, which may be another one than it is charged to; `None`: never.
    pub until_gone: Option<u32>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    #[default]
    Compute,
    Graphics,
    Mps,
}

impl Process {
    fn is_there(&self) -> bool {
        self.until_gone.is_none_or(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
        })
    }
}

impl Gpu {
    fn used(&self) -> u64 {
        self.used
            + self.processes.iter().filter(|process| process.is_there()).filter_map(|process| process.used).sum::<u64>()
    }
}

const fn mib(count: u64) -> u64 {
    count << 20
}

fn world() -> Option<World> {
    serde_json::from_slice(&fs::read(env::var_os(VARIABLE)?).ok()?).ok()
}

/// What every function does first: hang, crash, wait or fail, as it is told to.
fn call(name: &str, answer: impl FnOnce(&World) -> Result<(), nvmlReturn_t>) -> nvmlReturn_t {
    let Some(world) = world() else { return UNKNOWN };
    let has = |list: &[String]| list.iter().any(|entry| entry == name);
    if has(&world.hang) {
        loop {
            thread::sleep(Duration::from_hours(1));
        }
    }
    if has(&world.crash) {
        std::process::abort();
    }
    for (_, time) in world.slow.iter().filter(|(entry, _)| entry == name) {
        thread::sleep(Duration::from_millis(*time));
    }
    if let Some((_, code)) = world.errors.iter().find(|(entry, _)| entry == name) {
        return *code;
    }
    answer(&world).err().unwrap_or(SUCCESS)
}

/// A handle is a number: the GPU's index plus one, and for its parts that of the part plus one in the next byte.
fn handle(gpu: usize, part: Option<usize>) -> nvmlDevice_t {
    ptr::without_provenance_mut((gpu + 1) | part.map_or(0, |part| part + 1) << 8)
}

fn whole(world: &World, device: nvmlDevice_t) -> Result<(usize, &Gpu, Option<&MigDevice>), nvmlReturn_t> {
    let number = device.addr();
    let index = (number & 0xff).checked_sub(1).ok_or(INVALID_ARGUMENT)?;
    let gpu = world.gpus.get(index).ok_or(INVALID_ARGUMENT)?;
    let part = match (number >> 8).checked_sub(1) {
        None => None,
        Some(part) => Some(gpu.mig_devices.get(part).ok_or(INVALID_ARGUMENT)?),
    };
    Ok((index, gpu, part))
}

/// # Safety
/// The caller's pointer is to a `T`, or null.
unsafe fn put<T>(place: *mut T, value: T) -> Result<(), nvmlReturn_t> {
    if place.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: as above.
    unsafe { place.write(value) };
    Ok(())
}

/// # Safety
/// The caller's pointer is to that many bytes.
unsafe fn put_text(place: *mut c_char, length: c_uint, text: &str) -> Result<(), nvmlReturn_t> {
    if text.len() + 1 > length as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    for (index, byte) in text.bytes().chain([0]).enumerate() {
        // SAFETY: within the length, as above.
        unsafe { place.add(index).write(byte as c_char) };
    }
    Ok(())
}

/// The functions of the library. Each is given pointers by a caller that follows NVML's header, and checks the rest.
macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),*) $body:expr)*) => { $(
        /// # Safety
        /// The pointers are what NVML's header says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> nvmlReturn_t {
            call(stringify!($name), $body)
        }
    )* };
}

functions! {
    nvmlInit_v2() |_| Ok(())
    nvmlShutdown() |_| Ok(())
    nvmlSystemGetDriverVersion(text: *mut c_char, length: c_uint) |_| {
        // SAFETY: the caller's buffer.
        unsafe { put_text(text, length, "580.159.04") }
    }
    nvmlDeviceGetCount_v2(count: *mut c_uint) |world| {
        // SAFETY: the caller's number.
        unsafe { put(count, world.gpus.len() as c_uint) }
    }
    nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut nvmlDevice_t) |world| {
        let index = index as usize;
        world.gpus.get(index).ok_or(INVALID_ARGUMENT)?;
        // SAFETY: the caller's handle.
        unsafe { put(device, handle(index, None)) }
    }
    nvmlDeviceGetUUID(device: nvmlDevice_t, text: *mut c_char, length: c_uint) |world| {
        let (_, gpu, part) = whole(world, device)?;
        // SAFETY: the caller's buffer.
        unsafe { put_text(text, length, part.map_or(&gpu.uuid, |part| &part.uuid)) }
    }
    nvmlDeviceGetPciInfo_v3(device: nvmlDevice_t, info: *mut nvmlPciInfo_t) |world| {
        let (_, gpu, _) = whole(world, device)?;
        let mut filled = nvmlPciInfo_t {
            busIdLegacy: [0; 16],
            domain: 0,
            bus: gpu.bus,
            device: 0,
            pciDeviceId: 0x2335_10de,
            pciSubSystemId: 0,
            busId: [0; 32],
        };
        // SAFETY: a buffer of 32 bytes.
        unsafe { put_text(filled.busId.as_mut_ptr(), 32, &format!("00000000:{:02X}:00.0", gpu.bus)) }?;
        // SAFETY: the caller's structure.
        unsafe { put(info, filled) }
    }
    nvmlDeviceGetMinorNumber(device: nvmlDevice_t, minor: *mut c_uint) |world| {
        let (_, gpu, _) = whole(world, device)?;
        // SAFETY: the caller's number.
        unsafe { put(minor, gpu.minor) }
    }
    nvmlDeviceGetMemoryInfo(device: nvmlDevice_t, info: *mut nvmlMemory_t) |world| {
        let (_, gpu, _) = whole(world, device)?;
        let (total, used) = (mib(gpu.total), mib(gpu.used() + gpu.reserved));
        // SAFETY: the caller's structure.
        unsafe { put(info, nvmlMemory_t { total, free: total - used, used }) }
    }
    nvmlDeviceGetMemoryInfo_v2(device: nvmlDevice_t, info: *mut nvmlMemory_v2_t) |world| {
        let (_, gpu, part) = whole(world, device)?;
        // SAFETY: the caller's structure.
        let version = unsafe { info.as_ref() }.ok_or(INVALID_ARGUMENT)?.version;
        if version as usize != size_of::<nvmlMemory_v2_t>() | 2 << 24 {
            return Err(25); // argument version mismatch
        }
        let (total, reserved, used) = match part {
            Some(part) => (mib(part.total), 0, mib(part.used)),
            None => (mib(gpu.total), mib(gpu.reserved), mib(gpu.used())),
        };
        // SAFETY: the caller's structure.
        unsafe { put(info, nvmlMemory_v2_t { version, total, reserved, free: total - used - reserved, used }) }
    }
    nvmlDeviceGetComputeRunningProcesses_v2(device: nvmlDevice_t, count: *mut c_uint, list: *mut nvmlProcessInfo_v2_t)
        // SAFETY: the caller's list.
        |world| unsafe { processes(world, device, Kind::Compute, count, list) }
    nvmlDeviceGetComputeRunningProcesses_v3(device: nvmlDevice_t, count: *mut c_uint, list: *mut nvmlProcessInfo_v2_t)
        // SAFETY: the caller's list.
        |world| unsafe { processes(world, device, Kind::Compute, count, list) }
    nvmlDeviceGetGraphicsRunningProcesses_v2(device: nvmlDevice_t, count: *mut c_uint, list: *mut nvmlProcessInfo_v2_t)
        // SAFETY: the caller's list.
        |world| unsafe { processes(world, device, Kind::Graphics, count, list) }
    nvmlDeviceGetGraphicsRunningProcesses_v3(device: nvmlDevice_t, count: *mut c_uint, list: *mut nvmlProcessInfo_v2_t)
        // SAFETY: the caller's list.
        |world| unsafe { processes(world, device, Kind::Graphics, count, list) }
    nvmlDeviceGetMPSComputeRunningProcesses_v3(device: nvmlDevice_t, count: *mut c_uint, list: *mut nvmlProcessInfo_v2_t)
        // SAFETY: the caller's list.
        |world| unsafe { processes(world, device, Kind::Mps, count, list) }
    nvmlDeviceGetPersistenceMode(device: nvmlDevice_t, mode: *mut c_uint) |world| {
        let (_, gpu, _) = whole(world, device)?;
        // SAFETY: the caller's number.
        unsafe { put(mode, gpu.persistence.into()) }
    }
    nvmlDeviceGetMigMode(device: nvmlDevice_t, current: *mut c_uint, pending: *mut c_uint) |world| {
        let (_, gpu, _) = whole(world, device)?;
        let mode = c_uint::from(gpu.mig.ok_or(NOT_SUPPORTED)?);
        // SAFETY: the caller's numbers.
        unsafe { put(current, mode).and_then(|()| put(pending, mode)) }
    }
    nvmlDeviceGetMaxMigDeviceCount(device: nvmlDevice_t, count: *mut c_uint) |world| {
        whole(world, device)?;
        // SAFETY: the caller's number.
        unsafe { put(count, 7) }
    }
    nvmlDeviceGetMigDeviceHandleByIndex(device: nvmlDevice_t, index: c_uint, part: *mut nvmlDevice_t) |world| {
        let (gpu, whole, _) = whole(world, device)?;
        // Places 1, 3, 5: there are gaps on a real GPU too.
        let place = (index % 2 == 1).then_some(index as usize / 2).filter(|place| *place < whole.mig_devices.len());
        // SAFETY: the caller's handle.
        unsafe { put(part, handle(gpu, Some(place.ok_or(NOT_FOUND)?))) }
    }
    nvmlDeviceGetGpuInstanceId(device: nvmlDevice_t, id: *mut c_uint) |world| {
        let (_, _, part) = whole(world, device)?;
        // SAFETY: the caller's number.
        unsafe { put(id, part.ok_or(NOT_SUPPORTED)?.gi) }
    }
    nvmlDeviceGetComputeInstanceId(device: nvmlDevice_t, id: *mut c_uint) |world| {
        let (_, _, part) = whole(world, device)?;
        // SAFETY: the caller's number.
        unsafe { put(id, part.ok_or(NOT_SUPPORTED)?.ci) }
    }
}

/// # Safety
/// `list` has room for `count`, or is null.
unsafe fn processes(
    world: &World,
    device: nvmlDevice_t,
    kind: Kind,
    count: *mut c_uint,
    list: *mut nvmlProcessInfo_v2_t,
) -> Result<(), nvmlReturn_t> {
    let (_, gpu, part) = whole(world, device)?;
    let listed: Vec<&Process> = gpu
        .processes
        .iter()
        .filter(|process| process.kind == kind && !process.unlisted && process.is_there())
        .filter(|process| part.is_none_or(|part| process.gi == Some(part.gi)))
        .collect();
    // SAFETY: the caller's number.
    let room = *unsafe { count.as_ref() }.ok_or(INVALID_ARGUMENT)?;
    // SAFETY: the caller's number.
    unsafe { put(count, listed.len() as c_uint) }?;
    if listed.len() > room as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    for (index, process) in listed.into_iter().enumerate() {
        let info = nvmlProcessInfo_v2_t {
            pid: process.pid,
            usedGpuMemory: process.used.map_or(NOT_AVAILABLE, mib),
            gpuInstanceId: process.gi.unwrap_or(NO_INSTANCE),
            computeInstanceId: process.gi.map_or(NO_INSTANCE, |_| 0),
        };
        // SAFETY: below the room that the caller has.
        unsafe { put(list.add(index), info) }?;
    }
    Ok(())
}
