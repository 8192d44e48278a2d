//! The structure of the text: fields, messages, lists and map entries. Scalars are read in [`super::value`].
//!
//! Nesting is bounded by the message type itself, which is not recursive; text below an unknown field is skipped by
//! counting brackets, not by recursion.

use std::collections::HashMap;

use prost_reflect::{
    DynamicMessage, FieldDescriptor, Kind as FieldKind, MapKey, MessageDescriptor, ReflectMessage, Value,
};

use super::lexer::{Kind, Lexer, Token};
use crate::error::{ConfigError, ConfigErrors, Note};
use crate::schema;
use crate::span::{Source, Span, SpanMap};

/// Errors after which reading ends.
const MAX_ERRORS: usize = 20;
/// Places that are remembered; members of larger files are placed by what is around them.
const MAX_SPANS: usize = 1 << 16;

/// Reading cannot go on; the reason has been noted.
pub(super) struct Stop;

pub(super) type Step<T = ()> = Result<T, Stop>;

/// A message whose closing bracket is awaited.
pub(super) struct Open {
    /// Name of the field that holds the message.
    pub(super) field: String,
    pub(super) message: MessageDescriptor,
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) close: u8,
}

/// The last complete field of the message being read, for telling what a stray value after it means.
#[derive(Default)]
pub(super) struct Last {
    pub(super) field: Option<FieldDescriptor>,
    pub(super) comma: bool,
}

pub(super) struct Parser<'a> {
    pub(super) source: Source,
    pub(super) text: &'a [u8],
    lexer: Lexer<'a>,
    pub(super) token: Token,
    /// End of the token before.
    pub(super) last_end: usize,
    pub(super) path: String,
    pub(super) open: Vec<Open>,
    /// Path, first and last byte of each member.
    spans: Vec<(String, (u32, u32))>,
    pub(super) errors: Vec<ConfigError>,
    pub(super) notes: Vec<Note>,
}

impl<'a> Parser<'a> {
    pub(super) fn new(source: Source, text: &'a [u8]) -> Self {
        let mut this = Self {
            source,
            text,
            lexer: Lexer::new(text),
            token: Token { kind: Kind::End, start: 0, end: 0 },
            last_end: 0,
            path: String::new(),
            open: Vec::new(),
            spans: Vec::new(),
            errors: Vec::new(),
            notes: Vec::new(),
        };
        this.bump();
        this
    }

    /// Reads the whole text as one message.
    pub(super) fn run(
        mut self,
        descriptor: &MessageDescriptor,
    ) -> Result<(DynamicMessage, SpanMap, Vec<Note>), ConfigErrors> {
        let mut message = DynamicMessage::new(descriptor.clone());
        if !self.looks_like_json() {
            // A stop has left its error.
            let _ = self.fields(&mut message);
        }
        schema::name_subjects(&message, &mut self.errors);
        let spans: HashMap<String, (u32, u32)> = self.spans.into_iter().collect();
        let spans = SpanMap::new(self.source, spans);
        let notes = self.notes.into_iter().map(|note| note.located(&spans)).collect();
        ConfigErrors::check(self.errors, (message, spans, notes))
    }

    pub(super) fn bump(&mut self) -> Token {
        self.last_end = self.token.end;
        loop {
            let next = self.lexer.next();
            let Kind::Bad(problem) = &next.kind else {
                return std::mem::replace(&mut self.token, next);
            };
            if !problem.is_blank {
                return std::mem::replace(&mut self.token, next);
            }
            let error = ConfigError::new(problem.message.clone()).with_hint(problem.hint.unwrap_or_default());
            // Whether to stop is asked at the next error.
            let _ = self.report(error, next.start, next.end);
        }
    }

    pub(super) fn at(&self, symbol: u8) -> bool {
        self.token.kind == Kind::Symbol(symbol)
    }

    pub(super) fn eat(&mut self, symbol: u8) -> bool {
        let found = self.at(symbol);
        if found {
            self.bump();
        }
        found
    }

