//! A random sequence of steps, all of them legal: the same seed gives the same sequence.
use super::{
    model::{Kind, MAPPABLE, Model, RING_SLOTS},
    step::{Act, Dev, Part, RangeMode, Ring, Step, Task},
    together::lane,
};
use crate::{actor::sys::Fd, random::Random};

/// What a sequence is made for.
#[derive(Clone, Copy, Debug)]
pub struct Script {
    pub devices: u32,
    /// Whether the kernel has io_uring.
    pub rings: bool,
    pub steps: usize,
}

const PROCESSES: usize = 12;
const TASKS: usize = 16;
/// Between the standard descriptors and the lanes: within the first table of a process, and beyond its first and second
/// enlargement.
const PLACES: [Fd; 6] = [20, 63, 64, 100, 150, 199];

pub fn sequence(seed: u64, script: Script) -> Vec<Step> {
    let mut generator = Generator { random: Random::new(seed), model: Model::default(), script, steps: Vec::new() };
    generator.take(Step::Begin(Task(0)));
    while generator.steps.len() < script.steps {
        generator.step();
    }
    if generator.steps.last() != Some(&Step::Pause) {
        generator.take(Step::Pause);
    }
    generator.steps
}

struct Generator {
    random: Random,
    model: Model,
    script: Script,
    steps: Vec<Step>,
}

impl Generator {
    fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    fn coin(&mut self) -> bool {
        self.below(2) == 0
    }

    /// Whether it was legal.
    fn take(&mut self, step: Step) -> bool {
        let taken = self.model.apply(&step).is_ok();
        if taken {
            self.steps.push(step);
        }
        taken
    }

    fn step(&mut self) {
        let tasks = self.model.tasks();
        match (self.below(60), self.random.pick(&tasks)) {
            (_, None) => _ = self.take(Step::Begin(self.model.fresh_task())),
            (0..=3, _) if self.steps.last() != Some(&Step::Pause) => _ = self.take(Step::Pause),
            (4..=5, _) if self.roomy() => _ = self.take(Step::Begin(self.model.fresh_task())),
            (6, _) => {
                let processes = self.model.processes();
                if let Some(process) = self.random.pick(&processes) {
                    self.take(Step::Kill(process));
                }
            }
            (7, _) if self.coin() => _ = self.take(Step::Resync),
            (7..=9, _) => self.together(&tasks),
            (_, Some(task)) => {
                if let Some(act) = self.act(task) {
                    self.take(Step::Do(task, act));
                }
            }
        }
    }

    fn roomy(&self) -> bool {
        self.model.processes().len() < PROCESSES && self.model.tasks().len() < TASKS
    }

    fn device(&mut self) -> Dev {
        // One device for half of all files, so that counts get above one.
        if self.coin() { MAPPABLE } else { Dev(self.below(u64::from(self.script.devices)) as u32) }
    }

    /// A number that may hold something.
    fn place(&mut self, task: Task) -> Fd {
        if self.coin() { self.model.lowest(task) } else { self.random.pick(&PLACES).expect("there are some") }
    }

    fn number(&mut self, task: Task, kind: Kind) -> Option<Fd> {
        let numbers = self.model.numbers(task, kind);
        self.random.pick(&numbers)
    }

    fn act(&mut self, task: Task) -> Option<Act> {
        let at = self.place(task);
        Some(match self.below(120) {
            0..=13 => Act::Open { dev: self.device(), at, cloexec: self.below(3) == 0 },
            14..=24 => self.copy(task, at)?,
            25..=30 => Act::Close { fd: self.number(task, Kind::Any)? },
            31..=34 => {
                let (low, high) = (at, at.max(self.place(task)));
                let mode = self.random.pick(&[RangeMode::Close, RangeMode::Unshare, RangeMode::Cloexec])?;
                Act::CloseRange { low, high: high.min(low + 100), mode }
            }
            35..=36 => Act::Cloexec { fd: self.number(task, Kind::Any)?, on: self.coin() },
            37..=50 => self.birth()?,
            51..=56 => self.end(task),
            57..=70 => self.letter(task, at)?,
            71..=74 => {
                let processes = self.model.processes();
                let from = self.random.pick(&processes)?;
                let leader = self.model.leader(from)?;
                Act::Take { from, fd: self.number(leader, Kind::Any)?, at }
            }
            75..=88 => self.memory(task)?,
            89..=115 => self.ring(task, at)?,
            116..=117 => Act::Lock { fd: self.number(task, Kind::File)? },
            _ => Act::OpenPath { dev: self.device(), at },
        })
    }

