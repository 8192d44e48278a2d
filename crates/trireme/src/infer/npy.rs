//! Tensors in .npy files, the format of `numpy.save`.
//!
//! Reads format versions 1.0 to 3.0 in both byte orders, element by element in C order. Strings (`S` and `U`) become
//! `BYTES`; `V2`, which is how numpy stores bfloat16, becomes `BF16`. A header is believed only as far as the file is
//! long: sizes are checked before memory is taken.
//!
//! Source: `numpy.lib.format`.

mod header;

use std::io::{BufWriter, Read, Write};
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use trireme_types::{DataType, Shape};

use super::tensor;
use header::Header;

/// The first bytes of every .npy file.
pub(super) const MAGIC: &[u8] = b"\x93NUMPY";

/// A header above this is refused before it is read. numpy itself stops at 10,000 bytes.
const MAX_HEADER_BYTES: usize = 64 << 10;

/// Largest file that is written for strings, all of which are as long as the longest one.
const MAX_STRINGS_BYTES: usize = 4 << 30;

/// An array as a tensor: little-endian, in C order, strings with their lengths in front.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Array {
    pub(super) data_type: DataType,
    pub(super) shape: Shape,
    pub(super) bytes: Vec<u8>,
}

/// How elements lie in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Plain(DataType),
    /// Bytes, filled up with zeros.
    Bytes,
    /// Four bytes a character, filled up with zeros.
    Characters,
}

/// Element type of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Element {
    layout: Layout,
    size: usize,
    big_endian: bool,
}

/// Reads a file.
///
/// # Errors
/// It cannot be read, is no .npy file, is damaged, or holds what no tensor can hold.
pub(super) fn read(path: &Path) -> Result<Array> {
    let file = fs_err::File::open(path)?;
    let length = file.metadata()?.len();
    decode(file, length).with_context(|| format!("cannot take a tensor from '{}'", path.display()))
}

/// Reads an array from a stream of `length` bytes.
fn decode(mut stream: impl Read, length: u64) -> Result<Array> {
    let mut start = [0; 8];
    stream.read_exact(&mut start).context("expected an .npy file, and it is shorter than its first line")?;
    let [magic @ .., major, _minor] = start;
    ensure!(
        magic.as_slice() == MAGIC,
        "expected an .npy file, which starts with \\x93NUMPY; write one with numpy.save"
    );
    let (size_bytes, header_bytes) = match major {
        1 => {
            let mut size = [0; 2];
            stream.read_exact(&mut size).context("its header is cut off")?;
            (2, usize::from(u16::from_le_bytes(size)))
        }
        2 | 3 => {
            let mut size = [0; 4];
            stream.read_exact(&mut size).context("its header is cut off")?;
            (4, usize::try_from(u32::from_le_bytes(size))?)
        }
        other => bail!("expected format version 1, 2 or 3, found {other}"),
    };
    ensure!(
        header_bytes <= MAX_HEADER_BYTES,
        "its header has {header_bytes} bytes, more than the {MAX_HEADER_BYTES} that a plain array needs"
    );
    let mut text = vec![0; header_bytes];
    stream.read_exact(&mut text).context("its header is cut off")?;
    // Version 3 is UTF-8, the others Latin-1; what a plain array needs is ASCII in all of them.
    let header = Header::parse(&String::from_utf8_lossy(&text))?;
    let element = Element::of(&header.descr)?;
    let shape = Shape::new(&header.shape);
    ensure!(
        !header.fortran_order || header.shape.len() < 2,
        "it is stored in Fortran order, columns first, and tensors are C order; save \
         numpy.ascontiguousarray(array) instead"
    );

    let count = shape.element_count().with_context(|| format!("the shape {shape} is no tensor's"))?;
    let bytes = count.checked_mul(element.size).filter(|bytes| *bytes <= tensor::MAX_BYTES);
    // Each string gets a length of four bytes in front.
    let fits = count.checked_mul(4).is_some_and(|bytes| bytes <= tensor::MAX_BYTES);
    let Some(bytes) = bytes.filter(|_| fits || matches!(element.layout, Layout::Plain(_))) else {
        bail!(
            "the shape {shape} of '{}' is larger than the {} bytes of a request",
            header.descr,
            tensor::MAX_BYTES
        )
    };
    let rest = length.saturating_sub((start.len() + size_bytes + header_bytes) as u64);
    ensure!(
        rest == bytes as u64,
        "the shape {shape} of '{}' takes {bytes} bytes, and the file has {rest} after its header",
        header.descr
    );
    let mut content = vec![0; bytes];
    stream.read_exact(&mut content).context("it ends before its last element")?;
    let (data_type, bytes) = element.to_tensor(content)?;
    Ok(Array { data_type, shape, bytes })
}

