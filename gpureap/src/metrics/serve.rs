//! Serves the numbers over HTTP, in a thread of its own with a runtime of its own: whoever floods it has a part of that
//! thread's time, and nothing of the tracer's or the recorder's. Everything is bounded: clients, bytes, times, and how
//! often somebody looks.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{ALLOW, CONTENT_TYPE, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
    time::{sleep, timeout},
};

use super::{Metrics, look::Looker};
use crate::{config::Config, gpu::devices::Devices, journal::Meter, out::complaint::Complaint};

/// At a time. A server or two ask every few seconds; more wait in the kernel's queue until one has gone.
const CLIENTS: usize = 16;
/// For the head of a request. A request has no body that is read.
const HEAD_TIME: Duration = Duration::from_secs(3);
/// For all of it, the answer included.
const WHOLE_TIME: Duration = Duration::from_secs(10);
/// The least that the library takes; a request of Prometheus has some hundred bytes.
const HEAD_BYTES: usize = 8192;
const HEADERS: usize = 64;
/// Whoever asks more often gets the numbers of the last look.
const LOOK_APART: Duration = Duration::from_secs(1);
/// Of the time, looks take no more than one part in so many.
const LOOK_SHARE: u32 = 10;
/// Between two attempts to listen.
const AGAIN: Duration = Duration::from_secs(5);

/// What is known outside of the kernel's maps.
#[derive(Clone, Debug)]
pub struct Sources {
    pub metrics: Arc<Metrics>,
    /// Without a journal there is none.
    pub journal: Option<Meter>,
    pub recorder_lost: Arc<AtomicU64>,
}

/// Starts the thread. It ends with the process; that `listen` cannot be had is told, and tried again.
pub fn start(
    config: &Config,
    listen: SocketAddr,
    sources: Sources,
    devices: watch::Receiver<Devices>,
) -> io::Result<()> {
    let desk = Desk { looker: Looker::new(config.clone()), devices, sources, next_look: Instant::now() };
    let desk = Arc::new(Mutex::new(desk));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("metrics".to_owned()).spawn(move || runtime.block_on(serve(listen, desk)))?;
    Ok(())
}

async fn serve(listen: SocketAddr, desk: Arc<Mutex<Desk>>) {
    let seats = Arc::new(Semaphore::new(CLIENTS));
    let listener = bind(listen).await;
    loop {
        let Ok(seat) = Arc::clone(&seats).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let desk = Arc::clone(&desk);
                tokio::spawn(async move {
                    let _seat = seat;
                    connection(stream, desk).await;
                });
            }
            Err(error) => {
                // Out of descriptors, perhaps: clients wait in the queue.
                tracing::debug!("metrics: accept: {error}");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// An address may come later than the daemon, and a port may be somebody's for a while: tracing does not wait for either.
async fn bind(listen: SocketAddr) -> TcpListener {
    let mut complaint = Complaint::none();
    loop {
        match TcpListener::bind(listen).await {
            Ok(listener) => {
                let at = listener.local_addr().unwrap_or(listen);
                tracing::info!("metrics are served at http://{at}/metrics");
                return listener;
            }
            Err(error) => {
                let error = error.to_string();
                if complaint.is_news(&error) {
                    tracing::warn!("no metrics for now: {listen} cannot be listened on: {error}");
                }
            }
        }
        sleep(AGAIN).await;
    }
}

/// One request and its answer.
async fn connection(stream: TcpStream, desk: Arc<Mutex<Desk>>) {
    let service = service_fn(move |request: Request<Incoming>| {
        let answer = answer(request.method(), request.uri().path(), || {
            desk.lock().unwrap_or_else(PoisonError::into_inner).text()
        });
        async move { Ok::<_, Infallible>(answer) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .keep_alive(false)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEADERS)
        .serve_connection(TokioIo::new(stream), service);
    match timeout(WHOLE_TIME, served).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!("metrics: {error}"),
        Err(_) => tracing::debug!("metrics: a client takes too long"),
    }
}

fn answer(method: &Method, path: &str, text: impl FnOnce() -> Option<String>) -> Response<Full<Bytes>> {
    let plain = |status: StatusCode, text: &'static str| {
        let mut response = Response::new(Full::from(text));
        *response.status_mut() = status;
        response
    };
    if path != "/metrics" {
        return plain(StatusCode::NOT_FOUND, "the metrics are at /metrics\n");
    }
    if method != Method::GET && method != Method::HEAD {
        let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "GET or HEAD\n");
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    let Some(text) = text() else {
        return plain(StatusCode::INTERNAL_SERVER_ERROR, "the metrics cannot be written\n");
    };
    let mut response = Response::new(Full::from(text));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(super::CONTENT_TYPE));
    response
}

struct Desk {
    looker: Looker,
    devices: watch::Receiver<Devices>,
    sources: Sources,
    next_look: Instant,
}

impl Desk {
    fn text(&mut self) -> Option<String> {
        let Sources { metrics, journal, recorder_lost } = &self.sources;
        if self.devices.has_changed().unwrap_or(false) {
            self.looker.forget();
            self.next_look = Instant::now();
        }
        let begun = Instant::now();
        if begun >= self.next_look {
            let devices = self.devices.borrow_and_update().clone();
            metrics.looked(self.looker.look(&devices).as_ref());
            self.next_look = begun + LOOK_APART.max(begun.elapsed() * LOOK_SHARE);
        }
        if let Some(journal) = journal {
            metrics.journal(&journal.status());
        }
        metrics.recorder_lost(recorder_lost.load(Ordering::Relaxed));
        metrics.render().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_answered_to_what() {
        let text = || Some("x 1\n".to_owned());
        for (method, path, expected) in [
            (Method::GET, "/metrics", 200),
            (Method::HEAD, "/metrics", 200),
            (Method::POST, "/metrics", 405),
            (Method::GET, "/", 404),
            (Method::GET, "/metrics/", 404),
            (Method::POST, "/", 404),
        ] {
            assert_eq!(answer(&method, path, text).status().as_u16(), expected, "{method} {path}");
        }
        let served = answer(&Method::GET, "/metrics", text);
        assert_eq!(served.headers()[CONTENT_TYPE], "text/plain; version=0.0.4; charset=utf-8");
        assert_eq!(answer(&Method::GET, "/metrics", || None).status().as_u16(), 500);
        // Only who may have the numbers makes somebody look.
        answer(&Method::GET, "/", || panic!("nobody looks"));
    }
}