    fn copy(&mut self, task: Task, at: Fd) -> Option<Act> {
        let from = self.number(task, Kind::Any)?;
        let over = if self.coin() { self.number(task, Kind::Any)? } else { at };
        Some(match self.below(3) {
            0 => Act::Dup2 { from, to: over },
            1 => Act::Dup3 { from, to: over },
            _ => Act::Fcntl { from, to: at },
        })
    }

    fn birth(&mut self) -> Option<Act> {
        let child = self.model.fresh_task();
        Some(match self.below(14) {
            0 => Act::VforkExit,
            1 => Act::Spawn,
            2 | 3 => Act::Unshare,
            _ if !self.roomy() => return None,
            4..=6 => Act::Fork { child },
            7 => Act::Vfork { child },
            8 | 9 => Act::Share { child },
            _ => Act::Thread { child },
        })
    }

    fn end(&mut self, task: Task) -> Act {
        let company = self.model.process_of(task).map_or(0, |process| self.model.tasks_of(process).len());
        match self.below(6) {
            0 | 1 => Act::Exec,
            2 => Act::Exit,
            _ if company > 1 => Act::ExitThread,
            _ => Act::Exec,
        }
    }

    fn letter(&mut self, task: Task, at: Fd) -> Option<Act> {
        let Some(mailbox) = self.number(task, Kind::Mailbox) else { return Some(Act::Mailbox { at }) };
        Some(match self.below(5) {
            0..=2 => Act::Send { fd: self.number(task, Kind::File)?, mailbox },
            3 => Act::Receive { mailbox: self.number(task, Kind::Letters)?, at },
            _ => Act::Discard { mailbox: self.number(task, Kind::Letters)? },
        })
    }

    fn memory(&mut self, task: Task) -> Option<Act> {
        let areas = self.model.areas(self.model.process_of(task)?);
        Some(match (self.below(4), self.random.pick(&areas)) {
            (0, Some(area)) => Act::Unmap { area },
            (1, Some(area)) => Act::Punch { area },
            _ => {
                let fd = self.number(task, Kind::Mappable)?;
                let pages = if self.coin() { 1 } else { 3 };
                Act::Map { area: self.model.fresh_area(), fd, pages }
            }
        })
    }

    fn ring(&mut self, task: Task, at: Fd) -> Option<Act> {
        if !self.script.rings {
            return None;
        }
        let rings = self.model.rings(self.model.process_of(task)?);
        let Some(ring) = self.random.pick(&rings) else { return Some(self.new_ring(at)) };
        let via = self.number(task, Kind::Ring(ring))?;
        let slot = self.below(RING_SLOTS as u64) as u32;
        Some(match self.below(12) {
            0 | 1 => Act::RingOpen { ring, via, dev: self.device(), at },
            2 => Act::RingClose { ring, via, fd: self.number(task, Kind::File)? },
            3..=6 => Act::RingOpenDirect { ring, via, dev: self.device(), slot },
            7 | 8 => Act::RingCloseDirect { ring, via, slot },
            9 | 10 => Act::RingRegister { via, slot, fd: self.number(task, Kind::File)? },
            _ => self.new_ring(at),
        })
    }

    fn new_ring(&self, at: Fd) -> Act {
        let ring: Ring = self.model.fresh_ring();
        Act::Ring { ring, at }
    }

