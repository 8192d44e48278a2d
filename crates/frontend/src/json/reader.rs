//! The walk over JSON text: punctuation, members, elements, and skipping what nobody wants.

use std::borrow::Cow;

use trireme_types::{Error, Result};

use super::MAX_DEPTH;

/// A place in JSON text. Every method starts at `offset` and leaves it behind what it has read.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    text: &'a [u8],
    pos: usize,
    depth: u32,
}

/// What a value is, told by its first character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Object,
    Array,
    String,
    /// A number, `NaN` and `Infinity` included.
    Number,
    Bool,
    Null,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(text: &'a [u8]) -> Self {
        Self { text, pos: 0, depth: 0 }
    }

    /// Bytes read so far.
    pub(crate) fn offset(&self) -> usize {
        self.pos
    }

    /// The text that is not yet read.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.text.get(self.pos..).unwrap_or_default()
    }

    /// The text from `start` to here.
    pub(crate) fn since(&self, start: usize) -> &'a [u8] {
        self.text.get(start..self.pos).unwrap_or_default()
    }

    /// Bytes that are not yet read.
    pub(crate) fn remaining(&self) -> usize {
        self.text.len().saturating_sub(self.pos)
    }

    pub(super) fn advance(&mut self, n: usize) {
        self.pos += n;
    }

    /// Reads again from an offset that [`Reader::offset`] gave.
    pub(crate) fn rewind(&mut self, offset: usize) {
        self.pos = offset.min(self.text.len());
    }

    /// The next byte behind any space.
    #[inline]
    pub(crate) fn first(&mut self) -> Option<u8> {
        self.skip_space();
        self.byte()
    }

    #[inline]
    fn byte(&self) -> Option<u8> {
        self.text.get(self.pos).copied()
    }

    #[inline]
    pub(crate) fn skip_space(&mut self) {
        while matches!(self.byte(), Some(b' ' | b'\n' | b'\r' | b'\t')) {
            self.pos += 1;
        }
    }

    /// A refusal of the text itself, in the form of Triton's parser.
    #[cold]
    pub(crate) fn syntax(&self, what: &str) -> Error {
        syntax_at(what, self.pos)
    }

    /// Reads the byte if it comes next, behind any space.
    #[inline]
    pub(crate) fn take(&mut self, byte: u8) -> bool {
        self.skip_space();
        let found = self.byte() == Some(byte);
        self.pos += usize::from(found);
        found
    }

    /// What the next value is.
    ///
    /// # Errors
    /// No value begins here.
    pub(crate) fn kind(&mut self) -> Result<Kind> {
        self.skip_space();
        match self.byte() {
            Some(b'{') => Ok(Kind::Object),
            Some(b'[') => Ok(Kind::Array),
            Some(b'"') => Ok(Kind::String),
            Some(b'-' | b'0'..=b'9' | b'N' | b'I') => Ok(Kind::Number),
            Some(b't' | b'f') => Ok(Kind::Bool),
            Some(b'n') => Ok(Kind::Null),
            None if self.pos == 0 || self.text.iter().all(u8::is_ascii_whitespace) => {
                Err(syntax_at("The document is empty.", 0))
            }
            _ => Err(self.syntax("Invalid value.")),
        }
    }

    fn enter(&mut self) -> Result<()> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(Error::invalid_arg(format!(
                "JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH}) at {}",
                self.pos
            )));
        }
        Ok(())
    }

    fn leave(&mut self) {
        self.depth = self.depth.saturating_sub(1);
    }

    /// Reads an object; `member` gets each key and must read its value.
    pub(crate) fn object(
        &mut self,
        mut member: impl FnMut(&mut Self, Cow<'a, str>) -> Result<()>,
    ) -> Result<()> {
        self.open(b'{')?;
        if !self.take(b'}') {
            loop {
                self.skip_space();
                if self.byte() != Some(b'"') {
                    return Err(self.syntax("Missing a name for object member."));
                }
                let key = self.string()?;
                if !self.take(b':') {
                    return Err(self.syntax("Missing a colon after a name of object member."));
                }
                member(self, key)?;
                if self.take(b',') {
                    continue;
                }
                if self.take(b'}') {
                    break;
                }
                return Err(self.syntax("Missing a comma or '}' after an object member."));
            }
        }
        self.leave();
        Ok(())
    }

    /// Reads an array; `element` gets each index and must read the value.
    pub(crate) fn array(&mut self, mut element: impl FnMut(&mut Self, usize) -> Result<()>) -> Result<()> {
        self.open(b'[')?;
        if !self.take(b']') {
            let mut index = 0;
            loop {
                element(self, index)?;
                index += 1;
                if self.take(b',') {
                    continue;
                }
                if self.take(b']') {
                    break;
                }
                return Err(self.syntax("Missing a comma or ']' after an array element."));
            }
        }
        self.leave();
        Ok(())
    }

    fn open(&mut self, bracket: u8) -> Result<()> {
        if !self.take(bracket) {
            return Err(self.syntax("Invalid value."));
        }
        self.enter()
    }

    /// Reads an array of any nesting as the flat list of what stands in it; `element` reads one innermost value.
    pub(crate) fn flat_array(&mut self, mut element: impl FnMut(&mut Self) -> Result<()>) -> Result<()> {
        self.open(b'[')?;
        let mut open = 1_u32;
        let mut fresh = true;
        'value: loop {
            self.skip_space();
            if self.byte() == Some(b'[') {
                self.open(b'[')?;
                open += 1;
                fresh = true;
                continue;
            }
            if !(fresh && self.byte() == Some(b']')) {
                element(self)?;
            }
            fresh = false;
            loop {
                self.skip_space();
                match self.byte() {
                    Some(b',') => {
                        self.pos += 1;
                        continue 'value;
                    }
                    Some(b']') => {
                        self.pos += 1;
                        self.leave();
                        open -= 1;
                        if open == 0 {
                            return Ok(());
                        }
                    }
                    _ => return Err(self.syntax("Missing a comma or ']' after an array element.")),
                }
            }
        }
    }

    /// Reads `true` or `false`.
    #[inline]
    pub(crate) fn boolean(&mut self) -> Result<bool> {
        self.skip_space();
        let rest = self.rest();
        if rest.starts_with(b"true") {
            self.pos += 4;
            Ok(true)
        } else if rest.starts_with(b"false") {
            self.pos += 5;
            Ok(false)
        } else {
            Err(self.syntax("Invalid value."))
        }
    }

    /// Reads past one value of any kind and checks its grammar. Takes no stack, however deep the value is.
    pub(crate) fn skip_value(&mut self) -> Result<()> {
        // One bit a level, set for objects; MAX_DEPTH levels fit.
        let mut levels = 0_u128;
        let base = self.depth;
        loop {
            match self.kind()? {
                Kind::Object => {
                    self.open(b'{')?;
                    levels = levels << 1 | 1;
                    if !self.take(b'}') {
                        self.key()?;
                        continue;
                    }
                    self.leave();
                    levels >>= 1;
                }
                Kind::Array => {
                    self.open(b'[')?;
                    levels <<= 1;
                    if !self.take(b']') {
                        continue;
                    }
                    self.leave();
                    levels >>= 1;
                }
                Kind::String => self.skip_string()?,
                Kind::Number => _ = self.decimal()?,
                Kind::Bool => _ = self.boolean()?,
                Kind::Null if self.rest().starts_with(b"null") => self.pos += 4,
                Kind::Null => return Err(self.syntax("Invalid value.")),
            }
            loop {
                if self.depth == base {
                    return Ok(());
                }
                let in_object = levels & 1 == 1;
                if self.take(b',') {
                    if in_object {
                        self.key()?;
                    }
                    break;
                }
                if !self.take(if in_object { b'}' } else { b']' }) {
                    return Err(self.syntax(if in_object {
                        "Missing a comma or '}' after an object member."
                    } else {
                        "Missing a comma or ']' after an array element."
                    }));
                }
                self.leave();
                levels >>= 1;
            }
        }
    }

    fn key(&mut self) -> Result<()> {
        self.skip_space();
        if self.byte() != Some(b'"') {
            return Err(self.syntax("Missing a name for object member."));
        }
        self.skip_string()?;
        if self.take(b':') {
            Ok(())
        } else {
            Err(self.syntax("Missing a colon after a name of object member."))
        }
    }

    /// Checks that nothing but space is left.
    ///
    /// # Errors
    /// With the advice that people need who forgot the header that tells JSON from binary data.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.skip_space();
        if self.remaining() == 0 {
            return Ok(());
        }
        let end = self.pos;
        Err(self.syntax(&format!(
            "The document root must not be followed by other values: the JSON ended at byte {end} but {} more follow; \
             if they are binary tensor data, set the header Inference-Header-Content-Length to {end}.",
            self.remaining()
        )))
    }
}

