//! JSON text to message.

use prost_reflect::{
    DynamicMessage, EnumDescriptor, FieldDescriptor, Kind, MapKey, MessageDescriptor, Value,
};
use serde_json::Value as Json;
use trireme_proto::inference::ModelConfig;

use crate::error::{ConfigError, ConfigErrors, Snippet};
use crate::schema;

/// Errors after which reading ends.
const MAX_ERRORS: usize = 20;
/// Largest text that is read, in bytes.
const MAX_JSON_BYTES: usize = 16 << 20;

/// Reads a configuration in JSON, as `/config` serves it and the load API takes it.
///
/// # Errors
/// Text that is no JSON, with line and column; members that are unknown or of the wrong kind, with their path.
pub fn from_json(text: &str) -> Result<ModelConfig, ConfigErrors> {
    if text.len() > MAX_JSON_BYTES {
        let message =
            format!("the configuration has {} bytes, more than the {MAX_JSON_BYTES} it may have", text.len());
        return Err(ConfigError::new(message).into());
    }
    let json: Json = serde_json::from_str(text).map_err(|error| syntax_error(text, &error))?;
    let json = unquoted(json)?;
    let Json::Object(_) = &json else {
        let message = format!("the configuration must be a JSON object, found {}", describe(&json));
        return Err(ConfigError::new(message).into());
    };
    let mut reader = Reader { errors: Vec::new(), path: String::new() };
    let message = reader.message(&schema::model_config(), &json);
    let mut errors = reader.errors;
    if let Some(message) = &message {
        schema::name_subjects(message, &mut errors);
    }
    let message = ConfigErrors::check(errors, message)?;
    let config = message.and_then(|message| message.transcode_to::<ModelConfig>().ok());
    config.ok_or_else(|| ConfigError::new("the configuration does not fit its message").into())
}

/// A JSON string that holds the JSON of a configuration stands for what it holds: clients quote once too often.
fn unquoted(json: Json) -> Result<Json, ConfigErrors> {
    match json {
        Json::String(inner) => serde_json::from_str(&inner).map_err(|error| syntax_error(&inner, &error)),
        other => Ok(other),
    }
}

fn syntax_error(text: &str, error: &serde_json::Error) -> ConfigErrors {
    let whole = error.to_string();
    let reason = whole.split(" at line ").next().unwrap_or_default();
    let mut out = ConfigError::new(format!("the configuration is not valid JSON: {reason}"));
    let line = u32::try_from(error.line()).unwrap_or(1).max(1);
    // serde_json counts bytes; the report counts characters.
    let source = text.lines().nth(line as usize - 1).unwrap_or_default();
    let before = source.get(..error.column().saturating_sub(1)).unwrap_or(source);
    let column = u32::try_from(before.chars().count() + 1).unwrap_or(1);
    out.line = Some(line);
    out.column = Some(column);
    out.snippet = (column <= 160).then(|| Snippet { text: source.chars().take(160).collect(), width: 1 });
    if text.trim_start().starts_with(|c: char| c.is_ascii_alphabetic()) {
        out.hint = Some("this looks like config.pbtxt; here the configuration is JSON".to_owned());
    }
    out.into()
}

fn describe(json: &Json) -> String {
    match json {
        Json::Null => "null".to_owned(),
        Json::Object(_) => "an object".to_owned(),
        Json::Array(_) => "an array".to_owned(),
        scalar => {
            let text = scalar.to_string();
            let short: String = text.chars().take(48).collect();
            if short.len() < text.len() { format!("{short}...") } else { short }
        }
    }
}

struct Reader {
    errors: Vec<ConfigError>,
    path: String,
}

impl Reader {
    fn report(&mut self, error: ConfigError) {
        if self.errors.len() < MAX_ERRORS {
            let error = if self.path.is_empty() { error } else { error.at_path(self.path.clone()) };
            self.errors.push(error);
        }
    }

    fn within<T>(&mut self, step: &str, read: impl FnOnce(&mut Self) -> T) -> T {
        let length = self.path.len();
        if !step.starts_with('[') && length > 0 {
            self.path.push('.');
        }
        self.path.push_str(step);
        let result = read(self);
        self.path.truncate(length);
        result
    }

