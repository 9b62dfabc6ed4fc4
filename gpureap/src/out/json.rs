//! One JSON document on stdout: one line for programs, indented on a terminal.

use std::fmt::Write as _;

use serde::Serialize;

use super::{Style, raw};

pub fn print(value: &impl Serialize) -> anyhow::Result<()> {
    raw(render(value, Style::of_stdout())?.as_bytes())
}

/// One line of a stream; says whether there is still a reader.
pub fn stream(value: &impl Serialize) -> anyhow::Result<bool> {
    let style = Style::of_stdout();
    super::stream(render_line(value, style)?.as_bytes())
}

fn render_line(value: &impl Serialize, style: Style) -> anyhow::Result<String> {
    let text = serde_json::to_string(value)?;
    Ok(if style.width.is_some() { escape_rest(&text) } else { text } + "\n")
}

/// JSON escapes ASCII control characters by itself; what else a terminal might act on is escaped where one is.
fn render(value: &impl Serialize, style: Style) -> anyhow::Result<String> {
    let mut text = if style.width.is_some() {
        escape_rest(&serde_json::to_string_pretty(value)?)
    } else {
        serde_json::to_string(value)?
    };
    text.push('\n');
    Ok(text)
}

/// All of them are inside strings, where `\uXXXX` means the same character.
fn escape_rest(json: &str) -> String {
    let mut result = String::with_capacity(json.len());
    for character in json.chars() {
        if character != '\n' && super::sanitize::is_unsafe(character) {
            for unit in character.encode_utf16(&mut [0; 2]) {
                write!(result, "\\u{unit:04x}").expect("a string takes everything");
            }
        } else {
            result.push(character);
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_is_the_same_on_a_terminal() {
        let value = serde_json::json!({"comm": "a\u{9b}b\u{202e}c\u{1b}\u{e0041}\u{7f}\n"});
        let plain = render(&value, Style::default()).unwrap();
        let terminal = render(&value, Style { width: Some(80), colours: true }).unwrap();
        assert_eq!(plain.lines().count(), 1);
        let line = render_line(&value, Style { width: Some(80), colours: true }).unwrap();
        assert_eq!(line.lines().count(), 1);
        for text in [&terminal, &line] {
            assert!(text.chars().all(|character| character == '\n' || !super::super::sanitize::is_unsafe(character)));
        }
        for text in [plain, terminal, line] {
            assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
        }
    }
}
