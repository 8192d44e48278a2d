//! What a server says about a model: names, data types and shapes of its tensors.

use anyhow::{Context as _, Result};
use serde::Deserialize;
use trireme_types::{DataType, Shape};

/// Answer of `GET v2/models/{model}`.
#[derive(Clone, Debug)]
pub(super) struct ModelMetadata {
    pub(super) name: String,
    pub(super) inputs: Vec<TensorMetadata>,
    pub(super) outputs: Vec<TensorMetadata>,
}

/// A tensor of a model, the batch dimension included.
#[derive(Clone, Debug)]
pub(super) struct TensorMetadata {
    pub(super) name: String,
    pub(super) data_type: DataType,
    pub(super) shape: Shape,
}

#[derive(Deserialize)]
struct ModelJson {
    name: String,
    #[serde(default)]
    inputs: Vec<TensorJson>,
    #[serde(default)]
    outputs: Vec<TensorJson>,
}

#[derive(Deserialize)]
struct TensorJson {
    name: String,
    datatype: String,
    shape: Vec<i64>,
}

impl TensorJson {
    fn read(self) -> Result<TensorMetadata> {
        let data_type = self
            .datatype
            .parse()
            .with_context(|| format!("tensor '{}' has the datatype '{}'", self.name, self.datatype))?;
        Ok(TensorMetadata { name: self.name, data_type, shape: Shape::new(&self.shape) })
    }
}

impl ModelMetadata {
    /// # Errors
    /// The text is not the metadata of a model.
    pub(super) fn parse(text: &[u8]) -> Result<Self> {
        let json: ModelJson =
            serde_json::from_slice(text).context("the server's answer is not the metadata of a model")?;
        let read = |list: Vec<TensorJson>| list.into_iter().map(TensorJson::read).collect::<Result<Vec<_>>>();
        Ok(Self { name: json.name, inputs: read(json.inputs)?, outputs: read(json.outputs)? })
    }

    /// The inputs as lines that can be typed, with what each takes.
    pub(super) fn input_lines(&self) -> String {
        let width = self.inputs.iter().map(|input| input.name.chars().count()).max().unwrap_or(0);
        let line = |input: &TensorMetadata| {
            let pad = width.saturating_sub(input.name.chars().count());
            format!("  --input {}=zeros{:pad$}   {} {}", input.name, "", input.data_type, input.shape)
        };
        self.inputs.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}
