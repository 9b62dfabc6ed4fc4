//! The swim-lanes: who held each GPU when, and the close-up of an incident. Plain SVG; tips are elements that a style shows.

mod close_up;
mod lanes;

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use maud::{Markup, html};
use unicode_width::UnicodeWidthStr as _;

pub(super) use self::close_up::close_up;
use self::lanes::{Axis, Lane, Segment, lanes};
use super::{
    super::{
        report::{DeviceReport, HoldReport, HostState, Incident, Part, ProcessReport},
        text::{alike, class_words, gap_line},
        told::{End, Index, ancestors, gpu_title, name, named, place, process_end, rank, role, user_of},
    },
    parts::{anchor, gpus_of},
};
use crate::{
    holders::report::Role,
    out::{
        sanitize::escape,
        words::{ranges, short_command, span},
    },
};

/// In the units of the drawing, which are pixels on a laptop's screen.
const WIDTH: f64 = 1_376.0;
const GUTTER: f64 = 166.0;
const MARGIN: f64 = 14.0;
const AXIS: f64 = 34.0;
/// Of a lane whose process used the GPU, and of one that had handles alone.
const TALL: f64 = 16.0;
const LOW: f64 = 11.0;
const BETWEEN: f64 = 2.0;
/// Of a character, on average.
const LETTER: f64 = 6.0;
/// From so many on lanes are shared by those who were there at different times.
const FEW: usize = 4;
/// More lanes than this nobody can tell apart.
const MOST: usize = 16;

impl End {
    /// For the style: a colour and a pattern.
    pub(super) const fn class(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Closed => "closed",
            Self::Exited => "exited",
            Self::Failed => "failed",
            Self::Killed => "killed",
            Self::Oom => "oom",
            Self::Fault => "fault",
            Self::Reaped => "reaped",
            Self::HostDown => "down",
            Self::Unknown => "unknown",
        }
    }

    /// Whoever cannot see the colour reads this.
    pub(super) const fn sign(self) -> &'static str {
        match self {
            Self::Held => "▶",
            Self::Closed => "│",
            Self::Exited => "✓",
            Self::Unknown => "?",
            Self::HostDown => "■",
            Self::Failed | Self::Killed | Self::Oom | Self::Fault | Self::Reaped => "✕",
        }
    }

    const fn words(self) -> &'static str {
        match self {
            Self::Held => "held still",
            Self::Closed => "closed, lived on",
            Self::Exited => "exited 0",
            Self::Failed => "exited, not 0",
            Self::Killed => "killed from outside",
            Self::Oom => "out of memory",
            Self::Fault => "fault or abort",
            Self::Reaped => "reaped by gpureap",
            Self::HostDown => "host went down",
            Self::Unknown => "nobody saw how",
        }
    }

    /// What is drawn over the colour.
    const fn pattern(self) -> Option<&'static str> {
        match self {
            Self::Held | Self::Closed | Self::Exited => None,
            Self::Failed => Some("url(#dots)"),
            Self::Killed => Some("url(#rising)"),
            Self::Oom => Some("url(#crossed)"),
            Self::Fault => Some("url(#falling)"),
            Self::Reaped => Some("url(#upright)"),
            Self::HostDown | Self::Unknown => Some("url(#level)"),
        }
    }
}

