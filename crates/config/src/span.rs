//! Where each member of a parsed configuration stands in its file, so that an error found long after parsing can
//! still show the line. Lines and columns count from 1, columns in characters.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::{ConfigError, Snippet};

/// Part of the source text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub line: u32,
    pub column: u32,
    /// Byte offsets in the text, without a byte order mark.
    pub(crate) start: u32,
    pub(crate) end: u32,
}

/// The text of one file and the start of each of its lines.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    file: Arc<str>,
    text: Arc<[u8]>,
    line_starts: Arc<[u32]>,
}

/// Longest part of a source line that is shown; a configuration on a single huge line stays readable.
const MAX_SHOWN: usize = 160;

impl Source {
    /// `text` must be shorter than 4 GiB, which the parser's size limit sees to.
    pub(crate) fn new(file: &str, text: &[u8]) -> Self {
        let mut starts = vec![0];
        let breaks = text.iter().zip(1_u32..).filter(|(b, _)| **b == b'\n').map(|(_, next)| next);
        starts.extend(breaks);
        Self { file: file.into(), text: text.into(), line_starts: starts.into() }
    }

    pub(crate) fn file(&self) -> &str {
        &self.file
    }

    pub(crate) fn span(&self, start: u32, end: u32) -> Span {
        let index = self.line_starts.partition_point(|&first| first <= start).saturating_sub(1);
        let first = self.line_starts.get(index).copied().unwrap_or(0);
        let before = self.slice(first, start);
        let column = String::from_utf8_lossy(before).chars().count();
        Span {
            line: u32::try_from(index + 1).unwrap_or(u32::MAX),
            column: u32::try_from(column + 1).unwrap_or(u32::MAX),
            start,
            end: end.max(start),
        }
    }

    fn slice(&self, start: u32, end: u32) -> &[u8] {
        self.text.get(start as usize..end as usize).unwrap_or_default()
    }

    /// Puts an error at a place: file, line, column and the text to show.
    pub(crate) fn place(&self, error: &mut ConfigError, span: Span) {
        error.file = Some(self.file.to_string());
        error.line = Some(span.line);
        error.column = Some(span.column);
        let first = self.line_starts.get(span.line as usize - 1).copied().unwrap_or(0);
        let rest = self.text.get(first as usize..).unwrap_or_default();
        let end = rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len());
        let line = rest.get(..end).unwrap_or_default();
        let line = String::from_utf8_lossy(line.strip_suffix(b"\r").unwrap_or(line));
        let marked = self.slice(span.start, span.end);
        let marked = marked.split(|&b| b == b'\n').next().unwrap_or_default();
        let width = String::from_utf8_lossy(marked).trim_end().chars().count().max(1);
        let before = span.column as usize - 1;
        error.snippet = (before < MAX_SHOWN).then(|| {
            let text: String = line
                .chars()
                .take(MAX_SHOWN)
                .map(|c| if c.is_control() && c != '\t' { ' ' } else { c })
                .collect();
            let room = text.chars().count().saturating_sub(before).max(1);
            Snippet { text, width: u32::try_from(width.min(room)).unwrap_or(1) }
        });
    }
}

/// The place of every member that was read, by its path.
#[derive(Clone, Debug)]
pub struct SpanMap {
    source: Source,
    /// First and last byte; lines and columns are counted when asked for.
    spans: HashMap<String, (u32, u32)>,
}

impl SpanMap {
    pub(crate) fn new(source: Source, spans: HashMap<String, (u32, u32)>) -> Self {
        Self { source, spans }
    }

    /// The file's name as given to the parser.
    pub fn file(&self) -> &str {
        self.source.file()
    }

    /// Place of exactly this member.
    pub fn get(&self, path: &str) -> Option<Span> {
        self.spans.get(path).map(|&(start, end)| self.source.span(start, end))
    }

    /// Place of this member, or of the nearest one around it that the file has.
    pub fn nearest(&self, path: &str) -> Option<Span> {
        let mut path = path;
        loop {
            if let Some(span) = self.get(path) {
                return Some(span);
            }
            // `a[0].b[1]` -> `a[0].b` -> `a[0]` -> `a`; a quoted map key may hold any character.
            let cut = if let Some(open) = path.strip_suffix(']').and_then(|p| p.rfind('[')) {
                if path.ends_with("\"]") { path.rfind("[\"").unwrap_or(open) } else { open }
            } else {
                path.rfind('.')?
            };
            path = path.get(..cut)?;
        }
    }

    /// Gives an error that names a path its place in the file.
    pub(crate) fn locate(&self, error: &mut ConfigError) {
        if error.line.is_some() {
            return;
        }
        match error.path.as_deref().and_then(|path| self.nearest(path)) {
            Some(span) => self.source.place(error, span),
            None => error.file = Some(self.file().to_owned()),
        }
    }
}
