//! Results to Markdown. Nothing is written here that does not come out of a run.

use std::fmt::Write as _;

use anyhow::{Context as _, Result};

use super::results::{Answer, Losses, Operation, Program, Reading, Refusal, Results, Run, Set};
use crate::vm::SETS;

pub(super) const BEGIN: &str = "<!-- from here on written by `cargo xtask matrix` -->\n";
pub(super) const END: &str = "<!-- to here by `cargo xtask matrix` -->\n";

/// The page with its middle made anew.
pub(super) fn put_into(page: &str, results: &Results) -> Result<String> {
    let (before, rest) = page.split_once(BEGIN).with_context(|| format!("no line {BEGIN:?}"))?;
    let (_, after) = rest.split_once(END).with_context(|| format!("no line {END:?}"))?;
    Ok(format!("{before}{BEGIN}{}{END}{after}", render(results)))
}

pub(super) fn render(results: &Results) -> String {
    let mut text = format!("\n## What runs where\n\nBy `{}`, in QEMU (TCG, 2 processors, 2 GiB).\n\n", results.command);
    for part in [
        verdicts(&results.runs),
        refusals(&results.runs),
        subjects(&results.runs),
        details(&results.runs),
        losses(&results.runs),
        sizes(&results.runs),
        boots(&results.runs),
    ] {
        text += &part;
    }
    text
}

/// A row of a table.
fn row<S: AsRef<str>>(text: &mut String, cells: impl IntoIterator<Item = S>) {
    for cell in cells {
        // What a kernel says may hold what would end a cell.
        let cell = cell.as_ref().replace('|', "\\|").replace('\n', " ");
        write!(text, "| {cell} ").expect("a String takes everything");
    }
    text.push_str("|\n");
}

fn head<S: AsRef<str>>(text: &mut String, cells: impl IntoIterator<Item = S>) {
    let cells: Vec<S> = cells.into_iter().collect();
    row(text, &cells);
    row(text, cells.iter().map(|_| "---"));
}

fn line(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    writeln!(text, "{arguments}").expect("a String takes everything");
}

/// A section, if there is anything in it.
fn section(title: &str, intro: &str, body: &str) -> String {
    if body.is_empty() { String::new() } else { format!("### {title}\n\n{intro}{body}\n") }
}

fn verdicts(runs: &[Run]) -> String {
    let mut text = String::new();
    let sets = SETS.iter().map(|set| format!("`{set}`"));
    head(&mut text, ["kernel", "release", "preemption"].map(str::to_owned).into_iter().chain(sets));
    for run in runs {
        let (release, preemption) = match &run.kernel {
            Some(kernel) => (kernel.release.as_str(), kernel.preemption()),
            None => ("did not say", "did not say"),
        };
        let sets = run.sets.iter().map(verdict);
        row(&mut text, [run.name.clone(), release.to_owned(), preemption.to_owned()].into_iter().chain(sets));
    }
    text + "\n\"Exact\": after every step of every operation gpureap said what was true, as far as the set can see it.\n\n"
}

fn verdict(set: &Set) -> String {
    match &set.answer {
        Answer::NotRun(_) => "not run".to_owned(),
        Answer::Refused(Refusal { code, .. }) => format!("refused, exit {code}"),
        Answer::Attached(programs) => {
            let hooks = programs.iter().filter(|program| program.attached).count();
            let Tally { performed, steps, differences, skipped } = tally(&set.operations);
            let mut text = format!("{hooks} hooks; {performed} operations, {steps} steps: ");
            match (differences, &set.losses) {
                (_, None) => text += "not to the end",
                (0, Some(_)) => text += "exact",
                (n, Some(_)) => write!(text, "**differences: {n}**").expect("a String takes everything"),
            }
            if skipped > 0 {
                write!(text, ", {skipped} not possible").expect("a String takes everything");
            }
            if let Some(Losses { lost_events: lost @ 1.., .. }) = &set.losses {
                write!(text, "; lost events: {lost}").expect("a String takes everything");
            }
            if set.failed_tests > 0 {
                write!(text, "; **failed tests: {}**", set.failed_tests).expect("a String takes everything");
            }
            text
        }
    }
}

#[derive(Default)]
struct Tally {
    performed: usize,
    steps: u32,
    differences: usize,
    skipped: usize,
}

