//! Real reports against docs/schema/reap-1.json.

use serde_json::Value;

use super::{ladder_of, policy, scripted::reap_with};
use crate::{
    model::Eyes as _,
    reap::{
        ladder::Rungs,
        plan::{Class, Subject},
        reaper::Reaper,
        report::Scene,
        world::{Actor, React, Told, World, actor},
    },
};

const SCHEMA: &str = include_str!("../../../../docs/schema/reap-1.json");

/// The few words of JSON Schema that ours uses. Properties that it does not name are mistakes here, although readers
/// must accept them from later versions.
fn check(schema: &Value, value: &Value, at: &str) {
    for (word, rule) in schema.as_object().unwrap() {
        match word.as_str() {
            "type" => {
                let names = rule.as_array().cloned().unwrap_or_else(|| vec![rule.clone()]);
                let is = |name: &Value| match name.as_str().unwrap() {
                    "object" => value.is_object(),
                    "array" => value.is_array(),
                    "string" => value.is_string(),
                    "boolean" => value.is_boolean(),
                    "integer" => value.is_u64() || value.is_i64(),
                    "number" => value.is_number(),
                    "null" => value.is_null(),
                    other => panic!("unknown type {other}"),
                };
                assert!(names.iter().any(is), "{at}: {value} is not {rule}");
            }
            "const" => assert_eq!(value, rule, "{at}"),
            "enum" => assert!(rule.as_array().unwrap().contains(value), "{at}: {value} is none of {rule}"),
            "minimum" => assert!(value.is_null() || value.as_f64() >= rule.as_f64(), "{at}: {value} < {rule}"),
            "maximum" => assert!(value.is_null() || value.as_f64() <= rule.as_f64(), "{at}: {value} > {rule}"),
            "required" if value.is_object() => {
                for name in rule.as_array().unwrap() {
                    assert!(value.get(name.as_str().unwrap()).is_some(), "{at}: {name} is missing");
                }
            }
            "properties" => {
                for (name, value) in value.as_object().into_iter().flatten() {
                    let rule = rule.get(name).unwrap_or_else(|| panic!("{at}: {name} is not in the schema"));
                    check(rule, value, &format!("{at}.{name}"));
                }
            }
            "items" => {
                for (index, value) in value.as_array().into_iter().flatten().enumerate() {
                    check(rule, value, &format!("{at}[{index}]"));
                }
            }
            "format" => {
                value.as_str().unwrap().parse::<jiff::Timestamp>().unwrap_or_else(|error| panic!("{at}: {error}"));
            }
            "required" | "$schema" | "$id" | "title" | "description" => {}
            other => panic!("{at}: unknown word {other}"),
        }
    }
}

#[test]
fn reports_fit_their_schema() {
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    let worlds = [
        vec![],
        vec![
            Actor { on_term: React::Ignore, ..actor(10) },
            Actor { slots: [0, 1].into(), on_term: React::CloseThenExit(1, 5, 9), ..actor(11) },
            Actor { vanishes: true, ..actor(12) },
            Actor { reused: true, ..actor(13) },
            Actor { after: Some(11), ..actor(20) },
            actor(30),
        ],
        vec![Actor { on_term: React::Refuse, ..actor(10) }, Actor { unreadable: true, ..actor(11) }],
        // Survives; this process stands in for what is read of it in /proc.
        vec![Actor { on_term: React::Ignore, on_kill: React::Ignore, ..actor(std::process::id()) }],
    ];
    let subjects = [(actor(30).key, Subject { class: Class::System, ..Subject::default() })].into();
    let mut seen = Vec::new();
    for actors in worlds {
        let world = World::new(actors);
        let (report, _) = reap_with(&world, &policy(), &subjects, Rungs { now: false, ..ladder_of(50, 100) });
        let value = serde_json::to_value(&report).unwrap();
        check(&schema, &value, "reap");
        seen.push(value["outcome"].as_str().unwrap().to_owned());
        assert_eq!(serde_json::from_value::<crate::reap::report::Report>(value).unwrap(), report);
    }
    assert_eq!(seen, ["nothing-to-do", "held", "held", "unkillable"]);

    let world = World::new(vec![actor(10)]);
    let (mut told, mut signaller, policy) = (Told::default(), world.clone(), policy());
    let reaper = Reaper {
        eyes: &world,
        signaller: &mut signaller,
        ledger: &mut told,
        people: &super::Workers,
        devices: &[super::device(0)],
        policy: &policy,
        scene: Scene::default(),
    };
    let report = reaper.dry_run(&reaper.plan(world.view().unwrap(), &subjects));
    check(&schema, &serde_json::to_value(report).unwrap(), "dry run");
}
