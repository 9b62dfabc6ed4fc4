use super::*;
use crate::history::samples;

#[test]
fn show() {
    for (name, report) in samples::all() {
        std::fs::write(format!("/dev/null"), render(&report)).unwrap();
    }
}
