//! Text format to tokens, by the rules of the reference tokenizer: `#` comments, no line break inside a string,
//! octal and hexadecimal integers, an optional `f` behind a float, a space needed between a number and a name.
//!
//! Lexing never fails: what cannot be a token becomes [`Kind::Bad`] with the reason, and the parser decides whether
//! it can go on behind it. Works on bytes, because comments may hold text that is not UTF-8.

/// What a token is. Its text is the source between `start` and `end`.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Kind {
    /// Letters, digits and `_`, not beginning with a digit.
    Name,
    /// Decimal, octal or hexadecimal, without a sign.
    Integer,
    Float,
    /// A quoted string with well-formed escapes.
    String,
    /// One ASCII punctuation character.
    Symbol(u8),
    /// A left-over placeholder of a template, as `${size}` or `{{ size }}`.
    Placeholder,
    Bad(Problem),
    End,
}

/// Why some text is no token.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Problem {
    pub(super) message: String,
    pub(super) hint: Option<&'static str>,
    /// Reading can go on as if the text were not there.
    pub(super) is_blank: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Token {
    pub(super) kind: Kind,
    pub(super) start: usize,
    pub(super) end: usize,
}

/// Reads tokens off a text.
#[derive(Debug)]
pub(super) struct Lexer<'a> {
    text: &'a [u8],
    at: usize,
}

const OPENING_QUOTES: [char; 12] = ['“', '”', '„', '‟', '‘', '’', '‚', '‛', '«', '»', '″', '′'];

impl<'a> Lexer<'a> {
    pub(super) fn new(text: &'a [u8]) -> Self {
        Self { text, at: 0 }
    }

    fn peek(&self, ahead: usize) -> u8 {
        self.text.get(self.at + ahead).copied().unwrap_or(0)
    }

    fn eat(&mut self, accept: impl Fn(u8) -> bool) -> bool {
        let found = self.text.get(self.at).is_some_and(|&b| accept(b));
        if found {
            self.at += 1;
        }
        found
    }

    fn eat_all(&mut self, accept: impl Fn(u8) -> bool) {
        while self.eat(&accept) {}
    }

    fn starts_with(&self, prefix: &[u8]) -> bool {
        self.text.get(self.at..).is_some_and(|rest| rest.starts_with(prefix))
    }

