//! Writing JSON into one buffer. The caller keeps the grammar; the writer knows values.

/// Appends JSON to bytes that grow.
#[derive(Debug, Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn with_capacity(bytes: usize) -> Self {
        Self(Vec::with_capacity(bytes))
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Text that is JSON already.
    #[inline]
    pub(crate) fn raw(&mut self, json: impl AsRef<[u8]>) {
        self.0.extend_from_slice(json.as_ref());
    }

    /// Removes a comma at the end, so that lists may be written as `item,` each.
    pub(crate) fn drop_comma(&mut self) {
        if self.0.last() == Some(&b',') {
            self.0.pop();
        }
    }

    /// Bytes as a string. Triton writes bytes of 0x80 and above as they are, UTF-8 or not, and so does this.
    pub(crate) fn string(&mut self, text: impl AsRef<[u8]>) {
        const HEX: &[u8; 16] = b"0123456789ABCDEF";
        let text = text.as_ref();
        self.0.reserve(text.len() + 2);
        self.0.push(b'"');
        let mut rest = text;
        while let Some(plain) = rest.iter().position(|&b| b < 0x20 || b == b'"' || b == b'\\') {
            let (head, tail) = rest.split_at(plain);
            self.0.extend_from_slice(head);
            let Some((&byte, tail)) = tail.split_first() else { break };
            match byte {
                b'"' => self.raw(b"\\\""),
                b'\\' => self.raw(b"\\\\"),
                0x08 => self.raw(b"\\b"),
                0x0c => self.raw(b"\\f"),
                b'\n' => self.raw(b"\\n"),
                b'\r' => self.raw(b"\\r"),
                b'\t' => self.raw(b"\\t"),
                _ => {
                    let nibble = |n: u8| HEX.get(usize::from(n)).copied().unwrap_or(b'0');
                    self.raw([b'\\', b'u', b'0', b'0', nibble(byte >> 4), nibble(byte & 15)]);
                }
            }
            rest = tail;
        }
        self.0.extend_from_slice(rest);
        self.0.push(b'"');
    }

    #[inline]
    pub(crate) fn integer(&mut self, value: impl itoa::Integer) {
        self.raw(itoa::Buffer::new().format(value));
    }

    pub(crate) fn boolean(&mut self, value: bool) {
        self.raw(if value { "true" } else { "false" });
    }

    /// The shortest text that reads back as the same FP32; `NaN`, `Infinity` and `-Infinity` as the Python client
    /// reads them.
    #[inline]
    pub(crate) fn f32(&mut self, value: f32) {
        if value.is_finite() {
            self.raw(zmij::Buffer::new().format_finite(value));
        } else {
            self.not_finite(value.into());
        }
    }

    /// As [`Writer::f32`], for FP64.
    #[inline]
    pub(crate) fn f64(&mut self, value: f64) {
        if value.is_finite() {
            self.raw(zmij::Buffer::new().format_finite(value));
        } else {
            self.not_finite(value);
        }
    }

    #[cold]
    fn not_finite(&mut self, value: f64) {
        self.raw(if value.is_nan() {
            "NaN"
        } else if value > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Reader;
    use super::*;

    fn written(write: impl FnOnce(&mut Writer)) -> String {
        let mut writer = Writer::default();
        write(&mut writer);
        String::from_utf8(writer.into_bytes()).expect("text")
    }

    #[test]
    fn writes_numbers_as_json() {
        for (value, want) in [
            (0.0_f32, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e38, "1e+38"),
            (16_777_216.0, "16777216.0"),
            (f32::NAN, "NaN"),
            (f32::INFINITY, "Infinity"),
            (f32::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(written(|w| w.f32(value)), want);
        }
        assert_eq!(written(|w| w.integer(u64::MAX)), "18446744073709551615");
        assert_eq!(written(|w| w.f64(1e300)), "1e+300");
    }

    #[test]
    fn escapes_as_triton_does() {
        assert_eq!(
            written(|w| w.string("w\u{f6} \"q\" \\ \n/\0\u{1f}")),
            "\"wö \\\"q\\\" \\\\ \\n/\\u0000\\u001F\""
        );
    }

    proptest! {
        #[test]
        fn strings_read_back(bytes: Vec<u8>) {
            let mut writer = Writer::default();
            writer.string(&bytes);
            let json = writer.into_bytes();
            let mut read = Vec::new();
            let mut reader = Reader::new(&json);
            reader.string_into(&mut read).expect("a string");
            prop_assert_eq!(reader.remaining(), 0);
            prop_assert_eq!(read, bytes);
        }

        #[test]
        fn floats_read_back(single: f32, double: f64) {
            let read = |text: String| Reader::new(text.as_bytes()).decimal().expect("a number").to_f64();
            #[expect(clippy::cast_possible_truncation, reason = "the text stands for an FP32")]
            let again = read(written(|w| w.f32(single))) as f32;
            prop_assert!(again == single || single.is_nan());
            let again = read(written(|w| w.f64(double)));
            prop_assert!(again == double || double.is_nan());
        }
    }
}
