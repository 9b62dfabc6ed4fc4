//! What the kernel itself does to the holders and when, from a tracefs instance of our own.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result, ensure};

/// Events that are recorded, with their filters: signals to and from the dying, and the removal of a lock. Each holder
/// keeps a lock on its open device, and the kernel takes that off in the last step of a close before the driver's own.
const EVENTS: [(&str, &str); 2] =
    [("signal/signal_generate", "sig == 9 || sig == 17"), ("filelock/flock_lock_inode", "type == 2")];
const BUFFER_KIB: &str = "2048";

/// What one event says. Times are boottime in microseconds: the trace has no more digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) at_us: i64,
    /// The thread that it happened in.
    pub(super) task: u32,
    pub(super) what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Signal {
        signal: u32,
        to: u32,
    },
    /// A locked file is being closed for good.
    Close(Inode),
}

/// Of a node, with the device number of its file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Inode {
    pub(super) device: (u32, u32),
    pub(super) number: u64,
}

/// A running record; it is removed when dropped.
pub(super) struct Recording {
    instance: PathBuf,
}

impl Recording {
    /// Starts to record, on the clock that gpureap uses. `tracing` is the mounted tracefs.
    pub(super) fn start(tracing: &std::path::Path) -> Result<Self> {
        let instance = tracing.join(format!("instances/gpureap-bench-{}", std::process::id()));
        fs::create_dir(&instance).context("a trace instance of our own")?;
        let recording = Self { instance };
        recording.set("trace_clock", "boot")?;
        recording.set("buffer_size_kb", BUFFER_KIB)?;
        for (event, filter) in EVENTS {
            recording.set(&format!("events/{event}/filter"), filter)?;
            recording.set(&format!("events/{event}/enable"), "1")?;
        }
        Ok(recording)
    }

    fn set(&self, name: &str, value: &str) -> Result<()> {
        fs::write(self.instance.join(name), value).with_context(|| format!("set {name} of the trace to {value:?}"))
    }

    /// Stops, and tells all that happened.
    pub(super) fn finish(self) -> Result<Vec<Event>> {
        self.set("tracing_on", "0")?;
        let text = fs::read_to_string(self.instance.join("trace")).context("read the trace")?;
        parse(&text)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.instance) {
            println!("remove the trace instance: {error}");
        }
    }
}

/// Reads a whole trace. One with lost events is an error.
fn parse(text: &str) -> Result<Vec<Event>> {
    let counts = text.lines().find_map(|line| line.strip_prefix("# entries-in-buffer/entries-written: "));
    let counts = counts.and_then(|counts| counts.split_whitespace().next()?.split_once('/'));
    let (kept, written) = counts.context("the trace does not say how many events it has")?;
    ensure!(kept == written, "the trace kept only {kept} of {written} events");
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    let mut events = Vec::new();
    for line in lines {
        events.extend(event(line).with_context(|| format!("a line of the trace: {line}"))?);
    }
    Ok(events)
}

