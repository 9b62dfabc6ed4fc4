//! `gpureap report`: reads journals and recordings, and shows what the report's builder makes of them.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs::{self, File},
    io::{self, BufReader, Read as _, Write as _},
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use jiff::{SignedDuration, Timestamp};

use crate::{
    cli::ReportArgs,
    config::Config,
    error::Failure,
    exit_code::Exit,
    history::{
        build::{self, Ask},
        html, replay,
        report::Report,
        rows::Record,
        text,
    },
    host::Host,
    journal::{self, BootChoice, Question},
    out::{self, Style},
};

/// Without `--since`, `--at` or `--boot`.
const LAST: SignedDuration = SignedDuration::from_hours(1);

/// Names that are tried for a page that is being written.
const ATTEMPTS: u32 = 100;

/// From and until, where the arguments give them.
type Window = (Option<Timestamp>, Option<Timestamp>);

pub fn run(args: &ReportArgs, config: &Config) -> anyhow::Result<Exit> {
    let report = report(args, config)?;
    if let Some(path) = &args.html {
        write_page(path, &report)?;
    } else if args.json {
        out::json::print(&report)?;
    } else {
        out::raw(text::render(&report, Style::of_stdout()).as_bytes())?;
    }
    Ok(Exit::Done)
}

/// What the command tells.
pub fn report(args: &ReportArgs, config: &Config) -> anyhow::Result<Report> {
    let journal = &args.journal;
    let host = Host::read(&config.paths.proc);
    let own = config.paths.journal();
    let paths: Vec<PathBuf> = if journal.is_empty() { vec![own] } else { journal.clone() };
    let (question, window) = question(args, &host)?;
    let mut records = Vec::new();
    for path in &paths {
        let found = read(path, &question)?;
        for record in found {
            // The same journal given twice is one.
            if !records.iter().any(|other: &Record| other.boot == record.boot) {
                records.push(record);
            }
        }
    }
    let ask = ask(args, &records, window, &host)?;
    Ok(build::build(&records, &ask))
}

/// What is asked of the journals, and the window where the arguments give one.
fn question(args: &ReportArgs, host: &Host) -> anyhow::Result<(Question, Window)> {
    let ReportArgs { since, until, at, boot, .. } = args;
    let choice = boot.as_deref().map(|boot| boot_choice(boot, host)).transpose()?;
    let (since, until) = match (at, since, &choice) {
        (Some(at), ..) => (Some(*at), Some(*at)),
        // A boot is asked for as a whole.
        (None, None, Some(_)) => (None, *until),
        (None, since, _) => {
            let begin = || until.unwrap_or(host.now).checked_sub(LAST).unwrap_or(Timestamp::MIN);
            (Some(since.unwrap_or_else(begin)), *until)
        }
    };
    if let (Some(since), Some(until)) = (since, until)
        && since > until
    {
        return Err(Failure::usage(format!("--since {since:.0} is after --until {until:.0}")).into());
    }
    // GPUs and processes are chosen from the whole window: an incident is more than the one that was asked for.
    Ok((Question { since, until, boot: choice, nodes: Vec::new(), pid: None }, (since, until)))
}

fn boot_choice(text: &str, host: &Host) -> anyhow::Result<BootChoice> {
    let wrong = || Failure::usage(format!("--boot `{text}` is not 0, -1, -2 and so on, and no boot's id"));
    if let Ok(number) = text.parse::<i64>() {
        let boots = number.checked_neg().and_then(|boots| u32::try_from(boots).ok()).ok_or_else(wrong)?;
        return Ok(match boots {
            0 => BootChoice::Current(host.boot_id.clone()),
            boots => BootChoice::Back { boots, from: host.boot_id.clone() },
        });
    }
    let is_id = text.len() >= 4 && text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    if is_id { Ok(BootChoice::Id(text.to_owned())) } else { Err(wrong().into()) }
}

/// A journal, or a recording of events, told by how the file begins.
fn read(path: &Path, question: &Question) -> anyhow::Result<Vec<Record>> {
    let mut begin = [0; 1];
    let is_recording =
        File::open(path).and_then(|mut file| file.read(&mut begin)).is_ok_and(|length| length == 1) && begin[0] == b'{';
    if !is_recording {
        return journal::read(path, question);
    }
    let file = File::open(path).with_context(|| format!("open {}", path.display()))?;
    let events = replay::read(BufReader::new(file))
        .map_err(|message| Failure::unsupported(format!("{}: {message}", path.display())))?;
    let mut records = replay::replay(events);
    if let Some(BootChoice::Id(id)) = &question.boot {
        records.retain(|record| record.boot.boot_id.starts_with(id.as_str()));
    }
    Ok(records)
}

fn ask(args: &ReportArgs, records: &[Record], (since, until): Window, host: &Host) -> anyhow::Result<Ask> {
    let first = records.iter().map(|record| build::wall(&record.boot, 0)).min();
    // Where a boot is asked for, its own end; the host may have been down for long.
    let last = args.boot.as_ref().and_then(|_| {
        let end = |record: &Record| {
            let is_running = record.boot.boot_id == host.boot_id;
            if is_running { host.now } else { build::wall(&record.boot, record.boot.last_ns) }
        };
        records.iter().map(end).max()
    });
    let until = until.or(last).unwrap_or(host.now);
    let nodes = if args.gpu.is_empty() { None } else { Some(nodes(&args.gpu, records)?) };
    Ok(Ask {
        now: host.now,
        since: since.or(first).unwrap_or(until),
        until,
        at: args.at,
        running: Some(host.boot_id.clone()),
        nodes,
        pids: args.pid.clone(),
    })
}

