//! How long after the kernel's last close gpureap knows of it: its report held against a trace.

use std::{collections::BTreeMap, ops::RangeInclusive};

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;

use super::{
    stats::Stats,
    trace::{Event, Inode, What},
};

const KILL: u32 = 9;
const CHILD: u32 = 17;

/// What gpureap tells of one process, in milliseconds from the beginning of the reap.
#[derive(Clone, Copy, Debug)]
pub(super) struct Told {
    pub(super) pid: u32,
    pub(super) signal_ms: f64,
    pub(super) closed_ms: f64,
}

/// One reap, in milliseconds from the last close of the device where nothing else is said.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Lags {
    /// Until the last process has ended: the kernel's `exit_notify`.
    pub(super) ended: f64,
    /// Until gpureap knows.
    pub(super) known: f64,
    /// Until its report is made.
    pub(super) proved: f64,
    /// Until its parent sees it end.
    pub(super) returned: f64,
    /// From the end of the last process until gpureap knows. It is woken on the way there, so it may be early.
    pub(super) known_after_end: f64,
    /// Last closes that somebody else made, such as a look at the holder's files, which had one in hand.
    pub(super) closed_elsewhere: usize,
}

/// What the trace says of one holder, in its microseconds.
#[derive(Clone, Copy, Default)]
struct Death {
    killed: Option<i64>,
    closed: Option<i64>,
    ended: Option<i64>,
}

impl Lags {
    /// `ran_us`: from before the start of gpureap until its end was seen, on the trace's clock.
    pub(super) fn of(
        events: &[Event],
        node: Inode,
        told: &[Told],
        elapsed_ms: f64,
        ran_us: &RangeInclusive<i64>,
    ) -> Result<Self> {
        let mut deaths: BTreeMap<u32, Death> = told.iter().map(|told| (told.pid, Death::default())).collect();
        let (mut closes, mut closed_us) = (0, i64::MIN);
        for Event { at_us, task, what } in events {
            let (whose, time): (_, fn(&mut Death) -> &mut Option<i64>) = match what {
                What::Signal { signal: KILL, to } => (to, |death| &mut death.killed),
                What::Signal { signal: CHILD, to: _ } => (task, |death| &mut death.ended),
                What::Close(inode) if *inode == node => {
                    closes += 1;
                    closed_us = closed_us.max(*at_us);
                    (task, |death| &mut death.closed)
                }
                What::Signal { .. } | What::Close(_) => continue,
            };
            if let Some(death) = deaths.get_mut(whose) {
                ensure!(time(death).replace(*at_us).is_none(), "the trace tells something of {whose} twice");
            }
        }
        ensure!(closes == told.len(), "the trace tells of {closes} closes of the device by {} holders", told.len());
        let (mut begun_us, mut ended_us) = (i64::MAX, i64::MIN);
        let mut closed_elsewhere = 0;
        for Told { pid, signal_ms, closed_ms: _ } in told {
            let Death { killed, closed, ended } = deaths[pid];
            let (killed, ended) =
                killed.zip(ended).with_context(|| format!("the trace does not tell how {pid} died"))?;
            closed_elsewhere += usize::from(closed.is_none());
            let closed = closed.unwrap_or(killed);
            ensure!(killed <= closed && closed <= ended, "{pid}: killed {killed}, closed {closed}, ended {ended}");
            // gpureap reads its clock right before it sends: the signal that follows soonest joins the two times.
            begun_us = begun_us.min(killed - micros(*signal_ms));
            ended_us = ended_us.max(ended);
        }
        let known_us = told.iter().map(|told| begun_us + micros(told.closed_ms)).max().context("nothing was reaped")?;
        let proved_us = begun_us + micros(elapsed_ms);
        ensure!(
            ran_us.contains(&begun_us) && ran_us.contains(&proved_us),
            "gpureap ran in {ran_us:?} and tells of {begun_us} to {proved_us}"
        );
        let ms = |from: i64, to: i64| (to - from) as f64 / 1e3;
        Ok(Self {
            ended: ms(closed_us, ended_us),
            known: ms(closed_us, known_us),
            proved: ms(closed_us, proved_us),
            returned: ms(closed_us, *ran_us.end()),
            known_after_end: ms(ended_us, known_us),
            closed_elsewhere,
        })
    }
}

fn micros(ms: f64) -> i64 {
    (ms * 1e3).round() as i64
}

