//! Memory of GPUs, through the whole interface of the driver, with a stand-in for the driver compiled here.

#![expect(clippy::expect_used, reason = "a test that cannot set itself up must end")]

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use fs_err as fs;
use trireme_shm::{CudaDriver, CudaError, IPC_HANDLE_LEN};

/// Compiles the stand-in into a folder.
fn compile(folder: &Path, defines: &[&str]) -> std::path::PathBuf {
    let library = folder.join("libcuda.so.1");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stand_in_driver.c");
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
        .arg(&library)
        .args(defines)
        .arg(source)
        .status()
        .expect("a C compiler");
    assert!(status.success());
    library
}

fn handle(name: &str) -> [u8; IPC_HANDLE_LEN] {
    let mut handle = [0; IPC_HANDLE_LEN];
    handle[..name.len()].copy_from_slice(name.as_bytes());
    handle
}

#[test]
fn reads_and_writes_memory_of_a_gpu() {
    let folder = tempfile::tempdir().expect("a folder");
    let driver = CudaDriver::open(compile(folder.path(), &[]).as_os_str()).expect("a driver");
    let name = format!("/trireme-gpu-{}", std::process::id());
    let object = format!("/dev/shm{name}");
    fs::write(&object, [7; 4096]).expect("an object");
    let mapped = || fs::read_to_string("/proc/self/maps").expect("maps").contains(&object);

    let memory = driver.memory(&handle(&name), 1, 100).expect("memory");
    assert_eq!((memory.len(), memory.is_empty()), (100, false));
    assert!(mapped());
    memory.write(90, &[1, 2, 3]).expect("inside");
    assert_eq!(memory.read(89, 5).expect("inside"), [7, 1, 2, 3, 7]);
    assert_eq!(memory.read(100, 0).expect("nothing"), [0; 0]);
    for (offset, len) in [(96, 5), (101, 0), (usize::MAX, 1), (1, usize::MAX)] {
        assert!(matches!(memory.read(offset, len), Err(CudaError::TooSmall { size: 100 })), "{offset} {len}");
    }
    assert!(matches!(memory.write(98, &[0; 3]), Err(CudaError::TooSmall { size: 100 })));
    // From another thread, where no context is current.
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(memory.read(90, 3).expect("inside"), [1, 2, 3]));
    });
    assert_eq!(fs::read(&object).expect("the object")[89..94], [7, 1, 2, 3, 7]);
    drop(memory);
    assert!(!mapped(), "memory is closed when nobody uses it");

    let error = driver.memory(&handle(&name), 0, 4097).expect_err("too small");
    assert!(matches!(error, CudaError::TooSmall { size: 4096 }), "{error}");
    assert!(!mapped(), "what was too small is closed as well");
    for device in [2, -1, i64::MAX] {
        let error = driver.memory(&handle(&name), device, 1).expect_err("no such device");
        assert!(error.to_string().contains("this machine has 2"), "{error}");
    }
    fs::remove_file(&object).expect("the object");
    let error = driver.memory(&handle(&name), 0, 1).expect_err("gone");
    assert_eq!(error.to_string(), "cuIpcOpenMemHandle failed with 1 (invalid argument)");
    assert!(driver.memory(&[255; IPC_HANDLE_LEN], 0, 1).is_err());
}

#[test]
fn a_library_that_is_no_driver_is_named() {
    let missing = CudaDriver::open(OsStr::new("/nowhere/libcuda.so.1")).expect_err("not there");
    assert!(missing.to_string().starts_with("the CUDA driver '/nowhere/libcuda.so.1' cannot be opened"));
    let folder = tempfile::tempdir().expect("a folder");
    let old = compile(folder.path(), &["-DcuMemGetAddressRange_v2=anotherName"]);
    let error = CudaDriver::open(old.as_os_str()).expect_err("a function is missing");
    assert!(error.to_string().ends_with("has no function cuMemGetAddressRange_v2; it is too old"), "{error}");
}