    fn rest_of_line(&self) -> &'a [u8] {
        let rest = self.text.get(self.at..).unwrap_or_default();
        rest.split(|&b| b == b'\n' || b == b'\r').next().unwrap_or_default()
    }

    fn skip_blank(&mut self) {
        loop {
            self.eat_all(|b| matches!(b, b' ' | b'\t' | b'\n' | b'\r' | 0x0b | 0x0c));
            if self.peek(0) != b'#' {
                return;
            }
            self.eat_all(|b| b != b'\n');
        }
    }

    /// Moves past the end of the line.
    pub(super) fn skip_line(&mut self) {
        self.eat_all(|b| b != b'\n');
    }

    /// The next token; [`Kind::End`] again and again at the end of the text.
    pub(super) fn next(&mut self) -> Token {
        self.skip_blank();
        let start = self.at;
        let Some(&first) = self.text.get(start) else {
            return Token { kind: Kind::End, start, end: start };
        };
        let kind = match first {
            b'a'..=b'z' | b'A'..=b'Z' | b'_' => {
                self.eat_all(|b| b.is_ascii_alphanumeric() || b == b'_');
                Kind::Name
            }
            b'0'..=b'9' => self.number(),
            b'.' if self.peek(1).is_ascii_digit() => self.number(),
            b'"' | b'\'' => self.string(first),
            b'$' if self.starts_with(b"${") || self.starts_with(b"$(") => self.placeholder(),
            b'{' if self.starts_with(b"{{") || self.starts_with(b"{%") => self.braces(),
            0..=0x1f | 0x7f => {
                self.at += 1;
                blank(format!("control character U+{first:04X}"), "remove it; it may not show in an editor")
            }
            0x80.. => self.foreign(),
            _ => {
                self.at += 1;
                Kind::Symbol(first)
            }
        };
        Token { kind, start, end: self.at }
    }

    /// `${name}`, `$(name)`
    fn placeholder(&mut self) -> Kind {
        let line = self.rest_of_line();
        let close = if self.starts_with(b"${") { b'}' } else { b')' };
        match line.iter().position(|&b| b == close) {
            Some(end) => {
                self.at += end + 1;
                Kind::Placeholder
            }
            None => {
                self.at += 1;
                Kind::Symbol(b'$')
            }
        }
    }

    /// `{{ name }}` and `{% statement %}` of templates, or two opening braces.
    fn braces(&mut self) -> Kind {
        let line = self.rest_of_line();
        let close: &[u8] = if self.starts_with(b"{{") { b"}}" } else { b"%}" };
        let end = line.windows(2).position(|pair| pair == close);
        let inside = end.and_then(|end| line.get(2..end));
        let is_word = |b: &u8| b.is_ascii_alphanumeric() || b"_-.|() '\"%".contains(b);
        match (end, inside) {
            // A colon or a further brace inside means message syntax.
            (Some(end), Some(inside)) if !inside.is_empty() && inside.iter().all(is_word) => {
                self.at += end + 2;
                Kind::Placeholder
            }
            _ => {
                self.at += 1;
                Kind::Symbol(b'{')
            }
        }
    }

    fn number(&mut self) -> Kind {
        let zero = self.peek(0) == b'0';
        let mut is_float = false;
        if zero && matches!(self.peek(1), b'x' | b'X') {
            self.at += 2;
            let digits = self.at;
            self.eat_all(|b| b.is_ascii_hexdigit());
            if self.at == digits {
                return self.bad_number("`0x` must be followed by hexadecimal digits");
            }
        } else if zero && self.peek(1).is_ascii_digit() {
            self.eat_all(|b| (b'0'..=b'7').contains(&b));
            if self.peek(0).is_ascii_digit() {
                return self.bad_number("a number that begins with 0 is octal and has no digits 8 and 9");
            }
        } else {
            self.eat_all(|b| b.is_ascii_digit());
            if self.eat(|b| b == b'.') {
                is_float = true;
                self.eat_all(|b| b.is_ascii_digit());
            }
            if self.eat(|b| matches!(b, b'e' | b'E')) {
                is_float = true;
                self.eat(|b| matches!(b, b'-' | b'+'));
                if !self.peek(0).is_ascii_digit() {
                    return self.bad_number("`e` must be followed by an exponent");
                }
                self.eat_all(|b| b.is_ascii_digit());
            }
            if self.eat(|b| matches!(b, b'f' | b'F')) {
                is_float = true;
            }
        }
        match self.peek(0) {
            b'a'..=b'z' | b'A'..=b'Z' | b'_' => self.bad_number("a number must not run into letters"),
            b'.' if is_float => self.bad_number("a number has one decimal point only"),
            b'.' => self.bad_number("hexadecimal and octal numbers have no decimal point"),
            _ if is_float => Kind::Float,
            _ => Kind::Integer,
        }
    }

    fn bad_number(&mut self, message: &str) -> Kind {
        self.eat_all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'.');
        bad(message.to_owned(), None)
    }

    fn string(&mut self, quote: u8) -> Kind {
        self.at += 1;
        let mut problem = None;
        loop {
            match self.text.get(self.at) {
                None | Some(b'\n') => {
                    let hint = "close the string with the quote it began with, on the same line";
                    return bad("this string is not closed".to_owned(), Some(hint));
                }
                Some(b'\\') => {
                    self.at += 1;
                    if let Err(message) = self.escape() {
                        problem = problem.or(Some(message));
                    }
                }
                Some(&b) => {
                    self.at += 1;
                    if b == quote {
                        break;
                    }
                }
            }
        }
        match problem {
            None => Kind::String,
            Some(message) => bad(message.to_owned(), Some("write `\\\\` for a backslash")),
        }
    }

    fn escape(&mut self) -> Result<(), &'static str> {
        let mut exactly = |digits: &[fn(u8) -> bool]| digits.iter().all(|accept| self.eat(accept));
        let hex: fn(u8) -> bool = |b| b.is_ascii_hexdigit();
        let zero: fn(u8) -> bool = |b| b == b'0';
        let low: fn(u8) -> bool = |b| b == b'0' || b == b'1';
        if exactly(&[|b| b"abfnrtv\\?'\"".contains(&b) || (b'0'..=b'7').contains(&b)]) {
            Ok(())
        } else if exactly(&[|b| b == b'x' || b == b'X']) {
            exactly(&[hex]).then_some(()).ok_or("`\\x` must be followed by hexadecimal digits")
        } else if exactly(&[|b| b == b'u']) {
            exactly(&[hex; 4]).then_some(()).ok_or("`\\u` must be followed by four hexadecimal digits")
        } else if exactly(&[|b| b == b'U']) {
            let digits = [zero, zero, low, hex, hex, hex, hex, hex];
            exactly(&digits)
                .then_some(())
                .ok_or("`\\U` must be followed by eight hexadecimal digits up to 0010ffff")
        } else {
            Err("unknown escape sequence in this string")
        }
    }

    /// A character outside ASCII, which only strings and comments may hold.
    fn foreign(&mut self) -> Kind {
        let rest = self.text.get(self.at..).unwrap_or_default();
        let head = rest.get(..rest.len().min(4)).unwrap_or_default();
        let first = match std::str::from_utf8(head) {
            Ok(text) => text.chars().next(),
            Err(error) => {
                let valid = head.get(..error.valid_up_to()).and_then(|bytes| std::str::from_utf8(bytes).ok());
                valid.and_then(|text| text.chars().next())
            }
        };
        let Some(found) = first else {
            self.at += 1;
            let byte = rest.first().copied().unwrap_or(0);
            return bad(format!("byte 0x{byte:02x} is not UTF-8"), Some("save the file as UTF-8"));
        };
        self.at += found.len_utf8();
        if OPENING_QUOTES.contains(&found) {
            // The whole quoted text, so that the parser can go on behind it.
            let line = String::from_utf8_lossy(self.rest_of_line()).into_owned();
            if let Some(end) = line.find(|c| OPENING_QUOTES.contains(&c)) {
                let width = line.get(end..).and_then(|tail| tail.chars().next()).map_or(0, char::len_utf8);
                self.at = (self.at + end + width).min(self.text.len());
            }
            let message = format!("found the typographic quote {found} where \" or ' is needed");
            return bad(message, Some("replace it by a plain quote, as in \"text\""));
        }
        let code = u32::from(found);
        match found {
            '\u{a0}'
            | '\u{2000}'..='\u{200f}'
            | '\u{2028}'
            | '\u{2029}'
            | '\u{202f}'
            | '\u{2060}'
            | '\u{3000}'
            | '\u{feff}' => {
                blank(format!("invisible character U+{code:04X}"), "replace it by an ordinary space")
            }
            _ => {
                bad(format!("character {found} (U+{code:04X}) may stand only in strings and comments"), None)
            }
        }
    }
}

