//! What is wrong, in words a person can act on: the errors of [`super::parser`] and how reading goes on after each.

use prost_reflect::{FieldDescriptor, Kind as FieldKind, MessageDescriptor, ReflectMessage};

use super::lexer::{Kind, Token};
use super::parser::{Last, Parser, Step, Stop};
use crate::error::{ConfigError, Related};
use crate::schema;
use crate::span::Span;

/// Longest piece of source text that a message repeats.
const MAX_QUOTED: usize = 48;

impl Parser<'_> {
    /// What stands at a token, for a message.
    pub(super) fn describe(&self, token: &Token) -> String {
        if token.kind == Kind::End {
            return "the end of the file".to_owned();
        }
        let text = self.text_of(token);
        let short: String = text.chars().take(MAX_QUOTED).collect();
        let dots = if short.len() < text.len() { "..." } else { "" };
        format!("`{short}{dots}`")
    }

    /// Errors that a token carries by itself, whatever was expected in its place.
    fn own_error(&self, token: &Token) -> Option<ConfigError> {
        match &token.kind {
            Kind::Placeholder => {
                let error =
                    ConfigError::new(format!("unfilled template placeholder {}", self.text_of(token)));
                Some(error.with_hint(
                    "put the value in its place; the file is served as it is, no template is filled in",
                ))
            }
            Kind::Bad(problem) => {
                let error = ConfigError::new(problem.message.clone());
                Some(match problem.hint {
                    Some(hint) => error.with_hint(hint),
                    None => error,
                })
            }
            Kind::Symbol(b'/') if self.is_foreign_comment(token) => {
                Some(ConfigError::new("comments begin with #").with_hint("write # in place of // or /*"))
            }
            _ => None,
        }
    }

    fn is_foreign_comment(&self, token: &Token) -> bool {
        let rest = self.text.get(token.start..).unwrap_or_default();
        rest.starts_with(b"//") || rest.starts_with(b"/*")
    }

    /// Whether the token is followed by a colon, so that it must be a field's name and not a value.
    fn names_a_field(&self) -> bool {
        let rest = self.text.get(self.token.end..).unwrap_or_default();
        let next = rest.iter().find(|b| !matches!(b, b' ' | b'\t'));
        self.token.kind == Kind::Name && next == Some(&b':')
    }

    fn related(&self, span: Span, message: impl Into<String>) -> Related {
        Related { line: span.line, column: span.column, message: message.into() }
    }

    /// A text that begins with `{` is JSON. Notes it and says so.
    pub(super) fn looks_like_json(&mut self) -> bool {
        if !self.at(b'{') {
            return false;
        }
        let error =
            ConfigError::new("this looks like JSON; a config.pbtxt has fields without braces around them")
                .with_hint(
                    "`trireme config convert` turns the JSON of the /config endpoint into config.pbtxt",
                );
        // Nothing is read behind it in either case.
        let _ = self.report_token(error);
        true
    }

    /// The text ends inside a message.
    pub(super) fn unclosed(&mut self) -> Step {
        let Some(open) = self.open.last() else { return Err(Stop) };
        let (field, close, start, end) = (open.field.clone(), char::from(open.close), open.start, open.end);
        let at = self.span(self.token.start, self.token.end);
        let mut error =
            ConfigError::new(format!("missing `{close}`: `{field}` is opened here and never closed"));
        error.related = Some(self.related(at, "the file ends here"));
        self.report(error, start, end)?;
        Err(Stop)
    }

    /// `}` where `>` is due or the other way round.
    pub(super) fn wrong_bracket(&mut self, expected: u8) -> Step {
        let found = self.describe(&self.token);
        let mut error = ConfigError::new(format!("expected `{}`, found {found}", char::from(expected)));
        if let Some(open) = self.open.last() {
            let span = self.span(open.start, open.end);
            error.related = Some(self.related(span, format!("`{}` is opened here", open.field)));
        }
        self.report_token(error)
    }

    /// Something that is no field name stands where a field or the closing bracket is due.
    pub(super) fn not_a_field(&mut self, message: &prost_reflect::DynamicMessage, last: &Last) -> Step {
        if let Some(error) = self.own_error(&self.token) {
            let line_comment = self.text.get(self.token.start..).unwrap_or_default().starts_with(b"//");
            let block_comment = self.at(b'/') && !line_comment;
            self.report_token(error)?;
            if block_comment {
                return Err(Stop);
            }
            if line_comment {
                self.skip_line();
            } else {
                self.bump();
            }
            return Ok(());
        }
        let found = self.describe(&self.token);
        let previous = last.field.as_ref();
        let list = previous.filter(|field| field.is_list() || field.is_map());
        match self.token.kind {
            Kind::Symbol(b'{' | b'<') if list.is_some_and(|f| matches!(f.kind(), FieldKind::Message(_))) => {
                let name = list.map(|f| f.name().to_owned()).unwrap_or_default();
                let error = ConfigError::new(format!("a list of `{name}` entries needs [ ... ] around it"))
                    .with_hint(format!(
                        "write `{name} [ {{ ... }}, {{ ... }} ]`, or repeat the name: `{name} {{ ... }}`"
                    ));
                self.report_token(error)?;
                self.skip_brackets();
                self.eat(b',');
                Ok(())
            }
            Kind::Integer | Kind::Float | Kind::String | Kind::Symbol(b'-')
                if last.comma && list.is_some() =>
            {
                let name = list.map(|f| f.name().to_owned()).unwrap_or_default();
                let error = ConfigError::new(format!("several values of `{name}` need [ ... ] around them"))
                    .with_hint(format!("write `{name}: [ ..., ... ]`"));
                self.report_token(error)?;
                while matches!(
                    self.token.kind,
                    Kind::Integer | Kind::Float | Kind::String | Kind::Symbol(b'-')
                ) {
                    self.skip_scalar();
                    self.eat(b',');
                }
                Ok(())
            }
            Kind::Symbol(b'}' | b'>') => {
                let error = ConfigError::new(format!("unmatched {found}: no message is open here"))
                    .with_hint("remove it, or look for a message above that was closed too early");
                self.report_token(error)?;
                self.bump();
                Ok(())
            }
            Kind::Symbol(b']') => {
                let error = ConfigError::new("unmatched `]`: no list is open here");
                let error = match previous {
                    Some(field) => error.with_hint(format!("is a `[` missing after `{}`?", field.name())),
                    None => error,
                };
                self.report_token(error)?;
                Err(Stop)
            }
            Kind::Symbol(b',' | b';') => {
                let error = ConfigError::new(format!("unexpected {found}"))
                    .with_hint("fields may be separated by one `,` or `;`, or by nothing");
                self.report_token(error)?;
                self.bump();
                Ok(())
            }
            Kind::Symbol(b'[') => {
                let what = message.descriptor().full_name().to_owned();
                let error = ConfigError::new(format!(
                    "expected a field name, found `[`: extensions and Any types are not part of {what}"
                ));
                self.report_token(error)?;
                Err(Stop)
            }
            _ => {
                let error = ConfigError::new(format!("expected a field name, found {found}"));
                let error = match previous {
                    Some(field) => {
                        error.with_hint(format!("the value of `{}` ends before this", field.name()))
                    }
                    None => error,
                };
                self.report_token(error)?;
                Err(Stop)
            }
        }
    }

    pub(super) fn unknown_field(&mut self, message: &MessageDescriptor, name: &Token, word: &str) -> Step {
        let error =
            ConfigError::new(format!("message {} has no field named \"{word}\"", message.full_name()));
        let hint = self.unknown_field_hint(message, word);
        let mut error = error.with_hint(hint);
        if let Some(open) = self.open.last() {
            let span = self.span(open.start, open.end);
            error.related = Some(self.related(span, format!("`{}` is opened here", open.field)));
        }
        self.report(error, name.start, name.end)
    }

    fn unknown_field_hint(&self, message: &MessageDescriptor, word: &str) -> String {
        if message.is_map_entry() {
            let field = self.open.last().map_or("parameters", |open| &open.field);
            return format!("entries of `{field}` have the form `{{ key: ... value: ... }}`");
        }
        let parents = self.open.iter().rev().skip(1).map(|open| &open.message);
        let root = schema::model_config();
        let enclosing =
            parents.chain(std::iter::once(&root)).find(|parent| parent.get_field_by_name(word).is_some());
        if let Some(parent) = enclosing.filter(|_| !self.open.is_empty()) {
            return format!("`{word}` is a field of {}; is a `}}` missing before it?", parent.full_name());
        }
        if let Some(name) = schema::suggest_field(message, word) {
            return format!("did you mean `{name}`?");
        }
        let holder = message.fields().find(|field| match field.kind() {
            FieldKind::Message(child) => !field.is_map() && child.get_field_by_name(word).is_some(),
            _ => false,
        });
        match holder {
            Some(field) => format!("`{word}` belongs inside `{} {{ ... }}`", field.name()),
            None => format!("its fields are {}", schema::field_names(message)),
        }
    }

    pub(super) fn given_twice(
        &mut self,
        field: &FieldDescriptor,
        before: Option<Span>,
        name: &Token,
    ) -> Step {
        let mut error =
            ConfigError::new(format!("non-repeated field \"{}\" is specified multiple times", field.name()))
                .with_hint("keep one of them");
        error.related = before.map(|span| self.related(span, "first specified here"));
        self.report(error, name.start, name.end)
    }

    pub(super) fn oneof_twice(
        &mut self,
        field: &FieldDescriptor,
        oneof: &str,
        other: &str,
        name: &Token,
    ) -> Step {
        let error = ConfigError::new(format!(
            "field \"{}\" is specified along with field \"{other}\", another member of oneof \"{oneof}\"",
            field.name()
        ));
        self.report(error.with_hint("keep one of them"), name.start, name.end)
    }

    /// No colon behind the name of a scalar. True if a value follows that can be read all the same.
    pub(super) fn missing_colon(&mut self, field: &FieldDescriptor) -> Step<bool> {
        let found = self.describe(&self.token);
        let name = field.name();
        if let Some(error) = self.own_error(&self.token) {
            self.report_token(error)?;
            self.bump();
            return Ok(false);
        }
        if matches!(self.token.kind, Kind::Symbol(b'{' | b'<')) {
            let error = ConfigError::new(format!("`{name}` takes {}, found {found}", schema::takes(field)));
            self.report_token(error.with_hint(format!("write `{name}: ...`")))?;
            self.skip_brackets();
            return Ok(false);
        }
        let error = ConfigError::new(format!("expected `:` after `{name}`, found {found}"));
        self.report_token(error.with_hint(format!("write `{name}: ...`")))?;
        if self.eat(b'=') {
            return Ok(true);
        }
        let readable =
            matches!(self.token.kind, Kind::Integer | Kind::Float | Kind::String | Kind::Symbol(b'-' | b'['));
        let word = self.token.kind == Kind::Name && !self.names_a_field();
        if readable || word { Ok(true) } else { Err(Stop) }
    }

    pub(super) fn trailing_comma(&mut self, comma: &Token) -> Step {
        let error = ConfigError::new("the list ends with a comma").with_hint("remove the comma before `]`");
        self.report(error, comma.start, comma.end)
    }

    /// Neither `,` nor `]` behind a value of a list. True if a further value follows.
    pub(super) fn list_goes_on(&mut self, field: &FieldDescriptor, open: &Token) -> Step<bool> {
        if let Some(error) = self.own_error(&self.token) {
            self.report_token(error)?;
            return Err(Stop);
        }
        let found = self.describe(&self.token);
        let mut error =
            ConfigError::new(format!("expected `,` or `]` in the list of `{}`, found {found}", field.name()));
        let span = self.span(open.start, open.end);
        error.related = Some(self.related(span, "the list is opened here"));
        let is_message = matches!(field.kind(), FieldKind::Message(_));
        let another = match self.token.kind {
            Kind::Symbol(b'{' | b'<') => is_message,
            Kind::Integer | Kind::Float | Kind::String | Kind::Symbol(b'-') => !is_message,
            Kind::Name => !is_message && !self.names_a_field(),
            _ => false,
        };
        let error =
            error.with_hint(if another { "put a comma between the values" } else { "is a `]` missing?" });
        self.report_token(error)?;
        if another || self.token.kind != Kind::End { Ok(another) } else { Err(Stop) }
    }

    /// A message field whose value does not begin with a bracket. Skips the value.
    pub(super) fn not_a_message(&mut self, field: &FieldDescriptor, message: &MessageDescriptor) -> Step {
        let name = field.name();
        let found = self.describe(&self.token);
        let error = self.own_error(&self.token).unwrap_or_else(|| {
            let error = ConfigError::new(format!("`{name}` is a message and needs `{{`, found {found}"));
            let first = schema::fields_in_order(message);
            let inner = first.first().map_or_else(String::new, |f| match f.kind() {
                FieldKind::Message(_) => format!(" {} {{ ... }}", f.name()),
                _ => format!(" {}: ...", f.name()),
            });
            error.with_hint(format!(
                "write `{name} {{{inner} }}`; its fields are {}",
                schema::field_names(message)
            ))
        });
        self.report_token(error)?;
        match self.token.kind {
            Kind::Symbol(b'[') => self.skip_brackets(),
            Kind::Symbol(b'}' | b'>' | b']' | b',' | b';') => {}
            Kind::Symbol(_) | Kind::End => return Err(Stop),
            Kind::Name if self.names_a_field() => {}
            _ => self.skip_scalar(),
        }
        Ok(())
    }

    /// Whether a scalar can begin here; reports and skips what cannot.
    pub(super) fn value_begins(&mut self, field: &FieldDescriptor) -> Step<bool> {
        let name = field.name();
        match self.token.kind {
            Kind::Symbol(b'[') => {
                let error = ConfigError::new(format!("`{name}` takes one value, not a list"));
                self.report_token(error.with_hint(format!("write `{name}: ...` without brackets")))?;
                self.skip_brackets();
                Ok(false)
            }
            Kind::Symbol(b'{' | b'<') => {
                let error =
                    ConfigError::new(format!("`{name}` takes {}, not a message", schema::takes(field)));
                self.report_token(error)?;
                self.skip_brackets();
                Ok(false)
            }
            Kind::Symbol(b'}' | b'>' | b']' | b',' | b';') | Kind::End => {
                let found = self.describe(&self.token);
                let error = ConfigError::new(format!(
                    "`{name}` has no value: expected {}, found {found}",
                    schema::takes(field)
                ));
                self.report_token(error)?;
                Ok(false)
            }
            _ if self.names_a_field() => {
                let found = self.describe(&self.token);
                let error = ConfigError::new(format!(
                    "`{name}` has no value: expected {}, found the field {found}",
                    schema::takes(field)
                ));
                self.report_token(error)?;
                Ok(false)
            }
            _ => Ok(true),
        }
    }

    /// A value of the wrong kind. Notes it with the given hint and skips it.
    pub(super) fn bad_value(&mut self, field: &FieldDescriptor, hint: Option<String>) -> Step {
        let found = self.describe(&self.token);
        let error = self.own_error(&self.token).unwrap_or_else(|| {
            let expected = schema::takes(field);
            let error =
                ConfigError::new(format!("expected {expected} for `{}`, found {found}", field.name()));
            match hint {
                Some(hint) => error.with_hint(hint),
                None => error,
            }
        });
        self.report_token(error)?;
        match self.token.kind {
            Kind::Symbol(b'/') if self.is_foreign_comment(&self.token) => self.skip_line(),
            Kind::Symbol(b'-' | b'+') => {
                self.bump();
                self.skip_scalar();
            }
            Kind::Symbol(b'}' | b'>' | b']' | b',' | b';') => {}
            Kind::Symbol(_) | Kind::End => return Err(Stop),
            _ => self.skip_scalar(),
        }
        Ok(())
    }
}
