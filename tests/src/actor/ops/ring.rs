//! Files opened, kept and closed by io_uring.
use super::{
    super::{
        ring::{Ring, SETUP_SQPOLL, SQE_ASYNC},
        sys::{self, O_RDWR, pid},
        truth::{Skip, Stage, Truth},
    },
    Named,
};

pub(super) const OPS: &[Named] = &[
    ("ring_open", ring_open),
    ("ring_open_async", ring_open_async),
    ("ring_open_sqpoll", ring_open_sqpoll),
    ("ring_open_direct", ring_open_direct),
    ("ring_registered", ring_registered),
    ("ring_install", ring_install),
];

fn ring(flags: u32) -> Result<Ring, Skip> {
    Ring::new(flags).map_err(|error| Skip(format!("io_uring: {error}")))
}

fn open_close(s: &Stage, setup: u32, flags: u8) -> Result<(), Skip> {
    let ring = ring(setup)?;
    s.at("start", &Truth::none());
    let a = ring.open(&s.dev, flags, None)?;
    s.at("open", &Truth::files(1).fds(pid(), 1));
    ring.close(a, flags)?;
    s.at("close", &Truth::none());
    let b = ring.open(&s.dev, flags, None)?;
    s.at("open_again", &Truth::files(1).fds(pid(), 1));
    ring.end();
    s.at("ring_close", &Truth::files(1).fds(pid(), 1));
    sys::close(b);
    s.at("plain_close", &Truth::none());
    Ok(())
}

fn ring_open(s: &Stage) -> Result<(), Skip> {
    open_close(s, 0, 0)
}

fn ring_open_async(s: &Stage) -> Result<(), Skip> {
    open_close(s, 0, SQE_ASYNC)
}

fn ring_open_sqpoll(s: &Stage) -> Result<(), Skip> {
    open_close(s, SETUP_SQPOLL, 0)
}

fn ring_open_direct(s: &Stage) -> Result<(), Skip> {
    let ring = ring(0)?;
    ring.register(&[-1; 4])?;
    let direct = |slot| ring.open(&s.dev, 0, Some(slot)).map_err(|error| Skip(format!("direct descriptors: {error}")));
    direct(0)?;
    s.at("open_direct", &Truth::files(1).io_uring(1));
    direct(1)?;
    s.at("open_direct_second", &Truth::files(2).io_uring(2));
    ring.close_direct(0)?;
    s.at("close_direct", &Truth::files(1).io_uring(1));
    ring.end();
    s.at("ring_close", &Truth::none());
    Ok(())
}

fn ring_registered(s: &Stage) -> Result<(), Skip> {
    let ring = ring(0)?;
    let a = s.open(O_RDWR);
    ring.register(&[a])?;
    s.at("register", &Truth::files(1).fds(pid(), 1));
    sys::close(a);
    s.at("close", &Truth::files(1).io_uring(1));
    ring.end();
    s.at("ring_close", &Truth::none());
    Ok(())
}

fn ring_install(s: &Stage) -> Result<(), Skip> {
    let ring = ring(0)?;
    let a = s.open(O_RDWR);
    ring.register(&[a])?;
    sys::close(a);
    let b = ring.install(0).map_err(|error| Skip(format!("FIXED_FD_INSTALL: {error}")))?;
    s.at("install", &Truth::files(1).fds(pid(), 1));
    sys::close(b);
    s.at("close", &Truth::files(1).io_uring(1));
    ring.end();
    s.at("ring_close", &Truth::none());
    Ok(())
}
