//! Copies of a descriptor within one table.
use super::{
    super::{
        sys::{self, Fd, O_CLOEXEC, O_RDONLY, O_RDWR, pid},
        truth::{Skip, Stage, Truth},
    },
    Named,
};

pub(super) const OPS: &[Named] = &[
    ("dup", dup),
    ("dup2_to_unused", dup2_to_unused),
    ("dup2_device_over_device", dup2_device_over_device),
    ("dup2_regular_over_device", dup2_regular_over_device),
    ("dup2_device_over_regular", dup2_device_over_regular),
    ("dup2_same_and_bad", dup2_same_and_bad),
    ("dup3_device_over_device", dup3_device_over_device),
    ("dup2_int80", dup2_int80),
    ("fcntl_dupfd", fcntl_dupfd),
    ("dup_at_the_limit", dup_at_the_limit),
    ("close_twice", close_twice),
];

fn mine(files: usize, fds: usize) -> Truth {
    Truth::files(files).fds(pid(), fds)
}

fn dup(s: &Stage) -> Result<(), Skip> {
    let a = s.open(O_RDWR);
    let b = sys::dup(a);
    s.at("dup", &mine(1, 2));
    sys::close(a);
    s.at("close_original", &mine(1, 1));
    sys::close(b);
    s.at("close_copy", &Truth::none());
    Ok(())
}

fn dup2_to_unused(s: &Stage) -> Result<(), Skip> {
    let a = s.open(O_RDWR);
    sys::dup2(a, 50);
    s.at("dup2", &mine(1, 2));
    sys::close(a);
    s.at("close_original", &mine(1, 1));
    sys::dup2(50, 700);
    s.at("dup2_far", &mine(1, 2));
    sys::close(50);
    sys::close(700);
    s.at("close_copies", &Truth::none());
    Ok(())
}

fn dup2_device_over_device(s: &Stage) -> Result<(), Skip> {
    let (a, b) = (s.open(O_RDWR), s.open(O_RDWR));
    s.at("open_two", &mine(2, 2));
    sys::dup2(a, b);
    s.at("dup2", &mine(1, 2));
    sys::dup2(a, b);
    s.at("dup2_again", &mine(1, 2));
    sys::close(a);
    sys::close(b);
    s.at("close_both", &Truth::none());
    Ok(())
}

fn regular() -> Fd {
    sys::open("/proc/self/exe", O_RDONLY)
}

fn dup2_regular_over_device(s: &Stage) -> Result<(), Skip> {
    let (a, b) = (regular(), s.open(O_RDWR));
    s.at("open", &mine(1, 1));
    sys::dup2(a, b);
    s.at("dup2", &Truth::none());
    sys::close(a);
    sys::close(b);
    s.at("close_both", &Truth::none());
    Ok(())
}

fn dup2_device_over_regular(s: &Stage) -> Result<(), Skip> {
    let (a, b) = (regular(), s.open(O_RDWR));
    sys::dup2(b, a);
    s.at("dup2", &mine(1, 2));
    sys::close(a);
    sys::close(b);
    s.at("close_both", &Truth::none());
    Ok(())
}

fn dup2_same_and_bad(s: &Stage) -> Result<(), Skip> {
    let a = s.open(O_RDWR);
    sys::dup2(a, a);
    s.at("dup2_same", &mine(1, 1));
    assert!(sys::try_dup2(999, a).is_err(), "999 is not open");
    s.at("dup2_bad", &mine(1, 1));
    assert!(sys::try_dup2(a, 1 << 30).is_err(), "beyond the limit");
    s.at("dup2_beyond", &mine(1, 1));
    sys::close(a);
    s.at("close", &Truth::none());
    Ok(())
}

fn dup3_device_over_device(s: &Stage) -> Result<(), Skip> {
    let (a, b) = (s.open(O_RDWR), s.open(O_RDWR));
    sys::dup3(a, b, O_CLOEXEC);
    s.at("dup3", &mine(1, 2));
    sys::close(a);
    sys::close(b);
    s.at("close_both", &Truth::none());
    Ok(())
}

fn dup2_int80(s: &Stage) -> Result<(), Skip> {
    let trial = sys::fork();
    if trial == 0 {
        sys::exit(i32::from(sys::dup2_int80(0, 50) != 50));
    }
    if sys::reap(trial) != 0 {
        return Err(Skip("the kernel has no 32-bit system calls".into()));
    }
    let a = s.open(O_RDWR);
    assert_eq!(sys::dup2_int80(a, 50), 50, "int 0x80 dup2");
    s.at("dup2", &mine(1, 2));
    let b = s.open(O_RDWR);
    sys::dup2_int80(b, 50);
    s.at("dup2_over", &mine(2, 3));
    sys::close(50);
    sys::close(b);
    s.at("close_copies", &mine(1, 1));
    sys::close(a);
    s.at("close", &Truth::none());
    Ok(())
}

fn fcntl_dupfd(s: &Stage) -> Result<(), Skip> {
    let a = s.open(O_RDWR);
    let b = sys::fcntl(a, libc::F_DUPFD, 60)? as Fd;
    s.at("F_DUPFD", &mine(1, 2));
    let c = sys::fcntl(a, libc::F_DUPFD_CLOEXEC, 60)? as Fd;
    s.at("F_DUPFD_CLOEXEC", &mine(1, 3));
    assert!(sys::fcntl(a, libc::F_DUPFD, 1 << 30).is_err(), "beyond the limit");
    s.at("F_DUPFD_beyond", &mine(1, 3));
    for fd in [a, b, c] {
        sys::close(fd);
    }
    s.at("close_three", &Truth::none());
    Ok(())
}

/// No number is left: the copy fails after the kernel has taken hold of the file.
fn dup_at_the_limit(s: &Stage) -> Result<(), Skip> {
    let a = s.open(O_RDWR);
    let old = sys::soft_limit_files(a as u64 + 1);
    let refused = |result: std::io::Result<i64>| {
        assert_eq!(result.err().and_then(|error| error.raw_os_error()), Some(libc::EMFILE));
    };
    refused(sys::try_dup(a));
    s.at("dup_EMFILE", &mine(1, 1));
    refused(sys::try_open(&s.dev, O_RDWR).map(i64::from));
    s.at("open_EMFILE", &mine(1, 1));
    sys::soft_limit_files(old);
    sys::close(a);
    s.at("close", &Truth::none());
    Ok(())
}

fn close_twice(s: &Stage) -> Result<(), Skip> {
    let (a, b) = (s.open(O_RDWR), s.open(O_RDWR));
    sys::close(b);
    assert!(sys::try_close(b).is_err(), "closed already");
    s.at("close_twice", &mine(1, 1));
    sys::close(a);
    s.at("close", &Truth::none());
    Ok(())
}
