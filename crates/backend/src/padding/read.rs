//! From the `padding.` parameters of a configuration to a plan.

use std::collections::BTreeMap;

use trireme_types::{DataType, Error, Result, TensorSpec};

use super::element::{self, Element};
use super::{PaddedInput, PaddedOutput, PaddingPlan};

const PREFIX: &str = "padding.";
const INPUTS: &str = "padding.inputs";
const OUTPUTS: &str = "padding.outputs";
const MASK: &str = "padding.mask";
const VALUE: &str = "padding.value";
const BUCKETS: &str = "padding.buckets";

impl PaddingPlan {
    /// Reads the parameters that begin with `padding.`; `None` if there are none.
    ///
    /// - `padding.inputs`: the inputs to pad, separated by commas; `name:axis` where an input has several open
    ///   dimensions, the axis without the batch dimension.
    /// - `padding.value`, `padding.value.NAME`: what they are filled with, for all and for one; 0 if not given.
    /// - `padding.mask`: the input that is 1 for real elements and 0 for others.
    /// - `padding.buckets`: ascending lengths, separated by commas. Without them a batch is padded to its longest.
    /// - `padding.outputs`: the outputs to cut back, as `padding.inputs`; those with one open dimension if not given.
    ///
    /// # Errors
    /// INVALID_ARG: a parameter that there is not, or a value that does not fit the tensors; the message says what
    /// would.
    pub fn read(
        parameters: &BTreeMap<String, String>,
        max_batch_size: usize,
        inputs: &[TensorSpec],
        outputs: &[TensorSpec],
    ) -> Result<Option<Self>> {
        let mut given = parameters.keys().filter(|key| key.starts_with(PREFIX)).peekable();
        if given.peek().is_none() {
            return Ok(None);
        }
        for key in given {
            let of_input = key.strip_prefix(VALUE).and_then(|rest| rest.strip_prefix('.'));
            if of_input.is_none() && ![INPUTS, OUTPUTS, MASK, VALUE, BUCKETS].contains(&key.as_str()) {
                return Err(wrong(format!(
                    "parameter '{key}' is none of those for padding: {INPUTS}, {OUTPUTS}, {MASK}, {VALUE}, \
                     {VALUE}.NAME, {BUCKETS}"
                )));
            }
        }
        if max_batch_size == 0 {
            return Err(wrong(format!(
                "padding makes requests of different lengths share a batch, and max_batch_size is 0; set it to the \
                 largest batch, or remove the parameters that begin with {PREFIX}"
            )));
        }
        let reader = Reader { parameters, inputs, outputs };
        let padded = reader.inputs()?;
        reader.values_are_of(&padded)?;
        let mask = reader.mask(&padded)?;
        Ok(Some(Self { mask, buckets: reader.buckets()?, outputs: reader.outputs()?, inputs: padded }))
    }
}

struct Reader<'a> {
    parameters: &'a BTreeMap<String, String>,
    inputs: &'a [TensorSpec],
    outputs: &'a [TensorSpec],
}

