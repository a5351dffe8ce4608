"""Breaking changes of the wire: the differences between two descriptor sets that an old peer does not understand.

A device in the field may run last year's code. So within fanin.v1 no released element changes its meaning:

    message   stays
    field     stays, with its number, name, type, label and oneof; or goes, and then its number and its name
              are reserved
    reserved  stays reserved
    enum      stays, with each value's number and name
    service   stays, with each rpc, its types and its streaming

Additions are always allowed. The comparison covers the total set and not single files, so a message may move between
files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The messages, enums and services of a descriptor set, by full name."""

    messages: Mapping[str, DescriptorProto]
    enums: Mapping[str, EnumDescriptorProto]
    services: Mapping[str, ServiceDescriptorProto]


def wire_of(files: FileDescriptorSet) -> Wire:
    """Collect the named elements of a descriptor set."""
    messages: dict[str, DescriptorProto] = {}
    enums: dict[str, EnumDescriptorProto] = {}
    services: dict[str, ServiceDescriptorProto] = {}

    def walk(prefix: str, message: DescriptorProto) -> None:
        name = f"{prefix}.{message.name}"
        messages[name] = message
        enums.update({f"{name}.{enum.name}": enum for enum in message.enum_type})
        for nested in message.nested_type:
            walk(name, nested)

    for file in files.file:
        enums.update({f"{file.package}.{enum.name}": enum for enum in file.enum_type})
        services.update({f"{file.package}.{service.name}": service for service in file.service})
        for message in file.message_type:
            walk(file.package, message)
    return Wire(messages=messages, enums=enums, services=services)


def breaking_changes(old: FileDescriptorSet, new: FileDescriptorSet) -> tuple[str, ...]:
    """Return one sentence for each change from ``old`` to ``new`` that breaks a peer with ``old``."""
    before, after = wire_of(old), wire_of(new)
    changes: list[str] = []
    for name, message in before.messages.items():
        changes += _message_changes(name, message, after.messages.get(name))
    for name, enum in before.enums.items():
        changes += _enum_changes(name, enum, after.enums.get(name))
    for name, service in before.services.items():
        changes += _service_changes(name, service, after.services.get(name))
    return tuple(changes)


def _message_changes(name: str, old: DescriptorProto, new: DescriptorProto | None) -> Iterator[str]:
    if new is None:
        yield f"message {name}: removed"
        return
    numbers = {field.number: field for field in new.field}
    for field in old.field:
        where = f"{name}.{field.name}"
        if field.number in numbers:
            yield from _field_changes(where, (old, field), (new, numbers[field.number]))
        elif not _is_reserved(new, field.number) or field.name not in new.reserved_name:
            yield f"field {where}: removed without reserving number {field.number} and name {field.name!r}"
    yield from _reserved_changes(name, old, new)


def _reserved_changes(name: str, old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    for reserved_name in sorted(set(old.reserved_name) - set(new.reserved_name)):
        yield f"message {name}: name {reserved_name!r} is no longer reserved"
    for span in old.reserved_range:
        # The end of the new ranges' coverage of the old range, without a gap.
        end = span.start
        for new_span in sorted(new.reserved_range, key=lambda each: each.start):
            if new_span.start <= end:
                end = max(end, new_span.end)
        if end < span.end:
            yield f"message {name}: number {end} is no longer reserved"


def _is_reserved(message: DescriptorProto, number: int) -> bool:
    return any(span.start <= number < span.end for span in message.reserved_range)


def _field_changes(
    where: str, old: tuple[DescriptorProto, FieldDescriptorProto], new: tuple[DescriptorProto, FieldDescriptorProto]
) -> Iterator[str]:
    facts = (("name", _name), ("type", _type), ("label", _label), ("oneof", _oneof))
    for what, fact in facts:
        before, after = fact(*old), fact(*new)
        if before != after:
            yield f"field {where} = {old[1].number}: {what} was {before}, now {after}"


def _name(_: DescriptorProto, field: FieldDescriptorProto) -> str:
    return field.name


def _type(_: DescriptorProto, field: FieldDescriptorProto) -> str:
    return field.type_name or FieldDescriptorProto.Type.Name(field.type)


def _label(_: DescriptorProto, field: FieldDescriptorProto) -> str:
    # Presence is part of the label: it lets a reader distinguish "absent" from "zero".
    return FieldDescriptorProto.Label.Name(field.label) + (" with presence" if field.proto3_optional else "")


def _oneof(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    if field.proto3_optional or not field.HasField("oneof_index"):
        return "none"
    return message.oneof_decl[field.oneof_index].name


def _enum_changes(name: str, old: EnumDescriptorProto, new: EnumDescriptorProto | None) -> Iterator[str]:
    if new is None:
        yield f"enum {name}: removed"
        return
    values = {value.name: value.number for value in new.value}
    for value in old.value:
        if value.name not in values:
            yield f"enum {name}: value {value.name} = {value.number} removed"
        elif values[value.name] != value.number:
            yield f"enum {name}: value {value.name} was {value.number}, now {values[value.name]}"


def _service_changes(name: str, old: ServiceDescriptorProto, new: ServiceDescriptorProto | None) -> Iterator[str]:
    if new is None:
        yield f"service {name}: removed"
        return
    rpcs = {rpc.name: rpc for rpc in new.method}
    for rpc in old.method:
        if rpc.name not in rpcs:
            yield f"rpc {name}.{rpc.name}: removed"
            continue
        new_rpc = rpcs[rpc.name]
        facts = (
            ("request type", rpc.input_type, new_rpc.input_type),
            ("reply type", rpc.output_type, new_rpc.output_type),
            ("client streaming", rpc.client_streaming, new_rpc.client_streaming),
            ("server streaming", rpc.server_streaming, new_rpc.server_streaming),
        )
        for what, before, after in facts:
            if before != after:
                yield f"rpc {name}.{rpc.name}: {what} was {before}, now {after}"
