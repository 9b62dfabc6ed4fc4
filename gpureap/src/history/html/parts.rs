//! All of the page but the charts.

use std::collections::BTreeSet;

use maud::{Markup, html};

use super::{
    super::{
        family::{Branch, forest},
        report::{HeldNode, HoldReport, Incident, IncidentCause, Member, Part, ProcessReport, SenderReport, XidReport},
        text::{alike, class_words, freed, gap_line},
        told::{
            End, Index, NOTHING, ancestors, gpu_title, name, named, place, process_end, rank, role, threads, user_of,
        },
    },
    chart,
};
use crate::out::{
    sanitize::escape,
    text::cut,
    words::{command, ranges, short_command, shorten, span, user, word},
};

/// Where a process's details are; its position in the report.
pub(super) fn anchor(index: &Index<'_>, process: &ProcessReport) -> String {
    let position = index.report.processes.iter().position(|other| std::ptr::eq(other, process));
    format!("p{}", position.unwrap_or_default())
}

/// Of an incident: the shape of its marks and the colour of its card.
const fn tone(cause: IncidentCause) -> &'static str {
    match cause {
        IncidentCause::Exited => End::Failed.class(),
        IncidentCause::KilledBy => End::Killed.class(),
        IncidentCause::OomKill => End::Oom.class(),
        IncidentCause::Fault | IncidentCause::CollectiveTimeout => End::Fault.class(),
        IncidentCause::Reaped => End::Reaped.class(),
        IncidentCause::HostDown => End::HostDown.class(),
        IncidentCause::Xid => "xid",
        IncidentCause::Unknown => End::Unknown.class(),
    }
}

pub(super) fn incidents(index: &Index<'_>) -> Markup {
    let report = index.report;
    let nothing = report.incidents.is_empty() && report.holds.is_empty() && report.xids.is_empty();
    html! {
        @if report.at.is_none() {
            section aria-labelledby="incidents" {
                h2 id="incidents" { "Incidents" }
                @if nothing {
                    p.empty { (NOTHING) }
                } @else if report.incidents.is_empty() {
                    p.empty { "None: nothing that held a GPU died, and no Xid was reported." }
                }
                @for (position, incident) in report.incidents.iter().rev().enumerate() {
                    (card(index, incident, position == 0))
                }
            }
        }
    }
}

fn card(index: &Index<'_>, incident: &Incident, newest: bool) -> Markup {
    let Incident { id, began, ended: _, title, cause, group, processes: _, devices, freed: _, xids, evidence: _ } =
        incident;
    let numbers: BTreeSet<u32> =
        xids.iter().filter_map(|at| index.report.xids.get(*at as usize)).map(|xid| xid.xid.xid).collect();
    html! {
        article.incident.(tone(*cause)).full[newest] id=(format!("i{id}")) {
            h3 {
                span.number { "#" (id) } " " time.when datetime=(began) { (index.clock.second(*began)) } " "
                bdi.long { (sentence(title)) }
            }
            p.facts {
                span.tag.(tone(*cause)) { (word(cause).replace('-', " ")) }
                span { (word(&group.by).replace('-', " ")) " " bdi.long { (name(&group.name)) } }
                @if !devices.is_empty() { span { (freed(index, incident)) } }
                @for number in &numbers { span { "▲ Xid " (number) } }
            }
            // Only the newest is told in full at once: the timeline should be in sight.
            @if newest { (told(index, incident, newest)) } @else {
                details.older { summary { "Who died, and why" } (told(index, incident, newest)) }
            }
        }
    }
}

fn told(index: &Index<'_>, incident: &Incident, newest: bool) -> Markup {
    let Incident { processes, evidence, .. } = incident;
    html! {
        div.columns {
            @if !processes.is_empty() { (members(index, processes)) }
            @if !evidence.is_empty() {
                div.because {
                    h4 { "Because" }
                    ul { @for line in evidence { li { bdi.long { (sentence(line)) } } } }
                }
            }
        }
        @if processes.len() > 1 {
            details open[newest && processes.len() <= 6] {
                summary { "Who ended when: close-up of the deaths" }
                (chart::close_up(index, incident))
            }
        }
    }
}