impl Reader<'_> {
    fn list(&self, key: &str) -> Option<impl Iterator<Item = &str>> {
        let items = self.parameters.get(key)?.split(',').map(str::trim);
        Some(items.filter(|item| !item.is_empty()))
    }

    fn inputs(&self) -> Result<Vec<PaddedInput>> {
        let mut padded: Vec<PaddedInput> = Vec::new();
        for item in self.list(INPUTS).into_iter().flatten() {
            let (spec, axis) = tensor(INPUTS, item, "input", self.inputs)?;
            let refuse = |why: &str| Err(wrong(format!("{INPUTS}: input '{}' {why}", spec.name)));
            if padded.iter().any(|earlier| earlier.name == spec.name) {
                return refuse("is named twice");
            }
            if spec.ragged {
                return refuse(
                    "has allow_ragged_batch, which joins requests without padding; remove one of the two",
                );
            }
            if spec.shape_tensor {
                return refuse("is a shape tensor, whose values are not data to pad");
            }
            if spec.data_type == DataType::Bytes {
                return refuse("is of TYPE_STRING; only numbers and TYPE_BOOL can be padded");
            }
            padded.push(PaddedInput { filler: self.filler(spec)?, ..padded_input(spec, axis) });
        }
        let required =
            |padded: &PaddedInput| self.inputs.iter().any(|spec| spec.name == padded.name && !spec.optional);
        if !padded.iter().any(required) {
            return Err(wrong(format!(
                "{INPUTS} must name an input that every request has and that has an open dimension; the model's inputs \
                 are {}",
                names(self.inputs)
            )));
        }
        Ok(padded)
    }

    fn filler(&self, spec: &TensorSpec) -> Result<Element> {
        let own = format!("{VALUE}.{}", spec.name);
        let key = if self.parameters.contains_key(&own) { own.as_str() } else { VALUE };
        let text = self.parameters.get(key).map_or("0", |text| text.trim());
        element::read(spec.data_type, text).ok_or_else(|| {
            wrong(format!(
                "{key} is '{text}', which is no element of input '{}' of {}",
                spec.name,
                spec.data_type.config_name()
            ))
        })
    }

    /// Every `padding.value.NAME` is about an input that is padded.
    fn values_are_of(&self, padded: &[PaddedInput]) -> Result<()> {
        for key in self.parameters.keys() {
            let Some(name) = key.strip_prefix(VALUE).and_then(|rest| rest.strip_prefix('.')) else {
                continue;
            };
            if !padded.iter().any(|input| &*input.name == name) {
                return Err(wrong(format!("{key} is about an input that {INPUTS} does not name")));
            }
        }
        Ok(())
    }

    fn mask(&self, padded: &[PaddedInput]) -> Result<Option<PaddedInput>> {
        let Some(name) = self.parameters.get(MASK).map(|name| name.trim()) else { return Ok(None) };
        let (spec, axis) = tensor(MASK, name, "input", self.inputs)?;
        let refuse = |why: &str| Err(wrong(format!("{MASK}: input '{}' {why}", spec.name)));
        if padded.iter().any(|input| input.name == spec.name) {
            return refuse(&format!("is also in {INPUTS}; the server makes the mask, so remove it there"));
        }
        if spec.ragged || spec.shape_tensor {
            return refuse("is ragged or a shape tensor, and cannot tell which elements are real");
        }
        let others = spec.dims.iter().enumerate().filter(|(index, _)| *index != axis);
        if others.into_iter().any(|(_, &dim)| dim != 1) {
            return refuse(&format!(
                "has the dims {}; a mask has one open dimension and is 1 in every other",
                spec.dims
            ));
        }
        let elements = element::read(spec.data_type, "0").zip(element::read(spec.data_type, "1"));
        let Some((filler, real)) = elements else {
            return refuse("is of TYPE_STRING; a mask is of numbers or TYPE_BOOL");
        };
        Ok(Some(PaddedInput { filler, real, ..padded_input(spec, axis) }))
    }

    fn outputs(&self) -> Result<Vec<PaddedOutput>> {
        let Some(named) = self.list(OUTPUTS) else { return self.open_outputs() };
        let padded = |item| {
            let (spec, axis) = tensor(OUTPUTS, item, "output", self.outputs)?;
            Ok(PaddedOutput { name: spec.name.clone(), axis })
        };
        named.map(padded).collect()
    }

    /// Outputs with one open dimension, which is taken for that of the inputs.
    fn open_outputs(&self) -> Result<Vec<PaddedOutput>> {
        let mut padded = Vec::new();
        for spec in self.outputs {
            let mut open = spec.dims.iter().enumerate().filter(|(_, dim)| **dim < 0).map(|(axis, _)| axis);
            let Some(axis) = open.next() else { continue };
            if open.next().is_some() {
                return Err(wrong(format!(
                    "output '{0}' has the dims {1}, and it cannot be told which of them has the length of the padded \
                     inputs; set {OUTPUTS} to the outputs that are to be cut back, as '{0}:{axis}'",
                    spec.name, spec.dims
                )));
            }
            padded.push(PaddedOutput { name: spec.name.clone(), axis });
        }
        Ok(padded)
    }

    fn buckets(&self) -> Result<Vec<usize>> {
        let Some(items) = self.list(BUCKETS) else { return Ok(Vec::new()) };
        let mut buckets: Vec<usize> = Vec::new();
        for item in items {
            let bucket =
                item.parse::<usize>().ok().filter(|&bucket| bucket > 0 && i64::try_from(bucket).is_ok());
            match bucket {
                Some(bucket) if buckets.last().is_none_or(|&last| last < bucket) => buckets.push(bucket),
                _ => {
                    return Err(wrong(format!(
                        "{BUCKETS} is '{}', and '{item}' is not a length above the one before it; write ascending \
                         lengths, as '32, 64, 128'",
                        self.parameters.get(BUCKETS).map_or("", String::as_str)
                    )));
                }
            }
        }
        if buckets.is_empty() {
            return Err(wrong(format!(
                "{BUCKETS} names no length; write ascending lengths, as '32, 64, 128', or remove it to pad to the \
                 longest of a batch"
            )));
        }
        Ok(buckets)
    }
}

fn padded_input(spec: &TensorSpec, axis: usize) -> PaddedInput {
    PaddedInput {
        name: spec.name.clone(),
        data_type: spec.data_type,
        axis,
        rank: spec.dims.len(),
        filler: Element::new(),
        real: Element::new(),
    }
}

/// The tensor and the axis that `name` or `name:axis` means.
fn tensor<'a>(key: &str, item: &str, side: &str, specs: &'a [TensorSpec]) -> Result<(&'a TensorSpec, usize)> {
    let find = |name: &str| specs.iter().find(|spec| &*spec.name == name);
    let (spec, axis) = match (find(item), item.rsplit_once(':')) {
        (Some(spec), _) => (spec, None),
        (None, Some((name, axis))) if find(name).is_some() => {
            (find(name).ok_or_else(|| wrong(format!("{key}: no {side} '{name}'")))?, Some(axis.trim()))
        }
        _ => {
            return Err(wrong(format!(
                "{key} names the {side} '{item}', and the model's {side}s are {}",
                names(specs)
            )));
        }
    };
    let open: Vec<usize> =
        spec.dims.iter().enumerate().filter(|(_, dim)| **dim < 0).map(|(axis, _)| axis).collect();
    let axis = match axis {
        Some(text) => text.parse::<usize>().ok().filter(|axis| open.contains(axis)),
        None if open.len() > 1 => {
            return Err(wrong(format!(
                "{key}: {side} '{0}' has the dims {1} with several open dimensions; say which one follows the length, as \
                 '{0}:{2}'",
                spec.name,
                spec.dims,
                open.first().copied().unwrap_or(0)
            )));
        }
        None => open.first().copied(),
    };
    let axis = axis.ok_or_else(|| {
        wrong(format!(
            "{key}: '{item}' means no open dimension of {side} '{}', whose dims are {} without the batch dimension",
            spec.name, spec.dims
        ))
    })?;
    Ok((spec, axis))
}

fn names(specs: &[TensorSpec]) -> String {
    let names: Vec<String> = specs.iter().map(|spec| format!("'{}' {}", spec.name, spec.dims)).collect();
    names.join(", ")
}

fn wrong(message: String) -> Error {
    Error::invalid_arg(message)
}
