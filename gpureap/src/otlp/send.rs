//! Sends a request of OTLP over HTTP/1.1 (protobuf). Encryption is a local collector's business.

use std::{fmt, io, time::Duration};

use anyhow::Context as _;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{Request, StatusCode, Uri, body::Bytes, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceResponse;
use prost::Message as _;
use tokio::net::TcpStream;

use crate::config::Otlp;

/// For one request, from the connection to the end of the answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// An answer has a number and a sentence in it.
const ANSWER: usize = 64 << 10;

/// What a receiver said that will not change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Taken { rejected: u64 },
    Refused(String),
}

/// A receiver that answers, and takes nothing now.
#[derive(Debug)]
pub struct Later {
    /// What it asks for (`Retry-After`, in seconds).
    pub after: Option<Duration>,
    why: String,
}

impl fmt::Display for Later {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

impl std::error::Error for Later {}

/// One connection for each request: there is one in seconds.
#[derive(Debug)]
pub struct Sender {
    otlp: Otlp,
    pub(super) patience: Duration,
    runtime: tokio::runtime::Runtime,
}

impl Sender {
    pub fn new(otlp: &Otlp) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Self { otlp: otlp.clone(), patience: PATIENCE, runtime })
    }

    pub fn name(&self) -> String {
        self.otlp.endpoint.to_string()
    }

    /// An error may be none the next time.
    pub fn send(&self, body: Vec<u8>) -> anyhow::Result<Answer> {
        let name = self.name();
        let sent = self.runtime.block_on(async { tokio::time::timeout(self.patience, post(&self.otlp, body)).await });
        let Said { status, after, answer } = match sent {
            Ok(sent) => sent.with_context(|| format!("{name} cannot be reached"))?,
            Err(_) => anyhow::bail!("{name} did not answer within {} s", self.patience.as_secs_f64()),
        };
        judge(status, &answer)
            .map_err(|why| Later { after, why: format!("{name} does not take records now: {why}") }.into())
    }
}

struct Said {
    status: StatusCode,
    after: Option<Duration>,
    answer: Bytes,
}

/// `Err`: later. What else is no success is never to be sent again, says the specification (OTLP/HTTP, failures).
pub fn judge(status: StatusCode, answer: &[u8]) -> Result<Answer, String> {
    if status.is_success() {
        let partial = ExportLogsServiceResponse::decode(answer).ok().and_then(|answer| answer.partial_success);
        let rejected = partial.map_or(0, |partial| partial.rejected_log_records.max(0).cast_unsigned());
        return Ok(Answer::Taken { rejected });
    }
    match status.as_u16() {
        // Of the first four the specification says so. A wrong path or a lacking password is cured in a configuration: nothing
        // is thrown away for it.
        429 | 502..=504 | 401 | 403..=405 => Err(status.to_string()),
        _ => Ok(Answer::Refused(status.to_string())),
    }
}

async fn post(otlp: &Otlp, body: Vec<u8>) -> anyhow::Result<Said> {
    let Otlp { endpoint, headers } = otlp;
    let host = endpoint.host().context("an endpoint has a host")?;
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let stream = TcpStream::connect((bare, endpoint.port_u16().unwrap_or(80))).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let mut request = Request::post(path(endpoint))
        .header(header::HOST, endpoint.authority().map_or(host, |authority| authority.as_str()))
        .header(header::CONTENT_TYPE, "application/x-protobuf")
        .header(header::USER_AGENT, concat!("gpureap/", env!("CARGO_PKG_VERSION")))
        .header(header::CONNECTION, "close");
    for (name, value) in headers {
        request = request.header(name, value);
    }
    let response = sender.send_request(request.body(Full::<Bytes>::from(body))?).await?;
    let status = response.status();
    let after = response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
    let answer = Limited::new(response.into_body(), ANSWER).collect().await;
    connection.abort();
    let answer = answer.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    Ok(Said { status, after: after.map(Duration::from_secs), answer })
}

/// As `OTEL_EXPORTER_OTLP_ENDPOINT`: the signal's path comes behind that of the endpoint.
fn path(endpoint: &Uri) -> String {
    format!("{}/v1/logs", endpoint.path().trim_end_matches('/'))
}

#[cfg(test)]
mod tests {
    use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsPartialSuccess;

    use super::*;

    #[test]
    fn what_a_receiver_says_and_what_it_means() {
        let partial = ExportLogsPartialSuccess { rejected_log_records: 3, error_message: "too old".to_owned() };
        let answer = ExportLogsServiceResponse { partial_success: Some(partial) }.encode_to_vec();
        let taken = |rejected| Ok(Answer::Taken { rejected });
        let judge = |code, answer: &[u8]| judge(StatusCode::from_u16(code).unwrap(), answer);
        assert_eq!(judge(200, &[]), taken(0));
        assert_eq!(judge(200, &answer), taken(3));
        assert_eq!(judge(202, b"not protobuf \xff"), taken(0));
        for code in [429, 502, 503, 504, 401, 403, 404] {
            assert!(judge(code, &[]).is_err(), "{code}");
        }
        for code in [400, 413, 500, 501] {
            assert!(matches!(judge(code, &[]), Ok(Answer::Refused(_))), "{code}");
        }
    }

    #[test]
    fn the_path_of_logs_comes_behind_that_of_the_endpoint() {
        for (endpoint, expected) in [
            ("http://127.0.0.1:4318", "/v1/logs"),
            ("http://127.0.0.1:4318/", "/v1/logs"),
            ("http://collector/otlp/", "/otlp/v1/logs"),
        ] {
            assert_eq!(path(&endpoint.parse().unwrap()), expected, "{endpoint}");
        }
    }
}
