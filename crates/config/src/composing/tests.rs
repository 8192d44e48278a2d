//! Ensembles checked against models of every kind of misfit.

use super::*;
use crate::{parse_pbtxt, validate};

fn spec(name: &str, data_type: DataType, dims: &[i64]) -> TensorSpec {
    TensorSpec::new(name, data_type, Shape::new(dims))
}

/// A model from `X` to `Y`.
struct Model {
    name: &'static str,
    max_batch_size: usize,
    decoupled: bool,
    inputs: Vec<TensorSpec>,
    outputs: Vec<TensorSpec>,
}

impl Model {
    fn new(name: &'static str, max_batch_size: usize, data_type: DataType, dims: &[i64]) -> Self {
        let (inputs, outputs) = (vec![spec("X", data_type, dims)], vec![spec("Y", data_type, dims)]);
        Self { name, max_batch_size, decoupled: false, inputs, outputs }
    }

    fn decoupled(self) -> Self {
        Self { decoupled: true, ..self }
    }

    fn with_input(mut self, input: TensorSpec) -> Self {
        self.inputs.push(input);
        self
    }

    fn view(&self) -> ComposingModel<'_> {
        ComposingModel {
            name: self.name,
            max_batch_size: self.max_batch_size,
            inputs: &self.inputs,
            outputs: &self.outputs,
            decoupled: self.decoupled,
        }
    }
}

/// A step: its model, input and tensor of each mapping, and the tensor of its output.
type Step<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a str);

