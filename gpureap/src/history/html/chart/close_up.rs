//! An incident, second by second.

use super::{
    AXIS, Axis, BETWEEN, BTreeSet, End, Incident, Index, Markup, Part, SignedDuration, Spot, TALL, Timestamp, WIDTH,
    alike, anchor, bar, escape, fit, gpus_of, grid, html, identity, label, mark, n, name, named, process_end, ranges,
    told,
};

/// The deaths of an incident, on an axis that is as long as they took.
pub(in super::super) fn close_up(index: &Index<'_>, incident: &Incident) -> Markup {
    let Incident { id, began, ended, processes, freed, xids, .. } = incident;
    let last =
        processes.iter().filter_map(|member| index.process(&member.who)).filter_map(|process| process.closed).max();
    let to = [Some(*ended), *freed, last].into_iter().flatten().max().unwrap_or(*ended);
    let axis = Axis::around(*began, to, SignedDuration::from_millis(50));
    let lists = alike(processes);
    let mut spots = Vec::new();
    let mut drawn = Vec::new();
    let mut y = AXIS + 3.0;
    for list in &lists {
        let first = list[0];
        let process = index.process(&first.who);
        let end = process.map_or(End::Unknown, End::of_process);
        let living = matches!(first.part, Part::Survived);
        let end = if living { End::Held } else { end };
        let deaths: Vec<Timestamp> = list.iter().filter_map(|member| member.time).collect();
        let last = deaths.iter().max().copied().unwrap_or(axis.to);
        let (from, to) = (axis.x(axis.from), axis.x(last));
        let closed = list.iter().filter_map(|member| index.process(&member.who)?.closed).max();
        let mut places: Vec<f64> = deaths.iter().map(|time| axis.x(*time)).collect();
        places.sort_by(f64::total_cmp);
        places.dedup_by(|a, b| *a - *b < 3.0);
        let what = match list.len() {
            1 => named(first.rank, &first.comm, first.who.pid),
            count => format!("{count} × {}", name(&first.comm)),
        };
        let how = process.filter(|_| !living).map_or_else(|| "lives".to_owned(), process_end);
        let pids: BTreeSet<u32> = list.iter().map(|member| member.who.pid).collect();
        let mut lines = vec![format!("{what}: {}", escape(&first.why))];
        lines.extend(first.time.map(|time| {
            let more = if list.len() > 1 { format!(", the last {}", index.clock.exact(last)) } else { String::new() };
            format!("ended {}{more}", index.clock.exact(time))
        }));
        lines.extend(closed.map(|closed| format!("the driver had let go {}", index.clock.exact(closed))));
        if list.len() > 1 {
            lines.push(format!("pids {}", ranges(&pids.into_iter().collect::<Vec<_>>())));
        } else if let Some(process) = process {
            lines.extend(identity(process, index));
        }
        drawn.push(html! {
            text.gpu x="8" y=(n(y + 12.0)) { (fit(&what, 22).unwrap_or_default()) }
            (bar(from, y, to - from, TALL, end))
            @if let Some(closed) = closed {
                @if axis.x(closed) > to + 1.0 { rect.closing x=(n(to)) y=(n(y + 5.0)) width=(n(axis.x(closed) - to)) height=(n(TALL - 10.0)) {} }
            }
            @for x in &places { (mark(*x, y, TALL, end)) }
            @if living { (mark(axis.x(axis.to), y, TALL, end)) }
            (label(&how, from, to, WIDTH, y + TALL / 2.0 + 3.8, false))
        });
        let link = process.map(|process| format!("#{}", anchor(index, process)));
        spots.push(Spot { x: from, y, width: to - from, height: TALL, link, lines });
        y += TALL + BETWEEN + 2.0;
    }
    let bottom = y;
    let marked =
        xids.iter().filter_map(|position| index.report.xids.get(*position as usize)).filter(|xid| axis.has(xid.time));
    let described = format!("Incident {id}: who of {} ended when", gpus_of(index, incident));
    html! {
        p.hint { "Solid until the process had ended, dotted until the driver had let go of all it held." }
        div.chart {
            svg.lanes viewBox=(format!("0 0 {} {}", n(WIDTH), n(bottom + 4.0))) role="group" aria-label=(described) {
                rect.stripe x="0" y=(n(AXIS)) width=(n(WIDTH)) height=(n(bottom - AXIS)) {}
                (grid(&axis, AXIS, bottom))
                @for report in marked {
                    @let x = axis.x(report.time);
                    line.xid x1=(n(x)) x2=(n(x)) y1=(n(AXIS)) y2=(n(bottom)) {}
                    path.xid d=(format!("M{} 3l5 9h-10z", n(x))) {}
                    text.xid x=(n(x + 7.0)) y="12" { "Xid " (report.xid.xid) }
                }
                @if let Some(freed) = freed {
                    @let x = axis.x(*freed);
                    line.freed x1=(n(x)) x2=(n(x)) y1=(n(AXIS - 4.0)) y2=(n(bottom)) {}
                    text.freed x=(n(x + 4.0)) y="12" { "GPUs free" }
                }
                @for part in &drawn { (part) }
                (told(&spots, bottom))
            }
        }
    }
}
