//! Random ensembles, finished in random order, against the same computed step by step.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use trireme_config::EnsembleFlow;
use trireme_proto::inference::ModelEnsembling;
use trireme_proto::inference::model_ensembling::Step;
use trireme_types::{DataType, Shape, TensorSpec};

use super::*;

/// A value that can be counted: the text says how it came to be.
type Token = Arc<String>;

fn token(text: impl Into<String>) -> Token {
    Arc::new(text.into())
}

fn specs(names: &[&str]) -> Vec<TensorSpec> {
    let spec = |name: &&str| TensorSpec {
        optional: true,
        ..TensorSpec::new(*name, DataType::Fp32, Shape::new(&[1]))
    };
    names.iter().map(spec).collect()
}

/// Steps as model, inputs, outputs, and whether it is decoupled.
fn plan(
    inputs: &[&str],
    steps: &[(&[&str], &[&str], bool)],
    outputs: &[&str],
    sources: Vec<Option<usize>>,
    skip: bool,
) -> Arc<Plan> {
    let map =
        |names: &[&str]| names.iter().enumerate().map(|(i, t)| (format!("P{i}"), (*t).to_owned())).collect();
    let ensemble = ModelEnsembling {
        step: steps
            .iter()
            .map(|(inputs, outputs, _)| Step {
                model_name: "m".to_owned(),
                model_version: -1,
                input_map: map(inputs),
                output_map: map(outputs),
                ..Step::default()
            })
            .collect(),
        ..ModelEnsembling::default()
    };
    let flow =
        EnsembleFlow { source_of_step: sources, is_decoupled: steps.iter().map(|step| step.2).collect() };
    Arc::new(Plan::new(&ensemble, &specs(inputs), &specs(outputs), &flow, skip))
}

fn steps_of(effects: &Effects<Token>) -> Vec<usize> {
    effects.launches.iter().map(|launch| launch.step).collect()
}

fn texts(values: &[Option<Token>]) -> Vec<Option<&str>> {
    values.iter().map(|value| value.as_ref().map(|text| text.as_str())).collect()
}

#[test]
fn one_tensor_feeds_two_steps_side_by_side_and_is_then_let_go() {
    let steps: &[(&[&str], &[&str], bool)] =
        &[(&["A"], &["f"], false), (&["f"], &["X"], false), (&["f"], &["Y"], false)];
    let plan = plan(&["A"], steps, &["X", "Y"], vec![None; 3], false);
    let mut progress = Progress::new(plan, &[0, 1]);
    let (a, f) = (token("a"), token("f"));
    let first = progress.start(vec![Some(a.clone())]);
    assert_eq!(steps_of(&first), [0]);
    assert_eq!(Arc::strong_count(&a), 2, "the launch has it, nobody else");
    let both = progress.reply(first.launches[0].run, Some(vec![Some(f.clone())]), true);
    assert_eq!(steps_of(&both), [1, 2]);
    assert_eq!(Arc::strong_count(&f), 3, "each launch has it, nobody else");
    let none = progress.reply(both.launches[1].run, Some(vec![Some(token("y"))]), true);
    assert!(none.answers.is_empty() && !progress.is_over());
    let done = progress.reply(both.launches[0].run, Some(vec![Some(token("x"))]), true);
    assert_eq!(texts(&done.answers[0]), [Some("x"), Some("y")]);
    assert!(progress.is_over());
}

#[test]
fn an_output_that_no_model_gives_is_named() {
    let plan = plan(&["A"], &[(&["A"], &["X", "Y"], false)], &["X", "Y"], vec![None], false);
    let mut progress = Progress::new(plan, &[0, 1]);
    let first = progress.start(vec![Some(token("a"))]);
    let end = progress.reply(first.launches[0].run, Some(vec![Some(token("x")), None]), true);
    assert!(end.answers.is_empty() && progress.is_over());
    assert_eq!(progress.undecided(), ["Y"]);
}