    /// Text of a token. Tokens that are not valid UTF-8 do not reach here.
    pub(super) fn text_of(&self, token: &Token) -> String {
        String::from_utf8_lossy(self.text.get(token.start..token.end).unwrap_or_default()).into_owned()
    }

    pub(super) fn span(&self, start: usize, end: usize) -> Span {
        self.source.span(narrow(start), narrow(end))
    }

    /// Notes an error at a part of the text, with the member being read as its path.
    pub(super) fn report(&mut self, error: ConfigError, start: usize, end: usize) -> Step {
        // The step after a blank that could not stop the parser.
        if self.errors.len() >= MAX_ERRORS {
            return Err(Stop);
        }
        let span = self.span(start, end);
        let mut error = error;
        if error.path.is_none() && !self.path.is_empty() {
            error.path = Some(self.path.clone());
        }
        self.source.place(&mut error, span);
        self.errors.push(error);
        if self.errors.len() >= MAX_ERRORS { Err(Stop) } else { Ok(()) }
    }

    pub(super) fn report_token(&mut self, error: ConfigError) -> Step {
        let (start, end) = (self.token.start, self.token.end);
        self.report(error, start, end)
    }

    fn mark(&mut self, start: usize, end: usize) {
        if self.spans.len() < MAX_SPANS {
            self.spans.push((self.path.clone(), (narrow(start), narrow(end))));
        }
    }

    /// Runs `read` with one more step on the path.
    fn within<T>(&mut self, step: &str, read: impl FnOnce(&mut Self) -> Step<T>) -> Step<T> {
        let length = self.path.len();
        if !step.starts_with('[') && length > 0 {
            self.path.push('.');
        }
        self.path.push_str(step);
        let result = read(self);
        if result.is_ok() {
            self.path.truncate(length);
        }
        result
    }

    /// Fields up to the closing bracket of the innermost open message, or up to the end of the text.
    fn fields(&mut self, message: &mut DynamicMessage) -> Step {
        let mut last = Last::default();
        loop {
            match &self.token.kind {
                Kind::End if self.open.is_empty() => return Ok(()),
                Kind::End => return self.unclosed(),
                Kind::Symbol(b'}' | b'>') if !self.open.is_empty() => return self.close(),
                Kind::Name => self.field(message, &mut last)?,
                _ => self.not_a_field(message, &last)?,
            }
        }
    }

    fn close(&mut self) -> Step {
        let expected = self.open.last().map_or(b'}', |open| open.close);
        if !self.at(expected) {
            self.wrong_bracket(expected)?;
        }
        self.bump();
        Ok(())
    }

    /// Skips to the next line; for comments of other languages.
    pub(super) fn skip_line(&mut self) {
        self.lexer.skip_line();
        self.bump();
    }

    fn field(&mut self, message: &mut DynamicMessage, last: &mut Last) -> Step {
        let name = self.bump();
        let word = self.text_of(&name);
        let Some(field) = message.descriptor().get_field_by_name(&word) else {
            self.unknown_field(&message.descriptor(), &name, &word)?;
            self.skip_field();
            last.comma = self.separator();
            return Ok(());
        };
        self.within(&word, |this| {
            this.mark(name.start, name.end);
            this.check_single(message, &field, &name)?;
            this.field_value(message, &field, &name)
        })?;
        last.field = Some(field);
        last.comma = self.separator();
        Ok(())
    }

    /// One `,` or `;` may follow a field.
    fn separator(&mut self) -> bool {
        let comma = self.eat(b',');
        if !comma {
            self.eat(b';');
        }
        comma
    }

