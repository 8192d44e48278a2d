//! Small ONNX models, encoded here: just enough protobuf to say what a test means.

/// ONNX element types by number.
pub(crate) const FLOAT: u64 = 1;
pub(crate) const INT32: u64 = 6;
pub(crate) const INT64: u64 = 7;
pub(crate) const STRING: u64 = 8;

/// A dimension of a declared shape.
#[derive(Clone, Copy)]
pub(crate) enum Dim {
    Fixed(u64),
    Named(&'static str),
}
pub(crate) use Dim::{Fixed, Named};

/// Shape that says nothing, not even a rank.
pub(crate) const NO_SHAPE: Option<&[Dim]> = None;

fn varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(u8::try_from(value & 0x7f | 0x80).expect("seven bits and one"));
        value >>= 7;
    }
    out.push(u8::try_from(value).expect("seven bits"));
}

fn number(field: u64, value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    varint(field << 3, &mut out);
    varint(value, &mut out);
    out
}

fn bytes(field: u64, value: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    varint(field << 3 | 2, &mut out);
    varint(value.len() as u64, &mut out);
    out.extend_from_slice(value);
    out
}

fn tensor_type(element: u64, shape: Option<&[Dim]>) -> Vec<u8> {
    let mut tensor = number(1, element);
    if let Some(dims) = shape {
        let dims = dims.iter().flat_map(|dim| match dim {
            Fixed(size) => bytes(1, &number(1, *size)),
            Named(name) => bytes(1, &bytes(2, name.as_bytes())),
        });
        tensor.extend(bytes(2, &dims.collect::<Vec<_>>()));
    }
    bytes(1, &tensor)
}

/// A graph under construction.
#[derive(Default)]
pub(crate) struct Graph {
    fields: Vec<u8>,
}

impl Graph {
    fn value(mut self, field: u64, name: &str, type_proto: &[u8]) -> Self {
        let info = [bytes(1, name.as_bytes()), bytes(2, type_proto)].concat();
        self.fields.extend(bytes(field, &info));
        self
    }

    pub(crate) fn input(self, name: &str, element: u64, shape: &[Dim]) -> Self {
        self.value(11, name, &tensor_type(element, Some(shape)))
    }

    pub(crate) fn output(self, name: &str, element: u64, shape: Option<&[Dim]>) -> Self {
        self.value(12, name, &tensor_type(element, shape))
    }

    pub(crate) fn sequence_input(self, name: &str, element: u64) -> Self {
        let sequence = bytes(1, &tensor_type(element, Some(&[])));
        self.value(11, name, &bytes(4, &sequence))
    }

    pub(crate) fn sequence_output(self, name: &str, element: u64) -> Self {
        let sequence = bytes(1, &tensor_type(element, Some(&[])));
        self.value(12, name, &bytes(4, &sequence))
    }

    pub(crate) fn node(mut self, operator: &str, inputs: &[&str], outputs: &[&str]) -> Self {
        let mut node: Vec<u8> = inputs.iter().flat_map(|name| bytes(1, name.as_bytes())).collect();
        node.extend(outputs.iter().flat_map(|name| bytes(2, name.as_bytes())));
        node.extend(bytes(4, operator.as_bytes()));
        self.fields.extend(bytes(1, &node));
        self
    }

    pub(crate) fn initializer(mut self, name: &str, element: u64, dims: &[u64], raw: &[u8]) -> Self {
        let mut tensor: Vec<u8> = dims.iter().flat_map(|dim| number(1, *dim)).collect();
        tensor.extend(number(2, element));
        tensor.extend(bytes(8, name.as_bytes()));
        tensor.extend(bytes(9, raw));
        self.fields.extend(bytes(5, &tensor));
        self
    }

    /// The bytes of a model file.
    pub(crate) fn model(self) -> Vec<u8> {
        let graph = [bytes(2, b"test"), self.fields].concat();
        [number(1, 8), bytes(8, &number(2, 17)), bytes(7, &graph)].concat()
    }
}

/// `Y = X`.
pub(crate) fn identity(element: u64, shape: &[Dim]) -> Vec<u8> {
    Graph::default()
        .input("X", element, shape)
        .output("Y", element, Some(shape))
        .node("Identity", &["X"], &["Y"])
        .model()
}

/// Triton's `simple`: `OUTPUT0 = INPUT0 + INPUT1`, `OUTPUT1 = INPUT0 - INPUT1`, 16 INT32 a row.
pub(crate) fn simple() -> Vec<u8> {
    let shape = [Named("batch"), Fixed(16)];
    Graph::default()
        .input("INPUT0", INT32, &shape)
        .input("INPUT1", INT32, &shape)
        .output("OUTPUT0", INT32, Some(&shape))
        .output("OUTPUT1", INT32, Some(&shape))
        .node("Add", &["INPUT0", "INPUT1"], &["OUTPUT0"])
        .node("Sub", &["INPUT0", "INPUT1"], &["OUTPUT1"])
        .model()
}