/// `  comm-pid  [cpu] flags seconds.micros: event: fields`, where the comm may hold anything. `Ok(None)`: a lock was
/// removed by hand.
fn event(line: &str) -> Result<Option<Event>> {
    let (head, what) = if let Some((head, fields)) = line.split_once(": signal_generate: ") {
        // The comm in the middle may look like fields.
        let signal = fields.split(' ').next().and_then(|field| field.strip_prefix("sig="));
        let to = fields.rsplit_once(" pid=").and_then(|(_, rest)| rest.split(' ').next());
        let (signal, to) = signal.zip(to).context("no signal or no receiver")?;
        (head, What::Signal { signal: signal.parse()?, to: to.parse()? })
    } else {
        let (head, fields) = line.split_once(": flock_lock_inode: ").context("an event that was not asked for")?;
        let field = |name: &str| {
            let value = fields.split(' ').find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
            value.with_context(|| format!("no {name}"))
        };
        let flags = field("fl_flags")?;
        if !flags.split('|').any(|flag| flag == "FL_CLOSE") {
            return Ok(None);
        }
        let hex = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16);
        let (major, minor) = field("dev")?.split_once(':').context("no dev")?;
        let device = (hex(major)?.try_into()?, hex(minor)?.try_into()?);
        (head, What::Close(Inode { device, number: hex(field("ino")?)? }))
    };
    let mut words = head.split_whitespace().rev();
    let (seconds, micros) = words.next().and_then(|time| time.split_once('.')).context("no time")?;
    ensure!(micros.len() == 6, "not in microseconds");
    let (seconds, micros): (i64, i64) = (seconds.parse()?, micros.parse()?);
    let task = words.nth(2).and_then(|task| task.rsplit_once('-')).context("no task")?.1;
    Ok(Some(Event { at_us: seconds * 1_000_000 + micros, task: task.parse()?, what }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KILL: &str = "         gpureap-19341   [001] dN.1. 17554.359163: signal_generate: \
                        sig=9 errno=0 code=0 comm=xtask pid=19391 grp=1 res=0";
    const CLOSE: &str = "           xtask-19391   [001] ..... 17554.360656: flock_lock_inode: fl=000000007765b90d \
                         dev=0x0:0x2a ino=0x3 fl_blocker=0000000000000000 fl_owner=000000007765b90d fl_pid=19391 \
                         fl_flags=FL_FLOCK|FL_CLOSE fl_type=F_UNLCK fl_start=0 fl_end=9223372036854775807 ret=0";

    fn whole(kept: usize, written: usize, lines: &[&str]) -> String {
        let lines = lines.join("\n");
        format!("# tracer: nop\n#\n# entries-in-buffer/entries-written: {kept}/{written}   #P:2\n#\n{lines}\n")
    }

    #[test]
    fn lines_of_a_trace() {
        let kill = Event { at_us: 17_554_359_163, task: 19341, what: What::Signal { signal: 9, to: 19391 } };
        let close =
            Event { at_us: 17_554_360_656, task: 19391, what: What::Close(Inode { device: (0, 0x2a), number: 3 }) };
        assert_eq!(parse(&whole(2, 2, &[KILL, CLOSE])).unwrap(), [kill, close]);
        // Without the column of flags' right half, as older kernels write it.
        let older = KILL.replace("dN.1.", "dN.1");
        assert_eq!(event(&older).unwrap(), Some(kill));
        // A comm may hold spaces, brackets, dashes and what looks like fields.
        let odd = KILL.replace("  gpureap-19341", "a [0] b-7 1.5-19341").replace("comm=xtask", "comm=x pid=1 grp=1");
        assert_eq!(event(&odd).unwrap(), Some(kill));
        assert_eq!(event(&CLOSE.replace("|FL_CLOSE", "")).unwrap(), None);
    }

    #[test]
    fn what_cannot_be_trusted_is_an_error() {
        let error = |text: &str| format!("{:#}", parse(text).unwrap_err());
        assert_eq!(error(&whole(1, 3, &[KILL])), "the trace kept only 1 of 3 events");
        assert!(error(KILL).contains("how many events"));
        for (what, line) in [
            ("no receiver", KILL.replace(" pid=", " id=")),
            ("no time", KILL.replace("17554.359163", "17554")),
            ("not in microseconds", KILL.replace("17554.359163", "17554.359")),
            ("no task", KILL.replace("gpureap-19341", "gpureap")),
            ("not asked for", KILL.replace("signal_generate", "signal_deliver")),
            ("no ino", CLOSE.replace("ino=", "no=")),
            ("no fl_flags", CLOSE.replace("fl_flags=", "flags=")),
        ] {
            assert!(error(&whole(1, 1, &[&line])).contains(what), "{what}: {}", error(&whole(1, 1, &[&line])));
        }
    }
}
