//! Regions over real objects in `/dev/shm`.

use std::fs::{File, OpenOptions};
use std::path::PathBuf;
use std::sync::mpsc;

use trireme_types::{DataType, InferResponse, OutputTensor, Responder, ResponseSink, Shape};

use super::*;

/// An object with a name of its own that is removed at the end.
struct Object {
    path: PathBuf,
    file: File,
    key: String,
}

impl Object {
    fn new(test: &str, size: u64) -> Self {
        let key = format!("/trireme-core-{test}-{}", std::process::id());
        let path = PathBuf::from(format!("/dev/shm{key}"));
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).open(&path).expect("an object");
        file.set_len(size).expect("a size");
        Self { path, file, key }
    }

    fn bytes(&self) -> Vec<u8> {
        fs_err::read(&self.path).expect("the object")
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        let _gone = fs_err::remove_file(&self.path);
    }
}

fn allowed() -> SharedMemory {
    SharedMemory::new(SharedMemorySettings { allowed: true, ..SharedMemorySettings::default() })
}

fn message<T: fmt::Debug>(result: Result<T>) -> (Code, String) {
    let error = result.expect_err("an error");
    (error.code(), error.message().to_owned())
}

fn assert_refused<T: fmt::Debug>(result: Result<T>, code: Code, says: &str) {
    let (got, text) = message(result);
    assert_eq!(got, code, "{text}");
    assert!(text.starts_with(says), "{text}");
}

/// A copy of bytes of a region.
fn input(memory: &SharedMemory, region: &str, offset: u64, byte_size: u64) -> Result<TensorBuffer> {
    memory.input(&mut Placements::default(), region, offset, byte_size, false)
}

#[test]
fn nothing_is_registered_unless_allowed() {
    let memory = SharedMemory::new(SharedMemorySettings::default());
    let says = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable.";
    assert_refused(memory.register_system("r", "/k", 0, 1), Code::Unsupported, says);
    assert_refused(memory.register_cuda("r", &[0; IPC_HANDLE_LEN], 0, 1), Code::Unsupported, says);
    assert_refused(memory.unregister(MemoryKind::System, "r"), Code::Unsupported, says);
    assert_refused(memory.unregister_all(MemoryKind::Cuda), Code::Unsupported, says);
    assert_eq!(memory.status(MemoryKind::System, ""), Ok(Vec::new()));
}

#[test]
fn a_region_must_lie_inside_its_object() {
    let object = Object::new("inside", 64);
    let memory = allowed();
    for (offset, size) in [(0, 128), (60, 8), (64, 1), (0, 0), (u64::MAX, 2), (2, u64::MAX), (65, 0)] {
        assert_refused(
            memory.register_system("r", &object.key, offset, size),
            Code::InvalidArg,
            "failed to register shared memory region 'r': invalid args",
        );
    }
    memory.register_system("r", &object.key, 3, 61).expect("inside");
    assert_refused(
        memory.register_system("r", &object.key, 0, 1),
        Code::AlreadyExists,
        "shared memory region 'r' already in manager",
    );
    let place = RegionPlace::System { key: object.key.clone(), offset: 3 };
    let status = RegionStatus { name: "r".into(), byte_size: 61, place };
    assert_eq!(memory.status(MemoryKind::System, "r"), Ok(vec![status.clone()]));
    assert_eq!(memory.status(MemoryKind::System, ""), Ok(vec![status]));
    assert_eq!(memory.status(MemoryKind::Cuda, ""), Ok(Vec::new()));
    assert_refused(
        memory.status(MemoryKind::Cuda, "r"),
        Code::NotFound,
        "The region named 'r' is registered as system shared memory, not CUDA shared memory",
    );
    assert_refused(
        memory.status(MemoryKind::System, "q"),
        Code::NotFound,
        "Unable to find system shared memory region: 'q'",
    );
}

#[test]
fn keys_are_checked() {
    let memory = allowed();
    for (key, says) in [
        (
            "/trireme-nobody",
            "Unable to open shared memory region: '/trireme-nobody': the server sees no object",
        ),
        ("/../../etc/passwd", "Unable to open shared memory region: '/../../etc/passwd'"),
        ("//", "cannot register shared memory region 'r' - invalid shm key '//'"),
        ("/triton_python_backend_shm_region_1", "cannot register shared memory region 'r' with key"),
    ] {
        assert_refused(memory.register_system("r", key, 0, 1), Code::InvalidArg, says);
    }
    assert_refused(
        memory.register_system("", "/k", 0, 1),
        Code::InvalidArg,
        "a shared memory region needs a name",
    );
}

