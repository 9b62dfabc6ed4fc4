//! Which of the holders are meant: `--user`, `--container`, `--tree-of` and the like.
//!
//! [`Filter::matches`] decides over plain data; [`Chooser`] reads, of each holder, what the filter asks for and no more.
//! A holder that appears later is judged by the same filter: [`Chooser::chosen`] of the next view.

mod candidate;
mod filter;
pub mod wish;

use std::{collections::BTreeSet, path::PathBuf};

pub use candidate::Candidate;
use candidate::Gatherer;
pub use filter::{Filter, Tree, require_process};

use crate::{
    cli::Choosing,
    config::{Config, Paths},
    error::Failure,
    gpu::{devices::Devices, nvml::mig::AskMig},
    model::{LineageSource, ProcKey, Slot, View},
};

/// The devices that `--gpu` names; `None`: nothing was named, so all of them. Asks NVML where only that knows.
pub fn slots(choosing: &Choosing, devices: &Devices, config: &Config) -> Result<Option<BTreeSet<Slot>>, Failure> {
    let Choosing { gpu, by, .. } = choosing;
    let mig = AskMig(&config.nvml);
    let chosen = || devices.select_all_with(&config.paths, gpu, *by, &mig);
    if gpu.is_empty() { Ok(None) } else { chosen().map(Some) }
}

/// Judges the holders of any view by one filter.
pub struct Chooser<'a> {
    filter: Filter,
    proc: PathBuf,
    host: PathBuf,
    lineage: &'a dyn LineageSource,
}

/// Those of a view's holders that were meant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chosen {
    /// `None`: no filter was given, so all of them.
    pub keys: Option<BTreeSet<ProcKey>>,
    /// Left out, because what the filter asks for may not be read. They may be meant all the same.
    pub undecided: BTreeSet<ProcKey>,
    /// What could not be judged.
    pub notes: Vec<String>,
}

impl<'a> Chooser<'a> {
    /// Takes what was asked for at its word: a user or a number that cannot exist is an error, one that does not exist
    /// now is not.
    pub fn new(choosing: &Choosing, paths: &Paths, lineage: &'a dyn LineageSource) -> Result<Self, Failure> {
        let Paths { proc, host, .. } = paths;
        Ok(Self { filter: Filter::new(choosing, proc)?, proc: proc.clone(), host: host.clone(), lineage })
    }

    pub fn filter(&self) -> &Filter {
        &self.filter
    }

    /// Those of the view's holders that the filter lets through, as they are now.
    pub fn chosen(&self, view: &View) -> Result<Chosen, Failure> {
        let Self { filter, proc, host, lineage } = self;
        if filter.is_empty() {
            return Ok(Chosen::default());
        }
        let gatherer = Gatherer::new(filter, proc, host, *lineage);
        let candidates: Vec<(ProcKey, Candidate)> =
            view.holders.iter().map(|holder| (holder.key, gatherer.candidate(holder.key))).collect();
        let all: Vec<&Candidate> = candidates.iter().map(|(_, candidate)| candidate).collect();
        filter.check_ambiguity(&all)?;
        let keys = candidates.iter().filter(|(_, candidate)| filter.matches(candidate)).map(|(key, _)| *key);
        let undecided = candidates.iter().filter(|(_, candidate)| filter.is_undecided(candidate)).map(|(key, _)| *key);
        Ok(Chosen { keys: Some(keys.collect()), undecided: undecided.collect(), notes: filter.notes(&all) })
    }
}

#[cfg(test)]
mod tests;
