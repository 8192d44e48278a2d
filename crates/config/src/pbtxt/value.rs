//! Scalars, with the ranges and spellings of the reference parser.

use prost_reflect::{EnumDescriptor, FieldDescriptor, Kind as FieldKind, Value};

use super::lexer::Kind;
use super::literal;
use super::parser::{Parser, Step};
use crate::error::{ConfigError, Note};
use crate::schema;

/// Notes after which no more are taken.
const MAX_NOTES: usize = 20;

/// Both ends of an integer type.
struct Range {
    min: i128,
    max: i128,
    name: &'static str,
}

impl Parser<'_> {
    /// One scalar value; `None` if it was refused, which is noted, and skipped.
    pub(super) fn scalar(&mut self, field: &FieldDescriptor, kind: &FieldKind) -> Step<Option<Value>> {
        if !self.value_begins(field)? {
            return Ok(None);
        }
        match kind {
            FieldKind::String => self.string(field),
            FieldKind::Bool => self.bool(field),
            FieldKind::Enum(values) => self.enum_value(field, values),
            FieldKind::Float => Ok(self.float(field)?.map(narrow).map(Value::F32)),
            FieldKind::Double => Ok(self.float(field)?.map(Value::F64)),
            FieldKind::Int32 | FieldKind::Sint32 | FieldKind::Sfixed32 => {
                let range = Range { min: i32::MIN.into(), max: i32::MAX.into(), name: "int32" };
                Ok(self.integer(field, &range)?.and_then(|v| i32::try_from(v).ok()).map(Value::I32))
            }
            FieldKind::Int64 | FieldKind::Sint64 | FieldKind::Sfixed64 => {
                let range = Range { min: i64::MIN.into(), max: i64::MAX.into(), name: "int64" };
                Ok(self.integer(field, &range)?.and_then(|v| i64::try_from(v).ok()).map(Value::I64))
            }
            FieldKind::Uint32 | FieldKind::Fixed32 => {
                let range = Range { min: 0, max: u32::MAX.into(), name: "uint32" };
                Ok(self.integer(field, &range)?.and_then(|v| u32::try_from(v).ok()).map(Value::U32))
            }
            FieldKind::Uint64 | FieldKind::Fixed64 => {
                let range = Range { min: 0, max: u64::MAX.into(), name: "uint64" };
                Ok(self.integer(field, &range)?.and_then(|v| u64::try_from(v).ok()).map(Value::U64))
            }
            // The schema has no such fields.
            FieldKind::Bytes | FieldKind::Message(_) => {
                self.bad_value(field, None)?;
                Ok(None)
            }
        }
    }

    /// Adjacent strings are one value.
    fn string(&mut self, field: &FieldDescriptor) -> Step<Option<Value>> {
        let start = self.token.start;
        let mut bytes = Vec::new();
        let mut any = false;
        while self.token.kind == Kind::String {
            any = true;
            literal::unescape(
                self.text.get(self.token.start..self.token.end).unwrap_or_default(),
                &mut bytes,
            );
            self.bump();
        }
        let next_is_broken =
            matches!(self.token.kind, Kind::Bad(_)) && any && self.text.get(self.token.start) == Some(&b'"');
        if !any || next_is_broken {
            let word = self.text_of(&self.token);
            let hint = matches!(self.token.kind, Kind::Name | Kind::Integer | Kind::Float)
                .then(|| format!("put it in quotes: \"{word}\""));
            self.bad_value(field, hint)?;
            return Ok(None);
        }
        let end = self.last_end;
        match String::from_utf8(bytes) {
            Ok(text) => {
                if self.notes.len() < MAX_NOTES && (text.contains("${") || text.contains("{{")) {
                    let path = self.path.clone();
                    self.notes.push(
                        Note::warning(
                            path,
                            format!("the text {text:?} looks like an unfilled template placeholder"),
                        )
                        .with_hint("fill the template before the file is served"),
                    );
                }
                Ok(Some(Value::String(text)))
            }
            Err(_) => {
                let error = ConfigError::new(format!("the text of `{}` is not UTF-8", field.name()));
                self.report(error.with_hint("save the file as UTF-8"), start, end)?;
                Ok(None)
            }
        }
    }

    /// `true`, `True`, `t` or 1; `false`, `False`, `f` or 0.
    fn bool(&mut self, field: &FieldDescriptor) -> Step<Option<Value>> {
        let word = self.text_of(&self.token);
        let value = match self.token.kind {
            Kind::Name => match word.as_str() {
                "true" | "True" | "t" => Some(true),
                "false" | "False" | "f" => Some(false),
                _ => None,
            },
            Kind::Integer => match literal::integer(&word) {
                Some(0) => Some(false),
                Some(1) => Some(true),
                _ => None,
            },
            _ => None,
        };
        if let Some(value) = value {
            self.bump();
            return Ok(Some(Value::Bool(value)));
        }
        let bare = word.trim_matches(['"', '\'']).to_ascii_lowercase();
        let meant = match bare.as_str() {
            "true" | "yes" | "on" | "y" | "enable" | "enabled" => Some("true"),
            "false" | "no" | "off" | "n" | "disable" | "disabled" => Some("false"),
            _ => None,
        };
        let spellings = "allowed are true, True, t, 1 and false, False, f, 0, without quotes";
        let hint = meant.map_or_else(|| spellings.to_owned(), |meant| format!("write {meant}; {spellings}"));
        self.bad_value(field, Some(hint))?;
        Ok(None)
    }

    /// A name of the enum, or any 32-bit number: proto3 enums are open, so numbers without a name pass.
    fn enum_value(&mut self, field: &FieldDescriptor, values: &EnumDescriptor) -> Step<Option<Value>> {
        if matches!(self.token.kind, Kind::Integer | Kind::Symbol(b'-')) {
            let range = Range { min: i32::MIN.into(), max: i32::MAX.into(), name: "int32" };
            let number = self.integer(field, &range)?;
            return Ok(number.and_then(|v| i32::try_from(v).ok()).map(Value::EnumNumber));
        }
        let word = self.text_of(&self.token);
        if self.token.kind == Kind::Name {
            if let Some(value) = values.get_value_by_name(&word) {
                self.bump();
                return Ok(Some(Value::EnumNumber(value.number())));
            }
            let error = ConfigError::new(format!("unknown value `{word}` for `{}`", field.name()));
            let hint = schema::suggest_enum(values, &word).map_or_else(
                || format!("allowed are {}", schema::enum_names(values)),
                |name| format!("did you mean {name}?"),
            );
            self.report_token(error.with_hint(hint))?;
            self.bump();
            return Ok(None);
        }
        let bare = word.trim_matches(['"', '\'']);
        let hint = (self.token.kind == Kind::String).then(|| match schema::suggest_enum(values, bare) {
            Some(name) => format!("did you mean {name}, without quotes?"),
            None => format!("names are written without quotes; allowed are {}", schema::enum_names(values)),
        });
        self.bad_value(field, hint)?;
        Ok(None)
    }

    fn integer(&mut self, field: &FieldDescriptor, range: &Range) -> Step<Option<i128>> {
        let start = self.token.start;
        let negative = self.at(b'-') && range.min < 0;
        if negative {
            self.bump();
        }
        if self.token.kind != Kind::Integer {
            let word = self.text_of(&self.token);
            let hint = self.integer_hint(&word, range);
            self.bad_value(field, hint)?;
            return Ok(None);
        }
        let word = self.text_of(&self.token);
        self.bump();
        let value = literal::integer(&word).map(i128::from).map(|v| if negative { -v } else { v });
        match value.filter(|v| (range.min..=range.max).contains(v)) {
            Some(value) => Ok(Some(value)),
            None => {
                let sign = if negative { "-" } else { "" };
                let error =
                    ConfigError::new(format!("integer out of range: {sign}{word} for `{}`", field.name()));
                let hint = format!("{} takes {} to {}", range.name, range.min, range.max);
                let end = self.last_end;
                self.report(error.with_hint(hint), start, end)?;
                Ok(None)
            }
        }
    }

    fn integer_hint(&self, word: &str, range: &Range) -> Option<String> {
        match self.token.kind {
            Kind::String => {
                let bare = word.trim_matches(['"', '\'']);
                bare.parse::<i64>().ok().map(|number| format!("write the number without quotes: {number}"))
            }
            Kind::Float => {
                let value = literal::float(word).filter(|v| v.fract() == 0.0 && v.abs() < 1e15)?;
                Some(format!("write it without a decimal point or exponent: {value:.0}"))
            }
            Kind::Symbol(b'+') => Some("leave the + out".to_owned()),
            Kind::Symbol(b'-') => Some(format!("{} takes no negative numbers", range.name)),
            _ => None,
        }
    }

    /// Decimal numbers, `inf`, `infinity` and `nan` in any case; no hexadecimal or octal.
    fn float(&mut self, field: &FieldDescriptor) -> Step<Option<f64>> {
        let negative = self.eat(b'-');
        let word = self.text_of(&self.token);
        let value = match self.token.kind {
            Kind::Integer if literal::is_radix(&word) => None,
            Kind::Integer | Kind::Float => literal::float(&word),
            Kind::Name => match word.to_ascii_lowercase().as_str() {
                "inf" | "infinity" => Some(f64::INFINITY),
                "nan" => Some(f64::NAN),
                _ => None,
            },
            _ => None,
        };
        let Some(value) = value else {
            let hint = match self.token.kind {
                Kind::Integer => Some("write the number in decimal".to_owned()),
                Kind::String => {
                    let bare = word.trim_matches(['"', '\'']);
                    bare.parse::<f64>().ok().map(|_| format!("write the number without quotes: {bare}"))
                }
                _ => None,
            };
            self.bad_value(field, hint)?;
            return Ok(None);
        };
        self.bump();
        Ok(Some(if negative { -value } else { value }))
    }
}

/// The nearest 32-bit float; values beyond its range become infinite, as in the reference.
#[expect(clippy::cast_possible_truncation, reason = "rounding to 32 bits is what a float field does")]
fn narrow(value: f64) -> f32 {
    value as f32
}
