//! Server and client over a real socket, with scripted eyes behind it.

use std::{
    cell::Cell,
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    rc::Rc,
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use tempfile::TempDir;
use tokio::sync::{broadcast, oneshot};

use super::{
    client,
    privacy::Hiding,
    server::{Desk, Server},
    wire::{self, MAX_REQUEST},
};
use crate::{
    model::{Ancestor, Backend, DeviceKind, Eyes, Holder, How, LineageSource, ProcKey, Source, Usage, View},
    recorder::{Feed, Told},
    watch::Watch,
};

const HOLDERS: u32 = 10_000;

/// Ten thousand holders, each forked from one of ten launchers that are gone.
#[derive(Debug, Default)]
struct Crowd {
    looks: Rc<Cell<u32>>,
}

fn holder(pid: u32) -> Holder {
    let usage = Usage { fds: 23, maps: 3, first_open_ns: Some(1), last_open_ns: Some(2), ever_mapped: true };
    Holder {
        key: ProcKey::new(pid, u64::from(pid)),
        usage: (0..5).map(|slot| (slot, usage.clone())).collect(),
        how: [How::Fd, How::Map].into(),
        private_tids: [].into(),
        inherited_from: None,
        from_snapshot: false,
    }
}

impl Eyes for Crowd {
    fn view(&self) -> anyhow::Result<View> {
        self.looks.set(self.looks.get() + 1);
        Ok(View {
            source: Source::Map,
            backend: Some(Backend::Gate),
            complete: true,
            cannot_see: [].into(),
            lost_events: 0,
            swept_ns: Some(self.looks.get().into()),
            open_files: [(0, HOLDERS)].into(),
            holders: (100..100 + HOLDERS).map(holder).collect(),
            orphans: Vec::new(),
            notes: Vec::new(),
        })
    }

    fn sweep(&self) -> anyhow::Result<View> {
        anyhow::bail!("no sweep today")
    }

    fn look_at(&self, tgid: u32) -> anyhow::Result<Option<Holder>> {
        Ok((tgid >= 100).then(|| holder(tgid)))
    }

    fn lineage(&self) -> &dyn LineageSource {
        self
    }
}

impl LineageSource for Crowd {
    fn lookup(&self, key: ProcKey) -> Option<Ancestor> {
        let launcher = (key.tgid >= 100).then(|| ProcKey::new(10 + key.tgid % 10, 1));
        let shell = ProcKey::new(2, 1);
        Some(Ancestor {
            key,
            parent: Some(launcher.unwrap_or(shell)).filter(|_| key != shell),
            comm: format!("p{}", key.tgid),
            uid: 4242,
            exit: launcher.is_none().then_some((5, 9)),
            ..Ancestor::default()
        })
        .filter(|_| key.tgid >= 10)
    }
}

/// A daemon's loop without a tracer.
struct Hall {
    dir: TempDir,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<u32>>,
    burst: tokio::sync::mpsc::UnboundedSender<()>,
    told: broadcast::Sender<Arc<Told>>,
}

impl Hall {
    fn open() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (stop, mut stopped) = oneshot::channel();
        let (burst, mut bursts) = tokio::sync::mpsc::unbounded_channel();
        let (ready, is_ready) = mpsc::channel();
        let run = dir.path().to_owned();
        let (told, _) = broadcast::channel(64);
        let telling = told.clone();
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let mut server = Server::start(&run, Path::new("/proc"), Feed::of(telling)).unwrap();
                ready.send(()).unwrap();
                let eyes = Crowd::default();
                let devices = || {
                    let device = crate::model::Device {
                        slot: 3,
                        node: "/dev/nvidia0".into(),
                        major: 195,
                        minor: Some(0),
                        kind: DeviceKind::Gpu,
                        gpu: Some(0),
                        index: None,
                        uuid: None,
                        bdf: None,
                        model: None,
                    };
                    Ok(wire::Devices { devices: vec![wire::Device::new(&device, true)], notes: Vec::new() })
                };
                let status = || anyhow::bail!("no status");
                let hiding = || Hiding::Nobody;
                loop {
                    tokio::select! {
                        _ = &mut stopped => break,
                        Some(()) = bursts.recv() => server.burst(),
                        asks = server.next() => server.answer(
                            asks,
                            &Desk { eyes: &eyes, devices: &devices, status: &status, hiding: &hiding },
                        ),
                    }
                }
                eyes.looks.get()
            })
        });
        is_ready.recv().unwrap();
        Self { dir, stop: Some(stop), thread: Some(thread), burst, told }
    }

    fn run(&self) -> &Path {
        self.dir.path()
    }

    fn raw(&self) -> UnixStream {
        let stream = UnixStream::connect(super::path(self.run())).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    }

    fn say(&self, text: &[u8]) -> String {
        let mut stream = self.raw();
        stream.write_all(text).ok();
        stream.shutdown(std::net::Shutdown::Write).ok();
        let mut answer = Vec::new();
        // After the answer comes a reset when not all was read of what was said.
        stream.read_to_end(&mut answer).ok();
        String::from_utf8(answer).unwrap()
    }

    fn close(mut self) -> u32 {
        self.stop.take().unwrap().send(()).unwrap();
        let looks = self.thread.take().unwrap().join().unwrap();
        assert!(!super::path(self.run()).exists(), "the socket goes with the server");
        looks
    }
}

