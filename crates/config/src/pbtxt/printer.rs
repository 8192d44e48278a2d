//! A configuration as `config.pbtxt`: only what is set, in the order of the .proto file, in the form that people
//! write and the reference parser reads.

use std::fmt::Write as _;

use prost_reflect::{DynamicMessage, FieldDescriptor, Kind as FieldKind, MapKey, ReflectMessage, Value};
use trireme_proto::inference::ModelConfig;

use crate::number;
use crate::schema;

/// Longest text whose message stays on one line, in bytes.
const MAX_INLINE: usize = 60;

/// The configuration as text. Reading the text gives the same configuration.
pub fn print_pbtxt(config: &ModelConfig) -> String {
    let mut out = String::new();
    print_fields(&schema::dynamic(config), 0, &mut out);
    out
}

fn print_fields(message: &DynamicMessage, depth: usize, out: &mut String) {
    for field in schema::fields_in_order(&message.descriptor()) {
        if !message.has_field(&field) {
            continue;
        }
        let value = message.get_field(&field);
        match value.as_ref() {
            Value::List(items) => print_list(&field, items, depth, out),
            Value::Map(entries) => print_map(&field, entries, depth, out),
            Value::Message(child) => {
                indent(depth, out);
                out.push_str(field.name());
                out.push(' ');
                print_message(child, depth, out);
                out.push('\n');
            }
            scalar => {
                indent(depth, out);
                out.push_str(field.name());
                out.push_str(": ");
                print_scalar(scalar, &field.kind(), out);
                out.push('\n');
            }
        }
    }
}

/// `{ field: 1 }` if it is short, else one field a line.
fn print_message(message: &DynamicMessage, depth: usize, out: &mut String) {
    if message.fields().all(|(field, _)| !message.has_field(&field)) {
        out.push_str("{ }");
    } else if is_short(message) {
        let mut body = String::new();
        print_fields(message, 0, &mut body);
        out.push_str("{ ");
        out.push_str(body.trim_end());
        out.push_str(" }");
    } else {
        out.push_str("{\n");
        print_fields(message, depth + 1, out);
        indent(depth, out);
        out.push('}');
    }
}

/// One field at most, and that a short one.
fn is_short(message: &DynamicMessage) -> bool {
    let mut set = message.fields().filter(|(field, _)| message.has_field(field));
    let only = set.next();
    set.next().is_none()
        && only.is_none_or(|(_, value)| match value {
            Value::Message(child) => is_short(child),
            Value::List(items) => {
                items.len() <= 8 && items.iter().all(|item| !matches!(item, Value::Message(_)))
            }
            Value::Map(_) => false,
            Value::String(text) => text.len() <= MAX_INLINE,
            _ => true,
        })
}

fn print_list(field: &FieldDescriptor, items: &[Value], depth: usize, out: &mut String) {
    indent(depth, out);
    out.push_str(field.name());
    if matches!(field.kind(), FieldKind::Message(_)) {
        out.push_str(" [\n");
        for (i, item) in items.iter().enumerate() {
            let Value::Message(message) = item else { continue };
            indent(depth + 1, out);
            print_message(message, depth + 1, out);
            out.push_str(if i + 1 < items.len() { ",\n" } else { "\n" });
        }
        indent(depth, out);
        out.push_str("]\n");
    } else {
        out.push_str(": [ ");
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                out.push_str(", ");
            }
            print_scalar(item, &field.kind(), out);
        }
        out.push_str(" ]\n");
    }
}

fn print_map(
    field: &FieldDescriptor,
    entries: &std::collections::HashMap<MapKey, Value>,
    depth: usize,
    out: &mut String,
) {
    let FieldKind::Message(entry) = field.kind() else { return };
    for (key, value) in sorted(entries) {
        indent(depth, out);
        out.push_str(field.name());
        out.push_str(" {\n");
        indent(depth + 1, out);
        out.push_str("key: ");
        match key {
            MapKey::String(text) => print_string(text, out),
            MapKey::Bool(v) => print_display(v, out),
            MapKey::I32(v) => print_display(v, out),
            MapKey::I64(v) => print_display(v, out),
            MapKey::U32(v) => print_display(v, out),
            MapKey::U64(v) => print_display(v, out),
        }
        out.push('\n');
        indent(depth + 1, out);
        match value {
            Value::Message(message) => {
                out.push_str("value ");
                print_message(message, depth + 1, out);
            }
            scalar => {
                out.push_str("value: ");
                print_scalar(scalar, &entry.map_entry_value_field().kind(), out);
            }
        }
        out.push('\n');
        indent(depth, out);
        out.push_str("}\n");
    }
}

/// Map entries by key, so that the same configuration gives the same text.
pub(crate) fn sorted(entries: &std::collections::HashMap<MapKey, Value>) -> Vec<(&MapKey, &Value)> {
    let mut entries: Vec<_> = entries.iter().collect();
    entries.sort_by_key(|(key, _)| *key);
    entries
}

fn indent(depth: usize, out: &mut String) {
    for _ in 0..depth {
        out.push_str("  ");
    }
}

fn print_display(value: &impl std::fmt::Display, out: &mut String) {
    // Writing to a String cannot fail.
    let _ = write!(out, "{value}");
}

fn print_scalar(value: &Value, kind: &FieldKind, out: &mut String) {
    match value {
        Value::Bool(v) => print_display(v, out),
        Value::I32(v) => print_display(v, out),
        Value::I64(v) => print_display(v, out),
        Value::U32(v) => print_display(v, out),
        Value::U64(v) => print_display(v, out),
        Value::F32(v) => out.push_str(&number::float32(*v).unwrap_or_else(|| not_finite(f64::from(*v)))),
        Value::F64(v) => out.push_str(&number::float64(*v).unwrap_or_else(|| not_finite(*v))),
        Value::String(text) => print_string(text, out),
        Value::EnumNumber(number) => {
            let name = kind.as_enum().and_then(|values| values.get_value(*number));
            match name {
                Some(name) => out.push_str(name.name()),
                None => print_display(number, out),
            }
        }
        // Lists, maps and messages are printed by their callers; the schema has no bytes.
        Value::Bytes(_) | Value::Message(_) | Value::List(_) | Value::Map(_) => {}
    }
}

fn not_finite(value: f64) -> String {
    let text = if value.is_nan() {
        "nan"
    } else if value > 0.0 {
        "inf"
    } else {
        "-inf"
    };
    text.to_owned()
}

fn print_string(text: &str, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            // Three octal digits always, so that a digit may follow.
            c if c.is_ascii_control() => {
                let _ = write!(out, "\\{:03o}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
}
