//! The house rules that neither the compiler nor clippy knows.
//!
//! Two kinds: what files hold ([`text`] for all of them, [`rust`] for Rust) and how crates depend on each
//! other and on others ([`graph`]). All complaints are reported in one run, each with where and what to do.

mod graph;
mod rust;
mod text;

use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};

/// One broken rule: the file or crate, the line where there is one, and what is wrong.
#[derive(Debug, PartialEq)]
struct Complaint {
    subject: String,
    line: Option<usize>,
    message: String,
}

impl Complaint {
    fn of(subject: &str, message: impl Into<String>) -> Self {
        Self { subject: subject.to_owned(), line: None, message: message.into() }
    }

    fn at(subject: &str, line: usize, message: impl Into<String>) -> Self {
        Self { subject: subject.to_owned(), line: Some(line), message: message.into() }
    }
}

impl std::fmt::Display for Complaint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.subject, self.message),
            None => write!(f, "{}: {}", self.subject, self.message),
        }
    }
}

/// Checks the whole tree and fails with every complaint there is.
pub(crate) fn check(root: &Path) -> anyhow::Result<()> {
    let mut complaints = Vec::new();
    for path in files(root)? {
        let Ok(content) = fs_err::read(root.join(&path)) else {
            continue; // Removed from the tree, not yet from the index.
        };
        // A file that is not UTF-8 holds no text to have rules about.
        if let Ok(content) = String::from_utf8(content) {
            complaints.extend(text::check(&path, &content));
            if path.ends_with(".rs") {
                complaints.extend(rust::check(&path, &content));
            }
        }
    }
    complaints.extend(graph::check(root)?);

    if complaints.is_empty() {
        return Ok(());
    }
    let lines: Vec<String> = complaints.iter().map(ToString::to_string).collect();
    bail!("{} house rules are broken:\n{}", lines.len(), lines.join("\n"));
}

/// Every file that is in the repository or would be after `git add`, relative to the root.
fn files(root: &Path) -> anyhow::Result<Vec<String>> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .context("cannot run git")?;
    if !output.status.success() {
        bail!("git ls-files failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    let listing = String::from_utf8(output.stdout).context("a file name is not UTF-8")?;
    Ok(listing.split_terminator('\0').map(str::to_owned).collect())
}