#[test]
fn ten_thousand_holders_and_their_lineage() {
    let hall = Hall::open();
    let (eyes, devices) = client::open(hall.run()).unwrap();
    assert_eq!(devices.by_number(195, 0).unwrap().slot, 3);
    assert!(devices.is_present(3) && !devices.is_present(0));
    let view = eyes.view().unwrap();
    assert_eq!((view.holders.len(), &view.holders[0]), (HOLDERS as usize, &holder(100)));
    let begun = Instant::now();
    for holder in &view.holders {
        let known = eyes.lineage().lookup(holder.key).unwrap();
        let launcher = eyes.lineage().lookup(known.parent.unwrap()).unwrap();
        assert_eq!((launcher.comm, launcher.exit), (format!("p{}", 10 + holder.key.tgid % 10), Some((5, 9))));
        assert_eq!(eyes.lineage().lookup(launcher.parent.unwrap()), None, "nobody knows the shell");
    }
    assert!(begun.elapsed() < Duration::from_secs(20), "in some tens of requests: {:?}", begun.elapsed());
    assert_eq!(eyes.look_at(7).unwrap(), None);
    assert_eq!(eyes.look_at(700).unwrap(), Some(holder(700)));
    let error = eyes.sweep().unwrap_err();
    assert!(error.to_string().contains("no sweep today"), "{error:#}");
    assert!(eyes.view().is_ok(), "a failed look is not the end");
    drop(eyes);
    assert_eq!(hall.close(), 2);
}

#[test]
fn wrong_requests_get_a_sentence_and_do_no_harm() {
    let hall = Hall::open();
    let (long, deep) = (vec![b'x'; MAX_REQUEST * 4], vec![b'['; MAX_REQUEST]);
    for (text, code) in [
        (&b"\n"[..], "bad_request"),
        (b"rubbish\n", "bad_request"),
        (b"\xff\xfe\0\n", "bad_request"),
        (b"{\"v\":9,\"get\":\"view\"}\n", "\"version\""),
        (b"{\"v\":1,\"get\":\"status\"}", "no status"),
        (&long, "at most"),
        (&deep, "bad_request"),
    ] {
        let answer = hall.say(text);
        assert!(answer.contains(code) && answer.ends_with('\n'), "{code}: {answer}");
    }
    assert_eq!(hall.say(b""), "");
    assert!(hall.say(b"{\"v\":1,\"get\":\"look_at\",\"pid\":7}\n").contains("\"holder\":null"));
    hall.close();
}

#[test]
fn requests_that_come_together_share_a_look() {
    let hall = Hall::open();
    let mut streams: Vec<UnixStream> = (0..12).map(|_| hall.raw()).collect();
    for stream in &mut streams {
        stream.write_all(b"{\"v\":1,\"get\":\"view\"}\n").unwrap();
    }
    for stream in &mut streams {
        let mut last = vec![0; 1 << 16];
        loop {
            let count = stream.read(&mut last).unwrap();
            assert!(count > 0);
            if last[..count].ends_with(b"\n") {
                break;
            }
        }
    }
    drop(streams);
    assert!(hall.close() < 12, "twelve requests, fewer looks");
}

#[test]
fn silent_clients_and_slow_readers_keep_nobody_waiting() {
    let hall = Hall::open();
    let silent: Vec<UnixStream> = (0..6).map(|_| hall.raw()).collect();
    let mut slow: Vec<UnixStream> = (0..6).map(|_| hall.raw()).collect();
    for stream in &mut slow {
        // Megabytes that nobody reads.
        stream.write_all(b"{\"v\":1,\"get\":\"view\"}\n").unwrap();
    }
    let (eyes, _) = client::open(hall.run()).unwrap();
    let begun = Instant::now();
    assert!(eyes.look_at(700).unwrap().is_some());
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    drop((silent, slow, eyes));
    hall.close();
}

#[test]
fn a_daemon_that_comes_back_is_met_again() {
    let hall = Hall::open();
    let (eyes, _) = client::open(hall.run()).unwrap();
    let run = hall.run().to_owned();
    let Hall { dir, stop, thread, burst: _, told: _ } = hall;
    stop.unwrap().send(()).unwrap();
    thread.unwrap().join().unwrap();
    let back = thread::spawn(move || {
        thread::sleep(Duration::from_millis(200));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut server = Server::start(&run, Path::new("/proc"), Feed::of(broadcast::channel(1).0)).unwrap();
            let eyes = Crowd::default();
            let (devices, status, hiding) = (|| anyhow::bail!("none"), || anyhow::bail!("none"), || Hiding::Nobody);
            let asks = server.next().await;
            server.answer(asks, &Desk { eyes: &eyes, devices: &devices, status: &status, hiding: &hiding });
            tokio::time::sleep(Duration::from_millis(100)).await;
        });
    });
    assert!(eyes.look_at(700).unwrap().is_some());
    back.join().unwrap();
    drop(dir);
}

