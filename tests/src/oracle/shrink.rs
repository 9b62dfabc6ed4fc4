//! Makes a sequence that shows a fault as short as it can be.
use super::{
    model::Model,
    step::{Part, Step},
};

/// What is left of the steps when those that depend on a missing one are left out, too.
pub fn legal(steps: &[Step]) -> Vec<Step> {
    let mut model = Model::default();
    steps.iter().filter(|step| model.apply(step).is_ok()).cloned().collect()
}

/// The shortest sequence found that still fails, with at most so many tries.
pub fn shrink(steps: Vec<Step>, tries: usize, fails: &mut dyn FnMut(&[Step]) -> bool) -> Vec<Step> {
    let mut best = steps;
    let mut left = tries;
    loop {
        let before = size(&best);
        best = drop_chunks(best, &mut left, fails);
        best = drop_parts(best, &mut left, fails);
        if size(&best) == before || left == 0 {
            return best;
        }
    }
}

fn size(steps: &[Step]) -> usize {
    let of = |step: &Step| if let Step::Together(parts) = step { 1 + parts.len() } else { 1 };
    steps.iter().map(of).sum()
}

/// Whether the candidate, as far as it is legal, is shorter and fails.
fn better(best: &mut Vec<Step>, candidate: &[Step], left: &mut usize, fails: &mut dyn FnMut(&[Step]) -> bool) -> bool {
    let candidate = legal(candidate);
    if *left == 0 || size(&candidate) >= size(best) {
        return false;
    }
    *left -= 1;
    let found = fails(&candidate);
    if found {
        *best = candidate;
    }
    found
}

/// Leaves out half of the steps, then quarters, down to single ones, from the end: later steps depend on earlier ones.
fn drop_chunks(mut best: Vec<Step>, left: &mut usize, fails: &mut dyn FnMut(&[Step]) -> bool) -> Vec<Step> {
    let mut chunk = best.len().div_ceil(2);
    while chunk > 0 && *left > 0 {
        let mut end = best.len();
        while end > 0 {
            let start = end.saturating_sub(chunk);
            let candidate = [&best[..start], &best[end.min(best.len())..]].concat();
            better(&mut best, &candidate, left, fails);
            end = start.min(best.len());
        }
        chunk /= 2;
    }
    best
}

/// Leaves out parts of what happens at the same time.
fn drop_parts(mut best: Vec<Step>, left: &mut usize, fails: &mut dyn FnMut(&[Step]) -> bool) -> Vec<Step> {
    let mut at = best.len();
    while at > 0 {
        at = (at - 1).min(best.len());
        let Some(Step::Together(parts)) = best.get(at).cloned() else { continue };
        let mut chunk = parts.len().div_ceil(2);
        let mut parts: Vec<Part> = parts;
        while chunk > 0 {
            let mut end = parts.len();
            while end > 0 {
                let start = end.saturating_sub(chunk);
                let fewer = [&parts[..start], &parts[end..]].concat();
                let mut candidate = best.clone();
                candidate[at] = Step::Together(fewer.clone());
                if better(&mut best, &candidate, left, fails) {
                    // What else the step made impossible may be gone, too, and this step have moved.
                    match best.get(at) {
                        Some(Step::Together(now)) if *now == fewer => parts = fewer,
                        _ => return best,
                    }
                }
                end = start.min(parts.len());
            }
            chunk /= 2;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::{
        generate::{Script, sequence},
        step::{self, Act},
    };

    fn opens(steps: &[Step], device: u32) -> usize {
        steps.iter().filter(|step| matches!(step, Step::Do(_, Act::Open { dev, .. }) if dev.0 == device)).count()
    }

    #[test]
    fn what_depends_on_a_missing_step_goes_with_it() {
        let text = "begin t0\nt0 fork t1\nt1 open d0 3\nt0 open d0 3\npause\n";
        let mut steps = step::read(text).expect("a sequence");
        steps.remove(1);
        assert_eq!(step::write(&legal(&steps)), "begin t0\nt0 open d0 3\npause\n");
    }

    #[test]
    fn a_fault_shrinks_to_the_steps_that_show_it() {
        for seed in 0..20 {
            let steps = sequence(seed, Script { devices: 3, rings: true, steps: 80 });
            if opens(&steps, 1) < 2 {
                continue;
            }
            let shrunk = shrink(steps, 5000, &mut |steps| opens(steps, 1) >= 2);
            assert_eq!(opens(&shrunk, 1), 2);
            let births = shrunk.iter().filter(|step| matches!(step, Step::Begin(_)));
            assert!(shrunk.len() <= 6 && births.count() <= 2, "seed {seed}: {}", step::write(&shrunk));
        }
    }

    #[test]
    fn what_happens_together_shrinks_too() {
        let text = "begin t0\nt0 fork t1\ntogether\n  t0 open d0 200\n  t1 open d1 216\n  t0 close 200\nend\npause\n";
        let steps = step::read(text).expect("a sequence");
        let opens = |steps: &[Step]| step::write(steps).contains("t1 open d1 216");
        let shrunk = shrink(steps, 200, &mut |steps| opens(steps));
        assert_eq!(step::write(&shrunk), "begin t0\nt0 fork t1\ntogether\n  t1 open d1 216\nend\n");
    }

    #[test]
    fn the_number_of_tries_is_limited() {
        let steps = sequence(1, Script { devices: 3, rings: true, steps: 60 });
        let mut tried = 0;
        shrink(steps, 10, &mut |_| {
            tried += 1;
            false
        });
        assert_eq!(tried, 10);
    }
}
