//! Rules for dependencies: the arrows between our crates, what a crate must never name, and licences.
//!
//! The facts come from `cargo metadata`, the rules from `xtask/edges.toml` and from the licence list of
//! `deny.toml`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use serde::Deserialize;
use spdx::{Expression, Licensee, ParseMode};

use super::Complaint;

const EDGES: &str = "xtask/edges.toml";
const DENY: &str = "deny.toml";

/// What `cargo metadata` tells that the rules need.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    workspace_members: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// `None` for a normal dependency.
    kind: Option<String>,
    features: Vec<String>,
}

impl Dependency {
    fn is_for_tests(&self) -> bool {
        self.kind.as_deref() == Some("dev")
    }
}

/// The rules of `edges.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Edges {
    /// The workspace crates each crate may depend on.
    edges: BTreeMap<String, BTreeSet<String>>,
    /// Names of crates, or `crate/feature`, that a crate must not ask for.
    never: BTreeMap<String, BTreeSet<String>>,
}

/// The part of `deny.toml` that is checked here.
#[derive(Deserialize)]
struct Deny {
    licenses: Licenses,
}

#[derive(Deserialize)]
struct Licenses {
    allow: Vec<String>,
}

pub(super) fn check(root: &Path) -> anyhow::Result<Vec<Complaint>> {
    let metadata = metadata(root)?;
    let edges: Edges = toml::from_str(&fs_err::read_to_string(root.join(EDGES))?)
        .with_context(|| format!("{EDGES} is not what tidy expects"))?;
    let deny: Deny = toml::from_str(&fs_err::read_to_string(root.join(DENY))?)
        .with_context(|| format!("{DENY} is not what tidy expects"))?;

    let mut complaints = check_edges(&metadata, &edges);
    complaints.extend(check_licences(&metadata, &deny.licenses.allow)?);
    Ok(complaints)
}

fn metadata(root: &Path) -> anyhow::Result<Metadata> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--locked"])
        .current_dir(root)
        .output()
        .context("cannot run cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata --locked failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    serde_json::from_slice(&output.stdout).context("cannot read what cargo metadata wrote")
}

fn check_edges(metadata: &Metadata, rules: &Edges) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    let members: BTreeMap<&str, &Package> = metadata
        .packages
        .iter()
        .filter(|package| metadata.workspace_members.contains(&package.id))
        .map(|package| (package.name.as_str(), package))
        .collect();

    for (name, package) in &members {
        let Some(allowed) = rules.edges.get(*name) else {
            complaints
                .push(Complaint::of(EDGES, format!("lacks the crate {name}; say what it may depend on")));
            continue;
        };
        for dependency in package.dependencies.iter().filter(|dependency| !dependency.is_for_tests()) {
            if members.contains_key(dependency.name.as_str()) && !allowed.contains(&dependency.name) {
                complaints.push(Complaint::of(
                    name,
                    format!("must not depend on {}: the edge is not in {EDGES}", dependency.name),
                ));
            }
            if let Some(never) = rules.never.get(*name) {
                let features =
                    dependency.features.iter().map(|feature| format!("{}/{feature}", dependency.name));
                for named in features.chain([dependency.name.clone()]).filter(|named| never.contains(named)) {
                    complaints
                        .push(Complaint::of(name, format!("must never depend on {named}, says {EDGES}")));
                }
            }
        }
    }

    let listed = rules.edges.iter().flat_map(|(name, allowed)| allowed.iter().chain([name]));
    let unknown: BTreeSet<&String> =
        listed.chain(rules.never.keys()).filter(|name| !members.contains_key(name.as_str())).collect();
    for name in unknown {
        complaints.push(Complaint::of(EDGES, format!("names {name}, which is no crate of the workspace")));
    }
    complaints
}

fn check_licences(metadata: &Metadata, allowed: &[String]) -> anyhow::Result<Vec<Complaint>> {
    let allowed = allowed
        .iter()
        .map(|licence| Licensee::parse(licence).with_context(|| format!("{DENY} allows `{licence}`")))
        .collect::<anyhow::Result<Vec<_>>>()?;

    let mut complaints = Vec::new();
    for package in &metadata.packages {
        let subject = format!("{} {}", package.name, package.version);
        let Some(licence) = &package.license else {
            complaints.push(Complaint::of(&subject, "declares no licence"));
            continue;
        };
        // Lax, because old crates write `MIT/Apache-2.0`.
        match Expression::parse_mode(licence, ParseMode::LAX) {
            Ok(expression)
                if expression.evaluate(|required| allowed.iter().any(|ours| ours.satisfies(required))) => {}
            Ok(_) => complaints
                .push(Complaint::of(&subject, format!("is under `{licence}`, which {DENY} does not allow"))),
            Err(error) => complaints
                .push(Complaint::of(&subject, format!("has a licence that is no SPDX expression: {error}"))),
        }
    }
    Ok(complaints)
}

#[cfg(test)]
mod tests;
