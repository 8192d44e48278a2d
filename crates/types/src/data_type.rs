//! The tensor element types that the protocol and the model configuration can name.

use std::fmt;
use std::str::FromStr;

/// Element type of a tensor, by its wire name (`FP32`, `BYTES`, ...).
///
/// Source: KServe v2 "Tensor Data Types"; the configuration spells the same types `TYPE_FP32`, `TYPE_STRING`, ...
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DataType {
    Bool,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
    Int8,
    Int16,
    Int32,
    Int64,
    Fp16,
    Fp32,
    Fp64,
    /// Variable-length byte strings, each with a 4-byte little-endian length in front on the wire.
    Bytes,
    Bf16,
}

impl DataType {
    /// Every data type, in the order of the configuration's `DataType` enum.
    pub const ALL: [Self; 14] = [
        Self::Bool,
        Self::Uint8,
        Self::Uint16,
        Self::Uint32,
        Self::Uint64,
        Self::Int8,
        Self::Int16,
        Self::Int32,
        Self::Int64,
        Self::Fp16,
        Self::Fp32,
        Self::Fp64,
        Self::Bytes,
        Self::Bf16,
    ];

    /// Size of one element in bytes; `None` for [`DataType::Bytes`], whose elements differ in length.
    pub const fn byte_size(self) -> Option<usize> {
        match self {
            Self::Bool | Self::Uint8 | Self::Int8 => Some(1),
            Self::Uint16 | Self::Int16 | Self::Fp16 | Self::Bf16 => Some(2),
            Self::Uint32 | Self::Int32 | Self::Fp32 => Some(4),
            Self::Uint64 | Self::Int64 | Self::Fp64 => Some(8),
            Self::Bytes => None,
        }
    }

    /// The name used by the HTTP and gRPC protocols, as `FP32` or `BYTES`.
    pub const fn wire_name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::Uint8 => "UINT8",
            Self::Uint16 => "UINT16",
            Self::Uint32 => "UINT32",
            Self::Uint64 => "UINT64",
            Self::Int8 => "INT8",
            Self::Int16 => "INT16",
            Self::Int32 => "INT32",
            Self::Int64 => "INT64",
            Self::Fp16 => "FP16",
            Self::Fp32 => "FP32",
            Self::Fp64 => "FP64",
            Self::Bytes => "BYTES",
            Self::Bf16 => "BF16",
        }
    }

    /// The name used by `config.pbtxt`, as `TYPE_FP32` or `TYPE_STRING`.
    pub const fn config_name(self) -> &'static str {
        match self {
            Self::Bool => "TYPE_BOOL",
            Self::Uint8 => "TYPE_UINT8",
            Self::Uint16 => "TYPE_UINT16",
            Self::Uint32 => "TYPE_UINT32",
            Self::Uint64 => "TYPE_UINT64",
            Self::Int8 => "TYPE_INT8",
            Self::Int16 => "TYPE_INT16",
            Self::Int32 => "TYPE_INT32",
            Self::Int64 => "TYPE_INT64",
            Self::Fp16 => "TYPE_FP16",
            Self::Fp32 => "TYPE_FP32",
            Self::Fp64 => "TYPE_FP64",
            Self::Bytes => "TYPE_STRING",
            Self::Bf16 => "TYPE_BF16",
        }
    }

    /// The number in the configuration's `DataType` enum (`TYPE_BOOL` is 1, `TYPE_INVALID` 0 has no counterpart).
    pub const fn config_number(self) -> i32 {
        match self {
            Self::Bool => 1,
            Self::Uint8 => 2,
            Self::Uint16 => 3,
            Self::Uint32 => 4,
            Self::Uint64 => 5,
            Self::Int8 => 6,
            Self::Int16 => 7,
            Self::Int32 => 8,
            Self::Int64 => 9,
            Self::Fp16 => 10,
            Self::Fp32 => 11,
            Self::Fp64 => 12,
            Self::Bytes => 13,
            Self::Bf16 => 14,
        }
    }

    /// The type with that number in the configuration's enum; `None` for `TYPE_INVALID` and unknown numbers.
    pub fn from_config_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.config_number() == number)
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.wire_name())
    }
}

/// The text is not the wire name of a data type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown datatype, expected one of BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64, FP16, FP32, FP64, BYTES, BF16"
)]
pub struct UnknownDataType;

impl FromStr for DataType {
    type Err = UnknownDataType;

    fn from_str(name: &str) -> Result<Self, UnknownDataType> {
        Self::ALL.into_iter().find(|t| t.wire_name() == name).ok_or(UnknownDataType)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_round_trip() {
        for data_type in DataType::ALL {
            assert_eq!(data_type.wire_name().parse(), Ok(data_type));
            assert_eq!(DataType::from_config_number(data_type.config_number()), Some(data_type));
        }
        assert_eq!("fp32".parse::<DataType>(), Err(UnknownDataType));
        assert_eq!(DataType::from_config_number(0), None);
    }
}
