//! The answer to an inference request: read with checks, printed for people or programs, saved as .npy files.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;
use serde_json::Value;
use trireme_types::{DataType, Shape};

use super::http;
use super::npy;
use super::tensor::{self, Tensor};
use crate::terminal::{Colours, Tone};

/// Rows and elements of a row that are printed for people.
const MAX_SHOWN: usize = 8;
/// Characters of a string that are printed for people.
const MAX_STRING: usize = 200;

/// An answer with its tensors.
#[derive(Debug)]
pub(super) struct Inference {
    model_name: String,
    model_version: String,
    pub(super) outputs: Vec<Tensor>,
}

#[derive(Deserialize)]
struct Head {
    model_name: String,
    #[serde(default)]
    model_version: String,
    #[serde(default)]
    outputs: Vec<OutputHead>,
}

#[derive(Deserialize)]
struct OutputHead {
    name: String,
    datatype: String,
    shape: Vec<i64>,
    #[serde(default)]
    parameters: OutputParameters,
    data: Option<Value>,
}

#[derive(Default, Deserialize)]
struct OutputParameters {
    binary_data_size: Option<usize>,
}

impl Inference {
    /// Reads the body of an answer with status 200.
    ///
    /// # Errors
    /// It contradicts itself: sizes, shapes and data do not agree.
    pub(super) fn parse(answer: &http::Answer) -> Result<Self> {
        let length = answer.json_length.unwrap_or(answer.body.len());
        let Some((json, mut binary)) = answer.body.split_at_checked(length) else {
            bail!("the server announces {length} bytes of JSON and sends {} bytes in all", answer.body.len())
        };
        let head: Head =
            serde_json::from_slice(json).context("the server's answer is no inference response")?;
        let mut outputs = Vec::with_capacity(head.outputs.len());
        for output in head.outputs {
            let name = output.name.clone();
            let made = output.read(&mut binary);
            outputs.push(made.with_context(|| format!("the server's answer is damaged at output '{name}'"))?);
        }
        ensure!(binary.is_empty(), "{} bytes follow the last output of the server's answer", binary.len());
        Ok(Self { model_name: head.model_name, model_version: head.model_version, outputs })
    }

    /// Everything, as one line of JSON.
    ///
    /// # Errors
    /// Strings with damaged lengths; [`Inference::parse`] refuses those.
    pub(super) fn json(&self) -> Result<String> {
        let quoted = |text: &str| serde_json::to_string(text);
        let mut out = format!(
            "{{\"model_name\":{},\"model_version\":{},\"outputs\":[",
            quoted(&self.model_name)?,
            quoted(&self.model_version)?
        );
        for (i, output) in self.outputs.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            write!(
                out,
                "{comma}{{\"name\":{},\"datatype\":\"{}\",\"shape\":{},\"data\":[{}]}}",
                quoted(&output.name)?,
                output.data_type,
                output.shape,
                output.elements()?.join(",")
            )?;
        }
        out.push_str("]}\n");
        Ok(out)
    }

    /// The beginning of every output.
    ///
    /// # Errors
    /// As [`Inference::json`].
    pub(super) fn text(&self, colours: Colours) -> Result<String> {
        let mut out =
            format!("{} version {}\n", colours.paint(Tone::Title, &self.model_name), self.model_version);
        for output in &self.outputs {
            let name = colours.paint(Tone::Title, &output.name);
            writeln!(out, "{name}  {} {}", output.data_type, output.shape)?;
            write_rows(output, &mut out)?;
        }
        Ok(out)
    }

    /// Writes each output to a file of its own; returns the files.
    ///
    /// # Errors
    /// A file cannot be written.
    pub(super) fn save(&self, directory: &Path) -> Result<Vec<PathBuf>> {
        fs_err::create_dir_all(directory)?;
        let mut files: Vec<PathBuf> = Vec::with_capacity(self.outputs.len());
        for output in &self.outputs {
            let stem = file_stem(&output.name);
            let numbered = (2..).map(|n| format!("{stem}_{n}"));
            let mut names = std::iter::once(stem.clone()).chain(numbered);
            let free = names.find_map(|name| {
                let path = directory.join(format!("{name}.npy"));
                (!files.contains(&path)).then_some(path)
            });
            let path = free.context("there are more outputs than file names")?;
            npy::write(&path, output.data_type, &output.shape, &output.bytes)?;
            files.push(path);
        }
        Ok(files)
    }
}

impl OutputHead {
    /// Takes the output's bytes off the front of `binary`, or reads its JSON data.
    fn read(self, binary: &mut &[u8]) -> Result<Tensor> {
        let data_type: DataType =
            self.datatype.parse().with_context(|| format!("the datatype is '{}'", self.datatype))?;
        let bytes = match (self.parameters.binary_data_size, &self.data) {
            (Some(size), _) => {
                let Some((own, rest)) = binary.split_at_checked(size) else {
                    bail!("{size} bytes are announced, and {} are left", binary.len())
                };
                *binary = rest;
                own.to_vec()
            }
            (None, Some(data)) => {
                let mut bytes = Vec::new();
                tensor::of_json_elements(data, data_type, &mut bytes)?;
                bytes
            }
            (None, None) => bail!("it has no data"),
        };
        let shape = Shape::new(&self.shape);
        tensor::check(data_type, &shape, &bytes)?;
        Ok(Tensor { name: self.name, data_type, shape, bytes })
    }
}

