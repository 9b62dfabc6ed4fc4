//! Acts at the same time: which may be, so that the end is known whatever their order.
use std::collections::BTreeSet;

use super::{
    model::{Illegal, Model, legal},
    step::{Act, Area, Part, RangeMode, Task},
};
use crate::actor::sys::Fd;

/// Numbers that each acting task has for itself. Those below are left free: the lowest free one is where the kernel puts a
/// new descriptor before it gets its place.
const FIRST: Fd = 200;
const WIDTH: Fd = 16;
const LANES: u32 = 24;

/// The numbers that the task may use while others act.
pub(super) fn lane(task: Task) -> std::ops::Range<Fd> {
    let first = FIRST + WIDTH * (task.0 % LANES) as Fd;
    first..first + WIDTH
}

fn numbers(act: &Act) -> Option<Vec<Fd>> {
    Some(match *act {
        Act::Open { dev: _, at, cloexec: _ } => vec![at],
        Act::Dup2 { from, to } | Act::Dup3 { from, to } | Act::Fcntl { from, to } => vec![from, to],
        Act::Close { fd } | Act::Cloexec { fd, on: _ } | Act::Map { area: _, fd, pages: _ } => vec![fd],
        Act::CloseRange { low, high, mode: RangeMode::Close | RangeMode::Cloexec } => vec![low, high],
        Act::Spin { .. } | Act::Fork { .. } | Act::Unmap { .. } | Act::Exit => vec![],
        _ => return None,
    })
}

fn area(act: &Act) -> Option<Area> {
    match *act {
        Act::Map { area, .. } | Act::Unmap { area } => Some(area),
        _ => None,
    }
}

/// What each task touches it has for itself, so one order is as good as another. A process may be killed at any moment
/// if nothing of what its tasks do outlives it.
pub(super) fn apply(model: &mut Model, parts: &[Part]) -> Result<(), Illegal> {
    let acting: BTreeSet<Task> = parts.iter().filter_map(Part::task).collect();
    let killed: BTreeSet<Task> = parts.iter().filter_map(Part::killed).collect();
    legal(killed.iter().all(|process| !model.tasks_of(*process).is_empty()), "no such process")?;
    for task in &acting {
        let process = model.process_of(*task).ok_or(Illegal("no such task"))?;
        let sharers = model.sharers(*task);
        let mut others = sharers.iter().filter(|other| *other != task && acting.contains(other));
        legal(others.all(|other| lane(*other) != lane(*task)), "two tasks in one lane")?;
        if killed.contains(&process) {
            let dies = |other: &Task| model.process_of(*other).is_some_and(|process| killed.contains(&process));
            legal(sharers.iter().all(dies), "somebody would keep what the killed one leaves half done")?;
        }
        let acts: Vec<&Act> = parts.iter().filter_map(|part| part.act_of(*task)).collect();
        for (position, act) in acts.iter().enumerate() {
            let numbers = numbers(act).ok_or(Illegal("not while others act"))?;
            legal(numbers.iter().all(|fd| lane(*task).contains(fd)), "another task's number")?;
            let alone = |model: &Model| {
                let near = model.tasks_of(process);
                !sharers.iter().chain(&near).any(|other| other != task && acting.contains(other))
            };
            match act {
                Act::Fork { .. } => legal(alone(model) && !killed.contains(&process), "a copy of what is changing")?,
                Act::Exit => {
                    let last = position + 1 == acts.len();
                    let near = model.tasks_of(process);
                    let others = near.iter().any(|other| other != task && acting.contains(other));
                    legal(last && !others && !killed.contains(&process), "an end amid what others do")?;
                }
                _ => {}
            }
            if let Some(area) = area(act) {
                let both = parts.iter().any(|part| part.task() != Some(*task) && part.area() == Some(area));
                legal(!both, "two tasks and one area")?;
            }
        }
    }
    for part in parts {
        if let Part::Do(task, act) = part {
            model.act(*task, act)?;
        }
    }
    killed.into_iter().try_for_each(|process| model.kill(process))
}

impl Part {
    pub(super) fn task(&self) -> Option<Task> {
        match self {
            Self::Do(task, _) => Some(*task),
            Self::Kill(_) => None,
        }
    }

    fn killed(&self) -> Option<Task> {
        match self {
            Self::Do(..) => None,
            Self::Kill(process) => Some(*process),
        }
    }

    fn act_of(&self, task: Task) -> Option<&Act> {
        match self {
            Self::Do(who, act) if *who == task => Some(act),
            _ => None,
        }
    }

    fn area(&self) -> Option<Area> {
        match self {
            Self::Do(_, act) => area(act),
            Self::Kill(_) => None,
        }
    }
}
