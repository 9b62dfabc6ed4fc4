//! Parse, run, map the result to an exit code.

use std::{env, ffi::OsString, process::ExitCode};

use gpureap::{demo, error::exit_of, gpu::nvml, out, run};

fn main() -> ExitCode {
    let words: Vec<OsString> = env::args_os().collect();
    // The demo's own processes: no command for people, so help and completions do not know it.
    let result = match words.get(1) {
        Some(word) if word == demo::ACTOR => demo::actor(&words[2..]),
        // The process that loads NVML, so that none of the others has to.
        Some(word) if word == nvml::child::WORD => nvml::child::run(&words[2..]),
        _ => run::parse(words).map_err(Into::into).and_then(|cli| run::run(&cli)),
    };
    match result {
        Ok(exit) => exit.into(),
        Err(error) => {
            out::diagnostic(&error);
            exit_of(&error).into()
        }
    }
}
