//! The descriptor of `ModelConfig` and the few questions that reading and writing ask of it.

use prost_reflect::{DynamicMessage, EnumDescriptor, FieldDescriptor, Kind, MessageDescriptor, Value};
use trireme_proto::inference::ModelConfig;

use crate::nearest::nearest;

/// Descriptor of `inference.ModelConfig`.
#[expect(clippy::expect_used, reason = "the descriptors are compiled into the program")]
pub(crate) fn model_config() -> MessageDescriptor {
    trireme_proto::descriptor_pool()
        .get_message_by_name("inference.ModelConfig")
        .expect("inference.ModelConfig is part of the compiled-in descriptors")
}

/// A configuration as a message whose fields can be walked.
#[expect(clippy::expect_used, reason = "both sides are made from the same descriptors")]
pub(crate) fn dynamic(config: &ModelConfig) -> DynamicMessage {
    let mut message = DynamicMessage::new(model_config());
    message.transcode_from(config).expect("a ModelConfig decodes as the message it was generated from");
    message
}

/// Fields in the order of the .proto file, which is the order in which Triton prints them.
pub(crate) fn fields_in_order(message: &MessageDescriptor) -> Vec<FieldDescriptor> {
    let numbers = message.descriptor_proto().field.iter().filter_map(|f| u32::try_from(f.number()).ok());
    numbers.filter_map(|number| message.get_field(number)).collect()
}

/// Value of a message field with defaults filled in.
pub(crate) fn string_field(message: &DynamicMessage, name: &str) -> Option<String> {
    match message.get_field_by_name(name)?.as_ref() {
        Value::String(text) if !text.is_empty() => Some(text.clone()),
        _ => None,
    }
}

/// What a field takes, in words: `int32`, `a DataType name such as TYPE_FP32`, `true or false`.
pub(crate) fn takes(field: &FieldDescriptor) -> String {
    match field.kind() {
        Kind::Message(message) => format!("a {} message in {{ }}", message.name()),
        Kind::Enum(values) => format!("one of {}", enum_names(&values)),
        Kind::Bool => "true or false".to_owned(),
        Kind::String => "a quoted string".to_owned(),
        Kind::Float | Kind::Double => "a number".to_owned(),
        Kind::Uint32 | Kind::Uint64 => "an integer that is not negative".to_owned(),
        _ => "an integer".to_owned(),
    }
}

/// Names of an enum for a message.
pub(crate) fn enum_names(values: &EnumDescriptor) -> String {
    let names: Vec<String> =
        values.values().map(|v| v.name().to_owned()).filter(|n| n != "TYPE_INVALID").collect();
    names.join(", ")
}

/// The enum name that a wrong spelling means: `FP32`, `float32`, `type_fp32` or `"TYPE_FP32"` for `TYPE_FP32`, `CPU`
/// for `KIND_CPU`.
pub(crate) fn suggest_enum(values: &EnumDescriptor, word: &str) -> Option<String> {
    let names: Vec<String> = values.values().map(|v| v.name().to_owned()).collect();
    if let Some(exact) = names.iter().find(|name| name.eq_ignore_ascii_case(word)) {
        return Some(exact.clone());
    }
    if values.name() == "DataType"
        && let Some(name) = data_type_alias(word)
    {
        return Some(name.to_owned());
    }
    let upper = word.to_ascii_uppercase();
    let tail = |name: &&String| name.strip_suffix(&upper).is_some_and(|head| head.ends_with('_'));
    if !upper.is_empty()
        && let Some(name) = names.iter().find(tail)
    {
        return Some(name.clone());
    }
    nearest(word, names.iter().map(String::as_str)).map(str::to_owned)
}

/// What other frameworks call the data types.
fn data_type_alias(word: &str) -> Option<&'static str> {
    let word = word.to_ascii_lowercase();
    let bare = ["torch.", "np.", "numpy.", "tf.", "dt_", "type_"].iter().find_map(|p| word.strip_prefix(p));
    Some(match bare.unwrap_or(&word) {
        "float" | "float32" | "fp32" | "f32" | "single" => "TYPE_FP32",
        "double" | "float64" | "fp64" | "f64" => "TYPE_FP64",
        "half" | "float16" | "fp16" | "f16" => "TYPE_FP16",
        "bfloat16" | "bf16" => "TYPE_BF16",
        "int" | "int32" | "i32" => "TYPE_INT32",
        "long" | "int64" | "i64" => "TYPE_INT64",
        "short" | "int16" | "i16" => "TYPE_INT16",
        "char" | "int8" | "i8" => "TYPE_INT8",
        "byte" | "uint8" | "u8" => "TYPE_UINT8",
        "uint16" | "u16" => "TYPE_UINT16",
        "uint32" | "u32" => "TYPE_UINT32",
        "uint64" | "u64" => "TYPE_UINT64",
        "bool" | "boolean" => "TYPE_BOOL",
        "string" | "str" | "bytes" | "object" => "TYPE_STRING",
        _ => return None,
    })
}

/// The field name that a wrong one means.
pub(crate) fn suggest_field(message: &MessageDescriptor, word: &str) -> Option<String> {
    let by_json = message.get_field_by_json_name(word).map(|field| field.name().to_owned());
    by_json.or_else(|| {
        let names: Vec<String> = message.fields().map(|field| field.name().to_owned()).collect();
        nearest(word, names.iter().map(String::as_str)).map(str::to_owned)
    })
}

/// Field names of a message, for a message.
pub(crate) fn field_names(message: &MessageDescriptor) -> String {
    let names: Vec<String> = fields_in_order(message).iter().map(|field| field.name().to_owned()).collect();
    names.join(", ")
}

/// Adds to each error below `input[i]`, `output[i]` and so on the name that the member has in the message, so that a
/// person who counts tensors by name finds it.
pub(crate) fn name_subjects(message: &DynamicMessage, errors: &mut [crate::error::ConfigError]) {
    for error in errors.iter_mut().filter(|error| error.subject.is_none()) {
        let Some((field, rest)) = error.path.as_deref().and_then(|path| path.split_once('[')) else {
            continue;
        };
        let Some(index) = rest.split(']').next().and_then(|n| n.parse::<usize>().ok()) else { continue };
        let Some(list) = message.get_field_by_name(field) else { continue };
        let Some(item) = list.as_list().and_then(|items| items.get(index)).and_then(Value::as_message) else {
            continue;
        };
        if let Some(name) = string_field(item, "name") {
            error.subject = Some(format!("{field} '{name}'"));
        }
    }
}
