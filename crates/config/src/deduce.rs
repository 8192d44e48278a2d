//! Name, backend, platform and model file name, where the configuration leaves them out, from the model's
//! directory. The caller lists the directory; nothing is read here.
//!
//! Source: `AutoCompleteBackendFields` in Triton's `model_config_utils.cc`. Beyond Triton, a single model file of
//! another name (`resnet50.onnx`) is taken too.

use trireme_proto::inference::ModelConfig;
use trireme_proto::inference::model_config::SchedulingChoice;

use crate::error::{ConfigError, ConfigErrors, Note};

/// Whether an entry of a version directory must be a file or a directory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Entry {
    File,
    Directory,
    Either,
}

/// One kind of model that a file gives away.
struct KnownModel {
    file: &'static str,
    entry: Entry,
    platform: &'static str,
    backend: &'static str,
}

/// In the order in which they are looked for.
const KNOWN: [KnownModel; 8] = [
    KnownModel {
        file: "model.savedmodel",
        entry: Entry::Directory,
        platform: "tensorflow_savedmodel",
        backend: "tensorflow",
    },
    KnownModel {
        file: "model.graphdef",
        entry: Entry::File,
        platform: "tensorflow_graphdef",
        backend: "tensorflow",
    },
    KnownModel { file: "model.plan", entry: Entry::File, platform: "tensorrt_plan", backend: "tensorrt" },
    KnownModel {
        file: "model.onnx",
        entry: Entry::Either,
        platform: "onnxruntime_onnx",
        backend: "onnxruntime",
    },
    KnownModel { file: "model.xml", entry: Entry::Either, platform: "", backend: "openvino" },
    KnownModel { file: "model.pt", entry: Entry::File, platform: "pytorch_libtorch", backend: "pytorch" },
    KnownModel { file: "model.pt2", entry: Entry::File, platform: "torch_aoti", backend: "pytorch" },
    KnownModel { file: "model.py", entry: Entry::Either, platform: "", backend: "python" },
];

impl KnownModel {
    fn extension(&self) -> &'static str {
        self.file.rsplit('.').next().unwrap_or(self.file)
    }

    fn is(&self, listed: &str) -> bool {
        let (name, is_dir) = listed.strip_suffix('/').map_or((listed, false), |name| (name, true));
        name == self.file && self.accepts(is_dir)
    }

    fn accepts(&self, is_dir: bool) -> bool {
        match self.entry {
            Entry::File => !is_dir,
            Entry::Directory => is_dir,
            Entry::Either => true,
        }
    }
}

/// Refuses a configuration whose name is not that of its directory. A configuration without a name passes; the
/// caller gives it the directory's name.
///
/// # Errors
/// Both names, in Triton's wording.
pub fn check_directory_name(config: &ModelConfig, directory: &str) -> Result<(), ConfigErrors> {
    if config.name.is_empty() || config.name == directory {
        return Ok(());
    }
    let reason = format!(
        "unexpected directory name '{directory}' for model '{}', directory name must equal model name",
        config.name
    );
    let hint = format!("write `name: \"{directory}\"`, leave `name` out, or rename the directory");
    Err(ConfigError::new(reason).at_path("name").with_hint(hint).into())
}

/// Fills backend, platform and model file name in. `listing` holds the entries of the first version directory,
/// directories with a `/` behind their name; it is empty if there is no version directory. The configuration must
/// have its name.
///
/// # Errors
/// Nothing tells which backend the model wants: what was looked for and what was found.
pub fn deduce(config: &mut ModelConfig, listing: &[String]) -> Result<Vec<Note>, ConfigErrors> {
    let is_ensemble = matches!(config.scheduling_choice, Some(SchedulingChoice::EnsembleScheduling(_)));
    if config.platform == "ensemble" || is_ensemble {
        if config.platform.is_empty() {
            config.platform = "ensemble".to_owned();
        }
        return Ok(Vec::new());
    }
    let mut notes = Vec::new();
    let known = known_by_config(config).or_else(|| known_by_file(config, listing));
    let known = match known {
        Some(known) => Some(known),
        None => obvious_model(config, listing, &mut notes)?,
    };
    if let Some(known) = known {
        fill(config, known);
    } else if config.backend.is_empty()
        && config.platform.is_empty()
        && config.default_model_filename.is_empty()
    {
        name_tells_backend(config, listing)?;
    }
    if let Some(note) = other_file_name(config, listing)? {
        notes.push(note);
    }
    Ok(notes)
}