    /// A singular field may be given once, and one member of a oneof only. As in the reference, a field without
    /// presence counts as given only when its value is not the default.
    fn check_single(&mut self, message: &DynamicMessage, field: &FieldDescriptor, name: &Token) -> Step {
        if field.is_list() || field.is_map() {
            return Ok(());
        }
        if message.has_field(field) {
            let before = self.spans.iter().rev().skip(1).find(|(path, _)| *path == self.path);
            let before = before.map(|(_, (start, end))| self.source.span(*start, *end));
            return self.given_twice(field, before, name);
        }
        let other = field.containing_oneof().and_then(|oneof| {
            let other = oneof.fields().find(|other| message.has_field(other))?;
            Some((oneof.name().to_owned(), other.name().to_owned()))
        });
        match other {
            Some((oneof, other)) => self.oneof_twice(field, &oneof, &other, name),
            None => Ok(()),
        }
    }

    fn field_value(&mut self, message: &mut DynamicMessage, field: &FieldDescriptor, name: &Token) -> Step {
        let is_message = matches!(field.kind(), FieldKind::Message(_));
        if !self.eat(b':') && !is_message && !self.missing_colon(field)? {
            return Ok(());
        }
        if (field.is_list() || field.is_map()) && self.at(b'[') {
            return self.list(message, field, name);
        }
        self.element(message, field, name)
    }

    /// `[ value, value ]`
    fn list(&mut self, message: &mut DynamicMessage, field: &FieldDescriptor, name: &Token) -> Step {
        let open = self.bump();
        if self.eat(b']') {
            return Ok(());
        }
        loop {
            self.element(message, field, name)?;
            if self.eat(b']') {
                return Ok(());
            }
            if self.at(b',') {
                let comma = self.bump();
                if self.at(b']') {
                    self.trailing_comma(&comma)?;
                    self.bump();
                    return Ok(());
                }
            } else if !self.list_goes_on(field, &open)? {
                return Ok(());
            }
        }
    }

    /// One value of a field: a singular field's only one, or one more of a list or map.
    fn element(&mut self, message: &mut DynamicMessage, field: &FieldDescriptor, name: &Token) -> Step {
        if field.is_map() {
            return self.map_entry(message, field, name);
        }
        let index =
            if field.is_list() { message.get_field(field).as_list().map_or(0, <[Value]>::len) } else { 0 };
        let step = if field.is_list() { format!("[{index}]") } else { String::new() };
        let start = self.token.start;
        let length = self.path.len();
        self.path.push_str(&step);
        let value = match field.kind() {
            FieldKind::Message(descriptor) => {
                let Some(open) = self.open_message(field, &descriptor, name)? else {
                    self.path.truncate(length);
                    return Ok(());
                };
                if field.is_list() {
                    self.mark(open.start, open.end);
                }
                // The entry is in its list before its fields are read, so that an error below can tell its name.
                let mut child = DynamicMessage::new(descriptor);
                self.open.push(open);
                let result = self.fields(&mut child);
                self.open.pop();
                store(message, field, Value::Message(child));
                if result.is_ok() {
                    self.path.truncate(length);
                }
                return result;
            }
            kind => self.scalar(field, &kind)?,
        };
        if let Some(value) = value {
            if field.is_list() {
                self.mark(start, self.last_end);
            }
            store(message, field, value);
        }
        self.path.truncate(length);
        Ok(())
    }

    /// `{ key: .. value: .. }`; a later entry of the same key replaces the earlier one, as in the reference.
    fn map_entry(&mut self, message: &mut DynamicMessage, field: &FieldDescriptor, name: &Token) -> Step {
        let FieldKind::Message(descriptor) = field.kind() else { return Ok(()) };
        let Some(open) = self.open_message(field, &descriptor, name)? else { return Ok(()) };
        let (first_span, first_error) = (self.spans.len(), self.errors.len());
        let base = self.path.clone();
        self.path.push_str("[]");
        let entry_path = self.path.clone();
        self.mark(open.start, open.end);
        let mut entry = DynamicMessage::new(descriptor.clone());
        self.open.push(open);
        let result = self.fields(&mut entry);
        self.open.pop();
        let key = entry.get_field(&descriptor.map_entry_key_field()).into_owned();
        let value = entry.get_field(&descriptor.map_entry_value_field()).into_owned();
        let Some(key) = map_key(key) else { return result };
        // `parameters[].value.string_value` becomes `parameters["k"].string_value`, now that the key is known.
        let step = match &key {
            MapKey::String(text) => format!("{base}[{text:?}]"),
            other => format!("{base}[{other:?}]").replace("U64(", "").replace(')', ""),
        };
        let rename = |path: &mut String| {
            if let Some(rest) = path.strip_prefix(&entry_path) {
                *path = format!("{step}{}", rest.strip_prefix(".value").unwrap_or(rest));
            }
        };
        for (path, _) in self.spans.iter_mut().skip(first_span) {
            rename(path);
        }
        for error in self.errors.iter_mut().skip(first_error) {
            error.path.as_mut().map(rename);
        }
        if let Some(map) = message.get_field_mut(field).as_map_mut() {
            map.insert(key, value);
        }
        if result.is_ok() {
            self.path = base;
        }
        result
    }

