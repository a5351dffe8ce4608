"""Each rule of ``breaking``, on handwritten descriptors: breaking changes are named, allowed changes are not."""

import pytest
from golden.breaking import breaking_changes
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorSet

RELEASED = """
file {
  name: "a.proto" package: "t"
  message_type {
    name: "Box"
    field { name: "width" number: 1 type: TYPE_UINT32 label: LABEL_OPTIONAL }
    field { name: "lid" number: 2 type: TYPE_MESSAGE type_name: ".t.Box.Lid" label: LABEL_OPTIONAL oneof_index: 0 }
    field { name: "bare" number: 3 type: TYPE_BOOL label: LABEL_OPTIONAL oneof_index: 0 }
    oneof_decl { name: "top" }
    nested_type { name: "Lid" field { name: "colour" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL } }
    enum_type { name: "Kind" value { name: "KIND_FLAT" number: 0 } }
    reserved_range { start: 10 end: 13 }
    reserved_name: "depth"
  }
  enum_type { name: "Size" value { name: "SIZE_ANY" number: 0 } value { name: "SIZE_BIG" number: 1 } }
  service {
    name: "Store"
    method { name: "Put" input_type: ".t.Box" output_type: ".t.Box" }
    method { name: "List" input_type: ".t.Box" output_type: ".t.Box" server_streaming: true }
  }
}
"""
WIDTH = 'field { name: "width" number: 1 type: TYPE_UINT32 label: LABEL_OPTIONAL }'
LID = 'nested_type { name: "Lid" field { name: "colour" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL } }'
KIND = 'enum_type { name: "Kind" value { name: "KIND_FLAT" number: 0 } }'
SIZE = 'enum_type { name: "Size" value { name: "SIZE_ANY" number: 0 } value { name: "SIZE_BIG" number: 1 } }'
PUT = 'method { name: "Put" input_type: ".t.Box" output_type: ".t.Box" }'
UNRESERVED_WIDTH = "field t.Box.width: removed without reserving number 1 and name 'width'"


def change(old: str, new: str) -> tuple[str, ...]:
    """Return the breaking changes of one replacement in RELEASED."""
    assert RELEASED.count(old) == 1
    released = text_format.Parse(RELEASED, FileDescriptorSet())
    return breaking_changes(released, text_format.Parse(RELEASED.replace(old, new), FileDescriptorSet()))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (WIDTH, "", UNRESERVED_WIDTH),
        (WIDTH, "reserved_range { start: 1 end: 2 }", UNRESERVED_WIDTH),
        (WIDTH, 'reserved_name: "width"', UNRESERVED_WIDTH),
        ('"width" number: 1', '"width" number: 4', UNRESERVED_WIDTH),
        ('"width"', '"breadth"', "field t.Box.width = 1: name was width, now breadth"),
        ("TYPE_UINT32", "TYPE_UINT64", "field t.Box.width = 1: type was TYPE_UINT32, now TYPE_UINT64"),
        ('type_name: ".t.Box.Lid"', 'type_name: ".t.Box"', "field t.Box.lid = 2: type was .t.Box.Lid, now .t.Box"),
        (
            "TYPE_UINT32 label: LABEL_OPTIONAL",
            "TYPE_UINT32 label: LABEL_REPEATED",
            "field t.Box.width = 1: label was LABEL_OPTIONAL, now LABEL_REPEATED",
        ),
        (
            "TYPE_UINT32 label: LABEL_OPTIONAL",
            "TYPE_UINT32 label: LABEL_OPTIONAL proto3_optional: true",
            "field t.Box.width = 1: label was LABEL_OPTIONAL, now LABEL_OPTIONAL with presence",
        ),
        (
            "TYPE_UINT32 label: LABEL_OPTIONAL",
            "TYPE_UINT32 label: LABEL_OPTIONAL oneof_index: 0",
            "field t.Box.width = 1: oneof was none, now top",
        ),
        (
            "TYPE_BOOL label: LABEL_OPTIONAL oneof_index: 0",
            "TYPE_BOOL label: LABEL_OPTIONAL",
            "field t.Box.bare = 3: oneof was top, now none",
        ),
        ("start: 10 end: 13", "start: 10 end: 12", "message t.Box: number 12 is no longer reserved"),
        (
            "reserved_range { start: 10 end: 13 }",
            "reserved_range { start: 10 end: 11 } reserved_range { start: 12 end: 13 }",
            "message t.Box: number 11 is no longer reserved",
        ),
        ('reserved_name: "depth"', "", "message t.Box: name 'depth' is no longer reserved"),
        (LID, "", "message t.Box.Lid: removed"),
        (KIND, "", "enum t.Box.Kind: removed"),
        (SIZE, "", "enum t.Size: removed"),
        ('value { name: "SIZE_BIG" number: 1 }', "", "enum t.Size: value SIZE_BIG = 1 removed"),
        ('"SIZE_BIG" number: 1', '"SIZE_BIG" number: 2', "enum t.Size: value SIZE_BIG was 1, now 2"),
        ('name: "Store"', 'name: "Shop"', "service t.Store: removed"),
        (PUT, "", "rpc t.Store.Put: removed"),
        ('"Put" input_type: ".t.Box"', '"Put" input_type: ".t.Box.Lid"', "rpc t.Store.Put: request type was .t.Box"),
        (
            '"Put" input_type: ".t.Box" output_type: ".t.Box"',
            '"Put" input_type: ".t.Box" output_type: ".t.Box.Lid"',
            "rpc t.Store.Put: reply type was .t.Box",
        ),
        (" server_streaming: true", "", "rpc t.Store.List: server streaming was True, now False"),
        (
            "server_streaming: true",
            "server_streaming: true client_streaming: true",
            "rpc t.Store.List: client streaming was False, now True",
        ),
        ('package: "t"', 'package: "u"', "message t.Box: removed"),
    ],
)
def test_a_breaking_change_is_named(old: str, new: str, expected: str) -> None:
    assert [message for message in change(old, new) if message.startswith(expected)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (RELEASED, RELEASED),
        (WIDTH, 'reserved_range { start: 1 end: 2 } reserved_name: "width"'),
        (WIDTH, WIDTH + ' field { name: "height" number: 4 type: TYPE_UINT32 label: LABEL_OPTIONAL }'),
        ("start: 10 end: 13", "start: 9 end: 11 } reserved_range { start: 11 end: 20"),
        ('"SIZE_BIG" number: 1 }', '"SIZE_BIG" number: 1 } value { name: "SIZE_HUGE" number: 2 }'),
        (SIZE, SIZE + ' message_type { name: "Bag" }'),
        (PUT, PUT + ' method { name: "Get" input_type: ".t.Box" output_type: ".t.Box" }'),
        ('name: "a.proto"', 'name: "b.proto"'),
    ],
)
def test_an_allowed_change_is_not_named(old: str, new: str) -> None:
    assert not change(old, new)
