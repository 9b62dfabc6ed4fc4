//! Reads who processes are, in a thread of its own: a process's arguments and environment are behind its memory lock,
//! and one that hangs in a driver may hold that for ever.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    time::{Duration, Instant},
};

use tokio::sync::mpsc;

use super::Input;
use crate::{
    bpf::eyes,
    classify::Classifier,
    config::Config,
    gpu::devices::Devices,
    history::{
        event::{Ended, Process, What},
        rows::{Key, Place, Thread},
    },
    model::{Ancestor, LineageSource, ProcKey},
    process::{self, ContainerNames, Facts},
};

/// Requests that wait.
const WAITING: usize = 1024;
/// One that takes longer is left alone, and another thread goes on.
const PATIENCE: Duration = Duration::from_secs(5);
/// Threads that hang, at most; then nobody's facts are read any more, which is said.
const MOST_HUNG: usize = 4;
/// Longer chains are a mistake or an attack.
const MAX_DEPTH: usize = 64;
/// Ancestors that were told already.
const REMEMBERED: usize = 4096;
/// Bytes of the arguments that are kept: a process may have six megabytes, and everybody may start many.
const LONGEST_ARGUMENTS: usize = 64 << 10;
/// Bytes of one environment variable that are kept.
const LONGEST_VARIABLE: usize = 1024;

#[derive(Debug)]
pub(super) struct Reader {
    config: Config,
    devices: Devices,
    out: mpsc::WeakSender<Input>,
    requests: SyncSender<Key>,
    /// Asked for and not answered, with the time of asking.
    asked: BTreeMap<Key, Instant>,
    hung: usize,
    /// Requests that found no room.
    pub(super) skipped: u64,
}

impl Reader {
    pub(super) fn start(config: &Config, devices: &Devices, out: mpsc::WeakSender<Input>) -> std::io::Result<Self> {
        let requests = spawn(config, devices, out.clone())?;
        Ok(Self {
            config: config.clone(),
            devices: devices.clone(),
            out,
            requests,
            asked: BTreeMap::new(),
            hung: 0,
            skipped: 0,
        })
    }

    pub(super) fn ask(&mut self, key: Key) {
        if self.asked.contains_key(&key) {
            return;
        }
        match self.requests.try_send(key) {
            Ok(()) => drop(self.asked.insert(key, Instant::now())),
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => self.skipped += 1,
        }
    }

    pub(super) fn answered(&mut self, key: Key) {
        self.asked.remove(&key);
    }

    /// Replaces a thread that hangs. What it was asked for is lost to this record; who waits behind it is asked anew.
    pub(super) fn check(&mut self) {
        let Some((key, since)) = self.asked.iter().min_by_key(|(_, since)| **since) else { return };
        if since.elapsed() < PATIENCE || self.hung >= MOST_HUNG {
            return;
        }
        self.hung += 1;
        tracing::warn!("/proc/{} cannot be read for {} s: its facts are left out", key.pid, PATIENCE.as_secs());
        let key = *key;
        self.asked.remove(&key);
        let waiting: Vec<Key> = std::mem::take(&mut self.asked).into_keys().collect();
        if let Ok(requests) = spawn(&self.config, &self.devices, self.out.clone()) {
            self.requests = requests;
            for key in waiting {
                self.ask(key);
            }
        }
    }
}

fn spawn(config: &Config, devices: &Devices, out: mpsc::WeakSender<Input>) -> std::io::Result<SyncSender<Key>> {
    let (requests, receiver) = sync_channel(WAITING);
    let (config, devices) = (config.clone(), devices.clone());
    std::thread::Builder::new().name("facts".to_owned()).spawn(move || serve(&config, &devices, &receiver, &out))?;
    Ok(requests)
}

fn serve(config: &Config, devices: &Devices, requests: &Receiver<Key>, out: &mpsc::WeakSender<Input>) {
    let lineage: Box<dyn LineageSource> = match eyes::from_pins(config, devices) {
        Ok(Ok(eyes)) => Box::new(eyes),
        _ => Box::new(crate::model::NoLineage),
    };
    let mut told = BTreeSet::new();
    while let Ok(key) = requests.recv() {
        let classifier = Classifier::new(&config.paths, &config.classes);
        let facts = read(config, key, lineage.as_ref(), &classifier, &mut told);
        let Some(out) = out.upgrade() else { return };
        for process in facts {
            // The recorder takes what it is given; it may wait for a turn, since only this thread waits here.
            if out.blocking_send(Input::What(None, Box::new(What::Process(Box::new(process))))).is_err() {
                return;
            }
        }
        if out.blocking_send(Input::Read(key)).is_err() {
            return;
        }
    }
}

