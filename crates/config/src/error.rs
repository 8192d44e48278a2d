//! What a person is told about a configuration: errors with their place, reason and a way out, and notes on what
//! was filled in. One error type serves the text form, the JSON form, validation and completion.

use std::fmt;

use serde::Serialize;

/// A line of the configuration file with the part that is meant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snippet {
    /// The source line without its line end.
    pub text: String,
    /// Characters to mark, from the error's column on; at least 1.
    pub width: u32,
}

/// A second place that explains an error, such as the bracket that was never closed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Related {
    pub line: u32,
    pub column: u32,
    pub message: String,
}

/// One thing that is wrong with a configuration.
///
/// `Display` prints the report for a terminal: the place, the reason, the source line with a caret and the hint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ConfigError {
    pub(crate) file: Option<String>,
    pub(crate) line: Option<u32>,
    pub(crate) column: Option<u32>,
    pub(crate) path: Option<String>,
    /// The tensor or group that `path` is about, as `input 'X'`.
    pub(crate) subject: Option<String>,
    pub(crate) reason: String,
    pub(crate) hint: Option<String>,
    pub(crate) snippet: Option<Snippet>,
    pub(crate) related: Option<Related>,
}

impl ConfigError {
    pub(crate) fn new(reason: impl Into<String>) -> Self {
        Self {
            file: None,
            line: None,
            column: None,
            path: None,
            subject: None,
            reason: reason.into(),
            hint: None,
            snippet: None,
            related: None,
        }
    }

    #[must_use]
    pub(crate) fn at_path(mut self, path: impl Into<String>) -> Self {
        self.path = Some(path.into());
        self
    }