impl Element {
    fn of(descr: &str) -> Result<Self> {
        let order = descr.chars().next().filter(|c| matches!(c, '<' | '>' | '|' | '='));
        let rest = descr.strip_prefix(['<', '>', '|', '=']).unwrap_or(descr);
        let plain = |data_type: DataType| (Layout::Plain(data_type), data_type.byte_size().unwrap_or(1));
        let length = |unit: usize| -> Option<usize> {
            let length = rest.get(1..)?.parse::<usize>().ok().filter(|length| *length > 0)?;
            length.checked_mul(unit)
        };
        let (layout, size) = match rest {
            "b1" => plain(DataType::Bool),
            "u1" => plain(DataType::Uint8),
            "u2" => plain(DataType::Uint16),
            "u4" => plain(DataType::Uint32),
            "u8" => plain(DataType::Uint64),
            "i1" => plain(DataType::Int8),
            "i2" => plain(DataType::Int16),
            "i4" => plain(DataType::Int32),
            "i8" => plain(DataType::Int64),
            "f2" => plain(DataType::Fp16),
            "f4" => plain(DataType::Fp32),
            "f8" => plain(DataType::Fp64),
            "V2" => plain(DataType::Bf16),
            "O" => bail!("it holds Python objects; convert the array first, strings with array.astype('S')"),
            _ => match (rest.chars().next(), length(1), length(4)) {
                (Some('S' | 'a'), Some(size), _) => (Layout::Bytes, size),
                (Some('U'), _, Some(size)) => (Layout::Characters, size),
                _ => bail!(
                    "its elements are '{descr}', which no tensor holds; possible are b1, i1 to i8, u1 to u8, f2 to \
                     f8, S and U, so convert it with array.astype(...)"
                ),
            },
        };
        Ok(Self { layout, size, big_endian: order == Some('>') })
    }

    /// Brings the content of a file into the form of a tensor.
    fn to_tensor(self, mut content: Vec<u8>) -> Result<(DataType, Vec<u8>)> {
        match self.layout {
            Layout::Plain(data_type) => {
                if self.big_endian && self.size > 1 {
                    content.chunks_exact_mut(self.size).for_each(<[u8]>::reverse);
                }
                Ok((data_type, content))
            }
            Layout::Bytes => {
                let strings = content.chunks_exact(self.size).map(trim_zeros);
                tensor::join_strings(strings).map(|bytes| (DataType::Bytes, bytes))
            }
            Layout::Characters => {
                let text = |string: &[u8]| -> Result<String> {
                    let mut text = String::new();
                    for unit in string.chunks_exact(4) {
                        let mut number = [0; 4];
                        number.copy_from_slice(unit);
                        let number = if self.big_endian {
                            u32::from_be_bytes(number)
                        } else {
                            u32::from_le_bytes(number)
                        };
                        match char::from_u32(number) {
                            Some(character) => text.push(character),
                            None => bail!("one of its strings holds {number:#x}, which is no character"),
                        }
                    }
                    text.truncate(text.trim_end_matches('\0').len());
                    Ok(text)
                };
                let strings = content.chunks_exact(self.size).map(text).collect::<Result<Vec<_>>>()?;
                tensor::join_strings(strings.iter().map(String::as_bytes))
                    .map(|bytes| (DataType::Bytes, bytes))
            }
        }
    }
}

fn trim_zeros(string: &[u8]) -> &[u8] {
    let end = string.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    string.get(..end).unwrap_or_default()
}

