//! Programs that do nothing, on hooks where others are or were: what the hooks cost by themselves.

use std::{
    ffi::CString,
    fs::{self, File},
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
};

use anyhow::{Context as _, Result, bail, ensure};
use walkdir::WalkDir;

use super::bpf::{bpf, command, get, owned};

mod kind {
    pub(super) const KPROBE: u32 = 2;
    pub(super) const CGROUP_DEVICE: u32 = 15;
    pub(super) const RAW_TRACEPOINT: u32 = 17;
    pub(super) const TRACING: u32 = 26;
}

mod link {
    pub(super) const RAW_TRACEPOINT: u32 = 1;
    pub(super) const TRACING: u32 = 2;
    pub(super) const CGROUP: u32 = 3;
    pub(super) const PERF_EVENT: u32 = 7;
}

mod attach {
    pub(super) const CGROUP_DEVICE: u32 = 6;
    pub(super) const TRACE_RAW_TP: u32 = 23;
    pub(super) const PERF_EVENT: u32 = 41;
}

mod perf {
    pub(super) const KPROBE: u32 = 3;
    pub(super) const KRETPROBE: u32 = 4;
}

/// What a program is attached to, as the kernel tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Hook {
    Kprobe {
        symbol: String,
        returns: bool,
    },
    /// fentry, fexit or `tp_btf`: a type of attachment, and the number of what it is attached to in the kernel's BTF.
    Tracing {
        attach: u32,
        target: u32,
    },
    RawTracepoint(String),
    CgroupDevice,
}

/// An attached program; it goes when dropped.
pub(super) struct Empty {
    _descriptors: Vec<OwnedFd>,
}

/// A tracer of all system calls that does nothing with what it sees: any other costs more.
pub(super) const EVERY_SYSTEM_CALL: [&str; 2] = ["sys_enter", "sys_exit"];

/// The hooks of all links pinned below a directory, by name. Wants a kernel that tells a kprobe's function (6.6).
pub(super) fn hooks(pins: &Path) -> Result<Vec<Hook>> {
    let mut hooks = Vec::new();
    for entry in WalkDir::new(pins).sort_by_file_name() {
        let entry = entry?;
        let in_links = entry.path().parent().is_some_and(|parent| parent.ends_with("links"));
        if entry.file_type().is_file() && in_links {
            hooks.push(hook(entry.path()).with_context(|| format!("what is {}", entry.path().display()))?);
        }
    }
    ensure!(!hooks.is_empty(), "no link is pinned below {}", pins.display());
    Ok(hooks)
}

pub(super) fn attach(hook: &Hook, cgroup: &Path) -> Result<Empty> {
    let descriptors =
        match hook {
            Hook::Kprobe { symbol, returns } => kprobe(symbol, *returns),
            Hook::Tracing { attach, target } => load(kind::TRACING, *attach, *target, 0)
                .and_then(|program| Ok(vec![open_link(&program, None)?, program])),
            Hook::RawTracepoint(name) => load(kind::RAW_TRACEPOINT, 0, 0, 0)
                .and_then(|program| Ok(vec![open_link(&program, Some(name))?, program])),
            Hook::CgroupDevice => File::open(cgroup).and_then(|cgroup| {
                // One says that the open may go on.
                let program = load(kind::CGROUP_DEVICE, 0, 0, 1)?;
                Ok(vec![create_link(&program, cgroup.as_raw_fd(), attach::CGROUP_DEVICE)?, program])
            }),
        };
    let descriptors = descriptors.with_context(|| format!("attach an empty program to {hook:?}"))?;
    Ok(Empty { _descriptors: descriptors })
}

/// The attributes of a load up to `attach_btf_id`, with a member of eight bytes for what stays zero.
#[repr(C)]
#[derive(Default)]
struct Load {
    kind: u32,
    instructions: u32,
    code: u64,
    license: u64,
    log: [u64; 2],
    kernel_and_flags: u64,
    name: [u8; 16],
    interface: u32,
    attach: u32,
    debug: [u64; 4],
    line_count: u32,
    target: u32,
}

/// `r0 = answer; exit`
fn load(kind: u32, attach: u32, target: u32, answer: u32) -> io::Result<OwnedFd> {
    const MOVE: u64 = 0xb7;
    const EXIT: u64 = 0x95;
    let code = [u64::from(answer) << 32 | MOVE, EXIT];
    let mut attributes = Load {
        kind,
        instructions: code.len() as u32,
        code: code.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
        name: *b"empty\0\0\0\0\0\0\0\0\0\0\0",
        attach,
        target,
        ..Load::default()
    };
    bpf(command::PROG_LOAD, &mut attributes).map(owned)
}

fn open_link(program: &OwnedFd, name: Option<&str>) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Open {
        name: u64,
        program: u32,
        _pad: u32,
    }
    let name = name.map(CString::new).transpose()?;
    let at = name.as_ref().map_or(0, |name| name.as_ptr() as u64);
    bpf(command::RAW_TRACEPOINT_OPEN, &mut Open { name: at, program: program.as_raw_fd() as u32, _pad: 0 }).map(owned)
}