fn members(index: &Index<'_>, processes: &[Member]) -> Markup {
    let mut senders = BTreeSet::new();
    html! {
        table.members {
            caption.hidden { "Who died, in order" }
            thead { tr { th scope="col" { "Part" } th scope="col" { "Time" } th scope="col" { "Process" } th scope="col" { "Why" } } }
            tbody {
                @for list in alike(processes) {
                    @let Member { who, comm, rank, part, time, cause: _, why } = list[0];
                    @let process = index.process(who);
                    tr.(word(part)) {
                        td.part { (word(part)) }
                        td.time { @if let Some(time) = time { time datetime=(time) { (index.clock.exact(*time)) } } }
                        td {
                            @if list.len() == 1 {
                                @if let Some(process) = process {
                                    a href=(format!("#{}", anchor(index, process))) { bdi.long { (named(*rank, comm, who.pid)) } }
                                } @else {
                                    bdi.long { (named(*rank, comm, who.pid)) }
                                }
                            } @else {
                                (list.len()) " × " bdi.long { (name(comm)) }
                                div.dim { "pids " (pids(list.iter().map(|member| member.who.pid))) }
                            }
                            @if index.several_hosts { div.dim { "on " bdi { (escape(&who.host)) } } }
                        }
                        td {
                            bdi.long { (sentence(why)) }
                            @if let Some(process) = process {
                                @if *part == Part::First { div.code { bdi { (short_command(&process.comm, &process.argv)) } } }
                                (death_facts(process, *part == Part::First, &mut senders))
                            }
                        }
                    }
                }
            }
        }
    }
}

fn pids(pids: impl Iterator<Item = u32>) -> String {
    let mut pids: Vec<u32> = pids.collect();
    pids.sort_unstable();
    pids.dedup();
    ranges(&pids)
}

/// Thread, cgroup and sender; whoever killed many is told of once.
fn death_facts<'a>(process: &'a ProcessReport, first: bool, senders: &mut BTreeSet<(&'a str, u32, u64)>) -> Markup {
    let Some(death) = &process.death else { return html! {} };
    let sender = death.sender.as_ref();
    let sender = sender.filter(|sender| senders.insert((&process.who.host, sender.pid, sender.start_ns)));
    let thread = death.thread.as_ref().filter(|_| first);
    let cgroup = death.oom.as_ref().and_then(|oom| oom.cgroup.as_ref());
    html! {
        @if let Some(thread) = thread {
            div.dim { "thread " bdi.long { (name(&thread.name)) } " " (thread.tid) @if death.core { ", core dumped" } }
        }
        @if let Some(cgroup) = cgroup { div.dim { "memory limit of " bdi.long { (sentence(cgroup)) } } }
        @if let Some(sender) = sender { (sender_facts(sender)) }
    }
}

fn sender_facts(sender: &SenderReport) -> Markup {
    let SenderReport { pid, start_ns: _, tid: _, thread: _, comm, argv, uid, user: by, lineage } = sender;
    html! {
        div.dim {
            "sender " bdi.long { (name(comm)) " " (pid) } " of " bdi.long { (user(by.as_deref(), Some(*uid))) } ": "
            bdi.code { (short_command(comm, argv)) }
        }
        @if !lineage.is_empty() { div.dim { "started by " bdi.long { (ancestors(lineage)) } } }
    }
}

pub(super) fn processes(index: &Index<'_>) -> Markup {
    let report = index.report;
    html! {
        @if !report.processes.is_empty() {
            section aria-labelledby="processes" {
                h2 id="processes" { "Processes" }
                p.hint { "By start. The command line of each opens what is known of it." }
                div.scroll {
                    table.processes {
                        caption.hidden { "Processes that held something" }
                        colgroup {
                            col.wide; @if index.several_hosts { col.small; } col.small; col.middle; col.small; col.small; col.wide; col.middle;
                        }
                        thead {
                            tr {
                                th scope="col" { "Process" } @if index.several_hosts { th scope="col" { "Host" } }
                                th scope="col" { "User" } th scope="col" { "Job, pod, container" } th scope="col" { "Started" }
                                th scope="col" { "Ended" } th scope="col" { "How" } th scope="col" { "GPUs" }
                            }
                        }
                        @for process in &report.processes { (process_rows(index, process)) }
                    }
                }
            }
        }
    }
}

