use std::collections::BTreeSet;

use proptest::prelude::*;
use sha2::{Digest as _, Sha256};

use super::*;
use crate::{
    history::{report::Part, samples},
    out::sanitize::escape,
};

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let bits = chunk.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for position in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * position) & 63) as usize];
            text.push(if position > chunk.len() { '=' } else { letter.into() });
        }
    }
    text
}

#[test]
fn the_policy_allows_this_style_and_nothing_else() {
    assert_eq!(
        CSS_HASH,
        format!("sha256-{}", base64(&Sha256::digest(CSS))),
        "the style has changed: write its new hash"
    );
    assert!(!CSS.contains('<'));
    assert!(!CSS.contains("url(") && !CSS.contains("@import"));
    let page = render(&samples::empty());
    let policy = format!("default-src 'none'; base-uri 'none'; form-action 'none'; style-src '{CSS_HASH}'");
    assert!(page.contains(&format!("<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">")), "{page}");
}

/// What the templates make. Anything else must have come out of a name.
const TAGS: &[&str] = &[
    "a", "article", "bdi", "body", "caption", "col", "colgroup", "dd", "defs", "details", "div", "dl", "dt", "footer",
    "g", "h1", "h2", "h3", "h4", "head", "header", "html", "li", "line", "main", "meta", "p", "path", "pattern",
    "rect", "section", "span", "style", "summary", "svg", "table", "tbody", "td", "text", "th", "thead", "time",
    "title", "tr", "tspan", "ul",
];

/// Every tag with its attributes, quotes obeyed.
fn tags(page: &str) -> Vec<&str> {
    let mut tags = Vec::new();
    let mut rest = page;
    while let Some(begin) = rest.find('<') {
        let mut quoted = false;
        let end = rest[begin..].find(|character| {
            quoted ^= character == '"';
            character == '>' && !quoted
        });
        let end = begin + end.expect("a tag that ends");
        tags.push(&rest[begin + 1..end]);
        rest = &rest[end + 1..];
    }
    tags
}

#[track_caller]
fn check(page: &str) {
    let tags = tags(page);
    let mut ids = BTreeSet::new();
    for tag in &tags {
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
        assert!(TAGS.contains(&name) || *tag == "!DOCTYPE html", "<{tag}>");
        for attribute in tag.split('"').step_by(2).flat_map(|part| part.split(' ')).filter(|part| part.ends_with('=')) {
            assert!(!attribute.starts_with("on") && !["style=", "src=", "srcdoc="].contains(&attribute), "<{tag}>");
        }
        if let Some((_, id)) = tag.split_once(" id=\"") {
            assert!(ids.insert(id.split('"').next().unwrap()), "twice: <{tag}>");
        }
    }
    for tag in &tags {
        if let Some((_, link)) = tag.split_once(" href=\"") {
            let link = link.split('"').next().unwrap();
            assert!(link.strip_prefix('#').is_some_and(|id| ids.contains(id)), "a link to nothing: <{tag}>");
        }
    }
    let unsafe_ = page.chars().find(|one| *one != '\n' && escape(&one.to_string()) != one.to_string());
    assert_eq!(unsafe_, None);
}

#[test]
fn pages_hold_nothing_but_what_the_templates_make() {
    for (_, report) in samples::all() {
        check(&render(&report));
    }
}

#[test]
fn hostile_names_are_text() {
    let page = render(&samples::hostile());
    assert!(page.contains("&lt;/script&gt;&lt;img src=x onerror=&quot;alert(1)&quot;&gt;"));
    assert!(page.contains(r">a\u{202e}gpj.exe\u{2066}\u{200b} 1002</bdi>"));
    // A name of 5000 characters stands in full in the details alone, where it is asked for.
    let outside: String = page.split("<dl").map(|part| part.split("</dl>").last().unwrap_or_default()).collect();
    assert!(page.contains(&"x".repeat(5_000)) && !outside.contains(&"x".repeat(500)));
}

/// What the first screen must say.
#[test]
fn the_cause_stands_on_top() {
    let page = render(&samples::slurm());
    let places: Vec<usize> = [
        "2 incidents; python3 22010 of alice holds GPU 0 now",
        "rank 3 of job 771204 was killed for want of memory",
        "oom kill",
        "rank 3 python3 20503",
        "40 × ",
        "python3 was reaped by gpureap",
        "Who held each GPU",
        "GPU 7</text>",
        "<h2 id=\"processes\">",
        "<h2 id=\"lineage\">",
        "<h2 id=\"limits\">",
    ]
    .iter()
    .map(|text| page.find(text).unwrap_or_else(|| panic!("{text}")))
    .collect();
    let mut sorted = places.clone();
    sorted.sort_unstable();
    assert_eq!(places, sorted);
    assert!(page.contains("All times are UTC"));
    assert!(page.contains("<html lang=\"en\""));
}

#[test]
fn many_holds_make_no_endless_page() {
    let mut report = samples::oom();
    let hold = report.holds[0].clone();
    report.processes.truncate(1);
    report.holds = (0..20_000_u32)
        .map(|number| {
            let mut look = hold.clone();
            look.opened = report.since + jiff::SignedDuration::from_millis(i64::from(number) * 80);
            look.released = Some(look.opened + jiff::SignedDuration::from_millis(i64::from(number % 7) * 40_000));
            look.who.pid = 10_000 + number;
            look
        })
        .collect();
    let page = render(&report);
    assert!(page.len() < 1 << 20, "{} bytes", page.len());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_name_makes_a_tag(name in "\\PC*|[<>\"'&/= a-z\u{202e}\u{1b}\n]{0,60}") {
        let mut report = samples::pkill();
        report.hosts[0].host.clone_from(&name);
        report.notes.push(name.clone());
        for device in &mut report.devices {
            device.host.clone_from(&name);
            device.model = Some(name.clone());
        }
        for hold in &mut report.holds {
            hold.comm.clone_from(&name);
            hold.who.host.clone_from(&name);
        }
        for process in &mut report.processes {
            process.who.host.clone_from(&name);
            process.comm.clone_from(&name);
            process.argv = vec![name.clone(), name.clone()];
            process.user = Some(name.clone());
            process.pod = Some(name.clone());
            process.env.insert(name.clone(), name.clone());
        }
        let incident = &mut report.incidents[0];
        incident.title.clone_from(&name);
        incident.evidence.push(name.clone());
        for member in &mut incident.processes {
            member.who.host.clone_from(&name);
            member.comm.clone_from(&name);
            member.why.clone_from(&name);
            member.part = Part::Followed;
        }
        check(&render(&report));
    }
}
