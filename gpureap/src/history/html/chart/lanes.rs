//! Where things stand in the drawing: instants along the axis, and holds in lanes.

use jiff::{SignedDuration, Timestamp};

use super::{
    super::super::{
        report::{DeviceReport, HoldReport, Report},
        told::Index,
    },
    FEW, GUTTER, LOW, MARGIN, MOST, TALL, WIDTH,
};
use crate::holders::report::Role;

/// From instants to places.
pub(super) struct Axis {
    pub(super) from: Timestamp,
    pub(super) to: Timestamp,
}

impl Axis {
    /// Of a stretch that may be empty, with some room around it.
    pub(super) fn around(from: Timestamp, to: Timestamp, at_least: SignedDuration) -> Self {
        let room = (to.duration_since(from) / 16).max(at_least);
        Self { from: from.saturating_sub(room).unwrap_or(from), to: to.saturating_add(room).unwrap_or(to) }
    }

    /// The window, less what is empty at its ends.
    pub(super) fn of(index: &Index<'_>) -> Self {
        let Report { since, until, at, holds, xids, gaps, .. } = index.report;
        if let Some(at) = at {
            return Self::around(*at, *at, SignedDuration::from_mins(10));
        }
        let held = holds.iter().flat_map(|hold| [hold.opened, index.released(hold)]);
        let times = held.chain(xids.iter().map(|xid| xid.time)).chain(gaps.iter().map(|gap| gap.from));
        let seen = times.clone().min().zip(times.max());
        let Some((first, last)) = seen else { return Self::around(*since, *until, SignedDuration::ZERO) };
        let around = Self::around(first, last, SignedDuration::from_secs(1));
        let (from, to) = (around.from.max(*since), around.to.min(*until));
        if from < to { Self { from, to } } else { around }
    }

    pub(super) fn x(&self, time: Timestamp) -> f64 {
        let whole = self.to.duration_since(self.from).as_millis().max(1) as f64;
        let part = time.duration_since(self.from).as_millis() as f64;
        GUTTER + (part / whole).clamp(0.0, 1.0) * (WIDTH - GUTTER - MARGIN)
    }

    pub(super) fn has(&self, time: Timestamp) -> bool {
        self.from <= time && time <= self.to
    }

    /// At whole steps that a clock has, a dozen at most.
    pub(super) fn ticks(&self) -> Vec<(f64, String)> {
        const SECOND: i64 = 1_000;
        const MINUTE: i64 = 60 * SECOND;
        const HOUR: i64 = 60 * MINUTE;
        const DAY: i64 = 24 * HOUR;
        let whole = self.to.duration_since(self.from).as_millis() as i64;
        let small = [1, 2, 5, 10, 20, 50, 100, 200, 500].into_iter();
        let clock = [1, 2, 5, 10, 15, 30];
        let steps = small
            .chain(clock.map(|step| step * SECOND))
            .chain(clock.map(|step| step * MINUTE))
            .chain([1, 2, 3, 6, 12].map(|step| step * HOUR))
            .chain([1, 2, 7, 14, 28, 91, 365].map(|step| step * DAY));
        let step = steps.into_iter().find(|step| whole / step <= 12).unwrap_or(3_650 * DAY);
        let format = match step {
            ..SECOND => "%H:%M:%S%.3f",
            SECOND..MINUTE => "%H:%M:%S",
            MINUTE..DAY => "%H:%M",
            _ => "%F",
        };
        let first = (self.from.as_millisecond() + step - 1).div_euclid(step) * step;
        let times = (0..).map(|number| first + number * step).take_while(|ms| *ms <= self.to.as_millisecond());
        times
            .filter_map(|ms| Timestamp::from_millisecond(ms).ok())
            .map(|time| (self.x(time), time.strftime(format).to_string()))
            .collect()
    }
}

/// One stretch in a lane: a hold, or many that cannot or need not be told apart.
pub(super) struct Segment<'a> {
    pub(super) from: f64,
    pub(super) to: f64,
    pub(super) holds: Vec<&'a HoldReport>,
}

pub(super) struct Lane<'a> {
    pub(super) low: bool,
    pub(super) segments: Vec<Segment<'a>>,
}

impl Lane<'_> {
    pub(super) fn height(&self) -> f64 {
        if self.low { LOW } else { TALL }
    }
}

pub(super) fn lanes<'a>(index: &Index<'a>, axis: &Axis, device: &DeviceReport) -> Vec<Lane<'a>> {
    let holds = index.holds_of(device);
    let mut lanes: Vec<Lane<'a>> = Vec::new();
    for bundle in index.bundles(&holds) {
        let low = bundle[0].role != Some(Role::Attached);
        let mut segments: Vec<Segment<'a>> = bundle
            .iter()
            .map(|hold| Segment { from: axis.x(hold.opened), to: axis.x(index.released(hold)), holds: vec![*hold] })
            .collect();
        let own = lanes.iter_mut().find(|lane| {
            bundle.len() == 1
                && lane.low == low
                && lane.segments.iter().all(|other| other.holds[0].who == bundle[0].who)
        });
        match own {
            Some(lane) => lane.segments.append(&mut segments),
            None => lanes.push(Lane { low, segments }),
        }
    }
    for lane in &mut lanes {
        lane.segments = merge(std::mem::take(&mut lane.segments));
    }
    // Those who used the GPU stand above those who had handles alone.
    lanes.sort_by(|a, b| {
        (a.low, a.segments[0].from).partial_cmp(&(b.low, b.segments[0].from)).unwrap_or(std::cmp::Ordering::Equal)
    });
    if lanes.len() > FEW {
        lanes = pack(lanes);
    }
    if lanes.len() > MOST {
        let rest = lanes.split_off(MOST - 1);
        let segments = merge(rest.into_iter().flat_map(|lane| lane.segments).collect());
        lanes.push(Lane { low: true, segments });
    }
    lanes
}

/// What overlaps, or is too small to be seen apart, is one stretch.
fn merge(mut segments: Vec<Segment<'_>>) -> Vec<Segment<'_>> {
    segments.sort_by(|a, b| a.from.total_cmp(&b.from));
    let mut merged: Vec<Segment<'_>> = Vec::new();
    for segment in segments {
        match merged.last_mut() {
            Some(last) if segment.from < last.to + 1.5 => {
                last.to = last.to.max(segment.to);
                last.holds.extend(segment.holds);
            }
            _ => merged.push(segment),
        }
    }
    merged
}

/// Each lane into the first one that is free at its time.
fn pack(lanes: Vec<Lane<'_>>) -> Vec<Lane<'_>> {
    let mut packed: Vec<Lane<'_>> = Vec::new();
    for mut lane in lanes {
        let free = packed.iter_mut().find(|other| {
            other.low == lane.low
                && lane
                    .segments
                    .iter()
                    .all(|a| other.segments.iter().all(|b| a.to + 4.0 < b.from || b.to + 4.0 < a.from))
        });
        match free {
            Some(other) => {
                other.segments.append(&mut lane.segments);
                other.segments.sort_by(|a, b| a.from.total_cmp(&b.from));
            }
            None => packed.push(lane),
        }
    }
    packed
}
