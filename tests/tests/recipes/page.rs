//! The blocks of a page that are to be run, each with the name of its scene.

/// A block of shell commands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) scene: String,
    pub(crate) script: String,
}

/// The `sh` blocks of a page, each after a comment that names its scene: `<!-- scene: NAME -->`.
pub(crate) fn blocks(page: &str) -> Result<Vec<Block>, String> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut scene = None;
    let mut lines = page.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        if let Some(name) = line.strip_prefix("<!-- scene:").and_then(|rest| rest.strip_suffix("-->")) {
            if let Some(unused) = scene.replace(name.trim().to_owned()) {
                return Err(format!("line {}: the scene {unused} has no block", number + 1));
            }
        } else if let Some(kind) = line.strip_prefix("```") {
            let body: Vec<&str> = lines.by_ref().map(|(_, line)| line).take_while(|line| *line != "```").collect();
            match (kind, scene.take()) {
                ("sh", Some(scene)) => {
                    if blocks.iter().any(|block| block.scene == scene) {
                        return Err(format!("line {}: a second block of the scene {scene}", number + 1));
                    }
                    blocks.push(Block { scene, script: body.join("\n") });
                }
                ("sh", None) => return Err(format!("line {}: a block without a scene", number + 1)),
                (_, Some(scene)) => return Err(format!("line {}: the block of {scene} is not run", number + 1)),
                // Anything else is there to be read, but a recipe is never.
                _ => {
                    if body.iter().any(|line| !commands(line).is_empty()) {
                        return Err(format!("line {}: gpureap is called in a block that is not run", number + 1));
                    }
                }
            }
        }
    }
    match scene {
        Some(scene) => Err(format!("the scene {scene} has no block")),
        None => Ok(blocks),
    }
}

/// What each call of gpureap in a script begins with, up to the first word that the shell has to work out.
pub(crate) fn commands(script: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in script.lines() {
        let mut rest = line;
        while let Some(at) = rest.find("gpureap ") {
            let begins = rest[..at].chars().next_back().is_none_or(|before| " \t'\"(|&;`".contains(before));
            rest = &rest[at + "gpureap ".len()..];
            if begins {
                let end = rest.find(|c: char| "$\"'|;&<>()`\\#".contains(c)).unwrap_or(rest.len());
                found.push(rest[..end].trim_end().to_owned());
            }
        }
    }
    found
}

#[test]
fn a_page_is_read() {
    let page = "a\n```text\nfuser -k\n```\n<!-- scene: one -->\n```sh\nx | gpureap reap --yes\n\ny\n```\n\
                <!-- scene: two -->\n\n```sh\nz\n```\n";
    let block = |scene: &str, script: &str| Block { scene: scene.to_owned(), script: script.to_owned() };
    assert_eq!(blocks(page), Ok(vec![block("one", "x | gpureap reap --yes\n\ny"), block("two", "z")]));
    for (page, reason) in [
        ("```sh\nx\n```", "line 1: a block without a scene"),
        ("<!-- scene: a -->\n```text\nx\n```", "line 2: the block of a is not run"),
        ("<!-- scene: a -->\n<!-- scene: b -->\n```sh\nx\n```", "line 2: the scene a has no block"),
        ("```sh\n```\n<!-- scene: a -->", "line 1: a block without a scene"),
        ("text\n<!-- scene: a -->", "the scene a has no block"),
        ("<!-- scene: a -->\n```sh\n```\n<!-- scene: a -->\n```sh\n```", "line 5: a second block of the scene a"),
        ("```text\n# gpureap reap\n```", "line 1: gpureap is called in a block that is not run"),
    ] {
        assert_eq!(blocks(page), Err(reason.to_owned()), "{page}");
    }
}

#[test]
fn calls_are_found() {
    let script = "gpureap reap --yes\ncode=$?\ntrap 'gpureap unfence' EXIT\n  gpureap wait --gpu 0 || gpureap reap\n\
                  x=$(gpureap holders --json) # mygpureap no\ngpureap reap --user \"$USER\" --yes\n";
    assert_eq!(
        commands(script),
        ["reap --yes", "unfence", "wait --gpu 0", "reap", "holders --json", "reap --user"].map(str::to_owned)
    );
}
