//! The wait itself: woken by events, looking at as little as possible, with a full sweep at the end.

use std::{
    collections::BTreeSet,
    os::fd::{AsFd as _, BorrowedFd},
    path::Path,
    time::Duration,
};

use super::{
    decide::{Findings, Standing, Verdict, judge},
    held::Held,
};
use crate::{
    choose::{Chooser, Chosen},
    clock::{boottime_ns, nanos},
    error::exit_of,
    exit_code::Exit,
    model::{Backend, Eyes, ProcKey, Source, View},
    reap::{
        people::ProcPeople,
        plan::{Class, Policy, Row, plan, same_process},
        report::{Identity, People as _, Presence, identify},
        stuck::{Coroner, Stuck},
    },
    watch::Watch,
};

const MS: u64 = 1_000_000;
/// First and longest pause between two looks that no event asked for: where the tracer tells of closes, and where not.
const PAUSE_MIN: u64 = MS;
const PAUSE_MAX: u64 = 50 * MS;
const PAUSE_MAX_DEAF: u64 = 10 * MS;
/// A pause is at least so many times what the look before took: a wait costs about a hundredth of a processor while
/// nothing happens, and a tenth while events come all the time.
const PAUSE_PER_LOOK: u64 = 100;
const PAUSE_PER_EVENT: u64 = 10;
/// Between two views that see changes of another kind: a mapping given up, new holders.
const VIEW_PERIOD: u64 = 1_000 * MS;

/// A holder that let go while it was waited for.
#[derive(Clone, Debug)]
pub(super) struct Ended {
    pub(super) identity: Identity,
    pub(super) row: Row,
    pub(super) at_ns: u64,
}

/// What the wait came to.
#[derive(Debug)]
pub(super) struct Over {
    pub(super) verdict: Verdict,
    pub(super) view: View,
    pub(super) standing: Standing,
    /// Those that still hold, and why they do not end if that is the trouble.
    pub(super) held: Vec<(Row, Identity, Option<Stuck>)>,
    pub(super) ended: Vec<Ended>,
    pub(super) at_ns: u64,
}

/// How a wait goes.
#[derive(Debug, Default)]
struct Course {
    /// Those that are waited for.
    known: Vec<Held>,
    ended: Vec<Ended>,
    last: Option<View>,
    /// Nobody can look any more.
    blind: bool,
}

pub(super) struct Vigil<'a> {
    pub(super) eyes: &'a dyn Eyes,
    /// Of more than exits as soon as there is something to wait for.
    pub(super) watch: Watch,
    pub(super) run: &'a Path,
    pub(super) people: &'a ProcPeople,
    pub(super) policy: &'a Policy,
    pub(super) chooser: &'a Chooser<'a>,
    pub(super) ignore_monitors: bool,
    pub(super) proc: &'a Path,
    pub(super) begun_ns: u64,
    /// Whom a word was said about.
    pub(super) told: BTreeSet<ProcKey>,
}

