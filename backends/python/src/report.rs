//! What `auto_complete_config` of a model made of its configuration.

use serde_json::Value;
use trireme_types::{DataType, Error, ModelReport, ReportedTensor, Result, Shape};

/// Reads a configuration that the model completed.
///
/// # Errors
/// INVALID_ARG: a tensor has no name, or a data type or dims that do not exist.
pub(crate) fn read(config: &Value) -> Result<ModelReport> {
    let max_batch_size = config.get("max_batch_size").and_then(number).unwrap_or(0);
    let max_batch_size = i32::try_from(max_batch_size).map_err(|_| {
        Error::invalid_arg(format!("auto_complete_config set max_batch_size {max_batch_size}"))
    })?;
    let batching = max_batch_size > 0;
    let policy = config.get("model_transaction_policy").and_then(|policy| policy.get("decoupled"));
    Ok(ModelReport {
        inputs: tensors(config, "input", batching)?,
        outputs: tensors(config, "output", batching)?,
        batch_dimension: batching,
        max_batch_size: Some(max_batch_size),
        decoupled: policy.and_then(Value::as_bool),
        dynamic_batching: config.get("dynamic_batching").is_some(),
    })
}

fn number(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| value.as_str()?.parse().ok())
}

fn tensors(config: &Value, key: &str, batching: bool) -> Result<Vec<ReportedTensor>> {
    let list = config.get(key).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    list.iter().map(|tensor| self::tensor(tensor, key, batching)).collect()
}

fn tensor(tensor: &Value, key: &str, batching: bool) -> Result<ReportedTensor> {
    let name = tensor.get("name").and_then(Value::as_str).unwrap_or_default();
    let wrong = |what: &str| Error::invalid_arg(format!("{key} '{name}' of auto_complete_config {what}"));
    if name.is_empty() {
        return Err(wrong("has no name"));
    }
    let word = tensor.get("data_type").and_then(Value::as_str).unwrap_or_default();
    let data_type = DataType::ALL.into_iter().find(|data_type| data_type.config_name() == word);
    let data_type = data_type.ok_or_else(|| wrong(&format!("has the unknown data type '{word}'")))?;
    let list = tensor.get("reshape").and_then(|reshape| reshape.get("shape")).or_else(|| tensor.get("dims"));
    let dims = list.and_then(Value::as_array).ok_or_else(|| wrong("has no dims"))?;
    let dims = dims
        .iter()
        .map(number)
        .collect::<Option<Shape>>()
        .ok_or_else(|| wrong("has dims that are no numbers"))?;
    let shape = if batching { Shape::with_leading(-1, &dims) } else { dims };
    let optional = tensor.get("optional").and_then(Value::as_bool).unwrap_or(false);
    Ok(ReportedTensor { name: name.to_owned(), data_type, shape, optional })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completed_configuration_becomes_a_report() {
        let config = serde_json::json!({
            "max_batch_size": 4,
            "input": [{"name": "A", "data_type": "TYPE_FP32", "dims": ["-1", 3], "optional": true}],
            "output": [{"name": "B", "data_type": "TYPE_STRING", "dims": [1]}],
            "dynamic_batching": {},
            "model_transaction_policy": {"decoupled": true},
        });
        let report = read(&config).expect("valid");
        assert_eq!(&*report.inputs[0].shape, [-1, -1, 3]);
        assert!(report.inputs[0].optional && report.dynamic_batching && report.batch_dimension);
        assert_eq!(report.outputs[0].data_type, DataType::Bytes);
        assert_eq!((report.max_batch_size, report.decoupled), (Some(4), Some(true)));
    }

    #[test]
    fn what_cannot_be_read_names_the_tensor() {
        for tensor in [
            serde_json::json!({"name": "A", "data_type": "FP32", "dims": [1]}),
            serde_json::json!({"name": "A", "data_type": "TYPE_FP32"}),
            serde_json::json!({"name": "A", "data_type": "TYPE_FP32", "dims": ["x"]}),
        ] {
            let error = read(&serde_json::json!({"input": [tensor]})).expect_err("refused");
            assert!(error.message().contains("input 'A'"), "{error}");
        }
    }
}
