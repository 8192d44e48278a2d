//! `trireme infer`: one inference request to a running server, over HTTP with the binary tensor extension.
//!
//! The model's metadata gives names, data types and shapes, so only values are typed. It works with every server that
//! speaks the KServe v2 protocol with binary tensors. Nothing here knows the server's crates, the words of
//! `trireme-types` aside.

mod answer;
mod fill;
mod http;
mod metadata;
mod npy;
mod tensor;
mod value;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use clap::{Args, ValueEnum};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::terminal::{self, Colours};
use answer::Inference;
use http::{Answer, Endpoint, JSON_LENGTH};
use metadata::ModelMetadata;
use tensor::Tensor;

/// What stays as it is in a path segment.
pub(crate) const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Send one inference request to a running server and print the answer
///
/// Names, data types and shapes are taken from the server, so only values are typed. Without --input the command tells
/// which inputs the model takes.
#[derive(Args, Debug)]
pub(crate) struct InferArgs {
    /// Name of the model
    #[arg(value_name = "MODEL")]
    model: String,
    /// Version of the model [default: the one the server chooses, its highest]
    #[arg(long, value_name = "VERSION", value_parser = clap::value_parser!(i64).range(1..))]
    model_version: Option<i64>,
    /// HTTP address of the server
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    url: String,
    /// An input, once for each: NAME=@file.npy, NAME=@file (raw bytes), NAME=JSON (a number, a string or nested
    /// arrays), NAME=zeros or NAME=random. The text of a BYTES input needs no quotes
    #[arg(long, value_name = "NAME=VALUE")]
    input: Vec<String>,
    /// Shape of an input whose value does not tell it, as NAME=1,3,224,224
    #[arg(long, value_name = "NAME=DIMS")]
    shape: Vec<String>,
    /// An output to ask for, once for each [default: all of them]
    #[arg(long, value_name = "NAME")]
    output: Vec<String>,
    /// Ask for the N best classes of each output, as SCORE:INDEX:LABEL
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    class: Option<u32>,
    /// A header to send, once for each, as a server with restricted APIs wants it
    #[arg(long, value_name = "NAME:VALUE")]
    header: Vec<String>,
    /// How long to wait for each answer
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// text shows the beginning of every output, json all of it
    #[arg(long, value_enum, default_value_t = AnswerFormat::Text)]
    format: AnswerFormat,
    /// Also write each output to DIR/NAME.npy
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum AnswerFormat {
    Text,
    Json,
}

/// Asks and prints.
///
/// # Errors
/// The server cannot be reached or refuses, or what was typed does not fit the model.
pub(crate) fn run(args: InferArgs) -> Result<ExitCode> {
    let inference = infer(&args)?;
    terminal::print(&match args.format {
        AnswerFormat::Text => inference.text(Colours::for_stdout())?,
        AnswerFormat::Json => inference.json()?,
    })?;
    if let Some(directory) = &args.save {
        for file in inference.save(directory)? {
            terminal::warn(&format!("wrote {}\n", file.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn infer(args: &InferArgs) -> Result<Inference> {
    ensure!(!args.model.is_empty(), "the name of a model is expected, got an empty one");
    let endpoint = Endpoint::new(&args.url, &args.header, Duration::from_secs(args.timeout))?;
    let mut path = format!("/v2/models/{}", utf8_percent_encode(&args.model, SEGMENT));
    if let Some(version) = args.model_version {
        path += &format!("/versions/{version}");
    }
    let described = endpoint.get(&path)?;
    if described.status != 200 {
        bail!("{}{}", refusal(&endpoint, &described), models_hint(&endpoint));
    }
    let model =
        ModelMetadata::parse(&described.body).with_context(|| format!("asked {}{path}", endpoint.url()))?;
    let inputs = value::inputs(&model, &args.input, &args.shape)?;
    let (json_length, body) = request(&model, &inputs, args)?;
    let headers =
        [(JSON_LENGTH, json_length.to_string()), ("content-type", "application/octet-stream".to_owned())];
    let answer = endpoint.post(&format!("{path}/infer"), &headers, body)?;
    if answer.status == 200 {
        return Inference::parse(&answer);
    }
    let refusal = refusal(&endpoint, &answer);
    if answer.status == 400 {
        // A request that does not fit is mended by looking at what the model takes.
        bail!("{refusal}\nthe inputs of model '{}' are:\n{}", model.name, model.input_lines());
    }
    bail!(refusal)
}

/// Length of the JSON part, and the body: JSON, then the bytes of every input.
fn request(model: &ModelMetadata, inputs: &[Tensor], args: &InferArgs) -> Result<(usize, Bytes)> {
    for name in &args.output {
        ensure!(
            model.outputs.iter().any(|output| output.name == *name),
            "model '{}' has no output '{name}'; its outputs are {}",
            model.name,
            model.outputs.iter().map(|output| output.name.as_str()).collect::<Vec<_>>().join(", ")
        );
    }
    let tensors: Vec<Value> = inputs
        .iter()
        .map(|tensor| {
            json!({
                "name": tensor.name,
                "datatype": tensor.data_type.wire_name(),
                "shape": tensor.shape.to_vec(),
                "parameters": { "binary_data_size": tensor.bytes.len() },
            })
        })
        .collect();
    let mut head = json!({ "inputs": tensors, "parameters": { "binary_data_output": true } });
    let all = || model.outputs.iter().map(|output| output.name.clone()).collect();
    let wanted: Vec<String> =
        if args.output.is_empty() && args.class.is_some() { all() } else { args.output.clone() };
    if let (false, Some(members)) = (wanted.is_empty(), head.as_object_mut()) {
        let output = |name: &String| match args.class {
            Some(count) => {
                json!({ "name": name, "parameters": { "binary_data": true, "classification": count } })
            }
            None => json!({ "name": name, "parameters": { "binary_data": true } }),
        };
        members.insert("outputs".to_owned(), wanted.iter().map(output).collect());
    }
    let json = serde_json::to_vec(&head)?;
    let mut sizes = inputs.iter().map(|tensor| tensor.bytes.len());
    let size = sizes.try_fold(json.len(), usize::checked_add);
    let Some(size) = size.filter(|size| *size <= tensor::MAX_BYTES) else {
        bail!("the inputs are larger than the {} bytes of a request", tensor::MAX_BYTES)
    };
    let mut body = Vec::with_capacity(size);
    body.extend_from_slice(&json);
    inputs.iter().for_each(|tensor| body.extend_from_slice(&tensor.bytes));
    Ok((json.len(), body.into()))
}

/// What a server says when it refuses.
fn refusal(endpoint: &Endpoint, answer: &Answer) -> String {
    #[derive(Deserialize)]
    struct Refusal {
        error: String,
    }
    let text = match serde_json::from_slice::<Refusal>(&answer.body) {
        Ok(refusal) => refusal.error,
        Err(_) => String::from_utf8_lossy(&answer.body).chars().take(500).collect(),
    };
    format!("{} answered {}: {}", endpoint.url(), answer.status, text.trim())
}

/// A line with the models that the server has ready, for a person who asked for another; empty if it does not tell.
fn models_hint(endpoint: &Endpoint) -> String {
    #[derive(Deserialize)]
    struct Entry {
        name: String,
        #[serde(default)]
        state: String,
    }
    let index = endpoint.post("/v2/repository/index", &[], Bytes::from_static(b"{}"));
    let entries = index.ok().filter(|answer| answer.status == 200);
    let Some(entries) = entries.and_then(|answer| serde_json::from_slice::<Vec<Entry>>(&answer.body).ok())
    else {
        return String::new();
    };
    let mut ready: Vec<&str> =
        entries.iter().filter(|entry| entry.state == "READY").map(|entry| entry.name.as_str()).collect();
    ready.dedup();
    if ready.is_empty() {
        "\nthe server has no model ready".to_owned()
    } else {
        format!("\nthe models that are ready are {}", ready.join(", "))
    }
}

#[cfg(test)]
mod tests;
