//! Strings: escapes, surrogate pairs, and the bytes of BYTES elements.

use std::borrow::Cow;

use trireme_types::Result;

use super::Reader;

/// What a string may hold.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stop {
    End,
    Escape,
}

impl<'a> Reader<'a> {
    /// Reads a string that must be UTF-8: a name, an id, a key.
    pub(crate) fn string(&mut self) -> Result<Cow<'a, str>> {
        let start = self.offset();
        let raw = self.raw_string()?;
        let utf8 = match raw {
            Cow::Borrowed(bytes) => std::str::from_utf8(bytes).ok().map(Cow::Borrowed),
            Cow::Owned(bytes) => String::from_utf8(bytes).ok().map(Cow::Owned),
        };
        utf8.ok_or_else(|| {
            self.rewind(start);
            self.syntax("Invalid encoding in string.")
        })
    }

    fn raw_string(&mut self) -> Result<Cow<'a, [u8]>> {
        self.open_string()?;
        let start = self.offset();
        if self.run()? == Stop::End {
            let content = self.since(start);
            self.advance(1);
            return Ok(Cow::Borrowed(content));
        }
        let mut out = self.since(start).to_vec();
        self.unescape_into(&mut out)?;
        Ok(Cow::Owned(out))
    }

    /// Reads a string and appends its bytes. They need not be UTF-8: a BYTES element is what the client sent.
    pub(crate) fn string_into(&mut self, out: &mut Vec<u8>) -> Result<()> {
        self.open_string()?;
        let start = self.offset();
        let stop = self.run()?;
        out.extend_from_slice(self.since(start));
        if stop == Stop::End {
            self.advance(1);
            return Ok(());
        }
        self.unescape_into(out)
    }

    /// Reads past a string.
    pub(crate) fn skip_string(&mut self) -> Result<()> {
        self.open_string()?;
        loop {
            if self.run()? == Stop::End {
                self.advance(1);
                return Ok(());
            }
            self.escape()?;
        }
    }

    fn open_string(&mut self) -> Result<()> {
        if self.take(b'"') { Ok(()) } else { Err(self.syntax("Invalid value.")) }
    }

    /// Reads plain bytes up to a quotation mark or a backslash.
    fn run(&mut self) -> Result<Stop> {
        let rest = self.rest();
        let plain = rest.iter().position(|&b| b == b'"' || b == b'\\' || b < 0x20);
        self.advance(plain.unwrap_or(rest.len()));
        match plain.and_then(|n| rest.get(n)) {
            Some(b'"') => Ok(Stop::End),
            Some(b'\\') => Ok(Stop::Escape),
            Some(_) => Err(self.syntax("Invalid encoding in string.")),
            None => Err(self.syntax("Missing a closing quotation mark in string.")),
        }
    }

    /// Reads from the first backslash to behind the closing quotation mark.
    fn unescape_into(&mut self, out: &mut Vec<u8>) -> Result<()> {
        loop {
            let c = self.escape()?;
            out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
            let start = self.offset();
            let stop = self.run()?;
            out.extend_from_slice(self.since(start));
            if stop == Stop::End {
                self.advance(1);
                return Ok(());
            }
        }
    }

    /// Reads one escape; the reader stands on its backslash.
    fn escape(&mut self) -> Result<char> {
        let c = match self.rest().get(1) {
            Some(b'"') => '"',
            Some(b'\\') => '\\',
            Some(b'/') => '/',
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => return self.unicode_escape(),
            _ => return Err(self.syntax("Invalid escape character in string.")),
        };
        self.advance(2);
        Ok(c)
    }

    fn unicode_escape(&mut self) -> Result<char> {
        let first = self.hex4()?;
        if let Some(c) = char::from_u32(first) {
            return Ok(c);
        }
        let low_follows = first < 0xDC00 && self.rest().starts_with(b"\\u");
        if low_follows {
            let second = self.hex4()?;
            if (0xDC00..0xE000).contains(&second) {
                let joined = 0x1_0000 + ((first - 0xD800) << 10) + (second - 0xDC00);
                if let Some(c) = char::from_u32(joined) {
                    return Ok(c);
                }
            }
        }
        Err(self.syntax("The surrogate pair in string is invalid."))
    }

    /// Reads `\uXXXX`.
    fn hex4(&mut self) -> Result<u32> {
        let digits = self.rest().get(2..6).unwrap_or_default();
        let value = digits.iter().try_fold(0_u32, |value, &b| Some(value << 4 | char::from(b).to_digit(16)?));
        match value {
            Some(value) if digits.len() == 4 => {
                self.advance(6);
                Ok(value)
            }
            _ => Err(self.syntax("Incorrect hex digit after \\u escape in string.")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> Result<String> {
        Reader::new(text.as_bytes()).string().map(Cow::into_owned)
    }

    #[test]
    fn reads_escapes() {
        for (text, want) in [
            (r#""""#, ""),
            (r#""plain é""#, "plain é"),
            (r#""\"\\\/\b\f\n\r\t""#, "\"\\/\u{8}\u{c}\n\r\t"),
            (r#""a\u0000b""#, "a\0b"),
            (r#""\u00e9\u6a21\ud83d\ude00!""#, "é模😀!"),
            (r#""\uD83D\uDE00""#, "😀"),
        ] {
            assert_eq!(read(text).as_deref(), Ok(want), "{text}");
        }
    }

    #[test]
    fn refuses_broken_strings() {
        for bad in [
            r#""\ud800""#,
            r#""\ud800x""#,
            r#""\ud800\u0041""#,
            r#""\udc00""#,
            r#""\u12g4""#,
            r#""\u12"#,
            r#""\x""#,
            r#""\"#,
            r#"""#,
            "\"a\nb\"",
            "\"\0\"",
            "x",
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
        let not_utf8 = [b'"', 0xff, 0xfe, b'"'];
        assert!(Reader::new(&not_utf8).string().is_err());
        let mut bytes = Vec::new();
        Reader::new(&not_utf8).string_into(&mut bytes).expect("BYTES take any byte");
        assert_eq!(bytes, [0xff, 0xfe]);
    }

    proptest! {
        #[test]
        fn reads_what_serde_writes(text: String) {
            let json = serde_json::to_string(&text).expect("a string");
            prop_assert_eq!(read(&json), Ok(text.clone()));
            let mut bytes = Vec::new();
            let mut reader = Reader::new(json.as_bytes());
            reader.string_into(&mut bytes).expect("the same string");
            prop_assert_eq!(bytes, text.as_bytes());
            prop_assert_eq!(reader.remaining(), 0);
        }
    }
}
