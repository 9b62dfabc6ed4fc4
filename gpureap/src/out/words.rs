//! Words and phrases that several texts for people have in common.

use std::{borrow::Cow, collections::BTreeSet};

use jiff::SignedDuration;
use serde::Serialize;

use super::sanitize::{command_line, escape};
use crate::{
    history::death::signal_name,
    holders::report::ExitReport,
    model::{How, Source},
};

/// A name as the JSON has it.
pub fn word(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(text)) => text,
        _ => String::new(),
    }
}

pub const fn plural<'a>(count: usize, one: &'a str, many: &'a str) -> &'a str {
    if count == 1 { one } else { many }
}

/// Several of a kind: `/dev/nvidia0, /dev/nvidia1 and 4 more`.
pub fn nodes(nodes: &[String]) -> String {
    match nodes {
        [first, second, third, rest @ ..] if !rest.is_empty() => {
            format!("{first}, {second}, {third} and {} more", rest.len())
        }
        all => all.join(", "),
    }
}

/// `1000-1125, 1200`.
pub fn ranges(sorted: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for pid in sorted {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == *pid => *last = *pid,
            _ => parts.push((*pid, *pid)),
        }
    }
    let text = parts.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") });
    text.collect::<Vec<_>>().join(", ")
}

/// Two units at most: `3d 4h`, `12m 5s`, `40s`.
pub fn span(duration: SignedDuration) -> String {
    let seconds = duration.as_secs().max(0);
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m {}s", seconds / 60, seconds % 60),
        3600..86400 => format!("{}h {}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d {}h", seconds / 86400, seconds / 3600 % 24),
    }
}

/// What something took, in milliseconds below a second.
pub fn took(ms: f64) -> String {
    if ms < 1_000.0 { format!("{ms:.1} ms") } else { format!("{:.2} s", ms / 1_000.0) }
}

/// The name, or else the number.
pub fn user(name: Option<&str>, uid: Option<u32>) -> Cow<'_, str> {
    match (name, uid) {
        (Some(name), _) => escape(name),
        (None, Some(uid)) => uid.to_string().into(),
        (None, None) => "?".into(),
    }
}

/// The arguments; the name alone, in brackets as ps does, where there are none.
pub fn command(comm: &str, argv: &[String]) -> String {
    if argv.is_empty() { format!("[{}]", escape(comm)) } else { command_line(argv) }
}

/// Longest command that stands beside other things in a line.
const COMMAND_WIDTH: usize = 80;

/// As [`command`], cut and marked with an ellipsis.
pub fn short_command(comm: &str, argv: &[String]) -> String {
    shorten(&command(comm, argv))
}

pub fn shorten(text: &str) -> String {
    let mut shown: String = text.chars().take(COMMAND_WIDTH).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown
}

pub fn ended(exit: ExitReport) -> String {
    match exit {
        ExitReport { signal: Some(signal), .. } => format!("killed by {}", signal_name(signal)),
        ExitReport { code, .. } => format!("exited {}", code.unwrap_or(0)),
    }
}

/// How it is known that nobody holds what was chosen.
pub fn proof(verified: bool, source: Source, cannot_see: &BTreeSet<How>) -> String {
    match (verified, source) {
        (true, _) if cannot_see.is_empty() => "verified by a full sweep of the kernel".to_owned(),
        (true, _) => {
            let kinds: Vec<String> = cannot_see.iter().map(word).collect();
            format!("verified by a full sweep of the kernel (which cannot see {})", kinds.join(", "))
        }
        (false, Source::Proc) => "as far as /proc shows to this caller".to_owned(),
        (false, _) => "not verified: not everybody could be seen and judged".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans() {
        for (seconds, expected) in [(-3, "0s"), (59, "59s"), (61, "1m 1s"), (3_700, "1h 1m"), (100_000, "1d 3h")] {
            assert_eq!(span(SignedDuration::from_secs(seconds)), expected);
        }
    }

    #[test]
    fn pid_ranges() {
        for (pids, expected) in [(&[1, 2, 3, 7, 9, 10][..], "1-3, 7, 9-10"), (&[], "")] {
            assert_eq!(ranges(pids), expected);
        }
    }
}
