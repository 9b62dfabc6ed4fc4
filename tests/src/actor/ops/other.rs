//! Terminals, locks, names, and many things at once.
use libc::{F_SETLK, F_UNLCK, F_WRLCK};

use super::{
    super::{
        slots::Slots,
        sys::{self, Fd, O_RDWR, pid},
        truth::{Skip, Stage, Truth},
    },
    Named,
};
use crate::random::Random;

pub(super) const OPS: &[Named] = &[
    ("terminal_peer", terminal_peer),
    ("posix_lock", posix_lock),
    ("posix_lock_sticky", posix_lock_sticky),
    ("rename", rename),
    ("stress", stress),
];

/// TIOCGPTPEER opens the other side of a terminal without a path. Speaks of 5:2 and 136:N.
fn terminal_peer(s: &Stage) -> Result<(), Skip> {
    const TIOCSPTLCK: u64 = 0x4004_5431;
    const TIOCGPTN: u64 = 0x8004_5430;
    const TIOCGPTPEER: u64 = 0x5441;
    let near =
        sys::try_open("/dev/ptmx", O_RDWR | libc::O_NOCTTY).map_err(|error| Skip(format!("/dev/ptmx: {error}")))?;
    let (mut number, unlocked) = (0_u32, 0_i32);
    // SAFETY: both requests take a pointer to a live 32-bit integer; the third takes flags.
    let far = unsafe {
        libc::ioctl(near, TIOCGPTN, &raw mut number);
        libc::ioctl(near, TIOCSPTLCK, &raw const unlocked);
        libc::ioctl(near, TIOCGPTPEER, O_RDWR | libc::O_NOCTTY)
    };
    if far < 0 {
        return Err(Skip("no TIOCGPTPEER".into()));
    }
    let peer = format!("136:{number}");
    let (one, none) = (Truth::files(1).fds(pid(), 1), Truth::none());
    s.at_all("open_peer", [("5:2", &one), (peer.as_str(), &one)]);
    sys::close(far);
    s.at_all("close_peer", [("5:2", &one), (peer.as_str(), &none)]);
    sys::close(near);
    s.at_all("close", [("5:2", &none), (peer.as_str(), &none)]);
    Ok(())
}

fn lock(fd: Fd, kind: i32) {
    let range = libc::flock { l_type: kind as i16, l_whence: libc::SEEK_SET as i16, l_start: 0, l_len: 1, l_pid: 0 };
    // SAFETY: the structure is live. A device may refuse locks; the kernel's path is the same.
    unsafe { libc::fcntl(fd, F_SETLK, &raw const range) };
}

fn posix_lock(s: &Stage) -> Result<(), Skip> {
    let a = s.open(O_RDWR);
    lock(a, F_WRLCK);
    s.at("lock", &Truth::files(1).fds(pid(), 1));
    lock(a, F_UNLCK);
    s.at("unlock", &Truth::files(1).fds(pid(), 1));
    sys::close(a);
    s.at("close", &Truth::none());
    Ok(())
}

/// Once anybody has locked the inode, the kernel also drops locks when the last reference goes: one more event
/// that is not a close of a descriptor.
fn posix_lock_sticky(s: &Stage) -> Result<(), Skip> {
    let (a, b) = (s.open(O_RDWR), s.open(O_RDWR));
    lock(a, F_WRLCK);
    sys::close(a);
    s.at("close_locked", &Truth::files(1).fds(pid(), 1));
    let copy = sys::dup(b);
    sys::close(b);
    s.at("close_copy", &Truth::files(1).fds(pid(), 1));
    sys::close(copy);
    s.at("close_last", &Truth::none());
    let again = s.open(O_RDWR);
    s.at("open_after", &Truth::files(1).fds(pid(), 1));
    sys::close(again);
    s.at("close_after", &Truth::none());
    Ok(())
}

fn rename(s: &Stage) -> Result<(), Skip> {
    let a = s.open(O_RDWR);
    sys::set_comm(b"renamed");
    s.at("rename", &Truth::files(1).fds(pid(), 1));
    let thread = std::thread::spawn(|| sys::set_comm(b"other"));
    thread.join().map_err(|_| "thread")?;
    s.at("rename_thread", &Truth::files(1).fds(pid(), 1));
    sys::close(a);
    s.at("close", &Truth::none());
    Ok(())
}

/// Four threads change one table as fast as they can, with forks and spawns in between. Each owns a range of
/// numbers, so the sum is known when they have stopped.
fn stress(s: &Stage) -> Result<(), Skip> {
    sys::soft_limit_files(1024);
    let mut ranges: Vec<Slots> = (0..4).map(|n| Slots::new(&s.dev, 200 + 100 * n, Random::new(n as u64 + 1))).collect();
    for round in 0..4 {
        std::thread::scope(|scope| {
            for range in &mut ranges {
                scope.spawn(move || churn(range));
            }
        });
        let fds = ranges.iter().map(Slots::count).sum();
        let files: std::collections::BTreeSet<u64> =
            ranges.iter().flat_map(Slots::held).map(|(_, held)| held.id).collect();
        s.at(&format!("round_{round}"), &Truth::files(files.len()).fds(pid(), fds));
    }
    sys::close_range(200, u32::MAX, 0)?;
    s.at("close_all", &Truth::none());
    Ok(())
}

fn churn(range: &mut Slots) {
    for _ in 0..150 {
        match range.random.below(40) {
            0 => {
                let mut copy = range.clone();
                let child = sys::fork();
                if child == 0 {
                    for _ in 0..5 {
                        copy.step();
                    }
                    sys::exit(0);
                }
                sys::reap(child);
            }
            1 => {
                let arguments = ["gpureap-actor", "noop"].map(sys::cstr);
                sys::reap(sys::spawn_self(&arguments, None));
            }
            _ => range.step(),
        }
    }
}
