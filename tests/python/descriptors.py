#!/usr/bin/env python3
"""Compares the wire contract of this server with the one inside NVIDIA's Python client, both ways.

    descriptors.py [DESCRIPTOR_SET]

The argument is an encoded FileDescriptorSet, by default the one the server is built with. Every message, field, oneof, enum, service and method that
either side has must be the same on the other: number, type, cardinality, packing, presence, oneof and JSON
name. Needs the package tritonclient[grpc]; the health protocol is compared where grpcio-health-checking is
installed too. Exit status 0: the same; 1: differences, one a line; 2: the comparison could not be made.
"""

import importlib
import sys
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool

BUILT_IN = Path(__file__).resolve().parents[2] / "crates/proto/src/generated/descriptor.bin"

# Where the reference declares each file of ours, and the package that installs it.
REFERENCES = {
    "grpc_service.proto": ("tritonclient.grpc.service_pb2", "tritonclient[grpc]"),
    "model_config.proto": ("tritonclient.grpc.model_config_pb2", "tritonclient[grpc]"),
    "health.proto": ("grpc_health.v1.health_pb2", "grpcio-health-checking"),
}
OPTIONAL = {"health.proto"}


def type_name(field):
    """The full name of the message or enum a field holds; empty for a scalar."""
    holds = field.message_type or field.enum_type
    return holds.full_name if holds else ""


def field_facts(field):
    oneof = field.containing_oneof
    return {
        "number": field.number,
        "type": descriptor_pb2.FieldDescriptorProto.Type.Name(field.type),
        "type name": type_name(field),
        "repeated": field.is_repeated,
        "required": field.is_required,
        "packed": field.is_packed,
        "presence": field.has_presence,
        "oneof": oneof.name if oneof else None,
        "json name": field.json_name,
    }


def enum_facts(enum):
    yield f"enum {enum.full_name}", {"closed": enum.is_closed}
    for value in enum.values:
        yield f"enum value {enum.full_name}.{value.name}", {"number": value.number}


def message_facts(message):
    yield f"message {message.full_name}", {"map entry": message.GetOptions().map_entry}
    for field in message.fields:
        yield f"field {field.full_name}", field_facts(field)
    for oneof in message.oneofs:
        yield f"oneof {oneof.full_name}", {"fields": sorted(field.name for field in oneof.fields)}
    for nested in message.nested_types:
        yield from message_facts(nested)
    for enum in message.enum_types:
        yield from enum_facts(enum)


def service_facts(service):
    yield f"service {service.full_name}", {}
    for method in service.methods:
        yield f"method {method.full_name}", {
            "request": method.input_type.full_name,
            "response": method.output_type.full_name,
            "client streams": method.client_streaming,
            "server streams": method.server_streaming,
        }


def file_facts(file):
    """What each declaration of a file promises on the wire, by the declaration's kind and full name."""
    facts = {f"file {file.name}": {"package": file.package}}
    for message in file.message_types_by_name.values():
        facts.update(message_facts(message))
    for enum in file.enum_types_by_name.values():
        facts.update(enum_facts(enum))
    for service in file.services_by_name.values():
        facts.update(service_facts(service))
    return facts


def differences(ours, theirs):
    for name in sorted(theirs.keys() - ours.keys()):
        yield f"{name}: only the reference has it"
    for name in sorted(ours.keys() - theirs.keys()):
        yield f"{name}: only this server has it"
    for name in sorted(ours.keys() & theirs.keys()):
        for fact, here in ours[name].items():
            there = theirs[name][fact]
            if here != there:
                yield f"{name}: {fact} is {here!r} here and {there!r} in the reference"


def load(path):
    with open(path, "rb") as file:
        files = descriptor_pb2.FileDescriptorSet.FromString(file.read()).file
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.Add(file)
    return {file.name: pool.FindFileByName(file.name) for file in files}


def reference(name):
    """The reference's descriptor of a file, or None where an optional package is not installed."""
    module, package = REFERENCES[name]
    try:
        file = importlib.import_module(module).DESCRIPTOR
    except ImportError as error:
        if name in OPTIONAL:
            print(f"{name}: not compared, {package} is not installed")
            return None
        print(f"cannot import {module}, install {package}: {error}", file=sys.stderr)
        sys.exit(2)
    return file


def main(arguments):
    if len(arguments) > 1:
        print(__doc__, file=sys.stderr)
        return 2
    path = arguments[0] if arguments else BUILT_IN
    try:
        ours = load(path)
    except Exception as error:  # whatever is wrong with the file, say so and compare nothing
        print(f"cannot read a descriptor set from {path}: {error}", file=sys.stderr)
        return 2

    found = [f"file {name}: only this server has it" for name in sorted(ours.keys() - REFERENCES.keys())]
    found += [f"file {name}: only the reference has it" for name in sorted(REFERENCES.keys() - ours.keys())]
    for name in sorted(REFERENCES.keys() & ours.keys()):
        theirs = reference(name)
        if theirs is None:
            continue
        here, there = file_facts(ours[name]), file_facts(theirs)
        # The reference may keep the file in a folder; the file's name is no part of the wire.
        there[f"file {name}"] = there.pop(f"file {theirs.name}")
        found += differences(here, there)
        print(f"{name}: {len(here)} declarations compared with {len(there)}")
    for difference in found:
        print(difference)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
