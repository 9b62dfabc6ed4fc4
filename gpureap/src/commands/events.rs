//! `gpureap events`: what the flight recorder has written down, and what it sees from now on.

use jiff::{SignedDuration, Timestamp};

use crate::{
    api::{self, client},
    cli::EventsArgs,
    config::Config,
    error::Failure,
    exit_code::Exit,
    history::{
        event::{Event, SCHEMA},
        line,
    },
    journal::reader,
    out,
};

/// Without `--since`.
const LAST: SignedDuration = SignedDuration::from_hours(1);

pub fn run(args: &EventsArgs, config: &Config) -> anyhow::Result<Exit> {
    let EventsArgs { follow, since, json } = args;
    // Before the journal is read, so that nothing falls between the two; what both have is told once.
    let stream = follow.then(|| client::follow(&api::path(&config.paths.run))).transpose().map_err(Failure::from)?;
    let mut last = 0;
    if since.is_some() || !follow {
        let path = config.paths.journal();
        let since = since.unwrap_or_else(|| Timestamp::now() - LAST);
        let written = reader::events(&path, Some(since), |event| {
            last = last.max(event.boot_ns);
            anyhow::ensure!(print(&event, *json)?, Gone);
            Ok(())
        });
        match written {
            Err(error) if error.is::<Gone>() => return Ok(Exit::Done),
            result => result?,
        }
    }
    for event in stream.into_iter().flatten() {
        let event = event?;
        if event.boot_ns > last && !print(&event, *json)? {
            break;
        }
    }
    Ok(Exit::Done)
}

/// Nobody reads what is printed.
#[derive(Debug, thiserror::Error)]
#[error("nobody reads any more")]
struct Gone;

/// Says whether anybody still reads.
fn print(event: &Event, json: bool) -> anyhow::Result<bool> {
    if json {
        #[derive(serde::Serialize)]
        struct Line<'a> {
            schema: &'static str,
            #[serde(flatten)]
            event: &'a Event,
        }
        out::json::stream(&Line { schema: SCHEMA, event })
    } else {
        out::stream(line::line(event).as_bytes())
    }
}