fn create_link(program: &OwnedFd, target: i32, attach: u32) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Create {
        program: u32,
        target: i32,
        attach: u32,
        flags: u32,
        cookie: u64,
    }
    let program = program.as_raw_fd() as u32;
    bpf(command::LINK_CREATE, &mut Create { program, target, attach, flags: 0, cookie: 0 }).map(owned)
}

/// By the perf event of the kprobe unit, as aya does it.
fn kprobe(symbol: &str, returns: bool) -> io::Result<Vec<OwnedFd>> {
    /// `struct perf_event_attr` up to `config2`.
    #[repr(C)]
    #[derive(Default)]
    struct Event {
        kind: u32,
        size: u32,
        config: u64,
        _sampling: [u64; 5],
        function: u64,
        offset: u64,
    }
    /// `PERF_FLAG_FD_CLOEXEC`
    const FD_CLOEXEC: u64 = 8;
    let kind = fs::read_to_string("/sys/bus/event_source/devices/kprobe/type")?;
    let kind = kind.trim().parse().map_err(|_error| io::Error::from(io::ErrorKind::InvalidData))?;
    let function = CString::new(symbol)?;
    let event = Event {
        kind,
        size: size_of::<Event>() as u32,
        config: u64::from(returns),
        function: function.as_ptr() as u64,
        ..Event::default()
    };
    // SAFETY: the attributes and the name in them outlive the call; the size is in them.
    let event = unsafe { libc::syscall(libc::SYS_perf_event_open, &raw const event, -1, 0, -1, FD_CLOEXEC) };
    if event < 0 {
        return Err(io::Error::last_os_error());
    }
    let event = owned(event);
    let program = load(kind::KPROBE, 0, 0, 0)?;
    Ok(vec![create_link(&program, event.as_raw_fd(), attach::PERF_EVENT)?, event, program])
}

#[repr(C)]
struct Info {
    fd: u32,
    length: u32,
    at: u64,
}

/// `struct bpf_link_info`; what is in `rest` depends on the type.
#[repr(C)]
#[derive(Default)]
struct LinkInfo {
    kind: u32,
    id: u32,
    program: u32,
    _pad: u32,
    rest: [u64; 8],
}

fn link_info(link: &OwnedFd, rest: [u64; 8]) -> io::Result<LinkInfo> {
    let mut info = LinkInfo { rest, ..LinkInfo::default() };
    let length = size_of::<LinkInfo>() as u32;
    bpf(command::OBJ_GET_INFO_BY_FD, &mut Info { fd: link.as_raw_fd() as u32, length, at: (&raw mut info) as u64 })?;
    Ok(info)
}

/// The name that a link's information points to, when its address is word `at` of the rest.
fn name(link: &OwnedFd, at: usize) -> Result<String> {
    let mut name = [0_u8; 128];
    let mut rest = [0; 8];
    rest[at] = name.as_mut_ptr() as u64;
    rest[at + 1] = name.len() as u64;
    link_info(link, rest)?;
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    let name = std::str::from_utf8(&name[..end])?;
    ensure!(!name.is_empty(), "the kernel does not tell its name");
    Ok(name.to_owned())
}

fn hook(pin: &Path) -> Result<Hook> {
    let link = get(pin)?;
    let LinkInfo { kind, id: _, program, _pad, rest } = link_info(&link, [0; 8])?;
    let low = |word: u64| word as u32;
    Ok(match kind {
        link::PERF_EVENT => {
            let returns = match low(rest[0]) {
                perf::KPROBE => false,
                perf::KRETPROBE => true,
                other => bail!("a perf event of type {other}"),
            };
            Hook::Kprobe { symbol: name(&link, 1)?, returns }
        }
        link::TRACING => Hook::Tracing { attach: low(rest[0]), target: low(rest[1]) },
        link::CGROUP => Hook::CgroupDevice,
        // Also the link of a `tp_btf` program, which knows its tracepoint by number.
        link::RAW_TRACEPOINT => match program_info(program)? {
            (kind::TRACING, target) => Hook::Tracing { attach: attach::TRACE_RAW_TP, target },
            _ => Hook::RawTracepoint(name(&link, 0)?),
        },
        other => bail!("a link of type {other}"),
    })
}

/// Type and `attach_btf_id` of a program.
fn program_info(id: u32) -> io::Result<(u32, u32)> {
    /// Of `attach_btf_id` in `struct bpf_prog_info`, in words of four bytes.
    const TARGET: usize = 224 / 4;
    let program = owned(bpf(command::PROG_GET_FD_BY_ID, &mut [id, 0, 0, 0])?);
    let mut info = [0_u32; TARGET + 2];
    let length = size_of_val(&info) as u32;
    bpf(
        command::OBJ_GET_INFO_BY_FD,
        &mut Info { fd: program.as_raw_fd() as u32, length, at: info.as_mut_ptr() as u64 },
    )?;
    Ok((info[0], info[TARGET]))
}
