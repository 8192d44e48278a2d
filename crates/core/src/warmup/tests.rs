//! What reaches the instances, and what becomes of their answers.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use trireme_config::parse_pbtxt;

use super::*;

/// What an instance does with a batch.
type Behaviour = fn(&mut Batch) -> Result<()>;

/// Notes the shapes of each batch it runs.
struct Instance {
    seen: Arc<Mutex<Vec<Vec<String>>>>,
    behaviour: Behaviour,
}

impl ModelInstance for Instance {
    fn execute(&mut self, batch: &mut Batch) -> Result<()> {
        let shapes = batch.requests.iter().map(|r| {
            assert_eq!(r.request.batch_size, 1);
            r.request.inputs.iter().map(|input| format!("{}{}", input.name, input.shape)).collect::<String>()
        });
        self.seen.lock().push(shapes.collect());
        (self.behaviour)(batch)
    }
}

fn answers(batch: &mut Batch) -> Result<()> {
    batch.requests.iter_mut().for_each(|request| request.answer(Ok(InferResponse::default())));
    Ok(())
}

/// Runs the warm-up of a configuration on so many instances; the batches of all of them.
fn warm_up(text: &str, instances: usize, behaviour: Behaviour) -> Result<Vec<Vec<String>>> {
    let config = parse_pbtxt(text.as_bytes(), "c").unwrap().config;
    let spec = ModelSpec::from_config(&config).unwrap();
    let seen = Arc::default();
    let mut boxes: Vec<Box<dyn ModelInstance>> = (0..instances)
        .map(|_| Box::new(Instance { seen: Arc::clone(&seen), behaviour }) as Box<dyn ModelInstance>)
        .collect();
    let names: Vec<String> = (0..instances).map(|i| format!("m_{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    run(&spec, Path::new("/nowhere"), &mut boxes, &names, 2)?;
    let seen = seen.lock();
    Ok(seen.clone())
}

const INPUT: &str = "name: 'm' input { name: 'X' data_type: TYPE_FP32 dims: [ -1, 4 ] }";
const SAMPLE: &str = "inputs { key: 'X' value { data_type: TYPE_FP32 dims: [ 2, 4 ] zero_data: true } }";

#[test]
fn copies_of_one_row_are_one_batch() {
    let text =
        format!("{INPUT} max_batch_size: 8 model_warmup {{ name: 'w' batch_size: 3 count: 2 {SAMPLE} }}");
    assert_eq!(warm_up(&text, 1, answers).unwrap(), vec![vec!["X[1,2,4]"; 3]; 2]);
    assert_eq!(warm_up(&text, 5, answers).unwrap().len(), 10, "every instance runs every repeat");
}

#[test]
fn a_model_without_a_batch_dimension_gets_none() {
    let text = format!("{INPUT} model_warmup {{ name: 'w' batch_size: 1 {SAMPLE} }}");
    assert_eq!(warm_up(&text, 1, answers).unwrap(), [["X[2,4]"]]);
    let skipped = format!("{INPUT} model_warmup {{ name: 'w' {SAMPLE} }}");
    assert!(warm_up(&skipped, 1, answers).unwrap().is_empty());
}

#[test]
fn tensors_of_the_sequence_batcher_are_inputs_like_the_others() {
    let text = "name: 'm' max_batch_size: 2 sequence_batching { control_input { name: 'START' } }
        model_warmup { name: 'w' batch_size: 1
          inputs { key: 'START' value { data_type: TYPE_INT32 dims: [ 1 ] random_data: true } } }";
    assert_eq!(warm_up(text, 1, answers).unwrap(), [["START[1,1]"]]);
}

#[test]
fn one_round_of_an_iterative_sequence_is_enough() {
    let text = format!("{INPUT} model_warmup {{ name: 'w' batch_size: 1 {SAMPLE} }}");
    let again = |batch: &mut Batch| {
        batch.requests[0].reschedule();
        Ok(())
    };
    assert_eq!(warm_up(&text, 1, again).unwrap().len(), 1);
}

#[test]
fn a_failure_names_the_sample_the_instance_and_the_reason() {
    let text = format!("{INPUT} max_batch_size: 8 model_warmup {{ name: 'w' batch_size: 2 {SAMPLE} }}");
    let silent = "the backend ended the execution without an answer to this request";
    let cases: [(Behaviour, &str); 4] = [
        (|_| Err(Error::internal("no memory")), "no memory"),
        (|_| panic!("this panic is meant"), "the backend panicked"),
        (|_| Ok(()), silent),
        (
            |batch| {
                batch.requests[0].answer(Ok(InferResponse::default()));
                batch.requests[1].answer(Err(Error::internal("the second")));
                Ok(())
            },
            "the second",
        ),
    ];
    for (behaviour, reason) in cases {
        let error = warm_up(&text, 1, behaviour).unwrap_err();
        assert_eq!(
            error.message(),
            format!("failed to run warmup sample 'w': instance m_0: {reason}"),
            "{error}"
        );
    }
    let huge =
        format!("{INPUT} max_batch_size: 999999 model_warmup {{ name: 'w' batch_size: 99999 {SAMPLE} }}");
    let error = warm_up(&huge, 1, answers).unwrap_err();
    assert!(error.message().contains("99999 copies of 32 bytes are too many"), "{error}");
    let file = SAMPLE.replace("zero_data: true", "input_data_file: 'x'");
    let absent = format!("{INPUT} model_warmup {{ name: 'w' batch_size: 1 {file} }}");
    let error = warm_up(&absent, 1, answers).unwrap_err();
    assert!(error.message().contains("/nowhere/warmup/x"), "{error}");
}

#[test]
fn a_decoupled_model_is_waited_for() {
    let text = format!("{INPUT} model_warmup {{ name: 'w' batch_size: 1 count: 3 {SAMPLE} }}");
    // Each execution ends at once and answers 20 ms later; the error of the first repeat ends the warm-up.
    let late = |batch: &mut Batch| {
        let mut responder = batch.requests[0].take_responder().unwrap();
        thread::spawn(move || {
            responder.send(Ok(InferResponse::default()));
            thread::sleep(Duration::from_millis(20));
            responder.send(Err(Error::internal("late")));
            responder.close();
        });
        Ok(())
    };
    let error = warm_up(&text, 1, late).unwrap_err();
    assert!(error.message().ends_with("late"), "{error}");
    let well = |batch: &mut Batch| {
        let responder = batch.requests[0].take_responder().unwrap();
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            responder.close();
        });
        Ok(())
    };
    let begin = Instant::now();
    assert_eq!(warm_up(&text, 1, well).unwrap().len(), 3);
    assert!(begin.elapsed() >= Duration::from_millis(60), "the next repeat begins when the last has ended");
}