#[test]
fn steps_without_input_are_skipped_if_allowed() {
    let steps: &[(&[&str], &[&str], bool)] =
        &[(&["B"], &["t"], false), (&["t"], &["X"], false), (&["A"], &["Y"], false)];
    let skipping = plan(&["A", "B"], steps, &["X", "Y"], vec![None; 3], true);
    let mut progress = Progress::new(skipping, &[0, 1]);
    let first = progress.start(vec![Some(token("a")), None]);
    assert_eq!(steps_of(&first), [2], "the branch of B is left out, both steps of it");
    let end = progress.reply(first.launches[0].run, Some(vec![Some(token("y"))]), true);
    assert_eq!(texts(&end.answers[0]), [None, Some("y")]);
    let plain = plan(&["A", "B"], steps, &["X", "Y"], vec![None; 3], false);
    let first = Progress::new(plain, &[0, 1]).start(vec![Some(token("a")), None]);
    assert_eq!(steps_of(&first), [2, 0], "otherwise its model is asked");
    assert_eq!(texts(&first.launches[1].inputs), [None]);
}

#[test]
fn every_response_of_a_decoupled_step_goes_its_own_way() {
    // d streams; j joins each response with a tensor of the request that comes late.
    let steps: &[(&[&str], &[&str], bool)] =
        &[(&["A"], &["t"], true), (&["A"], &["late"], false), (&["late", "t"], &["X"], false)];
    let plan = plan(&["A"], steps, &["X"], vec![None, None, Some(0)], false);
    let mut progress = Progress::new(plan, &[0]);
    let first = progress.start(vec![Some(token("a"))]);
    assert_eq!(steps_of(&first), [0, 1]);
    let (d, slow) = (first.launches[0].run, first.launches[1].run);
    let waits = progress.reply(d, Some(vec![Some(token("t0"))]), false);
    assert!(waits.launches.is_empty() && waits.opened == [1] && waits.closed.is_empty());
    let late = token("late");
    let goes = progress.reply(slow, Some(vec![Some(late.clone())]), true);
    assert_eq!(texts(&goes.launches[0].inputs), [Some("late"), Some("t0")]);
    let next = progress.reply(d, Some(vec![Some(token("t1"))]), false);
    assert_eq!(texts(&next.launches[0].inputs), [Some("late"), Some("t1")]);
    let answer = progress.reply(next.launches[0].run, Some(vec![Some(token("x1"))]), true);
    assert_eq!((texts(&answer.answers[0]), answer.closed), (vec![Some("x1")], vec![1]));
    drop((next.launches, goes.answers));
    assert_eq!(Arc::strong_count(&late), 3, "more responses may come, and one runs");
    progress.reply(d, None, true);
    let run = goes.launches[0].run;
    drop(goes.launches);
    assert_eq!(Arc::strong_count(&late), 1, "the stream has ended and every response was launched");
    let last = progress.reply(run, Some(vec![Some(token("x0"))]), true);
    assert_eq!(texts(&last.answers[0]), [Some("x0")]);
    assert!(progress.is_over());
}

#[test]
fn a_stream_within_a_stream() {
    let steps: &[(&[&str], &[&str], bool)] = &[(&["A"], &["t"], true), (&["t"], &["u"], true)];
    let plan = plan(&["A"], steps, &["u"], vec![None, Some(0)], false);
    let mut progress = Progress::new(plan, &[0]);
    let mut outer = progress.start(vec![Some(token("a"))]);
    let d = outer.launches.remove(0).run;
    let mut answers = 0;
    for i in 0..3 {
        let inner = progress.reply(d, Some(vec![Some(token(format!("t{i}")))]), i == 2);
        let run = inner.launches[0].run;
        for j in 0..=i {
            let out = progress.reply(run, Some(vec![Some(token(format!("u{i}{j}")))]), false);
            assert_eq!((out.answers.len(), out.closed.len()), (1, 1));
            answers += 1;
        }
        assert_eq!(progress.reply(run, None, true).closed, [1]);
    }
    assert!(progress.is_over());
    assert_eq!(answers, 6);
    assert!(progress.scopes.len() <= 3, "scopes are used again");
}