/// The kind of model that platform, backend or file name of the configuration say.
fn known_by_config(config: &ModelConfig) -> Option<&'static KnownModel> {
    let by_platform = || KNOWN.iter().find(|k| !k.platform.is_empty() && k.platform == config.platform);
    let by_file = || KNOWN.iter().find(|k| k.file == config.default_model_filename);
    if config.backend.is_empty() {
        return match config.platform.as_str() {
            "" => by_file(),
            // An older name that Triton deduces the backend from, too.
            "pytorch_libtorch" | "libtorch" => KNOWN.iter().find(|k| k.platform == "pytorch_libtorch"),
            _ => by_platform(),
        };
    }
    let of_backend = |k: &&KnownModel| k.backend == config.backend;
    let candidates = by_platform().into_iter().chain(by_file()).find(of_backend);
    // TensorFlow has two platforms, and nothing but the file tells which.
    let first = KNOWN.iter().find(|k| of_backend(k) && k.backend != "tensorflow");
    if config.platform.is_empty() { candidates.or(first) } else { candidates }
}

/// The kind of model that the first known file of the version directory says.
fn known_by_file(config: &ModelConfig, listing: &[String]) -> Option<&'static KnownModel> {
    let open = config.platform.is_empty() && config.default_model_filename.is_empty();
    let fits = |k: &&KnownModel| config.backend.is_empty() || config.backend == k.backend;
    KNOWN.iter().filter(fits).find(|k| open && listing.iter().any(|entry| k.is(entry)))
}

fn fill(config: &mut ModelConfig, known: &KnownModel) {
    if config.backend.is_empty() {
        known.backend.clone_into(&mut config.backend);
    }
    if config.platform.is_empty() {
        known.platform.clone_into(&mut config.platform);
    }
    if config.default_model_filename.is_empty() {
        known.file.clone_into(&mut config.default_model_filename);
    }
}

/// Entries of the listing with an extension, without the `/` of directories.
fn with_extension<'a>(listing: &'a [String], known: &KnownModel) -> Vec<&'a str> {
    let candidates = listing.iter().filter_map(|entry| {
        let (name, is_dir) = entry.strip_suffix('/').map_or((entry.as_str(), false), |name| (name, true));
        let extension = name.rsplit_once('.').filter(|(stem, _)| !stem.is_empty())?.1;
        (extension.eq_ignore_ascii_case(known.extension()) && known.accepts(is_dir)).then_some(name)
    });
    candidates.collect()
}

/// A configuration that says nothing, and one file in the version directory that can only be the model.
fn obvious_model(
    config: &mut ModelConfig,
    listing: &[String],
    notes: &mut Vec<Note>,
) -> Result<Option<&'static KnownModel>, ConfigErrors> {
    let silent = config.backend.is_empty() && config.platform.is_empty();
    if !silent {
        return Ok(None);
    }
    // A lone Python file beside another model is a helper, not the model.
    let mut candidates = KNOWN.iter().filter(|k| k.backend != "python").flat_map(|known| {
        let names: Vec<&str> = if config.default_model_filename.is_empty() {
            with_extension(listing, known)
        } else {
            let extension = format!(".{}", known.extension());
            Some(config.default_model_filename.as_str())
                .filter(|name| name.ends_with(&extension))
                .into_iter()
                .collect()
        };
        names.into_iter().map(move |name| (known, name.to_owned())).collect::<Vec<_>>()
    });
    let Some((known, name)) = candidates.next() else { return Ok(None) };
    let others: Vec<String> = candidates.map(|(_, name)| name).collect();
    if !others.is_empty() {
        let error = ConfigError::new(format!(
            "cannot tell which file is the model of '{}': found {name}, {}",
            config.name,
            others.join(", ")
        ));
        let hint = "name it in `default_model_filename`, or keep one model file in the version directory";
        return Err(error.at_path("default_model_filename").with_hint(hint).into());
    }
    if config.default_model_filename.is_empty() {
        notes.push(Note::info(
            "default_model_filename",
            format!(
                "took {name} for the model file of '{}': it is the only one in the version directory",
                config.name
            ),
        ));
        config.default_model_filename = name;
    }
    Ok(Some(known))
}

