//! Message to JSON text.

use std::fmt::Write as _;

use prost_reflect::{DynamicMessage, Kind, MapKey, ReflectMessage, Value};
use trireme_proto::inference::ModelConfig;

use crate::number;
use crate::pbtxt::sorted;
use crate::schema;

/// The configuration as the HTTP `/config` endpoint serves it.
pub fn to_json(config: &ModelConfig) -> String {
    let mut out = String::with_capacity(2048);
    write_message(&schema::dynamic(config), &mut out);
    out
}

fn write_message(message: &DynamicMessage, out: &mut String) {
    out.push('{');
    let mut first = true;
    for field in schema::fields_in_order(&message.descriptor()) {
        if field.supports_presence() && !message.has_field(&field) {
            continue;
        }
        if !first {
            out.push(',');
        }
        first = false;
        write_string(field.name(), out);
        out.push(':');
        write_value(message.get_field(&field).as_ref(), &field.kind(), out);
    }
    out.push('}');
}

fn write_value(value: &Value, kind: &Kind, out: &mut String) {
    match value {
        Value::Bool(v) => display(v, out),
        Value::I32(v) => display(v, out),
        Value::I64(v) => display(v, out),
        Value::U32(v) => display(v, out),
        Value::U64(v) => display(v, out),
        Value::F32(v) => out.push_str(&number::float32(*v).unwrap_or_else(|| not_finite(f64::from(*v)))),
        Value::F64(v) => out.push_str(&number::float64(*v).unwrap_or_else(|| not_finite(*v))),
        Value::String(text) => write_string(text, out),
        Value::EnumNumber(number) => match kind.as_enum().and_then(|values| values.get_value(*number)) {
            Some(name) => write_string(name.name(), out),
            None => display(number, out),
        },
        Value::Message(message) => write_message(message, out),
        Value::List(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push(',');
                }
                write_value(item, kind, out);
            }
            out.push(']');
        }
        Value::Map(entries) => {
            out.push('{');
            let entry = kind.as_message().map(|entry| entry.map_entry_value_field().kind());
            for (i, (key, value)) in sorted(entries).into_iter().enumerate() {
                if i > 0 {
                    out.push(',');
                }
                write_key(key, out);
                out.push(':');
                write_value(value, entry.as_ref().unwrap_or(kind), out);
            }
            out.push('}');
        }
        // The schema has no bytes.
        Value::Bytes(_) => out.push_str("null"),
    }
}

fn write_key(key: &MapKey, out: &mut String) {
    let text = match key {
        MapKey::String(text) => return write_string(text, out),
        MapKey::Bool(v) => v.to_string(),
        MapKey::I32(v) => v.to_string(),
        MapKey::I64(v) => v.to_string(),
        MapKey::U32(v) => v.to_string(),
        MapKey::U64(v) => v.to_string(),
    };
    write_string(&text, out);
}

fn display(value: &impl std::fmt::Display, out: &mut String) {
    // Writing to a String cannot fail.
    let _ = write!(out, "{value}");
}

/// Protobuf's names for what JSON numbers cannot say.
fn not_finite(value: f64) -> String {
    let text = if value.is_nan() {
        "\"NaN\""
    } else if value > 0.0 {
        "\"Infinity\""
    } else {
        "\"-Infinity\""
    };
    text.to_owned()
}

fn write_string(text: &str, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if u32::from(c) < 0x20 => {
                let _ = write!(out, "\\u{:04X}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
}
