//! Rules of inputs, outputs and the tensors that are made from a batch.

use std::collections::BTreeSet;

use trireme_proto::inference::{
    BatchInput, BatchOutput, DataType, ModelTensorReshape, batch_input, batch_output, model_input,
};
use trireme_types::Shape;

use super::{Checker, TENSORRT_PLATFORM};

/// What inputs and outputs have in common.
struct Tensor<'a> {
    side: &'static str,
    path: String,
    name: &'a str,
    data_type: i32,
    dims: &'a [i64],
    reshape: Option<&'a ModelTensorReshape>,
    is_shape_tensor: bool,
    is_non_linear: bool,
}

/// Names of the configured tensors.
struct Names<'a> {
    inputs: BTreeSet<&'a str>,
    outputs: BTreeSet<&'a str>,
}

/// A tensor that is computed from, or scattered over, a batch.
struct BatchTensor<'a> {
    what: &'static str,
    kind: &'static str,
    sources: &'a [String],
    path: &'a str,
}

pub(super) fn check(checker: &mut Checker<'_>) {
    let config = checker.config;
    for (i, io) in config.input.iter().enumerate() {
        let tensor = Tensor {
            side: "input",
            path: format!("input[{i}]"),
            name: &io.name,
            data_type: io.data_type,
            dims: &io.dims,
            reshape: io.reshape.as_ref(),
            is_shape_tensor: io.is_shape_tensor,
            is_non_linear: io.is_non_linear_format_io,
        };
        common(checker, &tensor);
        let is_image = matches!(
            model_input::Format::try_from(io.format),
            Ok(model_input::Format::Nhwc | model_input::Format::Nchw)
        );
        if is_image && io.dims.len() != 3 {
            let reason = format!("model input NHWC/NCHW require 3 dims for {}", config.name);
            checker.fail(format!("input[{i}].format"), reason);
        }
    }
    for (i, io) in config.output.iter().enumerate() {
        let tensor = Tensor {
            side: "output",
            path: format!("output[{i}]"),
            name: &io.name,
            data_type: io.data_type,
            dims: &io.dims,
            reshape: io.reshape.as_ref(),
            is_shape_tensor: io.is_shape_tensor,
            is_non_linear: io.is_non_linear_format_io,
        };
        common(checker, &tensor);
    }
    let names = Names {
        inputs: config.input.iter().map(|io| io.name.as_str()).collect(),
        outputs: config.output.iter().map(|io| io.name.as_str()).collect(),
    };
    for (i, batch) in config.batch_input.iter().enumerate() {
        batch_input(checker, batch, &names, &format!("batch_input[{i}]"));
    }
    for (i, batch) in config.batch_output.iter().enumerate() {
        batch_output(checker, batch, &names, &format!("batch_output[{i}]"));
    }
}

fn common(checker: &mut Checker<'_>, tensor: &Tensor<'_>) {
    let model = &checker.config.name;
    let (side, path) = (tensor.side, &tensor.path);
    if tensor.name.is_empty() {
        checker.fail(path.clone(), format!("model {side} must specify 'name' for {model}"));
        return;
    }
    let prefix = format!("model {side} '{}'", tensor.name);
    if tensor.data_type == 0 {
        checker.fail_with_hint(
            format!("{path}.data_type"),
            format!("{prefix} must specify 'data_type' for {model}"),
            "write `data_type: TYPE_FP32` or the like",
        );
    } else if DataType::try_from(tensor.data_type).is_err() {
        let reason = format!("{prefix} has the unknown 'data_type' {} for {model}", tensor.data_type);
        checker.fail(format!("{path}.data_type"), reason);
    }
    if tensor.dims.is_empty() {
        checker.fail_with_hint(
            format!("{path}.dims"),
            format!("{prefix} must specify 'dims' for {model}"),
            "write `dims: [ ... ]` with -1 for sizes that vary; a single value has dims: [ 1 ]",
        );
        return;
    }
    let dims_path = format!("{path}.dims");
    if let Some(i) = bad_dim(tensor.dims) {
        let reason = format!(
            "{prefix} dimension must be integer >= 1, or -1 to indicate a variable-size dimension for {model}"
        );
        checker.fail(format!("{dims_path}[{i}]"), reason);
    }
    if let Some(reshape) = tensor.reshape {
        check_reshape(checker, tensor, &reshape.shape, &prefix);
    }
    if checker.config.platform == TENSORRT_PLATFORM {
        if tensor.is_non_linear && tensor.dims.len() != 3 {
            checker.fail(dims_path, format!("Non-linear IO format {side} requires 3 dims for {model}"));
        }
        return;
    }
    if tensor.is_shape_tensor {
        let reason = format!("shape tensors are only supported for TensorRT platform for {model}");
        checker.fail(format!("{path}.is_shape_tensor"), reason);
    }
    if tensor.is_non_linear {
        let reason = format!("Non-linear IO format is only supported for the TensorRT platform for {model}");
        checker.fail(format!("{path}.is_non_linear_format_io"), reason);
    }
}

