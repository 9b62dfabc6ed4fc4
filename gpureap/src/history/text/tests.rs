use super::*;
use crate::history::samples;

#[test]
fn show() {
    for (name, report) in samples::all() {
        println!("===== {name}\n{}", render(&report, Style::default()));
    }
}
