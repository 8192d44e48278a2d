//! Reading protobuf fields one after the other, as slices of the message.
//!
//! Nothing is built and nothing is copied, so a hostile message cannot take more memory than its own bytes.

/// Deepest nesting of groups that is skipped; groups are not used by any message here.
const MAX_GROUP_DEPTH: usize = 16;

/// Why bytes are not the message they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("it ends in the middle of a field")]
    Truncated,
    #[error("a varint is longer than 10 bytes")]
    Varint,
    #[error("field {0} has the wrong wire type")]
    WireType(u32),
    #[error("a field has the number 0 or one above 536870911")]
    FieldNumber,
    #[error("a group does not end or is nested too deeply")]
    Group,
    #[error("field {0} is not valid UTF-8")]
    Utf8(u32),
    #[error("it has more than {limit} {what}")]
    TooMany { what: &'static str, limit: usize },
}

/// One field with its undecoded value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Field<'a> {
    pub(super) number: u32,
    pub(super) value: Value<'a>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value<'a> {
    Varint(u64),
    Fixed64(u64),
    Bytes(&'a [u8]),
    Fixed32(u32),
    /// A group; its content is skipped.
    Group,
}

impl<'a> Field<'a> {
    pub(super) fn bytes(&self) -> Result<&'a [u8], Malformed> {
        match self.value {
            Value::Bytes(bytes) => Ok(bytes),
            _ => Err(Malformed::WireType(self.number)),
        }
    }

    pub(super) fn text(&self) -> Result<&'a str, Malformed> {
        std::str::from_utf8(self.bytes()?).map_err(|_| Malformed::Utf8(self.number))
    }

    pub(super) fn varint(&self) -> Result<u64, Malformed> {
        match self.value {
            Value::Varint(value) => Ok(value),
            _ => Err(Malformed::WireType(self.number)),
        }
    }

    pub(super) fn double(&self) -> Result<f64, Malformed> {
        match self.value {
            Value::Fixed64(bits) => Ok(f64::from_bits(bits)),
            _ => Err(Malformed::WireType(self.number)),
        }
    }
}

/// The fields of one message in the order they came.
#[derive(Clone, Debug)]
pub(super) struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(super) fn of(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    /// The next field, `None` at the end of the message.
    pub(super) fn next(&mut self) -> Result<Option<Field<'a>>, Malformed> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let (number, wire_type) = self.key()?;
        let value = match wire_type {
            0 => Value::Varint(varint(&mut self.rest)?),
            1 => Value::Fixed64(u64::from_le_bytes(self.array()?)),
            2 => {
                let len = varint(&mut self.rest)?;
                let len = usize::try_from(len).map_err(|_| Malformed::Truncated)?;
                let (bytes, rest) = self.rest.split_at_checked(len).ok_or(Malformed::Truncated)?;
                self.rest = rest;
                Value::Bytes(bytes)
            }
            3 => {
                self.skip_group(number)?;
                Value::Group
            }
            5 => Value::Fixed32(u32::from_le_bytes(self.array()?)),
            _ => return Err(Malformed::WireType(number)),
        };
        Ok(Some(Field { number, value }))
    }

    fn key(&mut self) -> Result<(u32, u64), Malformed> {
        let key = varint(&mut self.rest)?;
        let number = u32::try_from(key >> 3).ok().filter(|number| (1..1 << 29).contains(number));
        Ok((number.ok_or(Malformed::FieldNumber)?, key & 7))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (array, rest) = self.rest.split_first_chunk::<N>().ok_or(Malformed::Truncated)?;
        self.rest = rest;
        Ok(*array)
    }

    fn skip_group(&mut self, number: u32) -> Result<(), Malformed> {
        let mut open = vec![number];
        while let Some(&innermost) = open.last() {
            let (number, wire_type) = self.key()?;
            match wire_type {
                0 => _ = varint(&mut self.rest)?,
                1 => _ = self.array::<8>()?,
                2 => {
                    let len = usize::try_from(varint(&mut self.rest)?).map_err(|_| Malformed::Truncated)?;
                    self.rest = self.rest.get(len..).ok_or(Malformed::Truncated)?;
                }
                3 if open.len() < MAX_GROUP_DEPTH => open.push(number),
                4 if number == innermost => _ = open.pop(),
                5 => _ = self.array::<4>()?,
                _ => return Err(Malformed::Group),
            }
        }
        Ok(())
    }
}

