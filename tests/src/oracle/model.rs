//! The truth: what every process has after each step, by the rules of the kernel's manual pages. Nothing in here looks
//! at a process, and nothing comes from gpureap.
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::step::{Act, Area, Dev, RangeMode, Ring, Step, Task};
use crate::actor::sys::Fd;

/// Descriptors that the play may use; above are the actors' own, below the standard ones.
pub const NUMBERS: std::ops::RangeInclusive<Fd> = 3..=599;
/// The only device that can be mapped.
pub const MAPPABLE: Dev = Dev(0);
/// Entries of a ring's own table.
pub const RING_SLOTS: usize = 4;
/// Fewer than the kernel lets wait in a socket (`net.unix.max_dgram_qlen`).
const LETTERS: usize = 8;
const TASKS: usize = 20;

/// Why a step cannot be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Illegal(pub &'static str);

type Done = Result<(), Illegal>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct FileId(u32);
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct BoxId(u32);
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct TableId(u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    File(FileId),
    PathOnly,
    Mailbox(BoxId),
    Ring(Ring),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Descriptor {
    what: What,
    cloexec: bool,
}

type Table = BTreeMap<Fd, Descriptor>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mapped {
    file: FileId,
    pages: u32,
    /// How many areas it is in now.
    parts: u32,
}

/// An address space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Memory {
    areas: BTreeMap<Area, Mapped>,
    /// Rings are used by their mapped queues, which keep them alive.
    rings: BTreeSet<Ring>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Process {
    /// `None` when the main thread has ended and another lives.
    leader: Option<Task>,
    memory: Memory,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Thread {
    process: Task,
    table: TableId,
}

/// All there is. Files and sockets live as long as something in here leads to them; see `files`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Model {
    processes: BTreeMap<Task, Process>,
    tasks: BTreeMap<Task, Thread>,
    tables: BTreeMap<TableId, Table>,
    files: BTreeMap<FileId, Dev>,
    boxes: BTreeMap<BoxId, VecDeque<FileId>>,
    rings: BTreeMap<Ring, [Option<FileId>; RING_SLOTS]>,
    begun: BTreeSet<Task>,
    mapped: BTreeSet<Area>,
    next: u32,
}

/// What one process holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Descriptors in all its tables, and areas.
    pub devices: BTreeMap<Dev, (u32, u32)>,
    /// The main thread has ended.
    pub leaderless: bool,
    /// For each table with devices that is not the main thread's: who uses it.
    pub private: Vec<BTreeSet<Task>>,
}

/// Open files of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Files {
    /// In a table or an address space.
    pub seen: u32,
    /// Only in flight or in a ring's table.
    pub hidden: u32,
    /// Descriptors, a shared table once.
    pub descriptors: u32,
}

/// What is to be found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    pub processes: BTreeMap<Task, Held>,
    pub files: BTreeMap<Dev, Files>,
}

pub(super) fn legal(condition: bool, otherwise: &'static str) -> Done {
    if condition { Ok(()) } else { Err(Illegal(otherwise)) }
}

impl Model {
    /// Takes the step, or leaves all as it was.
    pub fn apply(&mut self, step: &Step) -> Done {
        let mut next = self.clone();
        match step {
            Step::Begin(task) => next.begin(*task)?,
            Step::Do(task, act) => next.act(*task, act)?,
            Step::Kill(process) => next.kill(*process)?,
            Step::Together(parts) => super::together::apply(&mut next, parts)?,
            Step::Resync | Step::Pause => {}
        }
        *self = next;
        Ok(())
    }

    pub fn tasks(&self) -> Vec<Task> {
        self.tasks.keys().copied().collect()
    }

    pub fn processes(&self) -> Vec<Task> {
        self.processes.keys().copied().collect()
    }

    /// The process of a living task.
    pub fn process_of(&self, task: Task) -> Option<Task> {
        self.tasks.get(&task).map(|thread| thread.process)
    }

    /// The main thread of a living process, if that lives.
    pub fn leader(&self, process: Task) -> Option<Task> {
        self.processes.get(&process)?.leader
    }

    /// Living tasks of the process.
    pub fn tasks_of(&self, process: Task) -> Vec<Task> {
        self.tasks.iter().filter(|(_, thread)| thread.process == process).map(|(task, _)| *task).collect()
    }

