//! What the tasks of the oracle's play do.
use std::{
    collections::BTreeMap,
    sync::{Mutex, OnceLock, PoisonError},
};

use super::{
    pass,
    ring::Ring,
    sys::{self, CLOSE_RANGE_CLOEXEC, CLOSE_RANGE_UNSHARE, Fd, O_CLOEXEC, O_PATH, O_RDWR, Pid},
    task,
};
use crate::oracle::{
    model::RING_SLOTS,
    step::{Act, Area, Dev, RangeMode, Task},
};

/// What is left to do for whoever was told.
pub(super) enum Next {
    Done,
    /// This is the new process.
    Copied(Task),
    /// This is the new process, on the old one's table.
    Entered(Task),
    Thread(Task),
    Exec,
}

/// Mapped rings by number; a fork copies them.
static RINGS: Mutex<BTreeMap<u32, Ring>> = Mutex::new(BTreeMap::new());

fn node(dev: Dev) -> &'static str {
    static NODES: OnceLock<Vec<String>> = OnceLock::new();
    let nodes = NODES.get_or_init(|| {
        let text = std::env::var(task::NODES).expect("the devices' nodes");
        text.split(':').map(str::to_owned).collect()
    });
    &nodes[dev.0 as usize]
}

/// Gives a new descriptor its number.
fn place(fd: Fd, at: Fd, cloexec: bool) {
    if fd == at {
        sys::fcntl(fd, libc::F_SETFD, i32::from(cloexec)).expect("F_SETFD");
    } else {
        sys::dup3(fd, at, if cloexec { O_CLOEXEC } else { 0 });
        sys::close(fd);
    }
}

/// Far from all else and from each other, so that the kernel does not join two areas.
const fn address(area: Area) -> usize {
    0x1000_0000_0000 + area.0 as usize * 0x1_0000
}

fn spin(dev: Dev, times: u32) {
    for _ in 0..times {
        let fd = sys::open(node(dev), O_RDWR);
        let copy = sys::dup(fd);
        sys::close(fd);
        sys::close(copy);
    }
}

pub(super) fn perform(act: &Act, pid: Option<Pid>) -> Next {
    match *act {
        Act::Open { dev, at, cloexec } => {
            place(sys::open(node(dev), O_RDWR | if cloexec { O_CLOEXEC } else { 0 }), at, cloexec);
        }
        Act::OpenPath { dev, at } => place(sys::open(node(dev), O_PATH), at, false),
        Act::Spin { dev, times } => spin(dev, times),
        Act::Dup2 { from, to } => _ = sys::dup2(from, to),
        Act::Dup3 { from, to } => _ = sys::dup3(from, to, O_CLOEXEC),
        Act::Fcntl { from, to } => {
            let fd = sys::fcntl(from, libc::F_DUPFD, to).expect("F_DUPFD") as Fd;
            assert_eq!(fd, to, "the number is free");
        }
        Act::Close { fd } => sys::close(fd),
        Act::CloseRange { low, high, mode } => {
            let flags = match mode {
                RangeMode::Close => 0,
                RangeMode::Unshare => CLOSE_RANGE_UNSHARE,
                RangeMode::Cloexec => CLOSE_RANGE_CLOEXEC,
            };
            sys::close_range(low, high as u32, flags).expect("close_range");
        }
        Act::Cloexec { fd, on } => _ = sys::fcntl(fd, libc::F_SETFD, i32::from(on)).expect("F_SETFD"),
        Act::Lock { fd } => sys::lock(fd),
        Act::Fork { child } => {
            if sys::fork() == 0 {
                return Next::Copied(child);
            }
        }
        Act::Vfork { child } => {
            let arguments = ["gpureap-actor", "task", &child.to_string()].map(sys::cstr);
            let path = sys::own_path();
            sys::vfork(&mut || {
                sys::try_exec(path, &arguments);
                127
            });
        }
        Act::VforkExit => sys::await_end(sys::vfork(&mut || 0)),
        Act::Spawn => sys::await_end(sys::spawn_self(&["gpureap-actor", "noop"].map(sys::cstr), None)),
        Act::Share { child } => {
            if sys::fork_sharing_files() == 0 {
                return Next::Entered(child);
            }
        }
        Act::Thread { child } => return Next::Thread(child),
        Act::Unshare => sys::unshare(libc::CLONE_FILES).expect("unshare"),
        Act::Exec => return Next::Exec,
        Act::Exit => sys::exit(0),
        Act::ExitThread => sys::exit_thread(),
        Act::Mailbox { at } => place(pass::mailbox(), at, false),
        Act::Send { fd, mailbox } => pass::send(mailbox, fd, 0).expect("send"),
        Act::Receive { mailbox, at } => {
            place(pass::receive(mailbox, false).expect("something waits").0, at, false);
        }
        Act::Discard { mailbox } => pass::discard(mailbox),
        Act::Take { from: _, fd, at } => {
            let process = sys::pidfd_open(pid.expect("a pid to take from")).expect("pidfd_open");
            let taken = sys::pidfd_getfd(process, fd).expect("pidfd_getfd");
            sys::close(process);
            place(taken, at, false);
        }
        Act::Map { area, fd, pages } => sys::map_at(address(area), pages as usize, fd),
        Act::Unmap { area } => sys::unmap_at(address(area), 3),
        Act::Punch { area } => sys::unmap_at(address(area) + sys::PAGE, 1),
        Act::Ring { .. }
        | Act::RingOpen { .. }
        | Act::RingClose { .. }
        | Act::RingOpenDirect { .. }
        | Act::RingCloseDirect { .. }
        | Act::RingRegister { .. } => ring(act),
    }
    Next::Done
}

/// The ring, to be used by that descriptor.
fn mapped(rings: &mut BTreeMap<u32, Ring>, ring: u32, via: Fd) -> &Ring {
    let ring = rings.get_mut(&ring).expect("a ring that is mapped here");
    ring.use_descriptor(via);
    ring
}

fn ring(act: &Act) {
    let mut rings = RINGS.lock().unwrap_or_else(PoisonError::into_inner);
    match *act {
        Act::Ring { ring, at } => {
            let mut made = Ring::new(0).expect("io_uring");
            made.register(&[-1; RING_SLOTS]).expect("a table of the ring's own");
            place(made.descriptor(), at, false);
            made.use_descriptor(at);
            rings.insert(ring.0, made);
        }
        Act::RingOpen { ring, via, dev, at } => {
            let fd = mapped(&mut rings, ring.0, via).open(node(dev), 0, None).expect("open by ring");
            place(fd, at, false);
        }
        Act::RingClose { ring, via, fd } => {
            mapped(&mut rings, ring.0, via).close(fd, 0).expect("close by ring");
        }
        Act::RingOpenDirect { ring, via, dev, slot } => {
            mapped(&mut rings, ring.0, via).open(node(dev), 0, Some(slot)).expect("open into the ring");
        }
        Act::RingCloseDirect { ring, via, slot } => {
            mapped(&mut rings, ring.0, via).close_direct(slot).expect("close in the ring");
        }
        Act::RingRegister { via, slot, fd } => Ring::put(via, slot, fd).expect("a file into the ring"),
        _ => panic!("not an act of a ring: {act}"),
    }
}
