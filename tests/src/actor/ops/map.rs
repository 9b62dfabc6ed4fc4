//! Mappings, which outlive the descriptors they were made from.
use libc::{MAP_PRIVATE, MAP_SHARED, PROT_READ, PROT_WRITE};

use super::{
    super::{
        child::{Child, Cue},
        sys::{self, Fd, O_RDONLY, O_RDWR, Page, pid},
        truth::{Skip, Stage, Truth, key},
    },
    Named,
};

pub(super) const OPS: &[Named] = &[
    ("map_private", map_private),
    ("map_private_fork", map_private_fork),
    ("map_private_exec", map_private_exec),
    ("map_private_exit", map_private_exit),
    ("map_shared_zero", map_shared_zero),
    ("map_memory", map_memory),
    ("map_memory_fork", map_memory_fork),
    ("map_memory_exec", map_memory_exec),
    ("map_memory_exit", map_memory_exit),
];

/// How to map one device so that the mapping keeps the file.
struct Kind {
    stage: Stage,
    open: i32,
    protection: i32,
    flags: i32,
    offset: i64,
}

impl Kind {
    /// A private mapping of DEV, as /dev/zero allows.
    fn private(s: &Stage) -> Self {
        Self {
            stage: Stage { dev: s.dev.clone(), device: s.device.clone() },
            open: O_RDWR,
            protection: PROT_READ | PROT_WRITE,
            flags: MAP_PRIVATE,
            offset: 0,
        }
    }

    /// A shared mapping of /dev/mem (1:1), as a GPU driver's registers are mapped.
    fn memory() -> Result<Self, Skip> {
        let dev = "/dev/mem";
        sys::close(sys::try_open(dev, O_RDONLY).map_err(|error| Skip(format!("{dev}: {error}")))?);
        let stage = Stage { dev: dev.into(), device: key(sys::device_number(dev)?) };
        Ok(Self { stage, open: O_RDONLY, protection: PROT_READ, flags: MAP_SHARED, offset: 0xf_0000 })
    }

    fn open(&self) -> Fd {
        self.stage.open(self.open)
    }

    fn map(&self, fd: Fd) -> Result<Page, Skip> {
        let dev = &self.stage.dev;
        sys::map(fd, self.protection, self.flags, self.offset).map_err(|error| Skip(format!("map {dev}: {error}")))
    }

    fn open_map_close(&self) -> Result<Page, Skip> {
        let fd = self.open();
        let page = self.map(fd);
        sys::close(fd);
        page
    }

    fn simple(&self) -> Result<(), Skip> {
        let s = &self.stage;
        let a = self.open();
        let page = self.map(a)?;
        s.at("map", &Truth::files(1).fds(pid(), 1).maps(pid(), 1));
        sys::close(a);
        s.at("close", &Truth::files(1).maps(pid(), 1));
        sys::unmap(page);
        s.at("unmap", &Truth::none());
        Ok(())
    }

    fn fork(&self) -> Result<(), Skip> {
        let s = &self.stage;
        let page = self.open_map_close()?;
        let child = Child::fork(Cue::pause);
        child.done();
        s.at("fork", &Truth::files(1).maps(pid(), 1).maps(child.pid, 1));
        sys::unmap(page);
        s.at("parent_unmap", &Truth::files(1).maps(child.pid, 1));
        child.finish();
        s.at("child_exit", &Truth::none());
        Ok(())
    }

    fn child_mapped(&self, exec: bool) -> Result<(), Skip> {
        let s = &self.stage;
        sys::unmap(self.open_map_close()?);
        let child = Child::fork(|cue| {
            assert!(self.open_map_close().is_ok(), "mapped a moment ago");
            cue.pause();
            if exec {
                cue.exec_pause();
            }
        });
        child.done();
        s.at("child_map", &Truth::files(1).maps(child.pid, 1));
        if exec {
            child.step();
            s.at("child_exec", &Truth::none());
        }
        child.finish();
        s.at("child_exit", &Truth::none());
        Ok(())
    }
}

fn map_private(s: &Stage) -> Result<(), Skip> {
    Kind::private(s).simple()
}

fn map_private_fork(s: &Stage) -> Result<(), Skip> {
    Kind::private(s).fork()
}

fn map_private_exec(s: &Stage) -> Result<(), Skip> {
    Kind::private(s).child_mapped(true)
}

fn map_private_exit(s: &Stage) -> Result<(), Skip> {
    Kind::private(s).child_mapped(false)
}

fn map_memory(_: &Stage) -> Result<(), Skip> {
    Kind::memory()?.simple()
}

fn map_memory_fork(_: &Stage) -> Result<(), Skip> {
    Kind::memory()?.fork()
}

fn map_memory_exec(_: &Stage) -> Result<(), Skip> {
    Kind::memory()?.child_mapped(true)
}

fn map_memory_exit(_: &Stage) -> Result<(), Skip> {
    Kind::memory()?.child_mapped(false)
}

/// A shared mapping of /dev/zero is backed by a file of its own: the device is free once the descriptor is closed.
fn map_shared_zero(s: &Stage) -> Result<(), Skip> {
    if s.device != "1:5" {
        return Err(Skip("only /dev/zero changes the file behind a shared mapping".into()));
    }
    let a = s.open(O_RDWR);
    let page = sys::map(a, PROT_READ | PROT_WRITE, MAP_SHARED, 0)?;
    s.at("map", &Truth::files(1).fds(pid(), 1));
    sys::close(a);
    s.at("close", &Truth::none());
    sys::unmap(page);
    s.at("unmap", &Truth::none());
    Ok(())
}
