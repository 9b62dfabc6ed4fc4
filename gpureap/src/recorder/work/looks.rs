//! Looks: at who opened something, at what all hold, at the others of a job, and whether who exits has let go.

use std::{collections::BTreeSet, os::fd::OwnedFd, path::Path, time::Duration};

use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::mpsc,
    time::Instant,
};

use super::{
    super::{Input, translate},
    Work,
};
use crate::{
    bpf::ring,
    clock::{NANOS, boottime_ns},
    history::{
        event::{Ended, Exit, Held, Peer, Subject, What},
        rows::{Key, Place, ProcessRow},
    },
    model::{Eyes as _, Holder, ProcKey},
    process::{facts, pidfd, stat},
};

/// A process that opened something is looked at after these times: its opens come in a burst, CUDA maps within a second
/// or a few, and no hook of any set tells what is mapped in the end.
const LOOKS: [Duration; 4] =
    [Duration::from_millis(20), Duration::from_millis(500), Duration::from_secs(3), Duration::from_secs(15)];
/// Until the next try after a look that failed.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Looks in one turn: between two the channel is emptied.
const LOOKS_A_TURN: usize = 32;
/// Processes of a job that are looked at when one of them is about to die.
const PEERS: usize = 128;
/// Time after which another signal is another reason to look at them, and within which the deaths of a job are one.
const AGAIN_NS: u64 = 10 * NANOS;
const SAME_MOMENT_NS: u64 = NANOS;

impl Work {
    pub(super) fn look_soon(&mut self, tgid: u32) {
        let at = Instant::now() + LOOKS[0];
        let entry = self.looks.entry(tgid).or_insert((at, 0));
        // A new reason begins anew, and does not put off what was to come.
        *entry = (entry.0.min(at), 0);
    }

    pub(super) fn look_at_some(&mut self) {
        let now = Instant::now();
        let due: Vec<(u32, usize)> = self
            .looks
            .iter()
            .filter(|(_, (at, _))| *at <= now)
            .map(|(tgid, (_, round))| (*tgid, *round))
            .take(LOOKS_A_TURN)
            .collect();
        for (tgid, round) in due {
            self.looks.remove(&tgid);
            let looked = self.eyes.holder(tgid);
            let fails = looked.is_err();
            if let Err(error) = &looked
                && !self.look_fails
            {
                tracing::warn!("the recorder cannot look, and tries again: {error:#}");
            }
            self.look_fails = fails;
            match looked {
                Ok(Some(holder)) => {
                    self.found(&holder);
                    if round + 1 < LOOKS.len() {
                        self.looks.insert(tgid, (Instant::now() + LOOKS[round + 1], round + 1));
                    }
                }
                Ok(None) => self.found_nothing(tgid),
                // What it holds is still to be known, as long as it lives.
                Err(_) => drop(self.looks.insert(tgid, (Instant::now() + LOOK_AGAIN, round))),
            }
        }
    }

    fn found(&mut self, holder: &Holder) {
        if self.own.contains(&Key::from(holder.key)) {
            return;
        }
        let held = translate::held(holder, &self.devices);
        let key = held.key;
        self.tell(What::Held(held));
        if self.state.process(key).is_some() && !self.state.is_known(key) && !self.state.has_exited(key) {
            self.facts.ask(key);
        }
        self.look_at_ancestors(key);
    }

    /// No event tells of the end of who holds nothing; the kernel's memory has it for a while.
    fn look_at_ancestors(&mut self, key: Key) {
        for mut process in self.state.living_ancestors(key) {
            let exit = self.eyes.lineage().lookup(process.key.into()).and_then(|known| known.exit);
            if let Some((boot_ns, status)) = exit {
                process.exit = Some(Ended { boot_ns, status });
                self.tell(What::Process(Box::new(process)));
            }
        }
    }

    fn found_nothing(&mut self, tgid: u32) {
        let keys: Vec<Key> = self.state.keys().filter(|key| key.pid == tgid).collect();
        for key in keys {
            self.is_without(key);
        }
    }

    /// A process that may hold and of which a look found nothing.
    fn is_without(&mut self, key: Key) {
        if self.state.has_exited(key) {
            self.wait_for_end(key);
            return;
        }
        // Its exit may be on its way through the ring, or was lost: the kernel's memory of it has the same. A zombie that
        // nobody waits for has ended too.
        if let Some(ancestor) = self.eyes.lineage().lookup(key.into())
            && let Some((at, status)) = ancestor.exit
        {
            let exit = Exit { key, tid: key.pid, comm: ancestor.comm, status };
            self.tell_at(at, What::Exit(exit));
            self.wait_for_end(key);
        } else if lives(&self.config.paths.proc, key) {
            self.tell(What::Held(Held { key, inherited_from: None, from_snapshot: false, devices: Vec::new() }));
        } else {
            self.tell(What::Closed(Subject { key }));
        }
    }

    /// Everyone who is known to hold, one by one.
    pub(super) fn look_at_holders(&mut self) {
        let keys: Vec<Key> = self.state.holders().collect();
        for key in keys {
            let due = Instant::now();
            self.looks.entry(key.pid).or_insert((due, LOOKS.len() - 1));
        }
    }