    #[must_use]
    pub(crate) fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Name of the file as it was given to the parser.
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }

    /// Line in the file, from 1.
    pub fn line(&self) -> Option<u32> {
        self.line
    }

    /// Column in the line in characters, from 1.
    pub fn column(&self) -> Option<u32> {
        self.column
    }

    /// The member that is meant, as `input[0].data_type` or `parameters["a"].string_value`.
    pub fn path(&self) -> Option<&str> {
        self.path.as_deref()
    }

    /// What was expected and what was found. Where Triton has a wording for it, Triton's wording.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// The source line, if the configuration came from a file.
    pub fn snippet(&self) -> Option<&Snippet> {
        self.snippet.as_ref()
    }

    /// A second place that explains the error.
    pub fn related(&self) -> Option<&Related> {
        self.related.as_ref()
    }

    /// The place, reason and hint on one line, for a log or the reason column of the repository index.
    pub fn one_line(&self) -> String {
        let mut line = self.place();
        if !line.is_empty() {
            line.push_str(": ");
        }
        line.push_str(&self.reason);
        if let Some(hint) = &self.hint {
            line.push_str(" (");
            line.push_str(hint);
            line.push(')');
        }
        line
    }

    /// `file:line:column`, as far as known.
    fn place(&self) -> String {
        let mut place = self.file.clone().unwrap_or_default();
        for number in [self.line, self.column].into_iter().flatten() {
            if !place.is_empty() {
                place.push(':');
            }
            place.push_str(&number.to_string());
        }
        place
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = self.place();
        if place.is_empty() {
            f.write_str(&self.reason)?;
        } else {
            write!(f, "{place}: {}", self.reason)?;
        }
        let gutter =
            self.line.unwrap_or(0).max(self.related.as_ref().map_or(0, |r| r.line)).to_string().len();
        if let (Some(line), Some(column), Some(snippet)) = (self.line, self.column, &self.snippet) {
            let before = column.saturating_sub(1) as usize;
            // Tabs stay tabs, so that the caret stands under its character whatever a tab's width is.
            let pad: String =
                snippet.text.chars().take(before).map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
            let carets = "^".repeat(snippet.width.max(1) as usize);
            write!(f, "\n  {line:>gutter$} | {}\n  {:>gutter$} | {pad}{carets}", snippet.text, "")?;
        }
        if let Some(related) = &self.related {
            write!(f, "\n  {:>gutter$} = {}:{}: {}", "", related.line, related.column, related.message)?;
        }
        match (&self.path, &self.subject) {
            (Some(path), Some(subject)) => write!(f, "\n  {:>gutter$} = in {path} ({subject})", "")?,
            (Some(path), None) => write!(f, "\n  {:>gutter$} = in {path}", "")?,
            (None, _) => {}
        }
        if let Some(hint) = &self.hint {
            write!(f, "\n  {:>gutter$} = help: {hint}", "")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

/// Everything that is wrong with one configuration; never empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct ConfigErrors(Vec<ConfigError>);

impl ConfigErrors {
    /// One error about the member at a path, as `parameters` or `input[0].dims`, for rules of other crates.
    pub fn at(path: &str, reason: impl Into<String>) -> Self {
        ConfigError::new(reason).at_path(path).into()
    }

    /// `Ok(value)` if nothing was found wrong.
    pub(crate) fn check<T>(errors: Vec<ConfigError>, value: T) -> Result<T, Self> {
        Self::of(errors).map_or(Ok(value), Err)
    }

    /// The error that Triton would have stopped at.
    #[expect(clippy::expect_used, reason = "every way to make one gives it an error")]
    pub fn first(&self) -> &ConfigError {
        self.0.first().expect("ConfigErrors holds at least one error")
    }

    /// `None` if there are none.
    pub(crate) fn of(errors: Vec<ConfigError>) -> Option<Self> {
        (!errors.is_empty()).then_some(Self(errors))
    }

    pub fn iter(&self) -> std::slice::Iter<'_, ConfigError> {
        self.0.iter()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Never true; here because a type with `len` is expected to have it.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Gives every error the file, line and source text of its path, where they are known.
    #[must_use]
    pub fn located(mut self, spans: &crate::SpanMap) -> Self {
        for error in &mut self.0 {
            spans.locate(error);
        }
        self
    }

    /// Names the file of every error that has none yet.
    #[must_use]
    pub fn in_file(mut self, file: &str) -> Self {
        for error in &mut self.0 {
            error.file.get_or_insert_with(|| file.to_owned());
        }
        self
    }
}

impl From<ConfigError> for ConfigErrors {
    fn from(error: ConfigError) -> Self {
        Self(vec![error])
    }
}

impl IntoIterator for ConfigErrors {
    type Item = ConfigError;
    type IntoIter = std::vec::IntoIter<ConfigError>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<'a> IntoIterator for &'a ConfigErrors {
    type Item = &'a ConfigError;
    type IntoIter = std::slice::Iter<'a, ConfigError>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, error) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            fmt::Display::fmt(error, f)?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}

/// Carries the first error's message alone, in Triton's wording where it has one.
impl From<&ConfigErrors> for trireme_types::Error {
    fn from(errors: &ConfigErrors) -> Self {
        Self::invalid_arg(errors.first().reason.clone())
    }
}

impl From<ConfigErrors> for trireme_types::Error {
    fn from(errors: ConfigErrors) -> Self {
        Self::from(&errors)
    }
}

/// How much a [`Note`] matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum NoteLevel {
    /// A value was filled in.
    Info,
    /// The configuration is valid but does not do what it seems to ask for.
    Warning,
}

/// Something a person should know about a configuration that is not an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Note {
    pub level: NoteLevel,
    pub path: Option<String>,
    pub message: String,
    pub hint: Option<String>,
    pub file: Option<String>,
    pub line: Option<u32>,
    pub column: Option<u32>,
}

impl Note {
    pub(crate) fn info(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(NoteLevel::Info, path.into(), message.into())
    }

    pub(crate) fn warning(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(NoteLevel::Warning, path.into(), message.into())
    }

    fn new(level: NoteLevel, path: String, message: String) -> Self {
        Self { level, path: Some(path), message, hint: None, file: None, line: None, column: None }
    }

    #[must_use]
    pub(crate) fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Gives the note the file and line of its path, where they are known.
    #[must_use]
    pub fn located(mut self, spans: &crate::SpanMap) -> Self {
        if let Some(span) = self.path.as_deref().and_then(|path| spans.nearest(path)) {
            self.file = Some(spans.file().to_owned());
            self.line = Some(span.line);
            self.column = Some(span.column);
        }
        self
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(file) = &self.file {
            write!(f, "{file}:")?;
            if let Some(line) = self.line {
                write!(f, "{line}:")?;
            }
            f.write_str(" ")?;
        }
        f.write_str(&self.message)?;
        if let Some(hint) = &self.hint {
            write!(f, "; {hint}")?;
        }
        Ok(())
    }
}
