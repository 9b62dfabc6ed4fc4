//! The other end of the socket: [`Eyes`] for those who may not read the pins. Nothing here waits without a limit.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use serde::de::DeserializeOwned;

use super::{
    socket,
    wire::{self, Answer, Code, Events, Get, MAX_ANSWER, MAX_KEYS, Refusal, Request},
};
use crate::{
    clock::boottime_ns,
    error::Failure,
    gpu::devices::Devices,
    history::event::Event,
    model::{Ancestor, Eyes, Holder, LineageSource, ProcKey, View},
};

/// For the first answer: a daemon that is stopped or stuck must not hold up a command that has another way.
const FIRST_TIME: Duration = Duration::from_secs(2);
/// For the stream of events, without which one looks a little more often.
const EVENTS_TIME: Duration = Duration::from_millis(250);
/// For every other: the daemon may have a long walk to make, and tell a user that asks much to come again.
const TIME: Duration = Duration::from_secs(10);

/// What a question gets all the same when the caller's own time is up: it is the last one.
const LAST_TIME: Duration = Duration::from_secs(2);

/// For all that follow one without an answer: whoever asks has limits of its own to keep.
const SILENT_TIME: Duration = Duration::from_millis(250);
/// Between two attempts to reach a daemon that was there before.
const RESTART_PAUSE: Duration = Duration::from_millis(50);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Unanswered {
    #[error("no daemon listens on {path}: {error}")]
    Absent { path: String, error: io::Error },
    #[error("the daemon at {path} does not answer")]
    Silent { path: String },
    #[error("the connection to {path} broke: {error}")]
    Broken { path: String, error: io::Error },
    #[error("{path} belongs to user {uid} and is not believed")]
    Foreign { path: String, uid: u32 },
    #[error("the daemon at {path} says: {message}")]
    Refused { path: String, message: String },
    #[error("what {path} answers is not understood: {message}")]
    Strange { path: String, message: String },
}

impl From<Unanswered> for Failure {
    fn from(error: Unanswered) -> Self {
        Self::unsupported(error.to_string())
    }
}

fn connect(path: &Path, until: Instant) -> Result<UnixStream, Unanswered> {
    let text = || path.display().to_string();
    let stream = loop {
        match socket::connect(path) {
            Ok(stream) => break stream,
            // Its queue is full.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if Instant::now() >= until {
                    return Err(Unanswered::Silent { path: text() });
                }
                thread::sleep(Duration::from_millis(10));
            }
            Err(error) => return Err(Unanswered::Absent { path: text(), error }),
        }
    };
    let credentials = rustix::net::sockopt::socket_peercred(&stream)
        .map_err(|error| Unanswered::Broken { path: text(), error: error.into() })?;
    // Only root's daemon sees everything; one's own is for tests.
    if !credentials.uid.is_root() && credentials.uid != rustix::process::geteuid() {
        return Err(Unanswered::Foreign { path: text(), uid: credentials.uid.as_raw() });
    }
    Ok(stream)
}

/// What is left of a time, as a time limit of a socket; never zero, which would mean none.
fn left(until: Instant) -> io::Result<Option<Duration>> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
}

fn exchange(stream: &mut UnixStream, request: &Request, until: Instant) -> io::Result<Vec<u8>> {
    stream.set_write_timeout(left(until)?)?;
    // A server that hangs up at once has said why.
    let sent = stream.write_all(&wire::line(request));
    let mut bytes = Vec::new();
    let mut part = vec![0; 64 << 10];
    loop {
        stream.set_read_timeout(left(until)?)?;
        let count = match stream.read(&mut part) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(sent.err().unwrap_or(error)),
        };
        if count == 0 {
            return Err(sent.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into()));
        }
        let ends = part[..count].ends_with(b"\n");
        bytes.extend_from_slice(&part[..count]);
        if ends {
            return Ok(bytes);
        }
        if bytes.len() > MAX_ANSWER {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
}

/// Asks one daemon, over one connection as long as that holds.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    stream: RefCell<Option<UnixStream>>,
    /// It has answered once: when it is gone now, it may be on its way back.
    met: Cell<bool>,
    /// The last question had no answer in its time: the next is not waited for as long.
    silent: Cell<bool>,
}

