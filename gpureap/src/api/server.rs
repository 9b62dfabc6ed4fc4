//! Serves the socket from the daemon's loop. Connections are tasks of their own that only read and write; the looks are
//! made one at a time between two drains of the ring. Everything is bounded: clients, bytes, times, and what a user may spend.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{
        UnixListener, UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{broadcast, mpsc, oneshot, watch},
    time::{sleep, timeout},
};

use super::{
    budget::Budget,
    privacy::{Hiding, Peer, hide_names, hide_process},
    socket::{self, Refused, SocketFile},
    wire::{self, Answer, Code, Events, Get, MAX_ANSWER, MAX_REQUEST, Refusal, Request},
};
use crate::{
    model::{Ancestor, Eyes, ProcKey, View},
    recorder::{Feed, Told},
};

const MAX_CLIENTS: usize = 256;
/// For each user but root.
const MAX_CLIENTS_OF_ONE: usize = 64;
/// Clients that read `events`, at most one part in so many of the above: they stay, and must leave room for those who ask.
const STREAMS_SHARE: usize = 2;
/// For a whole request, the silence before it included.
const READ_TIME: Duration = Duration::from_secs(10);
/// For a whole answer.
const WRITE_TIME: Duration = Duration::from_secs(10);
/// Bytes of answers that are not taken yet, of all clients, beyond which no new look is made.
const MAX_UNREAD: usize = 32 << 20;
/// Least time between two lines of `events`.
const BURST_PERIOD: Duration = Duration::from_millis(1);
/// Ancestors of one process that are followed.
const MAX_DEPTH: usize = 64;

/// A request that waits for the daemon's turn.
#[derive(Debug)]
pub struct Ask {
    request: Request,
    peer: Peer,
    reply: oneshot::Sender<Arc<Line>>,
}

/// An answer on its way, perhaps to several clients. Counts as unread while it lives.
#[derive(Debug)]
struct Line {
    bytes: Vec<u8>,
    room: Arc<Room>,
}

impl Drop for Line {
    fn drop(&mut self) {
        self.room.unread.fetch_sub(self.bytes.len(), Ordering::Relaxed);
    }
}

/// Who is there, and what waits to be read.
#[derive(Debug, Default)]
struct Room {
    clients: Seats,
    streams: Seats,
    unread: AtomicUsize,
}

/// Places by user.
#[derive(Clone, Debug, Default)]
struct Seats(Arc<Mutex<HashMap<u32, usize>>>);

impl Seats {
    fn take(&self, uid: u32, share: usize) -> Option<Seat> {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (all, own) = (taken.values().sum::<usize>(), taken.entry(uid).or_default());
        if all >= MAX_CLIENTS / share || uid != 0 && *own >= MAX_CLIENTS_OF_ONE / share {
            return None;
        }
        *own += 1;
        Some(Seat { uid, of: self.clone() })
    }
}

impl Room {
    fn line(self: &Arc<Self>, bytes: Vec<u8>) -> Arc<Line> {
        self.unread.fetch_add(bytes.len(), Ordering::Relaxed);
        Arc::new(Line { bytes, room: Arc::clone(self) })
    }
}

/// A client's place; given back with the end of its task.
#[derive(Debug)]
struct Seat {
    uid: u32,
    of: Seats,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = self.of.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = taken.get_mut(&self.uid) {
            *own -= 1;
            if *own == 0 {
                taken.remove(&self.uid);
            }
        }
    }
}

/// What the answers are made from.
pub struct Desk<'a> {
    pub eyes: &'a dyn Eyes,
    pub devices: &'a dyn Fn() -> anyhow::Result<wire::Devices>,
    pub status: &'a dyn Fn() -> anyhow::Result<wire::Status>,
    pub hiding: &'a dyn Fn() -> Hiding,
}

/// The listening end. Dropped, it takes the socket's file with it.
#[derive(Debug)]
pub struct Server {
    asks: mpsc::Receiver<Ask>,
    waiting: VecDeque<Ask>,
    budget: Budget,
    bursts: watch::Sender<u64>,
    room: Arc<Room>,
    begun: Instant,
    _file: SocketFile,
}

