//! The hand-written codec against the one prost derives from the same declaration.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// What prost derives for the message; the hand-written codec must agree with it on every input.
#[derive(Clone, PartialEq, prost::Message)]
struct Derived {
    #[prost(bool, repeated, tag = "1")]
    bool_contents: Vec<bool>,
    #[prost(int32, repeated, tag = "2")]
    int_contents: Vec<i32>,
    #[prost(int64, repeated, tag = "3")]
    int64_contents: Vec<i64>,
    #[prost(uint32, repeated, tag = "4")]
    uint_contents: Vec<u32>,
    #[prost(uint64, repeated, tag = "5")]
    uint64_contents: Vec<u64>,
    #[prost(float, repeated, tag = "6")]
    fp32_contents: Vec<f32>,
    #[prost(double, repeated, tag = "7")]
    fp64_contents: Vec<f64>,
    #[prost(bytes = "bytes", repeated, tag = "8")]
    bytes_contents: Vec<Bytes>,
}

/// The same lists in the old encoding: a key before every value.
#[derive(Clone, PartialEq, prost::Message)]
struct Unpacked {
    #[prost(bool, repeated, packed = "false", tag = "1")]
    bool_contents: Vec<bool>,
    #[prost(int32, repeated, packed = "false", tag = "2")]
    int_contents: Vec<i32>,
    #[prost(int64, repeated, packed = "false", tag = "3")]
    int64_contents: Vec<i64>,
    #[prost(uint32, repeated, packed = "false", tag = "4")]
    uint_contents: Vec<u32>,
    #[prost(uint64, repeated, packed = "false", tag = "5")]
    uint64_contents: Vec<u64>,
    #[prost(float, repeated, packed = "false", tag = "6")]
    fp32_contents: Vec<f32>,
    #[prost(double, repeated, packed = "false", tag = "7")]
    fp64_contents: Vec<f64>,
    #[prost(bytes = "bytes", repeated, tag = "8")]
    bytes_contents: Vec<Bytes>,
}

prop_compose! {
    fn derived()(
        bool_contents in vec(any::<bool>(), 0..40),
        int_contents in vec(any::<i32>(), 0..40),
        int64_contents in vec(any::<i64>(), 0..40),
        uint_contents in vec(any::<u32>(), 0..40),
        uint64_contents in vec(any::<u64>(), 0..40),
        fp32_contents in vec(any::<f32>(), 0..1200),
        fp64_contents in vec(any::<f64>(), 0..40),
        bytes_contents in vec(vec(any::<u8>(), 0..20).prop_map(Bytes::from), 0..10),
    ) -> Derived {
        Derived {
            bool_contents, int_contents, int64_contents, uint_contents, uint64_contents,
            fp32_contents, fp64_contents, bytes_contents,
        }
    }
}

fn unpacked(message: Derived) -> Unpacked {
    Unpacked {
        bool_contents: message.bool_contents,
        int_contents: message.int_contents,
        int64_contents: message.int64_contents,
        uint_contents: message.uint_contents,
        uint64_contents: message.uint64_contents,
        fp32_contents: message.fp32_contents,
        fp64_contents: message.fp64_contents,
        bytes_contents: message.bytes_contents,
    }
}

/// `bytes` as a buffer of two pieces, so that values lie across the seam.
fn in_two_pieces(bytes: &[u8], seam: usize) -> impl Buf + '_ {
    let (head, tail) = bytes.split_at(seam);
    head.chain(tail)
}

/// A tag from 0 to 9 with any wire type and a short payload, so that most inputs come close to a message.
fn near_message() -> impl Strategy<Value = Vec<u8>> {
    vec((0u8..10, 0u8..8, 0u8..40, vec(any::<u8>(), 0..40)), 0..4).prop_map(|fields| {
        let mut bytes = Vec::new();
        for (tag, wire_type, len, payload) in fields {
            bytes.push(tag << 3 | wire_type);
            bytes.push(len);
            bytes.extend(payload);
        }
        bytes
    })
}