    /// Tasks with the same table as this one, which is among them.
    pub fn sharers(&self, task: Task) -> Vec<Task> {
        let Some(own) = self.tasks.get(&task) else { return Vec::new() };
        self.tasks.iter().filter(|(_, thread)| thread.table == own.table).map(|(task, _)| *task).collect()
    }

    /// Numbers of a task's table that hold something of the kind.
    pub fn numbers(&self, task: Task, kind: Kind) -> Vec<Fd> {
        let table = self.tasks.get(&task).map(|thread| &self.tables[&thread.table]);
        let wanted = |what: What| match kind {
            Kind::Any => true,
            Kind::File => matches!(what, What::File(_)),
            Kind::Mappable => matches!(what, What::File(file) if self.files[&file] == MAPPABLE),
            Kind::Mailbox => matches!(what, What::Mailbox(_)),
            Kind::Letters => matches!(what, What::Mailbox(id) if !self.boxes[&id].is_empty()),
            Kind::Ring(ring) => what == What::Ring(ring),
        };
        table.into_iter().flatten().filter(|(_, held)| wanted(held.what)).map(|(fd, _)| *fd).collect()
    }

    /// The lowest number that is free.
    pub fn lowest(&self, task: Task) -> Fd {
        let used = self.numbers(task, Kind::Any);
        NUMBERS.clone().find(|fd| !used.contains(fd)).unwrap_or(*NUMBERS.end())
    }

    pub fn areas(&self, process: Task) -> Vec<Area> {
        self.processes.get(&process).map_or_else(Vec::new, |process| process.memory.areas.keys().copied().collect())
    }

    /// Rings that a process can use.
    pub fn rings(&self, process: Task) -> Vec<Ring> {
        self.processes.get(&process).map_or_else(Vec::new, |process| process.memory.rings.iter().copied().collect())
    }

    /// Whether there has been an io_uring: the kernel takes back its files late, from a worker.
    pub fn has_rings(&self) -> bool {
        !self.rings.is_empty()
    }

    /// A number that no task has had.
    pub fn fresh_task(&self) -> Task {
        Task(self.begun.last().map_or(0, |task| task.0 + 1))
    }

    pub fn fresh_area(&self) -> Area {
        Area(self.mapped.last().map_or(0, |area| area.0 + 1))
    }

    pub fn fresh_ring(&self) -> Ring {
        Ring(self.rings.keys().next_back().map_or(0, |ring| ring.0 + 1))
    }

