"""The conversion between dataclasses and protobuf messages, for all types of both protocols and of the Plan.

A field of a dataclass is the field of the message with the same name. The type hint decides its form:

    hint                            field of the message
    int, float, str, bytes, bool    the same
    X | None                        absent for None
    an Enum E                       an enum: E.OPEN is E_OPEN
    a dataclass                     a message
    tuple[X, ...]                   repeated, or a message with one repeated field
    Mapping[str, X], dict[str, X]   a map, or repeated messages with two fields: the name and X
    a union of dataclasses          a oneof (see OneOf)

A scalar with presence that is absent has its default. ``fanin.protos.fields`` has the annotations of fields
that differ. A dataclass may also have two functions of its own:

    check_message    called with the message before it is read, to refuse what must not be read at all
    of_message       called with the fields instead of the constructor

``from_proto(type(value), to_proto(value, M)) == value`` for each valid value (tests/laws/test_wire.py). Unknown fields
are ignored, as proto3 requires.

Check-ins and pieces of uploads are converted thousands of times a second. So, as ``dataclasses`` does for constructors,
the two functions of a dataclass and a message are compiled at their first use. They are as fast as functions that are
written by hand, such as these for ``Principal``::

    lambda v: pb.Principal(kind=numbers[v.kind], id=v.id)
    lambda v: Principal(kind=member(v.kind), id=v.id)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Final, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from fanin.protos.errors import InvalidInput
from fanin.protos.fields import Mark, OneOf, Otherwise
from fanin.protos.names import MAX_NUMBER
from fanin.protos.plans.entries import ROLES, Option, Setting
from fanin.protos.roles import TensorRole
from fanin.v1 import fleet_pb2 as pb

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Convert = Callable[..., object]
_UNIONS: Final = (UnionType, Union)


class _Form(NamedTuple):
    """The functions that write a value to a message and read it."""

    write: Convert
    read: Convert


class _Text(NamedTuple):
    """Expressions that write a value and read it. In those of an item, braces stand for the item."""

    write: str
    read: str


_SAME: Final = _Text("{}", "{}")


class _Source:
    """The objects that expressions name."""

    def __init__(self) -> None:
        self._objects: dict[str, object] = {}

    def name(self, value: object) -> str:
        """Return a name for an object in expressions."""
        name = f"x{len(self._objects)}"
        self._objects[name] = value
        return name

    def function(self, expression: str) -> Convert:
        """Return the function of ``v`` that evaluates an expression."""
        function: Convert = eval(f"lambda v: {expression}", self._objects)
        return function


def to_proto(value: object, message: type[M]) -> M:
    """Return the message of a value.

    Args:
        value: A dataclass of ``fanin.protos.messages``, ``fanin.protos.plans`` or ``fanin.protos.chunks``.
        message: The class of the message.
    """
    kind: type = type(value)
    target: type = message
    written = _form(kind, target).write(value)
    assert isinstance(written, message)
    return written


def from_proto(kind: type[T], message: Message) -> T:
    """Return the value of a message.

    Args:
        kind: The dataclass.
        message: The message, with any content.

    Raises:
        FaninError: An enum number or a variant is unknown, or a constructor refuses its fields.
    """
    target: type = kind
    source: type = type(message)
    value = _form(target, source).read(message)
    assert isinstance(value, kind)
    return value


def check_numbers(request: Message) -> None:
    """Raise InvalidInput for a number of a request that the database cannot hold.

    Only the fields of the request itself are read: servicers use them as they are. The dataclasses check those of its
    parts, of which some, such as a seed, may have all 64 bits.
    """
    kind: type = type(request)
    for name in _numbers_of(kind):
        if (number := getattr(request, name)) > MAX_NUMBER:
            raise InvalidInput(f"{kind.__name__}: got {name} {number}, expected at most {MAX_NUMBER}", code="FN-0151")


@cache
def _numbers_of(kind: type) -> tuple[str, ...]:
    """Return the fields of a message that are one number of 64 bits."""
    assert issubclass(kind, Message), f"{kind}: expected a message"
    descriptor = kind.DESCRIPTOR
    assert isinstance(descriptor, Descriptor)
    numbers = (each for each in descriptor.fields if each.type == FieldDescriptor.TYPE_UINT64)
    return tuple(each.name for each in numbers if not each.is_repeated)


@cache
def _form(kind: type, message: type) -> _Form:
    """Return the form of a dataclass as a message."""
    assert issubclass(message, Message), f"{message}: expected a message"
    source, descriptor = _Source(), message.DESCRIPTOR
    assert isinstance(descriptor, Descriptor)
    parts = [_part(source, each, hint, descriptor) for each, hint in _members(kind)]
    read = f"{source.name(getattr(kind, 'of_message', kind))}({', '.join(part.read for part in parts)})"
    if hasattr(kind, "check_message"):
        # It returns None.
        read = f"{source.name(kind.check_message)}(v) or {read}"
    write = f"{source.name(message)}({', '.join(filter(None, (part.write for part in parts)))})"
    return _Form(source.function(write), source.function(read))


def _members(kind: type) -> list[tuple[Field[object], object]]:
    """Return the fields of a dataclass with their hints."""
    assert is_dataclass(kind), f"{kind}: expected a dataclass"
    hints = get_type_hints(kind, include_extras=True)
    return [(field, hints[field.name]) for field in fields(kind)]


def _part(source: _Source, field: Field[object], hint: object, message: Descriptor, wire_name: str = "") -> _Text:
    """Return a field as keyword arguments: of the constructor of its message, and of its dataclass."""
    kind, notes = _split(hint)
    value = f"v.{field.name}"
    for note in notes:
        if isinstance(note, OneOf):
            union = _union_form(kind, note, message)
            return _Text(f"**{source.name(union.write)}({value})", f"{field.name}={source.name(union.read)}(v)")
    wire = message.fields_by_name.get(wire_name or field.name)
    default = source.name(field.default if field.default_factory is MISSING else field.default_factory())
    if wire is None:
        assert Mark.LOCAL in notes, f"{message.name}: has no field {field.name}"
        return _Text("", f"{field.name}={default}")
    is_optional = get_origin(kind) in _UNIONS
    if is_optional:
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    form = _field_text(source, kind, notes, wire)
    write, read = form.write.format(value), form.read.format(f"v.{wire.name}")
    if is_optional and form != _SAME:
        write = f"None if {value} is None else {write}"
    if Mark.SPARSE in notes:
        write = f"None if {value} == {default} else {write}"
    if is_optional or (wire.has_presence and wire.message_type is None):
        read = f"{read} if v.HasField({wire.name!r}) else {None if is_optional else default}"
    return _Text(f"{wire.name}={write}", f"{field.name}={read}")


def _field_text(source: _Source, kind: object, notes: Sequence[object], wire: FieldDescriptor) -> _Text:
    """Return the expressions of a field."""
    if get_origin(kind) is tuple and not wire.is_repeated:
        # A message with one repeated field.
        (inner,) = _inner(wire).fields
        form, message = _field_text(source, kind, (), inner), source.name(GetMessageClass(_inner(wire)))
        return _Text(f"{message}({inner.name}={form.write})", form.read.format(f"{{}}.{inner.name}"))
    if get_origin(kind) is tuple:
        item = _item_text(source, get_args(kind)[0], (), wire)
        if item == _SAME:
            return _Text("{}", "tuple({})")
        return _Text(f"[{item.write.format('i')} for i in {{}}]", f"tuple([{item.read.format('i')} for i in {{}}])")
    if get_origin(kind) in (dict, Mapping):
        return _table_text(source, kind, wire)
    return _item_text(source, kind, notes, wire)


def _table_text(source: _Source, kind: object, wire: FieldDescriptor) -> _Text:
    """Return the expressions of a table: a map, which has no order and is read in that of its names, or rows."""
    name, value = _inner(wire).fields
    item = _item_text(source, get_args(kind)[1], (), value)
    table = source.name(dict if get_origin(kind) is dict else _read_only)
    if _inner(wire).GetOptions().map_entry:
        if item == _SAME:
            return _Text("{}", f"{table}(sorted({{}}.items()))")
        return _Text(
            f"{{{{k: {item.write.format('i')} for k, i in {{}}.items()}}}}",
            f"{table}((k, {item.read.format('i')}) for k, i in sorted({{}}.items()))",
        )
    row = source.name(GetMessageClass(_inner(wire)))
    return _Text(
        f"[{row}({name.name}=k, {value.name}={item.write.format('i')}) for k, i in {{}}.items()]",
        f"{table}((r.{name.name}, {item.read.format(f'r.{value.name}')}) for r in {{}})",
    )


def _read_only(items: Iterable[tuple[str, object]]) -> Mapping[str, object]:
    return MappingProxyType(dict(items))


def _item_text(source: _Source, kind: object, notes: Sequence[object], wire: FieldDescriptor) -> _Text:
    """Return the expressions of one value."""
    if Mark.HEXADECIMAL in notes:
        return _Text(f"{source.name(bytes.fromhex)}({{}})", "{}.hex()")
    if wire.enum_type is None and wire.message_type is None:
        return _SAME
    if wire.enum_type is not None:
        form = _enum_form(kind, notes, wire.enum_type)
    elif kind in (Setting, Option):
        form = _Form(_write_setting, _read_setting)
    elif kind is TensorRole:
        form = _Form(_write_role, _read_role)
    else:
        assert isinstance(kind, type), f"{wire.full_name}: got {kind}, expected a dataclass"
        message: type = GetMessageClass(_inner(wire))
        form = _form(kind, message)
    return _Text(f"{source.name(form.write)}({{}})", f"{source.name(form.read)}({{}})")


def _inner(wire: FieldDescriptor) -> Descriptor:
    """Return the message that a field holds."""
    assert wire.message_type is not None, f"{wire.full_name}: is no message"
    return wire.message_type


def _enum_form(kind: object, notes: Sequence[object], wire: EnumDescriptor) -> _Form:
    assert isinstance(kind, type), f"{wire.full_name}: got {kind}, expected an enum"
    assert issubclass(kind, Enum), f"{wire.full_name}: got {kind}, expected an enum"
    prefix = wire.values_by_number[0].name.removesuffix("UNSPECIFIED")
    numbers = {member: wire.values_by_name[f"{prefix}{member.name}"].number for member in kind}
    members = {number: member for member, number in numbers.items()}
    otherwise = next((note.member for note in notes if isinstance(note, Otherwise)), None)
    what = prefix.lower().replace("_", " ").strip()

    def read(number: int) -> Enum:
        member = members.get(number, otherwise)
        if member is None:
            raise InvalidInput(f"{what}: got {number}, expected one of {sorted(members)}", code="FN-0125")
        return member

    return _Form(numbers.__getitem__, read)


def _union_form(kind: object, note: OneOf, message: Descriptor) -> _Form:
    """Return the functions that write a variant as arguments of a message, and that read it from the message."""
    (oneof,) = (each for each in message.oneofs if not each.name.startswith("_"))
    writers, readers = {}, {}
    for variant in get_args(kind):
        (wire,) = (each for each in oneof.fields if _is_field_of(variant, each))
        writers[variant], readers[wire.name] = _variant_form(variant, wire, message)

    def write(value: object) -> object:
        writer = writers.get(type(value))
        assert writer is not None, f"{message.name}: has no variant {type(value)}"
        return writer(value)

    def read(outer: Message) -> object:
        name = outer.WhichOneof(oneof.name)
        reader = readers.get(name)
        if reader is None:
            raise InvalidInput(note.unknown.format(name), code="FN-0125")
        return reader(outer)

    return _Form(write, read)


def _is_field_of(variant: type, wire: FieldDescriptor) -> bool:
    return variant.__name__ in (_inner(wire).name, wire.name.title().replace("_", ""))


def _variant_form(variant: type, wire: FieldDescriptor, message: Descriptor) -> _Form:
    """Return the functions of a variant. Some of its fields may be beside its own message."""
    outer, inner = _Source(), _Source()
    outside, inside = [], []
    for field, hint in _members(variant):
        notes = _split(hint)[1]
        if Mark.WHOLE in notes or Mark.BESIDE in notes:
            outside.append(_part(outer, field, hint, message, wire.name if Mark.WHOLE in notes else ""))
        else:
            inside.append(_part(inner, field, hint, _inner(wire)))
    if not outside:
        inner_class: type = GetMessageClass(_inner(wire))
        form = _form(variant, inner_class)
        write = outer.function(f"{{'{wire.name}': {outer.name(form.write)}(v)}}")
        return _Form(write, outer.function(f"{outer.name(form.read)}(v.{wire.name})"))
    writes, reads = [part.write for part in outside], [part.read for part in outside]
    if inside:
        message_text = f"{inner.name(GetMessageClass(_inner(wire)))}({', '.join(part.write for part in inside)})"
        fields_text = f"dict({', '.join(part.read for part in inside)})"
        writes.append(f"{wire.name}={outer.name(inner.function(message_text))}(v)")
        reads.append(f"**{outer.name(inner.function(fields_text))}(v.{wire.name})")
    return _Form(
        outer.function(f"dict({', '.join(writes)})"),
        outer.function(f"{outer.name(variant)}({', '.join(reads)})"),
    )


def _split(hint: object) -> tuple[object, Sequence[object]]:
    """Return a type and its annotations."""
    if get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        return kind, notes
    return hint, ()


def _write_setting(setting: Setting) -> pb.Setting:
    """Write a setting of a Flower app."""
    match setting:
        case bool():
            return pb.Setting(flag=setting)
        case int():
            return pb.Setting(integer=setting)
        case float():
            return pb.Setting(number=setting)
        case str():
            return pb.Setting(text=setting)
        case bytes():
            return pb.Setting(data=setting)
        case tuple():
            return pb.Setting(list=pb.SettingList(items=map(_write_setting, setting)))


def _read_setting(message: pb.Setting) -> object:
    """Read a setting. The section that has it refuses one without a value, and a list of other values."""
    name = message.WhichOneof("value")
    if name == "list":
        return tuple(map(_read_setting, message.list.items))
    return None if name is None else getattr(message, name)


def _write_role(role: TensorRole) -> pb.TensorRole:
    return pb.TensorRole(role=role.role.value, lowest=role.lowest, highest=role.highest)


def _read_role(message: pb.TensorRole) -> object:
    """Read a role. The section that has it refuses a wrong one."""
    bounds = {name: getattr(message, name) for name in ("lowest", "highest") if message.HasField(name)}
    return ROLES.read({"role": message.role, **bounds})