fn tally<'a, I: IntoIterator<Item = &'a Operation>>(operations: I) -> Tally {
    let mut tally = Tally::default();
    for Operation { subject: _, name: _, steps, differences, skipped } in operations {
        tally.performed += usize::from(skipped.is_none());
        tally.skipped += usize::from(skipped.is_some());
        tally.steps += steps;
        tally.differences += differences.len();
    }
    tally
}

/// With the reasons.
fn refusals(runs: &[Run]) -> String {
    let mut body = String::new();
    for run in runs {
        for set in &run.sets {
            match &set.answer {
                Answer::Attached(_) => {}
                Answer::Refused(Refusal { code: _, reason, holders_by }) => line(
                    &mut body,
                    format_args!(
                        "- {}, `{}`: \"{reason}\"; `holders` answered from `{holders_by}`",
                        run.name, set.name
                    ),
                ),
                Answer::NotRun(why) => {
                    line(&mut body, format_args!("- {}, `{}` did not run: {why}", run.name, set.name));
                }
            }
        }
    }
    section(
        "Refused",
        "In gpureap's words; nothing stayed loaded, attached or pinned. `--backend` asked for the one set: without it the next one is tried.\n\n",
        &body,
    )
}

/// What the groups of operations are called on the page, in their order.
const SUBJECTS: [(&str, &str); 10] = [
    ("open", "open, also of paths, nodes without a driver, other nodes"),
    ("dup", "dup, dup2, dup3, fcntl"),
    ("fork", "fork, vfork, spawn, exit, kill, OOM kill"),
    ("close", "close_range"),
    ("exec", "exec"),
    ("pass", "sockets, pidfd_getfd, seccomp"),
    ("map", "mmap"),
    ("ring", "io_uring"),
    ("table", "threads and shared tables"),
    ("other", "terminals, locks, renames, stress"),
];

fn subjects(runs: &[Run]) -> String {
    let mut text = String::new();
    for name in SETS {
        let ran: Vec<(&Run, &Set)> =
            runs.iter().filter_map(|run| Some((run, run.sets.iter().find(|set| set.name == name)?))).collect();
        if ran.iter().all(|(_, set)| set.operations.is_empty()) {
            continue;
        }
        let mut body = String::new();
        head(&mut body, std::iter::once("operations".to_owned()).chain(ran.iter().map(|(run, _)| run.name.clone())));
        for (subject, title) in SUBJECTS {
            let cells = ran.iter().map(|(_, set)| cell(set, subject));
            row(&mut body, std::iter::once(title.to_owned()).chain(cells));
        }
        text += &section(
            &format!("Operations with `{name}`"),
            "Operations and steps that were exact; \"of\": that were performed.\n\n",
            &body,
        );
    }
    text
}

fn cell(set: &Set, subject: &str) -> String {
    if !matches!(set.answer, Answer::Attached(_)) {
        return untold(&set.answer).to_owned();
    }
    let of_it = || set.operations.iter().filter(|operation| operation.subject == subject);
    let exact = of_it().filter(|operation| operation.skipped.is_none() && operation.differences.is_empty()).count();
    let Tally { performed, steps, differences, skipped: _ } = tally(of_it());
    match (performed, differences) {
        (0, _) => "not run".to_owned(),
        (_, 0) => format!("{exact}, {steps}"),
        _ => format!("**{exact} of {performed}**, {steps} steps, {differences} differences"),
    }
}

/// Every difference, and what could not be performed.
fn details(runs: &[Run]) -> String {
    let (mut wrong, mut skipped) = (String::new(), String::new());
    for run in runs {
        for set in &run.sets {
            for operation in &set.operations {
                let about = format!("- {}, `{}`, {}", run.name, set.name, operation.name);
                for difference in &operation.differences {
                    line(&mut wrong, format_args!("{about}, {difference}"));
                }
                if let Some(reason) = &operation.skipped {
                    line(&mut skipped, format_args!("{about}: {reason}"));
                }
            }
        }
    }
    section("Differences", "", &wrong) + &section("Not possible there", "", &skipped)
}

