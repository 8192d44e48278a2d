//! A configuration as the JSON of the `/config` endpoint, and back.
//!
//! Out: proto field names in the order of the .proto file, defaults printed, unset messages and oneof members left
//! out, enums by name, and every 64-bit integer a JSON number (Triton leaves a few of them strings).
//! In: the rules of protobuf JSON: both name styles, integers as numbers or strings, enum names in any case or
//! numbers, `null` as absent. Unknown members are refused by name.
//!
//! Source: `ModelConfigToJson`, `JsonToModelConfig` in Triton's `model_config_utils.cc`.

mod read;
mod write;

pub use read::from_json;
pub use write::to_json;

#[cfg(test)]
mod tests;