fn bad(message: String, hint: Option<&'static str>) -> Kind {
    Kind::Bad(Problem { message, hint, is_blank: false })
}

fn blank(message: String, hint: &'static str) -> Kind {
    Kind::Bad(Problem { message, hint: Some(hint), is_blank: true })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(text: &str) -> Vec<Kind> {
        let mut lexer = Lexer::new(text.as_bytes());
        let tokens = std::iter::from_fn(|| Some(lexer.next().kind));
        tokens.take_while(|kind| *kind != Kind::End).collect()
    }

    #[test]
    fn numbers_as_the_reference_tokenizer_reads_them() {
        use Kind::{Float, Integer};
        assert_eq!(
            kinds("0 17 0x1F 017 1. .5 1e5 1E-5f 1.5F 10f"),
            [Integer, Integer, Integer, Integer, Float, Float, Float, Float, Float, Float]
        );
        for wrong in ["0x", "08", "1e", "12abc", "1.2.3", "0x1.2", "1_000"] {
            assert!(matches!(kinds(wrong)[..], [Kind::Bad(_)]), "{wrong}: {:?}", kinds(wrong));
        }
    }

    #[test]
    fn strings_and_escapes() {
        assert_eq!(kinds(r#""a" 'b"c' "\n\x41\101\u00e9\U0001F600\?\'""#), vec![Kind::String; 3]);
        for wrong in [r#""\q""#, r#""\xg""#, r#""\u12""#, r#""\U00200000""#, "\"open", "'open\n'"] {
            assert!(matches!(kinds(wrong)[0], Kind::Bad(_)), "{wrong}: {:?}", kinds(wrong));
        }
    }

    #[test]
    fn placeholders_are_one_token() {
        assert_eq!(kinds("${triton_max_batch_size}"), [Kind::Placeholder]);
        assert_eq!(kinds("{{ size }}"), [Kind::Placeholder]);
        assert_eq!(kinds("{% if x %}"), [Kind::Placeholder]);
        assert_eq!(kinds("{{a:1}}").len(), 7);
    }

    #[test]
    fn comments_may_hold_anything() {
        let mut lexer = Lexer::new(b"# \xff\xfe \xe9\nname");
        assert_eq!(lexer.next().kind, Kind::Name);
    }
}
