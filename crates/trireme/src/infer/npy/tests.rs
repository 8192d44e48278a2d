//! Files as numpy writes them, files of our own, and damaged ones.

use super::*;

/// A file with this dictionary and content.
fn file(version: u8, dictionary: &str, content: &[u8]) -> Vec<u8> {
    let mut file = MAGIC.to_vec();
    file.extend([version, 0]);
    let length = dictionary.len();
    match version {
        1 => file.extend(u16::try_from(length).expect("short").to_le_bytes()),
        _ => file.extend(u32::try_from(length).expect("short").to_le_bytes()),
    }
    file.extend(dictionary.as_bytes());
    file.extend(content);
    file
}

fn plain(descr: &str, shape: &str, content: &[u8]) -> Vec<u8> {
    file(1, &format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n"), content)
}

fn decoded(file: &[u8]) -> Result<Array> {
    decode(file, file.len() as u64)
}

fn refusal(file: &[u8]) -> String {
    format!("{:#}", decoded(file).expect_err("must be refused"))
}

#[test]
fn reads_every_version_and_byte_order() {
    let little: Vec<u8> = [1.5_f32, -2.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    let big: Vec<u8> = [1.5_f32, -2.0].iter().flat_map(|v| v.to_be_bytes()).collect();
    let wanted = Array { data_type: DataType::Fp32, shape: Shape::new(&[2]), bytes: little.clone() };
    for version in 1..=3 {
        let dictionary = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n";
        assert_eq!(decoded(&file(version, dictionary, &little)).expect("valid"), wanted);
    }
    assert_eq!(decoded(&plain(">f4", "(2,)", &big)).expect("big-endian"), wanted);
    let scalar = decoded(&plain("<i8", "()", &7_i64.to_le_bytes())).expect("a scalar");
    assert_eq!((scalar.data_type, &*scalar.shape), (DataType::Int64, &[][..]));
    let empty = decoded(&plain("<i8", "(0, 4)", b"")).expect("no elements");
    assert_eq!((&*empty.shape, empty.bytes.len()), (&[0, 4][..], 0));
    // One axis lies the same in both orders.
    let one_axis = "{'descr': '|u1', 'fortran_order': True, 'shape': (2,), }";
    assert_eq!(decoded(&file(1, one_axis, b"ab")).expect("one axis").bytes, b"ab");
}

#[test]
fn strings_become_bytes() {
    let wire = b"\x02\0\0\0ab\0\0\0\0\x03\0\0\0a\0c";
    let array = decoded(&plain("|S3", "(3,)", b"ab\0\0\0\0a\0c")).expect("bytes");
    assert_eq!((array.data_type, array.bytes.as_slice()), (DataType::Bytes, &wire[..]));
    let content: Vec<u8> = ['é', '\0', '模', '型'].iter().flat_map(|c| u32::from(*c).to_le_bytes()).collect();
    let array = decoded(&plain("<U2", "(2, 1)", &content)).expect("characters");
    assert_eq!(array.bytes, "\x02\0\0\0é\x06\0\0\0模型".as_bytes());
    let swapped: Vec<u8> = content.chunks_exact(4).flat_map(|c| c.iter().rev().copied()).collect();
    assert_eq!(decoded(&plain(">U2", "(2, 1)", &swapped)).expect("big-endian").bytes, array.bytes);
    assert!(refusal(&plain("<U1", "(1,)", &0xD800_u32.to_le_bytes())).contains("no character"));
}

#[test]
fn every_data_type_survives_a_round_trip() {
    for data_type in DataType::ALL {
        let (shape, bytes) = match data_type.byte_size() {
            Some(size) => ([2, 3], (1..).take(6 * size).collect::<Vec<u8>>()),
            None => ([2, 1], tensor::join_strings([&b"a\0b"[..], b""].into_iter()).expect("short")),
        };
        let mut written = Vec::new();
        encode(&mut written, data_type, &shape, &bytes).expect("can be written");
        let array = decoded(&written).expect("can be read");
        assert_eq!(array, Array { data_type, shape: Shape::new(&shape), bytes });
        assert_eq!(written.iter().position(|b| *b == b'\n').map(|end| (end + 1) % 64), Some(0));
    }
    let raw = tensor::join_strings([&b"\xff"[..], b"abc"].into_iter()).expect("short");
    let mut written = Vec::new();
    encode(&mut written, DataType::Bytes, &[2], &raw).expect("bytes");
    assert!(written.windows(3).any(|part| part == b"|S3"));
    assert_eq!(decoded(&written).expect("can be read").bytes, raw);
    let zero = tensor::join_strings([&b"a\0"[..]].into_iter()).expect("short");
    let error = encode(&mut Vec::new(), DataType::Bytes, &[1], &zero).expect_err("a zero at the end");
    assert!(error.to_string().contains("ends in a zero"), "{error}");
}

#[test]
fn says_what_is_wrong_and_what_to_do() {
    let fortran = "{'descr': '<f4', 'fortran_order': True, 'shape': (1, 2), }";
    for (file, reason) in [
        (b"PK\x03\x04 a zip file".to_vec(), "numpy.save"),
        (b"\x93NUM".to_vec(), "shorter than its first line"),
        (file(4, "{}", b""), "version 1, 2 or 3, found 4"),
        (file(1, fortran, &[0; 8]), "numpy.ascontiguousarray"),
        (plain("|O", "(1,)", b""), "Python objects"),
        (plain("<c8", "(1,)", &[0; 8]), "'<c8', which no tensor holds"),
        (plain("<M8[us]", "(1,)", &[0; 8]), "astype"),
        (plain("<f4", "(2,)", &[0; 7]), "takes 8 bytes, and the file has 7"),
        (plain("<f4", "(2,)", &[0; 9]), "takes 8 bytes, and the file has 9"),
        (plain("<f8", "(1000000000000,)", b""), "larger than the"),
        (plain("|S1", "(1000000000000,)", b""), "larger than the"),
        (plain("|S0", "(1000000000000,)", b""), "no tensor holds"),
        (plain("|S99999999999999999999", "(1,)", b""), "no tensor holds"),
        (plain("<U9999999999999999999", "(1,)", b""), "no tensor holds"),
        (plain("<f4", "(9223372036854775807, 9223372036854775807)", b""), "no tensor's"),
    ] {
        let error = refusal(&file);
        assert!(error.contains(reason), "no '{reason}' in '{error}'");
    }
    let mut long = MAGIC.to_vec();
    long.extend([2, 0, 255, 255, 255, 255]);
    assert!(refusal(&long).contains("more than the 65536"));
}

/// Every prefix and every changed byte is read or refused, never more.
#[test]
fn damaged_files_are_refused_without_harm() {
    let good = plain("<U2", "(2, 1)", &[b'a', 0, 0, 0, 0, 0, 0, 0, b'b', 0, 0, 0, 0, 0, 0, 0]);
    decoded(&good).expect("valid");
    for end in 0..good.len() {
        decoded(&good[..end]).expect_err("cut off");
    }
    for index in 0..good.len() {
        for change in [0, 1, b'9', b'\'', b'(', 0x80, 0xff] {
            let mut file = good.clone();
            file[index] = change;
            if let Ok(array) = decoded(&file) {
                assert!(array.bytes.len() < 64);
            }
        }
    }
}
