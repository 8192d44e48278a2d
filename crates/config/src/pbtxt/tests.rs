//! The text form: what is accepted, what is refused and with which words.

use proptest::prelude::*;
use trireme_proto::inference::model_config::SchedulingChoice;

use super::*;
use crate::testing::{Random, random_config};

fn read(text: &str) -> ModelConfig {
    parse_pbtxt(text.as_bytes(), "config.pbtxt").unwrap_or_else(|errors| panic!("{text}\n{errors}")).config
}

/// All errors of a text that must be refused.
fn refuse(text: &str) -> Vec<ConfigError> {
    match parse_pbtxt(text.as_bytes(), "config.pbtxt") {
        Ok(parsed) => panic!("accepted: {text}\n{:?}", parsed.config),
        Err(errors) => errors.into_iter().collect(),
    }
}

/// The only error of a text, with its place and the words it must hold.
#[track_caller]
fn refused_at(text: &str, line: u32, column: u32, words: &[&str]) {
    let errors = refuse(text);
    let error = &errors[0];
    let shown = error.to_string();
    assert_eq!((error.line, error.column), (Some(line), Some(column)), "{shown}");
    for word in words {
        assert!(shown.contains(word), "`{word}` is not in:\n{shown}");
    }
    assert_eq!(errors.len(), 1, "{errors:#?}");
}

#[test]
fn forms_that_the_reference_accepts() {
    let usual =
        read("name: \"m\" input [ { name: \"X\" data_type: TYPE_FP32 dims: [ 1, -1 ] } ] max_batch_size: 8");
    let forms = [
        "name: 'm' input { name: 'X' data_type: 11 dims: 1 dims: -1 } max_batch_size: 8",
        "name:\"m\",input<name:\"X\";data_type:TYPE_FP32,dims:[1,-1]>;max_batch_size:0x8,",
        "name: 'm' input: { name: 'X' data_type: TYPE_FP32 dims: [1] dims: - 1 dims: [] } max_batch_size: 010",
        "# a comment\nname: \"\" 'm' # another\ninput: [ < name: '\\x58' data_type: TYPE_FP32 dims: [0x1, -0x1] > ]\nmax_batch_size: 8",
        "max_batch_size: 8 name: \"\\155\" input [] input [ { dims: 1 dims: -1 data_type: TYPE_FP32 name: \"\\u0058\" } ] output: [ ]",
        "max_batch_size: 0 max_batch_size: 8 name: 'm' input { dims: [1, -1] name: 'X' data_type: TYPE_FP32 }",
    ];
    for form in forms {
        assert_eq!(read(form), usual, "{form}");
    }
}

#[test]
fn maps_oneofs_and_floats() {
    let config = read(
        "parameters { key: 'a' value { string_value: '1' } }
         parameters [ { value: < string_value: '2' > key: 'b' }, { key: 'a' value: { string_value: '3' } }, { } ]
         cc_model_filenames { key: '8.0' value: 'x' } metric_tags { key: 'k' }
         sequence_batching { direct { minimum_slot_utilization: .5f max_queue_delay_microseconds: 18446744073709551615 }
           control_input [ { name: 'S' control [ { fp32_false_true: [ -1e0, INF ] bool_false_true: [f, True, 1, 0] } ] } ] }
         model_metrics { metric_control { histogram_options { buckets: [ 0.1, 1, 2.5e2F, -inf ] } } }",
    );
    let values: Vec<_> =
        config.parameters.iter().map(|(k, v)| (k.as_str(), v.string_value.as_str())).collect();
    assert_eq!(values, [("", ""), ("a", "3"), ("b", "2")]);
    assert_eq!(config.metric_tags["k"], "");
    let Some(SchedulingChoice::SequenceBatching(batching)) = config.scheduling_choice else { panic!() };
    let control = &batching.control_input[0].control[0];
    assert_eq!(control.fp32_false_true, [-1.0, f32::INFINITY]);
    assert_eq!(control.bool_false_true, [false, true, true, false]);
    let metrics = config.model_metrics.unwrap();
    assert_eq!(metrics.metric_control.len(), 1);
}