    /// An object as a message; `None` if it is none, which is noted.
    fn message(&mut self, descriptor: &MessageDescriptor, json: &Json) -> Option<DynamicMessage> {
        let Json::Object(members) = json else {
            self.report(ConfigError::new(format!(
                "expected an object for {}, found {}",
                descriptor.full_name(),
                describe(json)
            )));
            return None;
        };
        let mut message = DynamicMessage::new(descriptor.clone());
        let mut seen = Vec::new();
        for (name, value) in members {
            let field =
                descriptor.get_field_by_name(name).or_else(|| descriptor.get_field_by_json_name(name));
            let Some(field) = field else {
                self.unknown_member(descriptor, name);
                continue;
            };
            if seen.contains(&field.number()) {
                let text = format!("member \"{}\" is given twice, in both of its spellings", field.name());
                self.report(ConfigError::new(text));
                continue;
            }
            seen.push(field.number());
            if value.is_null() {
                continue;
            }
            let field_name = field.name().to_owned();
            self.within(&field_name, |this| this.field(&mut message, &field, value));
        }
        Some(message)
    }

    fn unknown_member(&mut self, descriptor: &MessageDescriptor, name: &str) {
        let error =
            ConfigError::new(format!("message {} has no field named \"{name}\"", descriptor.full_name()));
        let hint = schema::suggest_field(descriptor, name).map_or_else(
            || format!("its fields are {}", schema::field_names(descriptor)),
            |meant| format!("did you mean \"{meant}\"?"),
        );
        self.report(error.with_hint(hint));
    }

    fn field(&mut self, message: &mut DynamicMessage, field: &FieldDescriptor, json: &Json) {
        let other =
            field.containing_oneof().and_then(|oneof| oneof.fields().find(|other| message.has_field(other)));
        if let Some(other) = other {
            let text = format!(
                "field \"{}\" is specified along with field \"{}\"; only one of them can be",
                field.name(),
                other.name()
            );
            return self.report(ConfigError::new(text).with_hint("remove one of them"));
        }
        let value = if field.is_map() {
            self.map(field, json)
        } else if field.is_list() {
            self.list(field, json)
        } else {
            self.value(field, &field.kind(), json)
        };
        if let Some(value) = value {
            message.set_field(field, value);
        }
    }

    fn list(&mut self, field: &FieldDescriptor, json: &Json) -> Option<Value> {
        let Json::Array(items) = json else {
            let error = ConfigError::new(format!(
                "expected an array for \"{}\", found {}",
                field.name(),
                describe(json)
            ));
            self.report(error.with_hint(format!("write \"{}\": [ ... ]", field.name())));
            return None;
        };
        let kind = field.kind();
        let values = items
            .iter()
            .enumerate()
            .filter_map(|(i, item)| self.within(&format!("[{i}]"), |this| this.value(field, &kind, item)));
        Some(Value::List(values.collect()))
    }

    fn map(&mut self, field: &FieldDescriptor, json: &Json) -> Option<Value> {
        let Kind::Message(entry) = field.kind() else { return None };
        let Json::Object(members) = json else {
            let error = ConfigError::new(format!(
                "expected an object for \"{}\", found {}",
                field.name(),
                describe(json)
            ));
            self.report(error.with_hint(format!("write \"{}\": {{ \"key\": value }}", field.name())));
            return None;
        };
        let (key_field, value_field) = (entry.map_entry_key_field(), entry.map_entry_value_field());
        let mut entries = std::collections::HashMap::with_capacity(members.len());
        for (name, value) in members {
            let key = match key_field.kind() {
                Kind::String => Some(MapKey::String(name.clone())),
                Kind::Uint64 => name.parse().ok().map(MapKey::U64),
                Kind::Int64 => name.parse().ok().map(MapKey::I64),
                Kind::Uint32 => name.parse().ok().map(MapKey::U32),
                Kind::Int32 => name.parse().ok().map(MapKey::I32),
                Kind::Bool => name.parse().ok().map(MapKey::Bool),
                _ => None,
            };
            self.within(&format!("[{name:?}]"), |this| {
                let Some(key) = key else {
                    let takes = schema::takes(&key_field);
                    return this
                        .report(ConfigError::new(format!("expected {takes} as the key, found \"{name}\"")));
                };
                if let Some(value) = this.value(&value_field, &value_field.kind(), value) {
                    entries.insert(key, value);
                }
            });
        }
        Some(Value::Map(entries))
    }

