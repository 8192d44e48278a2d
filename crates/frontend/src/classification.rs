//! The classification extension: an output turned into its highest values, each as `value:index[:label]`.
//!
//! A model with a batch dimension is classified row by row, and all other axes count as one flat list of values:
//! the index of `[b, c, h, w]` is `(c * H + h) * W + w`. Equal values keep their order, NaN comes last. Both
//! protocols use this; whatever a client asks for, the time is linear in the output and the memory in one row.

use std::cmp::Ordering;
use std::fmt::Write as _;

use trireme_core::Labels;
use trireme_types::{DataType, Error, OutputTensor, Result, Shape};

/// Classes that one response may hold, all rows together.
const MAX_CLASSES: usize = 1_000_000;

/// The `count` highest values of every row of `output`, as a BYTES tensor of shape `[rows, k]` with batching and
/// `[k]` without, `k = min(count, values in a row)`. `labels` names the classes; those past its end have no label.
///
/// # Errors
/// `INVALID_ARG` for BOOL, FP16, BF16 and BYTES outputs and for more than 1,000,000 classes; `INTERNAL` if the
/// bytes of the output do not fit its shape.
pub fn classify(
    output: &OutputTensor,
    count: usize,
    labels: Option<&Labels>,
    batching: bool,
) -> Result<OutputTensor> {
    match output.data_type {
        DataType::Uint8 => classify_as::<u8, 1>(output, count, labels, batching),
        DataType::Uint16 => classify_as::<u16, 2>(output, count, labels, batching),
        DataType::Uint32 => classify_as::<u32, 4>(output, count, labels, batching),
        DataType::Uint64 => classify_as::<u64, 8>(output, count, labels, batching),
        DataType::Int8 => classify_as::<i8, 1>(output, count, labels, batching),
        DataType::Int16 => classify_as::<i16, 2>(output, count, labels, batching),
        DataType::Int32 => classify_as::<i32, 4>(output, count, labels, batching),
        DataType::Int64 => classify_as::<i64, 8>(output, count, labels, batching),
        DataType::Fp32 => classify_as::<f32, 4>(output, count, labels, batching),
        DataType::Fp64 => classify_as::<f64, 8>(output, count, labels, batching),
        unsupported @ (DataType::Bool | DataType::Fp16 | DataType::Bf16 | DataType::Bytes) => {
            Err(Error::invalid_arg(format!(
                "class result not available for output due to unsupported type '{unsupported}'"
            )))
        }
    }
}

/// A value that can be ranked and printed.
trait Score<const SIZE: usize>: Copy {
    fn read(bytes: [u8; SIZE]) -> Self;

    /// Order of results: higher values first, NaN last.
    fn rank(self, other: Self) -> Ordering;

    /// Writes the value as C++ `std::to_string` does.
    fn print(self, text: &mut String);
}

macro_rules! integer_score {
    ($($type:ty),*) => {$(
        impl Score<{ size_of::<$type>() }> for $type {
            fn read(bytes: [u8; size_of::<$type>()]) -> Self {
                Self::from_le_bytes(bytes)
            }

            fn rank(self, other: Self) -> Ordering {
                other.cmp(&self)
            }

            fn print(self, text: &mut String) {
                text.push_str(itoa::Buffer::new().format(self));
            }
        }
    )*};
}

macro_rules! float_score {
    ($($type:ty),*) => {$(
        impl Score<{ size_of::<$type>() }> for $type {
            fn read(bytes: [u8; size_of::<$type>()]) -> Self {
                Self::from_le_bytes(bytes)
            }

            fn rank(self, other: Self) -> Ordering {
                other.partial_cmp(&self).unwrap_or_else(|| self.is_nan().cmp(&other.is_nan()))
            }

            fn print(self, text: &mut String) {
                if self.is_nan() {
                    text.push_str(if self.is_sign_negative() { "-nan" } else { "nan" });
                } else {
                    // Writing to a String cannot fail.
                    let _ = write!(text, "{self:.6}");
                }
            }
        }
    )*};
}

integer_score!(u8, u16, u32, u64, i8, i16, i32, i64);
float_score!(f32, f64);

