//! Mapped objects that become smaller while they are read.

#![expect(clippy::expect_used, reason = "a test that cannot set itself up must end")]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use trireme_shm::{Mapping, SharedObject};

/// An open object without a name.
fn object(test: &str, size: u64) -> (SharedObject, File) {
    let name = format!("/trireme-map-{test}-{}", std::process::id());
    let path = format!("/dev/shm{name}");
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(true).open(&path).expect("an object");
    file.set_len(size).expect("a size");
    let object = SharedObject::open(&name).expect("it is there");
    fs_err::remove_file(&path).expect("the name");
    (object, file)
}

#[test]
fn reads_what_the_owner_writes_at_any_offset() {
    let (object, file) = object("offset", 20_000);
    let mapping = Mapping::new(&object, 4099, 15_000).expect("mapped");
    file.write_all_at(&[7; 10], 4099).expect("bytes");
    file.write_all_at(&[8], 19_098).expect("a byte");
    let bytes = mapping.as_slice();
    assert_eq!((bytes.len(), &bytes[..11]), (15_000, &[7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 0][..]));
    assert_eq!(bytes[14_999], 8);
    assert!(!mapping.is_cut());
}

#[test]
fn pages_that_are_gone_are_zeros() {
    let (object, file) = object("gone", 1 << 20);
    file.write_all_at(&vec![7; 1 << 20], 0).expect("bytes");
    let mapping = Mapping::new(&object, 0, 1 << 20).expect("mapped");
    let other = Mapping::new(&object, 0, 4096).expect("mapped");
    let sum = |mapping: &Mapping| mapping.as_slice().iter().map(|&byte| u64::from(byte)).sum::<u64>();
    assert_eq!(sum(&mapping), 7 << 20);
    file.set_len(4096).expect("smaller");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(sum(&mapping), 7 * 4096));
        }
    });
    assert!(mapping.is_cut() && !other.is_cut());
    drop(mapping);
    file.set_len(1 << 20).expect("larger");
    let again = Mapping::new(&object, 0, 1 << 20).expect("mapped");
    assert!(!again.is_cut());
    assert_eq!(sum(&again), 7 * 4096);
}

#[test]
fn places_are_given_back() {
    let (object, _file) = object("places", 4096);
    for _ in 0..3000 {
        drop(Mapping::new(&object, 0, 4096).expect("mapped"));
    }
}

/// Started by the test below in a process of its own, because it must not survive.
#[test]
#[ignore = "ends its process"]
fn a_bus_error_elsewhere_ends_the_process() {
    let (object, file) = object("elsewhere", 8192);
    let ours = Mapping::new(&object, 0, 8192).expect("mapped");
    file.set_len(0).expect("smaller");
    assert_eq!(ours.as_slice()[5000], 0, "a bus error of ours is survived");
    // The handler before ours, of the standard library, restores the default and has the instruction tried again; a
    // second signal stands for that.
    for _ in 0..2 {
        let status = Command::new("kill").args(["-BUS", &std::process::id().to_string()]).status();
        assert!(status.expect("kill").success());
    }
    std::thread::sleep(std::time::Duration::from_secs(5));
}

#[test]
fn other_bus_errors_are_passed_on() {
    let this = std::env::current_exe().expect("a path");
    let ended = Command::new(this)
        .args(["--ignored", "--exact", "a_bus_error_elsewhere_ends_the_process"])
        .output()
        .expect("starts");
    assert_eq!(ended.status.signal(), Some(7), "{ended:?}");
}

#[test]
fn our_own_mapping_does_not_count_as_an_owner() {
    let (object, file) = object("owner", 1 << 20);
    let mapping = Mapping::new(&object, 0, 1 << 20).expect("mapped");
    assert!(!object.is_abandoned(), "its owner has it open");
    drop(file);
    assert!(object.is_abandoned());
    assert_eq!(mapping.as_slice()[100], 0);
}

#[test]
fn mappings_come_and_go_while_others_are_cut() {
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                let (object, file) = object(&format!("storm{thread}"), 65_536);
                for round in 0..300_u64 {
                    file.set_len(65_536).expect("larger");
                    file.write_all_at(&[1; 4096], 0).expect("bytes");
                    let mapping = Mapping::new(&object, 0, 65_536).expect("mapped");
                    let cut = round.is_multiple_of(2);
                    if cut {
                        file.set_len(4096).expect("smaller");
                    }
                    let sum: u64 = mapping.as_slice().iter().map(|&byte| u64::from(byte)).sum();
                    assert_eq!((sum, mapping.is_cut()), (4096, cut), "round {round}");
                }
            });
        }
    });
}