fn bad_dim(dims: &[i64]) -> Option<usize> {
    dims.iter().position(|&dim| dim < 1 && dim != -1)
}

fn check_reshape(checker: &mut Checker<'_>, tensor: &Tensor<'_>, reshape: &[i64], prefix: &str) {
    let model = &checker.config.name;
    let path = format!("{}.reshape", tensor.path);
    if reshape.is_empty() && checker.config.max_batch_size == 0 {
        let reason = format!(
            "{prefix} cannot have empty reshape for non-batching model as scalar tensors are not supported for {model}"
        );
        checker.fail_with_hint(path, reason, "remove `reshape`; a scalar of such a model has dims: [ 1 ]");
        return;
    }
    if bad_dim(reshape).is_some() {
        let reason = format!(
            "{prefix} reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension for {model}"
        );
        checker.fail(path, reason);
        return;
    }
    if bad_dim(tensor.dims).is_some() {
        return;
    }
    let (dims_parts, reshape_parts) = (fixed_parts(tensor.dims), fixed_parts(reshape));
    let shapes = format!("dims are {} and reshape is {}", Shape::new(tensor.dims), Shape::new(reshape));
    if dims_parts.len() != reshape_parts.len() {
        // Triton calls it a different size when only one of the two has an open dimension.
        let one_is_fixed = dims_parts.len() == 1 || reshape_parts.len() == 1;
        let what = if one_is_fixed {
            "has different size for dims and reshape"
        } else {
            "has different number of variable-size dimensions for dims and reshape"
        };
        checker.fail_with_hint(path, format!("{prefix} {what} for {model}"), shapes);
    } else if dims_parts != reshape_parts {
        let reason = format!("{prefix} has different size for dims and reshape for {model}");
        checker.fail_with_hint(path, reason, shapes);
    }
}

/// Products of the sizes between open dimensions; `None` for one that is too large to count. `[2, 4, -1, 6]` has
/// the parts 8 and 6.
fn fixed_parts(dims: &[i64]) -> Vec<Option<i64>> {
    let product = |part: &[i64]| part.iter().try_fold(1_i64, |product, &dim| product.checked_mul(dim));
    dims.split(|&dim| dim == -1).map(product).collect()
}

fn one_source(checker: &mut Checker<'_>, names: &Names<'_>, tensor: &BatchTensor<'_>) {
    let model = &checker.config.name;
    let BatchTensor { what, kind, sources, path } = tensor;
    if sources.len() != 1 {
        let reason =
            format!("{what} kind '{kind}' expects 1 source input, got {} for {model}", sources.len());
        checker.fail(*path, reason);
    }
    for (i, source) in
        sources.iter().enumerate().filter(|(_, source)| !names.inputs.contains(source.as_str()))
    {
        let reason = format!("unknown source input name '{source}' for {model}");
        checker.fail(format!("{path}.source_input[{i}]"), reason);
    }
}

fn batch_input(checker: &mut Checker<'_>, batch: &BatchInput, names: &Names<'_>, path: &str) {
    let model = &checker.config.name;
    match batch_input::Kind::try_from(batch.kind) {
        Ok(kind) => {
            let sources = &batch.source_input;
            one_source(
                checker,
                names,
                &BatchTensor { what: "batch input", kind: kind.as_str_name(), sources, path },
            );
        }
        Err(_) => checker.fail(path, format!("unknown batch input kind '{}' for {model}", batch.kind)),
    }
    let allowed = [DataType::TypeInt32 as i32, DataType::TypeFp32 as i32];
    if !allowed.contains(&batch.data_type) {
        let reason = format!("batch input data type must be TYPE_INT32 or TYPE_FP32 for {model}");
        checker.fail(format!("{path}.data_type"), reason);
    }
}

fn batch_output(checker: &mut Checker<'_>, batch: &BatchOutput, names: &Names<'_>, path: &str) {
    let model = &checker.config.name;
    match batch_output::Kind::try_from(batch.kind) {
        Ok(kind) => {
            let sources = &batch.source_input;
            one_source(
                checker,
                names,
                &BatchTensor { what: "batch output", kind: kind.as_str_name(), sources, path },
            );
        }
        Err(_) => checker.fail(path, format!("unknown batch output kind '{}' for {model}", batch.kind)),
    }
    let mut targets = BTreeSet::new();
    for (i, target) in batch.target_name.iter().enumerate() {
        let path = format!("{path}.target_name[{i}]");
        if !names.outputs.contains(target.as_str()) {
            checker.fail(path, format!("unknown target output name '{target}' for {model}"));
        } else if !targets.insert(target) {
            checker
                .fail(path, format!("target output name '{target}' can only be specified once for {model}"));
        }
    }
}