fn process_rows(index: &Index<'_>, process: &ProcessReport) -> Markup {
    let ProcessReport { who, started, comm, argv, exited, death, exit, incident, .. } = process;
    let holds: Vec<&HoldReport> = index.report.holds.iter().filter(|hold| hold.who == *who).collect();
    let of_role = |attached: bool| {
        let nodes = holds
            .iter()
            .filter(|hold| hold.role.is_some_and(|role| (role == crate::holders::report::Role::Attached) == attached));
        let nodes: BTreeSet<&str> = nodes.map(|hold| hold.node.as_str()).collect();
        let devices: Vec<_> =
            index.gpus().filter(|device| device.host == who.host && nodes.contains(device.node.as_str())).collect();
        let known: Vec<u32> = devices.iter().filter_map(|device| device.gpu).collect();
        let other = devices.iter().filter(|device| device.gpu.is_none()).map(|device| gpu_title(device));
        other.chain((!known.is_empty()).then(|| ranges(&known))).collect::<Vec<_>>().join(", ")
    };
    let (attached, handles) = (of_role(true), of_role(false));
    let dead = death.is_some() || exit.is_some();
    let end = if dead { End::of_process(process) } else { End::Held };
    html! {
        tbody {
            tr {
                th scope="row" { bdi.long { (named(rank(process), comm, who.pid)) } }
                @if index.several_hosts { td { bdi.long { (escape(&who.host)) } } }
                td { bdi.long { (name(&user_of(Some(process)))) } }
                td { bdi.long { (place(process).map(|place| shorten(&place)).unwrap_or_default()) } }
                td.time { time datetime=(started) { (index.clock.second(*started)) } }
                td.time { @if let Some(time) = exited { time datetime=(time) { (index.clock.exact(*time)) } } }
                td {
                    span.key.(end.class()) aria-hidden="true" { (end.sign()) } " "
                    @if dead { bdi.long { (process_end(process)) } } @else { "lives" }
                    @if let Some(id) = incident { " " a href=(format!("#i{id}")) { "#" (id) } }
                }
                td {
                    @if !attached.is_empty() { (attached) }
                    @if !handles.is_empty() { span.dim { @if !attached.is_empty() { "; " } "handles " (handles) } }
                }
            }
            tr.more {
                td colspan=(if index.several_hosts { "8" } else { "7" }) {
                    details {
                        summary { bdi.code { (shorten(&command(comm, argv))) } }
                        (details(index, process, &holds))
                    }
                }
            }
        }
    }
}

fn details(index: &Index<'_>, process: &ProcessReport, holds: &[&HoldReport]) -> Markup {
    let ProcessReport {
        who,
        started: _,
        nspids,
        comm,
        argv,
        argv_cut,
        exe,
        uid: _,
        user: _,
        class,
        cgroup,
        unit,
        container,
        container_name,
        image,
        slurm_job,
        slurm_step,
        pod,
        pod_name,
        pod_namespace,
        env,
        threads: _,
        lineage,
        exited: _,
        closed,
        exit: _,
        death,
        incident: _,
    } = process;
    let texts = [
        ("program", exe),
        ("class", class),
        ("cgroup", cgroup),
        ("unit", unit),
        ("container", container_name),
        ("container id", container),
        ("image", image),
        ("Slurm job", slurm_job),
        ("Slurm step", slurm_step),
        ("pod", pod_name),
        ("namespace", pod_namespace),
        ("pod id", pod),
    ];
    let row = |term: &str, value: Markup| html! { div { dt { (term) } dd { (value) } } };
    let threads = threads(process);
    let pid_levels: Vec<String> = nspids.iter().map(u32::to_string).collect();
    html! {
        // A link to it opens the details that it is in.
        dl id=(anchor(index, process)) {
            (row("command", html! { bdi.code { (command(comm, argv)) } @if *argv_cut { " … (cut)" } }))
            @for (term, value) in texts {
                @if let Some(value) = value { (row(term, html! { bdi.long { (escape(value)) } })) }
            }
            @if pid_levels.len() > 1 { (row("pids, outside to inside", html! { (pid_levels.join(", ")) })) }
            (row("identity", html! { "pid " (who.pid) ", start " (who.start_ns) " ns after boot " bdi { (escape(&who.boot_id)) } }))
            @if !env.is_empty() {
                (row("environment", html! { @for (variable, value) in env { bdi.code { (escape(variable)) "=" (escape(value)) } " " } }))
            }
            @if !threads.is_empty() { (row("threads", html! { bdi.long { (threads) } })) }
            @if !lineage.is_empty() { (row("started by", html! { bdi.long { (ancestors(lineage)) } })) }
            @if let Some(closed) = closed { (row("driver let go", html! { (index.clock.exact(*closed)) })) }
            @if let Some(death) = death {
                (row("death", html! {
                    bdi.long { (process_end(process)) }
                    (death_facts(process, true, &mut BTreeSet::new()))
                    @if !death.evidence.is_empty() { ul { @for line in &death.evidence { li { bdi.long { (sentence(line)) } } } } }
                }))
            }
            (row("held", html! { ul { @for hold in holds { li { (hold_line(index, hold)) } } } }))
        }
    }
}

fn hold_line(index: &Index<'_>, hold: &HoldReport) -> Markup {
    let HoldReport {
        who: _,
        comm: _,
        node,
        opened,
        released: _,
        ended: _,
        origin: _,
        fds,
        maps,
        role: hold_role,
        inherited_from: _,
    } = hold;
    let released = index.released(hold);
    html! {
        bdi.long { (escape(node)) } " " (index.clock.second(*opened)) " to "
        @if index.end(hold) == End::Held { "the end" } @else { (index.clock.second(released)) }
        " (" (span(released.duration_since(*opened))) ")"
        @if hold_role.is_some() { ", " (role(*hold_role)) }
        ", " (fds) " fds, " (maps) " maps"
        @if let Some(origin) = super::super::told::origin(hold) { ", " (origin) }
        ", " bdi.long { (index.how_ended(hold)) }
    }
}