#[test]
fn spans_follow_the_members() {
    let text = "name: \"m\"\ninput [\n  { name: \"X\"\n    dims: [ 4,\n 5 ] }, { name: \"Y\" }\n]\nparameters { key: \"a.b]\" value { string_value: \"1\" } }\n";
    let parsed = parse_pbtxt(text.as_bytes(), "m/config.pbtxt").unwrap();
    let line = |path: &str| parsed.spans.nearest(path).map(|span| (span.line, span.column));
    assert_eq!(line("name"), Some((1, 1)));
    assert_eq!(line("input[0].name"), Some((3, 5)));
    assert_eq!(line("input[0].dims"), Some((4, 5)));
    assert_eq!(line("input[0].dims[1]"), Some((5, 2)));
    assert_eq!(line("input[1].name"), Some((5, 11)));
    assert_eq!(line("input[1].data_type"), Some((5, 9)));
    assert_eq!(line("parameters[\"a.b]\"].string_value"), Some((7, 34)));
    assert_eq!(line("parameters[\"a.b]\"].nothing"), Some((7, 26)));
    assert_eq!(line("max_batch_size"), None);
}

#[test]
fn cfg_04_byte_order_marks() {
    let plain = b"backend: \"onnxruntime\"\n";
    let with_mark = [b"\xef\xbb\xbf".as_slice(), plain].concat();
    assert_eq!(parse_pbtxt(&with_mark, "c").unwrap().config.backend, "onnxruntime");
    let wide: Vec<u8> = plain.iter().flat_map(|&b| [b, 0]).collect();
    let marked = [b"\xff\xfe".as_slice(), &wide].concat();
    let error = parse_pbtxt(&marked, "c").unwrap_err();
    assert!(error.to_string().contains("file is not UTF-8 (found UTF-16 BOM)"), "{error}");
    assert!(parse_pbtxt(&wide, "c").unwrap_err().to_string().contains("found UTF-16)"));
}

#[test]
fn cfg_05_typographic_quotes() {
    refused_at(
        "backend: \u{201c}onnxruntime\u{201d}\n",
        1,
        10,
        &["typographic quote \u{201c} where \" or ' is needed"],
    );
}

#[test]
fn cfg_06_unfilled_placeholder() {
    let text = "name: \"m\"\nmax_batch_size: ${triton_max_batch_size}\nbackend: \"identity\"\n";
    refused_at(
        text,
        2,
        17,
        &[
            "unfilled template placeholder ${triton_max_batch_size}",
            "2 | max_batch_size: ${triton_max_batch_size}\n",
            "^^^^^^^^^^^^^^^^^^^^^^^^\n",
            "config.pbtxt:2:17",
        ],
    );
    refused_at("max_batch_size: {{ size }}", 1, 17, &["unfilled template placeholder {{ size }}"]);
    let parsed =
        parse_pbtxt(b"parameters { key: 'd' value { string_value: '${engine_dir}' } }", "c").unwrap();
    assert_eq!(parsed.notes.len(), 1);
    assert_eq!(parsed.notes[0].line, Some(1));
}

#[test]
fn cfg_07_map_entries_without_brackets() {
    let text = "ensemble_scheduling { step [ { model_name: \"id_fp32\" model_version: -1 input_map { key: \"X\" value: \"IN\" }, { key: \"P\" value: \"Q\" } output_map { key: \"Y\" value: \"OUT\" } } ] }";
    let second = u32::try_from(text.find(", {").unwrap() + 3).unwrap();
    refused_at(text, 1, second, &["a list of `input_map` entries needs [ ... ]"]);
    refused_at("input { dims: 1, 2 }", 1, 18, &["several values of `dims` need [ ... ]"]);
}