fn classify_as<T: Score<SIZE>, const SIZE: usize>(
    output: &OutputTensor,
    count: usize,
    labels: Option<&Labels>,
    batching: bool,
) -> Result<OutputTensor> {
    let (elements, _) = output.data.as_slice().as_chunks::<SIZE>();
    if output.shape.byte_size(output.data_type) != Ok(Some(output.data.len())) {
        return Err(Error::internal(format!(
            "output '{}' of shape {} and type {} has {} bytes and cannot be classified",
            output.name,
            output.shape,
            output.data_type,
            output.data.len()
        )));
    }
    let rows = match output.shape.first() {
        Some(&rows) if batching => usize::try_from(rows).unwrap_or_default(),
        _ => 1,
    };
    let row_len = elements.len().checked_div(rows).unwrap_or_default();
    let classes = count.min(row_len);
    if rows.checked_mul(classes).is_none_or(|total| total > MAX_CLASSES) {
        return Err(Error::invalid_arg(format!(
            "classification output tensor too large: {rows} x {classes} classes for output '{}', expected at most \
             {MAX_CLASSES}",
            output.name
        )));
    }

    let mut data = Vec::new();
    let mut text = String::new();
    if classes > 0 {
        let mut ranking = Vec::with_capacity(row_len);
        for row in elements.chunks_exact(row_len) {
            ranking.clear();
            ranking.extend(row.iter().enumerate().map(|(index, bytes)| (T::read(*bytes), index)));
            for &(value, index) in highest(&mut ranking, classes) {
                text.clear();
                value.print(&mut text);
                text.push(':');
                text.push_str(itoa::Buffer::new().format(index));
                if let Some(label) = labels.and_then(|labels| labels.get(index)) {
                    text.push(':');
                    text.push_str(label);
                }
                push_bytes_element(&mut data, text.as_bytes())?;
            }
        }
    }

    let classes = dimension(classes)?;
    let shape = if batching && !output.shape.is_empty() {
        Shape::new(&[dimension(rows)?, classes])
    } else {
        Shape::new(&[classes])
    };
    Ok(OutputTensor { name: output.name.clone(), data_type: DataType::Bytes, shape, data: data.into() })
}

/// The first `count` of a full ranking; only these are sorted. `count` is at least 1 and at most the length.
fn highest<T: Score<SIZE>, const SIZE: usize>(values: &mut [(T, usize)], count: usize) -> &[(T, usize)] {
    let order = |a: &(T, usize), b: &(T, usize)| a.0.rank(b.0).then(a.1.cmp(&b.1));
    if count < values.len() {
        values.select_nth_unstable_by(count - 1, order);
    }
    let Some(best) = values.get_mut(..count) else { return &[] };
    best.sort_unstable_by(order);
    best
}

fn push_bytes_element(data: &mut Vec<u8>, element: &[u8]) -> Result<()> {
    let len = u32::try_from(element.len())
        .map_err(|_| Error::internal(format!("a class label of {} bytes is too long", element.len())))?;
    data.extend_from_slice(&len.to_le_bytes());
    data.extend_from_slice(element);
    Ok(())
}

fn dimension(size: usize) -> Result<i64> {
    i64::try_from(size).map_err(|_| Error::internal(format!("a dimension of {size} is too large")))
}

#[cfg(test)]
mod tests {
    use trireme_types::{Code, TensorBuffer};

    use super::*;

    fn output(data_type: DataType, shape: &[i64], data: Vec<u8>) -> OutputTensor {
        OutputTensor {
            name: "OUT".into(),
            data_type,
            shape: Shape::new(shape),
            data: TensorBuffer::from(data),
        }
    }

