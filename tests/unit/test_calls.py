"""Signed calls: the bytes that the signature covers, and the id of a device."""

import hashlib
from dataclasses import fields, replace

from support.values import DEVICE_KEY, STRANGER

from fanin.protos.calls import DeviceCall, device_id_of

CALL = DeviceCall(method="/fanin.v1.Fleet/CheckIn", device_id="d", time_us=1700000000000000, body_sha256="ab")


def test_each_part_has_a_line() -> None:
    assert CALL.signed_bytes() == b"/fanin.v1.Fleet/CheckIn\nd\n1700000000000000\nab"


def test_each_part_is_under_the_signature() -> None:
    others = [
        replace(CALL, **{field.name: 1 if field.name == "time_us" else "other"}).signed_bytes()
        for field in fields(CALL)
    ]
    assert len({CALL.signed_bytes(), *others}) == 1 + len(fields(DeviceCall))


def test_a_devices_id_is_its_keys_digest() -> None:
    expected = hashlib.sha256(bytes.fromhex(DEVICE_KEY.public)).hexdigest()[:32]
    assert device_id_of(DEVICE_KEY.public) == expected
    assert device_id_of(DEVICE_KEY.public) != device_id_of(STRANGER.public)