#[test]
fn cfg_08_spellings_of_booleans() {
    let config = read(
        "model_transaction_policy { decoupled: False } response_cache { enable: 0 } optimization { eager_batching: 1 cuda { graphs: 0 } }",
    );
    assert!(config.optimization.unwrap().eager_batching);
    for (word, meant) in [
        ("True", true),
        ("true", true),
        ("t", true),
        ("1", true),
        ("0x1", true),
        ("False", false),
        ("f", false),
    ] {
        let config = read(&format!("response_cache {{ enable: {word} }}"));
        assert_eq!(config.response_cache.unwrap().enable, meant);
    }
    for wrong in ["TRUE", "yes", "\"true\"", "2", "-1", "1.0"] {
        let text = format!("model_transaction_policy {{ decoupled: {wrong} }}");
        refused_at(
            &text,
            1,
            39,
            &["allowed are true, True, t, 1 and false, False, f, 0", "model_transaction_policy.decoupled"],
        );
    }
}

#[test]
fn cfg_09_short_type_names() {
    for wrong in ["FP32", "type_fp32", "\"TYPE_FP32\"", "float32", "fp32", "float"] {
        let text = format!("input {{ name: \"IMAGE\" data_type: {wrong} dims: 1 }}");
        refused_at(&text, 1, 34, &["did you mean TYPE_FP32", "input[0].data_type (input 'IMAGE')"]);
    }
    refused_at(
        "input { data_type: BYTES name: 'LATER' }",
        1,
        20,
        &["did you mean TYPE_STRING?", "input 'LATER'"],
    );
    refused_at("instance_group { kind: CPU }", 1, 24, &["did you mean KIND_CPU?"]);
    refused_at("input { format: NHWC }", 1, 17, &["did you mean FORMAT_NHWC?"]);
    assert_eq!(read("input { data_type: 11 }").input[0].data_type, 11);
}

#[test]
fn cfg_10_unknown_fields() {
    refused_at(
        "backend: \"onnxruntime\" max_batchsize: 8",
        1,
        24,
        &[
            "message inference.ModelConfig has no field named \"max_batchsize\"",
            "did you mean `max_batch_size`?",
        ],
    );
    refused_at(
        "dynamic_batching { preferred_batch_size: [4] max_queue_delay_us: 100 }",
        1,
        46,
        &["inference.ModelDynamicBatching", "did you mean `max_queue_delay_microseconds`?"],
    );
    refused_at(
        "max_batch_size: 4 preferred_batch_size: [ 4 ]",
        1,
        19,
        &["belongs inside `dynamic_batching { ... }`"],
    );
    refused_at("parameters { key: 'a' string_value: '1' }", 1, 23, &["{ key: ... value: ... }"]);
    refused_at("maxBatchSize: 8", 1, 1, &["did you mean `max_batch_size`?"]);
}

#[test]
fn a_missing_brace_points_at_its_opener() {
    let errors = refuse("input {\n  name: \"X\"\n  dims: [ 1 ]\n\nmax_batch_size: 8\nbackend: \"b\"\n");
    let first = errors[0].to_string();
    assert!(first.contains("config.pbtxt:5:1") && first.contains("is a `}` missing before it?"), "{first}");
    assert!(first.contains("1:1: `input` is opened here"), "{first}");
    let last = errors.last().unwrap().to_string();
    assert!(
        last.contains("config.pbtxt:1:1: missing `}`: `input` is opened here and never closed"),
        "{last}"
    );
    refused_at("dynamic_batching { }\n}", 2, 1, &["unmatched `}`"]);
    refused_at(
        "input [ { name: 'X' } \noutput [ { name: 'Y' } ]",
        2,
        1,
        &["is a `]` missing?", "1:7: the list is opened here"],
    );
}

