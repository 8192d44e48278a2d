//! Element types: ONNX's numbers and names beside the data types of the protocol.

use trireme_types::DataType;

/// `ONNXTensorElementDataType` as a number: libraries newer than our headers have types that our enum lacks, and an
/// enum of an unknown value must not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Element(pub(crate) i32);

/// Names by number, from 0 on.
const NAMES: [&str; 27] = [
    "undefined",
    "float",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "int32",
    "int64",
    "string",
    "bool",
    "float16",
    "double",
    "uint32",
    "uint64",
    "complex64",
    "complex128",
    "bfloat16",
    "float8e4m3fn",
    "float8e4m3fnuz",
    "float8e5m2",
    "float8e5m2fnuz",
    "uint4",
    "int4",
    "float4e2m1",
    "uint2",
    "int2",
    "float8e8m0",
];

impl Element {
    /// The protocol's type; `None` for types that it cannot carry.
    pub(crate) fn data_type(self) -> Option<DataType> {
        Some(match self.0 {
            1 => DataType::Fp32,
            2 => DataType::Uint8,
            3 => DataType::Int8,
            4 => DataType::Uint16,
            5 => DataType::Int16,
            6 => DataType::Int32,
            7 => DataType::Int64,
            8 => DataType::Bytes,
            9 => DataType::Bool,
            10 => DataType::Fp16,
            11 => DataType::Fp64,
            12 => DataType::Uint32,
            13 => DataType::Uint64,
            16 => DataType::Bf16,
            _ => return None,
        })
    }

    /// ONNX's name of the type.
    pub(crate) fn name(self) -> String {
        let name = usize::try_from(self.0).ok().and_then(|n| NAMES.get(n));
        name.map_or_else(|| format!("type {}", self.0), |name| (*name).to_owned())
    }
}

/// The C API's enum value of a data type, for calls that take one.
pub(crate) fn raw(data_type: DataType) -> ort_sys::ONNXTensorElementDataType {
    use ort_sys::ONNXTensorElementDataType as T;
    match data_type {
        DataType::Fp32 => T::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        DataType::Uint8 => T::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,
        DataType::Int8 => T::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8,
        DataType::Uint16 => T::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16,
        DataType::Int16 => T::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16,
        DataType::Int32 => T::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,
        DataType::Int64 => T::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
        DataType::Bytes => T::ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING,
        DataType::Bool => T::ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL,
        DataType::Fp16 => T::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
        DataType::Fp64 => T::ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE,
        DataType::Uint32 => T::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32,
        DataType::Uint64 => T::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64,
        DataType::Bf16 => T::ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_data_type_has_a_number_and_back() {
        for data_type in DataType::ALL {
            assert_eq!(Element(raw(data_type) as i32).data_type(), Some(data_type));
        }
        for unsupported in [0, 14, 15, 17, 22, 26, 27, -1] {
            assert_eq!(Element(unsupported).data_type(), None);
        }
        assert_eq!(Element(17).name(), "float8e4m3fn");
        assert_eq!(Element(99).name(), "type 99");
    }
}