    /// Several tasks at once. Tried on a copy of the model, so that each act fits those before it.
    fn together(&mut self, tasks: &[Task]) {
        let mut acting: Vec<Task> = (0..4).filter_map(|_| self.random.pick(tasks)).collect();
        acting.sort_unstable();
        acting.dedup();
        let before = self.model.clone();
        let mut acts = Vec::new();
        for _ in 0..12 * acting.len() {
            let Some(task) = self.random.pick(&acting) else { continue };
            let Some(act) = self.act_in_lane(task) else { continue };
            acts.push(Part::Do(task, act));
            let mut after = before.clone();
            if after.apply(&Step::Together(acts.clone())).is_ok() {
                self.model = after;
            } else {
                acts.pop();
            }
        }
        self.model = before;
        let processes = self.model.processes();
        let kill = self.random.pick(&processes).filter(|_| self.coin()).map(Part::Kill);
        let killing: Vec<Part> = acts.iter().cloned().chain(kill).collect();
        if !acts.is_empty() && !self.take(Step::Together(killing)) {
            self.take(Step::Together(acts));
        }
    }

    fn act_in_lane(&mut self, task: Task) -> Option<Act> {
        let lane = lane(task);
        let at = lane.start + self.below(8) as Fd;
        let mut held = self.model.numbers(task, Kind::Any);
        held.retain(|fd| lane.contains(fd));
        let from = self.random.pick(&held);
        Some(match self.below(24) {
            0..=6 => Act::Open { dev: self.device(), at, cloexec: self.coin() },
            7..=8 => Act::Dup2 { from: from?, to: at },
            9 => Act::Dup3 { from: from?, to: at },
            10 => Act::Fcntl { from: from?, to: at },
            11..=13 => Act::Close { fd: from? },
            14 => Act::CloseRange { low: at, high: lane.end - 1, mode: RangeMode::Close },
            15..=17 => Act::Spin { dev: self.device(), times: 1 + self.below(30) as u32 },
            18 | 19 if self.roomy() => Act::Fork { child: self.model.fresh_task() },
            20 => {
                let areas = self.model.areas(self.model.process_of(task)?);
                Act::Unmap { area: self.random.pick(&areas)? }
            }
            21 | 22 => Act::Map { area: self.model.fresh_area(), fd: from?, pages: 1 },
            23 if self.below(6) == 0 => Act::Exit,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::oracle::step;

    const SCRIPT: Script = Script { devices: 3, rings: true, steps: 60 };

    #[test]
    fn a_seed_is_one_sequence() {
        assert_eq!(sequence(7, SCRIPT), sequence(7, SCRIPT));
        assert_ne!(sequence(7, SCRIPT), sequence(8, SCRIPT));
    }

    #[test]
    fn every_kind_of_act_comes_up() {
        let mut words: BTreeMap<String, u32> = BTreeMap::new();
        let (mut pauses, mut holders) = (0, 0);
        for seed in 0..100 {
            let mut model = Model::default();
            for step in sequence(seed, SCRIPT) {
                model.apply(&step).unwrap_or_else(|illegal| panic!("seed {seed}: {step}: {}", illegal.0));
                if step == Step::Pause {
                    pauses += 1;
                    holders += model.expected().processes.len();
                }
                for line in step::write(&[step]).lines() {
                    let word = line.split_whitespace().find(|word| !word.starts_with('t') || word.len() > 3);
                    *words.entry(word.unwrap_or_default().to_owned()).or_default() += 1;
                }
            }
        }
        let all = "begin kill together pause resync open open-path spin dup2 dup3 fcntl close close-range cloexec lock fork \
                   vfork vfork-exit spawn share thread unshare exec exit exit-thread mailbox send receive discard take ring \
                   ring-open ring-close ring-open-direct ring-close-direct ring-register map unmap punch";
        let rare: Vec<&str> =
            all.split_whitespace().filter(|word| words.get(*word).is_none_or(|count| *count < 5)).collect();
        assert_eq!(rare, Vec::<&str>::new(), "{words:?}");
        assert!(pauses > 300 && holders > 2 * pauses, "{pauses} pauses, {holders} holders: {words:?}");
    }

    #[test]
    fn without_io_uring_there_is_none() {
        let without = Script { rings: false, ..SCRIPT };
        assert!((0..50).all(|seed| !step::write(&sequence(seed, without)).contains("ring")));
    }
}
