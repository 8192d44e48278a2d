//! For tests: random configurations that use every field of the schema.

use prost_reflect::{DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor, Value};
use trireme_proto::inference::ModelConfig;

use crate::schema;

/// A small deterministic generator (xorshift), so that a failing seed can be repeated.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() >> 11).unwrap() % n.max(1)
    }
}

/// A configuration with random fields set to random values, edge values among them.
pub(crate) fn random_config(seed: u64) -> ModelConfig {
    let mut random = Random::new(seed);
    let message = random_message(&schema::model_config(), &mut random);
    message.transcode_to().unwrap()
}

fn random_message(descriptor: &MessageDescriptor, random: &mut Random) -> DynamicMessage {
    let mut message = DynamicMessage::new(descriptor.clone());
    for field in descriptor.fields() {
        if random.below(3) == 0 {
            continue;
        }
        let taken =
            field.containing_oneof().is_some_and(|oneof| oneof.fields().any(|f| message.has_field(&f)));
        if taken {
            continue;
        }
        let value = if field.is_map() {
            let Kind::Message(entry) = field.kind() else { unreachable!() };
            let entries = (0..random.below(3)).map(|_| {
                let key = match random_value(&entry.map_entry_key_field(), random) {
                    Value::String(text) => MapKey::String(text),
                    Value::U64(number) => MapKey::U64(number),
                    other => panic!("no map has keys like {other:?}"),
                };
                (key, random_value(&entry.map_entry_value_field(), random))
            });
            Value::Map(entries.collect())
        } else if field.is_list() {
            Value::List((0..random.below(4)).map(|_| random_value(&field, random)).collect())
        } else {
            random_value(&field, random)
        };
        message.set_field(&field, value);
    }
    message
}

fn random_value(field: &FieldDescriptor, random: &mut Random) -> Value {
    let pick = random.below(6);
    let bits = random.next();
    let low = i32::from_le_bytes(bits.to_le_bytes()[..4].try_into().unwrap());
    match field.kind() {
        Kind::Message(descriptor) => Value::Message(random_message(&descriptor, random)),
        Kind::Enum(values) => {
            Value::EnumNumber(values.values().nth(random.below(values.values().len())).unwrap().number())
        }
        Kind::Bool => Value::Bool(bits & 1 == 0),
        Kind::Int32 => Value::I32([0, 1, -1, i32::MIN, i32::MAX, low][pick]),
        Kind::Int64 => Value::I64([0, 1, -1, i64::MIN, i64::MAX, i64::from(low)][pick]),
        Kind::Uint32 => Value::U32([0, 1, 8, 64, u32::MAX, low.unsigned_abs()][pick]),
        Kind::Uint64 => Value::U64([0, 1, 1 << 53, u64::MAX - 1, u64::MAX, bits][pick]),
        Kind::Float => Value::F32([0.0, 1.0, 0.1, f32::MAX, f32::MIN_POSITIVE, -1.5e-7][pick]),
        Kind::Double => Value::F64([0.0, 1.0, 0.1, f64::MAX, -1.5e-7, 1e15][pick]),
        Kind::String => {
            let texts = ["", "INPUT0", "ünïcode 😀", "quote \" ' \\ \n\t\r\u{1}7", "${x}", "a/b.onnx"];
            Value::String(texts[pick].to_owned())
        }
        other => panic!("the schema has no {other:?}"),
    }
}
