//! Passing descriptors: unix sockets and seccomp notifications.
use std::{io, mem, ptr};

use super::sys::{Fd, Pid};

#[repr(C, align(8))]
struct Control([u8; 64]);

fn message(bytes: &mut libc::iovec, control: &mut Control) -> libc::msghdr {
    // SAFETY: an all-zero header is valid; the two parts are set below.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = ptr::from_mut(bytes);
    header.msg_iovlen = 1;
    header.msg_control = ptr::from_mut(control).cast();
    header.msg_controllen = 64;
    header
}

/// Sends a descriptor with eight bytes beside it.
pub fn send(socket: Fd, fd: Fd, tag: u64) -> io::Result<()> {
    let mut tag = tag.to_ne_bytes();
    let mut part = libc::iovec { iov_base: tag.as_mut_ptr().cast(), iov_len: tag.len() };
    let mut control = Control([0; 64]);
    let mut header = message(&mut part, &mut control);
    // SAFETY: the control buffer has room for one descriptor, and all buffers outlive the call.
    let sent = unsafe {
        header.msg_controllen = libc::CMSG_SPACE(4) as usize;
        let first = libc::CMSG_FIRSTHDR(&raw const header);
        (*first).cmsg_level = libc::SOL_SOCKET;
        (*first).cmsg_type = libc::SCM_RIGHTS;
        (*first).cmsg_len = libc::CMSG_LEN(4) as usize;
        ptr::write_unaligned(libc::CMSG_DATA(first).cast::<i32>(), fd);
        libc::sendmsg(socket, &raw const header, libc::MSG_DONTWAIT)
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Receives a descriptor and its tag; `None` when nothing waits and `wait` is not asked for, or at the end.
pub fn receive(socket: Fd, wait: bool) -> Option<(Fd, u64)> {
    let mut tag = [0_u8; 8];
    let mut part = libc::iovec { iov_base: tag.as_mut_ptr().cast(), iov_len: tag.len() };
    let mut control = Control([0; 64]);
    let mut header = message(&mut part, &mut control);
    // SAFETY: all buffers outlive the call; the control header is looked at only when the kernel wrote one.
    unsafe {
        let flags = if wait { 0 } else { libc::MSG_DONTWAIT };
        if libc::recvmsg(socket, &raw mut header, flags) <= 0 {
            return None;
        }
        let first = libc::CMSG_FIRSTHDR(&raw const header);
        if first.is_null() || (*first).cmsg_type != libc::SCM_RIGHTS {
            return None;
        }
        Some((ptr::read_unaligned(libc::CMSG_DATA(first).cast::<i32>()), u64::from_ne_bytes(tag)))
    }
}

/// A socket that is connected with itself.
pub fn mailbox() -> Fd {
    let must = |what: &str, ret: i32| assert!(ret >= 0, "{what}: {}", io::Error::last_os_error());
    // SAFETY: an all-zero address is valid; both calls get the length of what they may read or write. Only the family is
    // bound: the kernel chooses a name.
    unsafe {
        let socket = libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0);
        must("socket", socket);
        let mut address: libc::sockaddr_un = mem::zeroed();
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        let mut length = size_of::<libc::sa_family_t>() as libc::socklen_t;
        must("bind", libc::bind(socket, (&raw const address).cast(), length));
        length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
        must("getsockname", libc::getsockname(socket, (&raw mut address).cast(), &raw mut length));
        must("connect", libc::connect(socket, (&raw const address).cast(), length));
        socket
    }
}

/// Receives a message without the descriptor in it, which the kernel then drops.
pub fn discard(socket: Fd) {
    let mut tag = [0_u8; 8];
    // SAFETY: the buffer is live and of the length given.
    let got = unsafe { libc::recv(socket, tag.as_mut_ptr().cast(), tag.len(), libc::MSG_DONTWAIT) };
    assert!(got > 0, "recv: {}", io::Error::last_os_error());
}

/// Makes the socket tell who sent a message.
pub fn ask_credentials(socket: Fd) {
    let on = 1_i32;
    // SAFETY: the option value is a live integer of the given size.
    let ret = unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, libc::SO_PASSCRED, (&raw const on).cast(), 4) };
    assert_eq!(ret, 0, "SO_PASSCRED");
}