/// A number as SVG takes it.
fn n(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

/// What the pointer or the keyboard finds, with what is told there.
struct Spot {
    x: f64,
    y: f64,
    width: f64,
    height: f64,
    link: Option<String>,
    lines: Vec<String>,
}

/// How most of them ended.
fn end_of(index: &Index<'_>, holds: &[&HoldReport]) -> End {
    let mut counts: BTreeMap<End, usize> = BTreeMap::new();
    for hold in holds {
        *counts.entry(index.end(hold)).or_default() += 1;
    }
    counts.into_iter().max_by_key(|(_, count)| *count).map_or(End::Unknown, |(end, _)| end)
}

pub(super) fn timeline(index: &Index<'_>) -> Markup {
    let report = index.report;
    if report.devices.iter().all(|device| !device.kind.is_gpu()) {
        return html! {};
    }
    let axis = Axis::of(index);
    let title = if report.at.is_some() { "Who held each GPU at that instant" } else { "Who held each GPU" };
    let cut = axis.from > report.since || axis.to < report.until;
    html! {
        section.timeline aria-labelledby="timeline" {
            h2 id="timeline" { (title) }
            (legend(index))
            @if cut && report.at.is_none() {
                p.hint {
                    "Shown is " (index.clock.second(axis.from)) " to " (index.clock.second(axis.to))
                    ": before and after it no GPU was held."
                }
            }
            (patterns())
            div.chart { (swim_lanes(index, &axis)) }
        }
    }
}

/// Those that occur, in words beside the colour and the pattern.
fn legend(index: &Index<'_>) -> Markup {
    let ends: BTreeSet<End> =
        index.gpus().flat_map(|device| index.holds_of(device)).map(|hold| index.end(hold)).collect();
    let low = index.gpus().flat_map(|device| index.holds_of(device)).any(|hold| hold.role == Some(Role::Handle));
    html! {
        ul.legend aria-label="What the bars mean" {
            @for end in ends {
                li {
                    svg.swatch viewBox="0 0 26 12" width="26" height="12" aria-hidden="true" { (bar(0.5, 0.5, 25.0, 11.0, end)) }
                    span aria-hidden="true" { (end.sign()) } " " (end.words())
                }
            }
            @if low { li { span.thin aria-hidden="true" {} "thin: handles alone, GPU not used" } }
            @if !index.report.xids.is_empty() { li { span aria-hidden="true" { "▲" } " Xid" } }
            @if !index.report.gaps.is_empty() { li { span.shade aria-hidden="true" {} "nobody recorded" } }
        }
    }
}

/// Once in the page; the charts refer to them.
fn patterns() -> Markup {
    let pattern = |id: &str, path: &str| {
        html! {
            pattern id=(id) width="6" height="6" patternUnits="userSpaceOnUse" { path.hatch d=(path) {} }
        }
    };
    html! {
        svg.defs width="0" height="0" aria-hidden="true" focusable="false" {
            defs {
                (pattern("rising", "M-1 1l2-2M0 6l6-6M5 7l2-2"))
                (pattern("falling", "M5-1l2 2M0 0l6 6M-1 5l2 2"))
                (pattern("crossed", "M0 0l6 6M0 6l6-6"))
                (pattern("upright", "M3 0v6"))
                (pattern("level", "M0 3h6"))
                (pattern("dots", "M2 3h2M5 0h1M0 0h1"))
                (pattern("shaded", "M-1 1l2-2M0 6l6-6M5 7l2-2"))
            }
        }
    }
}

fn bar(x: f64, y: f64, width: f64, height: f64, end: End) -> Markup {
    let width = width.max(2.0);
    html! {
        rect.bar.(end.class()) x=(n(x)) y=(n(y)) width=(n(width)) height=(n(height)) rx="2" {}
        @if let Some(pattern) = end.pattern() {
            rect.over.(end.class()) x=(n(x)) y=(n(y)) width=(n(width)) height=(n(height)) rx="2" fill=(pattern) {}
        }
    }
}

/// ✕ where a process died, ▶ where a hold goes on.
fn mark(x: f64, y: f64, height: f64, end: End) -> Markup {
    let middle = y + height / 2.0;
    let arm = (height / 2.0 - 2.0).min(4.0);
    let class = end.class();
    html! {
        @if end.is_death() {
            path.death.(class) d=(format!(
                "M{} {}l{} {}m0 {}l{} {}", n(x - arm), n(middle - arm), n(2.0 * arm), n(2.0 * arm), n(-2.0 * arm), n(-2.0 * arm), n(2.0 * arm)
            )) {}
        } @else if end == End::Held {
            path.goes-on d=(format!("M{} {}l{} {}l{} {}z", n(x), n(y), n(arm + 2.0), n(height / 2.0), n(-arm - 2.0), n(height / 2.0))) {}
        } @else if end == End::HostDown {
            path.edge d=(format!("M{} {}v{}", n(x), n(y - 1.0), n(height + 2.0))) {}
        }
    }
}

fn grid(axis: &Axis, top: f64, bottom: f64) -> Markup {
    html! {
        @for (x, label) in axis.ticks() {
            line.grid x1=(n(x)) x2=(n(x)) y1=(n(top - 4.0)) y2=(n(bottom)) {}
            text.tick x=(n(x)) y=(n(top - 8.0)) text-anchor="middle" { (label) }
        }
    }
}

/// With as much of the label as there is room for.
fn label(text: &str, from: f64, to: f64, limit: f64, y: f64, low: bool) -> Markup {
    let letter = if low { LETTER * 0.86 } else { LETTER };
    let class = if low { "name low" } else { "name" };
    let inside = ((to - from - 14.0) / letter).max(0.0) as usize;
    let (x, room) = if text.width() <= inside || inside >= 24 {
        (from + 5.0, inside)
    } else {
        (to + 9.0, ((limit - to - 14.0) / letter).max(0.0) as usize)
    };
    let shown = fit(text, room);
    html! { @if let Some(shown) = shown { text class=(class) x=(n(x)) y=(n(y)) { (shown) } } }
}

fn fit(text: &str, room: usize) -> Option<String> {
    if text.width() <= room {
        return Some(text.to_owned());
    }
    (room >= 8).then(|| crate::out::text::cut(text, Some(room)))
}

fn swim_lanes(index: &Index<'_>, axis: &Axis) -> Markup {
    let report = index.report;
    let mut spots: Vec<Spot> = Vec::new();
    let mut rows: Vec<Markup> = Vec::new();
    let mut stripes: Vec<Markup> = Vec::new();
    let mut y = AXIS;
    // Where each host's GPUs begin and end.
    let mut extents: Vec<(&str, f64, f64)> = Vec::new();
    for (position, device) in index.gpus().enumerate() {
        let lanes = lanes(index, axis, device);
        let content: f64 = lanes.iter().map(|lane| lane.height() + BETWEEN).sum();
        // The names at the left take two lines.
        let height = (content + 6.0).max(34.0);
        match extents.last_mut() {
            Some((host, _, end)) if *host == device.host => *end = y + height,
            _ => extents.push((&device.host, y, y + height)),
        }
        let class = if position % 2 == 0 { "stripe" } else { "stripe odd" };
        stripes.push(html! { rect class=(class) x="0" y=(n(y)) width=(n(WIDTH)) height=(n(height)) {} });
        rows.push(gpu_row(index, axis, device, &lanes, y, &mut spots));
        y += height;
    }
    let bottom = y;
    let mut behind: Vec<Markup> = Vec::new();
    for (host, top, end) in &extents {
        behind.push(host_marks(index, axis, host, *top, *end, &mut spots));
    }
    let described =
        format!("Timeline of GPUs, {} to {} UTC", index.clock.second(axis.from), index.clock.second(axis.to));
    html! {
        svg.lanes viewBox=(format!("0 0 {} {}", n(WIDTH), n(bottom + 4.0))) role="group" aria-label=(described) {
            @for stripe in &stripes { (stripe) }
            (grid(axis, AXIS, bottom))
            @for marks in &behind { (marks) }
            @for incident in report.incidents.iter().filter(|incident| axis.has(incident.began)) {
                @let x = axis.x(incident.began);
                line.flag x1=(n(x)) x2=(n(x)) y1="13" y2=(n(bottom)) {}
            }
            @for row in &rows { (row) }
            @for (x, ids) in flags(index, axis) {
                a href=(format!("#i{}", ids[0])) aria-label=(format!("incident {}", ids[0])) {
                    @let text = ids.iter().map(|id| format!("#{id}")).collect::<Vec<_>>().join(" ");
                    @let width = 8.0 + LETTER * 1.2 * text.len() as f64;
                    rect.flag x=(n(x - width / 2.0)) y="0.5" width=(n(width)) height="14" rx="3" {}
                    text.flag x=(n(x)) y="11" text-anchor="middle" { (text) }
                }
            }
            @if let Some(at) = report.at {
                @let x = axis.x(at);
                line.instant x1=(n(x)) x2=(n(x)) y1="14" y2=(n(bottom)) {}
                text.instant x=(n(x)) y="11" text-anchor="middle" { (index.clock.second(at)) }
            }
            (told(&spots, bottom))
        }
    }
}

/// Incidents by place; those that would cover each other share a flag.
fn flags(index: &Index<'_>, axis: &Axis) -> Vec<(f64, Vec<u32>)> {
    let mut flags: Vec<(f64, Vec<u32>)> = Vec::new();
    for incident in index.report.incidents.iter().filter(|incident| axis.has(incident.began)) {
        let x = axis.x(incident.began);
        match flags.last_mut() {
            // So many that no number can be read are told by the cards.
            Some((last, ids)) if x < *last + 24.0 * ids.len() as f64 => {
                if ids.len() < 6 {
                    ids.push(incident.id);
                }
            }
            _ => flags.push((x, vec![incident.id])),
        }
    }
    flags
}

fn gpu_row(
    index: &Index<'_>,
    axis: &Axis,
    device: &DeviceReport,
    lanes: &[Lane<'_>],
    top: f64,
    spots: &mut Vec<Spot>,
) -> Markup {
    let DeviceReport { host, node, kind: _, gpu: _, index: number, uuid, bdf, model } = device;
    let mut y = top + 3.0;
    let mut drawn: Vec<Markup> = Vec::new();
    for lane in lanes {
        let height = lane.height();
        for (position, segment) in lane.segments.iter().enumerate() {
            let limit = lane.segments.get(position + 1).map_or(WIDTH, |next| next.from);
            let end = end_of(index, &segment.holds);
            let width = (segment.to - segment.from).max(2.0);
            let (text, link) = segment_label(index, segment);
            drawn.push(html! {
                (bar(segment.from, y, width, height, end))
                @for x in ends(index, axis, segment) { (mark(x, y, height, end)) }
                (label(&text, segment.from, segment.from + width, limit, y + height / 2.0 + if lane.low { 3.2 } else { 3.8 }, lane.low))
            });
            spots.push(Spot { x: segment.from, y, width, height, link, lines: segment_lines(index, segment) });
        }
        y += height + BETWEEN;
    }
    // An Xid stands on the first lane, where its GPU was used.
    for report in index.report.xids.iter().filter(|xid| xid.host == *host && xid.xid.node.as_ref() == Some(node)) {
        if !axis.has(report.time) {
            continue;
        }
        let x = axis.x(report.time);
        let number = report.xid.xid.to_string();
        drawn.push(html! {
            path.xid d=(format!("M{} {}l5 9h-10z", n(x), n(top + 5.0))) {}
            text.xid x=(n(x + 7.0)) y=(n(top + 14.0)) { "Xid " (number) }
        });
        let names = report.xid.pid.map_or_else(|| "names no process".to_owned(), |pid| format!("names pid {pid}"));
        spots.push(Spot {
            x: x - 6.0,
            y: top + 3.0,
            width: 40.0,
            height: 13.0,
            link: Some("#xids".to_owned()),
            lines: vec![
                format!("Xid {number} at {}: {}", index.clock.exact(report.time), escape(&report.meaning)),
                format!("{}, {names}", class_words(report.class)),
                escape(&report.xid.message).into_owned(),
            ],
        });
    }
    let title = gpu_title(device);
    let below = if index.several_hosts { Some(host) } else { model.as_ref() };
    let below = below.map(|text| fit(&escape(text), 22).unwrap_or_default()).unwrap_or_default();
    let mut lines = vec![format!("{title}: {}", escape(node))];
    lines.extend([model, bdf, uuid].into_iter().flatten().map(|text| escape(text).into_owned()));
    lines.extend(number.map(|number| format!("index {number}")));
    lines.extend(index.several_hosts.then(|| format!("on {}", escape(host))));
    spots.push(Spot { x: 4.0, y: top + 2.0, width: GUTTER - 12.0, height: 30.0, link: None, lines });
    html! {
        text.gpu x="8" y=(n(top + 14.0)) { (fit(&title, 22).unwrap_or_default()) }
        text.model x="8" y=(n(top + 27.0)) { (below) }
        @for part in &drawn { (part) }
        @if lanes.is_empty() { text.nobody x=(n(GUTTER + 6.0)) y=(n(top + 20.0)) { "nobody held it" } }
    }
}

/// Where its holds ended, each place once.
fn ends(index: &Index<'_>, axis: &Axis, segment: &Segment<'_>) -> Vec<f64> {
    let mut places: Vec<f64> = segment.holds.iter().map(|hold| axis.x(index.released(hold))).collect();
    places.sort_by(f64::total_cmp);
    places.dedup_by(|a, b| *a - *b < 4.0);
    // The bar's own end last and exactly.
    places.retain(|x| *x + 4.0 < segment.to);
    places.push(segment.to);
    places
}

/// Who it is, shortly, how it died, and where the details are.
fn segment_label(index: &Index<'_>, segment: &Segment<'_>) -> (String, Option<String>) {
    let process = index.process(&segment.holds[0].who);
    let link = process.map(|process| format!("#{}", anchor(index, process)));
    let name = segment_name(index, segment);
    if end_of(index, &segment.holds).is_death() {
        return (format!("{name} ✕ {}", index.how_all_ended(&segment.holds)), link);
    }
    (name, link)
}

fn segment_name(index: &Index<'_>, segment: &Segment<'_>) -> String {
    let first = segment.holds[0];
    if segment.holds.len() == 1 {
        return named(index.process(&first.who).and_then(rank), &first.comm, first.who.pid);
    }
    let who: BTreeSet<_> = segment.holds.iter().map(|hold| &hold.who).collect();
    if who.len() == 1 {
        return format!("{} {} × {}", name(&first.comm), first.who.pid, segment.holds.len());
    }
    let comms: BTreeSet<&str> = segment.holds.iter().map(|hold| hold.comm.as_str()).collect();
    let comms: Vec<_> = comms.into_iter().map(name).collect();
    format!("{} × {}", who.len(), comms.join(", "))
}

fn segment_lines(index: &Index<'_>, segment: &Segment<'_>) -> Vec<String> {
    let first = segment.holds[0];
    let process = index.process(&first.who);
    let begin = segment.holds.iter().map(|hold| hold.opened).min().unwrap_or(first.opened);
    let last = segment.holds.iter().map(|hold| index.released(hold)).max().unwrap_or(begin);
    let mut lines = vec![format!("{}: {}", segment_name(index, segment), index.how_all_ended(&segment.holds))];
    let until =
        if index.end(first) == End::Held { "on".to_owned() } else { format!("to {}", index.clock.second(last)) };
    let origin = super::super::told::origin(first).map_or_else(String::new, |origin| format!(", {origin}"));
    let time = format!("{} {until} ({})", index.clock.second(begin), span(last.duration_since(begin)));
    lines.push(format!("{time}, {}{origin}", role(first.role)));
    if segment.holds.len() > 1 {
        let pids: BTreeSet<u32> = segment.holds.iter().map(|hold| hold.who.pid).collect();
        lines.push(format!("pids {}", ranges(&pids.into_iter().collect::<Vec<_>>())));
    }
    if let Some(process) = process {
        lines.extend(identity(process, index));
    }
    lines
}

fn identity(process: &ProcessReport, index: &Index<'_>) -> Vec<String> {
    let ProcessReport { who, started, nspids, comm, argv, lineage, incident, .. } = process;
    let mut lines = vec![short_command(comm, argv)];
    let of = place(process).map_or_else(String::new, |place| format!(", {place}"));
    let inside = nspids.last().filter(|inside| **inside != who.pid);
    let inside = inside.map_or_else(String::new, |inside| format!(", pid {inside} inside"));
    lines.push(format!("user {}{of}, started {}{inside}", user_of(Some(process)), index.clock.second(*started)));
    if !lineage.is_empty() {
        lines.push(format!("from {}", ancestors(lineage)));
    }
    lines.extend(incident.map(|id| format!("part of incident #{id}")));
    lines
}

/// Gaps in the record, and the time in which a host was down.
fn host_marks(index: &Index<'_>, axis: &Axis, host: &str, top: f64, bottom: f64, spots: &mut Vec<Spot>) -> Markup {
    let mut marks: Vec<Markup> = Vec::new();
    let mut shade = |from: Timestamp, to: Timestamp, text: &str, lines: Vec<String>, spots: &mut Vec<Spot>| {
        if to < axis.from || from > axis.to {
            return;
        }
        let x = axis.x(from);
        let width = (axis.x(to) - x).max(3.0);
        marks.push(html! {
            rect.gap x=(n(x)) y=(n(top)) width=(n(width)) height=(n(bottom - top)) {}
            rect.over.gap x=(n(x)) y=(n(top)) width=(n(width)) height=(n(bottom - top)) fill="url(#shaded)" {}
            @if width > 60.0 { text.gap x=(n(x + width / 2.0)) y=(n(top + 18.0)) text-anchor="middle" { (text) } }
        });
        // A strip at the top, so that bars keep their own tips.
        spots.push(Spot { x, y: top - 4.0, width, height: 6.0, link: Some("#limits".to_owned()), lines });
    };
    let boots: Vec<_> = index.report.hosts.iter().filter(|boot| boot.host == host).collect();
    for (position, boot) in boots.iter().enumerate() {
        if boot.state == HostState::Down {
            let up = boots.get(position + 1).map_or(axis.to, |next| next.booted);
            let until = boots
                .get(position + 1)
                .map_or_else(String::new, |next| format!("; it booted again {}", index.clock.second(next.booted)));
            let line = format!("{} went down after {}{until}", escape(host), index.clock.second(boot.last));
            shade(boot.last, up, "host down", vec![line], spots);
        }
    }
    for gap in index.report.gaps.iter().filter(|gap| gap.host == host) {
        shade(gap.from, gap.to.unwrap_or(axis.to), "gap", vec![gap_line(index, gap)], spots);
    }
    for boot in boots.iter().filter(|boot| boot.state == HostState::Down && axis.has(boot.last)) {
        let x = axis.x(boot.last);
        marks.push(html! { line.edge x1=(n(x)) x2=(n(x)) y1=(n(top)) y2=(n(bottom)) {} });
    }
    html! { @for mark in &marks { (mark) } }
}

/// Over everything: what can be pointed at, and what is told then. A later spot that lies over an earlier tip is invisible.
fn told(spots: &[Spot], bottom: f64) -> Markup {
    const LINE: f64 = 15.0;
    html! {
        @for Spot { x, y, width, height, link, lines } in spots {
            @let lines: Vec<String> = lines.iter().map(|line| crate::out::text::cut(line, Some(96))).collect();
            @let widest = lines.iter().map(|line| line.width()).max().unwrap_or(0) as f64 * 6.4 + 18.0;
            @let tall = lines.len() as f64 * LINE + 10.0;
            @let left = (x + width / 2.0 - widest / 2.0).min(WIDTH - widest - 2.0).max(2.0);
            // Below the bar; above it where there is no room.
            @let below = y + height + 5.0;
            @let top = if below + tall > bottom && *y > tall + 5.0 { y - tall - 5.0 } else { below };
            // Small bars get a wider area to point at.
            @let wide = width.max(8.0);
            g.spot {
                @let area = html! { rect.area x=(n(x - (wide - width) / 2.0)) y=(n(*y)) width=(n(wide)) height=(n(*height)) {} };
                @if let Some(link) = link {
                    a href=(link) aria-label=(lines.join("; ")) { (area) }
                } @else {
                    g tabindex="0" role="img" aria-label=(lines.join("; ")) { (area) }
                }
                g.tip aria-hidden="true" {
                    rect x=(n(left)) y=(n(top)) width=(n(widest)) height=(n(tall)) rx="4" {}
                    text {
                        @for (number, line) in lines.iter().enumerate() {
                            tspan x=(n(left + 9.0)) y=(n(top + 17.0 + LINE * number as f64)) { (line) }
                        }
                    }
                }
            }
        }
    }
}
