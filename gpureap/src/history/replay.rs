//! Recorded events back into records: what `gpureap events --json` wrote gives the same report as the journal.

use std::{collections::BTreeMap, io::BufRead};

use super::{
    event::{Event, What},
    rows::{Boot, Change, HoldRow, Key, ProcessRow, Record},
    state::State,
};

/// Longest line that is taken.
const LONGEST: usize = 16 << 20;

/// Of each boot that the events begin with, in their order. Events before any start belong to a boot that nobody named.
pub fn replay(events: impl IntoIterator<Item = Event>) -> Vec<Record> {
    let mut books: Vec<Book> = Vec::new();
    for event in events {
        let starts = match &event.what {
            What::Start(start) => Some(start.boot_id.as_str()),
            _ => None,
        };
        let current = books.last().map(|book| book.boot.boot_id.as_str());
        if current.is_none() || starts.is_some_and(|id| Some(id) != current) {
            books.push(Book::new(&event));
        }
        if let Some(book) = books.last_mut() {
            book.take(&event);
        }
    }
    books.into_iter().map(Book::close).collect()
}

/// Reads a file of them. A line that is no event is told by its number.
pub fn read(input: impl BufRead) -> Result<Vec<Event>, String> {
    let mut events = Vec::new();
    for (position, line) in input.lines().enumerate() {
        let number = position + 1;
        let line = line.map_err(|error| format!("line {number}: {error}"))?;
        if line.trim().is_empty() {
            continue;
        }
        if line.len() > LONGEST {
            return Err(format!("line {number} is too long"));
        }
        let event = serde_json::from_str(&line).map_err(|error| format!("line {number} is no event: {error}"))?;
        events.push(event);
    }
    Ok(events)
}

struct Book {
    boot: Boot,
    runs: Vec<super::rows::Run>,
    devices: Vec<super::event::Device>,
    state: State,
    processes: BTreeMap<Key, ProcessRow>,
    holds: BTreeMap<(Key, String, u64), HoldRow>,
    events: Vec<Event>,
}

impl Book {
    fn new(first: &Event) -> Self {
        let offset = first.time.as_nanosecond() - i128::from(first.boot_ns);
        let wall_offset_ns = i64::try_from(offset).unwrap_or(0);
        let boot = Boot {
            boot_id: String::new(),
            host: String::new(),
            kernel: String::new(),
            wall_offset_ns,
            last_ns: first.boot_ns,
        };
        Self {
            boot,
            runs: Vec::new(),
            devices: Vec::new(),
            state: State::default(),
            processes: BTreeMap::new(),
            holds: BTreeMap::new(),
            events: Vec::new(),
        }
    }

    fn take(&mut self, event: &Event) {
        self.boot.last_ns = self.boot.last_ns.max(event.boot_ns);
        for change in self.state.apply(event) {
            match change {
                Change::Start { boot, run, devices } => {
                    self.boot = Boot { last_ns: self.boot.last_ns.max(boot.last_ns), ..boot };
                    self.runs.push(run);
                    for device in devices {
                        self.devices.retain(|other| other.node != device.node);
                        self.devices.push(device);
                    }
                }
                Change::Stop { boot_ns } => {
                    if let Some(run) = self.runs.last_mut() {
                        run.end_ns = Some(boot_ns);
                    }
                }
                Change::Process(row) => drop(self.processes.insert(row.key, *row)),
                Change::Hold(row) => drop(self.holds.insert((row.key, row.node.clone(), row.opened_ns), row)),
                Change::Event(event) => self.events.push(event),
                Change::Clock { wall_offset_ns } => self.boot.wall_offset_ns = wall_offset_ns,
                // These are for a journal that misses something.
                Change::Heartbeat { boot_ns } | Change::Now { boot_ns, processes: _, holds: _ } => {
                    self.boot.last_ns = self.boot.last_ns.max(boot_ns);
                }
            }
        }
    }

    fn close(self) -> Record {
        let Self { boot, runs, devices, state: _, processes, holds, events } = self;
        Record {
            boot,
            runs,
            devices,
            processes: processes.into_values().collect(),
            holds: holds.into_values().collect(),
            events,
        }
    }
}
