//! Writes a page and a text for each sample report into a directory: what `tests/page/check.py` looks at, and where the
//! pictures in the docs are from.

use std::{env, fs, path::PathBuf};

use anyhow::Context as _;
use gpureap::{
    history::{event, html, report, rows, text},
    holders, model,
    out::Style,
};

#[path = "../src/history/samples/mod.rs"]
mod samples;

fn main() -> anyhow::Result<()> {
    let directory = PathBuf::from(env::args_os().nth(1).context("usage: report_page DIRECTORY")?);
    fs::create_dir_all(&directory)?;
    for (name, report) in samples::all() {
        fs::write(directory.join(format!("{name}.html")), html::render(&report))?;
        fs::write(directory.join(format!("{name}.txt")), text::render(&report, Style::default()))?;
    }
    Ok(())
}
