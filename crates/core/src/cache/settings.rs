//! What `--cache-config` comes to.

/// The cache of a server, and its settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheSettings {
    /// In the memory of the server.
    Local {
        /// Bytes that answers and the bookkeeping for them may take together.
        size: usize,
    },
}
