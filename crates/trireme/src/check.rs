//! `trireme check`: says whether a repository would load, and what to do where it would not.
//!
//! The same code loads the models as in a server; no port is opened and nothing is changed on disk. The exit code is
//! 0 if every model loads and 1 otherwise. The JSON form is described in docs/command-line.md: members are added to
//! it, never renamed or removed.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, ValueEnum};
use serde::Serialize;
use trireme_core::{Finding, ModelCheck};

use crate::offline::{LoadArgs, Target};
use crate::terminal::{self, Colours, Tone};

/// Say whether the models of a repository would load, and what to do where they would not; no port is opened
///
/// The exit code is 0 if every model loads and 1 otherwise.
#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    /// Model repositories, model directories (the folder with config.pbtxt) or model files
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<PathBuf>,
    /// Check only this model; may be given several times
    #[arg(long, value_name = "NAME")]
    load_model: Vec<String>,
    #[command(flatten)]
    load: LoadArgs,
    /// text for people, json for programs
    #[arg(long, value_enum, default_value_t = ReportFormat::Text)]
    format: ReportFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ReportFormat {
    Text,
    Json,
}

/// Checks and reports.
///
/// # Errors
/// A path that does not exist or cannot be read, a flag that cannot be followed.
pub(crate) fn run(args: CheckArgs) -> Result<ExitCode> {
    let report = Report::of(&args)?;
    terminal::print(&match args.format {
        ReportFormat::Text => report.text(Colours::for_stdout()),
        ReportFormat::Json => serde_json::to_string_pretty(&report.json())? + "\n",
    })?;
    Ok(if report.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Everything that was found.
struct Report {
    models: Vec<ModelCheck>,
    /// What is wrong beside the models: none found, or one that was asked for is not there.
    errors: Vec<Finding>,
}

impl Report {
    fn of(args: &CheckArgs) -> Result<Self> {
        let targets = args.paths.iter().map(|path| Target::of(path)).collect::<Result<Vec<_>>>()?;
        let models = args.load.check(&targets, &args.load_model)?;
        let places: Vec<String> = args.paths.iter().map(|path| format!("'{}'", path.display())).collect();
        let places = places.join(", ");
        let mut errors = Vec::new();
        for name in args.load_model.iter().filter(|name| !models.iter().any(|model| model.model == **name)) {
            let mut known = Vec::new();
            for target in &targets {
                known.extend(args.load.names(target)?);
            }
            let known = if known.is_empty() { "no model".to_owned() } else { known.join(", ") };
            errors.push(finding(
                format!("there is no model '{name}' in {places}"),
                format!("found {known}; check the name given to --load-model"),
            ));
        }
        if models.is_empty() && errors.is_empty() {
            errors.push(finding(
                format!("no model was found in {places}"),
                "a repository holds one directory a model, and in it one directory a version, as in \
                 REPOSITORY/my_model/1/model.onnx; give the directory that holds my_model"
                    .to_owned(),
            ));
        }
        Ok(Self { models, errors })
    }

    fn is_ok(&self) -> bool {
        self.errors.is_empty() && self.models.iter().all(is_ok)
    }

    /// The report for a person: a paragraph a model, a summary at the end.
    fn text(&self, colours: Colours) -> String {
        let mut out = String::new();
        for model in &self.models {
            write_model(model, colours, &mut out);
        }
        write_findings("error", Tone::Bad, &self.errors, "", colours, &mut out);
        if !self.models.is_empty() {
            let failed = self.models.iter().filter(|model| !is_ok(model)).count();
            let warnings: usize = self.models.iter().map(|model| warnings(model).count()).sum();
            let tone = if self.is_ok() { Tone::Good } else { Tone::Bad };
            let summary = format!(
                "{} checked: {} ok, {failed} failed, {}",
                counted(self.models.len(), "model"),
                self.models.len() - failed,
                counted(warnings, "warning")
            );
            push_line(&mut out, &colours.paint(tone, summary));
        }
        out
    }

    fn json(&self) -> ReportJson<'_> {
        ReportJson {
            ok: self.is_ok(),
            errors: self.errors.iter().map(FindingJson::of).collect(),
            models: self.models.iter().map(ModelJson::of).collect(),
        }
    }
}

fn is_ok(model: &ModelCheck) -> bool {
    model.errors.is_empty() && model.versions.iter().all(|(_, outcome)| outcome.is_ok())
}

/// What looks wrong. Notes on what was filled in are no warnings: `trireme config show` tells them.
fn warnings(model: &ModelCheck) -> impl Iterator<Item = &Finding> {
    model.warnings.iter().filter(|finding| !finding.is_note)
}

fn notes(model: &ModelCheck) -> impl Iterator<Item = &Finding> {
    model.warnings.iter().filter(|finding| finding.is_note)
}

fn finding(message: String, hint: String) -> Finding {
    let report = format!("{message}\n  = help: {hint}");
    Finding { message, hint: Some(hint), report, ..Finding::default() }
}

fn counted(count: usize, word: &str) -> String {
    format!("{count} {word}{}", if count == 1 { "" } else { "s" })
}

fn push_line(out: &mut String, line: &str) {
    out.push_str(line);
    out.push('\n');
}

fn write_model(model: &ModelCheck, colours: Colours, out: &mut String) {
    let ready: Vec<String> = model
        .versions
        .iter()
        .filter(|(_, outcome)| outcome.is_ok())
        .map(|(version, _)| version.to_string())
        .collect();
    let name = colours.paint(Tone::Title, &model.model);
    let versions = match ready.len() {
        0 => String::new(),
        1 => format!(" (version {})", ready.join(", ")),
        _ => format!(" (versions {})", ready.join(", ")),
    };
    let outcome = if is_ok(model) {
        format!("{}{versions}", colours.paint(Tone::Good, "ok"))
    } else if ready.is_empty() {
        colours.paint(Tone::Bad, "failed")
    } else {
        format!("{}, but{versions} would load", colours.paint(Tone::Bad, "failed"))
    };
    push_line(out, &format!("{name}: {outcome}"));
    write_findings("error", Tone::Bad, &model.errors, "  ", colours, out);
    write_findings("warning", Tone::Doubtful, warnings(model), "  ", colours, out);
}

fn write_findings<'a>(
    word: &str,
    tone: Tone,
    findings: impl IntoIterator<Item = &'a Finding>,
    margin: &str,
    colours: Colours,
    out: &mut String,
) {
    for finding in findings {
        let report = terminal::indent_rest(&finding.report, margin.len());
        // Writing to a string cannot fail.
        let _infallible = writeln!(out, "{margin}{}: {report}", colours.paint(tone, word));
    }
}

