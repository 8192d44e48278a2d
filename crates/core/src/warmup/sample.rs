//! The request of a warm-up sample: one row, its tensors zero, random or from files.

use std::path::Path;

use trireme_config::{ModelSpec, WarmupData, WarmupInput, WarmupSample};
use trireme_types::{DataType, Error, HostBuffer, InferInput, InferRequest, Result, Shape, TensorBuffer};

/// Inputs of one batch together; requests of that size could not arrive over a network either.
pub(super) const MAX_BATCH_BYTES: usize = 4 << 30;

/// Random integers are below this: it is in the range of every type, and as an index it is rarely out of bounds.
const RANDOM_BELOW: u8 = 128;

/// Builds the request of a sample that validation has passed.
///
/// # Shapes
/// Inputs of the model get a batch dimension of 1 in front of `dims` if the model has one, and so do tensors that the
/// sequence batcher would add.
///
/// # Errors
/// A file cannot be read or has the wrong size, a tensor is too large.
pub(super) fn request(sample: &WarmupSample, spec: &ModelSpec, model_dir: &Path) -> Result<InferRequest> {
    let mut request = InferRequest::new();
    for input in &sample.inputs {
        let declared = spec.inputs.iter().find(|declared| declared.name == input.name);
        let batching = spec.max_batch_size > 0 && !declared.is_some_and(|declared| declared.shape_tensor);
        request.inputs.push(InferInput {
            name: input.name.clone(),
            data_type: input.data_type,
            shape: if batching { Shape::with_leading(1, &input.dims) } else { input.dims.clone() },
            data: data(input, model_dir)?,
        });
    }
    Ok(request)
}

fn data(input: &WarmupInput, model_dir: &Path) -> Result<TensorBuffer> {
    let too_large = || {
        Error::invalid_arg(format!(
            "input '{}' of dims {} takes too many bytes; a warm-up batch has at most {MAX_BATCH_BYTES}",
            input.name, input.dims
        ))
    };
    let elements = input.dims.element_count().map_err(|_| too_large())?;
    // An empty string is its length, four zero bytes.
    let element = input.data_type.byte_size().unwrap_or(4);
    let bytes = elements.checked_mul(element).filter(|bytes| *bytes <= MAX_BATCH_BYTES);
    let bytes = bytes.ok_or_else(too_large)?;
    match &input.data {
        WarmupData::Zero => Ok(HostBuffer::zeroed(bytes).into()),
        // As in Triton, random strings are empty ones.
        WarmupData::Random if input.data_type == DataType::Bytes => Ok(HostBuffer::zeroed(bytes).into()),
        WarmupData::Random => Ok(random(input.data_type, bytes)),
        WarmupData::File(file) => {
            let path = model_dir.join("warmup").join(file);
            let content = read(&path, input)?;
            if input.data_type == DataType::Bytes {
                strings(content, elements, &path, input)
            } else {
                plain(content, bytes, &path, input)
            }
        }
    }
}

fn read(path: &Path, input: &WarmupInput) -> Result<Vec<u8>> {
    let failed = |error: std::io::Error| {
        Error::invalid_arg(format!("cannot read input_data_file of input '{}': {error}", input.name))
    };
    let size = fs_err::metadata(path).map_err(failed)?.len();
    if size > MAX_BATCH_BYTES as u64 {
        return Err(Error::invalid_arg(format!(
            "'{}' has {size} bytes; a warm-up batch has at most {MAX_BATCH_BYTES}",
            path.display()
        )));
    }
    fs_err::read(path).map_err(failed)
}

