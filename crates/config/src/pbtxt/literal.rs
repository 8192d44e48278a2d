//! Values of the tokens: unescaped strings, integers in three bases, floats.

/// Bytes of a quoted string token. The lexer has checked that quotes and escapes are well formed.
pub(super) fn unescape(token: &[u8], out: &mut Vec<u8>) {
    let inner = token.get(1..token.len().saturating_sub(1)).unwrap_or_default();
    let mut rest = inner.iter().copied().peekable();
    while let Some(byte) = rest.next() {
        if byte != b'\\' {
            out.push(byte);
            continue;
        }
        let Some(escape) = rest.next() else { return };
        let mut digits = |first: u32, radix: u32, most: usize| {
            let mut value = first;
            for _ in 0..most {
                let Some(digit) = rest.peek().and_then(|&b| char::from(b).to_digit(radix)) else { break };
                value = value.wrapping_mul(radix).wrapping_add(digit);
                rest.next();
            }
            value
        };
        match escape {
            b'a' => out.push(0x07),
            b'b' => out.push(0x08),
            b'f' => out.push(0x0c),
            b'n' => out.push(b'\n'),
            b'r' => out.push(b'\r'),
            b't' => out.push(b'\t'),
            b'v' => out.push(0x0b),
            // An octal escape above \377 keeps its low byte, as in the reference.
            b'0'..=b'7' => out.push(low_byte(digits(u32::from(escape - b'0'), 8, 2))),
            b'x' | b'X' => out.push(low_byte(digits(0, 16, 2))),
            b'u' => {
                let mut code = digits(0, 16, 4);
                if (0xd800..0xdc00).contains(&code) {
                    code = low_surrogate(&mut rest)
                        .map_or(code, |low| 0x1_0000 + ((code - 0xd800) << 10) + (low - 0xdc00));
                }
                push_code_point(code, out);
            }
            b'U' => push_code_point(digits(0, 16, 8), out),
            other => out.push(other),
        }
    }
}

fn low_byte(value: u32) -> u8 {
    value.to_le_bytes()[0]
}

/// The `\uDC00`..`\uDFFF` that completes a surrogate pair, taken off the text only if it is there.
fn low_surrogate(rest: &mut std::iter::Peekable<impl Iterator<Item = u8> + Clone>) -> Option<u32> {
    let mut ahead = rest.clone();
    if ahead.next() != Some(b'\\') || ahead.next() != Some(b'u') {
        return None;
    }
    let mut low = 0;
    for _ in 0..4 {
        low = low * 16 + char::from(ahead.next()?).to_digit(16)?;
    }
    (0xdc00..0xe000).contains(&low).then(|| {
        *rest = ahead;
        low
    })
}

/// UTF-8 of a code point; a lone surrogate becomes bytes that are not UTF-8 and is refused with the string.
fn push_code_point(code: u32, out: &mut Vec<u8>) {
    match char::from_u32(code) {
        Some(c) => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        None => out.push(0xff),
    }
}

/// Value of an integer token, `None` if it needs more than 64 bits.
pub(super) fn integer(token: &str) -> Option<u64> {
    match token.as_bytes() {
        [b'0', b'x' | b'X', ..] => u64::from_str_radix(token.get(2..)?, 16).ok(),
        [b'0', _, ..] => u64::from_str_radix(token, 8).ok(),
        _ => token.parse().ok(),
    }
}

/// Value of a float token or of a decimal integer token.
pub(super) fn float(token: &str) -> Option<f64> {
    token.trim_end_matches(['f', 'F']).parse().ok()
}

/// Whether an integer token is written in hexadecimal or octal, which a float field does not take.
pub(super) fn is_radix(token: &str) -> bool {
    token.len() > 1 && token.starts_with('0')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(token: &str) -> Vec<u8> {
        let mut out = Vec::new();
        unescape(token.as_bytes(), &mut out);
        out
    }

    #[test]
    fn escapes() {
        assert_eq!(text(r#""a\n\t\\\"\'\?""#), b"a\n\t\\\"'?");
        assert_eq!(text(r"'\101\x42\x4\7\777'"), [b'A', b'B', 4, 7, 0xff]);
        assert_eq!(text(r"'\u00e9\U0001F600\ud83d\ude00'"), "é😀😀".as_bytes());
        assert_eq!(text(r"'\ud83dx'"), [0xff, b'x']);
    }

    #[test]
    fn bases() {
        assert_eq!(integer("0x1F"), Some(31));
        assert_eq!(integer("017"), Some(15));
        assert_eq!(integer("0"), Some(0));
        assert_eq!(integer("18446744073709551615"), Some(u64::MAX));
        assert_eq!(integer("18446744073709551616"), None);
        assert_eq!(float("1.5F"), Some(1.5));
        assert_eq!(float("1."), Some(1.0));
        assert_eq!(float(".5"), Some(0.5));
    }
}