#[derive(Serialize)]
struct ReportJson<'a> {
    ok: bool,
    errors: Vec<FindingJson<'a>>,
    models: Vec<ModelJson<'a>>,
}

#[derive(Serialize)]
struct ModelJson<'a> {
    model: &'a str,
    ok: bool,
    path: String,
    config_file: Option<String>,
    versions: Vec<VersionJson<'a>>,
    errors: Vec<FindingJson<'a>>,
    warnings: Vec<FindingJson<'a>>,
    notes: Vec<FindingJson<'a>>,
}

#[derive(Serialize)]
struct VersionJson<'a> {
    version: i64,
    ok: bool,
    error: Option<&'a str>,
}

#[derive(Serialize)]
struct FindingJson<'a> {
    message: &'a str,
    file: Option<String>,
    line: Option<u32>,
    column: Option<u32>,
    hint: Option<&'a str>,
    report: &'a str,
}

impl<'a> ModelJson<'a> {
    fn of(model: &'a ModelCheck) -> Self {
        let version = |(version, outcome): &'a (i64, trireme_types::Result<()>)| VersionJson {
            version: *version,
            ok: outcome.is_ok(),
            error: outcome.as_ref().err().map(trireme_types::Error::message),
        };
        Self {
            model: &model.model,
            ok: is_ok(model),
            path: model.path.display().to_string(),
            config_file: model.config_file.as_ref().map(|path| path.display().to_string()),
            versions: model.versions.iter().map(version).collect(),
            errors: model.errors.iter().map(FindingJson::of).collect(),
            warnings: warnings(model).map(FindingJson::of).collect(),
            notes: notes(model).map(FindingJson::of).collect(),
        }
    }
}

impl<'a> FindingJson<'a> {
    fn of(finding: &'a Finding) -> Self {
        Self {
            message: &finding.message,
            file: finding.file.as_ref().map(|path| path.display().to_string()),
            line: finding.line,
            column: finding.column,
            hint: finding.hint.as_deref(),
            report: &finding.report,
        }
    }
}

#[cfg(test)]
mod tests;
