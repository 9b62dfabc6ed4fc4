//! What is told of many times, and the bars that they are held against.

use std::time::Duration;

use serde::Serialize;

/// Of at least one measurement, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
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
        let (rounds, middle) = (ms.len(), ms.len() / 2);
        let upper = *ms.get(middle)?;
        let median_ms = if rounds.is_multiple_of(2) { f64::midpoint(ms[middle - 1], upper) } else { upper };
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
        assert_eq!([0.01234, 1.2345, 12.345, 1234.6].map(short), ["0.012", "1.23", "12.3", "1235"]);
    }
}