impl Server {
    /// Inside a runtime. `feed`: where events come from; `proc`: what says who may see whom.
    pub fn start(run: &Path, proc: &Path, feed: Feed) -> Result<Self, Refused> {
        let path = super::path(run);
        let (listener, file) = socket::listen(&path)?;
        let listener = UnixListener::from_std(listener)
            .map_err(|error| Refused::Io { path: path.display().to_string(), error })?;
        // Each client has at most one request on its way.
        let (sender, asks) = mpsc::channel(MAX_CLIENTS);
        let (bursts, burst) = watch::channel(0);
        let room = Arc::new(Room::default());
        let hall = Hall { asks: sender, bursts: burst, feed, proc: proc.to_owned(), room: Arc::clone(&room) };
        tokio::spawn(accept(listener, hall));
        Ok(Self {
            asks,
            waiting: VecDeque::new(),
            budget: Budget::default(),
            bursts,
            room,
            begun: Instant::now(),
            _file: file,
        })
    }

    /// The next requests that one look answers. May be dropped while it waits.
    pub async fn next(&mut self) -> Vec<Ask> {
        if self.waiting.is_empty()
            && let Some(ask) = self.asks.recv().await
        {
            self.waiting.push_back(ask);
        }
        while let Ok(ask) = self.asks.try_recv() {
            self.waiting.push_back(ask);
        }
        let Some(first) = self.waiting.pop_front() else { return Vec::new() };
        let get = first.request.get;
        let mut asks = vec![first];
        if matches!(get, Get::View | Get::Sweep) {
            // All of them came before the look begins, so it is true for each.
            let (same, others) = self.waiting.drain(..).partition::<Vec<Ask>, _>(|ask| ask.request.get == get);
            asks.extend(same);
            self.waiting.extend(others);
        }
        asks
    }

    /// The ring has given records.
    pub fn burst(&self) {
        self.bursts.send_modify(|bursts| *bursts += 1);
    }

    /// Makes the look and hands out the answers. `asks` come from one [`Server::next`].
    pub fn answer(&mut self, asks: Vec<Ask>, desk: &Desk<'_>) {
        let begun = self.begun.elapsed();
        let sweep = asks.first().is_some_and(|ask| ask.request.get == Get::Sweep);
        let full = self.room.unread.load(Ordering::Relaxed) > MAX_UNREAD;
        let mut allowed = Vec::with_capacity(asks.len());
        for ask in asks {
            let refusal = match self.budget.may(ask.peer.uid, sweep, begun) {
                Err(wait) => Refusal::busy("this user asks too much", millis(wait)),
                Ok(()) if full => Refusal::busy("too many answers wait to be read", 50),
                Ok(()) => {
                    allowed.push(ask);
                    continue;
                }
            };
            self.reply(ask, refusal.line());
        }
        let users: BTreeSet<u32> = allowed.iter().map(|ask| ask.peer.uid).collect();
        if users.is_empty() {
            return;
        }
        self.look(allowed, desk);
        let now = self.begun.elapsed();
        for uid in users {
            self.budget.spend(uid, sweep, now.saturating_sub(begun), now);
        }
    }

    fn reply(&self, ask: Ask, bytes: Vec<u8>) {
        // Whoever has gone needs no answer.
        drop(ask.reply.send(self.room.line(bytes)));
    }

