//! Asks again until the memory of some GPUs is free, or the time is over.

use std::{
    collections::{BTreeMap, BTreeSet},
    thread,
    time::{Duration, Instant},
};

use super::{
    NvmlTrouble,
    client::Ask,
    memory::{Case, MemoryState, judge},
};

/// Between two questions: NVML has no event for memory. An answer takes the driver a millisecond or two.
const PAUSE: Duration = Duration::from_millis(10);

/// What came of it, by minor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryProof {
    pub gpus: BTreeMap<u32, GpuMemory>,
    /// Why there was no answer, or none any more; what was known before it stands.
    pub trouble: Option<NvmlTrouble>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuMemory {
    pub state: MemoryState,
    /// Boottime of the first answer that said free.
    pub free_ns: Option<u64>,
}

/// How long, and by which clock the answers are timed.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// At least one question is asked, even when this is over.
    pub until: Instant,
    /// For one question.
    pub timeout: Duration,
    pub clock: fn() -> u64,
}

/// `alive` is asked anew for each answer: of all processes that are named, which of them live.
pub fn prove(
    nvml: &mut dyn Ask,
    case: &mut Case,
    minors: &BTreeSet<u32>,
    limits: Limits,
    alive: &dyn Fn(u32) -> bool,
) -> MemoryProof {
    let Limits { until, timeout, clock } = limits;
    let mut proof = MemoryProof::default();
    if minors.is_empty() {
        return proof;
    }
    loop {
        let answer = match nvml.ask(timeout) {
            Ok(answer) => answer,
            Err(trouble) => {
                for minor in minors {
                    let unknown = MemoryState::Unknown(trouble.to_string());
                    proof.gpus.entry(*minor).or_insert(GpuMemory { state: unknown, free_ns: None });
                }
                proof.trouble = Some(trouble);
                return proof;
            }
        };
        let now = clock();
        case.alive = answer.contexts().into_values().flatten().filter(|pid| alive(*pid)).collect();
        for minor in minors {
            let state = judge(case, &answer, *minor);
            let gpu = proof.gpus.entry(*minor).or_insert(GpuMemory { state: MemoryState::Free, free_ns: None });
            // One that is taken again by somebody else is not free.
            gpu.free_ns = (state == MemoryState::Free).then(|| gpu.free_ns.unwrap_or(now));
            gpu.state = state;
        }
        // What is not known will not be known by asking again.
        let falling = proof.gpus.values().any(|gpu| matches!(gpu.state, MemoryState::StillUsed { .. }));
        if !falling || Instant::now() >= until {
            return proof;
        }
        thread::sleep(PAUSE.min(until.saturating_duration_since(Instant::now())));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::{
        super::{Gpu, Memory, Snapshot},
        *,
    };

    struct Script(VecDeque<Result<Snapshot, NvmlTrouble>>);

    impl Ask for Script {
        fn ask(&mut self, _: Duration) -> Result<Snapshot, NvmlTrouble> {
            match self.0.len() {
                1 => self.0[0].clone(),
                _ => self.0.pop_front().unwrap(),
            }
        }
    }

    /// Used MiB of each GPU.
    #[expect(clippy::unnecessary_wraps, reason = "an entry of a script")]
    fn answer(used: &[u64]) -> Result<Snapshot, NvmlTrouble> {
        let gpu = |(minor, used): (usize, &u64)| Gpu {
            index: minor as u32,
            minor: Some(minor as u32),
            memory: Some(Memory { total: 143_771 << 20, used: used << 20, reserved: Some(603 << 20) }),
            processes: Some(Vec::new()),
            ..Gpu::default()
        };
        Ok(Snapshot { driver: None, gpus: used.iter().enumerate().map(gpu).collect() })
    }

    fn run(script: impl IntoIterator<Item = Result<Snapshot, NvmlTrouble>>, patience: Duration) -> MemoryProof {
        let limits = Limits { until: Instant::now() + patience, timeout: Duration::from_secs(1), clock: || 77 };
        prove(&mut Script(script.into_iter().collect()), &mut Case::default(), &[0, 1].into(), limits, &|_| false)
    }

    #[test]
    fn asked_until_it_is_free() {
        let proof = run([answer(&[683, 0]), answer(&[683, 0]), answer(&[0, 4])], Duration::from_mins(1));
        assert_eq!(proof.trouble, None);
        let free = GpuMemory { state: MemoryState::Free, free_ns: Some(77) };
        assert_eq!(proof.gpus, [(0, free.clone()), (1, free)].into());
    }

    #[test]
    fn what_stays_is_told_when_the_time_is_over() {
        let proof = run([answer(&[683, 0])], Duration::from_millis(30));
        assert_eq!(proof.gpus[&0].state, MemoryState::StillUsed { mib: 683, by: Vec::new() });
        assert_eq!((proof.gpus[&0].free_ns, proof.gpus[&1].free_ns), (None, Some(77)));
    }

    #[test]
    fn without_an_answer_nothing_is_known_and_nobody_waits() {
        let silent = NvmlTrouble::Silent("2 s".to_owned());
        let proof = run([Err(silent.clone())], Duration::from_mins(1));
        assert_eq!(proof.trouble, Some(silent.clone()));
        let unknown = MemoryState::Unknown("NVML did not answer within 2 s".to_owned());
        assert_eq!(proof.gpus[&0], GpuMemory { state: unknown, free_ns: None });
        // What was answered before the silence stands.
        let proof = run([answer(&[683, 0]), Err(silent)], Duration::from_mins(1));
        assert_eq!((proof.gpus[&1].free_ns, proof.trouble.is_some()), (Some(77), true));
        assert_eq!(proof.gpus[&0].state, MemoryState::StillUsed { mib: 683, by: Vec::new() });
    }

    #[test]
    fn a_gpu_that_nvml_does_not_list_ends_the_waiting() {
        let proof = run([answer(&[0])], Duration::from_mins(1));
        assert!(matches!(proof.gpus[&1].state, MemoryState::Unknown(_)));
    }

    #[test]
    fn taken_again_is_not_free() {
        let proof = run([answer(&[0, 683]), answer(&[683, 683])], Duration::from_millis(30));
        assert_eq!(proof.gpus[&0].free_ns, None);
    }

    #[test]
    fn without_gpus_nobody_is_asked() {
        let limits = Limits { until: Instant::now(), timeout: Duration::ZERO, clock: || 0 };
        let proof = prove(&mut Script(VecDeque::new()), &mut Case::default(), &BTreeSet::new(), limits, &|_| false);
        assert_eq!(proof, MemoryProof::default());
    }
}
