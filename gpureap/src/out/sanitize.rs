//! Names and arguments come from whoever runs the process: what could steer a terminal or mislead the eye is escaped.

use std::{borrow::Cow, fmt::Write as _};

/// Control, bidirectional and invisible characters as `\n`, `\x1b` or `\u{202e}`, backslashes doubled only where
/// something else was escaped too, so that plain Windows-like names stay readable.
pub fn escape(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut result = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        match character {
            '\\' => result.push_str("\\\\"),
            '\n' => result.push_str("\\n"),
            '\r' => result.push_str("\\r"),
            '\t' => result.push_str("\\t"),
            unsafe_ if is_unsafe(unsafe_) => {
                let code = u32::from(unsafe_);
                let written =
                    if code < 0x80 { write!(result, "\\x{code:02x}") } else { write!(result, "\\u{{{code:x}}}") };
                written.expect("a string takes everything");
            }
            plain => result.push(plain),
        }
    }
    Cow::Owned(result)
}

pub(crate) fn is_unsafe(character: char) -> bool {
    character.is_control()
        || matches!(character,
            // Bidirectional marks, embeddings, overrides, isolates.
            '\u{061c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
            // Line and paragraph separators; zero-width characters, joiners, soft hyphen, byte-order mark.
            | '\u{2028}' | '\u{2029}' | '\u{200b}'..='\u{200d}' | '\u{2060}'..='\u{2064}' | '\u{00ad}' | '\u{feff}'
            // Tags and annotation characters.
            | '\u{e0000}'..='\u{e007f}' | '\u{fff9}'..='\u{fffb}')
}

/// Arguments as one line that a shell would read back as the same words.
pub fn command_line(argv: &[String]) -> String {
    let words: Vec<String> = argv
        .iter()
        .map(|word| {
            let plain = !word.is_empty()
                && word.chars().all(|c| c.is_alphanumeric() || "-_./:=@%+,^[]{}~".contains(c) && c != '\'');
            if plain { word.clone() } else { format!("'{}'", escape(&word.replace('\'', "'\\''"))) }
        })
        .collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_must_not_see() {
        for (text, expected) in [
            ("python3", "python3"),
            ("größe ✓ 日本", "größe ✓ 日本"),
            (r"C:\x", r"C:\x"),
            ("a\\b\n", r"a\\b\n"),
            ("\u{1b}[31mred\u{1b}[0m", r"\x1b[31mred\x1b[0m"),
            ("a\rb\tc\u{0}\u{7f}", r"a\rb\tc\x00\x7f"),
            ("\u{9b}31m", r"\u{9b}31m"),
            ("abc\u{202e}txt.exe", r"abc\u{202e}txt.exe"),
            ("\u{2066}\u{200b}\u{feff}", r"\u{2066}\u{200b}\u{feff}"),
            ("a\u{2028}b", r"a\u{2028}b"),
        ] {
            assert_eq!(escape(text), expected);
        }
    }

    #[test]
    fn arguments_on_one_line() {
        let line = |words: &[&str]| command_line(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
        assert_eq!(line(&["python3", "-c", "import x\nx()", ""]), r"python3 -c 'import x\nx()' ''");
        assert_eq!(line(&["a b", "--lr=1e-3", "it's"]), r"'a b' --lr=1e-3 'it'\''s'");
    }

    proptest::proptest! {
        #[test]
        fn nothing_unsafe_is_left(text in ".*") {
            proptest::prop_assert!(!escape(&text).chars().any(is_unsafe));
            proptest::prop_assert!(!command_line(&[text]).chars().any(is_unsafe));
        }
    }
}