    fn fp32(shape: &[i64], values: &[f32]) -> OutputTensor {
        output(DataType::Fp32, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    fn strings(output: &OutputTensor) -> Vec<String> {
        let mut rest = output.data.as_slice();
        let mut strings = Vec::new();
        while let Some((len, tail)) = rest.split_at_checked(4) {
            let len = u32::from_le_bytes(len.try_into().expect("4 bytes")) as usize;
            let (element, tail) = tail.split_at(len);
            strings.push(String::from_utf8(element.to_vec()).expect("text"));
            rest = tail;
        }
        strings
    }

    const BATCH: [f32; 10] = [0.1, 0.5, 0.2, 0.9, 0.3, 5.0, 4.0, 3.0, 2.0, 1.0];

    #[test]
    fn ranks_each_row_as_triton_does() {
        let labels = Labels::parse("cat\ndog\nbird\nfish\ncow\n");
        let top = classify(&fp32(&[2, 5], &BATCH), 3, Some(&labels), true).expect("classes");
        assert_eq!((top.data_type, &*top.shape), (DataType::Bytes, &[2, 3][..]));
        assert_eq!(
            strings(&top),
            [
                "0.900000:3:fish",
                "0.500000:1:dog",
                "0.300000:4:cow",
                "5.000000:0:cat",
                "4.000000:1:dog",
                "3.000000:2:bird"
            ]
        );
        let all = classify(&fp32(&[2, 5], &BATCH), 9, None, true).expect("classes");
        assert_eq!(&*all.shape, [2, 5]);
        assert_eq!(strings(&all)[4], "0.100000:0");
    }

    #[test]
    fn labels_end_with_their_file_and_ties_keep_their_order() {
        let labels = Labels::parse("cat\r\ndog");
        let top =
            classify(&fp32(&[1, 5], &[1.0, 1.0, 1.0, 0.0, 0.0]), 3, Some(&labels), true).expect("classes");
        assert_eq!(strings(&top), ["1.000000:0:cat", "1.000000:1:dog", "1.000000:2"]);
    }

    #[test]
    fn without_batching_all_axes_are_one_list() {
        let top = classify(&fp32(&[2, 5], &BATCH), 2, None, false).expect("classes");
        assert_eq!(&*top.shape, [2]);
        assert_eq!(strings(&top), ["5.000000:5", "4.000000:6"]);
        let three_axes = classify(&fp32(&[1, 5, 2], &BATCH), 1, None, true).expect("classes");
        assert_eq!(&*three_axes.shape, [1, 1]);
        assert_eq!(strings(&three_axes), ["5.000000:5"]);
    }

    #[test]
    fn prints_every_number_as_cpp_does() {
        let values = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.5, 1e10];
        let top = classify(&fp32(&[5], &values), 5, None, false).expect("classes");
        assert_eq!(strings(&top), ["inf:1", "10000000000.000000:4", "-0.500000:3", "-inf:2", "nan:0"]);
        let int8 = output(DataType::Int8, &[3], vec![0xff, 0x7f, 0x80]);
        assert_eq!(strings(&classify(&int8, 3, None, false).expect("classes")), ["127:1", "-1:0", "-128:2"]);
        let uint64 = output(DataType::Uint64, &[1], u64::MAX.to_le_bytes().to_vec());
        assert_eq!(strings(&classify(&uint64, 1, None, false).expect("classes")), ["18446744073709551615:0"]);
    }

    #[test]
    fn empty_rows_have_no_classes() {
        for shape in [[0, 5], [5, 0]] {
            let top = classify(&fp32(&shape, &[]), 3, None, true).expect("classes");
            assert_eq!(top.shape.element_count(), Ok(0));
            assert!(top.data.is_empty());
        }
        let scalar = classify(&fp32(&[], &[2.0]), 3, None, true).expect("classes");
        assert_eq!(strings(&scalar), ["2.000000:0"]);
    }

    #[test]
    fn refuses_what_cannot_be_ranked() {
        for data_type in [DataType::Bool, DataType::Fp16, DataType::Bf16, DataType::Bytes] {
            let error = classify(&output(data_type, &[1], vec![0; 2]), 1, None, false).expect_err("refused");
            assert_eq!(error.code(), Code::InvalidArg);
            let expected =
                format!("class result not available for output due to unsupported type '{data_type}'");
            assert_eq!(error.message(), expected);
        }
        let short = output(DataType::Fp32, &[2], vec![0; 4]);
        assert_eq!(classify(&short, 1, None, false).expect_err("refused").code(), Code::Internal);
        let large = output(DataType::Uint8, &[1_000_001], vec![0; 1_000_001]);
        let error = classify(&large, 1_000_001, None, false).expect_err("refused");
        assert!(error.message().starts_with("classification output tensor too large"), "{error}");
        assert!(classify(&large, 3, None, false).is_ok());
    }

    #[test]
    fn the_partial_ranking_is_the_start_of_the_full_one() {
        let values: Vec<f32> = (0..500_u16).map(|i| f32::from((i * 79) % 101)).collect();
        let full = strings(&classify(&fp32(&[500], &values), 500, None, false).expect("classes"));
        for count in [1, 2, 100, 499] {
            let part = strings(&classify(&fp32(&[500], &values), count, None, false).expect("classes"));
            assert_eq!(part, full[..count]);
        }
    }
}