/// Of many reaps.
#[derive(Serialize)]
pub(super) struct LagStats {
    pub(super) ended: Stats,
    pub(super) known: Stats,
    pub(super) known_after_end: Stats,
    pub(super) proved: Stats,
    pub(super) returned: Stats,
    /// In all rounds together.
    pub(super) closed_elsewhere: usize,
}

impl LagStats {
    /// `None` without a reap.
    pub(super) fn of(lags: &[Lags]) -> Option<Self> {
        let stats = |time: fn(&Lags) -> f64| Stats::of_ms(lags.iter().map(time).collect());
        Some(Self {
            ended: stats(|lags| lags.ended)?,
            known: stats(|lags| lags.known)?,
            known_after_end: stats(|lags| lags.known_after_end)?,
            proved: stats(|lags| lags.proved)?,
            returned: stats(|lags| lags.returned)?,
            closed_elsewhere: lags.iter().map(|lags| lags.closed_elsewhere).sum(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: Inode = Inode { device: (0, 42), number: 2 };
    const OTHER: Inode = Inode { device: (0, 42), number: 3 };

    fn event(at_us: i64, task: u32, what: What) -> Event {
        Event { at_us, task, what }
    }

    fn kill(at_us: i64, to: u32) -> Event {
        event(at_us, 1, What::Signal { signal: KILL, to })
    }

    fn end(at_us: i64, task: u32) -> Event {
        event(at_us, task, What::Signal { signal: CHILD, to: 1 })
    }

    /// Two holders of gpureap 1 and a stranger.
    fn events() -> Vec<Event> {
        vec![
            kill(1_005_004, 10),
            kill(1_005_103, 11),
            event(1_005_500, 11, What::Close(NODE)),
            end(1_005_520, 11),
            kill(1_005_600, 99),
            event(1_006_000, 10, What::Close(NODE)),
            end(1_006_050, 10),
            event(1_008_000, 99, What::Close(OTHER)),
            end(1_008_000, 99),
        ]
    }

    /// The reap began at 1,000,000; the first signal left 4 µs and the second 3 µs after the clock was read.
    const TOLD: [Told; 2] =
        [Told { pid: 10, signal_ms: 5.0, closed_ms: 6.25 }, Told { pid: 11, signal_ms: 5.1, closed_ms: 5.75 }];

    #[test]
    fn from_the_last_close() {
        let lags = Lags::of(&events(), NODE, &TOLD, 9.0, &(999_000..=1_012_000)).unwrap();
        let expected = Lags {
            ended: 0.05,
            known: 0.253,
            proved: 3.003,
            returned: 6.0,
            known_after_end: 0.203,
            closed_elsewhere: 0,
        };
        assert_eq!(lags, expected);
    }

    #[test]
    fn a_look_may_be_the_last_to_have_the_file() {
        let mut events = events();
        let Event { at_us, task, .. } = &mut events[5];
        (*at_us, *task) = (1_006_400, 1);
        let lags = Lags::of(&events, NODE, &TOLD, 9.0, &(999_000..=1_012_000)).unwrap();
        assert_eq!((lags.ended, lags.known, lags.known_after_end), (-0.35, -0.147, 0.203));
        assert_eq!(lags.closed_elsewhere, 1);
    }

    #[test]
    fn a_trace_that_does_not_fit_is_an_error() {
        let error = |events: &[Event], ran: RangeInclusive<i64>| {
            format!("{:#}", Lags::of(events, NODE, &TOLD, 9.0, &ran).unwrap_err())
        };
        let ran = 999_000..=1_012_000;
        for (missing, what) in [(0, "does not tell how 10"), (2, "1 closes of the device by 2"), (3, "how 11 died")] {
            let mut events = events();
            events.remove(missing);
            assert!(error(&events, ran.clone()).contains(what), "{what}");
        }
        let twice = [events(), vec![kill(1_005_700, 10)]].concat();
        assert!(error(&twice, ran.clone()).contains("of 10 twice"));
        // An end before the close would make the end no bound of it.
        let mut early = events();
        early[6].at_us = 1_005_999;
        assert!(error(&early, ran).contains("ended 1005999"));
        assert!(error(&events(), 1_000_500..=1_012_000).contains("gpureap ran in"));
        assert!(error(&events(), 999_000..=1_008_000).contains("gpureap ran in"));
    }
}
