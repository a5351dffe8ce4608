"""Golden frames: the sent and the signed bytes have not changed, and decode to the same values."""

import hashlib

import pytest
from golden import frames
from support import manifests
from support.values import BUNDLE, DELEGATION, DEVICE_KEY, PUBLISHER, RUN_KEY, TABLE, parameters

from fanin.edge.bundles.keys import BUNDLE_CONTEXT, CALL_CONTEXT, DELEGATION_CONTEXT, VERSION_CONTEXT, is_signed
from fanin.edge.bundles.manifest_json import parse_manifest
from fanin.edge.tensors import decode_parameters
from fanin.v1 import fleet_pb2

HINT = "if this is meant, run `python tests/golden/frames.py` and say in CHANGELOG.md who can still read it"
FRAMES = frames.frames()
BYTES = frames.all_bytes()


def golden(name: str) -> bytes:
    return bytes.fromhex((frames.FOLDER / f"{name}.hex").read_text())


def test_the_folder_contains_exactly_these_frames() -> None:
    assert {path.stem for path in frames.FOLDER.iterdir()} == set(BYTES), HINT


@pytest.mark.parametrize("name", BYTES)
def test_the_bytes_are_the_golden_ones(name: str) -> None:
    assert (frames.FOLDER / f"{name}.hex").read_text() == frames.hex_of(BYTES[name]), HINT


@pytest.mark.parametrize("name", FRAMES)
def test_the_golden_bytes_decode_to_the_value(name: str) -> None:
    frame = FRAMES[name]
    assert frame.back(type(frame.message).FromString(golden(name))) == frame.value


def test_every_message_of_the_device_protocol_has_a_frame() -> None:
    """Requests and replies have a frame of their own. The other messages are parts of them."""
    service = fleet_pb2.DESCRIPTOR.services_by_name["Fleet"]
    on_the_wire = {kind.name for method in service.methods for kind in (method.input_type, method.output_type)}
    assert {frame.message.DESCRIPTOR.name for frame in FRAMES.values()} >= on_the_wire
    parts = {message.DESCRIPTOR.full_name for frame in FRAMES.values() for message in messages_in(frame.message)}
    known = {kind.full_name for kind in fleet_pb2.DESCRIPTOR.message_types_by_name.values()}
    assert known <= parts


def messages_in(message: object) -> list[object]:
    """Return a message and all messages inside it."""
    messages = [message]
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            messages += [each for part in value.values() if hasattr(part, "ListFields") for each in messages_in(part)]
        elif field.message_type is not None:
            for part in value if not hasattr(value, "ListFields") else [value]:
                messages += messages_in(part)
    return messages


def test_the_golden_parameters_decode() -> None:
    table, flat = decode_parameters(golden("parameters"))
    assert table == TABLE
    assert flat.tobytes() == parameters().tobytes()


def test_the_golden_manifest_parses_and_its_signature_holds() -> None:
    data = golden("manifest")
    assert parse_manifest(data) == manifests.manifest()
    assert is_signed(PUBLISHER.public, golden("manifest-signature"), BUNDLE_CONTEXT, data)


def test_the_golden_call_has_the_signed_lines_of_the_protocol() -> None:
    """The expected lines follow fleet.proto, not the code."""
    device = hashlib.sha256(bytes.fromhex(DEVICE_KEY.public)).hexdigest()[:32]
    lines = ("/fanin.v1.Fleet/CheckIn", device, "1700000000000000", "ab" * 32)
    assert golden("call-signed") == "\n".join(lines).encode()
    assert is_signed(DEVICE_KEY.public, golden("call-signature"), CALL_CONTEXT, golden("call-signed"))


def test_the_golden_version_and_delegation_are_signed_over_these_lines() -> None:
    bundle, digest = BUNDLE.manifest.sha256, frames.VERSION.sha256
    line = f'["run",1,1,0,"{bundle}","{digest}"]'.encode()
    assert is_signed(RUN_KEY.public, golden("version-signature"), VERSION_CONTEXT, line)
    line = f'["run",1,"{bundle}","{RUN_KEY.public}"]'.encode()
    assert is_signed(PUBLISHER.public, golden("delegation-signature"), DELEGATION_CONTEXT, line)
    assert DELEGATION.signature == golden("delegation-signature")