    fn id(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    fn begin(&mut self, task: Task) -> Done {
        let table = TableId(self.id());
        self.tables.insert(table, Table::new());
        self.add_process(task, table, Memory::default())
    }

    fn add_process(&mut self, task: Task, table: TableId, memory: Memory) -> Done {
        self.add_task(task, Thread { process: task, table })?;
        self.processes.insert(task, Process { leader: Some(task), memory });
        Ok(())
    }

    fn add_task(&mut self, task: Task, thread: Thread) -> Done {
        legal(self.begun.insert(task), "a task of that number has been there")?;
        legal(self.tasks.len() < TASKS, "too many tasks")?;
        self.tasks.insert(task, thread);
        Ok(())
    }

    fn copy_table(&mut self, table: TableId) -> TableId {
        let copy = TableId(self.id());
        self.tables.insert(copy, self.tables[&table].clone());
        copy
    }

    pub(super) fn kill(&mut self, process: Task) -> Done {
        legal(self.processes.remove(&process).is_some(), "no such process")?;
        self.tasks.retain(|_, thread| thread.process != process);
        self.sweep_tables();
        Ok(())
    }

    /// Tables end with their last task.
    fn sweep_tables(&mut self) {
        let used: BTreeSet<TableId> = self.tasks.values().map(|thread| thread.table).collect();
        self.tables.retain(|id, _| used.contains(id));
    }

    /// Gives the task a table of its own.
    fn unshare(&mut self, task: Task) {
        if self.sharers(task).len() > 1 {
            let copy = self.copy_table(self.tasks[&task].table);
            self.tasks.get_mut(&task).expect("it lives").table = copy;
        }
    }

    pub(super) fn act(&mut self, task: Task, act: &Act) -> Done {
        let Some(Thread { process, table }) = self.tasks.get(&task).copied() else {
            return Err(Illegal("no such task"));
        };
        match *act {
            Act::Open { dev, at, cloexec } => {
                let file = self.open(dev);
                self.put(table, at, What::File(file), cloexec)
            }
            Act::OpenPath { dev: _, at } => self.put(table, at, What::PathOnly, false),
            // What is opened is closed, what begins ends.
            Act::Spin { .. } | Act::VforkExit | Act::Spawn => Ok(()),
            Act::Dup2 { from, to } => {
                let held = self.get(table, from)?;
                if from == to { Ok(()) } else { self.replace(table, to, held.what, false) }
            }
            Act::Dup3 { from, to } => {
                let held = self.get(table, from)?;
                legal(from != to, "dup3 onto itself")?;
                self.replace(table, to, held.what, true)
            }
            Act::Fcntl { from, to } => {
                let held = self.get(table, from)?;
                self.put(table, to, held.what, false)
            }
            Act::Close { fd } => {
                self.get(table, fd)?;
                self.table(table).remove(&fd);
                Ok(())
            }
            Act::CloseRange { low, high, mode } => self.close_range(task, low, high, mode),
            Act::Cloexec { fd, on } => {
                self.get(table, fd)?;
                self.table(table).get_mut(&fd).expect("it is there").cloexec = on;
                Ok(())
            }
            Act::Lock { fd } => self.file(table, fd).map(drop),
            Act::Fork { child } => {
                let copy = self.copy_table(table);
                let memory = self.processes[&process].memory.clone();
                self.add_process(child, copy, memory)
            }
            Act::Vfork { child } => {
                let copy = self.copy_table(table);
                self.table(copy).retain(|_, held| !held.cloexec);
                self.add_process(child, copy, Memory::default())
            }
            Act::Share { child } => {
                let memory = self.processes[&process].memory.clone();
                self.add_process(child, table, memory)
            }
            Act::Thread { child } => self.add_task(child, Thread { process, table }),
            Act::Unshare => {
                self.unshare(task);
                Ok(())
            }
            Act::Exec => {
                self.exec(task, process);
                Ok(())
            }
            Act::Exit => self.kill(process),
            Act::ExitThread => self.exit_thread(task, process),
            Act::Mailbox { at } => {
                let id = BoxId(self.id());
                self.boxes.insert(id, VecDeque::new());
                self.put(table, at, What::Mailbox(id), false)
            }
            Act::Send { fd, mailbox } => {
                let (file, id) = (self.file(table, fd)?, self.mailbox(table, mailbox)?);
                let letters = self.boxes.get_mut(&id).expect("it is held");
                legal(letters.len() < LETTERS, "the mailbox is full")?;
                letters.push_back(file);
                Ok(())
            }
            Act::Receive { mailbox, at } => {
                let file = self.letter(table, mailbox)?;
                self.put(table, at, What::File(file), false)
            }
            Act::Discard { mailbox } => self.letter(table, mailbox).map(drop),
            Act::Take { from, fd, at } => {
                let leader = self.leader(from).ok_or(Illegal("no main thread to take from"))?;
                let what = self.get(self.tasks[&leader].table, fd)?.what;
                legal(what != What::PathOnly, "only what is open is taken")?;
                self.put(table, at, what, false)
            }
            Act::Map { area, fd, pages } => {
                let file = self.file(table, fd)?;
                legal(self.files[&file] == MAPPABLE, "it cannot be mapped")?;
                legal(pages > 0 && self.mapped.insert(area), "that area has been there")?;
                self.memory(process).areas.insert(area, Mapped { file, pages, parts: 1 });
                Ok(())
            }
            Act::Unmap { area } => legal(self.memory(process).areas.remove(&area).is_some(), "no such area"),
            Act::Punch { area } => {
                let mapped = self.memory(process).areas.get_mut(&area).ok_or(Illegal("no such area"))?;
                legal(mapped.pages == 3 && mapped.parts == 1, "it has no middle")?;
                mapped.parts = 2;
                Ok(())
            }
            Act::Ring { .. }
            | Act::RingOpen { .. }
            | Act::RingClose { .. }
            | Act::RingOpenDirect { .. }
            | Act::RingCloseDirect { .. }
            | Act::RingRegister { .. } => self.ring_act(process, table, act),
        }
    }

    fn ring_act(&mut self, process: Task, table: TableId, act: &Act) -> Done {
        match *act {
            Act::Ring { ring, at } => {
                legal(self.rings.insert(ring, [None; RING_SLOTS]).is_none(), "that ring has been there")?;
                self.memory(process).rings.insert(ring);
                self.put(table, at, What::Ring(ring), false)
            }
            Act::RingOpen { ring, via, dev, at } => {
                self.usable(process, table, ring, via)?;
                let file = self.open(dev);
                self.put(table, at, What::File(file), false)
            }
            Act::RingClose { ring, via, fd } => {
                self.usable(process, table, ring, via)?;
                self.file(table, fd)?;
                self.table(table).remove(&fd);
                Ok(())
            }
            Act::RingOpenDirect { ring, via, dev, slot } => {
                self.usable(process, table, ring, via)?;
                let file = self.open(dev);
                self.keep(ring, slot, file)
            }
            Act::RingCloseDirect { ring, via, slot } => {
                self.usable(process, table, ring, via)?;
                let kept = self.rings.get_mut(&ring).and_then(|slots| slots.get_mut(slot as usize)?.take());
                legal(kept.is_some(), "nothing in that slot")
            }
            Act::RingRegister { via, slot, fd } => {
                let What::Ring(ring) = self.get(table, via)?.what else { return Err(Illegal("not a ring")) };
                let file = self.file(table, fd)?;
                self.keep(ring, slot, file)
            }
            _ => Err(Illegal("not an act of a ring")),
        }
    }

    /// A ring needs its mapped queues and a descriptor.
    fn usable(&self, process: Task, table: TableId, ring: Ring, via: Fd) -> Done {
        legal(self.processes[&process].memory.rings.contains(&ring), "the ring is not mapped here")?;
        legal(self.get(table, via)?.what == What::Ring(ring), "not a descriptor of the ring")
    }

    fn keep(&mut self, ring: Ring, slot: u32, file: FileId) -> Done {
        let slot = self.rings.get_mut(&ring).and_then(|slots| slots.get_mut(slot as usize));
        match slot {
            Some(slot @ None) => {
                *slot = Some(file);
                Ok(())
            }
            _ => Err(Illegal("no free slot of that number")),
        }
    }

    fn exec(&mut self, task: Task, process: Task) {
        self.tasks.retain(|other, thread| *other == task || thread.process != process);
        self.sweep_tables();
        self.unshare(task);
        let table = self.tasks[&task].table;
        self.table(table).retain(|_, held| !held.cloexec);
        self.processes.insert(process, Process { leader: Some(task), memory: Memory::default() });
    }

    fn exit_thread(&mut self, task: Task, process: Task) -> Done {
        if self.tasks_of(process) == [task] {
            return self.kill(process);
        }
        self.tasks.remove(&task);
        self.sweep_tables();
        let leader = &mut self.processes.get_mut(&process).expect("it has another task").leader;
        *leader = leader.filter(|leader| *leader != task);
        Ok(())
    }

    fn close_range(&mut self, task: Task, low: Fd, high: Fd, mode: RangeMode) -> Done {
        legal(NUMBERS.contains(&low) && NUMBERS.contains(&high) && low <= high, "not a range of the play")?;
        if mode == RangeMode::Unshare {
            self.unshare(task);
        }
        let table = self.tasks[&task].table;
        let table = self.table(table);
        if mode == RangeMode::Cloexec {
            table.range_mut(low..=high).for_each(|(_, held)| held.cloexec = true);
        } else {
            table.retain(|fd, _| !(low..=high).contains(fd));
        }
        Ok(())
    }

    fn open(&mut self, dev: Dev) -> FileId {
        let file = FileId(self.id());
        self.files.insert(file, dev);
        file
    }

    fn memory(&mut self, process: Task) -> &mut Memory {
        &mut self.processes.get_mut(&process).expect("the process of a living task").memory
    }

    fn table(&mut self, table: TableId) -> &mut Table {
        self.tables.get_mut(&table).expect("the table of a living task")
    }

    fn get(&self, table: TableId, fd: Fd) -> Result<Descriptor, Illegal> {
        self.tables[&table].get(&fd).copied().ok_or(Illegal("nothing under that number"))
    }

    fn file(&self, table: TableId, fd: Fd) -> Result<FileId, Illegal> {
        match self.get(table, fd)?.what {
            What::File(file) => Ok(file),
            _ => Err(Illegal("not a device file")),
        }
    }

    fn mailbox(&self, table: TableId, fd: Fd) -> Result<BoxId, Illegal> {
        match self.get(table, fd)?.what {
            What::Mailbox(id) => Ok(id),
            _ => Err(Illegal("not a mailbox")),
        }
    }

    fn letter(&mut self, table: TableId, mailbox: Fd) -> Result<FileId, Illegal> {
        let id = self.mailbox(table, mailbox)?;
        self.boxes.get_mut(&id).and_then(VecDeque::pop_front).ok_or(Illegal("the mailbox is empty"))
    }

    /// Onto a free number.
    fn put(&mut self, table: TableId, at: Fd, what: What, cloexec: bool) -> Done {
        legal(!self.tables[&table].contains_key(&at), "that number is taken")?;
        self.replace(table, at, what, cloexec)
    }

    fn replace(&mut self, table: TableId, at: Fd, what: What, cloexec: bool) -> Done {
        legal(NUMBERS.contains(&at), "not a number of the play")?;
        self.table(table).insert(at, Descriptor { what, cloexec });
        Ok(())
    }

    /// Files of every device: those in tables and address spaces, and those that only a socket or a ring leads to.
    fn files(&self) -> BTreeMap<Dev, Files> {
        let (mut seen, mut hidden) = (BTreeSet::new(), BTreeSet::new());
        for held in self.tables.values().flat_map(BTreeMap::values) {
            match held.what {
                What::File(file) => _ = seen.insert(file),
                What::PathOnly => {}
                What::Mailbox(id) => hidden.extend(&self.boxes[&id]),
                What::Ring(ring) => hidden.extend(self.rings[&ring].iter().flatten()),
            }
        }
        for Memory { areas, rings } in self.processes.values().map(|process| &process.memory) {
            seen.extend(areas.values().map(|mapped| mapped.file));
            hidden.extend(rings.iter().flat_map(|ring| self.rings[ring].iter().flatten()));
        }
        let mut files: BTreeMap<Dev, Files> = BTreeMap::new();
        for held in self.tables.values().flat_map(BTreeMap::values) {
            if let What::File(file) = held.what {
                files.entry(self.files[&file]).or_default().descriptors += 1;
            }
        }
        for file in &seen {
            files.entry(self.files[file]).or_default().seen += 1;
        }
        for file in hidden.difference(&seen) {
            files.entry(self.files[file]).or_default().hidden += 1;
        }
        files
    }

    fn held(&self, process: Task, leader: Option<Task>, memory: &Memory) -> Held {
        let mut held = Held { leaderless: leader.is_none(), ..Held::default() };
        let mut tables: BTreeMap<TableId, BTreeSet<Task>> = BTreeMap::new();
        for task in self.tasks_of(process) {
            tables.entry(self.tasks[&task].table).or_default().insert(task);
        }
        for (table, users) in tables {
            let before: u32 = held.devices.values().map(|counts| counts.0).sum();
            for descriptor in self.tables[&table].values() {
                if let What::File(file) = descriptor.what {
                    held.devices.entry(self.files[&file]).or_default().0 += 1;
                }
            }
            let devices = held.devices.values().map(|counts| counts.0).sum::<u32>() > before;
            if devices && leader.is_some_and(|leader| !users.contains(&leader)) {
                held.private.push(users);
            }
        }
        for Mapped { file, pages: _, parts } in memory.areas.values() {
            held.devices.entry(self.files[file]).or_default().1 += parts;
        }
        held
    }

    /// What is to be found now; a process that holds nothing is not among it.
    pub fn expected(&self) -> Expected {
        let held =
            self.processes.iter().map(|(task, Process { leader, memory })| (*task, self.held(*task, *leader, memory)));
        Expected { processes: held.filter(|(_, held)| !held.devices.is_empty()).collect(), files: self.files() }
    }
}

/// What a descriptor is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Any,
    File,
    Mappable,
    Mailbox,
    /// A mailbox with something in it.
    Letters,
    Ring(Ring),
}

#[cfg(test)]
mod tests;