/// Takes one varint off the front.
pub(super) fn varint(rest: &mut &[u8]) -> Result<u64, Malformed> {
    let mut value = 0_u64;
    for (i, &byte) in rest.iter().enumerate() {
        if i == 10 {
            return Err(Malformed::Varint);
        }
        value |= u64::from(byte & 0x7f) << (7 * i);
        if byte & 0x80 == 0 {
            *rest = rest.get(i + 1..).unwrap_or_default();
            return Ok(value);
        }
    }
    Err(Malformed::Truncated)
}

/// Bytes that a varint takes.
pub(super) const fn varint_len(value: u64) -> usize {
    let bits = 64 - (value | 1).leading_zeros() as usize;
    bits.div_ceil(7)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(message: &[u8]) -> Result<Vec<Field<'_>>, Malformed> {
        let mut fields = Fields::of(message);
        let mut found = Vec::new();
        while let Some(field) = fields.next()? {
            found.push(field);
        }
        Ok(found)
    }

    #[test]
    fn reads_every_wire_type() {
        let message = [
            0x08, 0x96, 0x01, // 1: varint 150
            0x12, 0x02, b'h', b'i', // 2: bytes
            0x19, 1, 0, 0, 0, 0, 0, 0, 0, // 3: fixed64
            0x25, 2, 0, 0, 0, // 4: fixed32
            0x2b, 0x33, 0x34, 0x08, 0x01, 0x2c, // 5: a group that holds group 6 and a varint
        ];
        let fields = all(&message).expect("well formed");
        let values: Vec<_> = fields.iter().map(|field| (field.number, field.value)).collect();
        assert_eq!(
            values,
            [
                (1, Value::Varint(150)),
                (2, Value::Bytes(b"hi")),
                (3, Value::Fixed64(1)),
                (4, Value::Fixed32(2)),
                (5, Value::Group)
            ]
        );
        assert_eq!(fields[1].text(), Ok("hi"));
        assert_eq!(fields[0].bytes(), Err(Malformed::WireType(1)));
    }

    #[test]
    fn refuses_what_is_not_protobuf() {
        let table: [(&[u8], Malformed); 9] = [
            (&[0x08], Malformed::Truncated),
            (&[0x08, 0xff], Malformed::Truncated),
            (&[0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01], Malformed::Varint),
            (&[0x12, 0x05, b'x'], Malformed::Truncated),
            (&[0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01], Malformed::Truncated),
            (&[0x00, 0x00], Malformed::FieldNumber),
            (&[0x0e], Malformed::WireType(1)),
            (&[0x2b, 0x34], Malformed::Group),
            (&[0x0b; 100], Malformed::Group),
        ];
        for (message, expected) in table {
            assert_eq!(all(message), Err(expected), "{message:x?}");
        }
        assert_eq!(
            Fields::of(&[0x12, 1, 0xff]).next().expect("a field").expect("one").text(),
            Err(Malformed::Utf8(2))
        );
    }

    #[test]
    fn varints_have_their_length() {
        for value in [0, 1, 127, 128, 16_383, 16_384, u64::from(u32::MAX), u64::MAX] {
            let mut encoded = Vec::new();
            prost::encoding::encode_varint(value, &mut encoded);
            assert_eq!(encoded.len(), varint_len(value));
            assert_eq!(varint(&mut &encoded[..]), Ok(value));
        }
    }
}
