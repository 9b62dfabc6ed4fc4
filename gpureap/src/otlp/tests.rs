use std::{
    io::{BufRead as _, BufReader, Read as _},
    net::{SocketAddr, TcpListener},
    sync::mpsc::{Receiver, channel},
    time::Instant,
};

use opentelemetry_proto::tonic::collector::logs::v1::{
    ExportLogsPartialSuccess, ExportLogsServiceRequest, ExportLogsServiceResponse,
};

use super::*;
use crate::{
    history::{
        event::{Event, Lost, What},
        rows::{Boot, Change, Run},
    },
    journal::Writer,
    model::Backend,
};

#[test]
fn a_cursor_survives_and_what_is_none_is_none() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(Cursor::read(dir.path()).unwrap(), None);
    let cursor = Cursor { sent: 7, gone: 2, ..Cursor::at(Position { id: 5, time_ns: 9 }) };
    cursor.write(dir.path()).unwrap();
    assert_eq!(Cursor::read(dir.path()).unwrap(), Some(cursor));
    fs::write(dir.path().join(FILE), "{").unwrap();
    assert_eq!(Cursor::read(dir.path()).unwrap(), None);
    // A link in the place of the new file is not followed.
    let victim = dir.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    std::os::unix::fs::symlink(&victim, dir.path().join(format!("{FILE}.new"))).unwrap();
    assert!(cursor.write(dir.path()).is_err());
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
}

#[test]
fn pauses_grow_to_a_minute_and_longer_only_if_asked() {
    let seconds = |failures, asked: Option<u64>| pause(failures, asked.map(Duration::from_secs), 0).as_secs();
    let grown: Vec<u64> = (1..10).map(|failures| seconds(failures, None)).collect();
    assert_eq!(grown, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
    assert_eq!(seconds(u32::MAX, None), 60);
    assert_eq!((seconds(1, Some(30)), seconds(7, Some(30)), seconds(1, Some(1 << 40))), (30, 60, 600));
    // A quarter at most, and not the same for all.
    let scattered: Vec<Duration> = [0, 128, 255, 256].map(|noise| pause(1, None, noise)).into();
    assert!(scattered.iter().all(|pause| (AGAIN..AGAIN * 5 / 4).contains(pause)), "{scattered:?}");
    assert!(scattered[0] < scattered[1] && scattered[1] < scattered[2] && scattered[0] == scattered[3]);
}

/// What a receiver got: the head of a request, and its body.
type Got = (String, ExportLogsServiceRequest);

/// A receiver that gives these answers, one for each connection, and then is gone.
fn receiver(answers: Vec<Vec<u8>>) -> (SocketAddr, Receiver<Got>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let (sender, got) = channel();
    std::thread::spawn(move || {
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") {
                reader.read_line(&mut head).unwrap();
            }
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
            let mut body = vec![0; length.parse().unwrap()];
            reader.read_exact(&mut body).unwrap();
            stream.write_all(&answer).unwrap();
            sender.send((head, ExportLogsServiceRequest::decode(&body[..]).unwrap())).unwrap();
        }
    });
    (at, got)
}

fn answer(status: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

struct Place {
    dir: tempfile::TempDir,
    writer: Writer,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = Writer::open(&dir.path().join("journal.db"), "b1").unwrap().writer;
        let boot =
            Boot { boot_id: "b1".into(), host: "n1".into(), kernel: "6.8.0".into(), wall_offset_ns: 0, last_ns: 0 };
        let (version, backend) = ("0.1.0".to_owned(), "gate".to_owned());
        let run = Run { version, pid: 1, backend, adopted: false, begin_ns: 1, end_ns: None };
        writer.apply(&[Change::Start { boot, run, devices: Vec::new() }]).unwrap();
        Self { dir, writer }
    }

    fn lose(&mut self, notes: &[&str]) {
        let lost = |note: &&str| {
            let what = What::Lost(Lost { events: 1, at: "test".into(), note: (*note).to_owned() });
            Change::Event(Event { time: jiff::Timestamp::UNIX_EPOCH, boot_ns: 1, what })
        };
        self.writer.apply(&notes.iter().map(lost).collect::<Vec<_>>()).unwrap();
    }

    fn exporter(&self, at: SocketAddr) -> Exporter {
        let headers = vec![("x-tenant".parse().unwrap(), "gpu".parse().unwrap())];
        let otlp = Otlp { endpoint: format!("http://{at}/otlp").parse().unwrap(), headers };
        Exporter {
            journal: self.dir.path().join("journal.db"),
            state: self.dir.path().to_owned(),
            sender: Sender::new(&otlp).unwrap(),
            origin: Origin::default(),
            metrics: Arc::new(Metrics::new(Backend::Gate, false)),
            since_ns: 0,
            cursor: None,
            complaint: Complaint::none(),
        }
    }

    /// What the disk has: position, sent, rejected.
    fn cursor(&self) -> (i64, u64, u64) {
        let Cursor { position, sent, rejected, .. } = Cursor::read(self.dir.path()).unwrap().unwrap();
        (position.id, sent, rejected)
    }
}

