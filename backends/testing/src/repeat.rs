//! `repeat`: a decoupled model that sends the elements of its input back one by one.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use trireme_backend::{
    Backend, Batch, InstanceContext, Model, ModelContext, ModelInstance, ModelTensors, OpenModel,
};
use trireme_types::{DataType, Error, InferRequest, ModelReport, Responder, Result};

use crate::pause::{cancelled, wait};
use crate::stream::{MAX_RESPONSES, Streams, required, response, words};

/// Triton's sample backend `repeat`.
///
/// # Shapes
/// `IN` INT32 `[n]`, `DELAY` UINT32 `[n]` (milliseconds before each response; may be left out of the
/// configuration), `WAIT` UINT32 `[1]` (milliseconds that the execution lasts; likewise) -> n responses with `OUT`
/// INT32 `[1]` and `IDX` UINT32 `[1]`, then an end without a response.
#[derive(Clone, Copy, Debug, Default)]
pub struct RepeatBackend;

impl Backend for RepeatBackend {
    fn name(&self) -> &str {
        "repeat"
    }

    fn default_model_filename(&self) -> Option<&str> {
        None
    }

    fn open(&self, context: &ModelContext) -> Result<Box<dyn OpenModel>> {
        Ok(Box::new(Opened { name: context.name.clone(), decoupled: context.decoupled }))
    }
}

#[derive(Debug)]
struct Opened {
    name: Arc<str>,
    decoupled: bool,
}

impl OpenModel for Opened {
    fn report(&self) -> Result<Option<ModelReport>> {
        Ok(None)
    }

    fn load(self: Box<Self>, tensors: ModelTensors) -> Result<Arc<dyn Model>> {
        let refuse = |text: String| {
            Err(Error::invalid_arg(format!("model '{}' on backend 'repeat': {text}", self.name)))
        };
        if !self.decoupled {
            return refuse("expected 'model_transaction_policy { decoupled: true }'".to_owned());
        }
        if tensors.max_batch_size > 0 {
            return refuse(format!("expected max_batch_size 0, got {}", tensors.max_batch_size));
        }
        for (name, data_type, required) in [
            ("IN", DataType::Int32, true),
            ("DELAY", DataType::Uint32, false),
            ("WAIT", DataType::Uint32, false),
        ] {
            match tensors.input(name) {
                Some(spec) if spec.data_type == data_type => {}
                None if !required => {}
                _ => return refuse(format!("expected an input '{name}' of {}", data_type.config_name())),
            }
        }
        for (name, data_type) in [("OUT", DataType::Int32), ("IDX", DataType::Uint32)] {
            if tensors.output(name).is_none_or(|spec| spec.data_type != data_type) {
                return refuse(format!("expected an output '{name}' of {}", data_type.config_name()));
            }
        }
        Ok(Arc::new(Repeat { streams: Streams::default() }))
    }
}

struct Repeat {
    streams: Streams,
}

impl Model for Repeat {
    fn instance(&self, _: &InstanceContext) -> Result<Box<dyn ModelInstance>> {
        Ok(Box::new(Instance { streams: self.streams.clone(), out: "OUT".into(), idx: "IDX".into() }))
    }
}

struct Instance {
    streams: Streams,
    out: Arc<str>,
    idx: Arc<str>,
}

/// What one request asks for.
struct Plan {
    values: Vec<u32>,
    /// Milliseconds, one for each value.
    delays: Vec<u32>,
    wait: Duration,
    wanted: [bool; 2],
    names: [Arc<str>; 2],
}

impl Instance {
    fn plan(&self, request: &InferRequest) -> Result<Plan> {
        let values = words(required(request, "IN")?);
        if values.len() > MAX_RESPONSES {
            return Err(Error::invalid_arg(format!(
                "input 'IN' has {} elements, expected at most {MAX_RESPONSES}",
                values.len()
            )));
        }
        let delays = request.input("DELAY").map_or_else(|| vec![0; values.len()], words);
        if delays.len() != values.len() {
            return Err(Error::invalid_arg(format!(
                "expected 'IN' and 'DELAY' of one shape, got {} and {} elements",
                values.len(),
                delays.len()
            )));
        }
        let wait = request.input("WAIT").and_then(|input| words(input).first().copied()).unwrap_or(0);
        Ok(Plan {
            values,
            delays,
            wait: Duration::from_millis(wait.into()),
            wanted: [request.wants("OUT"), request.wants("IDX")],
            names: [self.out.clone(), self.idx.clone()],
        })
    }
}

impl Plan {
    /// Sends the responses. Whether the client stayed to the end.
    fn send(self, mut responder: Responder) -> bool {
        let [out, idx] = &self.names;
        for (index, (value, delay)) in (0_u32..).zip(self.values.iter().zip(&self.delays)) {
            if !wait(&mut responder, Duration::from_millis((*delay).into())) {
                responder.finish(Err(cancelled()));
                return false;
            }
            let outputs =
                [(out, DataType::Int32, value.to_le_bytes()), (idx, DataType::Uint32, index.to_le_bytes())];
            responder.send(Ok(response(&self.wanted, &outputs)));
        }
        responder.close();
        true
    }
}

