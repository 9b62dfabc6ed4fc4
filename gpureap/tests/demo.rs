//! The demo's whole story with the real binary as its actors, seen through /proc.

use std::{path::Path, time::Instant};

use gpureap::{
    config::Config,
    demo::{
        play::{Story, close, perform},
        stage::Stage,
        watch::by_proc,
    },
    exit_code::Exit,
};

#[test]
fn the_story_is_right() {
    let stage = match Stage::set(&Config::default(), 3) {
        Ok(stage) => stage,
        Err(error) => {
            eprintln!("SKIPPED: the demo needs root and a mount namespace: {error:#}");
            return;
        }
    };
    let watch = by_proc(&stage.config).unwrap();
    let mut told = String::new();
    let mut say = |text: &str| {
        told.push_str(text);
        told.push('\n');
        Ok(())
    };
    let mut story = Story::new(&mut say);
    let begun = Instant::now();
    let exit = perform(&stage, &watch, Path::new(env!("CARGO_BIN_EXE_gpureap")), &mut story).unwrap();
    let last = close(&mut story, stage.strike(), begun.elapsed()).unwrap();
    eprintln!("{told}");
    assert_eq!((exit, last), (Exit::Done, Exit::Done));
    assert!(told.contains('✓') && !told.contains('✗'));
    assert!(begun.elapsed().as_secs() < 20);
}