fn notes(got: &ExportLogsServiceRequest) -> Vec<String> {
    let logs = got.resource_logs.iter().flat_map(|logs| &logs.scope_logs).flat_map(|scope| &scope.log_records);
    logs.map(|log| {
        let body = log.body.as_ref().and_then(|body| body.value.clone()).unwrap();
        let opentelemetry_proto::tonic::common::v1::any_value::Value::StringValue(text) = body else { panic!() };
        text
    })
    .collect()
}

fn series(exporter: &Exporter, name: &str) -> u64 {
    let page = exporter.metrics.render().unwrap();
    let line = page.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name} in {page}"));
    line.trim().parse().unwrap()
}

#[test]
fn the_cursor_moves_when_the_receiver_has_taken_it() {
    let mut place = Place::new();
    let (at, got) = receiver(vec![answer("200 OK", "", b""), answer("202 Accepted", "", b"")]);
    let mut exporter = place.exporter(at);
    assert!(!exporter.step().unwrap(), "nothing yet");
    assert_eq!(place.cursor(), (0, 0, 0));
    place.lose(&["a", "b"]);
    assert!(exporter.step().unwrap());
    let (head, body) = got.recv().unwrap();
    assert_eq!(notes(&body), ["a", "b"]);
    assert!(head.starts_with("POST /otlp/v1/logs HTTP/1.1\r\n"), "{head}");
    for line in ["content-type: application/x-protobuf", "x-tenant: gpu", &format!("host: {at}")] {
        assert!(head.contains(&format!("\r\n{line}\r\n")), "{line} in {head}");
    }
    assert_eq!(place.cursor(), (2, 2, 0));
    assert!(!exporter.step().unwrap());
    // Another daemon goes on where this one was.
    place.lose(&["c"]);
    let mut next = place.exporter(at);
    assert!(next.step().unwrap());
    assert_eq!(notes(&got.recv().unwrap().1), ["c"]);
    assert_eq!(place.cursor(), (3, 3, 0));
    assert_eq!((series(&next, "gpureap_otlp_records_total"), series(&next, "gpureap_otlp_backlog_events")), (3, 0));
}

