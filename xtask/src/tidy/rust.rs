//! Rules for Rust files: a module says its job, has one, and has a name; `unsafe` stays where it belongs.

use proc_macro2::{Ident, TokenStream, TokenTree};

use super::Complaint;

/// Longest file of Rust, in lines; the aim is below 600.
const LONGEST: usize = 900;

/// Names that say nothing about what a module holds.
const NO_NAMES: [&str; 10] =
    ["common", "commons", "helper", "helpers", "misc", "shared", "stuff", "util", "utilities", "utils"];

/// Where a foreign interface or mapped memory is wrapped; no other file may hold `unsafe`.
const UNSAFE_ALLOWED: [&str; 4] = ["backends/", "crates/capi/", "crates/shm/src", "crates/types/src/buffer"];

pub(super) fn check(path: &str, content: &str) -> Vec<Complaint> {
    if is_generated(path) {
        return Vec::new();
    }
    let mut complaints = Vec::new();

    let name = path.rsplit('/').next().unwrap_or(path);
    if name == "mod.rs" {
        complaints.push(Complaint::of(path, "is a mod.rs; name the file after its module"));
    }
    for part in path.split('/').map(|part| part.strip_suffix(".rs").unwrap_or(part)) {
        if NO_NAMES.contains(&part) {
            complaints
                .push(Complaint::of(path, format!("`{part}` says nothing; name the module after its job")));
        }
    }
    let first = content.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    if !first.starts_with("//!") {
        complaints.push(Complaint::at(
            path,
            1,
            "must begin with a `//!` line that says the job of the module",
        ));
    }
    let lines = content.lines().count();
    if lines > LONGEST {
        complaints
            .push(Complaint::of(path, format!("has {lines} lines, more than {LONGEST}; split it by job")));
    }

    match content.parse::<TokenStream>() {
        Ok(tokens) => check_tokens(path, tokens, &mut complaints),
        Err(error) => {
            complaints.push(Complaint::at(path, error.span().start().line, format!("is not Rust: {error}")));
        }
    }
    complaints
}

fn is_generated(path: &str) -> bool {
    path.contains("/generated/")
}

fn check_tokens(path: &str, tokens: TokenStream, complaints: &mut Vec<Complaint>) {
    let mut after_mod = false;
    for token in tokens {
        match token {
            TokenTree::Group(group) => {
                after_mod = false;
                check_tokens(path, group.stream(), complaints);
            }
            TokenTree::Ident(word) => {
                check_word(path, &word, after_mod, complaints);
                after_mod = word == "mod";
            }
            TokenTree::Punct(_) | TokenTree::Literal(_) => after_mod = false,
        }
    }
}

fn check_word(path: &str, word: &Ident, names_module: bool, complaints: &mut Vec<Complaint>) {
    let line = word.span().start().line;
    if word == "unsafe" && !UNSAFE_ALLOWED.iter().any(|allowed| path.starts_with(allowed)) {
        complaints.push(Complaint::at(
            path,
            line,
            format!("`unsafe` may stand only in {}", UNSAFE_ALLOWED.join(", ")),
        ));
    }
    if names_module && NO_NAMES.iter().any(|name| word == name) {
        complaints.push(Complaint::at(
            path,
            line,
            format!("`mod {word}` says nothing; name it after its job"),
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaints_of(path: &str, content: &str) -> Vec<String> {
        check(path, content).iter().map(ToString::to_string).collect()
    }

    #[track_caller]
    fn assert_one(path: &str, content: &str, expected: &str) {
        let complaints = complaints_of(path, content);
        assert!(matches!(complaints.as_slice(), [one] if one.contains(expected)), "{complaints:?}");
    }

    #[test]
    fn a_good_file_passes() {
        assert_eq!(complaints_of("crates/x/src/queue.rs", "//! Waits.\n\nmod policy;\n"), [] as [&str; 0]);
    }

    #[test]
    fn a_module_says_its_job() {
        assert_one("crates/x/src/queue.rs", "mod policy;\n", "must begin with a `//!` line");
        assert_one("crates/x/src/queue.rs", "", "must begin with a `//!` line");
        assert_one("crates/x/src/queue.rs", "#![allow(x)]\n//! Late.\n", "must begin with a `//!` line");
    }

    #[test]
    fn long_files_are_found() {
        let content = |lines: usize| format!("//! Long.\n{}", "\n".repeat(lines - 1));
        assert_eq!(complaints_of("a.rs", &content(LONGEST)), [] as [&str; 0]);
        assert_one("a.rs", &content(LONGEST + 1), "has 901 lines");
    }

    #[test]
    fn names_say_something() {
        assert_one("crates/x/src/queue/mod.rs", "//! Q.\n", "is a mod.rs");
        assert_one("crates/x/src/utils.rs", "//! U.\n", "`utils` says nothing");
        assert_one("crates/x/src/helpers/queue.rs", "//! U.\n", "`helpers` says nothing");
        assert_one(
            "crates/x/src/queue.rs",
            "//! Q.\nmod a { pub(crate) mod misc {} }\n",
            "queue.rs:2: `mod misc`",
        );
    }

    #[test]
    fn unsafe_stays_where_it_belongs() {
        let content = "//! Q.\nfn f() {\n    unsafe { g() }\n}\n";
        assert_one("crates/core/src/queue.rs", content, "queue.rs:3: `unsafe` may stand only in");
        assert_eq!(complaints_of("backends/onnxruntime/src/api.rs", content), [] as [&str; 0]);
        assert_eq!(complaints_of("crates/types/src/buffer/mapped.rs", content), [] as [&str; 0]);
        assert_one("crates/x/src/a.rs", "//! Q.\n#[unsafe(no_mangle)]\nfn f() {}\n", "a.rs:2:");
        let words = "//! unsafe\n#![forbid(unsafe_code)]\n// unsafe\nconst A: &str = \"unsafe { }\";\n";
        assert_eq!(complaints_of("crates/x/src/a.rs", words), [] as [&str; 0]);
    }

    #[test]
    fn broken_rust_is_reported_and_generated_code_is_exempt() {
        assert_one("crates/x/src/a.rs", "//! Q.\nfn f( {\n", "is not Rust");
        assert_eq!(complaints_of("crates/x/src/generated/a.rs", "unsafe"), [] as [&str; 0]);
    }
}
