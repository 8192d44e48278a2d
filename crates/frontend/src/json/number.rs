//! Numbers: read once as sign, digits and power of ten, then made into the type that is wanted.
//!
//! The result is the nearest value of that type, ties to even, also for FP32 from text with any number of digits.
//! Most numbers need one multiplication; the rest goes through the standard library.

use trireme_types::Result;

use super::Reader;

/// A number as written: `digits * 10^exponent`, or one of the words for what no digits can say.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decimal<'a> {
    pub(crate) negative: bool,
    /// The first 19 digits, without leading zeros.
    digits: u64,
    /// Power of ten that belongs to `digits`, if `digits` is all there is.
    exponent: i32,
    /// `digits` and `exponent` tell the whole number.
    whole_story: bool,
    /// Written without fraction and exponent.
    pub(crate) integral: bool,
    pub(crate) word: Option<Literal>,
    text: &'a [u8],
}

/// What JSON has no number for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Literal {
    NaN,
    Infinity,
}

/// Digits that always fit 64 bits.
const SAFE_DIGITS: usize = 19;

/// Powers of ten that FP64 holds exactly.
const POWERS: [f64; 23] = [
    1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18,
    1e19, 1e20, 1e21, 1e22,
];

impl<'a> Reader<'a> {
    /// Reads a number.
    ///
    /// # Errors
    /// No number stands here, or it is not written as JSON wants it (`01`, `1.`, `.5`, `+1`).
    #[inline]
    pub(crate) fn decimal(&mut self) -> Result<Decimal<'a>> {
        self.skip_space();
        let text = self.rest();
        let negative = text.first() == Some(&b'-');
        let mut at = usize::from(negative);
        let digit = |at: usize| text.get(at).map(|b| b.wrapping_sub(b'0')).filter(|&d| d < 10);

        let mut digits = 0_u64;
        let start = at;
        while let Some(d) = digit(at) {
            digits = digits.wrapping_mul(10).wrapping_add(u64::from(d));
            at += 1;
        }
        let mut count = at - start;
        if count == 0 {
            return self.word(negative);
        }
        if count > 1 && text.get(start) == Some(&b'0') {
            return Err(self.syntax("Invalid value: a number has no leading zeros."));
        }
        let mut exponent = 0_i32;
        let mut integral = true;
        if text.get(at) == Some(&b'.') {
            integral = false;
            at += 1;
            let fraction = at;
            while let Some(d) = digit(at) {
                digits = digits.wrapping_mul(10).wrapping_add(u64::from(d));
                at += 1;
            }
            let places = at - fraction;
            if places == 0 {
                self.advance(at);
                return Err(self.syntax("Miss fraction part in number."));
            }
            count += places;
            exponent = i32::try_from(places).map_or(i32::MIN, |places| -places);
        }
        if matches!(text.get(at), Some(b'e' | b'E')) {
            integral = false;
            at += 1;
            let minus = text.get(at) == Some(&b'-');
            at += usize::from(matches!(text.get(at), Some(b'-' | b'+')));
            let first = at;
            let mut power = 0_i32;
            while let Some(d) = digit(at) {
                power = power.saturating_mul(10).saturating_add(i32::from(d));
                at += 1;
            }
            if at == first {
                self.advance(at);
                return Err(self.syntax("Miss exponent in number."));
            }
            exponent = exponent.saturating_add(if minus { -power } else { power });
        }
        let written = text.get(..at).unwrap_or_default();
        self.advance(at);
        let whole_story = count <= SAFE_DIGITS;
        Ok(Decimal { negative, digits, exponent, whole_story, integral, word: None, text: written })
    }

    #[cold]
    fn word(&mut self, negative: bool) -> Result<Decimal<'a>> {
        let text = self.rest();
        let unsigned = text.get(usize::from(negative)..).unwrap_or_default();
        let words: [(&[u8], Literal); 3] =
            [(b"NaN", Literal::NaN), (b"Infinity", Literal::Infinity), (b"Inf", Literal::Infinity)];
        let Some((word, literal)) = words.into_iter().find(|(word, _)| unsigned.starts_with(word)) else {
            return Err(self.syntax("Invalid value."));
        };
        let length = word.len() + usize::from(negative);
        self.advance(length);
        let text = text.get(..length).unwrap_or_default();
        Ok(Decimal {
            negative,
            digits: 0,
            exponent: 0,
            whole_story: true,
            integral: false,
            word: Some(literal),
            text,
        })
    }
}

