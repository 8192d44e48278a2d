//! Model repositories of the tests.

use std::path::Path;

use tempfile::TempDir;

/// A repository with models of the identity backend.
pub(crate) struct Repository(TempDir);

impl Repository {
    pub(crate) fn new() -> Self {
        Self(TempDir::new().expect("a directory"))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn text(&self) -> &str {
        self.path().to_str().expect("UTF-8")
    }

    /// A model that answers INT32[4] with itself, after a while.
    pub(crate) fn with_identity(self, name: &str, delay_ms: u32) -> Self {
        let config = format!(
            r#"backend: "identity"
               input [ {{ name: "INPUT0" data_type: TYPE_INT32 dims: [ 4 ] }} ]
               output [ {{ name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 4 ] }} ]
               parameters {{ key: "execute_delay_ms" value {{ string_value: "{delay_ms}" }} }}"#
        );
        self.with_config(name, &config)
    }

    /// A model with this configuration and an empty version 1.
    pub(crate) fn with_config(self, name: &str, config: &str) -> Self {
        let model = self.path().join(name);
        fs_err::create_dir_all(model.join("1")).expect("can make a directory");
        fs_err::write(model.join("config.pbtxt"), config).expect("can write");
        self
    }
}

/// A request that the identity models take.
pub(crate) const REQUEST: &str =
    r#"{"inputs":[{"name":"INPUT0","datatype":"INT32","shape":[4],"data":[1,2,3,4]}]}"#;