#[test]
fn slips_of_syntax() {
    refused_at("name \"m\"", 1, 6, &["expected `:` after `name`"]);
    refused_at("name = \"m\"", 1, 6, &["expected `:` after `name`, found `=`"]);
    refused_at("// name\nname: 'm'", 1, 1, &["comments begin with #"]);
    refused_at("name: 'm' // the name\nbackend: 'b'", 1, 11, &["comments begin with #"]);
    refused_at("max_batch_size: \"8\"", 1, 17, &["write the number without quotes: 8"]);
    refused_at("max_batch_size: 8.0", 1, 17, &["write it without a decimal point or exponent: 8"]);
    refused_at(
        "max_batch_size: 3000000000",
        1,
        17,
        &["integer out of range", "int32 takes -2147483648 to 2147483647"],
    );
    refused_at("max_batch_size: zero", 1, 17, &["expected an integer for `max_batch_size`, found `zero`"]);
    refused_at("max_batch_size:\nbackend: 'b'", 2, 1, &["`max_batch_size` has no value"]);
    refused_at(
        "version_policy { latest { num_versions: -1 } }",
        1,
        41,
        &["uint32 takes no negative numbers"],
    );
    refused_at("max_batch_size: [ 8 ]", 1, 17, &["takes one value, not a list"]);
    refused_at("max_batch_size { }", 1, 16, &["`max_batch_size` takes an integer"]);
    refused_at("input { dims [ 1 ] }", 1, 14, &["expected `:` after `dims`"]);
    refused_at("input { dims: [ 1, ] }", 1, 18, &["the list ends with a comma"]);
    refused_at("input { dims: [ 1 2 ] }", 1, 19, &["put a comma between the values"]);
    refused_at("reshape: 1", 1, 1, &["has no field named"]);
    refused_at(
        "input { reshape: [ 1 ] }",
        1,
        18,
        &["`reshape` is a message", "write `reshape { shape: ... }`"],
    );
    refused_at("name: m", 1, 7, &["put it in quotes: \"m\""]);
    refused_at("name: \"m", 1, 7, &["this string is not closed"]);
    refused_at("name: \"C:\\models\"", 1, 7, &["unknown escape sequence"]);
    refused_at("name:\u{a0}\"m\"", 1, 6, &["invisible character U+00A0"]);
    refused_at("name: 'a' name: 'b'", 1, 11, &["specified multiple times", "1:1: first specified here"]);
    refused_at(
        "dynamic_batching { } sequence_batching { }",
        1,
        22,
        &["another member of oneof \"scheduling_choice\""],
    );
    refused_at("dynamic_batching { } dynamic_batching { }", 1, 22, &["specified multiple times"]);
    refused_at("{ \"name\": \"m\" }", 1, 1, &["this looks like JSON"]);
    refused_at("name: 'a',, backend: 'b'", 1, 11, &["unexpected `,`"]);
    refused_at("[ext.name]: 1", 1, 1, &["extensions"]);
    refused_at("name: \"\\377\"", 1, 7, &["not UTF-8"]);
    refused_at("input { name: 'x' >", 1, 19, &["expected `}`"]);
}

#[test]
fn several_errors_at_once() {
    let errors =
        refuse("max_batch_size: ${x}\ninput { data_type: FP32 dims: ${d} }\nbackendd: 'b'\nname: 5\n");
    let lines: Vec<_> = errors.iter().filter_map(|e| e.line).collect();
    assert_eq!(lines, [1, 2, 2, 3, 4]);
    assert_eq!(refuse(&"x: 1\n".repeat(1000)).len(), 20);
    // Blanks that are none are told as they are passed, and count.
    assert_eq!(refuse(&format!("{}x: 1\n", "x: 1\n".repeat(19).replace("x:", "\u{200b}x:"))).len(), 20);
}

#[test]
fn size_is_bounded() {
    let text = vec![b' '; MAX_PBTXT_BYTES + 1];
    assert!(parse_pbtxt(&text, "c").unwrap_err().to_string().contains("more than"));
    // One line of some megabytes: places are not counted along it for each member.
    let flat = format!("input {{ {} }}", "dims: [ 1, 2, 3 ] ".repeat(100_000));
    assert!(parse_pbtxt(flat.as_bytes(), "c").is_ok());
    let deep = "x { ".repeat(100_000);
    assert!(parse_pbtxt(deep.as_bytes(), "c").is_err());
}