/// Elements of a fixed size: the bytes of the tensor in row-major order, little-endian.
fn plain(mut content: Vec<u8>, expected: usize, path: &Path, input: &WarmupInput) -> Result<TensorBuffer> {
    if content.len() < expected {
        return Err(Error::invalid_arg(format!(
            "warmup setting expects {expected} bytes for input '{}' ({} of dims {}), but the data provided from '{}' \
             only has {} bytes",
            input.name,
            input.data_type.config_name(),
            input.dims,
            path.display(),
            content.len()
        )));
    }
    if content.len() > expected {
        tracing::warn!(
            "warmup setting expects {expected} bytes for input '{}', '{}' has {}: the first {expected} are used",
            input.name,
            path.display(),
            content.len()
        );
        content.truncate(expected);
    }
    Ok(content.into())
}

/// Strings: each with its length in front as four little-endian bytes, or one string a line.
///
/// Which of the two a file has can be told: the first four characters of a text are a length beyond any file.
fn strings(content: Vec<u8>, elements: usize, path: &Path, input: &WarmupInput) -> Result<TensorBuffer> {
    let serialized = count_serialized(&content);
    if serialized == Some(elements) {
        return Ok(content.into());
    }
    let lines: Option<Vec<&str>> = std::str::from_utf8(&content).ok().map(|text| text.lines().collect());
    match lines {
        Some(lines) if serialized.is_none() && lines.len() == elements => Ok(serialize(&lines)?.into()),
        lines => {
            let found = match (serialized, lines) {
                (Some(count), _) => format!("{count} strings with a length in front"),
                (None, Some(lines)) => format!("{} lines of text", lines.len()),
                (None, None) => format!("{} bytes that are neither", content.len()),
            };
            Err(Error::invalid_arg(format!(
                "warmup setting expects {elements} strings for input '{}' of dims {}, but '{}' holds {found}; write each \
                 string with its length in front (4 bytes, little-endian), or one string a line as UTF-8 text",
                input.name,
                input.dims,
                path.display()
            )))
        }
    }
}

/// Strings with a length in front; `None` if the bytes are not that.
fn count_serialized(mut rest: &[u8]) -> Option<usize> {
    let mut found = 0;
    while !rest.is_empty() {
        let (length, tail) = rest.split_first_chunk::<4>()?;
        rest = tail.get(usize::try_from(u32::from_le_bytes(*length)).ok()?..)?;
        found += 1;
    }
    Some(found)
}

fn serialize(lines: &[&str]) -> Result<Vec<u8>> {
    let mut data = Vec::with_capacity(lines.iter().map(|line| line.len() + 4).sum());
    for line in lines {
        let length = u32::try_from(line.len()).map_err(|_| Error::invalid_arg("a line above 4 GiB"))?;
        data.extend_from_slice(&length.to_le_bytes());
        data.extend_from_slice(line.as_bytes());
    }
    Ok(data)
}

/// Integers from 0 to 127, booleans, and numbers from 0 to 1 without 1.
fn random(data_type: DataType, bytes: usize) -> TensorBuffer {
    let mut random = fastrand::Rng::new();
    let mut buffer = HostBuffer::zeroed(bytes);
    let data = buffer.as_mut_slice();
    match data_type {
        DataType::Bool => data.fill_with(|| u8::from(random.bool())),
        DataType::Fp32 => fill(data, || random.f32().to_le_bytes()),
        DataType::Fp64 => fill(data, || random.f64().to_le_bytes()),
        // Halves from 0 up to, but without, the pattern of 1.
        DataType::Fp16 => fill(data, || random.u16(..0x3c00).to_le_bytes()),
        DataType::Bf16 => fill(data, || random.u16(..0x3f80).to_le_bytes()),
        _ => {
            // Little-endian: the value is in the first byte of each element.
            let step = data_type.byte_size().unwrap_or(1);
            data.iter_mut().step_by(step).for_each(|byte| *byte = random.u8(..RANDOM_BELOW));
        }
    }
    buffer.into()
}

