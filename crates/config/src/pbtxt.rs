//! `config.pbtxt`: the text format of the `ModelConfig` message, read and written.
//!
//! Reading accepts what the reference parser accepts and nothing else, so that a file that loads here loads in
//! Triton too. What is refused is refused with its place, the reason and a way out; several errors are reported at
//! once where one does not cause the next. The message's descriptor drives everything, no field is listed by hand.
//!
//! Source: protobuf text format language specification; `text_format.cc` and `tokenizer.cc` of protobuf.

mod lexer;
mod literal;
mod parser;
mod printer;
mod problem;
mod value;

use prost_reflect::MessageDescriptor;
use trireme_proto::inference::ModelConfig;

use crate::error::{ConfigError, ConfigErrors, Note};
use crate::schema;
use crate::span::{Source, SpanMap};

pub use printer::print_pbtxt;
pub(crate) use printer::sorted;

/// Largest file that is read, in bytes. The longest real configurations are some hundred KiB.
pub const MAX_PBTXT_BYTES: usize = 16 << 20;

/// A configuration file that was read.
#[derive(Clone, Debug)]
pub struct Parsed {
    pub config: ModelConfig,
    /// Where each member stands, for errors that are found later.
    pub spans: SpanMap,
    /// What is valid but looks like a mistake.
    pub notes: Vec<Note>,
}

/// Reads a `config.pbtxt`. `file` is its name for messages.
///
/// # Errors
/// Every mistake that can be found without guessing, at most twenty, in the order of the file.
pub fn parse_pbtxt(text: &[u8], file: &str) -> Result<Parsed, ConfigErrors> {
    let descriptor = schema::model_config();
    let (message, spans, notes) = parse_message(text, file, &descriptor)?;
    let config = message.transcode_to::<ModelConfig>().map_err(|error| {
        ConfigErrors::from(ConfigError::new(format!("the configuration does not fit its message: {error}")))
            .in_file(file)
    })?;
    Ok(Parsed { config, spans, notes })
}

fn parse_message(
    text: &[u8],
    file: &str,
    descriptor: &MessageDescriptor,
) -> Result<(prost_reflect::DynamicMessage, SpanMap, Vec<Note>), ConfigErrors> {
    let text = decode(text).map_err(|errors| errors.in_file(file))?;
    let source = Source::new(file, text);
    parser::Parser::new(source, text).run(descriptor)
}

/// Checks size and encoding, and takes a UTF-8 byte order mark away.
fn decode(text: &[u8]) -> Result<&[u8], ConfigErrors> {
    if text.len() > MAX_PBTXT_BYTES {
        return Err(ConfigError::new(format!(
            "the file has {} bytes, more than the {MAX_PBTXT_BYTES} that a configuration may have",
            text.len()
        ))
        .into());
    }
    let wide = match text {
        [0xff, 0xfe, 0, 0, ..] | [0, 0, 0xfe, 0xff, ..] => Some("UTF-32"),
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => Some("UTF-16"),
        // UTF-16 without a mark: every other byte of the first word is zero.
        [first, 0, third, 0, ..] if first.is_ascii_graphic() && third.is_ascii() => Some("UTF-16"),
        [0, second, 0, fourth, ..] if second.is_ascii_graphic() && fourth.is_ascii() => Some("UTF-16"),
        _ => None,
    };
    if let Some(encoding) = wide {
        let mark = if matches!(text, [0xff | 0xfe, ..] | [0, 0, 0xfe, ..]) { " BOM" } else { "" };
        return Err(ConfigError::new(format!("file is not UTF-8 (found {encoding}{mark})"))
            .with_hint("save it as UTF-8, or convert it: iconv -f UTF-16 -t UTF-8 config.pbtxt")
            .into());
    }
    Ok(text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text))
}

#[cfg(test)]
mod tests;