#[test]
fn a_long_chain_needs_no_deep_stack() {
    const LENGTH: usize = 50_000;
    let names: Vec<String> = (0..=LENGTH).map(|i| format!("t{i}")).collect();
    let pairs: Vec<([&str; 1], [&str; 1])> =
        names.windows(2).map(|pair| ([pair[0].as_str()], [pair[1].as_str()])).collect();
    let steps: Vec<(&[&str], &[&str], bool)> =
        pairs.iter().map(|(from, to)| (from as &[&str], to as &[&str], false)).collect();
    let plan = plan(&["t0"], &steps, &[names[LENGTH].as_str()], vec![None; LENGTH], true);
    let skipped = Progress::new(Arc::clone(&plan), &[0]).start(vec![None]);
    assert_eq!(texts(&skipped.answers[0]), [None]);
}

/// A random ensemble: step i reads up to three tensors of what stands before it.
#[derive(Clone, Debug)]
struct Random {
    inputs: usize,
    /// For each step: what it reads (any number, taken modulo), how many outputs, whether it is decoupled.
    steps: Vec<(Vec<usize>, usize, bool)>,
    wanted: Vec<bool>,
    present: Vec<bool>,
    skip: bool,
    /// What the simulation does next, taken modulo.
    choices: Vec<usize>,
}

fn random() -> impl Strategy<Value = Random> {
    let step = (prop::collection::vec(0..1000_usize, 1..4), 1..3_usize, prop::bool::weighted(0.2));
    (
        1..4_usize,
        prop::collection::vec(step, 1..10),
        prop::collection::vec(any::<bool>(), 40),
        prop::collection::vec(prop::bool::weighted(0.8), 4),
        any::<bool>(),
        prop::collection::vec(0..1000_usize, 64),
    )
        .prop_map(|(inputs, steps, wanted, present, skip, choices)| Random {
            inputs,
            steps,
            wanted,
            present,
            skip,
            choices,
        })
}

/// A tensor of the built ensemble.
#[derive(Clone)]
struct Tensor {
    name: String,
    stream: Option<usize>,
}

struct Built {
    plan: Arc<Plan>,
    reads: Vec<Vec<String>>,
    writes: Vec<Vec<String>>,
    decoupled: Vec<bool>,
    outputs: Vec<String>,
    inputs: Vec<String>,
}

/// Makes the ensemble keep the rule that streams do not meet.
fn build(random: &Random) -> Built {
    let mut tensors: Vec<Tensor> =
        (0..random.inputs).map(|i| Tensor { name: format!("in{i}"), stream: None }).collect();
    let inputs: Vec<String> = tensors.iter().map(|tensor| tensor.name.clone()).collect();
    let (mut reads, mut writes, mut sources, mut decoupled) = (vec![], vec![], vec![], vec![]);
    for (i, (picks, outputs, is_decoupled)) in random.steps.iter().enumerate() {
        let mut stream = None;
        let mut mine = BTreeSet::new();
        for pick in picks {
            let tensor = tensors[pick % tensors.len()].clone();
            if tensor.stream.is_none() || stream.is_none() || tensor.stream == stream {
                stream = stream.or(tensor.stream);
                mine.insert(tensor.name);
            }
        }
        let to = if *is_decoupled { Some(i) } else { stream };
        let made: Vec<String> = (0..*outputs).map(|n| format!("s{i}o{n}")).collect();
        tensors.extend(made.iter().map(|name| Tensor { name: name.clone(), stream: to }));
        reads.push(mine.into_iter().collect::<Vec<_>>());
        writes.push(made);
        sources.push(stream);
        decoupled.push(*is_decoupled);
    }
    let mut stream = None;
    let mut outputs = Vec::new();
    for (tensor, wanted) in tensors.iter().zip(&random.wanted).collect::<Vec<_>>().into_iter().rev() {
        let fits = tensor.stream.is_none() || stream.is_none() || tensor.stream == stream;
        if fits && (*wanted || outputs.is_empty()) {
            stream = stream.or(tensor.stream);
            outputs.push(tensor.name.clone());
        }
    }
    let names =
        |all: &[String]| all.iter().map(|name| Box::leak(name.clone().into_boxed_str()) as &str).collect();
    let steps: Vec<(Vec<&str>, Vec<&str>, bool)> =
        (0..reads.len()).map(|i| (names(&reads[i]), names(&writes[i]), decoupled[i])).collect();
    let steps: Vec<(&[&str], &[&str], bool)> =
        steps.iter().map(|(r, w, d)| (r.as_slice(), w.as_slice(), *d)).collect();
    let (ins, outs): (Vec<&str>, Vec<&str>) = (names(&inputs), names(&outputs));
    let plan = plan(&ins, &steps, &outs, sources, random.skip);
    Built { plan, reads, writes, decoupled, outputs, inputs }
}

