//! The rules against invented workspaces.

use super::*;

/// A workspace of one crate `core` with these dependencies, beside a crate `types`.
fn workspace(dependencies: &str) -> Metadata {
    let package = |name: &str, dependencies: &str| {
        format!(
            r#"{{"id": "{name}", "name": "{name}", "version": "1.0.0", "license": "MIT", "dependencies": [{dependencies}]}}"#
        )
    };
    let core = package("core", dependencies);
    let types = package("types", "");
    let json = format!(r#"{{"packages": [{core}, {types}], "workspace_members": ["core", "types"]}}"#);
    serde_json::from_str(&json).unwrap()
}

fn dependency(name: &str, kind: &str, features: &str) -> String {
    format!(r#"{{"name": "{name}", "kind": {kind}, "features": [{features}]}}"#)
}

fn complaints_of(dependencies: &str, rules: &str) -> Vec<String> {
    let rules = toml::from_str(rules).unwrap();
    check_edges(&workspace(dependencies), &rules).iter().map(ToString::to_string).collect()
}

#[test]
fn an_edge_must_be_listed() {
    let edge = dependency("types", "null", "");
    let listed = "[edges]\ncore = [\"types\"]\ntypes = []\n[never]\n";
    let unlisted = "[edges]\ncore = []\ntypes = []\n[never]\n";
    assert_eq!(complaints_of(&edge, listed), [] as [&str; 0]);
    let expected = ["core: must not depend on types: the edge is not in xtask/edges.toml"];
    assert_eq!(complaints_of(&edge, unlisted), expected);
    assert_eq!(complaints_of(&dependency("types", "\"build\"", ""), unlisted), expected);
    assert_eq!(complaints_of(&dependency("types", "\"dev\"", ""), unlisted), [] as [&str; 0]);
}

#[test]
fn the_list_names_exactly_the_crates_there_are() {
    let complaints = complaints_of("", "[edges]\ncore = [\"typos\"]\n[never]\n");
    assert_eq!(
        complaints,
        [
            "xtask/edges.toml: lacks the crate types; say what it may depend on",
            "xtask/edges.toml: names typos, which is no crate of the workspace",
        ]
    );
}

#[test]
fn some_crates_and_features_are_never_named() {
    let rules = "[edges]\ncore = [\"types\"]\ntypes = []\n[never]\ncore = [\"hyper\", \"types/server\"]\n";
    assert_eq!(
        complaints_of(&dependency("hyper", "null", ""), rules),
        ["core: must never depend on hyper, says xtask/edges.toml"]
    );
    assert_eq!(
        complaints_of(&dependency("types", "null", r#""server""#), rules),
        ["core: must never depend on types/server, says xtask/edges.toml"]
    );
    assert_eq!(complaints_of(&dependency("types", "null", r#""client""#), rules), [] as [&str; 0]);
    assert_eq!(complaints_of(&dependency("hyper", "\"dev\"", ""), rules), [] as [&str; 0]);
}

#[test]
fn licences_are_evaluated_and_not_compared() {
    let allowed = ["MIT".to_owned(), "Apache-2.0 WITH LLVM-exception".to_owned()];
    let complaints_of = |licence: Option<&str>| {
        let mut metadata = workspace("");
        metadata.packages.truncate(1);
        metadata.packages[0].license = licence.map(str::to_owned);
        let complaints = check_licences(&metadata, &allowed).unwrap();
        complaints.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    for fine in ["MIT", "GPL-3.0-only OR MIT", "MIT/GPL-3.0", "Apache-2.0 WITH LLVM-exception AND MIT"] {
        assert_eq!(complaints_of(Some(fine)), [] as [&str; 0], "{fine}");
    }
    for bad in ["GPL-3.0-only", "MIT AND GPL-3.0-only", "Apache-2.0", "(MIT OR Zlib) AND ISC"] {
        assert_eq!(
            complaints_of(Some(bad)),
            [format!("core 1.0.0: is under `{bad}`, which deny.toml does not allow")]
        );
    }
    assert_eq!(complaints_of(None), ["core 1.0.0: declares no licence"]);
    assert!(complaints_of(Some("my own"))[0].contains("no SPDX expression"));
}

#[test]
fn a_licence_list_with_a_typo_is_refused() {
    let error = check_licences(&workspace(""), &["MTI".to_owned()]).unwrap_err().to_string();
    assert_eq!(error, "deny.toml allows `MTI`");
}
