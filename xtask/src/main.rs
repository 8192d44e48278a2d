//! Chores of the repository: `cargo xtask codegen` and `cargo xtask tidy`.
//!
//! A chore either leaves the tree as it must be or fails with the file, the line and what to do.

mod codegen;

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

const USAGE: &str = "usage: cargo xtask <chore>

  codegen          write crates/proto/src/generated/ from the .proto files
  codegen --check  fail when the committed files differ from what codegen writes
";

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["codegen"] => codegen::write(&repository_root()?),
        ["codegen", "--check"] => codegen::check(&repository_root()?),
        _ => bail!("{USAGE}"),
    }
}

/// The folder of the workspace's `Cargo.toml`.
fn repository_root() -> anyhow::Result<PathBuf> {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    Ok(package.parent().context("xtask lies in the root of the repository")?.to_owned())
}
