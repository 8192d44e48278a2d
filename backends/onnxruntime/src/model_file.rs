//! The model file on disk: where it is, and what a file that the engine refuses seems to be instead.

use std::io::Read;
use std::path::{Path, PathBuf};

use trireme_backend::ModelContext;
use trireme_types::{Error, Result};

/// How many names of a directory an error lists.
const LISTED: usize = 10;

/// The ONNX file of a model: the configured path, or `model.onnx` in it if that is a directory.
///
/// # Errors
/// UNAVAILABLE, in Triton's words, with what the directory holds instead.
pub(crate) fn locate(context: &ModelContext) -> Result<PathBuf> {
    let path = &context.files.model_path;
    let found = match fs_err::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Some(path.join("model.onnx")).filter(|inner| inner.is_file()),
        Ok(_) => Some(path.clone()),
        Err(_) => None,
    };
    found.ok_or_else(|| {
        let seen = if path.is_dir() { path.as_path() } else { path.parent().unwrap_or(path) };
        Error::unavailable(format!(
            "unable to find '{}' for model instance '{}'; {}; name the file so, or set 'default_model_filename'",
            path.display(),
            context.name,
            holdings(seen)
        ))
    })
}

/// What a directory holds, in words.
fn holdings(directory: &Path) -> String {
    let Ok(entries) = fs_err::read_dir(directory) else {
        return format!("'{}' cannot be read", directory.display());
    };
    let mut names: Vec<_> = entries
        .filter_map(|entry| Some(format!("'{}'", entry.ok()?.file_name().to_string_lossy())))
        .collect();
    names.sort();
    if names.is_empty() {
        return format!("'{}' is empty", directory.display());
    }
    let more = names.len().saturating_sub(LISTED);
    names.truncate(LISTED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("'{}' holds {}{more}", directory.display(), names.join(", "))
}

/// What is wrong with a file that the engine could not read, if looking at it tells.
pub(crate) fn explain(path: &Path) -> Option<String> {
    let size = fs_err::metadata(path).ok()?.len();
    let mut start = Vec::new();
    fs_err::File::open(path).ok()?.take(512).read_to_end(&mut start).ok()?;
    let kind = kind(&start);
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Some(match kind {
        Some(kind) => format!("the file '{name}' ({size} bytes) {kind}"),
        None => {
            format!("the file '{name}' has {size} bytes; it may have been cut short or damaged on its way")
        }
    })
}

/// What the first bytes of a file say, if it cannot be an ONNX model.
fn kind(start: &[u8]) -> Option<String> {
    let text =
        String::from_utf8_lossy(start).trim_start_matches('\u{feff}').trim_start().to_ascii_lowercase();
    if start.is_empty() {
        return Some("is empty".to_owned());
    }
    if text.starts_with("version https://git-lfs") {
        return Some(
            "is a Git LFS pointer and not the model itself; fetch the model with `git lfs pull`".to_owned(),
        );
    }
    if text.starts_with("<!doctype html") || text.starts_with("<html") {
        return Some("is an HTML page, probably what a download gave instead of the model".to_owned());
    }
    for (magic, what) in [
        (&b"PK\x03\x04"[..], "is a ZIP archive (PyTorch saves models so); export the model to ONNX"),
        (b"\x1f\x8b", "is compressed with gzip; unpack it"),
        (b"\x7fELF", "is a program or library"),
        (b"{", "is JSON text"),
        (b"<?xml", "is XML text (OpenVINO's models look so)"),
        (b"\x89HDF", "is an HDF5 file (Keras saves models so); export the model to ONNX"),
    ] {
        if start.starts_with(magic) {
            return Some(what.to_owned());
        }
    }
    if start.get(4..8) == Some(b"TFL3") {
        return Some("is a TensorFlow Lite model".to_owned());
    }
    // ModelProto starts with its first fields: ir_version is a small number in field 1, others are strings.
    let onnx =
        matches!(start, [0x08, version, ..] if *version < 0x80) || matches!(start, [0x12 | 0x1a | 0x3a, ..]);
    let ort = start.get(4..8) == Some(b"ORTM");
    let bytes: Vec<_> = start.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    (!onnx && !ort)
        .then(|| format!("does not begin as an ONNX model does (it begins with {})", bytes.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_what_a_wrong_file_is() {
        for (start, expected) in [
            (&b""[..], "is empty"),
            (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
            (b"\n<!DOCTYPE html><html>", "HTML page"),
            (b"<html lang=en>", "HTML page"),
            (b"PK\x03\x04rest", "ZIP archive"),
            (b"not a model", "begins with 6e 6f 74 20 61 20 6d 6f"),
            (b"\x1c\0\0\0TFL3", "TensorFlow Lite"),
        ] {
            let found = kind(start).expect(expected);
            assert!(found.contains(expected), "{found}");
        }
        assert_eq!(kind(&[0x08, 0x08, 0x12]), None);
        assert_eq!(kind(b"\x1c\0\0\0ORTM"), None);
    }

    #[test]
    fn a_missing_file_is_told_with_what_is_there() {
        let directory = std::env::temp_dir().join(format!("trireme-model-file-{}", std::process::id()));
        fs_err::create_dir_all(&directory).expect("a directory");
        let mut context = ModelContext { name: "m".into(), ..ModelContext::default() };
        context.files.model_path = directory.join("model.onnx");
        let message = |context: &ModelContext| locate(context).expect_err("no file").message().to_owned();
        let empty = message(&context);
        assert!(
            empty.contains("model.onnx' for model instance 'm'; '") && empty.contains("is empty"),
            "{empty}"
        );
        for index in 0..12 {
            fs_err::write(directory.join(format!("{index:02}.onnx")), b"").expect("a file");
        }
        let full = message(&context);
        assert!(full.contains("holds '00.onnx', '01.onnx'") && full.contains("and 2 more"), "{full}");
        fs_err::create_dir_all(&context.files.model_path).expect("a directory");
        assert!(message(&context).contains("is empty"));
        fs_err::write(context.files.model_path.join("model.onnx"), b"").expect("a file");
        assert_eq!(locate(&context), Ok(directory.join("model.onnx/model.onnx")));
        fs_err::remove_dir_all(&directory).expect("it is there");
    }
}
