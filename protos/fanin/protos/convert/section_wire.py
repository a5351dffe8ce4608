"""Wire form of the sections of a Plan: each key is the field of the same name of the section's message."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeVar

from google.protobuf.message import Message

from fanin.protos.plans.entries import OPTIONS, ROLES, SETTINGS, EntryKind, Setting
from fanin.protos.plans.keys import KeyField, fields_of
from fanin.protos.roles import TensorRole
from fanin.v1 import fleet_pb2 as pb

T = TypeVar("T")


def write_section(section: object, message: Message) -> None:
    """Write the keys of a section, and the sections within it, to a message.

    Args:
        section: The section, a dataclass of ``fanin.protos.plans``.
        message: An empty message that has a field for each key.
    """
    for name, field in fields_of(type(section)).items():
        value = getattr(section, name)
        if value is None:
            continue
        if isinstance(field, KeyField):
            if field.type is dict and field.key.entries in _ENTRIES:
                write, _ = _ENTRIES[field.key.entries]
                for each, item in value.items():
                    write(item, getattr(message, name)[each])
            elif field.type is dict:
                getattr(message, name).update(value)
            else:
                setattr(message, name, value)
        elif field.is_list:
            for item in value:
                write_section(item, getattr(message, name).add())
        else:
            write_section(value, getattr(message, name))


def section_from_proto(kind: type[T], message: Message) -> T:
    """Read a section from its message. The constructor of the section raises InvalidPlan if it is not valid."""
    values = {}
    for name, field in fields_of(kind).items():
        value = getattr(message, name)
        wire_field = message.DESCRIPTOR.fields_by_name[name]
        if isinstance(field, KeyField) and wire_field.has_presence and not message.HasField(name):
            # The key is absent, or the Plan is from before it was declared.
            values[name] = field.default
        elif isinstance(field, KeyField) and field.type is dict:
            _, read = _ENTRIES.get(field.key.entries, (None, lambda item: item))
            entries = {each: read(item) for each, item in value.items()}
            # A protobuf map has no order. Sorting makes the value equal in every process.
            values[name] = dict(sorted(entries.items()))
        elif isinstance(field, KeyField):
            values[name] = value
        elif field.is_list:
            values[name] = tuple(section_from_proto(field.section, item) for item in value)
        else:
            values[name] = section_from_proto(field.section, value)
    return kind(**values)


def write_setting(setting: Setting, message: pb.Setting) -> None:
    """Write a setting of a Flower app to a message."""
    match setting:
        case bool():
            message.flag = setting
        case int():
            message.integer = setting
        case float():
            message.number = setting
        case str():
            message.text = setting
        case bytes():
            message.data = setting
        case tuple():
            message.list.SetInParent()
            for item in setting:
                write_setting(item, message.list.items.add())


def setting_from_proto(message: pb.Setting) -> object:
    """Read a setting. The section that has it refuses one without a value, and a list of other values."""
    name = message.WhichOneof("value")
    if name == "list":
        return tuple(map(setting_from_proto, message.list.items))
    return None if name is None else getattr(message, name)


def _write_role(role: TensorRole, message: pb.TensorRole) -> None:
    message.role = role.role.value
    if role.lowest is not None:
        message.lowest = role.lowest
    if role.highest is not None:
        message.highest = role.highest


def _role_from_proto(message: pb.TensorRole) -> object:
    """Read a role. The section that has it refuses a wrong one."""
    bounds = {name: getattr(message, name) for name in ("lowest", "highest") if message.HasField(name)}
    return ROLES.read({"role": message.role, **bounds})


_ENTRIES: Final[Mapping[EntryKind, tuple[Callable[..., None], Callable[..., object]]]] = MappingProxyType(
    {
        OPTIONS: (write_setting, setting_from_proto),
        SETTINGS: (write_setting, setting_from_proto),
        ROLES: (_write_role, _role_from_proto),
    }
)
"""How the entries of a table that have messages of their own are written and read."""
