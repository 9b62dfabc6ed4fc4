//! Holders that a look at path names or at /proc/PID/fd does not find.
use libc::{CLONE_FILES, CLONE_NEWPID, MAP_PRIVATE, PROT_READ, PROT_WRITE};
use serde_json::json;

use super::{
    super::{
        child::Child,
        pass,
        ring::Ring,
        sys::{self, O_CLOEXEC, O_RDWR},
        truth::{Skip, Truth},
    },
    Kind, Report, Scene, hear_pid, place, tell_pid,
};

pub(super) const KINDS: &[Kind] = &[
    ("alt-node", alt_node),
    ("unlinked", unlinked),
    ("map", map),
    ("private-table", private_table),
    ("in-flight", in_flight),
    ("in-flight-dead", in_flight_dead),
    ("io-uring", io_uring),
    ("zombie-leader", zombie_leader),
    ("passed", passed),
    ("pidns", pidns),
];

/// `alt-node DEV`: another node of the same number. Field `node`.
fn alt_node(scene: &Scene) -> Result<Report, Skip> {
    let node = place()?.join("other-node");
    sys::mknod(&node, sys::device_number(scene.dev)?)?;
    let child = Child::fork(|cue| {
        sys::open(&node, O_RDWR);
        cue.done();
        sys::live();
    });
    child.done();
    Ok(scene.report(child.pid, &Truth::files(1).fds(child.pid, 1)).with("node", node.to_string_lossy()))
}

/// `unlinked DEV`: a node that was removed and made again after the open. Field `node`.
fn unlinked(scene: &Scene) -> Result<Report, Skip> {
    let node = place()?.join("node");
    let number = sys::device_number(scene.dev)?;
    sys::mknod(&node, number)?;
    let child = Child::fork(|cue| {
        sys::open(&node, O_RDWR);
        cue.done();
        sys::live();
    });
    child.done();
    std::fs::remove_file(&node)?;
    sys::mknod(&node, number)?;
    Ok(scene.report(child.pid, &Truth::files(1).fds(child.pid, 1)).with("node", node.to_string_lossy()))
}

/// `map DEV`: mapped privately, descriptor closed.
fn map(scene: &Scene) -> Result<Report, Skip> {
    let child = Child::fork(|cue| {
        let fd = scene.open(O_RDWR);
        let page = sys::map(fd, PROT_READ | PROT_WRITE, MAP_PRIVATE, 0);
        sys::close(fd);
        cue.send(if page.is_ok() { b'x' } else { b'n' });
        sys::live();
    });
    if child.done() == b'n' {
        return Err(Skip(format!("{} cannot be mapped", scene.dev)));
    }
    Ok(scene.report(child.pid, &Truth::files(1).maps(child.pid, 1)))
}

/// `private-table DEV`: a thread with its own table opened it. Field `tids`: that thread.
fn private_table(scene: &Scene) -> Result<Report, Skip> {
    let (hear, tell) = sys::pipe();
    let dev = scene.dev.to_owned();
    let child = Child::fork(|_| {
        std::thread::spawn(move || {
            sys::unshare(CLONE_FILES).expect("unshare");
            sys::open(dev, O_RDWR);
            tell_pid(tell, sys::tid());
            sys::live();
        });
        sys::live();
    });
    let tid = hear_pid(hear);
    Ok(scene.report(child.pid, &Truth::files(1).fds(child.pid, 1)).with("tids", json!([tid])))
}

/// `in-flight DEV`: sent over a socket, not received, closed by the sender, which lives.
fn in_flight(scene: &Scene) -> Result<Report, Skip> {
    let child = Child::fork(|cue| {
        let (near, _far) = sys::socketpair(libc::SOCK_STREAM);
        let fd = scene.open(O_RDWR);
        pass::send(near, fd, 0).expect("send");
        sys::close(fd);
        cue.done();
        sys::live();
    });
    child.done();
    Ok(scene.report(child.pid, &Truth::files(1).in_flight(1)))
}

/// `in-flight-dead DEV`: the same, and the sender is dead. Fields `receiver`: the process with the other end;
/// `dead`: the sender, which is also `pid`.
fn in_flight_dead(scene: &Scene) -> Result<Report, Skip> {
    let (near, far) = sys::socketpair(libc::SOCK_STREAM);
    let receiver = Child::fork(|cue| {
        sys::close(near);
        cue.done();
        sys::live();
    });
    receiver.done();
    let sender = Child::fork(|_| {
        let fd = scene.open(O_RDWR);
        pass::send(near, fd, 0).expect("send");
    });
    let pid = sender.pid;
    sender.reap();
    sys::close(near);
    sys::close(far);
    let report = scene.report(pid, &Truth::files(1).in_flight(1));
    Ok(report.with("receiver", receiver.pid).with("dead", json!([pid])))
}

