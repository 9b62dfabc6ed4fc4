//! What is told of many times, and the bars that they are held against.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use super::random;

/// Of at least one measurement, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Stats {
    pub(super) rounds: usize,
    pub(super) min_ms: f64,
    pub(super) median_ms: f64,
    pub(super) p90_ms: f64,
    pub(super) p95_ms: f64,
    pub(super) max_ms: f64,
}

impl Stats {
    pub(super) fn of(times: &[Duration]) -> Option<Self> {
        Self::of_ms(times.iter().map(|time| time.as_secs_f64() * 1e3).collect())
    }

    pub(super) fn of_ms(mut ms: Vec<f64>) -> Option<Self> {
        ms.sort_by(f64::total_cmp);
        let rounds = ms.len();
        let median_ms = median_of_sorted(&ms)?;
        // The smallest that at least so many of a hundred do not exceed.
        let percentile = |of_hundred: usize| ms[(rounds * of_hundred).div_ceil(100) - 1];
        Some(Self {
            rounds,
            min_ms: ms[0],
            median_ms,
            p90_ms: percentile(90),
            p95_ms: percentile(95),
            max_ms: ms[rounds - 1],
        })
    }
}

fn median_of_sorted(sorted: &[f64]) -> Option<f64> {
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    Some(if sorted.len().is_multiple_of(2) { f64::midpoint(sorted[middle - 1], upper) } else { upper })
}

pub(super) fn median(mut numbers: Vec<f64>) -> Option<f64> {
    numbers.sort_by(f64::total_cmp);
    median_of_sorted(&numbers)
}

/// How many times longer something takes than something else: the median over rounds, and where 95 % of the medians lie when
/// rounds are drawn again and again.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Ratio {
    pub(super) median: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Ratio {
    /// Of pairs, one for each round.
    pub(super) fn of(times: &[f64], base: &[f64]) -> Option<Self> {
        const DRAWS: usize = 2000;
        let ratios: Vec<f64> = times.iter().zip(base).map(|(time, base)| time / base).collect();
        let mut random = random(ratios.len() as u64);
        let mut medians = Vec::with_capacity(DRAWS);
        for _ in 0..DRAWS {
            let drawn = (0..ratios.len()).map(|_| ratios[(random() % ratios.len() as u64) as usize]);
            medians.push(median(drawn.collect())?);
        }
        medians.sort_by(f64::total_cmp);
        Some(Self { median: median(ratios)?, low: medians[DRAWS / 40], high: medians[DRAWS - 1 - DRAWS / 40] })
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { median, low, high } = self;
        write!(f, "{median:.3} [{low:.3}, {high:.3}]")
    }
}

/// A line of the design's list of bars.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Bar {
    pub(super) what: String,
    pub(super) limit: f64,
    /// Whether more than the limit is good, or less.
    pub(super) at_least: bool,
    pub(super) unit: &'static str,
    pub(super) measured: Option<f64>,
    pub(super) verdict: String,
}

impl Bar {
    pub(super) fn at_most(what: impl Into<String>, limit: f64, unit: &'static str, measured: Option<f64>) -> Self {
        Self::new(what.into(), limit, false, unit, measured)
    }

    pub(super) fn at_least(what: impl Into<String>, limit: f64, unit: &'static str, measured: Option<f64>) -> Self {
        Self::new(what.into(), limit, true, unit, measured)
    }

    fn new(what: String, limit: f64, at_least: bool, unit: &'static str, measured: Option<f64>) -> Self {
        let verdict = match measured {
            None => "not measured".to_owned(),
            Some(measured) => {
                let missing = if at_least { limit - measured } else { measured - limit };
                if missing <= 0.0 { "holds".to_owned() } else { format!("misses by {} {unit}", short(missing)) }
            }
        };
        Self { what, limit, at_least, unit, measured, verdict }
    }
}

/// Three significant digits, or all before the point.
pub(super) fn short(number: f64) -> String {
    let digits = match number.abs() {
        0.0 => 0,
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        _ => 3,
    };
    format!("{number:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_tails() {
        assert_eq!(Stats::of(&[]), None);
        let stats = |ms: Vec<f64>| {
            let Stats { rounds, min_ms, median_ms, p90_ms, p95_ms, max_ms } = Stats::of_ms(ms).unwrap();
            format!("{rounds} {min_ms} {median_ms} {p90_ms} {p95_ms} {max_ms}")
        };
        assert_eq!(stats(vec![3.0]), "1 3 3 3 3 3");
        assert_eq!(stats((1..=10).rev().map(f64::from).collect()), "10 1 5.5 9 10 10");
        assert_eq!(stats((1..=11).map(f64::from).collect()), "11 1 6 10 11 11");
        assert_eq!(stats((1..=30).map(f64::from).collect()), "30 1 15.5 27 29 30");
        assert_eq!(stats(vec![0.5, -0.25]), "2 -0.25 0.125 0.5 0.5 0.5");
    }

    #[test]
    fn ratios_of_rounds() {
        assert_eq!(Ratio::of(&[], &[]), None);
        let same = Ratio::of(&[2.0, 4.0, 6.0], &[1.0, 2.0, 3.0]).unwrap();
        assert_eq!(same, Ratio { median: 2.0, low: 2.0, high: 2.0 });
        assert_eq!(same.to_string(), "2.000 [2.000, 2.000]");
        let times: Vec<f64> = (0..40).map(|round| 1.0 + f64::from(round % 5) / 100.0).collect();
        let Ratio { median, low, high } = Ratio::of(&times, &[1.0; 40]).unwrap();
        assert!((median - 1.02).abs() < 1e-9);
        assert!((1.0..1.02).contains(&low) && (1.02..=1.04).contains(&high), "{low} {high}");
    }

    #[test]
    fn verdicts() {
        let verdict = |bar: Bar| bar.verdict;
        assert_eq!(verdict(Bar::at_most("x", 5.0, "ms", Some(5.0))), "holds");
        assert_eq!(verdict(Bar::at_most("x", 5.0, "ms", Some(7.25))), "misses by 2.25 ms");
        assert_eq!(verdict(Bar::at_least("x", 100.0, "×", Some(120.0))), "holds");
        assert_eq!(verdict(Bar::at_least("x", 100.0, "×", Some(80.0))), "misses by 20.0 ×");
        assert_eq!(verdict(Bar::at_least("x", 100.0, "×", None)), "not measured");
    }

    #[test]
    fn numbers_stay_short() {
        assert_eq!([0.0, 0.01234, 1.2345, 12.345, 1234.6].map(short), ["0", "0.012", "1.23", "12.3", "1235"]);
    }
}