/// What a step makes of its inputs, as text; `n` tells the responses of a decoupled step apart.
fn made(output: &str, inputs: &[Option<&str>], n: Option<usize>) -> String {
    let inputs: Vec<&str> = inputs.iter().map(|input| input.unwrap_or("-")).collect();
    let number = n.map(|n| format!("#{n}")).unwrap_or_default();
    format!("{output}{number}({})", inputs.join(","))
}

/// The same computed without any scheduling: the values that each tensor takes, one for each scope.
fn expected(built: &Built, random: &Random, responses: &dyn Fn(usize) -> usize) -> BTreeSet<Vec<String>> {
    type Env = BTreeMap<String, Option<String>>;
    let mut request: Env = BTreeMap::new();
    for (i, name) in built.inputs.iter().enumerate() {
        request.insert(name.clone(), random.present[i].then(|| name.clone()));
    }
    // Scopes of each stream; a step runs in every scope of its stream.
    let mut scopes: BTreeMap<usize, Vec<Env>> = BTreeMap::from([(0, vec![request])]);
    for (i, reads) in built.reads.iter().enumerate() {
        let stream = built.plan.steps[i].stream;
        let request = scopes[&0][0].clone();
        let mut opened = Vec::new();
        for scope in scopes.entry(stream).or_default() {
            let found: Option<Vec<Option<String>>> =
                reads.iter().map(|name| scope.get(name).or_else(|| request.get(name)).cloned()).collect();
            let Some(inputs) = found else { continue };
            let inputs: Vec<Option<&str>> = inputs.iter().map(Option::as_deref).collect();
            let skipped = random.skip && inputs.iter().all(Option::is_none);
            if built.decoupled[i] {
                for n in (0..responses(i)).filter(|_| !skipped) {
                    let values = built.writes[i].iter();
                    opened.push(
                        values.map(|name| (name.clone(), Some(made(name, &inputs, Some(n))))).collect(),
                    );
                }
            } else {
                for name in &built.writes[i] {
                    scope.insert(name.clone(), (!skipped).then(|| made(name, &inputs, None)));
                }
            }
        }
        if built.decoupled[i] {
            scopes.entry(i + 1).or_default().extend(opened);
        }
    }
    let stream = built.plan.stream_of(&Vec::from_iter(0..built.outputs.len()));
    let request = scopes[&0][0].clone();
    let answer = |scope: &Env| {
        let value = |name: &String| scope.get(name).or_else(|| request.get(name)).cloned();
        let values: Option<Vec<Option<String>>> = built.outputs.iter().map(value).collect();
        values.map(|values| values.into_iter().map(|value| value.unwrap_or_else(|| "-".to_owned())).collect())
    };
    scopes.get(&stream).into_iter().flatten().filter_map(answer).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever order the steps end in: every output is computed right and once, each step runs once for its inputs,
    /// and nothing is kept after its last reader.
    #[test]
    fn random_ensembles_compute_what_they_say(random in random(), responses in 0..4_usize) {
        let built = build(&random);
        let count = |step: usize| (responses + step) % 4;
        let wanted: Vec<usize> = (0..built.outputs.len()).collect();
        let mut progress = Progress::new(Arc::clone(&built.plan), &wanted);
        let mut choices = random.choices.iter().copied().cycle();
        let mut tokens: Vec<std::sync::Weak<String>> = Vec::new();
        let inputs = built.inputs.iter().zip(&random.present).map(|(name, present)| present.then(|| token(name.clone())));
        let inputs: Vec<Option<Token>> = inputs.collect();
        tokens.extend(inputs.iter().flatten().map(Arc::downgrade));
        let mut effects = progress.start(inputs);
        // Running: launch, responses sent.
        let mut running: Vec<(Launch<Token>, usize)> = Vec::new();
        let mut answers: Vec<Vec<String>> = Vec::new();
        let mut launched: BTreeSet<(usize, Vec<Option<String>>)> = BTreeSet::new();
        let (mut opened, mut closed) = (0, 0);
        loop {
            opened += effects.opened.len();
            closed += effects.closed.len();
            for answer in effects.answers.drain(..) {
                answers.push(answer.iter().map(|v| v.as_ref().map_or("-".to_owned(), |v| v.to_string())).collect());
            }
            for launch in effects.launches.drain(..) {
                let key = launch.inputs.iter().map(|v| v.as_ref().map(|v| v.to_string())).collect();
                prop_assert!(launched.insert((launch.step, key)), "step {} ran twice for one input", launch.step);
                running.push((launch, 0));
            }
            if running.is_empty() {
                break;
            }
            let place = choices.next().unwrap() % running.len();
            let step = running[place].0.step;
            let texts: Vec<Option<String>> =
                running[place].0.inputs.iter().map(|v| v.as_ref().map(|v| v.to_string())).collect();
            let texts: Vec<Option<&str>> = texts.iter().map(Option::as_deref).collect();
            let sent = running[place].1;
            let is_last = !built.decoupled[step] || sent == count(step);
            let n = built.decoupled[step].then_some(sent);
            let outputs = (!built.decoupled[step] || sent < count(step)).then(|| {
                let values = built.writes[step].iter();
                values.map(|name| Some(token(made(name, &texts, n)))).collect::<Vec<_>>()
            });
            tokens.extend(outputs.iter().flatten().flatten().map(Arc::downgrade));
            let run = running[place].0.run;
            running[place].1 += 1;
            if is_last {
                running.swap_remove(place);
            }
            effects = progress.reply(run, outputs, is_last);
        }
        prop_assert!(progress.is_over());
        prop_assert_eq!(opened, closed, "every scope is closed");
        let unique: BTreeSet<Vec<String>> = answers.iter().cloned().collect();
        prop_assert_eq!(unique.len(), answers.len(), "no answer is given twice");
        prop_assert_eq!(unique, expected(&built, &random, &count));
        let kept = tokens.iter().filter(|token| token.strong_count() > 0).count();
        prop_assert_eq!(kept, 0, "all is let go");
    }

    /// Giving up at any moment leaves nothing behind and launches nothing more.
    #[test]
    fn giving_up_lets_everything_go(random in random(), steps in 0..12_usize) {
        let built = build(&random);
        let wanted: Vec<usize> = (0..built.outputs.len()).collect();
        let mut progress = Progress::new(Arc::clone(&built.plan), &wanted);
        let inputs: Vec<Option<Token>> = built.inputs.iter().map(|name| Some(token(name.clone()))).collect();
        let held: Vec<_> = inputs.iter().flatten().map(Arc::downgrade).collect();
        let mut effects = progress.start(inputs);
        let mut running: Vec<RunId> = Vec::new();
        let (mut opened, mut closed) = (0, 0);
        for i in 0..=steps {
            opened += effects.opened.len();
            closed += effects.closed.len();
            running.extend(effects.launches.drain(..).map(|launch| launch.run));
            if i == steps || running.is_empty() {
                break;
            }
            let run = running[random.choices[i] % running.len()];
            effects = progress.reply(run, Some(vec![Some(token("v")), Some(token("w"))]), false);
        }
        closed += progress.abort().closed.len();
        prop_assert_eq!(opened, closed);
        drop(effects);
        prop_assert!(held.iter().all(|token| token.strong_count() == 0));
        for run in running {
            prop_assert!(!progress.is_over());
            let after = progress.reply(run, Some(vec![Some(token("v"))]), true);
            prop_assert!(after.launches.is_empty() && after.answers.is_empty() && after.opened.is_empty());
        }
        prop_assert!(progress.is_over());
    }
}