/// The nodes of the GPUs that are asked for, as the record has them: the host may have others by now.
fn nodes(wanted: &[String], records: &[Record]) -> anyhow::Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for name in wanted.iter().filter(|name| *name != "all") {
        let before = found.len();
        for device in records.iter().flat_map(|record| &record.devices).filter(|device| device.kind.is_gpu()) {
            let lower = name.to_ascii_lowercase();
            let is = name.parse().is_ok_and(|number: u32| device.gpu == Some(number))
                || device.node == *name
                || device
                    .uuid
                    .as_ref()
                    .is_some_and(|uuid| name.len() >= 8 && uuid.to_ascii_lowercase().starts_with(&lower))
                || device.bdf.as_ref().is_some_and(|bdf| *bdf == lower || bdf.strip_prefix("0000:") == Some(&lower));
            if is {
                found.insert(device.node.clone());
            }
        }
        if found.len() == before && !records.is_empty() {
            return Err(Failure::usage(format!("the record has no GPU `{name}`")).into());
        }
    }
    if wanted.iter().any(|name| name == "all") {
        let all = records.iter().flat_map(|record| &record.devices).map(|device| device.node.clone());
        found.extend(all);
    }
    Ok(found)
}

/// Whole or not at all: a page that is looked at while it is written anew stays the old one.
fn write_page(path: &Path, report: &Report) -> anyhow::Result<()> {
    let page = html::render(report);
    let name = path.file_name().ok_or_else(|| Failure::usage(format!("--html {}: not a file", path.display())))?;
    let written = create_beside(path, name).and_then(|(mut file, temporary)| {
        let written = file.write_all(page.as_bytes()).and_then(|()| fs::rename(&temporary, path));
        if written.is_err() {
            fs::remove_file(&temporary).ok();
        }
        written
    });
    written.map_err(|error| crate::bpf::denied_or(path, error))
}

/// A new file. In a directory of all, such as /tmp, somebody may have put a link or a file of his under the name.
fn create_beside(path: &Path, name: &OsStr) -> io::Result<(File, PathBuf)> {
    for number in 0..ATTEMPTS {
        let mut temporary = name.to_owned();
        temporary.push(format!(".{}.{number}", std::process::id()));
        let temporary = path.with_file_name(temporary);
        match File::create_new(&temporary) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return made.map(|file| (file, temporary)),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Host {
        let now = "2026-12-01T12:00:00Z".parse().unwrap();
        Host { name: "gpu1".to_owned(), boot_id: "0a1b".to_owned(), now, boottime_ns: 1_000 }
    }

    #[test]
    fn windows() {
        let time = |text: &str| text.parse::<Timestamp>().unwrap();
        let args = |change: &dyn Fn(&mut ReportArgs)| {
            let mut args = ReportArgs::default();
            change(&mut args);
            question(&args, &host()).map(|(_, window)| window)
        };
        let (eleven, nine) = (time("2026-12-01T11:00:00Z"), time("2026-12-01T09:00:00Z"));
        assert_eq!(args(&|_| {}).unwrap(), (Some(eleven), None));
        assert_eq!(args(&|args| args.at = Some(nine)).unwrap(), (Some(nine), Some(nine)));
        assert_eq!(args(&|args| args.since = Some(nine)).unwrap(), (Some(nine), None));
        let until = args(&|args| args.until = Some(eleven)).unwrap();
        assert_eq!(until, (Some(time("2026-12-01T10:00:00Z")), Some(eleven)));
        let first = args(&|args| args.until = Some(Timestamp::MIN)).unwrap();
        assert_eq!(first, (Some(Timestamp::MIN), Some(Timestamp::MIN)));
        assert_eq!(args(&|args| args.boot = Some("-1".to_owned())).unwrap(), (None, None));
        let backwards = args(&|args| (args.since, args.until) = (Some(eleven), Some(nine)));
        assert_eq!(
            backwards.unwrap_err().to_string(),
            "--since 2026-12-01T11:00:00Z is after --until 2026-12-01T09:00:00Z"
        );
    }

    #[test]
    fn a_page_is_written_through_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let (page, victim) = (dir.path().join("page.html"), dir.path().join("victim"));
        fs::write(&victim, "precious").unwrap();
        // What somebody who knows the pid would put there, and a link where the page goes.
        for name in ["page.html".to_owned(), format!("page.html.{}.0", std::process::id())] {
            std::os::unix::fs::symlink(&victim, dir.path().join(name)).unwrap();
        }
        let asked = ask(&ReportArgs::default(), &[], (None, None), &host()).unwrap();
        write_page(&page, &build::build(&[], &asked)).unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
        assert!(fs::symlink_metadata(&page).unwrap().is_file());
        assert!(fs::read_to_string(&page).unwrap().starts_with("<!DOCTYPE html>"));
    }

    #[test]
    fn boots() {
        let choice = |text: &str| boot_choice(text, &host());
        assert_eq!(choice("0").unwrap(), BootChoice::Current("0a1b".to_owned()));
        assert_eq!(choice("-2").unwrap(), BootChoice::Back { boots: 2, from: "0a1b".to_owned() });
        assert_eq!(choice("0a1b-77").unwrap(), BootChoice::Id("0a1b-77".to_owned()));
        for text in ["1", "", "last", "-99999999999", "-9223372036854775808", "%"] {
            assert!(choice(text).is_err(), "{text}");
        }
    }
}