#[test]
fn what_a_request_names_must_lie_inside_the_region() {
    let object = Object::new("bounds", 256);
    let memory = allowed();
    memory.register_system("r", &object.key, 100, 100).expect("inside");
    std::os::unix::fs::FileExt::write_at(&object.file, &[7; 4], 196).expect("bytes");
    assert_eq!(input(&memory, "r", 96, 4).expect("inside").as_slice(), [7; 4]);
    for (offset, size, says) in [
        (101, 0, "Invalid offset for shared memory region: 'r'"),
        (u64::MAX, 4, "Invalid offset for shared memory region: 'r'"),
        (97, 4, "Invalid offset + byte size for shared memory region: 'r'"),
        (0, 101, "Invalid offset + byte size for shared memory region: 'r'"),
        (0, 0, "Invalid offset + byte size for shared memory region: 'r'"),
        (
            100,
            u64::MAX,
            "Integer overflow detected: byte_size (18446744073709551615) + offset (100) exceeds maximum value \
             (18446744073709551615) for region 'r'",
        ),
    ] {
        assert_refused(input(&memory, "r", offset, size), Code::InvalidArg, says);
        let mut placements = Placements::default();
        assert_refused(memory.place(&mut placements, &"Y".into(), "r", offset, size), Code::InvalidArg, says);
    }
    assert_refused(input(&memory, "q", 0, 1), Code::NotFound, "Unable to find shared memory region: 'q'");
}

struct Channel(mpsc::Sender<Option<Result<InferResponse>>>);

impl ResponseSink for Channel {
    fn send(&mut self, reply: Option<Result<InferResponse>>, _last: bool) {
        self.0.send(reply).expect("the test holds the receiver");
    }

    fn is_closed(&self) -> bool {
        false
    }
}

/// What comes out of `placements` when a model answers with outputs of these bytes.
fn answered(placements: Placements, outputs: &[(&str, &[u8])]) -> Result<InferResponse> {
    let (sender, receiver) = mpsc::channel();
    let outputs = outputs.iter().map(|(name, data)| OutputTensor {
        name: (*name).into(),
        data_type: DataType::Uint8,
        shape: Shape::new(&[data.len().try_into().expect("small")]),
        data: data.to_vec().into(),
    });
    let response = InferResponse { outputs: outputs.collect(), ..InferResponse::default() };
    placements.before(Responder::new(Box::new(Channel(sender)))).finish(Ok(response));
    receiver.recv().expect("an answer").expect("a reply")
}

#[test]
fn outputs_are_written_in_their_place_and_nowhere_else() {
    let object = Object::new("outputs", 64);
    let memory = allowed();
    memory.register_system("r", &object.key, 16, 32).expect("inside");
    let mut placements = Placements::default();
    memory.place(&mut placements, &"A".into(), "r", 8, 8).expect("inside");
    memory.place(&mut placements, &"B".into(), "r", 20, 4).expect("inside");
    assert!(placements.has("A") && !placements.has("C"));

    let too_much = answered(placements.clone(), &[("A", &[1; 4]), ("B", &[2; 5])]);
    assert_refused(
        too_much,
        Code::InvalidArg,
        "shared memory size specified with the request for output 'B' (4 bytes) should be at least 5 bytes to hold the \
         results",
    );
    assert_eq!(object.bytes(), [0; 64], "nothing is written if something does not fit");

    // A region that is used survives being unregistered.
    memory.unregister_all(MemoryKind::System).expect("allowed");
    assert_eq!(memory.usage.regions.load(Ordering::SeqCst), 1);
    let response = answered(placements, &[("A", &[1; 4]), ("B", &[2; 4]), ("C", &[3; 2])]).expect("fits");
    let left: Vec<usize> = response.outputs.iter().map(|output| output.data.len()).collect();
    assert_eq!(left, [0, 0, 2]);
    let mut wanted = [0; 64];
    wanted[24..28].fill(1);
    wanted[36..40].fill(2);
    assert_eq!(object.bytes(), wanted);
    assert_eq!(memory.usage.regions.load(Ordering::SeqCst), 0, "the last user has let go");
    assert_eq!(memory.usage.bytes.load(Ordering::SeqCst), 0);
}

#[test]
fn an_object_made_smaller_is_an_error_of_the_request() {
    let object = Object::new("smaller", 8192);
    let memory = allowed();
    memory.register_system("r", &object.key, 0, 8192).expect("inside");
    let mut placements = Placements::default();
    memory.place(&mut placements, &"Y".into(), "r", 8000, 100).expect("inside");
    object.file.set_len(4096).expect("smaller");
    let says = format!(
        "shared memory region 'r' needs 8192 bytes of '{}', which has only 4096 now: its owner has made it smaller",
        object.key
    );
    assert_refused(input(&memory, "r", 4000, 100), Code::InvalidArg, &says);
    assert_refused(answered(placements, &[("Y", &[1; 100])]), Code::InvalidArg, &says);
    assert_eq!(object.bytes().len(), 4096, "nothing makes it longer again");
}