#[test]
fn events_are_passed_on() {
    let hall = Hall::open();
    let mut watch = Watch::new(hall.run());
    let late = |watch: &mut Watch| watch.wait(&[], crate::clock::boottime_ns() + 20_000_000).unwrap().is_late();
    assert!((0..100).any(|_| late(&mut watch)), "nothing happens");
    hall.burst.send(()).unwrap();
    let woken = watch.wait(&[], crate::clock::boottime_ns() + 30_000_000_000).unwrap();
    assert!(woken.event);
    assert!((0..100).any(|_| late(&mut watch)), "told once");
    hall.close();
    // A daemon that has gone wakes once and then no more.
    assert!((0..100).any(|_| late(&mut watch)));
    assert!(!watch.hears());
}

#[test]
fn a_daemon_of_another_version_is_no_source() {
    let dir = tempfile::tempdir().unwrap();
    let listener = std::os::unix::net::UnixListener::bind(super::path(dir.path())).unwrap();
    let daemon = thread::spawn(move || {
        for stream in listener.incoming().take(2) {
            let mut stream = stream.unwrap();
            assert!(stream.read(&mut [0; 1024]).unwrap() > 0);
            stream.write_all(b"{\"v\":2,\"answer\":{\"devices\":[],\"notes\":[],\"events\":0}}\n").unwrap();
        }
    });
    let error = client::open(dir.path()).unwrap_err();
    assert!(error.to_string().ends_with("it is of version 2 of the protocol, and this gpureap speaks 1"), "{error}");
    assert!(matches!(client::events(&super::path(dir.path())), Err(client::Unanswered::Strange { .. })));
    daemon.join().unwrap();
}

#[test]
fn nobody_listens() {
    let dir = tempfile::tempdir().unwrap();
    let begun = Instant::now();
    assert!(matches!(client::open(dir.path()), Err(client::Unanswered::Absent { .. })));
    // Like a daemon that is stopped: the kernel takes the connection, and nobody answers.
    let _listener = std::os::unix::net::UnixListener::bind(super::path(dir.path())).unwrap();
    assert!(matches!(client::open(dir.path()), Err(client::Unanswered::Silent { .. })));
    assert!(begun.elapsed() < Duration::from_secs(20));
}

fn told(events: u64) -> Arc<Told> {
    let line = Told::missed(events);
    Arc::new(Told { public: line.clone(), line, uid: None, personal: false })
}

#[test]
fn a_follower_gets_each_event_and_a_slow_one_is_told_what_it_missed() {
    use crate::history::event::What;
    let hall = Hall::open();
    let events = |event: Result<crate::history::event::Event, client::Unanswered>| match event.unwrap().what {
        What::Lost(lost) => (lost.at, lost.events),
        other => panic!("{other:?}"),
    };
    let mut follower = client::follow(&crate::api::path(hall.run())).unwrap();
    for number in 1..=3 {
        hall.told.send(told(number)).unwrap();
        assert_eq!(events(follower.next().unwrap()), ("reader".to_owned(), number));
    }
    // Far more than the channel and the socket's buffer hold while nobody reads.
    let big = Told { line: "x".repeat(1 << 16), ..Told::clone(&told(1)) };
    for _ in 0..200 {
        hall.told.send(Arc::new(Told { line: format!("{{\"big\":\"{}\"}}", big.line), ..big.clone() })).unwrap();
    }
    hall.told.send(told(77)).unwrap();
    let mut missed = 0;
    // What is no event is told as such; between them comes the record of the loss.
    for event in follower {
        match event {
            Ok(event) => match event.what {
                What::Lost(lost) if lost.note.contains("came faster") && lost.events != 77 => missed += lost.events,
                What::Lost(lost) if lost.events == 77 => break,
                other => panic!("{other:?}"),
            },
            Err(client::Unanswered::Strange { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    assert!(missed > 0, "a slow reader is told of its loss");
}

#[test]
fn who_may_read_what_of_an_event() {
    let told = Told { line: "all".into(), public: "some".into(), uid: Some(1000), personal: true };
    for (uid, hides, expected) in
        [(0, true, Some("all")), (1000, true, Some("all")), (1001, false, Some("some")), (1001, true, None)]
    {
        assert_eq!(told.for_peer(uid, hides), expected, "{uid} {hides}");
    }
    let of_nobody = Told { uid: None, personal: false, ..told };
    assert_eq!(of_nobody.for_peer(1001, true), Some("some"));
}