/// Receives one message; the sender's pid as this process's namespace sees it.
pub fn receive_sender(socket: Fd) -> Pid {
    let mut bytes = [0_u8; 8];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 64]);
    let mut header = message(&mut part, &mut control);
    // SAFETY: as in `receive`.
    unsafe {
        assert!(libc::recvmsg(socket, &raw mut header, 0) > 0, "recvmsg: {}", io::Error::last_os_error());
        let first = libc::CMSG_FIRSTHDR(&raw const header);
        assert!(!first.is_null() && (*first).cmsg_type == libc::SCM_CREDENTIALS, "no credentials");
        ptr::read_unaligned(libc::CMSG_DATA(first).cast::<libc::ucred>()).pid
    }
}

const SECCOMP_SET_MODE_FILTER: i32 = 1;
const SECCOMP_FILTER_FLAG_NEW_LISTENER: i32 = 1 << 3;
const SECCOMP_RET_USER_NOTIF: u32 = 0x7fc0_0000;
const SECCOMP_RET_ALLOW: u32 = 0x7fff_0000;
const NOTIF_RECV: u64 = 0xc050_2100;
const NOTIF_SEND: u64 = 0xc018_2101;
const NOTIF_ADDFD: u64 = 0x4018_2103;
const ADDFD_FLAG_SETFD: u32 = 1;

/// Makes `getppid` of the calling process wait for a supervisor; the supervisor's descriptor.
pub fn listen_getppid() -> io::Result<Fd> {
    let step = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_getppid as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, SECCOMP_RET_USER_NOTIF),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: 4, filter: filter.as_mut_ptr() };
    super::sys::prctl(libc::PR_SET_NO_NEW_PRIVS, 1)?;
    // SAFETY: the program and its instructions outlive the call, which copies them.
    let ret = unsafe {
        libc::syscall(libc::SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &raw const program)
    };
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(ret as Fd) }
}

/// The trapped call.
pub fn call_getppid() {
    // SAFETY: no memory is passed.
    unsafe { libc::syscall(libc::SYS_getppid) };
}

fn control<T>(listener: Fd, request: u64, argument: &mut T) -> io::Result<i32> {
    // SAFETY: each request is used with the structure of the size it encodes.
    let ret = unsafe { libc::ioctl(listener, request, ptr::from_mut(argument)) };
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(ret) }
}

/// Answers one trapped call, putting `fd` into the caller's table: at any number, or over `at`.
pub fn add_fd(listener: Fd, fd: Fd, at: Option<Fd>) -> io::Result<Fd> {
    #[repr(C)]
    struct Notification {
        id: u64,
        rest: [u64; 9],
    }
    #[repr(C)]
    struct AddFd {
        id: u64,
        flags: u32,
        from: u32,
        to: u32,
        to_flags: u32,
    }
    #[repr(C)]
    struct Answer {
        id: u64,
        value: i64,
        error: i32,
        flags: u32,
    }
    let mut notification = Notification { id: 0, rest: [0; 9] };
    control(listener, NOTIF_RECV, &mut notification)?;
    let id = notification.id;
    let flags = if at.is_some() { ADDFD_FLAG_SETFD } else { 0 };
    let added = control(
        listener,
        NOTIF_ADDFD,
        &mut AddFd { id, flags, from: fd as u32, to: at.unwrap_or(0) as u32, to_flags: 0 },
    );
    control(listener, NOTIF_SEND, &mut Answer { id, value: 5, error: 0, flags: 0 })?;
    added
}