/// `io-uring DEV`: opened straight into the table of a ring; no descriptor.
fn io_uring(scene: &Scene) -> Result<Report, Skip> {
    let child = Child::fork(|cue| {
        let opened = Ring::new(0).and_then(|ring| {
            ring.register(&[-1; 4])?;
            ring.open(scene.dev, 0, Some(0))?;
            Ok(ring)
        });
        cue.send(if opened.is_ok() { b'x' } else { b'n' });
        sys::live();
    });
    if child.done() == b'n' {
        return Err(Skip("the kernel has no io_uring with direct descriptors".into()));
    }
    Ok(scene.report(child.pid, &Truth::files(1).io_uring(1)))
}

/// `zombie-leader DEV`: the main thread has ended, another lives. Field `tids`: the living thread.
fn zombie_leader(scene: &Scene) -> Result<Report, Skip> {
    let (hear, tell) = sys::pipe();
    let child = Child::fork(|_| {
        scene.open(O_RDWR);
        std::thread::spawn(move || {
            // Nobody is to look before the leader has ended. This waits for it; what is true is known without.
            let stat = format!("/proc/self/task/{}/stat", sys::pid());
            while !std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") Z ")) {
                sys::sleep(1);
            }
            tell_pid(tell, sys::tid());
            sys::live();
        });
        sys::exit_thread();
    });
    let tid = hear_pid(hear);
    Ok(scene.report(child.pid, &Truth::files(1).fds(child.pid, 1)).with("tids", json!([tid])))
}

/// `passed DEV keep|close`: received by a process that never opened it. Field `sender`, which keeps or closes its own.
fn passed(scene: &Scene) -> Result<Report, Skip> {
    let keep = match scene.argument::<String>(0, "keep|close")?.as_str() {
        "keep" => true,
        "close" => false,
        other => return Err(Skip(format!("keep or close, not {other}"))),
    };
    let (near, far) = sys::socketpair(libc::SOCK_STREAM);
    let receiver = Child::fork(|cue| {
        pass::receive(far, true).expect("a descriptor");
        cue.done();
        sys::live();
    });
    let sender = Child::fork(|cue| {
        let fd = scene.open(O_RDWR | O_CLOEXEC);
        pass::send(near, fd, 0).expect("send");
        if !keep {
            sys::close(fd);
        }
        cue.done();
        sys::live();
    });
    sender.done();
    receiver.done();
    sys::close(near);
    sys::close(far);
    let truth = Truth::files(1).fds(receiver.pid, 1);
    let truth = if keep { truth.fds(sender.pid, 1) } else { truth };
    Ok(scene.report(receiver.pid, &truth).with("sender", sender.pid))
}

/// `pidns DEV`: a holder two pid namespaces down. Field `nspids`: its numbers from the outermost (`pid`) inwards.
fn pidns(scene: &Scene) -> Result<Report, Skip> {
    let (hear, tell) = sys::socketpair(libc::SOCK_DGRAM);
    let (middle_hear, middle_tell) = sys::socketpair(libc::SOCK_DGRAM);
    pass::ask_credentials(hear);
    let nested = Child::fork(|cue| {
        if sys::unshare(CLONE_NEWPID).is_err() {
            cue.send(b'n');
            return;
        }
        // The first process of the middle namespace; asks there which number the innermost has.
        if sys::fork() == 0 {
            pass::ask_credentials(middle_hear);
            sys::unshare(CLONE_NEWPID).expect("a namespace in the namespace");
            if sys::fork() == 0 {
                scene.open(O_RDWR);
                sys::write_all(tell, b"x");
                sys::write_all(middle_tell, b"x");
                sys::live();
            }
            let middle = pass::receive_sender(middle_hear);
            cue.send(middle as u8);
            sys::live();
        }
        sys::live();
    });
    let middle = nested.done();
    if middle == b'n' {
        return Err(Skip("no pid namespaces".into()));
    }
    let outer = pass::receive_sender(hear);
    let report = scene.report(outer, &Truth::files(1).fds(outer, 1));
    Ok(report.with("nspids", json!([outer, middle, 1])))
}