/// The process itself, then its ancestors that have not been told.
fn read(
    config: &Config,
    key: Key,
    lineage: &dyn LineageSource,
    classifier: &Classifier,
    told: &mut BTreeSet<ProcKey>,
) -> Vec<Process> {
    let proc = &config.paths.proc;
    let own = ProcKey::from(key);
    let known = lineage.lookup(own);
    let mut facts = Facts::read(proc, key.pid, key.start_ns);
    if known.is_none() && facts.is_none() {
        return Vec::new();
    }
    let environment = facts.as_ref().and_then(|facts| facts.environment(proc)).unwrap_or_default();
    if let Some(facts) = &mut facts {
        facts.place.or_job_of(|| Some(&environment));
    }
    let mut process = describe(own, known.as_ref(), facts.as_ref(), classifier);
    if let Some(facts) = &facts {
        process.threads = facts.threads(proc).into_iter().map(thread).collect();
        process.env = chosen(&environment, &|name| config.journal.keeps(name));
    }
    process.parent = process.parent.or_else(|| living_parent(proc, facts.as_ref()));
    let mut list = vec![process];
    let mut next = list[0].parent.map(ProcKey::from);
    let mut seen = BTreeSet::from([own]);
    while let Some(key) = next.filter(|key| key.tgid > 1 && seen.len() < MAX_DEPTH && seen.insert(*key)) {
        if told.contains(&key) {
            break;
        }
        let known = lineage.lookup(key);
        let facts = Facts::read(proc, key.tgid, key.start_ns);
        if known.is_none() && facts.is_none() {
            break;
        }
        let mut ancestor = describe(key, known.as_ref(), facts.as_ref(), classifier);
        ancestor.parent = ancestor.parent.or_else(|| living_parent(proc, facts.as_ref()));
        ancestor.ancestor = true;
        next = ancestor.parent.map(ProcKey::from);
        if told.len() >= REMEMBERED {
            told.clear();
        }
        told.insert(key);
        list.push(ancestor);
    }
    list
}

fn thread(thread: process::Thread) -> Thread {
    Thread { tid: thread.tid, name: thread.comm }
}

fn living_parent(proc: &std::path::Path, facts: Option<&Facts>) -> Option<Key> {
    let parent = Facts::read_any(proc, facts?.ppid)?;
    Some(Key { pid: parent.tgid, start_ns: parent.start_ns })
}

/// What lives tells more than what the kernel kept of it.
fn describe(key: ProcKey, known: Option<&Ancestor>, facts: Option<&Facts>, classifier: &Classifier) -> Process {
    let mut process = Process { key: key.into(), ..Process::default() };
    if let Some(Ancestor { key: _, parent, comm, argv, argv_cut, uid, cgroup_id: _, exit, renewed: _ }) = known {
        process.comm.clone_from(comm);
        process.argv.clone_from(argv);
        process.argv_cut = *argv_cut;
        process.uid = Some(*uid);
        process.parent = parent.map(Key::from);
        process.exit = exit.map(|(boot_ns, status)| Ended { boot_ns, status });
    }
    let Some(facts) = facts else { return process };
    process.comm.clone_from(&facts.comm);
    if !facts.argv.is_empty() {
        (process.argv, process.argv_cut) = bounded(&facts.argv, LONGEST_ARGUMENTS);
    }
    process.exe = facts.exe.as_ref().map(|exe| exe.display().to_string());
    process.uid = facts.uid.or(process.uid);
    process.user.clone_from(&facts.user);
    process.nspids.clone_from(&facts.nspids);
    process.class = Some(crate::out::words::word(&classifier.class(facts).class));
    let names = classifier.names(&facts.place);
    let process::Place { unit, container, slurm_job, slurm_step, pod } = facts.place.clone();
    let ContainerNames { name: container_name, image, pod: pod_name, namespace: pod_namespace } = names;
    process.place = Place {
        cgroup: facts.cgroup.clone(),
        unit,
        container,
        container_name,
        image,
        slurm_job,
        slurm_step,
        pod,
        pod_name,
        pod_namespace,
    };
    process
}

/// The first arguments, and whether there were more.
fn bounded(arguments: &[String], most: usize) -> (Vec<String>, bool) {
    let mut room = most;
    let mut kept = Vec::new();
    for argument in arguments {
        // An empty one takes room too.
        let Some(rest) = room.checked_sub(argument.len() + 1) else {
            kept.push(argument[..argument.floor_char_boundary(room)].to_owned());
            return (kept, true);
        };
        room = rest;
        kept.push(argument.clone());
    }
    (kept, false)
}

/// The variables that are to be kept. Never the whole environment.
fn chosen(environment: &[u8], keeps: &dyn Fn(&str) -> bool) -> BTreeMap<String, String> {
    let variable = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        let (name, value) = text.split_once('=')?;
        keeps(name).then(|| (name.to_owned(), value.chars().take(LONGEST_VARIABLE).collect()))
    };
    environment.split(|byte| *byte == 0).filter_map(variable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_kept_up_to_a_bound() {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        for (arguments, most, expected) in [
            (&["python3", "-c", ""][..], 12, (&["python3", "-c", ""][..], false)),
            (&["python3", "-c", ""], 11, (&["python3", "-c", ""], true)),
            (&["python3", "größe"], 11, (&["python3", "gr"], true)),
            (&["python3", "größe"], 12, (&["python3", "grö"], true)),
            (&[], 0, (&[], false)),
        ] {
            assert_eq!(bounded(&words(arguments), most), (words(expected.0), expected.1), "{arguments:?} {most}");
        }
    }

    #[test]
    fn the_variables_that_are_asked_for_and_no_other() {
        let environment = b"RANK=3\0SECRET=x\0KUBERNETES_PORT=tcp://1\0RANKS=4\0broken\0JOB_ID=\0";
        let expected = [("RANK", "3"), ("KUBERNETES_PORT", "tcp://1"), ("JOB_ID", "")];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(chosen(environment, &|name| Config::default().journal.keeps(name)), BTreeMap::from(expected));
    }
}
