//! Whether what gpureap prints fits the schemas of docs/schema.
use serde_json::Value;

/// Properties that the schema does not name are mistakes here, although readers must accept them from later versions.
fn strict(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            map.values_mut().for_each(strict);
            if map.contains_key("properties") {
                map.insert("additionalProperties".to_owned(), false.into());
            }
        }
        Value::Array(list) => list.iter_mut().for_each(strict),
        _ => {}
    }
}

/// Panics with all that is wrong. The text of the schema is compiled into the test.
#[track_caller]
pub fn check_schema(schema: &str, values: &[Value]) {
    let mut schema: Value = serde_json::from_str(schema).expect("a schema is JSON");
    strict(&mut schema);
    let validator = jsonschema::options().should_validate_formats(true).build(&schema).expect("a schema");
    for value in values {
        let mistakes: Vec<String> =
            validator.iter_errors(value).map(|error| format!("{}: {error}", error.instance_path())).collect();
        assert!(mistakes.is_empty(), "{mistakes:#?} in {value:#}");
    }
}
