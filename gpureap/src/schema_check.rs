//! For tests: whether a document fits a schema of docs/schema, with nothing in it that the schema does not name.

use serde_json::Value;

/// Properties that the schema does not name are mistakes here, although readers must accept them from later versions.
fn strict(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            map.values_mut().for_each(strict);
            // A property may be called `properties`, but none of ours is.
            if map.contains_key("properties") {
                map.insert("additionalProperties".to_owned(), false.into());
            }
        }
        Value::Array(list) => list.iter_mut().for_each(strict),
        _ => {}
    }
}

/// Empty when it fits.
pub(crate) fn mistakes(schema: &str, value: &Value) -> Vec<String> {
    let mut schema: Value = serde_json::from_str(schema).unwrap();
    strict(&mut schema);
    let validator = jsonschema::options().should_validate_formats(true).build(&schema).unwrap();
    validator.iter_errors(value).map(|error| format!("{}: {error}", error.instance_path())).collect()
}

#[track_caller]
pub(crate) fn check(schema: &str, value: &Value) {
    let mistakes = mistakes(schema, value);
    assert!(mistakes.is_empty(), "{mistakes:#?}");
}