    fn look(&self, asks: Vec<Ask>, desk: &Desk<'_>) {
        let hiding = if asks.iter().any(|ask| ask.peer.uid != 0) { (desk.hiding)() } else { Hiding::Nobody };
        let Some(Ask { request, peer, .. }) = asks.first() else { return };
        let hides = hiding.hides_from(*peer);
        match request.get {
            get @ (Get::View | Get::Sweep) => {
                let looked = if get == Get::View { desk.eyes.view() } else { desk.eyes.sweep() };
                self.hand_out(asks, &looked, hiding);
            }
            Get::LookAt => {
                let holder = desk.eyes.look_at(request.pid.unwrap_or(0));
                self.one(asks, holder.map(|holder| wire::LookAt { holder: holder.map(wire::Holder::from) }));
            }
            Get::Lineage => {
                let processes = lineage(desk.eyes, &request.of).into_iter().map(|ancestor| {
                    let told = if hides { hide_process(ancestor, *peer) } else { ancestor };
                    wire::Ancestor::from(told)
                });
                let processes = processes.collect();
                self.one(asks, Ok(wire::Lineage { processes }));
            }
            Get::Devices => self.one(asks, (desk.devices)()),
            Get::Status => self.one(asks, (desk.status)()),
            // Answered by the connection's own task.
            Get::Events | Get::Follow => {}
        }
    }

    fn one<T: serde::Serialize>(&self, asks: Vec<Ask>, result: anyhow::Result<T>) {
        let bytes = render(result);
        for ask in asks {
            self.reply(ask, bytes.clone());
        }
    }

    /// One look for several clients; one text for those from whom names are hidden, and one for the others.
    fn hand_out(&self, asks: Vec<Ask>, looked: &anyhow::Result<View>, hiding: Hiding) {
        let mut lines: BTreeMap<bool, Arc<Line>> = BTreeMap::new();
        for ask in asks {
            let hides = hiding.hides_from(ask.peer);
            let line = lines.entry(hides).or_insert_with(|| {
                let view = looked.as_ref().map(|view| {
                    let mut view = view.clone();
                    if hides {
                        hide_names(&mut view);
                    }
                    wire::View::from(view)
                });
                self.room.line(render(view.map_err(|error| anyhow::anyhow!("{error:#}"))))
            });
            drop(ask.reply.send(Arc::clone(line)));
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX).saturating_add(1)
}

fn render<T: serde::Serialize>(result: anyhow::Result<T>) -> Vec<u8> {
    let failed = |message: String| Refusal::new(Code::Failed, message).line();
    match result {
        Ok(value) => {
            let bytes = wire::line(&Answer::of(value));
            if bytes.len() > MAX_ANSWER {
                failed(format!("an answer of {} bytes is too long", bytes.len()))
            } else {
                bytes
            }
        }
        Err(error) => failed(format!("{error:#}")),
    }
}

/// The processes and their ancestors, each once.
fn lineage(eyes: &dyn Eyes, of: &[wire::Key]) -> Vec<Ancestor> {
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for key in of {
        let mut next = Some(ProcKey::from(*key));
        for _ in 0..MAX_DEPTH {
            let Some(key) = next.filter(|key| seen.insert(*key)) else { break };
            let Some(ancestor) = eyes.lineage().lookup(key) else { break };
            next = ancestor.parent;
            found.push(ancestor);
        }
    }
    found
}

/// What a connection needs.
#[derive(Clone, Debug)]
struct Hall {
    asks: mpsc::Sender<Ask>,
    bursts: watch::Receiver<u64>,
    feed: Feed,
    proc: PathBuf,
    room: Arc<Room>,
}

async fn accept(listener: UnixListener, hall: Hall) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, perhaps: clients wait in the queue.
                tracing::debug!("accept: {error}");
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(credentials) = stream.peer_cred() else { continue };
        let peer = Peer { uid: credentials.uid(), gid: credentials.gid() };
        if let Some(seat) = hall.room.clients.take(peer.uid, 1) {
            tokio::spawn(serve(stream, peer, seat, hall.clone()));
        } else {
            // A fresh socket's buffer takes it whole.
            stream.try_write(&Refusal::busy("too many clients", 100).line()).ok();
        }
    }
}

