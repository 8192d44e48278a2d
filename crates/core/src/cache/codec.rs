//! An answer as bytes, for a cache outside the process.
//!
//! All numbers are little-endian. `TRC1`, the key (32 bytes), the number of parameters and of outputs (u32 each), the
//! parameters, the head of each output, then the tensors, each at a multiple of 8 from the beginning. Text is a u32
//! length and UTF-8. Whoever can write to that cache can write anything: reading checks every length before it takes
//! memory, and whether the tensors are what their heads say; what does not fit is no answer.

use std::sync::Arc;

use bytes::Bytes;
use trireme_types::{DataType, InferResponse, OutputTensor, ParameterValue, Parameters, Shape, TensorBuffer};

use super::answer::Answer;
use super::key::Key;

const MAGIC: &[u8; 4] = b"TRC1";
const ALIGNMENT: usize = 8;
/// Dimensions of a tensor, far above any model.
const MAX_RANK: usize = 64;

/// The bytes of an answer; `None` if there are more than `limit`.
pub(super) fn encode(key: &Key, response: &InferResponse, limit: usize) -> Option<Vec<u8>> {
    let tensors =
        response.outputs.iter().try_fold(0_usize, |sum, output| sum.checked_add(output.data.len()))?;
    if tensors > limit {
        return None;
    }
    let mut out = Vec::with_capacity(tensors + 256);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(key.as_bytes());
    put_len(&mut out, response.parameters.len())?;
    put_len(&mut out, response.outputs.len())?;
    for (name, value) in response.parameters.iter() {
        put_text(&mut out, name)?;
        match value {
            ParameterValue::Bool(value) => out.extend_from_slice(&[0, u8::from(*value)]),
            ParameterValue::Int(value) => put_number(&mut out, 1, value.to_le_bytes()),
            ParameterValue::Uint(value) => put_number(&mut out, 2, value.to_le_bytes()),
            ParameterValue::Double(value) => put_number(&mut out, 3, value.to_bits().to_le_bytes()),
            ParameterValue::String(value) => {
                out.push(4);
                put_text(&mut out, value)?;
            }
        }
    }
    for output in &response.outputs {
        put_text(&mut out, &output.name)?;
        out.push(u8::try_from(output.data_type.config_number()).ok()?);
        put_len(&mut out, output.shape.len())?;
        for dim in output.shape.iter() {
            out.extend_from_slice(&dim.to_le_bytes());
        }
        out.extend_from_slice(&(output.data.len() as u64).to_le_bytes());
    }
    for output in &response.outputs {
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out.extend_from_slice(output.data.as_slice());
    }
    (out.len() <= limit).then_some(out)
}

fn put_len(out: &mut Vec<u8>, len: usize) -> Option<()> {
    out.extend_from_slice(&u32::try_from(len).ok()?.to_le_bytes());
    Some(())
}

fn put_text(out: &mut Vec<u8>, text: &str) -> Option<()> {
    put_len(out, text.len())?;
    out.extend_from_slice(text.as_bytes());
    Some(())
}

fn put_number(out: &mut Vec<u8>, kind: u8, bytes: [u8; 8]) {
    out.push(kind);
    out.extend_from_slice(&bytes);
}

/// The answer in some bytes, its tensors slices of them; `None` unless they are exactly an answer to that key.
pub(super) fn decode(key: &Key, bytes: Vec<u8>) -> Option<Answer> {
    let bytes = Bytes::from(bytes);
    let mut reader = Reader { bytes: &bytes, at: 0 };
    if reader.take(4)? != MAGIC || reader.take(32)? != key.as_bytes() {
        return None;
    }
    let (parameter_count, output_count) = (reader.len()?, reader.len()?);
    let mut parameters = Parameters::default();
    for _ in 0..parameter_count {
        let name = reader.text()?;
        let value = match reader.byte()? {
            0 => ParameterValue::Bool(reader.byte()? != 0),
            1 => ParameterValue::Int(i64::from_le_bytes(reader.number()?)),
            2 => ParameterValue::Uint(u64::from_le_bytes(reader.number()?)),
            3 => ParameterValue::Double(f64::from_bits(u64::from_le_bytes(reader.number()?))),
            4 => ParameterValue::String(reader.text()?.to_owned()),
            _ => return None,
        };
        parameters.insert(name, value);
    }
    let mut heads = Vec::new();
    for _ in 0..output_count {
        heads.push(Head::read(&mut reader)?);
    }
    let mut outputs = Vec::with_capacity(heads.len());
    for head in heads {
        reader.align()?;
        let start = reader.at;
        let data = reader.take(head.bytes)?;
        if !head.fits(data) {
            return None;
        }
        let place = start..reader.at;
        outputs.push(OutputTensor {
            name: head.name,
            data_type: head.data_type,
            shape: head.shape,
            data: TensorBuffer::from(bytes.slice(place)),
        });
    }
    (reader.at == bytes.len()).then(|| Answer::new(outputs, parameters))
}

/// What stands of an output before the tensors.
struct Head {
    name: Arc<str>,
    data_type: DataType,
    shape: Shape,
    bytes: usize,
}

