//! `trireme config`: configurations as they would be served, and the two forms of one configuration.
//!
//! `show` completes a configuration exactly as a server does, by loading the model. `convert` only translates
//! between config.pbtxt and the JSON of the `/config` endpoint: nothing is completed, no model file is needed.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, anyhow, bail};
use clap::{Args, Subcommand, ValueEnum};
use serde_json::Value;
use trireme_config::{MAX_PBTXT_BYTES, from_json, parse_pbtxt, print_pbtxt, to_json};
use trireme_core::ModelCheck;
use trireme_proto::inference::ModelConfig;

use crate::offline::{LoadArgs, Target};
use crate::terminal;

/// Show configurations as they are served, and convert between config.pbtxt and JSON
#[derive(Args, Debug)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Print the configuration of a model as it would be served, with everything that is filled in for it
    Show(ShowArgs),
    /// Turn config.pbtxt into the JSON of the /config endpoint, or such JSON into config.pbtxt
    Convert(ConvertArgs),
}

#[derive(Args, Debug)]
struct ShowArgs {
    /// A model directory, a model file, or a repository together with --model
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// Which model of the repository
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    #[command(flatten)]
    load: LoadArgs,
    /// pbtxt is the form of config.pbtxt, json that of the /config endpoint
    #[arg(long, value_enum, default_value_t = ConfigFormat::Pbtxt)]
    format: ConfigFormat,
}

#[derive(Args, Debug)]
struct ConvertArgs {
    /// File to read, or - for standard input; which form it has is seen from its content
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Form to print [default: the other one]
    #[arg(long, value_enum)]
    to: Option<ConfigFormat>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ConfigFormat {
    Pbtxt,
    Json,
}

/// Runs the subcommand.
///
/// # Errors
/// The model or file is not there, cannot be read, or is not a valid configuration.
pub(crate) fn run(args: ConfigArgs) -> Result<ExitCode> {
    match args.command {
        ConfigCommand::Show(args) => show(&args),
        ConfigCommand::Convert(args) => convert(&args),
    }
}

fn show(args: &ShowArgs) -> Result<ExitCode> {
    let check = shown_model(args)?;
    let mut remarks = String::new();
    for finding in &check.warnings {
        let word = if finding.is_note { "note" } else { "warning" };
        remarks += &format!("{word}: {}\n", terminal::indent_rest(&finding.report, 2));
    }
    for error in &check.errors {
        remarks += &format!("error: {}\n", terminal::indent_rest(&error.report, 2));
    }
    terminal::warn(&remarks)?;
    // Without a version that loads, the configuration was not completed.
    let is_complete = check.versions.iter().any(|(_, outcome)| outcome.is_ok());
    match &check.config {
        Some(config) if is_complete => terminal::print(&written(config, args.format))?,
        _ => bail!("model '{}' would not be served, so it has no completed configuration", check.model),
    }
    Ok(if check.errors.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Loads the one model that is meant.
fn shown_model(args: &ShowArgs) -> Result<ModelCheck> {
    let target = Target::of(&args.path)?;
    let names = args.load.names(&target)?;
    let place = args.path.display();
    let name = match (&args.model, names.as_slice()) {
        (_, []) => bail!(
            "no model was found in '{place}'; a repository holds one directory a model, and in it one directory a \
             version, as in REPOSITORY/my_model/1/model.onnx"
        ),
        (Some(model), names) => match names.iter().find(|name| *name == model) {
            Some(name) => name,
            None => bail!("there is no model '{model}' in '{place}', found {}", names.join(", ")),
        },
        (None, [only]) => only,
        (None, names) => {
            bail!("'{place}' holds {} models; choose one with --model: {}", names.len(), names.join(", "))
        }
    };
    let mut checks = args.load.check(&[target], std::slice::from_ref(name))?;
    checks.pop().with_context(|| format!("model '{name}' has gone from '{place}' in the meantime"))
}

fn convert(args: &ConvertArgs) -> Result<ExitCode> {
    let (file, bytes) = read(&args.file)?;
    let (config, from, remarks) = parse(&bytes, &file)?;
    terminal::warn(&remarks)?;
    let other = match from {
        ConfigFormat::Pbtxt => ConfigFormat::Json,
        ConfigFormat::Json => ConfigFormat::Pbtxt,
    };
    terminal::print(&written(&config, args.to.unwrap_or(other)))?;
    Ok(ExitCode::SUCCESS)
}

/// Name for messages and content of a file or of standard input, at most as much as a configuration may have.
fn read(path: &Path) -> Result<(String, Vec<u8>)> {
    let limit = MAX_PBTXT_BYTES as u64;
    let mut bytes = Vec::new();
    let name = if path == Path::new("-") {
        std::io::stdin().take(limit + 1).read_to_end(&mut bytes).context("cannot read standard input")?;
        "standard input".to_owned()
    } else {
        let file = fs_err::File::open(path)
            .context("expected a config.pbtxt or a JSON file, or - for standard input")?;
        file.take(limit + 1).read_to_end(&mut bytes)?;
        path.display().to_string()
    };
    if bytes.len() as u64 > limit {
        bail!("{name} has more than the {limit} bytes that a configuration may have");
    }
    Ok((name, bytes))
}

/// The configuration, the form it was in, and remarks for a person.
fn parse(bytes: &[u8], file: &str) -> Result<(ModelConfig, ConfigFormat, String)> {
    let content = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    // No protobuf text starts with a brace, and every JSON configuration does.
    let is_json = content.trim_ascii_start().starts_with(b"{");
    if !is_json {
        let parsed = parse_pbtxt(bytes, file).map_err(|errors| anyhow!("{errors}"))?;
        let remarks = parsed.notes.iter().map(|note| format!("warning: {note}\n")).collect();
        return Ok((parsed.config, ConfigFormat::Pbtxt, remarks));
    }
    let text = std::str::from_utf8(content)
        .with_context(|| format!("{file} looks like JSON, which is UTF-8, but is not valid UTF-8"))?;
    let inner = unwrapped(text)?;
    let config =
        from_json(inner.as_deref().unwrap_or(text)).map_err(|errors| anyhow!("{}", errors.in_file(file)))?;
    Ok((config, ConfigFormat::Json, String::new()))
}

/// The configuration inside the answer of the gRPC endpoint, `{"config": {...}}`; `None` if the text is none.
fn unwrapped(text: &str) -> Result<Option<String>> {
    let Ok(Value::Object(members)) = serde_json::from_str(text) else { return Ok(None) };
    let mut members = members.into_iter();
    match (members.next(), members.next()) {
        (Some((name, config @ Value::Object(_))), None) if name == "config" => Ok(Some(config.to_string())),
        (Some((name, Value::String(message))), None) if name == "error" => {
            bail!("this is the error answer of a server, not a configuration: {message}")
        }
        _ => Ok(None),
    }
}

fn written(config: &ModelConfig, format: ConfigFormat) -> String {
    match format {
        ConfigFormat::Pbtxt => print_pbtxt(config),
        ConfigFormat::Json => pretty(&to_json(config)),
    }
}

/// JSON with a line a member, in the order it came in; empty lists and objects, and lists of numbers, stay on their
/// line.
fn pretty(json: &str) -> String {
    let mut out = String::with_capacity(json.len() * 2);
    let mut rest = json;
    let mut depth: usize = 0;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '"' => string_length(rest),
            '[' | '{' => short_length(rest),
            _ => first.len_utf8(),
        };
        let (piece, after) = rest.split_at(length);
        rest = after;
        let line = |out: &mut String, depth: usize| *out += &format!("\n{:width$}", "", width = depth * 2);
        match piece {
            "[" | "{" => {
                out.push_str(piece);
                depth += 1;
                line(&mut out, depth);
            }
            "]" | "}" => {
                depth = depth.saturating_sub(1);
                line(&mut out, depth);
                out.push_str(piece);
            }
            "," => {
                out.push(',');
                line(&mut out, depth);
            }
            ":" => out.push_str(": "),
            list if list.starts_with('[') => out.push_str(&list.replace(',', ", ")),
            other => out.push_str(other),
        }
    }
    out.push('\n');
    out
}

/// Bytes of the JSON string that a text starts with.
fn string_length(text: &str) -> usize {
    let mut escaped = false;
    let end = text.bytes().skip(1).position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    });
    end.map_or(text.len(), |end| end + 2)
}