proptest! {
    #[test]
    fn decodes_what_prost_encodes(message in derived(), seam in any::<proptest::sample::Index>()) {
        let encoded = message.encode_to_vec();
        let whole = InferTensorContents::decode(encoded.as_slice()).unwrap();
        // Encoded again because NaN differs from itself.
        prop_assert_eq!(&whole.encode_to_vec(), &encoded);
        prop_assert_eq!(whole.encoded_len(), encoded.len());

        let pieces = in_two_pieces(&encoded, seam.index(encoded.len() + 1));
        prop_assert_eq!(&InferTensorContents::decode(pieces).unwrap().encode_to_vec(), &encoded);
    }

    #[test]
    fn decodes_unpacked_lists(message in derived()) {
        let packed = message.encode_to_vec();
        let encoded = unpacked(message).encode_to_vec();
        prop_assert_eq!(InferTensorContents::decode(encoded.as_slice()).unwrap().encode_to_vec(), packed);
    }

    #[test]
    fn a_list_may_come_in_parts(first in derived(), second in derived()) {
        let mut encoded = first.encode_to_vec();
        encoded.extend(unpacked(second).encode_to_vec());
        let expected = Derived::decode(encoded.as_slice()).unwrap().encode_to_vec();
        prop_assert_eq!(InferTensorContents::decode(encoded.as_slice()).unwrap().encode_to_vec(), expected);
    }

    #[test]
    fn truncated_data_is_refused_where_prost_refuses_it(
        message in derived(), cut in any::<proptest::sample::Index>(), seam in any::<proptest::sample::Index>(),
    ) {
        let encoded = message.encode_to_vec();
        let encoded = &encoded[..cut.index(encoded.len() + 1)];
        let pieces = in_two_pieces(encoded, seam.index(encoded.len() + 1));
        match Derived::decode(encoded) {
            Ok(expected) => {
                prop_assert_eq!(InferTensorContents::decode(pieces).unwrap().encode_to_vec(), expected.encode_to_vec());
            }
            Err(_) => prop_assert!(InferTensorContents::decode(pieces).is_err()),
        }
    }

    #[test]
    fn agrees_with_prost_on_noise(bytes in near_message()) {
        match Derived::decode(bytes.as_slice()) {
            Ok(expected) => prop_assert_eq!(
                InferTensorContents::decode(bytes.as_slice()).unwrap().encode_to_vec(),
                expected.encode_to_vec()
            ),
            Err(_) => prop_assert!(InferTensorContents::decode(bytes.as_slice()).is_err()),
        }
    }
}

#[test]
fn a_length_beyond_the_data_takes_no_memory() {
    // fp32_contents that claim 2^62 bytes, then one byte.
    let mut encoded = vec![6 << 3 | 2];
    prost::encoding::encode_varint(1 << 62, &mut encoded);
    encoded.push(0);
    let error = InferTensorContents::decode(encoded.as_slice()).unwrap_err().to_string();
    assert!(error.contains("InferTensorContents.fp32_contents"), "{error}");
    assert!(error.contains("but 1 bytes are left"), "{error}");
}

#[test]
fn a_length_that_splits_a_number_is_refused() {
    let error =
        InferTensorContents::decode(&[7 << 3 | 2, 7, 0, 0, 0, 0, 0, 0, 0][..]).unwrap_err().to_string();
    assert!(error.contains("fp64_contents"), "{error}");
    assert!(error.contains("not a multiple of 8"), "{error}");
}

#[test]
fn elements_of_bytes_share_the_buffer() {
    let message =
        InferTensorContents { bytes_contents: vec![Bytes::from_static(&[7; 100])], ..Default::default() };
    let encoded = Bytes::from(message.encode_to_vec());
    let decoded = InferTensorContents::decode(encoded.clone()).unwrap();
    assert!(encoded.as_ptr_range().contains(&decoded.bytes_contents[0].as_ptr()));
}

#[test]
fn clear_empties_every_list() {
    let encoded = [0x0a, 1, 1, 0x12, 1, 1, 0x1a, 1, 1, 0x22, 1, 1, 0x2a, 1, 1, 0x32, 4, 0, 0, 0, 0];
    let mut message = InferTensorContents::decode(&encoded[..]).unwrap();
    message.clear();
    assert_eq!(message, InferTensorContents::default());
}