/// The backend is known and its default file is not there, but one file of that kind is.
fn other_file_name(config: &mut ModelConfig, listing: &[String]) -> Result<Option<Note>, ConfigErrors> {
    let default =
        KNOWN.iter().find(|k| k.backend == config.backend && k.file == config.default_model_filename);
    let Some(known) = default.filter(|k| k.backend != "python") else { return Ok(None) };
    if listing.iter().any(|entry| known.is(entry)) {
        return Ok(None);
    }
    let candidates = with_extension(listing, known);
    match candidates.as_slice() {
        [] => Ok(None),
        [name] => {
            let message = format!(
                "took {name} for the model file of '{}': there is no {}",
                config.name, config.default_model_filename
            );
            config.default_model_filename = (*name).to_owned();
            Ok(Some(Note::info("default_model_filename", message)))
        }
        several => {
            let reason = format!(
                "cannot tell which file is the model of '{}': looked for {}, found {}",
                config.name,
                known.file,
                several.join(", ")
            );
            let hint = "name it in `default_model_filename`";
            Err(ConfigError::new(reason).at_path("default_model_filename").with_hint(hint).into())
        }
    }
}

/// `resnet.onnxruntime`: the text behind the first dot of the model's name is the backend.
fn name_tells_backend(config: &mut ModelConfig, listing: &[String]) -> Result<(), ConfigErrors> {
    if let Some((_, backend)) = config.name.split_once('.').filter(|(_, backend)| !backend.is_empty()) {
        let backend = backend.to_owned();
        config.default_model_filename = format!("model.{backend}");
        config.backend = backend;
        return Ok(());
    }
    let reason = format!(
        "Invalid model name: Could not determine backend for model '{}' with no backend in model configuration. \
         Expected model name of the form 'model.<backend_name>'.",
        config.name
    );
    let looked_for: Vec<&str> = KNOWN.iter().map(|k| k.file).collect();
    let found = if listing.is_empty() { "nothing".to_owned() } else { listing.join(", ") };
    let hint = format!(
        "looked in the first version directory for {} and found {found}; put the model file there, or write `backend: \"...\"`",
        looked_for.join(", ")
    );
    Err(ConfigError::new(reason).at_path("backend").with_hint(hint).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse_pbtxt;

    fn deduced(text: &str, listing: &[&str]) -> Result<(String, String, String), ConfigErrors> {
        let mut config = parse_pbtxt(text.as_bytes(), "c").unwrap().config;
        if config.name.is_empty() {
            config.name = "m".to_owned();
        }
        let listing: Vec<String> = listing.iter().map(|&entry| entry.to_owned()).collect();
        deduce(&mut config, &listing)?;
        Ok((config.platform, config.backend, config.default_model_filename))
    }

    #[track_caller]
    fn is(text: &str, listing: &[&str], platform: &str, backend: &str, file: &str) {
        let expected = (platform.to_owned(), backend.to_owned(), file.to_owned());
        assert_eq!(deduced(text, listing).unwrap(), expected, "{text}");
    }

    #[test]
    fn cfg_24_the_file_tells_the_backend() {
        is("", &["model.onnx"], "onnxruntime_onnx", "onnxruntime", "model.onnx");
        is("# todo\n", &["data.bin", "model.onnx/"], "onnxruntime_onnx", "onnxruntime", "model.onnx");
        is(
            "",
            &["model.savedmodel/", "model.onnx"],
            "tensorflow_savedmodel",
            "tensorflow",
            "model.savedmodel",
        );
        is("", &["model.graphdef"], "tensorflow_graphdef", "tensorflow", "model.graphdef");
        is("", &["model.plan"], "tensorrt_plan", "tensorrt", "model.plan");
        is("", &["model.xml", "model.bin"], "", "openvino", "model.xml");
        is("", &["model.pt"], "pytorch_libtorch", "pytorch", "model.pt");
        is("", &["model.pt2"], "torch_aoti", "pytorch", "model.pt2");
        is("", &["helper.py", "model.py"], "", "python", "model.py");
        is("name: 'x.identity'", &[], "", "identity", "model.identity");
        is("name: 'x.a.b'", &["readme"], "", "a.b", "model.a.b");
    }

    #[test]
    fn cfg_24_platform_and_backend_stand_for_one_another() {
        is("platform: 'onnxruntime_onnx'", &[], "onnxruntime_onnx", "onnxruntime", "model.onnx");
        is("backend: 'onnxruntime'", &[], "onnxruntime_onnx", "onnxruntime", "model.onnx");
        is(
            "backend: 'onnxruntime' default_model_filename: 'a.onnx'",
            &["a.onnx"],
            "onnxruntime_onnx",
            "onnxruntime",
            "a.onnx",
        );
        is("default_model_filename: 'model.onnx'", &[], "onnxruntime_onnx", "onnxruntime", "model.onnx");
        is("platform: 'tensorrt_plan'", &[], "tensorrt_plan", "tensorrt", "model.plan");
        is("backend: 'python'", &[], "", "python", "model.py");
        is("backend: 'openvino'", &[], "", "openvino", "model.xml");
        is("backend: 'pytorch' platform: 'torch_aoti'", &[], "torch_aoti", "pytorch", "model.pt2");
        is(
            "backend: 'tensorflow'",
            &["model.graphdef"],
            "tensorflow_graphdef",
            "tensorflow",
            "model.graphdef",
        );
        is("backend: 'identity'", &["model.onnx"], "", "identity", "");
        is("platform: 'ensemble'", &["model.onnx"], "ensemble", "", "");
        is("ensemble_scheduling { }", &[], "ensemble", "", "");
        is("platform: 'strange'", &["model.onnx"], "strange", "", "");
    }

    #[test]
    fn one_obvious_model_file_is_taken() {
        is("", &["labels.txt", "model_1.onnx"], "onnxruntime_onnx", "onnxruntime", "model_1.onnx");
        is("backend: 'onnxruntime'", &["model_1.onnx"], "onnxruntime_onnx", "onnxruntime", "model_1.onnx");
        is("platform: 'onnxruntime_onnx'", &["net.ONNX"], "onnxruntime_onnx", "onnxruntime", "net.ONNX");
        is(
            "default_model_filename: 'net.onnx'",
            &["net.onnx", "b.onnx"],
            "onnxruntime_onnx",
            "onnxruntime",
            "net.onnx",
        );
        let two = deduced("", &["a.onnx", "b.onnx"]).unwrap_err();
        assert!(two.first().reason().contains("found a.onnx, b.onnx"), "{two}");
        let two = deduced("backend: 'onnxruntime'", &["a.onnx", "b.onnx"]).unwrap_err();
        assert!(two.first().reason().contains("looked for model.onnx, found a.onnx, b.onnx"), "{two}");
    }

    #[test]
    fn says_what_was_looked_for_and_found() {
        let error = deduced("", &["weights.bin"]).unwrap_err();
        let shown = error.to_string();
        assert!(
            shown.starts_with("Invalid model name: Could not determine backend for model 'm'"),
            "{shown}"
        );
        assert!(shown.contains("looked in the first version directory for model.savedmodel"), "{shown}");
        assert!(shown.contains("found weights.bin"), "{shown}");
    }

    #[test]
    fn cfg_13_the_directory_names_the_model() {
        let named = |name: &str| ModelConfig { name: name.to_owned(), ..ModelConfig::default() };
        assert!(check_directory_name(&named(""), "copy_a").is_ok());
        assert!(check_directory_name(&named("copy_a"), "copy_a").is_ok());
        let text = b"# copied\nname: \"something_else\"\n";
        let parsed = parse_pbtxt(text, "repository/copy_a/config.pbtxt").unwrap();
        let error = check_directory_name(&parsed.config, "copy_a").unwrap_err().located(&parsed.spans);
        let shown = error.to_string();
        let expected = "repository/copy_a/config.pbtxt:2:1: unexpected directory name 'copy_a' for model 'something_else', directory name must equal model name";
        assert!(shown.starts_with(expected), "{shown}");
    }
}