fn losses(runs: &[Run]) -> String {
    let intro = "Lost events during the operations, and the programs that the kernel skipped (`recursion_misses`). After a loss gpureap \
                 counts anew: the counts were exact all the same unless a difference is listed above.\n\n";
    let churn = "Lost events during twice a second of churn by three processes: while nobody read a map / while two threads did nothing \
                 else. The counts were exact after each second, or the test would have failed.\n\n";
    section("Losses", intro, &by_set(runs, |set| set.losses.is_some(), loss))
        + &section("Losses while others read", churn, &by_set(runs, |set| set.reading.is_some(), reading))
}

/// A table of kernels and sets, if there is anything to tell.
fn by_set(runs: &[Run], told: impl Fn(&Set) -> bool, cell: impl Fn(&Set) -> String) -> String {
    let mut body = String::new();
    if runs.iter().any(|run| run.sets.iter().any(&told)) {
        head(&mut body, std::iter::once("kernel".to_owned()).chain(SETS.iter().map(|set| format!("`{set}`"))));
        for run in runs {
            row(&mut body, std::iter::once(run.name.clone()).chain(run.sets.iter().map(&cell)));
        }
    }
    body
}

fn loss(set: &Set) -> String {
    let Some(Losses { lost_events, skipped }) = &set.losses else { return untold(&set.answer).to_owned() };
    let programs = skipped.iter().map(|(name, count)| format!("`{name}` {count}"));
    std::iter::once(lost_events.to_string()).chain(programs).collect::<Vec<_>>().join(", ")
}

fn reading(set: &Set) -> String {
    set.reading
        .as_ref()
        .map_or_else(|| untold(&set.answer).to_owned(), |Reading { alone, read }| format!("{alone} / {read}"))
}

/// In the place of a figure that there is not.
const fn untold(answer: &Answer) -> &'static str {
    match answer {
        Answer::NotRun(_) => "not run",
        Answer::Refused(_) => "refused",
        Answer::Attached(_) => "not to the end",
    }
}

fn sizes(runs: &[Run]) -> String {
    let ran: Vec<&Run> = runs.iter().filter(|run| programs(run).next().is_some()).collect();
    let mut known: Vec<&Program> = Vec::new();
    for program in ran.iter().flat_map(|run| programs(run)) {
        if !known.iter().any(|other| other.name == program.name) {
            known.push(program);
        }
    }
    known.sort_by(|a, b| (!a.attached, &a.name).cmp(&(!b.attached, &b.name)));
    let mut body = String::new();
    if !known.is_empty() {
        head(
            &mut body,
            ["program".to_owned(), "at".to_owned()].into_iter().chain(ran.iter().map(|run| run.name.clone())),
        );
    }
    for program in known {
        let cells = ran.iter().map(|run| {
            let here = programs(run).find(|other| other.name == program.name);
            here.map_or_else(
                || "–".to_owned(),
                |Program { verified, translated, .. }| {
                    let number = |count: &Option<u32>| count.map_or_else(|| "?".to_owned(), |count| count.to_string());
                    format!("{} / {}", number(verified), number(translated))
                },
            )
        });
        row(&mut body, [format!("`{}`", program.name), program.hook.clone()].into_iter().chain(cells));
    }
    let intro = "Instructions that the verifier looked at, over all paths (its limit is 1,000,000) / instructions of the program. \
                 –: another form of it is used there.\n\n";
    section("Programs", intro, &body)
}

/// The programs of all sets of a boot.
fn programs(run: &Run) -> impl Iterator<Item = &Program> {
    run.sets.iter().flat_map(|set| match &set.answer {
        Answer::Attached(programs) => programs.as_slice(),
        Answer::Refused(_) | Answer::NotRun(_) => &[],
    })
}

fn boots(runs: &[Run]) -> String {
    let mut body = String::new();
    if !runs.is_empty() {
        head(&mut body, ["kernel", "package", "command line", "ended", "gpureap's commit", "seconds"]);
    }
    for run in runs {
        let append = if run.append.is_empty() { "–".to_owned() } else { format!("`{}`", run.append.join(" ")) };
        let seconds: f64 = run.sets.iter().map(|set| set.seconds).sum();
        row(
            &mut body,
            [&run.name, &run.package, &append, &run.time, &run.commit, &format!("{seconds:.0}")].map(String::as_str),
        );
    }
    section("Boots", "", &body)
}