#[test]
fn large_tensors_are_read_in_place() {
    let object = Object::new("place", 1 << 20);
    let memory = allowed();
    memory.register_system("r", &object.key, 5, (1 << 20) - 5).expect("inside");
    let mut placements = Placements::default();
    let data = memory.input(&mut placements, "r", 11, 1 << 19, true).expect("inside");
    std::os::unix::fs::FileExt::write_at(&object.file, &[7; 100], 16).expect("bytes");
    assert_eq!(data.as_slice()[..101], [[7; 100].as_slice(), &[0]].concat(), "no copy was made");
    memory.unregister(MemoryKind::System, "r").expect("allowed");

    // A model that passes its input on: what goes out is a copy.
    let passed_on = |placements: Placements, data: TensorBuffer| {
        let (sender, receiver) = mpsc::channel();
        let shape = Shape::new(&[1 << 19]);
        let output = OutputTensor { name: "Y".into(), data_type: DataType::Uint8, shape, data };
        let response = InferResponse { outputs: [output].into_iter().collect(), ..InferResponse::default() };
        placements.before(Responder::new(Box::new(Channel(sender)))).finish(Ok(response));
        receiver.recv().expect("an answer").expect("a reply")
    };
    let answer = passed_on(placements.clone(), data.clone()).expect("all was there");
    std::os::unix::fs::FileExt::write_at(&object.file, &[8; 100], 16).expect("bytes");
    assert_eq!(answer.outputs[0].data.as_slice()[..100], [7; 100]);

    object.file.set_len(4096).expect("smaller");
    assert_refused(
        passed_on(placements, data.clone()),
        Code::InvalidArg,
        "shared memory region 'r' needs 1048576 bytes",
    );
    assert_eq!(data.as_slice()[(1 << 19) - 1], 0, "what is gone reads as zeros");
    assert_eq!(memory.usage.regions.load(Ordering::SeqCst), 1, "it is still read");
    drop(data);
    assert_eq!(memory.usage.regions.load(Ordering::SeqCst), 0);
}

#[test]
fn limits_count_what_is_registered() {
    let object = Object::new("limits", 4096);
    let settings = SharedMemorySettings {
        allowed: true,
        max_regions: 2,
        max_bytes: 5000,
        ..SharedMemorySettings::default()
    };
    let memory = SharedMemory::new(settings);
    memory.register_system("a", &object.key, 0, 4096).expect("the first");
    assert_refused(
        memory.register_system("b", &object.key, 0, 1000),
        Code::Unavailable,
        "cannot register shared memory region 'b': its 1000 bytes and the 4096 of other regions are more than the 5000",
    );
    memory.register_system("b", &object.key, 4000, 96).expect("two on one key");
    assert_refused(
        memory.register_system("c", &object.key, 0, 1),
        Code::Unavailable,
        "cannot register shared memory region 'c': 2 regions are registered or still used",
    );
    memory.unregister(MemoryKind::Cuda, "a").expect("another kind is nothing to do");
    memory.unregister(MemoryKind::System, "a").expect("allowed");
    memory.register_system("c", &object.key, 0, 4096).expect("there is room again");
    let mut page = String::new();
    memory.write_metrics(&mut page);
    assert!(page.contains("trireme_shared_memory_regions{kind=\"system\"} 2\n"), "{page}");
    assert!(page.contains("trireme_shared_memory_bytes{kind=\"system\"} 4192\n"), "{page}");
    assert!(page.contains("trireme_shared_memory_regions{kind=\"cuda\"} 0\n"), "{page}");
}

#[test]
fn regions_whose_owner_is_gone_make_room() {
    let settings = SharedMemorySettings { allowed: true, max_regions: 2, ..SharedMemorySettings::default() };
    let memory = SharedMemory::new(settings);
    let (dead, alive) = (Object::new("dead", 64), Object::new("alive", 64));
    // Two regions on one object do not hide from one another that it is abandoned.
    memory.register_system("d1", &dead.key, 0, 64).expect("inside");
    memory.register_system("d2", &dead.key, 8, 8).expect("inside");
    assert_refused(memory.register_system("a", &alive.key, 0, 64), Code::Unavailable, "cannot register");
    drop(dead);
    memory.register_system("a", &alive.key, 0, 64).expect("the dead make room");
    let names: Vec<String> =
        memory.status(MemoryKind::System, "").expect("all").into_iter().map(|status| status.name).collect();
    assert_eq!(names, ["a"]);
}

#[test]
fn without_a_driver_cuda_regions_are_refused() {
    let settings = SharedMemorySettings {
        allowed: true,
        cuda_driver: Some("/nowhere/libcuda.so.1".into()),
        ..SharedMemorySettings::default()
    };
    let memory = SharedMemory::new(settings);
    assert_refused(
        memory.register_cuda("c", &[0; IPC_HANDLE_LEN], 0, 64),
        Code::InvalidArg,
        "failed to register CUDA shared memory region: 'c', GPUs not supported: the CUDA driver \
         '/nowhere/libcuda.so.1' cannot be opened",
    );
}
