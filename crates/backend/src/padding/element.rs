//! One element of a tensor as bytes.

use half::{bf16, f16};
use smallvec::SmallVec;
use trireme_types::DataType;

/// The little-endian bytes of one element.
pub(super) type Element = SmallVec<[u8; 8]>;

/// Reads a number, or `true` and `false`. `None`: the type has no such element.
pub(super) fn read(data_type: DataType, text: &str) -> Option<Element> {
    let number = match text {
        "true" => "1",
        "false" => "0",
        text => text,
    };
    let bytes: Element = match data_type {
        DataType::Bool => match number {
            "0" => [0].into_iter().collect(),
            "1" => [1].into_iter().collect(),
            _ => return None,
        },
        DataType::Uint8 => collect(number.parse::<u8>().ok()?.to_le_bytes()),
        DataType::Uint16 => collect(number.parse::<u16>().ok()?.to_le_bytes()),
        DataType::Uint32 => collect(number.parse::<u32>().ok()?.to_le_bytes()),
        DataType::Uint64 => collect(number.parse::<u64>().ok()?.to_le_bytes()),
        DataType::Int8 => collect(number.parse::<i8>().ok()?.to_le_bytes()),
        DataType::Int16 => collect(number.parse::<i16>().ok()?.to_le_bytes()),
        DataType::Int32 => collect(number.parse::<i32>().ok()?.to_le_bytes()),
        DataType::Int64 => collect(number.parse::<i64>().ok()?.to_le_bytes()),
        DataType::Fp16 => collect(f16::from_f64(number.parse().ok()?).to_le_bytes()),
        DataType::Bf16 => collect(bf16::from_f64(number.parse().ok()?).to_le_bytes()),
        DataType::Fp32 => collect(number.parse::<f32>().ok()?.to_le_bytes()),
        DataType::Fp64 => collect(number.parse::<f64>().ok()?.to_le_bytes()),
        DataType::Bytes => return None,
    };
    Some(bytes)
}

fn collect<const N: usize>(bytes: [u8; N]) -> Element {
    bytes.into_iter().collect()
}