    /// A whole view, against what is believed.
    pub(super) fn look_at_all(&mut self) {
        let view = match self.eyes.view() {
            Ok(view) => view,
            Err(error) => {
                tracing::warn!("the recorder cannot look: {error:#}");
                return;
            }
        };
        for holder in &view.holders {
            self.found(holder);
        }
        let found: BTreeSet<ProcKey> = view.holders.iter().map(|holder| holder.key).collect();
        let keys: Vec<Key> = self.state.keys().filter(|key| !found.contains(&ProcKey::from(*key))).collect();
        for key in keys {
            self.is_without(key);
        }
    }

    /// It has closed its files. One that had exited long before its exit was read has, soon after that.
    pub(super) fn gone(&mut self, key: Key) {
        self.closing.remove(&key);
        let now = boottime_ns();
        let exited = self.state.process(key).and_then(|row| row.exit_ns);
        let watched = self.watched.remove(&key);
        let at = exited.filter(|at| !watched && now.saturating_sub(*at) > NANOS).unwrap_or(now);
        self.look_at_ancestors(key);
        self.tell_at(at, What::Closed(Subject { key }));
    }

    /// The driver lets go while the process exits; its pidfd says when that is done.
    pub(super) fn wait_for_end(&mut self, key: Key) {
        if !self.closing.insert(key) {
            return;
        }
        let pidfd = match pidfd::open(key.pid) {
            Ok(Some(pidfd)) if lives(&self.config.paths.proc, key) => pidfd,
            _ => return self.gone(key),
        };
        let Some(out) = self.inputs.upgrade() else { return };
        // SAFETY: the pidfd is owned and stays open until it is dropped, after its registration.
        match unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) } {
            Ok(pidfd) => {
                self.watched.insert(key);
                drop(tokio::spawn(ended(pidfd, key, out.downgrade())));
            }
            Err(_error) => {
                tracing::debug!("the end of {} cannot be watched", key.pid);
                self.gone(key);
            }
        }
    }

    /// What the others of its job do at this moment: who is stalled shows now or never.
    pub(super) fn look_at_peers(&mut self, key: Key) {
        let now = boottime_ns();
        let Some(row) = self.state.process(key).cloned() else { return };
        let soon = |before: u64, limit: u64| now.saturating_sub(before) < limit;
        if self.peers_of.get(&key).is_some_and(|before| soon(*before, AGAIN_NS)) {
            return;
        }
        // Where a whole job is killed, the first of them tells what all were doing.
        self.peers_of.retain(|_, before| soon(*before, AGAIN_NS));
        let told = |other: &Key, before: u64| {
            soon(before, SAME_MOMENT_NS) && self.state.process(*other).is_some_and(|other| is_peer(&row, other))
        };
        if self.peers_of.iter().any(|(other, before)| told(other, *before)) {
            return;
        }
        self.peers_of.insert(key, now);
        let peers: Vec<Key> = self
            .state
            .holders()
            .filter(|other| *other != key)
            .filter(|other| self.state.process(*other).is_some_and(|other| is_peer(&row, other)))
            .take(PEERS)
            .collect();
        for peer in peers {
            let dir = self.config.paths.proc.join(peer.pid.to_string());
            let Some(state) = stat::Stat::read(&dir).filter(|stat| stat.started_at(peer.start_ns)) else { continue };
            let wchan = facts::wchan(&self.config.paths.proc, peer.pid, peer.pid);
            self.tell(What::Peer(Peer { key: peer, of: key, state: state.state, wchan }));
        }
    }
}

async fn ended(pidfd: AsyncFd<OwnedFd>, key: Key, out: mpsc::WeakSender<Input>) {
    let ready = pidfd.readable().await.is_ok();
    let out = out.upgrade().filter(|_| ready);
    if let Some(out) = out {
        out.send(Input::Gone(key)).await.ok();
    }
}

/// Whether it is there, be it as a zombie.
fn lives(proc: &Path, key: Key) -> bool {
    stat::Stat::read(&proc.join(key.pid.to_string())).is_some_and(|stat| stat.started_at(key.start_ns))
}

/// Whose holdings a record may have changed.
pub(super) fn reason_to_look(event: &ring::Event) -> Option<Key> {
    let header = match event {
        ring::Event::Open(file) | ring::Event::Gate(file) | ring::Event::First(file) | ring::Event::Last(file) => {
            &file.header
        }
        ring::Event::Fork(process) | ring::Event::Exec(process) => &process.header,
        _ => return None,
    };
    Some(Key { pid: header.tgid, start_ns: header.start_ns })
}

/// Whether two processes are of one job, as far as their names tell; siblings are.
fn is_peer(one: &ProcessRow, other: &ProcessRow) -> bool {
    let same = |a: &Option<String>, b: &Option<String>| a.is_some() && a == b;
    let Place { container, slurm_job, pod, .. } = &one.place;
    let set = |row: &ProcessRow| {
        row.env.get("MASTER_ADDR").map(|address| (address.clone(), row.env.get("MASTER_PORT").cloned()))
    };
    same(slurm_job, &other.place.slurm_job)
        || same(pod, &other.place.pod)
        || same(container, &other.place.container)
        || set(one).is_some() && set(one) == set(other)
        || one.parent.is_some() && one.parent == other.parent
}