#[cold]
pub(super) fn syntax_at(what: &str, offset: usize) -> Error {
    Error::invalid_arg(format!("failed to parse the request JSON buffer: {what} at {offset}"))
}

/// The value at the start of `text` for a message, cut to a readable length.
pub(crate) fn excerpt(text: &[u8]) -> String {
    const LIMIT: usize = 40;
    let quoted = text.first() == Some(&b'"');
    let end = text
        .iter()
        .enumerate()
        .skip(usize::from(quoted))
        .find(
            |&(_, &b)| {
                if quoted { b == b'"' } else { matches!(b, b',' | b']' | b'}' | b' ' | b'\n' | b'\r') }
            },
        )
        .map_or(text.len(), |(i, _)| i + usize::from(quoted));
    let cut = text.get(..end.min(LIMIT)).unwrap_or_default();
    let mut shown = String::from_utf8_lossy(cut).into_owned();
    if end > LIMIT {
        shown.push_str("...");
    }
    shown
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn skip(text: &str) -> Result<()> {
        let mut reader = Reader::new(text.as_bytes());
        reader.skip_value()?;
        reader.finish()
    }

    #[test]
    fn skips_every_kind() {
        for good in [
            "{}",
            "[]",
            "[[],{}]",
            "null",
            "true",
            " [1, -2.5e+3,\"x\\\"\" , {\"a\" : [null]}]\n",
            "NaN",
            "-Infinity",
            "{\"a\":{\"b\":{\"c\":[1,[2,[3]]]}}}",
        ] {
            assert!(skip(good).is_ok(), "{good}: {:?}", skip(good));
        }
    }

    #[test]
    fn refuses_broken_text_with_the_offset() {
        for (bad, says) in [
            ("", "The document is empty. at 0"),
            ("  ", "The document is empty. at 0"),
            ("{", "Missing a name for object member. at 1"),
            ("{\"inputs\":[", "Invalid value. at 11"),
            ("{\"a\"}", "Missing a colon after a name of object member. at 4"),
            ("{\"a\":1", "Missing a comma or '}' after an object member. at 6"),
            ("{\"a\":1,}", "Missing a name for object member. at 7"),
            ("[1", "Missing a comma or ']' after an array element. at 2"),
            ("[1,]", "Invalid value. at 3"),
            ("[1}", "Missing a comma or ']' after an array element. at 2"),
            ("nul", "Invalid value. at 0"),
            ("abc", "Invalid value. at 0"),
            ("\"abc", "Missing a closing quotation mark in string. at 4"),
        ] {
            let error = skip(bad).expect_err(bad);
            assert_eq!(error.message(), format!("failed to parse the request JSON buffer: {says}"), "{bad}");
        }
        assert!(skip("{} x").expect_err("junk").message().contains("Inference-Header-Content-Length"));
    }

    #[test]
    fn bounds_nesting() {
        let nested = |n: usize| format!("{}1{}", "[".repeat(n), "]".repeat(n));
        assert!(skip(&nested(100)).is_ok());
        for deep in [nested(101), nested(250_000), "{\"a\":".repeat(200_000)] {
            let error = skip(&deep).expect_err("too deep");
            assert!(
                error.message().starts_with("JSON nesting depth exceeds maximum allowed limit (100)"),
                "{error}"
            );
        }
        let flat = |text: &str| Reader::new(text.as_bytes()).flat_array(|reader| reader.skip_value());
        assert!(flat(&nested(100)).is_ok());
        assert!(flat(&nested(101)).is_err());
    }

    #[test]
    fn flat_arrays_keep_their_grammar() {
        let count = |text: &str| {
            let mut n = 0;
            let mut reader = Reader::new(text.as_bytes());
            reader
                .flat_array(|reader| {
                    n += 1;
                    reader.decimal().map(|_| ())
                })
                .and_then(|()| reader.finish())
                .map(|()| n)
        };
        for (good, n) in [
            ("[]", 0),
            ("[[],[]]", 0),
            ("[1]", 1),
            ("[[1,2],[3]]", 3),
            ("[ [ [ 1 ] ] , 2 ]", 2),
            ("[[[]]]", 0),
        ] {
            assert_eq!(count(good), Ok(n), "{good}");
        }
        for bad in ["1", "[", "[1", "[1,]", "[,1]", "[[1],]", "[1 2]", "[[1]", "[1]]", "[[],", "[[]1]", "{}"]
        {
            assert!(count(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(text: Vec<u8>) {
            let mut reader = Reader::new(&text);
            let _ = reader.skip_value();
            let _ = Reader::new(&text).string();
            let _ = excerpt(&text);
        }

        #[test]
        fn json_like_text_never_panics(text in "[\\[\\]{}\",:0-9a-z\\\\ .eE+-]{0,60}") {
            let mut reader = Reader::new(text.as_bytes());
            let ours = reader.skip_value().and_then(|()| reader.finish()).is_ok();
            // The one reader that decides what JSON is; ours takes no more, and less only where it is too deep.
            prop_assert_eq!(ours, serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok());
        }
    }
}