impl Decimal<'_> {
    /// The magnitude of a whole number; `None` for a fraction or one above 2^64-1.
    #[inline]
    pub(crate) fn magnitude(&self) -> Option<u64> {
        if !self.integral {
            return None;
        }
        if self.whole_story {
            return Some(self.digits);
        }
        let unsigned = self.text.get(usize::from(self.negative)..)?;
        std::str::from_utf8(unsigned).ok()?.parse().ok()
    }

    /// The nearest FP64; infinite only if the number is too large or says so.
    #[inline]
    pub(crate) fn to_f64(self) -> f64 {
        match (self.word, self.exact_product()) {
            (None, Some(product)) => signed(product, self.negative),
            (None, None) => self.parse::<f64>().unwrap_or(f64::NAN),
            (Some(Literal::NaN), _) => f64::NAN,
            (Some(Literal::Infinity), _) => signed(f64::INFINITY, self.negative),
        }
    }

    /// The nearest FP32; infinite only if the number is too large or says so.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "rounding to FP32 is what is asked for")]
    pub(crate) fn to_f32(self) -> f32 {
        /// The 29 bits that FP32 has not; with only the first of them set, a value lies between two FP32 values,
        /// and rounding twice could go wrong.
        const CUT: u64 = (1 << 29) - 1;
        const HALF: u64 = 1 << 28;
        if self.word.is_none() {
            let safe = |product: &f64| {
                let normal = *product == 0.0 || *product >= f64::from(f32::MIN_POSITIVE);
                normal && product.to_bits() & CUT != HALF
            };
            if let Some(product) = self.exact_product().filter(safe) {
                return signed(product, self.negative) as f32;
            }
            return self.parse::<f32>().unwrap_or(f32::NAN);
        }
        self.to_f64() as f32
    }

    /// The magnitude as FP64, where one rounding gives it: few enough digits and a power of ten that is exact.
    #[inline]
    #[expect(clippy::cast_precision_loss, reason = "53 bits are checked for")]
    fn exact_product(&self) -> Option<f64> {
        if !self.whole_story || self.digits > 1 << 53 {
            return None;
        }
        let power = *POWERS.get(self.exponent.unsigned_abs() as usize)?;
        let digits = self.digits as f64;
        Some(if self.exponent < 0 { digits / power } else { digits * power })
    }

    #[cold]
    fn parse<T: std::str::FromStr>(&self) -> Option<T> {
        std::str::from_utf8(self.text).ok()?.parse().ok()
    }
}

#[inline]
fn signed(magnitude: f64, negative: bool) -> f64 {
    if negative { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> Result<Decimal<'_>> {
        let mut reader = Reader::new(text.as_bytes());
        let decimal = reader.decimal()?;
        reader.finish()?;
        Ok(decimal)
    }

    #[test]
    fn takes_json_numbers_only() {
        for bad in [
            "", "-", "01", "-01", "1.", ".5", "+1", "1e", "1e+", "1.e5", "0x1", "nan", "infinity", "--1",
            "1f",
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
        for good in
            ["0", "-0", "0.0", "1e5", "1E+5", "1e-5", "10", "NaN", "-NaN", "Infinity", "-Infinity", "Inf"]
        {
            assert!(read(good).is_ok(), "{good}");
        }
    }

    #[test]
    fn whole_numbers_are_exact() {
        for (text, want) in [
            ("0", Some(0)),
            ("-0", Some(0)),
            ("18446744073709551615", Some(u64::MAX)),
            ("9007199254740993", Some(9_007_199_254_740_993)),
            ("9999999999999999999", Some(9_999_999_999_999_999_999)),
            ("18446744073709551616", None),
            ("99999999999999999999999999", None),
            ("1.0", None),
            ("1e3", None),
            ("NaN", None),
        ] {
            assert_eq!(read(text).expect(text).magnitude(), want, "{text}");
        }
    }

    #[test]
    #[expect(clippy::float_cmp, reason = "exact values are wanted")]
    fn rounds_once() {
        for text in [
            "0.1",
            "1e23",
            "1.401298464324817e-45",
            "1e-45",
            "7.006492321624085e-46",
            "7.0064923216240854e-46",
            "16777217",
            "16777217.0000000001",
            "1.00000005960464477539062500000000001",
            "1.000000059604644775390625",
            "3.4028234663852886e38",
            "3.4028235677973366e38",
            "1e39",
            "1e400",
            "1e-400",
            "-0.0",
            "123456789012345678901234567890",
            "0.000000000000000000000000000000000000011754943508222875",
            "9007199254740993.0",
            "1e99999999999999999999",
            "0.30000001192092896",
            "0e99999999999",
        ] {
            let decimal = read(text).expect(text);
            assert_eq!(decimal.to_f64(), text.parse::<f64>().expect(text), "{text}");
            assert_eq!(decimal.to_f32(), text.parse::<f32>().expect(text), "{text}");
        }
        assert!(read("-0").expect("zero").to_f32().is_sign_negative());
        assert!(read("NaN").expect("a word").to_f32().is_nan());
        assert_eq!(read("-Infinity").expect("a word").to_f64(), f64::NEG_INFINITY);
    }

    proptest! {
        #[test]
        fn agrees_with_the_standard_library(digits in "-?(0|[1-9][0-9]{0,24})(\\.[0-9]{1,24})?([eE][+-]?[0-9]{1,3})?") {
            let decimal = read(&digits).expect("a JSON number");
            prop_assert_eq!(decimal.to_f64().to_bits(), digits.parse::<f64>().expect("a number").to_bits());
            prop_assert_eq!(decimal.to_f32().to_bits(), digits.parse::<f32>().expect("a number").to_bits());
        }

        #[test]
        fn reads_back_what_is_printed(bits: u32) {
            let value = f32::from_bits(bits);
            prop_assume!(value.is_finite());
            let short = read(&format!("{value:e}")).map(|d| d.to_f32().to_bits());
            prop_assert_eq!(short, Ok(bits));
            let wide = read(&format!("{:e}", f64::from(value))).map(|d| d.to_f32().to_bits());
            prop_assert_eq!(wide, Ok(bits));
        }
    }
}
