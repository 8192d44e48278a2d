//! Descriptors of every message, for server reflection and for text and JSON forms of a message.
//!
//! The descriptor set is written by the same run of `cargo xtask codegen` as the Rust code, so a message
//! and its descriptor never disagree: any message of this crate is a [`ReflectMessage`] and turns into a
//! dynamic message with [`ReflectMessage::transcode_to_dynamic`], and back with
//! [`prost_reflect::DynamicMessage::transcode_to`].

use std::sync::LazyLock;

use prost_reflect::{DescriptorPool, MessageDescriptor, ReflectMessage};

/// The encoded `google.protobuf.FileDescriptorSet` of all `.proto` files of this crate, imports included.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("generated/descriptor.bin");

static POOL: LazyLock<DescriptorPool> = LazyLock::new(|| {
    #[expect(clippy::expect_used, reason = "the bytes are a constant, and a test decodes them")]
    DescriptorPool::decode(FILE_DESCRIPTOR_SET).expect("the committed descriptor set is valid")
});

/// The descriptors of [`FILE_DESCRIPTOR_SET`], decoded on first use.
pub fn descriptor_pool() -> &'static DescriptorPool {
    &POOL
}

/// The descriptor of a message of this crate by its full name, such as `inference.ModelConfig`.
fn message_descriptor(full_name: &str) -> MessageDescriptor {
    #[expect(clippy::expect_used, reason = "the generated list names only messages of the descriptor set")]
    POOL.get_message_by_name(full_name).expect("a generated message has a descriptor")
}

macro_rules! reflect_messages {
    ($($full_name:literal => $message:path,)*) => {
        $(
            impl ReflectMessage for $message {
                fn descriptor(&self) -> MessageDescriptor {
                    message_descriptor($full_name)
                }
            }
        )*

        /// The full names of all messages that reflect, for the test that looks each of them up.
        #[cfg(test)]
        const REFLECTED: &[&str] = &[$($full_name),*];
    };
}

include!("generated/reflect.rs");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inference::{ModelConfig, ModelParameter};

    #[test]
    fn every_message_has_its_descriptor() {
        for name in REFLECTED {
            assert_eq!(message_descriptor(name).full_name(), *name);
        }
        let declared = descriptor_pool().all_messages().filter(|message| !message.is_map_entry()).count();
        assert_eq!(declared, REFLECTED.len());
    }

    #[test]
    fn the_set_holds_both_services() {
        let services: Vec<_> =
            descriptor_pool().services().map(|service| service.full_name().to_owned()).collect();
        assert_eq!(services, ["inference.GRPCInferenceService", "grpc.health.v1.Health"]);
    }

    #[test]
    fn a_message_survives_the_way_through_a_dynamic_one() {
        let mut config = ModelConfig { name: "m".to_owned(), max_batch_size: 8, ..Default::default() };
        config.parameters.insert("k".to_owned(), ModelParameter { string_value: "v".to_owned() });
        let dynamic = config.transcode_to_dynamic();
        assert_eq!(
            dynamic.to_text_format(),
            r#"name:"m",max_batch_size:8,parameters:[{key:"k",value{string_value:"v"}}]"#
        );
        assert_eq!(dynamic.transcode_to::<ModelConfig>().unwrap(), config);
    }
}
