//! Values made up for an input: zeros, or numbers that look random and are the same in every run.

use anyhow::{Context as _, Result, bail};
use half::{bf16, f16};
use trireme_types::{DataType, Shape};

use super::metadata::TensorMetadata;
use super::tensor;

/// Letters of a random string.
const LETTERS: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fill {
    /// Zeros, false, empty strings.
    Zeros,
    /// Floats from 0 to 1, integers from 0 to 99, both truth values, strings of eight letters.
    Random,
}

/// A tensor of the given shape, or of the model's with every open dimension 1.
///
/// # Errors
/// The shape is larger than a request can be.
pub(super) fn fill(input: &TensorMetadata, shape: Option<&Shape>, fill: Fill) -> Result<(Shape, Vec<u8>)> {
    let smallest = || input.shape.iter().map(|&dim| if dim < 0 { 1 } else { dim }).collect();
    let shape = shape.cloned().unwrap_or_else(smallest);
    let count = shape.element_count().with_context(|| format!("the shape {shape} is no tensor's"))?;
    let each = input.data_type.byte_size().unwrap_or(4 + LETTERS);
    let Some(size) = count.checked_mul(each).filter(|size| *size <= tensor::MAX_BYTES) else {
        bail!("the shape {shape} is larger than the {} bytes of a request", tensor::MAX_BYTES)
    };
    let bytes = match (fill, input.data_type.byte_size()) {
        (Fill::Zeros, Some(_)) => vec![0; size],
        (Fill::Zeros, None) => vec![0; count * 4],
        (Fill::Random, _) => {
            let mut numbers = Numbers::of(&input.name);
            let mut bytes = Vec::with_capacity(size);
            (0..count).for_each(|_| numbers.push(input.data_type, &mut bytes));
            bytes
        }
    };
    Ok((shape, bytes))
}

/// SplitMix64, started from the name of the input.
struct Numbers(u64);

impl Numbers {
    fn of(name: &str) -> Self {
        let start = 0xcbf2_9ce4_8422_2325;
        Self(name.bytes().fold(start, |state, byte| (state ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From 0 to 1, with as many bits as an FP32 holds.
    fn fraction(&mut self) -> f32 {
        let [a, b, ..] = self.next().to_le_bytes();
        let [c, ..] = self.next().to_le_bytes();
        // 24 bits, which an FP32 holds exactly.
        f32::from(u16::from_le_bytes([a, b])) / 65536.0 + f32::from(c) / 16_777_216.0
    }

    fn push(&mut self, data_type: DataType, bytes: &mut Vec<u8>) {
        match data_type {
            DataType::Fp16 => bytes.extend(f16::from_f32(self.fraction()).to_le_bytes()),
            DataType::Bf16 => bytes.extend(bf16::from_f32(self.fraction()).to_le_bytes()),
            DataType::Fp32 => bytes.extend(self.fraction().to_le_bytes()),
            DataType::Fp64 => bytes.extend(f64::from(self.fraction()).to_le_bytes()),
            DataType::Bool => bytes.extend((self.next() % 2).to_le_bytes().first()),
            DataType::Bytes => {
                bytes.extend([8, 0, 0, 0]);
                let letters = self.next().to_le_bytes();
                bytes.extend(letters.map(|byte| b'a' + byte % 26));
            }
            integer => {
                let size = integer.byte_size().unwrap_or(0);
                bytes.extend((self.next() % 100).to_le_bytes().iter().take(size));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(data_type: DataType, shape: &[i64]) -> TensorMetadata {
        TensorMetadata { name: "x".to_owned(), data_type, shape: Shape::new(shape) }
    }

    #[test]
    fn fills_every_data_type() {
        for data_type in DataType::ALL {
            for kind in [Fill::Zeros, Fill::Random] {
                let (shape, bytes) = fill(&input(data_type, &[-1, 3]), None, kind).expect("small");
                assert_eq!(*shape, [1, 3]);
                tensor::check(data_type, &shape, &bytes).expect("whole");
                let again = fill(&input(data_type, &[-1, 3]), None, kind).expect("small");
                assert_eq!(again.1, bytes, "the same in every run");
            }
        }
        let (_, bytes) = fill(&input(DataType::Fp32, &[1000]), None, Fill::Random).expect("small");
        let mut values = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes")));
        assert!(values.all(|value| (0.0..=1.0).contains(&value)));
    }

    #[test]
    fn what_is_too_large_is_refused_before_it_is_made() {
        let huge = Shape::new(&[1 << 40]);
        for kind in [Fill::Zeros, Fill::Random] {
            let error = fill(&input(DataType::Int8, &[-1]), Some(&huge), kind).expect_err("a tebibyte");
            assert!(error.to_string().contains("larger than"), "{error}");
        }
    }
}
