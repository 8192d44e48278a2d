//! Chores of the repository: `cargo xtask codegen` and `cargo xtask tidy`.
//!
//! A chore either leaves the tree as it must be or fails with the file, the line and what to do.

mod codegen;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};

const USAGE: &str = "usage: cargo xtask <chore>

  codegen          write crates/proto/src/generated/ from the .proto files
  codegen --check  fail when the committed files differ from what codegen writes
  tidy             check the house rules that the compiler does not know";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            #[expect(clippy::print_stderr, reason = "the way a chore says why it failed")]
            {
                eprintln!("{error:#}");
            }
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[&str]) -> anyhow::Result<()> {
    match arguments {
        ["codegen"] => codegen::write(&repository_root()?),
        ["codegen", "--check"] => codegen::check(&repository_root()?),
        ["tidy"] => tidy::check(&repository_root()?),
        _ => bail!("{USAGE}"),
    }
}

/// The folder of the workspace's `Cargo.toml`.
fn repository_root() -> anyhow::Result<PathBuf> {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    Ok(package.parent().context("xtask lies in the root of the repository")?.to_owned())
}