/// Writes a tensor. Strings that are all text become characters (`U`), others bytes (`S`).
///
/// # Errors
/// The file cannot be written, or its strings cannot be kept in the format: they end in a zero, or one is so long
/// that all of them would become huge.
pub(super) fn write(path: &Path, data_type: DataType, shape: &[i64], bytes: &[u8]) -> Result<()> {
    let mut file = BufWriter::new(fs_err::File::create(path)?);
    encode(&mut file, data_type, shape, bytes)
        .and_then(|()| Ok(file.flush()?))
        .with_context(|| format!("cannot write '{}'", path.display()))
}

fn encode(stream: &mut impl Write, data_type: DataType, shape: &[i64], bytes: &[u8]) -> Result<()> {
    let kind = match data_type {
        DataType::Bytes => return encode_strings(stream, shape, bytes),
        DataType::Bool => "|b1",
        DataType::Uint8 => "|u1",
        DataType::Uint16 => "<u2",
        DataType::Uint32 => "<u4",
        DataType::Uint64 => "<u8",
        DataType::Int8 => "|i1",
        DataType::Int16 => "<i2",
        DataType::Int32 => "<i4",
        DataType::Int64 => "<i8",
        DataType::Fp16 => "<f2",
        DataType::Fp32 => "<f4",
        DataType::Fp64 => "<f8",
        DataType::Bf16 => "|V2",
    };
    write_header(stream, kind.to_owned(), shape)?;
    Ok(stream.write_all(bytes)?)
}

fn encode_strings(stream: &mut impl Write, shape: &[i64], bytes: &[u8]) -> Result<()> {
    let strings = tensor::split_strings(bytes)?;
    ensure!(
        !strings.iter().any(|string| string.ends_with(b"\0")),
        "a string ends in a zero byte, which an .npy file cannot keep; print it with --format json instead"
    );
    let texts: Option<Vec<&str>> = strings.iter().map(|string| std::str::from_utf8(string).ok()).collect();
    let (letter, unit, longest) = match &texts {
        Some(texts) => ('U', 4, texts.iter().map(|text| text.chars().count()).max()),
        None => ('S', 1, strings.iter().map(|string| string.len()).max()),
    };
    // numpy has no strings of length 0.
    let longest = longest.unwrap_or(0).max(1);
    let size = longest.checked_mul(unit).and_then(|size| Some((size, size.checked_mul(strings.len())?)));
    let Some((size, _)) = size.filter(|(_, whole)| *whole <= MAX_STRINGS_BYTES) else {
        bail!("each of its strings would be stored as long as the longest, and that is more than 4 GiB")
    };
    write_header(stream, format!("{}{letter}{longest}", if letter == 'U' { '<' } else { '|' }), shape)?;
    let mut element = Vec::with_capacity(size);
    for (index, string) in strings.iter().enumerate() {
        element.clear();
        match texts.as_ref().and_then(|texts| texts.get(index)) {
            Some(text) => text.chars().for_each(|c| element.extend(u32::from(c).to_le_bytes())),
            None => element.extend_from_slice(string),
        }
        element.resize(size, 0);
        stream.write_all(&element)?;
    }
    Ok(())
}

/// Magic, version, length and dictionary, padded so that the data starts at a multiple of 64.
fn write_header(stream: &mut impl Write, descr: String, shape: &[i64]) -> Result<()> {
    let mut text = Header { descr, fortran_order: false, shape: shape.to_vec() }.print();
    let before = MAGIC.len() + 2 + 2;
    let padding = (before + text.len() + 1).next_multiple_of(64) - (before + text.len() + 1);
    text.extend(std::iter::repeat_n(' ', padding));
    text.push('\n');
    let length = u16::try_from(text.len()).context("the shape has too many axes for an .npy file")?;
    stream.write_all(MAGIC)?;
    stream.write_all(&[1, 0])?;
    stream.write_all(&length.to_le_bytes())?;
    Ok(stream.write_all(text.as_bytes())?)
}

#[cfg(test)]
mod tests;
