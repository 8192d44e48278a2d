//! The command line: which command is meant, under which name the program was called.

use std::ffi::OsString;
use std::path::Path;

use clap::{Arg, ArgMatches, Args as _, Command};

use crate::check::CheckArgs;
use crate::config_command::ConfigArgs;
use crate::flags::Flags;
use crate::infer::InferArgs;

/// What the person wants done.
pub(crate) enum Request {
    Serve(Flags),
    Check(CheckArgs),
    Config(ConfigArgs),
    Infer(InferArgs),
}

/// Name under which the program takes Triton's flags directly.
const TRITONSERVER: &str = "tritonserver";

/// Reads the command line, program name first.
///
/// # Errors
/// clap's: help and version are errors whose exit code is 0.
pub(crate) fn parse(arguments: Vec<OsString>) -> Result<Request, clap::Error> {
    let called = arguments.first().map(Path::new).and_then(Path::file_name).unwrap_or_default();
    if called == TRITONSERVER {
        let matches = tritonserver().try_get_matches_from(arguments)?;
        return Ok(Request::Serve(Flags::of(&matches)));
    }
    let matches = trireme().try_get_matches_from(arguments)?;
    command_of(&matches)
}

fn command_of(matches: &ArgMatches) -> Result<Request, clap::Error> {
    use clap::FromArgMatches as _;
    match matches.subcommand() {
        Some(("check", matches)) => Ok(Request::Check(CheckArgs::from_arg_matches(matches)?)),
        Some(("config", matches)) => Ok(Request::Config(ConfigArgs::from_arg_matches(matches)?)),
        Some(("infer", matches)) => Ok(Request::Infer(InferArgs::from_arg_matches(matches)?)),
        Some((_, matches)) => Ok(Request::Serve(Flags::of(matches))),
        None => Err(trireme().error(
            clap::error::ErrorKind::MissingSubcommand,
            "a command is expected, as in `trireme serve model.onnx`",
        )),
    }
}

fn trireme() -> Command {
    let models = Arg::new("MODEL")
        .num_args(0..)
        .help("Model files to serve, as model.onnx or NAME=model.onnx, or a model repository");
    let serve = Flags::add_to(
        Command::new("serve")
            .about("Serve models over HTTP and gRPC, with the flags of tritonserver")
            .arg(models),
    );
    Command::new("trireme")
        .version(env!("CARGO_PKG_VERSION"))
        .about("A model inference server that speaks Triton's protocols, and the tools around it")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(serve)
        .subcommand(CheckArgs::augment_args(
            Command::new("check").about("Check a model repository without opening a port"),
        ))
        .subcommand(ConfigArgs::augment_args(
            Command::new("config")
                .about("Show completed configurations and convert between config.pbtxt and JSON"),
        ))
        .subcommand(InferArgs::augment_args(
            Command::new("infer").about("Send one inference request to a running server"),
        ))
}

fn tritonserver() -> Command {
    Flags::add_to(Command::new(TRITONSERVER).version(env!("CARGO_PKG_VERSION")).about(
        "Trireme under the name of tritonserver: the same flags, model repository, protocols and ports",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_text(line: &str) -> Result<Request, clap::Error> {
        parse(line.split(' ').map(OsString::from).collect())
    }

    #[test]
    fn the_program_name_chooses_the_command() {
        let Ok(Request::Serve(flags)) = parse_text("/opt/bin/tritonserver --model-repository /m") else {
            panic!("tritonserver takes flags directly");
        };
        assert_eq!(flags.all("model-repository"), ["/m"]);
        let Ok(Request::Serve(flags)) = parse_text("trireme serve a.onnx b=c.onnx --http-port 1") else {
            panic!("serve takes files and flags");
        };
        assert_eq!(flags.models, ["a.onnx", "b=c.onnx"]);
        assert!(parse_text("trireme").is_err());
        assert!(parse_text("trireme bench").is_err());
        assert!(parse_text("tritonserver stray").is_err());
    }
}