    /// One value; `None` if it is of the wrong kind, which is noted.
    fn value(&mut self, field: &FieldDescriptor, kind: &Kind, json: &Json) -> Option<Value> {
        let value = match kind {
            Kind::Message(descriptor) => {
                // The common slip for parameters: {"key": "text"} in place of {"key": {"string_value": "text"}}.
                if let (Json::String(text), "ModelParameter") = (json, descriptor.name()) {
                    let error =
                        ConfigError::new(format!("expected an object for ModelParameter, found \"{text}\""));
                    self.report(error.with_hint(format!("write {{\"string_value\": {json}}}")));
                    return None;
                }
                return self.message(descriptor, json).map(Value::Message);
            }
            Kind::Enum(values) => return self.enum_value(field, values, json),
            Kind::Bool => json.as_bool().map(Value::Bool),
            Kind::String => json.as_str().map(|text| Value::String(text.to_owned())),
            Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => {
                integer(json).and_then(|v| v.try_into().ok()).map(Value::I32)
            }
            Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => {
                integer(json).and_then(|v| v.try_into().ok()).map(Value::I64)
            }
            Kind::Uint32 | Kind::Fixed32 => integer(json).and_then(|v| v.try_into().ok()).map(Value::U32),
            Kind::Uint64 | Kind::Fixed64 => integer(json).and_then(|v| v.try_into().ok()).map(Value::U64),
            Kind::Float => float(json).map(narrow).map(Value::F32),
            Kind::Double => float(json).map(Value::F64),
            Kind::Bytes => None,
        };
        if value.is_none() {
            self.wrong_value(field, kind, json);
        }
        value
    }

    fn enum_value(&mut self, field: &FieldDescriptor, values: &EnumDescriptor, json: &Json) -> Option<Value> {
        if let Json::String(name) = json {
            let exact = values.values().find(|value| value.name().eq_ignore_ascii_case(name));
            if let Some(value) = exact {
                return Some(Value::EnumNumber(value.number()));
            }
            let error = ConfigError::new(format!("unknown value \"{name}\" for \"{}\"", field.name()));
            let hint = schema::suggest_enum(values, name).map_or_else(
                || format!("allowed are {}", schema::enum_names(values)),
                |meant| format!("did you mean {meant}?"),
            );
            self.report(error.with_hint(hint));
            return None;
        }
        let number = integer(json).and_then(|v| i32::try_from(v).ok()).map(Value::EnumNumber);
        if number.is_none() {
            self.wrong_value(field, &Kind::Enum(values.clone()), json);
        }
        number
    }

    fn wrong_value(&mut self, field: &FieldDescriptor, kind: &Kind, json: &Json) {
        let takes = match kind {
            Kind::Int32 | Kind::Int64 | Kind::Uint32 | Kind::Uint64 => {
                format!("{} of type {kind:?}", schema::takes(field)).to_lowercase()
            }
            _ => schema::takes(field),
        };
        let error =
            ConfigError::new(format!("expected {takes} for \"{}\", found {}", field.name(), describe(json)));
        let error = match (kind, json) {
            (Kind::Bool, Json::String(text)) if matches!(text.as_str(), "true" | "false") => {
                error.with_hint(format!("write {text} without quotes"))
            }
            (Kind::String, Json::Number(number)) => {
                error.with_hint(format!("put it in quotes: \"{number}\""))
            }
            _ => error,
        };
        self.report(error);
    }
}

/// A whole number, written as a number (with a zero fraction too) or as a string.
fn integer(json: &Json) -> Option<i128> {
    let from_text = |text: &str| text.parse::<i128>().ok();
    match json {
        Json::Number(number) => {
            let exact = number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from));
            exact.or_else(|| number.as_f64().and_then(whole))
        }
        Json::String(text) => from_text(text).or_else(|| text.parse().ok().and_then(whole)),
        _ => None,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the value is whole and below 2^63")]
fn whole(value: f64) -> Option<i128> {
    (value.fract() == 0.0 && value.abs() < 9.2e18).then_some(value as i128)
}

fn float(json: &Json) -> Option<f64> {
    match json {
        Json::Number(number) => number.as_f64(),
        Json::String(text) => match text.as_str() {
            "NaN" => Some(f64::NAN),
            "Infinity" => Some(f64::INFINITY),
            "-Infinity" => Some(f64::NEG_INFINITY),
            text => text.parse().ok().filter(|v: &f64| v.is_finite()),
        },
        _ => None,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "rounding to 32 bits is what a float field does")]
fn narrow(value: f64) -> f32 {
    value as f32
}
