//! The inputs of a request out of what was typed: `NAME=@file`, `NAME=<JSON>`, `NAME=zeros`, `NAME=random`.
//!
//! Names, data types and shapes come from the model's metadata, so that the person types only what the server
//! cannot know. Nothing is converted: an array of another data type is refused with the words that convert it.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use trireme_types::{DataType, Shape};

use super::fill::{self, Fill};
use super::metadata::{ModelMetadata, TensorMetadata};
use super::npy;
use super::tensor::{self, Tensor};

/// Shapes given by `--shape`, by input.
type Shapes = BTreeMap<String, Shape>;

/// Makes the inputs.
///
/// # Errors
/// An unknown name, a value that cannot be read, or one that does not fit the model.
pub(super) fn inputs(model: &ModelMetadata, given: &[String], shapes: &[String]) -> Result<Vec<Tensor>> {
    if given.is_empty() {
        bail!(
            "no input is given; give each input of model '{}' with --input NAME=VALUE, where VALUE is @FILE, JSON, zeros \
             or random:\n{}",
            model.name,
            model.input_lines()
        );
    }
    let shapes = parse_shapes(model, shapes)?;
    let mut tensors: Vec<Tensor> = Vec::with_capacity(given.len());
    for text in given {
        let (input, value) = split(model, text, "--input", "NAME=VALUE")?;
        ensure!(
            !tensors.iter().any(|tensor| tensor.name == input.name),
            "--input {} is given twice; each input takes one value",
            input.name
        );
        let made = make(input, value, shapes.get(&input.name))
            .with_context(|| format!("input '{}' ({} {})", input.name, input.data_type, input.shape))?;
        tensors.push(made);
    }
    if let Some(name) = shapes.keys().find(|name| !tensors.iter().any(|tensor| tensor.name == **name)) {
        bail!("--shape {name} has no --input {name}; shapes belong to inputs that are given");
    }
    Ok(tensors)
}

/// The input that a text is about, and what follows its name. Names may hold `=` themselves.
fn split<'a, 'b>(
    model: &'a ModelMetadata,
    text: &'b str,
    flag: &str,
    form: &str,
) -> Result<(&'a TensorMetadata, &'b str)> {
    let known = model
        .inputs
        .iter()
        .filter_map(|input| Some((input, text.strip_prefix(input.name.as_str())?.strip_prefix('=')?)));
    if let Some(found) = known.max_by_key(|(input, _)| input.name.len()) {
        return Ok(found);
    }
    let Some((name, _)) = text.split_once('=') else {
        bail!("{flag} expects {form}, got '{text}'");
    };
    bail!("model '{}' has no input '{name}'; its inputs are:\n{}", model.name, model.input_lines())
}

fn parse_shapes(model: &ModelMetadata, given: &[String]) -> Result<Shapes> {
    let mut shapes = Shapes::new();
    for text in given {
        let (input, dims) = split(model, text, "--shape", "NAME=1,3,224,224")?;
        let list = dims.trim().trim_start_matches('[').trim_end_matches(']');
        let dims = list.split(',').filter(|_| !list.is_empty()).map(|dim| dim.trim().parse::<i64>());
        let shape: Shape =
            dims.collect::<Result<_, _>>().ok().filter(|shape: &Shape| shape.is_fixed()).with_context(
                || format!("--shape expects NAME=1,3,224,224 with numbers of at least 0, got '{text}'"),
            )?;
        ensure!(shapes.insert(input.name.clone(), shape).is_none(), "--shape {} is given twice", input.name);
    }
    Ok(shapes)
}

fn make(input: &TensorMetadata, value: &str, shape: Option<&Shape>) -> Result<Tensor> {
    let (shape, bytes) = match (value, value.strip_prefix('@')) {
        (_, Some(path)) => from_file(input, Path::new(path), shape)?,
        ("zeros", _) => fill::fill(input, shape, Fill::Zeros)?,
        ("random", _) => fill::fill(input, shape, Fill::Random)?,
        _ => from_text(input, value, shape)?,
    };
    tensor::check(input.data_type, &shape, &bytes)?;
    Ok(Tensor { name: input.name.clone(), data_type: input.data_type, shape, bytes })
}

