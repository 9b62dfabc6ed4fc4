//! Turns the shipped rules into constants: reading them at every start would cost more than looking at the processes.

use std::{env, fmt::Write as _, fs, path::Path};

const RULES: &str = "src/classify/rules.toml";
const CONDITIONS: [&str; 8] = ["exe", "unit", "comm", "uid", "image", "container", "pod", "namespace"];

fn main() {
    println!("cargo:rerun-if-changed={RULES}");
    println!("cargo:rerun-if-changed=build.rs");
    let text = fs::read_to_string(RULES).expect("the shipped rules");
    let file: toml::Table = toml::from_str(&text).expect("the shipped rules are TOML");
    let rules = file["class"].as_array().expect("a list of rules");
    let mut code = String::from("&[\n");
    for rule in rules {
        let rule = rule.as_table().expect("a rule");
        let word = |key: &str| rule[key].as_str().expect("a word");
        let class = match word("class") {
            "system" => "System",
            "monitor" => "Monitor",
            other => panic!("class {other} of a shipped rule"),
        };
        write!(code, "    Shipped {{ name: {:?}, class: Class::{class}, ", word("name"))
            .expect("a string takes everything");
        for condition in CONDITIONS {
            write!(code, "{condition}: &{:?}, ", words(rule.get(condition))).expect("a string takes everything");
        }
        code.push_str("},\n");
        let known = |key: &str| key == "name" || key == "class" || CONDITIONS.contains(&key);
        assert!(rule.keys().all(|key| known(key)), "{rule:?}");
    }
    code.push_str("]\n");
    let place = env::var_os("OUT_DIR").expect("cargo tells where");
    fs::write(Path::new(&place).join("shipped_rules.rs"), code).expect("write the constants");
}

/// One or several words; none where the condition is absent.
fn words(value: Option<&toml::Value>) -> Vec<&str> {
    match value {
        None => Vec::new(),
        Some(toml::Value::Array(list)) => list.iter().map(|value| value.as_str().expect("a word")).collect(),
        Some(value) => vec![value.as_str().expect("a word")],
    }
}
