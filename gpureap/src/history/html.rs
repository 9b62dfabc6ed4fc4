//! A report as one page that needs nothing else: no script, no font, no network, so that it can be mailed and kept.
//!
//! What comes from processes is escaped twice: for the eye by `out::sanitize`, for the markup by the template. Each such text
//! stands in an element that isolates its reading direction.

mod chart;
mod parts;

use std::fmt::Write as _;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::{
    report::Report,
    told::{Index, date, host_lines, window},
};

const CSS: &str = include_str!("html/page.css");
/// Of `CSS`, so that no other style applies even if somebody smuggled one in; a test says what it must be.
const CSS_HASH: &str = "sha256-ua6djwcUmnPXcPB2La2sH1oeDEvcHgE+P9wgSjVEXQw=";

pub fn render(report: &Report) -> String {
    page(&Index::new(report)).into_string()
}

fn page(index: &Index<'_>) -> Markup {
    let report = index.report;
    let hosts = index.host_names().join(", ");
    let title = format!("GPU report: {hosts}, {}", window(report));
    html! {
        (DOCTYPE)
        html lang="en" dir="ltr" {
            head {
                meta charset="utf-8";
                // Nothing is loaded, nothing is run, nothing is sent.
                meta http-equiv="Content-Security-Policy" content=(policy());
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                meta name="referrer" content="no-referrer";
                meta name="generator" content=(concat!("gpureap ", env!("CARGO_PKG_VERSION")));
                title { (title) }
                style { (PreEscaped(CSS)) }
            }
            body {
                @if !report.processes.is_empty() { a.skip href="#processes" { "Skip to the processes" } }
                header {
                    p.eyebrow { "gpureap report" }
                    h1 { bdi { (hosts) } }
                    p.window { (window(report)) }
                    p.summary { (index.summary()) }
                    @for line in host_lines(index) { p.warning { bdi { (line) } } }
                    p.made { "All times are UTC. Made " time datetime=(report.time) { (date(report.time)) } "." }
                }
                main {
                    (parts::incidents(index))
                    (chart::timeline(index))
                    (parts::processes(index))
                    (parts::lineage(index))
                    (parts::xids(index))
                    (parts::gaps(index))
                }
                footer { p { "Made by gpureap " (env!("CARGO_PKG_VERSION")) " from its journal. This page loads nothing and runs no script." } }
            }
        }
    }
}

fn policy() -> String {
    let mut policy = String::from("default-src 'none'; base-uri 'none'; form-action 'none'");
    write!(policy, "; style-src '{CSS_HASH}'").expect("a string takes everything");
    policy
}

#[cfg(test)]
mod tests;
