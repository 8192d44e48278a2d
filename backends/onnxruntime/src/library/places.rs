//! The directories that an ONNX Runtime library is commonly in, found by listing them and asking nobody.

use std::path::{Path, PathBuf};

/// What the process knows of its surroundings; a value, so that tests can make their own.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places {
    /// Paths given by the environment, with the variable's name.
    named: Vec<(&'static str, PathBuf)>,
    executable: Option<PathBuf>,
    current: Option<PathBuf>,
    /// Prefixes of Python installations: directories with `lib/python3*/`.
    prefixes: Vec<PathBuf>,
}

impl Places {
    /// The surroundings of this process.
    pub(crate) fn of_process() -> Self {
        let path = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let named = ["TRIREME_ONNXRUNTIME", "ORT_DYLIB_PATH"];
        let named = named.into_iter().filter_map(|name| path(name).map(|value| (name, value))).collect();
        let mut prefixes: Vec<PathBuf> =
            ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(path).collect();
        if let Some(home) = path("HOME") {
            prefixes.push(home.join(".local"));
            prefixes.extend(list(&home.join(".pyenv/versions")));
        }
        prefixes.extend(["/usr/local", "/usr"].map(PathBuf::from));
        // The link under /proc is resolved, so a `tritonserver` link in /usr/bin finds what lies beside the file.
        let executable = std::env::current_exe().and_then(fs_err::canonicalize).ok();
        Self { named, executable, current: std::env::current_dir().ok(), prefixes }
    }

    /// A process that knows nothing.
    #[cfg(test)]
    pub(crate) fn none() -> Self {
        Self::default()
    }

    /// The library that the environment names, with the variable's name.
    pub(crate) fn environment(&self) -> Option<(&'static str, PathBuf)> {
        self.named.first().cloned()
    }

    fn near_the_program(&self) -> Vec<PathBuf> {
        let mut directories = Vec::new();
        let home = self.executable.as_deref().and_then(Path::parent);
        if let Some(home) = home {
            directories.push(home.to_owned());
            directories.extend(home.parent().map(|prefix| prefix.join("lib")));
        }
        directories.extend(self.current.as_deref().map(|current| current.join(".trireme/onnxruntime")));
        // A program in target/release of its project, or in target/release/deps.
        if let Some(home) = home {
            let ancestors = home.ancestors().skip(1).take(3);
            directories.extend(ancestors.map(|directory| directory.join(".trireme/onnxruntime")));
        }
        directories
    }

    fn of_python(&self) -> Vec<PathBuf> {
        let versions = self.prefixes.iter().flat_map(|prefix| {
            list(&prefix.join("lib")).into_iter().filter(|path| name(path).starts_with("python3"))
        });
        let packages = versions.flat_map(|v| ["site-packages", "dist-packages"].map(|p| v.join(p)));
        packages.map(|packages| packages.join("onnxruntime/capi")).collect()
    }

    /// Libraries in the order to try them.
    pub(crate) fn candidates(&self) -> Vec<PathBuf> {
        let directories = self.near_the_program().into_iter().chain(self.of_python());
        directories.filter_map(|directory| newest_in(&directory)).collect()
    }

    /// The places in short, for an error.
    pub(crate) fn describe(&self) -> String {
        let near: Vec<_> =
            self.near_the_program().iter().map(|path| format!("'{}'", path.display())).collect();
        let near = if near.is_empty() { "the program's directory".to_owned() } else { near.join(", ") };
        let python: Vec<_> = self.prefixes.iter().map(|path| path.display().to_string()).collect();
        format!("{near}, the Python packages below {}, and the system's library path", python.join(", "))
    }
}

/// The library with the highest version in a directory.
pub(super) fn newest_in(directory: &Path) -> Option<PathBuf> {
    let libraries = list(directory).into_iter().filter(|path| {
        name(path)
            .strip_prefix("libonnxruntime.so")
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    });
    libraries.max_by_key(|path| {
        name(path).split('.').filter_map(|part| part.parse::<u32>().ok()).collect::<Vec<_>>()
    })
}

/// What is in a directory, sorted; nothing if it cannot be read.
fn list(directory: &Path) -> Vec<PathBuf> {
    let entries = fs_err::read_dir(directory).into_iter().flatten();
    let mut paths: Vec<_> = entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect();
    paths.sort();
    paths
}

fn name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        fs_err::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs_err::write(path, b"").expect("a file");
    }

    #[test]
    fn tries_the_program_before_the_project_before_python() {
        let root = std::env::temp_dir().join(format!("trireme-places-{}", std::process::id()));
        let beside = root.join("target/release/libonnxruntime.so");
        let project = root.join(".trireme/onnxruntime/libonnxruntime.so.1.20.0");
        let python = root.join("venv/lib/python3.12/site-packages/onnxruntime/capi/libonnxruntime.so.1.32.0");
        for file in [&beside, &project, &python] {
            touch(file);
        }
        touch(&root.join(".trireme/onnxruntime/libonnxruntime.so.1.3.0"));
        touch(&root.join(".trireme/onnxruntime/libonnxruntime_providers_shared.so"));
        let places = Places {
            named: Vec::new(),
            executable: Some(root.join("target/release/trireme")),
            current: None,
            prefixes: vec![root.join("venv")],
        };
        let found = places.candidates();
        fs_err::remove_dir_all(&root).expect("it is there");
        assert_eq!(found, [beside, project, python]);
    }

    #[test]
    fn describes_where_it_looked() {
        let places =
            Places { prefixes: vec!["/usr".into()], current: Some("/srv".into()), ..Places::default() };
        let text = places.describe();
        assert!(text.contains("'/srv/.trireme/onnxruntime'") && text.contains("below /usr"), "{text}");
    }
}
