//! Lists of base-128 varints, decoded without growing the output value by value.
//!
//! Every varint ends with its only byte below 0x80, so counting those bytes tells how many values there
//! are; the output gets its room once and the loop only fills it. What prost refuses is refused: a list
//! that ends within a varint, and a varint that does not fit 64 bits.

use prost::DecodeError;
use prost::encoding::decode_varint;

/// Appends all varints of `list`, each turned into a value by `convert`.
///
/// After an error the values appended by this call are unspecified.
pub(super) fn decode_list<T: Copy + Default>(
    values: &mut Vec<T>,
    convert: impl Fn(u64) -> T,
    mut list: &[u8],
) -> Result<(), DecodeError> {
    let start = values.len();
    values.resize(start + count(list), T::default());
    for slot in values.iter_mut().skip(start) {
        // Short varints, by far the most, are worth a predicted branch each.
        let value = match list {
            [first, rest @ ..] if *first < 0x80 => {
                list = rest;
                u64::from(*first)
            }
            [first, second, rest @ ..] if *second < 0x80 => {
                list = rest;
                u64::from(*first & 0x7f) | u64::from(*second) << 7
            }
            _ => match long(list) {
                Some((value, rest)) => {
                    list = rest;
                    value
                }
                None => decode_varint(&mut list)?,
            },
        };
        *slot = convert(value);
    }
    if !list.is_empty() {
        // What is left has no last byte: prost words the refusal.
        decode_varint(&mut list)?;
    }
    Ok(())
}

/// How many varints end in `list`.
fn count(list: &[u8]) -> usize {
    // Sums of one byte over blocks too short to overflow it: the compiler makes vector code of this.
    list.chunks(128)
        .map(|block| usize::from(block.iter().map(|byte| u8::from(*byte < 0x80)).sum::<u8>()))
        .sum()
}

/// The varint at the start of `list` and what follows it, by eight bytes at once.
///
/// `None` near the end of the list, where eight bytes are not there, and for a varint that is too long.
fn long(list: &[u8]) -> Option<(u64, &[u8])> {
    let (word, rest) = list.split_first_chunk::<8>()?;
    let word = u64::from_le_bytes(*word);
    let ends = !word & 0x8080_8080_8080_8080;
    if ends != 0 {
        // Keep the bytes up to the first that ends a varint.
        let value = join_sevens(word & (ends ^ (ends - 1)));
        return Some((value, list.get(ends.trailing_zeros() as usize / 8 + 1..)?));
    }
    let value = join_sevens(word);
    match rest {
        [ninth, rest @ ..] if *ninth < 0x80 => Some((value | u64::from(*ninth) << 56, rest)),
        [ninth, tenth, rest @ ..] if *tenth <= 1 => {
            Some((value | u64::from(*ninth & 0x7f) << 56 | u64::from(*tenth) << 63, rest))
        }
        _ => None,
    }
}

/// Joins the low seven bits of each byte into one number of 56 bits.
fn join_sevens(word: u64) -> u64 {
    let pairs = (word & 0x007f_007f_007f_007f) | (word & 0x7f00_7f00_7f00_7f00) >> 1;
    let quads = (pairs & 0x0000_3fff_0000_3fff) | (pairs & 0x3fff_0000_3fff_0000) >> 2;
    (quads & 0x0000_0000_0fff_ffff) | (quads & 0x0fff_ffff_0000_0000) >> 4
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(list: &[u8]) -> Result<Vec<u64>, DecodeError> {
        let mut values = Vec::new();
        decode_list(&mut values, |value| value, list).map(|()| values)
    }

    #[test]
    fn every_length_decodes_alone_and_before_others() {
        for bits in 0..64 {
            for value in [1 << bits, u64::MAX >> bits, (1 << bits) - 1] {
                let mut list = Vec::new();
                prost::encoding::encode_varint(value, &mut list);
                assert_eq!(decode(&list).unwrap(), [value]);
                list.extend([5; 12]);
                let mut expected = vec![value];
                expected.extend([5; 12]);
                assert_eq!(decode(&list).unwrap(), expected);
            }
        }
    }

    #[test]
    fn padded_varints_keep_their_value() {
        assert_eq!(decode(&[0x85, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x00, 7]).unwrap(), [5, 7]);
        assert_eq!(decode(&[0x85, 0x80, 0x00]).unwrap(), [5]);
    }

    #[test]
    fn varints_beyond_64_bits_are_refused() {
        let mut list = vec![0x80; 9];
        list.push(2);
        assert!(decode(&list).is_err());
        list.extend([1; 12]);
        assert!(decode(&list).is_err());
        assert!(decode(&[[0x80; 11].as_slice(), &[0; 11]].concat()).is_err());
    }

    #[test]
    fn a_list_that_ends_within_a_varint_is_refused() {
        for len in 1..12 {
            assert!(decode(&vec![0x80; len]).is_err(), "{len} bytes");
            assert!(
                decode(&[[1; 9].as_slice(), &vec![0x80; len]].concat()).is_err(),
                "{len} bytes after others"
            );
        }
    }
}