pub(super) fn lineage(index: &Index<'_>) -> Markup {
    let forest = forest(&index.report.processes);
    html! {
        @if !forest.is_empty() {
            section aria-labelledby="lineage" {
                h2 id="lineage" { "Lineage" }
                p.hint { "As of fork: who started whom. ✕ has ended. Names in grey held nothing themselves." }
                ul.tree { @for branch in &forest { (tree(index, branch, true)) } }
            }
        }
    }
}

fn tree(index: &Index<'_>, branch: &Branch<'_>, top: bool) -> Markup {
    let Branch { host, pids: list, process, comm, argv, ended, children } = branch;
    html! {
        li {
            span.node.above[process.is_none()] {
                @match (list.as_slice(), process) {
                    ([pid], Some(process)) => {
                        a href=(format!("#{}", anchor(index, process))) { bdi.long { (named(rank(process), comm, *pid)) } }
                    }
                    ([pid], None) => { bdi.long { (named(None, comm, *pid)) } }
                    _ => { (list.len()) " × " bdi.long { (name(comm)) } " " (pids(list.iter().copied())) }
                }
                @if top { bdi { (index.on_host(host)) } }
                @if let Some(ended) = ended { " " span.ended { "✕ " bdi.long { (ended) } } }
                @if !argv.is_empty() { " " bdi.code.dim { (short_command(comm, argv)) } }
                @if let Some(process) = process {
                    @let threads = threads(process);
                    @if !threads.is_empty() { div.dim { "threads: " bdi.long { (threads) } } }
                }
            }
            @if !children.is_empty() { ul { @for child in children { (tree(index, child, false)) } } }
        }
    }
}

pub(super) fn xids(index: &Index<'_>) -> Markup {
    html! {
        @if !index.report.xids.is_empty() {
            section aria-labelledby="xids" {
                h2 id="xids" { "Xids" }
                div.scroll {
                    table {
                        caption.hidden { "Errors that the driver reported" }
                        thead {
                            tr {
                                th scope="col" { "Time" } th scope="col" { "GPU" } th scope="col" { "Xid" }
                                th scope="col" { "Meaning" } th scope="col" { "By" } th scope="col" { "Names" } th scope="col" { "Held by" }
                            }
                        }
                        @for report in &index.report.xids { (xid_rows(index, report)) }
                    }
                }
            }
        }
    }
}

fn xid_rows(index: &Index<'_>, report: &XidReport) -> Markup {
    let XidReport { host, time, xid, class, meaning, holders } = report;
    let gpu = xid.node.as_ref().map(|node| index.gpu_names([(host.as_str(), node.as_str())]));
    html! {
        tbody {
            tr {
                td.time { time datetime=(time) { (index.clock.exact(*time)) } }
                td { bdi.long { (gpu.unwrap_or_else(|| escape(&xid.bdf).into_owned())) } }
                th scope="row" { "▲ " (xid.xid) }
                td { bdi.long { (escape(meaning)) } }
                td { (class_words(*class)) }
                td {
                    @match xid.pid {
                        Some(pid) => { "pid " (pid) " " bdi.long { (escape(xid.name.as_deref().unwrap_or_default())) } }
                        None => { "no process" }
                    }
                }
                td {
                    @if holders.is_empty() { "nobody" }
                    @for who in holders {
                        @if let Some(process) = index.process(who) {
                            a href=(format!("#{}", anchor(index, process))) { bdi.long { (named(rank(process), &process.comm, who.pid)) } } " "
                        } @else { (who.pid) " " }
                    }
                }
            }
            tr.more { td colspan="7" { bdi.code { (escape(&xid.message)) } } }
        }
    }
}

pub(super) fn gaps(index: &Index<'_>) -> Markup {
    let report = index.report;
    html! {
        @if !report.gaps.is_empty() || !report.notes.is_empty() {
            section aria-labelledby="limits" {
                h2 id="limits" { "What is not known" }
                ul {
                    @for gap in &report.gaps { li { bdi.long { (gap_line(index, gap)) } } }
                    @for note in &report.notes { li { bdi.long { (escape(note)) } } }
                }
            }
        }
    }
}

/// Sentences of our own with names of others in them: as long as a sentence may be.
fn sentence(text: &str) -> String {
    const LONGEST: usize = 400;
    cut(&escape(text), Some(LONGEST))
}

/// GPUs of an incident by name, for the label of its chart.
pub(super) fn gpus_of(index: &Index<'_>, incident: &Incident) -> String {
    index.gpu_names(incident.devices.iter().map(|HeldNode { host, node }| (host.as_str(), node.as_str())))
}