    /// The `{` or `<` of a message value; `None` if something else stands there, which was reported and skipped.
    fn open_message(
        &mut self,
        field: &FieldDescriptor,
        descriptor: &MessageDescriptor,
        name: &Token,
    ) -> Step<Option<Open>> {
        let close = match self.token.kind {
            Kind::Symbol(b'{') => b'}',
            Kind::Symbol(b'<') => b'>',
            _ => {
                self.not_a_message(field, descriptor)?;
                return Ok(None);
            }
        };
        let bracket = self.bump();
        let between = self.text.get(name.end..bracket.start).unwrap_or_default();
        let follows_name = between.iter().all(|b| b.is_ascii_whitespace() || *b == b':');
        let start = if follows_name { name.start } else { bracket.start };
        Ok(Some(Open {
            field: field.name().to_owned(),
            message: descriptor.clone(),
            start,
            end: bracket.end,
            close,
        }))
    }

    /// Skips what may be the value of a field that is not known.
    fn skip_field(&mut self) {
        let colon = self.eat(b':');
        match self.token.kind {
            Kind::Symbol(b'{' | b'<' | b'[') => self.skip_brackets(),
            _ if colon => self.skip_scalar(),
            _ => {}
        }
    }

    /// Skips one scalar: a sign and a token, or adjacent strings. Brackets and commas stay.
    pub(super) fn skip_scalar(&mut self) {
        self.eat(b'-');
        match self.token.kind {
            Kind::String => {
                while self.token.kind == Kind::String {
                    self.bump();
                }
            }
            Kind::Name | Kind::Integer | Kind::Float | Kind::Placeholder | Kind::Bad(_) => {
                self.bump();
            }
            Kind::Symbol(_) | Kind::End => {}
        }
    }

    /// Skips from an opening bracket behind its closing one, or to the end of the text.
    pub(super) fn skip_brackets(&mut self) {
        let mut depth = 0_usize;
        loop {
            match self.token.kind {
                Kind::Symbol(b'{' | b'<' | b'[') => depth += 1,
                Kind::Symbol(b'}' | b'>' | b']') => depth = depth.saturating_sub(1),
                Kind::End => return,
                _ => {}
            }
            self.bump();
            if depth == 0 {
                return;
            }
        }
    }
}

/// Offsets fit 32 bits, because the size of a file is bounded.
fn narrow(offset: usize) -> u32 {
    u32::try_from(offset).unwrap_or(u32::MAX)
}

fn store(message: &mut DynamicMessage, field: &FieldDescriptor, value: Value) {
    if field.is_list() {
        if let Some(list) = message.get_field_mut(field).as_list_mut() {
            list.push(value);
        }
    } else {
        message.set_field(field, value);
    }
}

fn map_key(value: Value) -> Option<MapKey> {
    Some(match value {
        Value::Bool(v) => MapKey::Bool(v),
        Value::I32(v) => MapKey::I32(v),
        Value::I64(v) => MapKey::I64(v),
        Value::U32(v) => MapKey::U32(v),
        Value::U64(v) => MapKey::U64(v),
        Value::String(v) => MapKey::String(v),
        _ => return None,
    })
}