fn fill<const N: usize>(data: &mut [u8], mut next: impl FnMut() -> [u8; N]) {
    for element in data.as_chunks_mut::<N>().0 {
        *element = next();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(data_type: DataType, dims: &[i64], data: WarmupData) -> WarmupInput {
        WarmupInput { name: "X".into(), data_type, dims: Shape::new(dims), data }
    }

    fn from_file(data_type: DataType, dims: &[i64], content: &[u8]) -> Result<TensorBuffer> {
        let dir = tempfile::tempdir().unwrap();
        fs_err::create_dir(dir.path().join("warmup")).unwrap();
        fs_err::write(dir.path().join("warmup/f"), content).unwrap();
        data(&input(data_type, dims, WarmupData::File("f".into())), dir.path())
    }

    #[test]
    fn random_data_is_valid_for_its_type() {
        for data_type in DataType::ALL {
            let made = data(&input(data_type, &[3, 50], WarmupData::Random), Path::new("")).unwrap();
            let size = data_type.byte_size().unwrap_or(4);
            assert_eq!(made.len(), 150 * size, "{data_type}");
            let bytes = made.as_slice();
            let differ = bytes.iter().any(|byte| *byte != 0);
            assert_eq!(differ, data_type != DataType::Bytes, "{data_type}");
            match data_type {
                DataType::Bool => assert!(bytes.iter().all(|byte| *byte < 2)),
                DataType::Fp32 => {
                    let (numbers, _) = bytes.as_chunks::<4>();
                    assert!(numbers.iter().all(|n| (0.0..1.0).contains(&f32::from_le_bytes(*n))));
                }
                DataType::Int64 => {
                    let (numbers, _) = bytes.as_chunks::<8>();
                    assert!(numbers.iter().all(|n| (0..128).contains(&i64::from_le_bytes(*n))));
                }
                _ => {}
            }
        }
    }

    #[test]
    fn files_of_numbers_have_the_bytes_of_the_tensor() {
        assert_eq!(from_file(DataType::Int32, &[2], &[1; 8]).unwrap().as_slice(), [1; 8]);
        assert_eq!(from_file(DataType::Int32, &[2], &[1; 11]).unwrap().as_slice(), [1; 8], "the first bytes");
        let error = from_file(DataType::Int32, &[2], &[1; 7]).unwrap_err();
        assert!(error.message().starts_with("warmup setting expects 8 bytes for input 'X'"), "{error}");
        assert!(error.message().ends_with("only has 7 bytes"), "{error}");
    }

    #[test]
    fn files_of_strings_are_serialized_or_lines() {
        let serialized = b"\x02\0\0\0ab\0\0\0\0";
        assert_eq!(from_file(DataType::Bytes, &[2], serialized).unwrap().as_slice(), serialized);
        // One UTF-8 string is one element, with a line end behind it or not.
        let hello = "h\u{e9}llo w\u{f6}rld";
        let wanted = [&13_u32.to_le_bytes()[..], hello.as_bytes()].concat();
        for text in [hello.to_owned(), format!("{hello}\n"), format!("{hello}\r\n")] {
            assert_eq!(from_file(DataType::Bytes, &[1], text.as_bytes()).unwrap().as_slice(), wanted);
        }
        for (content, found) in [
            (&serialized[..], "2 strings with a length in front"),
            (b"one\ntwo\n", "2 lines of text"),
            (b"\xff\xfe\xfd\xfc\xfb", "5 bytes that are neither"),
        ] {
            let error = from_file(DataType::Bytes, &[3], content).unwrap_err();
            assert!(error.message().contains(&format!("holds {found};")), "{error}");
        }
        assert!(from_file(DataType::Bytes, &[0], b"").unwrap().is_empty());
    }

    #[test]
    fn sizes_are_checked_before_memory_is_taken() {
        for dims in [&[i64::MAX, 2][..], &[1 << 40]] {
            let error = data(&input(DataType::Fp64, dims, WarmupData::Zero), Path::new("")).unwrap_err();
            assert!(error.message().contains("too many bytes"), "{error}");
        }
    }
}
