//! docs/recipes.md does what it says: each block of it is run by a shell, against real processes on stand-in devices.
mod page;
mod scenes;
mod stage;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    process::Command,
    time::Instant,
};

use gpureap_tests::harness::{note, skip};

use self::{
    page::{Block, blocks},
    scenes::SCENES,
};

const PAGE: &str = include_str!("../../../docs/recipes.md");

#[test]
fn every_block_has_a_scene_and_every_scene_a_block() {
    let blocks = blocks(PAGE).expect("docs/recipes.md");
    let mut named: Vec<&str> = blocks.iter().map(|block| block.scene.as_str()).collect();
    let mut known: Vec<&str> = SCENES.iter().map(|(name, _)| *name).collect();
    named.sort_unstable();
    known.sort_unstable();
    assert_eq!(named, known);
}

#[test]
fn every_recipe_does_what_it_says() {
    if Command::new("sh").args(["-c", ":"]).status().is_err() {
        return skip("recipes", "there is no shell");
    }
    let mut failed = Vec::new();
    for block in &blocks(PAGE).expect("docs/recipes.md") {
        let Some((name, scene)) = SCENES.iter().find(|(name, _)| *name == block.scene) else {
            panic!("no scene {}", block.scene);
        };
        let begun = Instant::now();
        match catch_unwind(AssertUnwindSafe(|| scene(block))) {
            Ok(Ok(())) => note(&format!("{name}: {:.1} s", begun.elapsed().as_secs_f64())),
            Ok(Err(reason)) => skip(&format!("recipe {name}"), &reason),
            Err(_) => failed.push(*name),
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

/// Sets up what a recipe is for, runs it, and looks who lives. The reason where this host lacks something.
type Scene = fn(&Block) -> Result<(), String>;