/// Bytes of the list or object that a text starts with if it stays on one line, else of its bracket.
fn short_length(text: &str) -> usize {
    let end =
        text.bytes().skip(1).position(|byte| !matches!(byte, b'0'..=b'9' | b'.' | b'-' | b'+' | b'e' | b','));
    match end.and_then(|end| Some((end + 2, text.as_bytes().get(end + 1)?))) {
        Some((length, b']')) => length,
        Some((2, b'}')) => 2,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> (ModelConfig, ConfigFormat) {
        let (config, format, _) = parse(text.as_bytes(), "f").expect(text);
        (config, format)
    }

    const TEXT: &str = "name: \"m\"\nmax_batch_size: 8\ninput [\n  {\n    name: \"x\"\n    data_type: TYPE_FP32\n    \
                        dims: [ 3, -1 ]\n  }\n]\nparameters { key: \"a\" value { string_value: \"{1,2}: \\\"q\\\"\" } }\n";

    #[test]
    fn both_forms_hold_the_same() {
        let (config, format) = parsed(TEXT);
        assert_eq!(format, ConfigFormat::Pbtxt);
        let json = written(&config, ConfigFormat::Json);
        let (back, format) = parsed(&json);
        assert_eq!((&back, format), (&config, ConfigFormat::Json));
        assert_eq!(parsed(&written(&config, ConfigFormat::Pbtxt)).0, config);
        // What a gRPC client prints.
        assert_eq!(parsed(&format!("{{ \"config\": {json} }}")).0, config);
        assert_eq!(parsed(&format!("\u{feff}{json}")).0, config);
    }

    #[test]
    fn json_is_printed_for_people_and_stays_the_same() {
        let (config, _) = parsed(TEXT);
        let json = written(&config, ConfigFormat::Json);
        assert!(json.contains("\n  \"max_batch_size\": 8,\n"), "{json}");
        assert!(json.contains("\"dims\": [3, -1]"), "{json}");
        assert!(json.contains("\n  \"batch_input\": [],\n"), "{json}");
        assert!(json.contains(r#""string_value": "{1,2}: \"q\"""#), "{json}");
        let compact: Value = serde_json::from_str(&to_json(&config)).expect("JSON");
        assert_eq!(serde_json::from_str::<Value>(&json).expect("JSON"), compact);
    }

    #[test]
    fn what_is_wrong_is_told_with_its_place() {
        let failure = |text: &str| parse(text.as_bytes(), "file").expect_err(text).to_string();
        let error = failure("name: \"m\"\nmax_batchsize: 3\n");
        assert!(error.contains("file:2:1") && error.contains("max_batch_size"), "{error}");
        let error = failure("{\"name\": \"m\", \"max_batchsize\": 3}");
        assert!(error.contains("max_batchsize") && error.contains("file"), "{error}");
        let error = failure("{\"error\":\"Request for unknown model: 'm' is not found\"}");
        assert!(error.contains("error answer of a server") && error.contains("'m' is not found"), "{error}");
        assert!(parse(b"{\"name\": \"\xff\"}", "file").is_err());
    }
}