impl ModelInstance for Instance {
    fn execute(&mut self, batch: &mut Batch) -> Result<()> {
        batch.inputs_ready();
        batch.outputs_start();
        for request in &mut batch.requests {
            let plan = match self.plan(&request.request) {
                Ok(plan) => plan,
                Err(error) => {
                    request.answer(Err(error));
                    continue;
                }
            };
            let hold = plan.wait;
            let Some(responder) = request.take_responder() else { continue };
            if plan.delays.iter().all(|delay| *delay == 0) {
                if plan.send(responder) {
                    std::thread::sleep(hold);
                }
                continue;
            }
            let (left, client_left) = mpsc::channel();
            self.streams.spawn(responder, move |responder| {
                if !plan.send(responder) {
                    // Nobody listens when the execution does not hold on.
                    let _ = left.send(());
                }
            });
            let begin = Instant::now();
            if let Err(mpsc::RecvTimeoutError::Disconnected) = client_left.recv_timeout(hold) {
                std::thread::sleep(hold.saturating_sub(begin.elapsed()));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::{Client, input, load_decoupled, run_for, run_stream, spec};

    fn tensors() -> ModelTensors {
        ModelTensors {
            max_batch_size: 0,
            inputs: vec![
                spec("IN", DataType::Int32, &[-1]),
                spec("DELAY", DataType::Uint32, &[-1]),
                spec("WAIT", DataType::Uint32, &[1]),
            ],
            outputs: vec![spec("OUT", DataType::Int32, &[1]), spec("IDX", DataType::Uint32, &[1])],
            ..ModelTensors::default()
        }
    }

    fn uint(values: &[u32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    #[test]
    fn repeats_and_then_ends() {
        let mut instance = load_decoupled(&RepeatBackend, &[], tensors()).expect("a valid model");
        for delays in [[0, 0, 0], [1, 0, 2]] {
            let inputs = vec![
                input("IN", DataType::Int32, &[3], uint(&[7, 8, 9])),
                input("DELAY", DataType::Uint32, &[3], uint(&delays)),
            ];
            let replies = run_stream(instance.as_mut(), inputs, &[]);
            let sent: Vec<_> = replies
                .iter()
                .map(|(reply, last)| {
                    let response = reply.as_ref().map(|r| r.as_ref().expect("no error"));
                    let bytes = |name| response.map(|r| r.output(name).expect(name).data.as_slice()[0]);
                    (bytes("OUT"), bytes("IDX"), *last)
                })
                .collect();
            let expected = [
                (Some(7), Some(0), false),
                (Some(8), Some(1), false),
                (Some(9), Some(2), false),
                (None, None, true),
            ];
            assert_eq!(sent, expected);
        }
        let none = vec![input("IN", DataType::Int32, &[0], Vec::new())];
        assert_eq!(run_stream(instance.as_mut(), none, &[]).len(), 1);
    }

    #[test]
    fn stops_when_the_client_leaves() {
        let mut instance = load_decoupled(&RepeatBackend, &[], tensors()).expect("a valid model");
        let client = Client::default();
        let leaving = client.clone();
        let leaver = std::thread::spawn(move || {
            leaving.wait_for_reply();
            leaving.leave();
        });
        let start = Instant::now();
        let inputs = vec![
            input("IN", DataType::Int32, &[3], uint(&[7, 8, 9])),
            input("DELAY", DataType::Uint32, &[3], uint(&[1, 60_000, 60_000])),
            input("WAIT", DataType::Uint32, &[1], uint(&[60_000])),
        ];
        let replies = run_for(&client, instance.as_mut(), inputs, &[]);
        leaver.join().expect("no panic");
        assert!(start.elapsed() < Duration::from_secs(30), "neither the delay nor the wait is held on to");
        let [(Some(Ok(_)), false), (Some(Err(error)), true)] = &replies[..] else {
            panic!("expected one response and an error, got {replies:?}")
        };
        assert_eq!(error.code(), trireme_types::Code::Cancelled);
    }

    #[test]
    fn refuses_too_many_and_unequal_counts() {
        let mut instance = load_decoupled(&RepeatBackend, &[], tensors()).expect("a valid model");
        let count = MAX_RESPONSES + 1;
        let many = vec![input("IN", DataType::Int32, &[count as i64], vec![0; count * 4])];
        let unequal = vec![
            input("IN", DataType::Int32, &[1], uint(&[7])),
            input("DELAY", DataType::Uint32, &[2], uint(&[1, 1])),
        ];
        for (inputs, message) in
            [(many, "at most 1000000"), (unequal, "got 1 and 2 elements"), (vec![], "'IN'")]
        {
            let replies = run_stream(instance.as_mut(), inputs, &[]);
            let error = replies[0].0.as_ref().expect("an answer").as_ref().expect_err("an error");
            assert!(error.message().contains(message), "{error}");
        }
    }

    #[test]
    fn refuses_a_model_that_is_not_decoupled() {
        let error = crate::harness::load(&RepeatBackend, &[], tensors()).err().expect("an error");
        assert!(error.message().contains("decoupled: true"), "{error}");
    }
}
