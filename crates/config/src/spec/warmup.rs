//! `model_warmup` as the server uses it.

use std::sync::Arc;

use trireme_proto::inference::ModelWarmup;
use trireme_proto::inference::model_warmup::Input;
use trireme_proto::inference::model_warmup::input::InputDataType;
use trireme_types::{DataType, Shape};

use crate::error::{ConfigError, ConfigErrors};

/// A batch that every instance runs before its version is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WarmupSample {
    pub name: String,
    /// Copies of the sample that run together as one batch; 0 skips the sample.
    pub batch_size: usize,
    /// How often the batch runs; at least 1.
    pub count: usize,
    pub inputs: Vec<WarmupInput>,
}

/// One input of a [`WarmupSample`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WarmupInput {
    /// An input of the model, or a tensor that the sequence batcher would add.
    pub name: Arc<str>,
    pub data_type: DataType,
    /// Without the batch dimension; no dimension is open.
    pub dims: Shape,
    pub data: WarmupData,
}

/// Where the elements of a [`WarmupInput`] come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WarmupData {
    Zero,
    Random,
    /// This file in the `warmup` folder of the model.
    File(String),
}

impl WarmupSample {
    pub(super) fn of(sample: &ModelWarmup, index: usize) -> Result<Self, ConfigErrors> {
        let inputs = sample.inputs.iter().map(|(name, input)| {
            WarmupInput::of(name, input).ok_or_else(|| {
                let reason = format!(
                    "warmup setting expects input '{name}' to have data_type and input_data_type set"
                );
                ConfigError::new(reason).at_path(format!("model_warmup[{index}].inputs[\"{name}\"]")).into()
            })
        });
        Ok(Self {
            name: sample.name.clone(),
            batch_size: usize::try_from(sample.batch_size).unwrap_or(usize::MAX),
            count: usize::try_from(sample.count).unwrap_or(usize::MAX).max(1),
            inputs: inputs.collect::<Result<_, ConfigErrors>>()?,
        })
    }
}

impl WarmupInput {
    fn of(name: &str, input: &Input) -> Option<Self> {
        Some(Self {
            name: Arc::from(name),
            data_type: DataType::from_config_number(input.data_type)?,
            dims: Shape::new(&input.dims),
            data: match input.input_data_type.as_ref()? {
                InputDataType::ZeroData(_) => WarmupData::Zero,
                InputDataType::RandomData(_) => WarmupData::Random,
                InputDataType::InputDataFile(file) => WarmupData::File(file.clone()),
            },
        })
    }
}