#[test]
fn golden_configurations_print_as_people_write_them() {
    let text = "name: \"seq\"
backend: \"python\"
max_batch_size: 4
input [
  {
    name: \"INPUT\"
    data_type: TYPE_INT32
    dims: [ 1, -1 ]
    reshape { shape: [ ] }
  }
]
version_policy { all { } }
parameters {
  key: \"k\"
  value { string_value: \"v\" }
}
";
    let text = text.replace("reshape { shape: [ ] }", "reshape { }");
    let printed = print_pbtxt(&read(&text));
    assert_eq!(read(&printed), read(&text));
    assert!(printed.starts_with("name: \"seq\"\nbackend: \"python\"\nversion_policy { all { } }\nmax_batch_size: 4\ninput [\n  {\n    name: \"INPUT\"\n"), "{printed}");
    assert!(printed.contains("    dims: [ 1, -1 ]\n    reshape { }\n  }\n]\n"), "{printed}");
    assert!(
        printed.ends_with("parameters {\n  key: \"k\"\n  value { string_value: \"v\" }\n}\n"),
        "{printed}"
    );
}

/// prost-reflect's own parser, as a second opinion.
fn oracle(text: &str) -> Result<prost_reflect::DynamicMessage, prost_reflect::text_format::ParseError> {
    prost_reflect::DynamicMessage::parse_text_format(schema::model_config(), text)
}

/// One change to a text: bytes removed, doubled, swapped or put in.
fn mutate(text: &mut Vec<u8>, random: &mut Random) {
    let pieces: [&[u8]; 18] = [
        b"{", b"}", b"[", b"]", b":", b",", b";", b"<", b">", b"\"", b"'", b"\\", b"-", b"#", b"\n", b"$",
        b"${x}", b"1.5f",
    ];
    let at = random.below(text.len() + 1);
    match random.below(4) {
        0 => {
            let end = (at + random.below(8)).min(text.len());
            text.drain(at..end);
        }
        1 => {
            let piece = pieces[random.below(pieces.len())];
            text.splice(at..at, piece.iter().copied());
        }
        2 if at < text.len() => text[at] = random.next().to_le_bytes()[0],
        _ => {
            let end = (at + random.below(40)).min(text.len());
            let copy = text[at..end].to_vec();
            text.splice(at..at, copy);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn print_then_parse_is_the_identity(seed: u64) {
        let config = random_config(seed);
        let text = print_pbtxt(&config);
        let parsed = parse_pbtxt(text.as_bytes(), "c").map_err(|e| TestCaseError::fail(format!("{e}\n{text}")))?;
        prop_assert_eq!(&parsed.config, &config, "{}", text);
        // The other parser wants a colon before a list of messages.
        let other = oracle(&text.replace(" [\n", ": [\n")).map_err(|e| TestCaseError::fail(format!("{e}\n{text}")))?;
        prop_assert_eq!(other.transcode_to::<ModelConfig>().unwrap(), config);
    }

    #[test]
    fn what_is_accepted_means_the_same_to_another_parser(seed: u64, changes in 1_usize..4) {
        let mut random = Random::new(seed);
        let mut text = print_pbtxt(&random_config(seed)).replace(" [\n", ": [\n").into_bytes();
        for _ in 0..changes {
            mutate(&mut text, &mut random);
        }
        let ours = parse_pbtxt(&text, "c");
        let theirs = std::str::from_utf8(&text).ok().and_then(|text| oracle(text).ok());
        if let (Ok(ours), Some(theirs)) = (ours, theirs) {
            // Compared as text, where NaN equals itself.
            prop_assert_eq!(print_pbtxt(&ours.config), print_pbtxt(&theirs.transcode_to().unwrap()));
        }
    }

    #[test]
    fn no_text_makes_it_panic(text: Vec<u8>) {
        if let Err(errors) = parse_pbtxt(&text, "c") {
            prop_assert!(!errors.to_string().is_empty());
        }
    }

    #[test]
    fn no_change_to_a_text_makes_it_panic(seed: u64, changes in 1_usize..30) {
        let mut random = Random::new(seed);
        let mut text = print_pbtxt(&random_config(seed)).into_bytes();
        for _ in 0..changes {
            mutate(&mut text, &mut random);
        }
        if let Err(errors) = parse_pbtxt(&text, "c") {
            prop_assert!(!errors.to_string().is_empty() && errors.len() <= 20);
        }
    }
}
