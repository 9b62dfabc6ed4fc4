//! `churn DEV SEED MS`: several processes change what they hold at random, then stand still and say what is true.
//!
//! Every open file has an id that travels with each copy: through fork, exec, sockets and pidfd_getfd. So the number
//! of open files is the number of ids, and what is in flight is what was sent and not yet received.
use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use libc::{MAP_PRIVATE, PROT_READ, PROT_WRITE, SOCK_SEQPACKET};
use serde_json::{Value, json};

use super::{
    super::{
        child::Child,
        pass,
        slots::{FileId, Slots},
        sys::{self, Fd, Page, Pid, SIGKILL},
        truth::{Skip, Truth, devices, say},
    },
    Scene,
};
use crate::random::Random;

const WORKERS: usize = 3;
/// Numbers of the main thread's descriptors, of the helper thread's, and of pipes and sockets.
const MAIN: Fd = 100;
const HELPER: Fd = 200;
const CONTROL: Fd = 600;

pub(super) fn run(scene: &Scene) -> Result<(), Skip> {
    let seed: u64 = scene.argument(0, "SEED")?;
    let ms: u64 = scene.argument(1, "MS")?;
    sys::soft_limit_files(1024);
    let sockets: Vec<(Fd, Fd)> = (0..WORKERS).map(|_| control_pair(sys::socketpair(SOCK_SEQPACKET))).collect();
    let mut random = Random::new(seed);
    let workers: Vec<Worker> = (0..WORKERS)
        .map(|n| {
            let (report, tell) = control_pair(sys::pipe());
            let random = random.fork();
            let (out, inward) = (sockets[n].0, sockets[(n + WORKERS - 1) % WORKERS].1);
            let child = Child::fork(|cue| {
                let cue = Cues { wait: move || cue.wait(), tell };
                State::new(scene.dev, random, out, inward).run(&cue, Duration::from_millis(ms));
            });
            Worker { child, report }
        })
        .collect();
    for pause in 0.. {
        for worker in &workers {
            worker.child.go();
        }
        let reports: Vec<Value> = workers.iter().map(|worker| read_line(worker.report)).collect();
        let truth = add_up(&reports);
        say(&json!({"pause": pause, "director": sys::pid(), "devices": devices([(scene.device.as_str(), &truth)])}));
        let mut byte = [0];
        if sys::read(0, &mut byte) == 0 {
            break;
        }
    }
    Ok(())
}

struct Worker {
    child: Child,
    report: Fd,
}

fn control(fd: Fd) -> Fd {
    let moved = sys::fcntl(fd, libc::F_DUPFD, CONTROL).expect("a control number") as Fd;
    sys::close(fd);
    moved
}

fn control_pair((a, b): (Fd, Fd)) -> (Fd, Fd) {
    (control(a), control(b))
}

fn read_line(fd: Fd) -> Value {
    let mut line = Vec::new();
    let mut byte = [0];
    while sys::read(fd, &mut byte) == 1 && byte[0] != b'\n' {
        line.push(byte[0]);
    }
    serde_json::from_slice(&line).expect("a report of one line")
}

fn write_line(fd: Fd, line: &Value) {
    sys::write_all(fd, format!("{line}\n").as_bytes());
}

fn ids(list: &Value) -> Vec<FileId> {
    list.as_array().map_or_else(Vec::new, |list| list.iter().filter_map(Value::as_u64).collect())
}

/// Puts the reports of all workers together.
fn add_up(reports: &[Value]) -> Truth {
    let mut held = BTreeSet::new();
    let mut processes = Vec::new();
    let mut flying = BTreeSet::new();
    for (n, report) in reports.iter().enumerate() {
        for process in report["processes"].as_array().into_iter().flatten() {
            let (fds, maps) = (ids(&process["fds"]), ids(&process["maps"]));
            processes.push((process["pid"].as_i64().expect("a pid") as Pid, fds.len(), maps.len()));
            held.extend(fds);
            held.extend(maps);
        }
        let received = reports[(n + 1) % reports.len()]["received"].as_u64().expect("a count") as usize;
        flying.extend(ids(&report["sent"]).into_iter().skip(received));
    }
    let in_flight = flying.difference(&held).count();
    let truth = Truth::files(held.len() + in_flight).in_flight(in_flight);
    processes.into_iter().fold(truth, |truth, (pid, fds, maps)| truth.fds(pid, fds).maps(pid, maps))
}

struct Cues<W: Fn()> {
    wait: W,
    tell: Fd,
}

/// A process that a worker forked, standing still, with what it holds by number.
struct Kid {
    pid: Pid,
    go: Fd,
    fds: Vec<(Fd, FileId)>,
    maps: Vec<FileId>,
}

struct State {
    slots: Slots,
    helper: Slots,
    maps: Vec<(Page, FileId)>,
    kids: Vec<Kid>,
    out: Fd,
    inward: Fd,
    sent: Vec<FileId>,
    received: usize,
}

impl State {
    fn new(dev: &str, mut random: Random, out: Fd, inward: Fd) -> Self {
        let helper = Slots::new(dev, HELPER, random.fork());
        Self {
            slots: Slots::new(dev, MAIN, random),
            helper,
            maps: Vec::new(),
            kids: Vec::new(),
            out,
            inward,
            sent: Vec::new(),
            received: 0,
        }
    }