impl Head {
    fn read(reader: &mut Reader<'_>) -> Option<Self> {
        let name = Arc::from(reader.text()?);
        let data_type = DataType::from_config_number(reader.byte()?.into())?;
        let rank = reader.len().filter(|rank| *rank <= MAX_RANK)?;
        let mut shape = Shape::default();
        for _ in 0..rank {
            shape.push(i64::from_le_bytes(reader.number()?));
        }
        let bytes = usize::try_from(u64::from_le_bytes(reader.number()?)).ok()?;
        Some(Self { name, data_type, shape, bytes })
    }

    fn fits(&self, data: &[u8]) -> bool {
        match (self.shape.byte_size(self.data_type), self.shape.element_count()) {
            (Ok(Some(bytes)), _) => bytes == data.len(),
            (Ok(None), Ok(elements)) => is_strings(data, elements),
            _ => false,
        }
    }
}

/// Whether the bytes are that many whole elements of a BYTES tensor.
fn is_strings(mut data: &[u8], elements: usize) -> bool {
    let mut found = 0;
    while let Some((length, rest)) = data.split_first_chunk::<4>() {
        let Some(rest) = rest.get(u32::from_le_bytes(*length) as usize..) else { return false };
        data = rest;
        found += 1;
    }
    data.is_empty() && found == elements
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let end = self.at.checked_add(len)?;
        let taken = self.bytes.get(self.at..end)?;
        self.at = end;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take(1)?.first().copied()
    }

    fn number(&mut self) -> Option<[u8; 8]> {
        self.take(8)?.try_into().ok()
    }

    fn len(&mut self) -> Option<usize> {
        let bytes: [u8; 4] = self.take(4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    }

    fn text(&mut self) -> Option<&'a str> {
        let len = self.len()?;
        std::str::from_utf8(self.take(len)?).ok()
    }

    fn align(&mut self) -> Option<()> {
        let padding = self.at.checked_next_multiple_of(ALIGNMENT)? - self.at;
        self.take(padding).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::answer::tests::response;
    use super::*;

    fn key() -> Key {
        Key::from_bytes([9; 32])
    }

    fn strings(elements: &[&[u8]]) -> OutputTensor {
        let mut data = Vec::new();
        for element in elements {
            data.extend_from_slice(&u32::try_from(element.len()).expect("small").to_le_bytes());
            data.extend_from_slice(element);
        }
        OutputTensor {
            name: Arc::from("text"),
            data_type: DataType::Bytes,
            shape: Shape::new(&[i64::try_from(elements.len()).expect("small")]),
            data: data.into(),
        }
    }

    fn sample() -> InferResponse {
        let mut sample = response(&[b"abc", b"", b"0123456789"]);
        sample.outputs.push(strings(&[b"one", b"", b"three"]));
        for (name, value) in [
            ("bool", ParameterValue::Bool(true)),
            ("int", ParameterValue::Int(-1)),
            ("uint", ParameterValue::Uint(u64::MAX)),
            ("double", ParameterValue::Double(0.5)),
            ("string", ParameterValue::String("text".into())),
        ] {
            sample.parameters.insert(name, value);
        }
        sample
    }

    #[test]
    fn reads_what_was_written() {
        let sample = sample();
        let bytes = encode(&key(), &sample, 1000).expect("small");
        let length = bytes.len();
        let again = decode(&key(), bytes.clone()).expect("an answer").for_request("id".into());
        assert_eq!((again.id.as_str(), &again.parameters), ("id", &sample.parameters));
        assert_eq!(again.outputs.len(), sample.outputs.len());
        for (got, want) in again.outputs.iter().zip(&sample.outputs) {
            assert_eq!((&got.name, got.data_type, &got.shape), (&want.name, want.data_type, &want.shape));
            assert_eq!(got.data.as_slice(), want.data.as_slice());
        }
        assert!(decode(&Key::from_bytes([8; 32]), bytes).is_none(), "another request's answer");
        assert!(encode(&key(), &sample, length - 1).is_none());
        assert!(encode(&key(), &sample, length).is_some());
    }

    #[test]
    fn tensors_that_are_not_what_they_say_are_no_answer() {
        let with = |output: OutputTensor| {
            let response =
                InferResponse { outputs: [output].into_iter().collect(), ..InferResponse::default() };
            decode(&key(), encode(&key(), &response, 1000).expect("small"))
        };
        let good = strings(&[b"one", b"two"]);
        assert!(with(good.clone()).is_some());
        assert!(with(OutputTensor { shape: Shape::new(&[3]), ..good.clone() }).is_none());
        assert!(with(OutputTensor { shape: Shape::new(&[-2]), ..good.clone() }).is_none());
        assert!(
            with(OutputTensor { data: good.data.slice(0..good.data.len() - 1), ..good.clone() }).is_none()
        );
        assert!(with(OutputTensor { data_type: DataType::Fp32, ..good.clone() }).is_none());
        assert!(with(OutputTensor { shape: Shape::new(&[i64::MAX, i64::MAX]), ..good }).is_none());
    }

    proptest! {
        /// Bytes that somebody changed, cut or made up are no answer or a whole one, and never a panic.
        #[test]
        fn survives_any_bytes(at in 0_usize..400, value in any::<u8>(), cut in 0_usize..400, noise in any::<bool>()) {
            let mut bytes = encode(&key(), &sample(), 1000).expect("small");
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
            let whole = bytes.len();
            if noise {
                bytes.truncate(cut);
            }
            let shorter = bytes.len() < whole;
            let answer = decode(&key(), bytes);
            prop_assert!(!(shorter && answer.is_some()), "a part is no answer");
        }
    }
}
