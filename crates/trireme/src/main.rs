//! The `trireme` program: reads the command line, wires engines, server and frontends together, and nothing else.

mod check;
mod cli;
mod config_command;
mod engines;
mod flags;
mod infer;
mod logging;
mod offline;
mod serve;
mod settings;
mod tables;
mod terminal;

use std::process::ExitCode;

use cli::Request;

/// Request handling allocates small pieces on several threads at once; the system's allocator is slower at it and
/// keeps more memory after large tensors.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let request = match cli::parse(std::env::args_os().collect()) {
        Ok(request) => request,
        Err(error) => {
            // Nothing is left to tell if the terminal is gone.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    let outcome = match request {
        Request::Serve(flags) => serve::run(&flags),
        Request::Check(args) => check::run(args),
        Request::Config(args) => config_command::run(args),
        Request::Infer(args) => infer::run(args),
    };
    outcome.unwrap_or_else(|error| {
        complain(&error);
        ExitCode::FAILURE
    })
}

#[expect(clippy::print_stderr, reason = "the one place where a command's failure is told")]
fn complain(error: &anyhow::Error) {
    eprintln!("error: {error:#}");
}
