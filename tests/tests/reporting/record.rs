//! Asking for reports until they tell what is waited for.
use std::sync::LazyLock;

use gpureap_tests::harness::{Bench, PATIENCE, Pid, Schema, settle};
use serde_json::Value;

static SCHEMA: LazyLock<Schema> =
    LazyLock::new(|| Schema::new(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/schema/report-1.json"))));

#[track_caller]
fn unchecked(bench: &Bench, rest: &[&str]) -> Value {
    bench.run(&[&["report", "--json"], rest].concat()).expect_code(0).json()
}

/// `report --json` with more arguments.
#[track_caller]
pub(crate) fn report(bench: &Bench, rest: &[&str]) -> Value {
    let report = unchecked(bench, rest);
    SCHEMA.check(&report);
    report
}

/// The report, as soon as it is as it should be: a batch of records is written within a moment, and evidence may come late.
#[track_caller]
pub(crate) fn until(bench: &Bench, rest: &[&str], what: &str, is: impl Fn(&Value) -> bool) -> Value {
    let mut last = Value::Null;
    let outcome = settle(PATIENCE / 4, || {
        last = unchecked(bench, rest);
        (!is(&last)).then_some(())
    });
    assert!(outcome.is_ok(), "{what}, in {last:#}");
    SCHEMA.check(&last);
    last
}

pub(crate) fn list<'a>(value: &'a Value, field: &str) -> &'a [Value] {
    value[field].as_array().unwrap_or_else(|| panic!("{field} in {value:#}"))
}

/// The entry of a process.
pub(crate) fn process(report: &Value, pid: Pid) -> Option<&Value> {
    list(report, "processes").iter().find(|process| process["pid"] == pid)
}

/// All holds of a process.
pub(crate) fn holds(report: &Value, pid: Pid) -> Vec<&Value> {
    list(report, "holds").iter().filter(|hold| hold["pid"] == pid).collect()
}

/// The only one.
#[track_caller]
pub(crate) fn hold(report: &Value, pid: Pid) -> &Value {
    let [hold] = holds(report, pid)[..] else { panic!("one hold of {pid} in {report:#}") };
    hold
}

/// Whether the report knows that the process holds.
pub(crate) fn is_held(report: &Value, pid: Pid) -> bool {
    process(report, pid).is_some_and(|process| !process["argv"].as_array().is_none_or(Vec::is_empty))
        && holds(report, pid).iter().any(|hold| hold["released"].is_null())
}

/// Waits until the record knows that they hold, and who they are.
#[track_caller]
pub(crate) fn until_held(bench: &Bench, pids: &[Pid]) -> Value {
    until(bench, &[], &format!("{pids:?} hold"), |report| pids.iter().all(|pid| is_held(report, *pid)))
}

/// Waits until the record knows how it died and that its device is free again; its entry.
#[track_caller]
pub(crate) fn dead(bench: &Bench, pid: Pid, cause: &str) -> Value {
    died(bench, pid, cause, |death| death["cause"] == cause)
}

/// As [`dead`], when its death is told as it should be.
#[track_caller]
pub(crate) fn died(bench: &Bench, pid: Pid, what: &str, is: impl Fn(&Value) -> bool) -> Value {
    let report = until(bench, &[], &format!("{pid} has died: {what}"), |report| {
        process(report, pid).is_some_and(|process| is(&process["death"]))
            && holds(report, pid).iter().all(|hold| !hold["released"].is_null())
    });
    process(&report, pid).expect("found a moment ago").clone()
}

/// Pids from the parent upwards.
pub(crate) fn lineage(process: &Value) -> Vec<Pid> {
    list(process, "lineage").iter().map(|ancestor| ancestor["pid"].as_i64().expect("a pid") as Pid).collect()
}

pub(crate) fn strings(value: &Value) -> Vec<&str> {
    value.as_array().map_or_else(Vec::new, |list| list.iter().filter_map(Value::as_str).collect())
}

/// The incident that the end of the process is part of.
#[track_caller]
pub(crate) fn incident(report: &Value, pid: Pid) -> &Value {
    let id = &process(report, pid).unwrap_or_else(|| panic!("{pid} in {report:#}"))["incident"];
    let found = list(report, "incidents").iter().find(|incident| incident["id"] == *id);
    found.unwrap_or_else(|| panic!("an incident with {pid} in {report:#}"))
}

/// What an incident says of a process.
#[track_caller]
pub(crate) fn member(incident: &Value, pid: Pid) -> &Value {
    let found = list(incident, "processes").iter().find(|member| member["pid"] == pid);
    found.unwrap_or_else(|| panic!("{pid} in {incident:#}"))
}