impl Client {
    pub fn new(path: PathBuf) -> Self {
        Self { path, stream: RefCell::default(), met: Cell::default(), silent: Cell::default() }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    fn text(&self) -> String {
        self.path.display().to_string()
    }

    /// Asks, again while the daemon is busy, until the time is up.
    pub fn ask<T: DeserializeOwned>(&self, request: &Request, time: Duration) -> Result<T, Unanswered> {
        let answer = self.ask_within(request, if self.silent.get() { time.min(SILENT_TIME) } else { time });
        let gone = |error: &Unanswered| {
            matches!(error, Unanswered::Silent { .. } | Unanswered::Absent { .. } | Unanswered::Broken { .. })
        };
        self.silent.set(answer.as_ref().err().is_some_and(gone));
        answer
    }

    fn ask_within<T: DeserializeOwned>(&self, request: &Request, time: Duration) -> Result<T, Unanswered> {
        let until = Instant::now() + time;
        loop {
            let bytes = match self.bytes(request, until) {
                Ok(bytes) => bytes,
                Err(Unanswered::Absent { .. } | Unanswered::Broken { .. })
                    if self.met.get() && Instant::now() + RESTART_PAUSE < until =>
                {
                    thread::sleep(RESTART_PAUSE);
                    continue;
                }
                Err(error) => return Err(error),
            };
            self.met.set(true);
            let answer: Answer<T> =
                wire::answer(&bytes).map_err(|message| Unanswered::Strange { path: self.text(), message })?;
            match answer {
                Answer { answer: Some(answer), .. } => return Ok(answer),
                Answer { error: Some(Refusal { code: Code::Busy, message, retry_ms }), .. } => {
                    let pause = Duration::from_millis(retry_ms.unwrap_or(50).clamp(1, 1_000));
                    if Instant::now() + pause >= until {
                        return Err(Unanswered::Refused { path: self.text(), message });
                    }
                    thread::sleep(pause);
                }
                Answer { error: Some(Refusal { message, .. }), .. } => {
                    return Err(Unanswered::Refused { path: self.text(), message });
                }
                Answer { answer: None, error: None, .. } => {
                    return Err(Unanswered::Strange { path: self.text(), message: "it is empty".to_owned() });
                }
            }
        }
    }

    fn bytes(&self, request: &Request, until: Instant) -> Result<Vec<u8>, Unanswered> {
        // The daemon hangs up on whoever is silent for long, and after most refusals: once more on a new connection.
        for fresh in [false, true] {
            let used = self.stream.borrow_mut().take();
            let is_new = used.is_none();
            let mut stream = match used {
                Some(stream) => stream,
                None => connect(&self.path, until)?,
            };
            match exchange(&mut stream, request, until) {
                Ok(bytes) => {
                    *self.stream.borrow_mut() = Some(stream);
                    return Ok(bytes);
                }
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return Err(Unanswered::Silent { path: self.text() });
                }
                Err(error) if is_new || fresh => {
                    return Err(Unanswered::Broken { path: self.text(), error });
                }
                Err(_) => {}
            }
        }
        Err(Unanswered::Silent { path: self.text() })
    }
}

/// A stream on which the daemon writes whenever something happened to a device; non-blocking.
pub fn events(path: &Path) -> Result<UnixStream, Unanswered> {
    let until = Instant::now() + EVENTS_TIME;
    let text = || path.display().to_string();
    let mut stream = connect(path, until)?;
    let bytes = exchange(&mut stream, &Request::new(Get::Events), until)
        .map_err(|error| Unanswered::Broken { path: text(), error })?;
    let first = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let answer: Answer<Events> =
        wire::answer(first).map_err(|message| Unanswered::Strange { path: text(), message })?;
    if let Some(Refusal { message, .. }) = answer.error {
        return Err(Unanswered::Refused { path: text(), message });
    }
    stream.set_nonblocking(true).map_err(|error| Unanswered::Broken { path: text(), error })?;
    Ok(stream)
}

/// The flight recorder's events from now on, as they come. Ends with the daemon.
pub fn follow(path: &Path) -> Result<impl Iterator<Item = Result<Event, Unanswered>> + use<>, Unanswered> {
    let until = Instant::now() + FIRST_TIME;
    let text = path.display().to_string();
    let broken = |error| Unanswered::Broken { path: path.display().to_string(), error };
    let mut stream = connect(path, until)?;
    stream.set_write_timeout(left(until).map_err(broken)?).map_err(broken)?;
    stream.write_all(&wire::line(&Request::new(Get::Follow))).map_err(broken)?;
    stream.set_read_timeout(left(until).map_err(broken)?).map_err(broken)?;
    let mut reader = BufReader::new(stream);
    let mut greeting = String::new();
    reader.read_line(&mut greeting).map_err(|_| Unanswered::Silent { path: path.display().to_string() })?;
    let strange =
        |error: serde_json::Error| Unanswered::Strange { path: path.display().to_string(), message: error.to_string() };
    let answer: Answer<Event> = serde_json::from_str(&greeting).map_err(strange)?;
    if let Some(Refusal { message, .. }) = answer.error {
        return Err(Unanswered::Refused { path: text, message });
    }
    reader.get_ref().set_read_timeout(None).map_err(broken)?;
    Ok(reader.lines().map_while(move |line| {
        let line = match line {
            Ok(line) => line,
            Err(error) => return Some(Err(Unanswered::Broken { path: text.clone(), error })),
        };
        match serde_json::from_str::<Answer<Event>>(&line) {
            Ok(Answer { answer: Some(event), .. }) => Some(Ok(event)),
            Ok(Answer { error: Some(Refusal { message, .. }), .. }) => {
                Some(Err(Unanswered::Refused { path: text.clone(), message }))
            }
            Ok(Answer { answer: None, error: None, .. }) => None,
            Err(error) => Some(Err(Unanswered::Strange { path: text.clone(), message: error.to_string() })),
        }
    }))
}