#[test]
fn what_is_refused_for_now_is_sent_again_and_what_is_refused_for_good_is_counted() {
    let partial = ExportLogsPartialSuccess { rejected_log_records: 1, error_message: "too old".to_owned() };
    let partial = ExportLogsServiceResponse { partial_success: Some(partial) }.encode_to_vec();
    // Each: an answer, what it asks for if it means later, and what is counted after it of two records.
    for (status, headers, body, later, counted) in [
        ("200 OK", "", &b""[..], None, (2, 2, 0)),
        ("200 OK", "", &partial[..], None, (2, 1, 1)),
        ("400 Bad Request", "", b"no", None, (2, 0, 2)),
        ("413 Payload Too Large", "", b"", None, (2, 0, 2)),
        ("500 Internal Server Error", "", b"", None, (2, 0, 2)),
        ("401 Unauthorized", "", b"", Some(None), (0, 0, 0)),
        ("404 Not Found", "", b"", Some(None), (0, 0, 0)),
        ("429 Too Many Requests", "retry-after: 7\r\n", b"", Some(Some(7)), (0, 0, 0)),
        ("429 Too Many Requests", "retry-after: Wed, 21 Oct 2026 07:28:00 GMT\r\n", b"", Some(None), (0, 0, 0)),
        ("502 Bad Gateway", "", b"", Some(None), (0, 0, 0)),
        ("503 Service Unavailable", "retry-after: 3\r\n", b"", Some(Some(3)), (0, 0, 0)),
        ("504 Gateway Timeout", "", b"", Some(None), (0, 0, 0)),
    ] {
        let mut place = Place::new();
        let (at, got) = receiver(vec![answer(status, headers, body), answer("200 OK", "", b"")]);
        let mut exporter = place.exporter(at);
        exporter.step().unwrap();
        place.lose(&["a", "b"]);
        let outcome = exporter.step();
        assert_eq!(notes(&got.recv().unwrap().1), ["a", "b"], "{status}");
        assert_eq!(place.cursor(), counted, "{status}");
        match later {
            None => assert!(outcome.unwrap(), "{status}"),
            Some(after) => {
                let error = outcome.unwrap_err();
                let asked = error.downcast_ref::<Later>().unwrap_or_else(|| panic!("{status}: {error:#}"));
                assert_eq!(asked.after, after.map(Duration::from_secs), "{status}");
                assert!(error.to_string().contains(&status[..3]), "{error:#}");
                assert_eq!(series(&exporter, "gpureap_otlp_backlog_events"), 2, "{status}");
                assert!(exporter.step().unwrap());
                assert_eq!(notes(&got.recv().unwrap().1), ["a", "b"], "the same again after {status}");
                assert_eq!(place.cursor(), (2, 2, 0), "{status}");
            }
        }
    }
}

#[test]
fn nobody_there_or_nobody_who_answers_costs_time_and_no_record() {
    let mut place = Place::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut exporter = place.exporter(listener.local_addr().unwrap());
    exporter.sender.patience = Duration::from_millis(300);
    exporter.step().unwrap();
    place.lose(&["a"]);
    // The kernel accepts, and nobody ever answers.
    let began = Instant::now();
    let error = exporter.step().unwrap_err().to_string();
    assert!(error.ends_with("did not answer within 0.3 s"), "{error}");
    let took = began.elapsed();
    assert!((Duration::from_millis(300)..Duration::from_secs(5)).contains(&took), "{took:?}");
    drop(listener);
    let error = format!("{:#}", exporter.step().unwrap_err());
    assert!(error.contains("cannot be reached") && error.contains("refused"), "{error}");
    // It hangs up in the middle of its answer's head.
    let (at, _got) = receiver(vec![b"HTTP/1.1 20".to_vec()]);
    let mut exporter = place.exporter(at);
    assert!(exporter.step().is_err());
    assert_eq!(place.cursor(), (0, 0, 0));
}

#[test]
fn what_retention_took_is_counted_while_nothing_can_be_sent() {
    let mut place = Place::new();
    let nowhere = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut exporter = place.exporter(nowhere);
    exporter.step().unwrap();
    place.lose(&["a", "b", "c"]);
    rusqlite::Connection::open(place.dir.path().join("journal.db"))
        .unwrap()
        .execute("DELETE FROM events WHERE id < 3", [])
        .unwrap();
    for _ in 0..2 {
        assert!(exporter.step().is_err());
        assert_eq!(series(&exporter, "gpureap_otlp_lost_total{reason=\"retention\"}"), 2);
    }
    let (at, got) = receiver(vec![answer("200 OK", "", b"")]);
    let mut exporter = place.exporter(at);
    assert!(exporter.step().unwrap());
    assert_eq!(notes(&got.recv().unwrap().1), ["c"]);
    assert_eq!(Cursor::read(place.dir.path()).unwrap().map(|cursor| (cursor.gone, cursor.sent)), Some((2, 1)));
    assert_eq!(series(&exporter, "gpureap_otlp_lost_total{reason=\"retention\"}"), 2);
}

#[test]
fn without_a_journal_there_is_nothing_to_send_and_nothing_wrong() {
    let place = Place::new();
    let nowhere = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut exporter = Exporter { journal: place.dir.path().join("none.db"), ..place.exporter(nowhere) };
    assert!(!exporter.step().unwrap());
    assert_eq!(Cursor::read(place.dir.path()).unwrap(), None);
}