    fn run(mut self, cues: &Cues<impl Fn()>, time: Duration) -> ! {
        loop {
            (cues.wait)();
            self.end_kids();
            let stop = AtomicBool::new(false);
            let mut helper = self.helper.clone();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        helper.step();
                    }
                });
                let until = Instant::now() + time;
                while Instant::now() < until {
                    self.step();
                }
                stop.store(true, Ordering::Relaxed);
            });
            self.helper = helper;
            write_line(cues.tell, &self.report());
        }
    }

    fn report(&self) -> Value {
        let Self { slots, helper, maps, kids, sent, received, out: _, inward: _ } = self;
        let own: Vec<FileId> = slots.held().chain(helper.held()).map(|(_, held)| held.id).collect();
        let own_maps: Vec<FileId> = maps.iter().map(|(_, id)| *id).collect();
        let mut processes = vec![json!({"pid": sys::pid(), "fds": own, "maps": own_maps})];
        for Kid { pid, fds, maps, go: _ } in kids {
            let fds: Vec<FileId> = fds.iter().map(|(_, id)| *id).collect();
            processes.push(json!({"pid": pid, "fds": fds, "maps": maps}));
        }
        json!({"processes": processes, "sent": sent, "received": received})
    }

    fn step(&mut self) {
        match self.slots.random.below(60) {
            0 => self.fork(),
            1 => self.take_from_kid(),
            2 => self.map(),
            3 => self.unmap(),
            4..=6 => self.send(),
            7..=10 => self.receive(),
            11 => {
                let arguments = ["gpureap-actor", "noop"].map(sys::cstr);
                sys::reap(sys::spawn_self(&arguments, None));
            }
            12 if self.slots.random.below(8) == 0 => self.end_kids(),
            _ => self.slots.step(),
        }
    }

    fn send(&mut self) {
        if let Some((fd, held)) = self.slots.pick()
            && pass::send(self.out, fd, held.id).is_ok()
        {
            self.sent.push(held.id);
        }
    }

    fn receive(&mut self) {
        if let Some((fd, id)) = pass::receive(self.inward, false) {
            self.received += 1;
            self.slots.adopt(fd, id);
        }
    }

    fn map(&mut self) {
        if self.maps.len() < 8
            && let Some((fd, held)) = self.slots.pick()
            && let Ok(page) = sys::map(fd, PROT_READ | PROT_WRITE, MAP_PRIVATE, 0)
        {
            self.maps.push((page, held.id));
        }
    }

    fn unmap(&mut self) {
        if let Some((page, _)) = self.maps.pop() {
            sys::unmap(page);
        }
    }

    fn take_from_kid(&mut self) {
        let Some(Kid { pid, fds, .. }) = self.kids.last() else { return };
        let Some((number, id)) = fds.first().copied() else { return };
        let handle = sys::pidfd_open(*pid).expect("the kid lives");
        let fd = sys::pidfd_getfd(handle, number).expect("the kid holds it");
        sys::close(handle);
        self.slots.adopt(fd, id);
    }

    fn end_kids(&mut self) {
        for (n, Kid { pid, go, .. }) in self.kids.drain(..).enumerate() {
            if n % 2 == 0 {
                sys::kill(pid, SIGKILL);
            } else {
                sys::write_all(go, b"x");
            }
            sys::reap(pid);
            sys::close(go);
        }
    }

    fn fork(&mut self) {
        if self.kids.len() >= 4 {
            return;
        }
        let fate = self.slots.random.below(4);
        let random = self.slots.random.fork();
        let (wait, go) = control_pair(sys::pipe());
        let (hear, tell) = control_pair(sys::pipe());
        let pid = sys::fork();
        if pid == 0 {
            // Other threads of the parent may have had anything open in between: only known numbers stay.
            sys::close_range(3, MAIN as u32 - 1, 0).expect("close_range");
            sys::close_range(self.slots.end(), CONTROL as u32 - 1, 0).expect("close_range");
            self.kid(fate, random, wait, tell);
        }
        sys::close(wait);
        sys::close(tell);
        if fate == 0 {
            sys::reap(pid);
            sys::close(go);
        } else {
            let report = read_line(hear);
            let pairs = report["fds"].as_array().into_iter().flatten();
            let fds = pairs.filter_map(|pair| Some((pair[0].as_i64()? as Fd, pair[1].as_u64()?))).collect();
            let mut byte = [0];
            assert_eq!(sys::read(hear, &mut byte), 1, "the kid stands still");
            self.kids.push(Kid { pid, go, fds, maps: ids(&report["maps"]) });
        }
        sys::close(hear);
    }

    /// The child's side: some steps of its own, then an exit with everything open, a pause, or an exec and a pause.
    fn kid(&mut self, fate: u64, random: Random, wait: Fd, tell: Fd) -> ! {
        self.slots.random = random;
        for _ in 0..self.slots.random.below(12) {
            self.slots.step();
        }
        if self.slots.random.below(2) == 0 {
            self.unmap();
        }
        if fate == 0 {
            sys::exit(0);
        }
        let exec = fate == 3;
        if exec {
            self.slots.exec();
            self.maps.clear();
        }
        let fds: Vec<(Fd, FileId)> = self.slots.held().map(|(fd, held)| (fd, held.id)).collect();
        let maps: Vec<FileId> = self.maps.iter().map(|(_, id)| *id).collect();
        write_line(tell, &json!({"fds": fds, "maps": maps}));
        if exec {
            sys::exec_self(&["gpureap-actor", "pause", &wait.to_string(), &tell.to_string()].map(sys::cstr));
        }
        sys::write_all(tell, b"x");
        sys::wait_byte(wait);
        sys::exit(0)
    }
}