/// The daemon's views.
#[derive(Debug)]
pub struct SocketEyes {
    client: Client,
    /// What was fetched since the last look.
    lineage: RefCell<HashMap<ProcKey, Option<Ancestor>>>,
    /// Holders of the last look that were not asked for yet: fetched along with the first that is.
    coming: RefCell<Vec<ProcKey>>,
    /// Boottime until which the caller has time.
    give_up_ns: Cell<u64>,
}

/// Eyes over the socket of a run directory, and the devices that its daemon traces.
pub fn open(run: &Path) -> Result<(SocketEyes, Devices), Unanswered> {
    let client = Client::new(super::path(run));
    let wire::Devices { devices, notes } = client.ask(&Request::new(Get::Devices), FIRST_TIME)?;
    let present = devices.iter().filter(|device| device.present).map(|device| device.slot).collect();
    let list = devices.into_iter().map(crate::model::Device::from).collect();
    let give_up_ns = Cell::new(u64::MAX);
    let eyes = SocketEyes { client, lineage: RefCell::default(), coming: RefCell::default(), give_up_ns };
    Ok((eyes, Devices::told(list, present, notes)))
}

impl SocketEyes {
    fn time(&self) -> Duration {
        let left = Duration::from_nanos(self.give_up_ns.get().saturating_sub(boottime_ns()));
        left.clamp(LAST_TIME, TIME)
    }

    fn look(&self, get: Get) -> anyhow::Result<View> {
        self.forget();
        let view: wire::View = self.client.ask(&Request::new(get), self.time()).map_err(Failure::from)?;
        let view = View::from(view);
        *self.coming.borrow_mut() = view.holders.iter().map(|holder| holder.key).collect();
        Ok(view)
    }

    fn forget(&self) {
        self.lineage.borrow_mut().clear();
        self.coming.borrow_mut().clear();
    }

    fn fetch(&self, key: ProcKey) {
        let mut keys = vec![key];
        {
            let (mut coming, known) = (self.coming.borrow_mut(), self.lineage.borrow());
            while keys.len() < MAX_KEYS {
                let Some(next) = coming.pop() else { break };
                if next != key && !known.contains_key(&next) {
                    keys.push(next);
                }
            }
        }
        let answer = self.client.ask::<wire::Lineage>(&Request::lineage(&keys), self.time());
        let mut known = self.lineage.borrow_mut();
        for key in keys {
            known.insert(key, None);
        }
        match answer {
            Ok(wire::Lineage { processes }) => {
                // The daemon has followed all parents as far as it knows any.
                known.extend(processes.iter().filter_map(|ancestor| Some((ancestor.parent?.into(), None))));
                known.extend(processes.into_iter().map(|ancestor| (ancestor.key.into(), Some(ancestor.into()))));
            }
            Err(error) => tracing::debug!("lineage: {error}"),
        }
    }
}

impl Eyes for SocketEyes {
    fn view(&self) -> anyhow::Result<View> {
        self.look(Get::View)
    }

    fn sweep(&self) -> anyhow::Result<View> {
        self.look(Get::Sweep)
    }

    fn look_at(&self, tgid: u32) -> anyhow::Result<Option<Holder>> {
        self.forget();
        let wire::LookAt { holder } = self.client.ask(&Request::look_at(tgid), self.time()).map_err(Failure::from)?;
        Ok(holder.map(Holder::from))
    }

    fn lineage(&self) -> &dyn LineageSource {
        self
    }

    fn give_up_at(&self, boottime_ns: u64) {
        self.give_up_ns.set(boottime_ns);
    }
}

impl LineageSource for SocketEyes {
    fn lookup(&self, key: ProcKey) -> Option<Ancestor> {
        if !self.lineage.borrow().contains_key(&key) {
            self.fetch(key);
        }
        self.lineage.borrow().get(&key).cloned().flatten()
    }
}
