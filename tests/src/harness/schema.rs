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

/// Made once: that takes its time on an emulated processor.
#[derive(Debug)]
pub struct Schema(jsonschema::Validator);

impl Schema {
    pub fn new(text: &str) -> Self {
        let mut schema: Value = serde_json::from_str(text).expect("a schema is JSON");
        strict(&mut schema);
        Self(jsonschema::options().should_validate_formats(true).build(&schema).expect("a schema"))
    }

    /// Panics with all that is wrong.
    #[track_caller]
    pub fn check(&self, value: &Value) {
        let mistakes: Vec<String> =
            self.0.iter_errors(value).map(|error| format!("{}: {error}", error.instance_path())).collect();
        assert!(mistakes.is_empty(), "{mistakes:#?} in {value:#}");
    }
}