/// A name for a file out of the name of a tensor, which may hold anything.
fn file_stem(name: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.');
    let stem: String = name.chars().map(|c| if is_plain(c) { c } else { '_' }).take(100).collect();
    let stem = stem.trim_start_matches('.');
    if stem.is_empty() { "output".to_owned() } else { stem.to_owned() }
}

fn write_rows(output: &Tensor, out: &mut String) -> Result<()> {
    let elements = output.elements()?;
    if output.data_type == DataType::Bytes {
        for string in elements.iter().take(MAX_SHOWN * 2) {
            let shown: String = string.chars().take(MAX_STRING).collect();
            let more = if shown.len() < string.len() { "..." } else { "" };
            writeln!(out, "  {shown}{more}")?;
        }
        if elements.len() > MAX_SHOWN * 2 {
            writeln!(out, "  ... {} in all", elements.len())?;
        }
        return Ok(());
    }
    let length = output.shape.last().and_then(|&length| usize::try_from(length).ok()).unwrap_or(1);
    let rows = elements.chunks(length.max(1));
    let count = rows.len();
    for row in rows.take(MAX_SHOWN) {
        let shown: Vec<&str> = row.iter().take(MAX_SHOWN).map(|element| element.trim_matches('"')).collect();
        let more = if row.len() > MAX_SHOWN { format!(" ... {} in all", row.len()) } else { String::new() };
        writeln!(out, "  {}{more}", shown.join(" "))?;
    }
    if count > MAX_SHOWN {
        writeln!(out, "  ... {count} rows in all")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn answer(json: &str, binary: &[u8]) -> http::Answer {
        let body = [json.as_bytes(), binary].concat();
        http::Answer { status: 200, json_length: Some(json.len()), body: Bytes::from(body) }
    }

    const HEAD: &str = r#"{"model_name":"m","model_version":"3","outputs":[{"name":"a/b","datatype":"FP32","shape":[1,2],"parameters":{"binary_data_size":8}},{"name":"c","datatype":"BYTES","shape":[1],"data":["0.5:0:cat"]}]}"#;

    fn good() -> Inference {
        let numbers: Vec<u8> = [0.25_f32, f32::NAN].iter().flat_map(|v| v.to_le_bytes()).collect();
        Inference::parse(&answer(HEAD, &numbers)).expect("consistent")
    }

    #[test]
    fn prints_both_forms() {
        assert_eq!(
            good().text(Colours::NONE).expect("whole"),
            "m version 3\na/b  FP32 [1,2]\n  0.25 NaN\nc  BYTES [1]\n  \"0.5:0:cat\"\n"
        );
        let json: Value = serde_json::from_str(&good().json().expect("whole")).expect("JSON");
        assert_eq!(json["outputs"][0]["data"], serde_json::json!([0.25, "NaN"]));
        assert_eq!(json["outputs"][1]["shape"], serde_json::json!([1]));
    }

    #[test]
    fn long_outputs_are_cut_for_people_only() {
        let bytes = vec![0; 20 * 30];
        let json = r#"{"model_name":"m","outputs":[{"name":"x","datatype":"UINT8","shape":[20,30],"parameters":{"binary_data_size":600}}]}"#;
        let inference = Inference::parse(&answer(json, &bytes)).expect("consistent");
        let text = inference.text(Colours::NONE).expect("whole");
        assert!(
            text.contains("  0 0 0 0 0 0 0 0 ... 30 in all\n") && text.ends_with("... 20 rows in all\n"),
            "{text}"
        );
        assert_eq!(inference.json().expect("whole").matches(",0").count(), 599);
    }

    #[test]
    fn saves_under_names_that_are_files() {
        let root = tempfile::tempdir().expect("a directory");
        let directory = root.path().join("new");
        let files = good().save(&directory).expect("can write");
        assert_eq!(files, [directory.join("a_b.npy"), directory.join("c.npy")]);
        let array = npy::read(&directory.join("c.npy")).expect("an array");
        assert_eq!(array.bytes, b"\x09\0\0\x000.5:0:cat");
        let mut twice = good();
        twice.outputs[1].name = "a:b".to_owned();
        assert_eq!(twice.save(&directory).expect("can write")[1], directory.join("a_b_2.npy"));
        assert_eq!([file_stem("../../etc"), file_stem(".."), file_stem("")], ["_.._etc", "output", "output"]);
    }

    #[test]
    fn answers_that_contradict_themselves_are_refused() {
        for (json, binary, reason) in [
            ("[]", &b""[..], "no inference response"),
            (HEAD, b"1234", "8 bytes are announced, and 4 are left"),
            (HEAD, b"123456789", "1 bytes follow"),
            (
                r#"{"model_name":"m","outputs":[{"name":"x","datatype":"INT8","shape":[2],"data":[1]}]}"#,
                b"",
                "takes 2 bytes, got 1",
            ),
            (
                r#"{"model_name":"m","outputs":[{"name":"x","datatype":"INT8","shape":[-2],"data":[]}]}"#,
                b"",
                "no tensor's",
            ),
            (r#"{"model_name":"m","outputs":[{"name":"x","datatype":"INT8","shape":[1]}]}"#, b"", "no data"),
            (r#"{"model_name":"m","outputs":[{"name":"x","datatype":"INT7","shape":[1]}]}"#, b"", "'INT7'"),
        ] {
            let error = format!("{:#}", Inference::parse(&answer(json, binary)).expect_err(json));
            assert!(error.contains(reason), "no '{reason}' in '{error}'");
        }
        let mut short = answer(HEAD, b"");
        short.json_length = Some(10_000);
        assert!(Inference::parse(&short).is_err());
    }
}