/// An array, or the bytes of a tensor. The file of a `BYTES` input is one element: an image stays an image.
fn from_file(input: &TensorMetadata, path: &Path, shape: Option<&Shape>) -> Result<(Shape, Vec<u8>)> {
    ensure!(!path.as_os_str().is_empty(), "a file name is expected behind @");
    let is_npy = path.extension().is_some_and(|ending| ending == "npy") || starts_as_npy(path)?;
    if is_npy {
        let array = npy::read(path)?;
        ensure!(
            array.data_type == input.data_type,
            "'{}' holds {}, and the model takes {}; save array.astype({}) instead",
            path.display(),
            array.data_type,
            input.data_type,
            numpy_name(input.data_type)
        );
        let shape = match shape {
            Some(shape) => shape.clone(),
            None => fitted(input, &array.shape, false)?,
        };
        return Ok((shape, array.bytes));
    }
    let length = fs_err::metadata(path)?.len();
    ensure!(
        length <= tensor::MAX_BYTES as u64,
        "'{}' has {length} bytes, more than the {} of a request",
        path.display(),
        tensor::MAX_BYTES
    );
    let content = fs_err::read(path)?;
    let (bytes, count) = match input.data_type.byte_size() {
        None => (tensor::join_strings([content.as_slice()].into_iter())?, 1),
        Some(size) => {
            ensure!(
                content.len() % size == 0,
                "'{}' has {} bytes, and {} elements have {size} each; write numpy arrays with numpy.save to keep their \
                 shape",
                path.display(),
                content.len(),
                input.data_type
            );
            let count = content.len() / size;
            (content, count)
        }
    };
    let shape = match shape {
        Some(shape) => shape.clone(),
        None => fitted(input, &Shape::new(&[i64::try_from(count)?]), true)?,
    };
    Ok((shape, bytes))
}

fn starts_as_npy(path: &Path) -> Result<bool> {
    use std::io::Read as _;
    let mut start = Vec::with_capacity(npy::MAGIC.len());
    fs_err::File::open(path)?.take(npy::MAGIC.len() as u64).read_to_end(&mut start)?;
    Ok(start == npy::MAGIC)
}

/// The name of a data type in numpy.
fn numpy_name(data_type: DataType) -> &'static str {
    match data_type {
        DataType::Bool => "bool",
        DataType::Uint8 => "'uint8'",
        DataType::Uint16 => "'uint16'",
        DataType::Uint32 => "'uint32'",
        DataType::Uint64 => "'uint64'",
        DataType::Int8 => "'int8'",
        DataType::Int16 => "'int16'",
        DataType::Int32 => "'int32'",
        DataType::Int64 => "'int64'",
        DataType::Fp16 => "'float16'",
        DataType::Fp32 => "'float32'",
        DataType::Fp64 => "'float64'",
        DataType::Bytes => "'S'",
        DataType::Bf16 => "ml_dtypes.bfloat16",
    }
}

fn from_text(input: &TensorMetadata, text: &str, shape: Option<&Shape>) -> Result<(Shape, Vec<u8>)> {
    let value = match serde_json::from_str(text) {
        Ok(value) => value,
        // Text needs no quotes where nothing else than text can be meant.
        Err(_) if input.data_type == DataType::Bytes && !text.trim_start().starts_with(['[', '"']) => {
            Value::String(text.to_owned())
        }
        Err(error) => bail!(
            "expected @FILE, zeros, random or JSON such as 1.5 or [1, 2, 3], got '{}': {error}",
            text.chars().take(60).collect::<String>()
        ),
    };
    // `5` for a BYTES input is the text 5: nobody can mean the number.
    let value = match value {
        Value::Number(_) | Value::Bool(_) if input.data_type == DataType::Bytes => {
            Value::String(text.to_owned())
        }
        other => other,
    };
    let (nested, bytes) = tensor::of_json(&value, input.data_type)?;
    let shape = match shape {
        Some(shape) => shape.clone(),
        None => fitted(input, &nested, nested.len() < 2)?,
    };
    Ok((shape, bytes))
}

/// The shape to send for a value of this shape. Where the model's shape leaves only one choice, a batch axis that was
/// left out is put in front, and a flat list is folded.
fn fitted(input: &TensorMetadata, given: &Shape, is_flat: bool) -> Result<Shape> {
    let wanted = &input.shape;
    let batched = Shape::with_leading(1, given);
    if wanted.accepts(given) {
        return Ok(given.clone());
    }
    if wanted.first() == Some(&-1) && wanted.accepts(&batched) {
        return Ok(batched);
    }
    let count = given.element_count()?;
    match fold(wanted, count).filter(|_| is_flat) {
        Some(shape) => Ok(shape),
        None if is_flat => bail!(
            "got {count} elements, which do not fill {wanted}; give another number of them, or the shape with --shape \
             {}=...",
            input.name
        ),
        None => bail!(
            "got the shape {given}, expected {wanted}; reshape the value, or give the shape with --shape {}=...",
            input.name
        ),
    }
}

/// A shape with that many elements: the last open dimension takes what the others leave.
fn fold(wanted: &Shape, count: usize) -> Option<Shape> {
    let mut shape: Shape = wanted.iter().map(|&dim| if dim < 0 { 1 } else { dim }).collect();
    let fixed = shape.element_count().ok()?;
    if fixed == count {
        return Some(shape);
    }
    let open = wanted.iter().rposition(|&dim| dim < 0)?;
    let rest = count.checked_div(fixed).filter(|rest| rest.checked_mul(fixed) == Some(count))?;
    *shape.get_mut(open)? = i64::try_from(rest).ok()?;
    Some(shape)
}

#[cfg(test)]
mod tests;