/// One client, until it is silent for too long, says something wrong, or hangs up.
async fn serve(stream: UnixStream, peer: Peer, seat: Seat, hall: Hall) {
    let (read, mut write) = stream.into_split();
    let mut read = BufReader::with_capacity(4096, read);
    while let Ok(Some(bytes)) = timeout(READ_TIME, request(&mut read)).await {
        let request = if bytes.len() > MAX_REQUEST {
            Err(Refusal::new(Code::BadRequest, format!("a request has at most {MAX_REQUEST} bytes")))
        } else {
            wire::parse(&bytes)
        };
        let request = match request {
            Ok(Request { get: get @ (Get::Events | Get::Follow), .. }) => {
                let Some(place) = hall.room.streams.take(peer.uid, STREAMS_SHARE) else {
                    send(&mut write, &Refusal::busy("too many clients read events", 1_000).line()).await.ok();
                    return;
                };
                if get == Get::Events {
                    return events(read, write, (seat, place), hall.bursts).await;
                }
                let hides = Hiding::here(&hall.proc).hides_from(peer);
                return follow(read, write, (seat, place), &hall.feed, peer, hides).await;
            }
            Ok(request) => request,
            Err(refusal) => {
                tracing::debug!(uid = peer.uid, "socket: {}", refusal.message);
                send(&mut write, &refusal.line()).await.ok();
                return;
            }
        };
        let (reply, answer) = oneshot::channel();
        if hall.asks.send(Ask { request, peer, reply }).await.is_err() {
            return;
        }
        let Ok(line) = answer.await else { return };
        if send(&mut write, &line.bytes).await.is_err() {
            return;
        }
    }
}

async fn send(write: &mut OwnedWriteHalf, bytes: &[u8]) -> Result<(), ()> {
    match timeout(WRITE_TIME, write.write_all(bytes)).await {
        Ok(Ok(())) => Ok(()),
        _ => Err(()),
    }
}

/// A line, or what is there of one that is too long; `None` at the end.
async fn request(read: &mut BufReader<OwnedReadHalf>) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    read.take(MAX_REQUEST as u64 + 1).read_until(b'\n', &mut bytes).await.ok()?;
    (!bytes.is_empty()).then_some(bytes)
}

async fn events(
    mut read: BufReader<OwnedReadHalf>,
    mut write: OwnedWriteHalf,
    _seats: (Seat, Seat),
    mut bursts: watch::Receiver<u64>,
) {
    loop {
        let events = *bursts.borrow_and_update();
        if send(&mut write, &wire::line(&Answer::of(Events { events }))).await.is_err() {
            return;
        }
        sleep(BURST_PERIOD).await;
        tokio::select! {
            changed = bursts.changed() => if changed.is_err() { return },
            // There is nothing more to say for the client: it has hung up or is confused.
            _ = read.read_u8() => return,
        }
    }
}

/// Hands on events. A client that does not keep up is told how many it has missed; one that takes nothing at all is hung
/// up on. The recorder never waits for either.
async fn follow(
    mut read: BufReader<OwnedReadHalf>,
    mut write: OwnedWriteHalf,
    _seats: (Seat, Seat),
    feed: &Feed,
    peer: Peer,
    hides: bool,
) {
    let (held, mut told) = feed.follow().await;
    // From now on nothing is missed: the client may begin to cause what it wants to see.
    let mut begin = b"{\"v\":1}\n".to_vec();
    for line in held.iter().filter_map(|told| told.for_peer(peer.uid, hides)) {
        begin.extend_from_slice(format!("{{\"v\":{},\"answer\":{line}}}\n", wire::VERSION).as_bytes());
    }
    if send(&mut write, &begin).await.is_err() {
        return;
    }
    loop {
        let line = tokio::select! {
            event = told.recv() => match event {
                Ok(told) => match told.for_peer(peer.uid, hides) {
                    Some(line) => format!("{{\"v\":{},\"answer\":{line}}}\n", wire::VERSION),
                    None => continue,
                },
                Err(broadcast::error::RecvError::Lagged(events)) => {
                    format!("{{\"v\":{},\"answer\":{}}}\n", wire::VERSION, Told::missed(events))
                }
                Err(broadcast::error::RecvError::Closed) => return,
            },
            _ = read.read_u8() => return,
        };
        if send(&mut write, line.as_bytes()).await.is_err() {
            return;
        }
    }
}