impl Vigil<'_> {
    pub(super) fn keep(&mut self, timeout: Option<Duration>, coroner: &Coroner) -> anyhow::Result<Over> {
        let give_up = timeout.map_or(u64::MAX, |timeout| self.begun_ns.saturating_add(nanos(timeout)));
        self.eyes.give_up_at(give_up);
        let mut course = Course::default();
        match self.follow(&mut course, give_up) {
            Ok((view, standing)) => Ok(self.over(view, standing, course, coroner)),
            Err(error) => self.blind(course, coroner, error),
        }
    }

    /// Until it is over; the sweep that says so.
    fn follow(&mut self, course: &mut Course, give_up: u64) -> anyhow::Result<(View, Standing)> {
        let Course { known, ended, last, blind: _ } = course;
        let mut pause = PAUSE_MIN;
        let mut next_view = 0;
        let mut longest = PAUSE_MAX_DEAF;
        loop {
            let mut cost = 0;
            if known.is_empty() {
                let (view, standing, took) = self.look(true)?;
                if standing.is_free() || boottime_ns() >= give_up {
                    return Ok((view, standing));
                }
                if next_view == 0 {
                    self.begin(&view);
                }
                let tells = view.backend.is_some_and(Backend::counts) && self.watch.hears();
                longest = if tells { PAUSE_MAX } else { PAUSE_MAX_DEAF };
                cost = took * PAUSE_PER_EVENT;
                next_view = boottime_ns() + VIEW_PERIOD.max(took * PAUSE_PER_LOOK);
                self.take(known, &standing.holders);
                *last = Some(view);
            }
            let now = boottime_ns();
            if now >= give_up {
                let (view, standing, _) = self.look(true)?;
                return Ok((view, standing));
            }
            let wake = now.saturating_add(pause.max(cost)).min(give_up);
            let woken = self.watch.wait(&pidfds(known), wake)?;
            exited(known, &woken.exited, ended);
            let looked = boottime_ns();
            if looked >= next_view {
                let (view, standing, took) = self.look(false)?;
                self.compare(known, &standing, ended);
                *last = Some(view);
                next_view = boottime_ns() + VIEW_PERIOD.max(took * PAUSE_PER_LOOK);
            } else {
                self.check(known, ended);
            }
            let took = boottime_ns().saturating_sub(looked);
            if woken.event {
                pause = PAUSE_MIN;
                // Exits end this pause, other events wait until it is over.
                let deaf = (boottime_ns() + PAUSE_MIN.max(took * PAUSE_PER_EVENT)).min(give_up);
                if !known.is_empty() {
                    let woken = Watch::of_exits().wait(&pidfds(known), deaf)?;
                    exited(known, &woken.exited, ended);
                }
            } else if woken.is_late() {
                pause = (pause * 2).min(longest).max(took * PAUSE_PER_LOOK);
            }
        }
    }

    /// There is something to wait for.
    fn begin(&mut self, view: &View) {
        self.watch = Watch::new(self.run);
        if view.source == Source::Proc && !self.policy.privileged {
            tracing::warn!("only processes that /proc shows to this user can be waited for: others may hold too");
        }
    }

    fn look(&self, sweep: bool) -> anyhow::Result<(View, Standing, u64)> {
        let begun = boottime_ns();
        let mut view = if sweep { self.eyes.sweep()? } else { self.eyes.view()? };
        let Chosen { keys: chosen, mut undecided, notes } = self.chooser.chosen(&view)?;
        view.notes.extend(notes);
        let subjects = self.people.subjects(&view);
        // Nobody waits for these, meant or not.
        let is_job = |key: &ProcKey| subjects.get(key).is_none_or(|subject| subject.class == Class::Job);
        undecided.retain(|key| !self.ignore_monitors || is_job(key));
        let policy = Policy { chosen, undecided, ..self.policy.clone() };
        let plan = plan(&view, &subjects, &policy);
        let standing = Standing::of(&view, &plan, &policy, self.ignore_monitors);
        Ok((view, standing, boottime_ns().saturating_sub(begun)))
    }

    /// Those that are not waited for yet.
    fn take(&mut self, known: &mut Vec<Held>, rows: &[Row]) {
        for row in rows {
            if known.iter().any(|held| same_process(held.row.key, row.key)) {
                continue;
            }
            if let Some(held) = Held::open(row.clone(), self.identity(row.key), self.proc) {
                self.tell(&held);
                known.push(held);
            }
        }
    }

    fn identity(&self, key: ProcKey) -> Identity {
        identify(self.people, self.eyes.lineage(), key)
    }

    /// Says at once what may never end by itself.
    fn tell(&mut self, held: &Held) {
        let Held { row, identity, pidfd: _ } = held;
        if !self.told.insert(row.key) {
            return;
        }
        let Row { key, via: _, slots: _, class, class_rule, action: _, stop_unit: _ } = row;
        let who = format!("process {} ({})", key.tgid, crate::out::sanitize::escape(&identity.comm));
        match class {
            Class::Job if self.policy.ancestors.contains(&key.tgid) => {
                tracing::warn!("{who} has started this wait and holds too: it is waited for like any other");
            }
            Class::Job => {}
            Class::Monitor => tracing::warn!(
                "{who} is a monitor ({class_rule}) and may never let go; --ignore-monitors does not wait for such"
            ),
            Class::System => tracing::warn!(
                "{who} is part of the system ({class_rule}) and may never let go; --ignore-monitors does not wait for such"
            ),
        }
    }

    /// Looks at the first until one is found that still holds: as long as there is one, the others do not matter.
    fn check(&self, known: &mut Vec<Held>, ended: &mut Vec<Ended>) {
        while let Some(held) = known.first() {
            let seen = match self.eyes.look_at(held.row.key.tgid) {
                Ok(seen) => seen,
                Err(error) => {
                    // The view that comes anyway has the last word.
                    tracing::debug!("look at {}: {error:#}", held.row.key.tgid);
                    break;
                }
            };
            if held.holds(seen.as_ref()) || held.is_exiting(self.proc) {
                break;
            }
            let Held { row, identity, pidfd: _ } = known.remove(0);
            ended.push(Ended { identity, row, at_ns: boottime_ns() });
        }
    }

    fn compare(&mut self, known: &mut Vec<Held>, standing: &Standing, ended: &mut Vec<Ended>) {
        let at_ns = boottime_ns();
        let proc = self.proc;
        let gone = known.extract_if(.., |held| {
            !standing.holders.iter().any(|row| same_process(row.key, held.row.key)) && !held.is_exiting(proc)
        });
        ended.extend(gone.map(|Held { row, identity, pidfd: _ }| Ended { identity, row, at_ns }));
        self.take(known, &standing.holders);
    }

    /// The end, when nobody can look any more: of those that were seen, whoever is not known to have let go still holds.
    fn blind(&self, mut course: Course, coroner: &Coroner, error: anyhow::Error) -> anyhow::Result<Over> {
        // What was asked for is wrong, as a holder that came meanwhile has shown.
        let wrong = exit_of(&error) == Exit::Usage;
        let Some(mut view) = course.last.take().filter(|_| !wrong) else { return Err(error) };
        course.blind = true;
        let known = &course.known;
        view.complete = false;
        view.notes.push(format!("the last look failed, so this is what was known before: {error:#}"));
        view.holders.retain(|holder| known.iter().any(|held| same_process(held.row.key, holder.key)));
        let holders = known.iter().map(|held| held.row.clone()).collect();
        Ok(self.over(view, Standing { holders, ..Standing::default() }, course, coroner))
    }

    /// The end, by a sweep that was just made.
    fn over(&self, view: View, mut standing: Standing, course: Course, coroner: &Coroner) -> Over {
        let Course { known, mut ended, last: _, blind } = course;
        let at_ns = boottime_ns();
        for held in &known {
            let Held { row, identity, .. } = held;
            if standing.holders.iter().any(|other| same_process(other.key, row.key)) {
                continue;
            }
            // No sweep sees what a process on its way out has left to the driver.
            if held.is_exiting(self.proc) {
                standing.holders.push(row.clone());
            } else {
                ended.push(Ended { identity: identity.clone(), row: row.clone(), at_ns });
            }
        }
        let examine = |row: &Row| {
            let age = at_ns.saturating_sub(row.key.start_ns) / 1_000_000_000;
            coroner.examine(row.key.tgid, age).filter(|stuck| stuck.kill_pending)
        };
        // Who was waited for was asked for already.
        let identity = |row: &Row| {
            let held = known.iter().find(|held| same_process(held.row.key, row.key));
            held.map_or_else(|| self.identity(row.key), |held| held.identity.clone())
        };
        let held: Vec<(Row, Identity, Option<Stuck>)> =
            standing.holders.iter().map(|row| (row.clone(), identity(row), examine(row))).collect();
        let findings = Findings {
            blind,
            kill_pending: held.iter().any(|(_, _, stuck)| stuck.is_some()),
            named_unseen: self.policy.pids.iter().any(|pid| self.is_hidden(*pid, view.source)),
        };
        let verdict = judge(&standing, &view, self.policy, findings);
        Over { verdict, view, standing, held, ended, at_ns }
    }

    fn is_hidden(&self, pid: u32, source: Source) -> bool {
        match self.people.presence(pid) {
            Presence::Absent | Presence::ThreadOf(_) => false,
            // The kernel's own view needs no /proc.
            Presence::Hidden if source != Source::Proc => false,
            Presence::Hidden => true,
            Presence::Here => self.eyes.look_at(pid).is_err(),
        }
    }
}

fn pidfds(known: &[Held]) -> Vec<BorrowedFd<'_>> {
    known.iter().filter_map(|held| Some(held.pidfd.as_ref()?.as_fd())).collect()
}

/// Takes out those whose pidfds woke; positions are among those that have one.
fn exited(known: &mut Vec<Held>, positions: &[usize], ended: &mut Vec<Ended>) {
    let with_pidfd: Vec<usize> =
        known.iter().enumerate().filter(|(_, held)| held.pidfd.is_some()).map(|(position, _)| position).collect();
    let at_ns = boottime_ns();
    // From the back, so that positions stay what they are.
    for position in positions.iter().rev().filter_map(|position| with_pidfd.get(*position)) {
        let Held { row, identity, pidfd: _ } = known.remove(*position);
        ended.push(Ended { identity, row, at_ns });
    }
}