/// An ensemble from `A` to `outputs`, FP32 `[4]`.
fn ensemble(batch: usize, steps: &[Step<'_>], outputs: &[&str]) -> ModelConfig {
    let mut text = format!(
        "name: 'e' platform: 'ensemble' max_batch_size: {batch} input {{ name: 'A' data_type: TYPE_FP32 dims: 4 }} \
         version_policy {{ latest {{ num_versions: 1 }} }} "
    );
    for output in outputs {
        text += &format!("output {{ name: '{output}' data_type: TYPE_FP32 dims: 4 }} ");
    }
    text += "ensemble_scheduling {";
    for (model, inputs, output) in steps {
        text += &format!("step {{ model_name: '{model}' model_version: -1 ");
        for (name, tensor) in *inputs {
            text += &format!("input_map {{ key: '{name}' value: '{tensor}' }} ");
        }
        text += &format!("output_map {{ key: 'Y' value: '{output}' }} }}");
    }
    parse_pbtxt((text + "}").as_bytes(), "config.pbtxt").unwrap().config
}

fn check(config: &ModelConfig, models: &[&Model]) -> Result<EnsembleFlow, String> {
    validate(config, &crate::MachineFacts::default()).unwrap();
    let views: Vec<_> = models.iter().map(|model| model.view()).collect();
    check_ensemble(config, &views).map(|(flow, _)| flow).map_err(|errors| errors.first().reason().to_owned())
}

#[test]
fn a_chain_that_fits() {
    let config = ensemble(8, &[("m", &[("X", "A")], "t"), ("n", &[("X", "t")], "B")], &["B"]);
    let m = Model::new("m", 8, DataType::Fp32, &[4]);
    let n = Model::new("n", 16, DataType::Fp32, &[-1]);
    let flow = check(&config, &[&m, &n]).unwrap();
    assert_eq!(flow.source_of_step, [None, None]);
    assert!(!flow.decoupled());
}

#[test]
fn says_which_step_does_not_fit() {
    let config = ensemble(8, &[("m", &[("X", "A")], "t"), ("n", &[("X", "t")], "B")], &["B"]);
    let good = Model::new("m", 8, DataType::Fp32, &[4]);
    for (n, reason) in [
        (
            Model::new("n", 4, DataType::Fp32, &[4]),
            "ensemble e allows maximum batch size 8, but it contains model n which only allows maximum batch size of 4 \
             (step 1)",
        ),
        (
            Model::new("n", 8, DataType::Int32, &[4]),
            "in ensemble e, ensemble tensor t: inconsistent data type: TYPE_FP32 is inferred from model m while \
             TYPE_INT32 is inferred from model n (step 1)",
        ),
        (
            Model::new("n", 8, DataType::Fp32, &[5]),
            "in ensemble e, ensemble tensor t: inconsistent shape: [-1,4] is inferred from model m while [-1,5] is \
             inferred from model n (step 1)",
        ),
        (
            Model::new("n", 8, DataType::Fp32, &[4]).with_input(spec("Z", DataType::Fp32, &[1])),
            "in ensemble e, input Z in model n is not mapped to any ensemble tensor (step 1)",
        ),
    ] {
        let told = check(&config, &[&good, &n]).unwrap_err();
        assert!(told.contains(reason), "{told}");
    }
    let mut odd = Model::new("n", 8, DataType::Fp32, &[4]);
    odd.inputs[0].name = "Q".into();
    let views = [good.view(), odd.view()];
    let errors = check_ensemble(&config, &views).unwrap_err();
    assert_eq!(
        errors.first().reason(),
        "in ensemble e, ensemble tensor t is mapping to non-existing input X in model n (step 1)"
    );
    assert_eq!(errors.first().path(), Some("ensemble_scheduling.step[1].input_map[\"X\"]"));
    assert_eq!(errors.first().hint(), Some("the inputs of model n are 'Q'"));
}

#[test]
fn an_optional_input_need_not_be_mapped() {
    let config = ensemble(0, &[("m", &[("X", "A")], "B")], &["B"]);
    let mut extra = spec("Z", DataType::Fp32, &[1]);
    extra.optional = true;
    assert!(check(&config, &[&Model::new("m", 0, DataType::Fp32, &[4]).with_input(extra)]).is_ok());
}

#[test]
fn an_optional_input_that_must_be_there_is_a_warning() {
    let mut config = ensemble(0, &[("j", &[("X", "A"), ("Z", "A2")], "B")], &["B"]);
    config.input.push(config.input[0].clone());
    config.input[1].name = "A2".to_owned();
    let j = Model::new("j", 0, DataType::Fp32, &[4]).with_input(spec("Z", DataType::Fp32, &[4]));
    let notes = |config: &ModelConfig| check_ensemble(config, &[j.view()]).unwrap().1;
    assert!(notes(&config).is_empty());
    config.input[1].optional = true;
    assert_eq!(
        notes(&config)[0].message,
        "input 'A2' of ensemble 'e' is optional, but input 'Z' of model 'j' (step 0), which it feeds, is not: a request \
         without it fails"
    );
}

#[test]
fn batching_and_not_may_follow_each_other() {
    let config = ensemble(8, &[("m", &[("X", "A")], "t"), ("n", &[("X", "t")], "B")], &["B"]);
    let m = Model::new("m", 8, DataType::Fp32, &[4]);
    for dims in [&[4_i64] as &[i64], &[-1, 4]] {
        assert!(check(&config, &[&m, &Model::new("n", 0, DataType::Fp32, dims)]).is_ok(), "{dims:?}");
    }
    assert!(check(&config, &[&m, &Model::new("n", 0, DataType::Fp32, &[2, 4, 4])]).is_err());
}

#[test]
fn finds_the_stream_of_each_step() {
    let steps: &[Step<'_>] =
        &[("d", &[("X", "A")], "t"), ("m", &[("X", "t")], "u"), ("j", &[("X", "u"), ("Z", "A")], "B")];
    let config = ensemble(0, steps, &["B"]);
    let d = Model::new("d", 0, DataType::Fp32, &[4]).decoupled();
    let m = Model::new("m", 0, DataType::Fp32, &[4]);
    let j = Model::new("j", 0, DataType::Fp32, &[4]).with_input(spec("Z", DataType::Fp32, &[4]));
    let flow = check(&config, &[&d, &m, &j]).unwrap();
    assert_eq!(flow.source_of_step, [None, Some(0), Some(0)]);
    assert!(flow.decoupled());
    // Two streams must not meet, neither in a step nor in the response.
    let other = Model::new("m", 0, DataType::Fp32, &[4]).decoupled();
    let both: &[Step<'_>] =
        &[("d", &[("X", "A")], "t"), ("m", &[("X", "A")], "u"), ("j", &[("X", "u"), ("Z", "t")], "B")];
    let told = check(&ensemble(0, both, &["B"]), &[&d, &other, &j]).unwrap_err();
    assert_eq!(
        told,
        "in ensemble e, step 2 receives inputs originated from different decoupled models: 'd' (step 0) and 'm' (step 1)"
    );
    let apart: &[Step<'_>] = &[("d", &[("X", "A")], "B"), ("m", &[("X", "A")], "C")];
    let told = check(&ensemble(0, apart, &["B", "C"]), &[&d, &other]).unwrap_err();
    assert!(told.contains("the ensemble's response receives inputs originated"), "{told}");
}
