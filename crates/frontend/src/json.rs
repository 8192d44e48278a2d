//! Reading and writing the JSON of the HTTP protocol.
//!
//! The reader walks a body once, without a tree: tensor data goes straight from text into the tensor's bytes. It
//! takes what Triton's parser takes: standard JSON plus bare `NaN`, `Infinity`, `Inf` and their negatives, which the
//! real Python client sends. Of a repeated key the first counts, as in Triton. Nesting is bounded, and nothing is
//! allocated that the text itself does not account for.

mod number;
mod reader;
mod text;
mod writer;

pub(crate) use number::Decimal;
pub(crate) use reader::{Kind, Reader, excerpt};
pub(crate) use writer::Writer;

/// Deepest nesting of arrays and objects, as in Triton.
pub(crate) const MAX_DEPTH: u32 = 100;
