"""Callers that a coordinator must not serve, and commands that it must not execute: refused, without a trace.

A refused caller does not learn which check failed. The coordinator's log names the check.
"""

import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from support import federations as f
from support.hosted import Hosted
from support.peers import FLEET, Peer, sign
from support.snapshot import snapshot

from fanin.clients.operator import CONTROL, Operator
from fanin.clients.transport import CallOptions, Connection, GrpcTransport
from fanin.clients.versions import next_version
from fanin.edge.bundles.keys import SigningKey
from fanin.protos import messages as m
from fanin.protos.calls import AUTHORIZATION, BEARER
from fanin.protos.errors import (
    Conflict,
    InvalidBundle,
    InvalidInput,
    InvalidPlan,
    InvalidVersion,
    NotFound,
    Unauthenticated,
    Unavailable,
    Untimely,
    Untrusted,
)
from fanin.protos.wire import to_proto
from fanin.v1 import control_pb2, fleet_pb2

STRANGER = SigningKey(bytes(range(1, 33)))
FLEET_RPCS = fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].methods_by_name
CONTROL_RPCS = control_pb2.DESCRIPTOR.services_by_name["Control"].methods_by_name


@pytest.fixture
def connection(host: Hosted) -> Iterator[Connection]:
    """A connection of the test's own."""
    connection = Connection(host.address, host.ca)
    yield connection
    connection.close()


def call(connection: Connection, service: str, name: str, options: CallOptions) -> None:
    """Make an RPC of any kind with an empty request, and discard the replies."""
    method = {FLEET: FLEET_RPCS, CONTROL: CONTROL_RPCS}[service][name]
    parse = GetMessageClass(method.output_type).FromString
    body = GetMessageClass(method.input_type)().SerializeToString()
    path = f"{service}{name}"
    match method.client_streaming, method.server_streaming:
        case False, False:
            connection.unary(path, body, parse, options)
        case False, True:
            list(connection.unary_stream(path, body, parse, options))
        case True, False:
            connection.stream_unary(path, iter([body]), parse, options)
        case _:
            list(connection.stream_stream(path, iter([body]), parse, options))


def test_both_protocols_are_looped_over() -> None:
    assert len(FLEET_RPCS) == 6
    assert len(CONTROL_RPCS) == 18


@pytest.mark.parametrize("name", CONTROL_RPCS)
def test_every_control_call_needs_an_operators_token(
    host: Hosted, devices: list[Peer], connection: Connection, name: str
) -> None:
    before = snapshot(host.state)
    for metadata, code in (
        ((), "FN-0670"),
        (((AUTHORIZATION, f"{BEARER}wrong"),), "FN-0670"),
        (((AUTHORIZATION, host.operator_token),), "FN-0670"),
        # An enrollment token is valid for enrollment only, and a device's key for the calls of devices only.
        (((AUTHORIZATION, f"{BEARER}{host.device_token}"),), "FN-1493"),
        (sign(devices[0].key, name, b"").metadata, "FN-0670"),
    ):
        with pytest.raises(Unauthenticated, match=code):
            call(connection, CONTROL, name, CallOptions(metadata=metadata, timeout_s=20.0))
    assert snapshot(host.state) == before


@pytest.mark.parametrize("name", FLEET_RPCS)
def test_every_fleet_call_needs_a_devices_signature(
    host: Hosted, devices: list[Peer], connection: Connection, name: str
) -> None:
    device = devices[0]
    before = snapshot(host.state)
    good = sign(device.key, name, b"")
    unsigned = tuple(pair for pair in good.metadata if pair[0] != "fanin-signature-bin")
    for options in (
        replace(good, metadata=()),
        replace(good, metadata=unsigned),
        # Valid signatures, but over another method, other bytes or another device's name.
        sign(device.key, "Other", b""),
        sign(device.key, name, b"other"),
        sign(STRANGER, name, b"", device_id=device.device_id),
        sign(STRANGER, name, b""),
        replace(good, metadata=((AUTHORIZATION, f"{BEARER}{host.operator_token}"),)),
    ):
        # An empty Enroll has no public key, which its own check reports. No other request is read.
        with pytest.raises(InvalidInput if name == "Enroll" and options.metadata[1:] else Unauthenticated):
            call(connection, FLEET, name, options)
    # At another time. The time of an Enroll is checked after its bytes.
    with pytest.raises(InvalidInput if name == "Enroll" else Untimely):
        call(connection, FLEET, name, sign(device.key, name, b"", late_s=301.0))
    assert snapshot(host.state) == before


def refusal(host: Hosted, key: SigningKey, token: str = "") -> str:
    """Return the error for a device that enrolls with a token, or checks in without one."""
    connection = Connection(host.address, host.ca)
    try:
        transport = GrpcTransport(connection, key)
        with pytest.raises(Unauthenticated) as excinfo:
            if token:
                transport.enroll(token)
            else:
                capabilities = m.Capabilities(codecs=(), runtimes=(), graph_formats=())
                transport.check_in(m.CheckIn(protocol=m.PROTOCOL, capabilities=capabilities, wait_s=0.0))
        return str(excinfo.value)
    finally:
        connection.close()


def test_the_error_of_an_unknown_device_or_token_names_the_expected_one(
    host: Hosted, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    before = snapshot(host.state)
    for token, text in (
        ("wrong", "this coordinator has no token with this secret"),
        (host.operator_token, "the token admin is of a person with the role admin, expected an enrollment token"),
    ):
        assert refusal(host, STRANGER, token).startswith(f"{host.address}: enroll: {text}; ")
        assert f"enroll: {text}; " in caplog.text
    assert "not authenticated; it expects a device that enrolled there" in refusal(host, STRANGER)
    assert "which is not enrolled here" in caplog.text
    assert host.operator_token not in caplog.text
    assert snapshot(host.state) == before


def test_a_device_with_a_wrong_token_ends_with_a_clear_text(host: Hosted, tmp_path: Path) -> None:
    device = Peer(replace(host, device_token="wrong"), f.bundle_in(tmp_path), 0, tmp_path / "device")
    with pytest.raises(Conflict, match="FN-0670"):
        device.take_part()


def test_a_key_cannot_enroll_for_another(host: Hosted, devices: list[Peer], connection: Connection) -> None:
    before = snapshot(host.state)
    enrollment = m.Enrollment(protocol=m.PROTOCOL, token=host.device_token, public_key=devices[0].key.public)
    body = to_proto(enrollment, fleet_pb2.EnrollRequest).SerializeToString()
    for options in (sign(STRANGER, "Enroll", body), sign(STRANGER, "Enroll", body, device_id=devices[0].device_id)):
        with pytest.raises(Unauthenticated):
            connection.unary(f"{FLEET}Enroll", body, fleet_pb2.EnrollReply.FromString, options)
    assert snapshot(host.state) == before


@pytest.mark.parametrize("offset_s", [-3600, 3600])
def test_a_clock_an_hour_off_corrects_itself(
    host: Hosted, connection: Connection, offset_s: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    clock = Clock(offset_s)
    transport = GrpcTransport(connection, SigningKey(bytes(range(2, 34))), clock)
    assert transport.enroll(host.device_token)
    (skew_s,) = re.findall(r"got a time (-?[\d.]+) s from this clock, expected -300 to 2", caplog.text)
    assert abs(float(skew_s) - offset_s) <= 1.0
    # The next call is right at once, until the clock is set forward. A stream then asks for another try.
    with pytest.raises(NotFound):
        transport.report(m.Report(assignment_id="run.1.00"))
    assert caplog.text.count("from this clock") == 1
    clock.offset_s += 3600.0
    request = m.Download(assignment_id="run.1.00", sha256="0" * 64, offset=0)
    with pytest.raises(Unavailable, match="FN-0820"):
        list(transport.download(request))
    with pytest.raises(NotFound):
        list(transport.download(request))
    # After the clock is set back, signing continues from its last time, which no call has used.
    clock.offset_s -= 3600.0
    with pytest.raises(NotFound):
        list(transport.download(request))


@dataclass
class Clock:
    """A clock that is off by some seconds."""

    offset_s: float

    def __call__(self) -> float:
        """Return the seconds since the Unix epoch by this device's clock."""
        return time.time() + self.offset_s


def test_the_error_of_a_wrong_operator_token_names_the_expected_one(host: Hosted) -> None:
    with host.operator(token="wrong") as operator, pytest.raises(Unauthenticated) as excinfo:
        operator.runs()
    assert str(excinfo.value).startswith(f"{host.address}: control: this coordinator has no token with this secret; ")


def test_the_same_start_twice_is_one_run_and_another_one_is_a_conflict(host: Hosted, devices: list[Peer]) -> None:
    bundle = devices[0].bundle
    before = snapshot(host.state)
    assert host.start_run(f.plan(), bundle, f.PUBLISHER).run_id == "run"
    with pytest.raises(
        Conflict,
        match="FN-0604",
    ):
        host.start_run(f.plan(num_rounds=9), bundle, f.PUBLISHER)
    with host.operator() as operator:
        assert [info.run_id for info in operator.runs()] == ["run"]
    assert snapshot(host.state) == before


def test_a_run_that_its_publisher_did_not_sign_is_refused(host: Hosted, devices: list[Peer]) -> None:
    with host.operator() as operator:
        before = snapshot(host.state)
        with pytest.raises(InvalidVersion, match="FN-0370"):
            operator.start_run("foreign", f.plan(), devices[0].bundle, STRANGER)
        with pytest.raises(InvalidInput, match="FN-0105"):
            operator.start_run("a/b", f.plan(), devices[0].bundle, STRANGER)
        with pytest.raises(NotFound, match="FN-0610"):
            operator.run("none")
        after = snapshot(host.state)
    # The key that was prepared for the Run remains, as it would for a publisher who signs later.
    assert {**after.rows, "run_keys": []} == {**before.rows, "run_keys": []}
    assert after.files == before.files


def test_a_bundle_whose_manifest_or_artifact_was_changed_is_not_published(host: Hosted, devices: list[Peer]) -> None:
    ref = to_proto(
        m.BundleRef(
            manifest=devices[0].work.bundle.manifest,
            public_key=STRANGER.public,
            signature=devices[0].work.bundle.signature,
        ),
        fleet_pb2.BundleRef,
    )
    before = snapshot(host.state)
    with pytest.raises(InvalidBundle, match="FN-0302"):
        send(host, "PublishBundle", control_pb2.PublishBundleRequest(bundle=ref))
    with pytest.raises(InvalidInput, match="FN-0117"):
        send(host, "PutChunks", control_pb2.ChunkData(sha256="0" * 64, data=b"bytes"))
    assert snapshot(host.state) == before


def send(host: Hosted, name: str, request: Message) -> None:
    """Make one Control call with one request."""
    connection = Connection(host.address, host.ca)
    options = CallOptions(metadata=((AUTHORIZATION, f"{BEARER}{host.operator_token}"),), timeout_s=20.0)
    body, parse = request.SerializeToString(), GetMessageClass(CONTROL_RPCS[name].output_type).FromString
    try:
        if CONTROL_RPCS[name].client_streaming:
            connection.stream_unary(f"{CONTROL}{name}", iter([body]), parse, options)
        else:
            connection.unary(f"{CONTROL}{name}", body, parse, options)
    finally:
        connection.close()


def outside_version(operator: Operator, peer: Peer, publisher: SigningKey, value: float) -> tuple[m.Version, bytes]:
    """Return a Version from outside the Run, which follows the newest one."""
    parent = operator.version("run").version
    flat = np.full(f.NUM_VALUES, value, np.float32)
    return next_version(parent, flat, peer.bundle, publisher)


def test_no_version_is_published_while_a_round_is_open(host: Hosted, devices: list[Peer]) -> None:
    with host.operator() as operator:
        version, data = outside_version(operator, devices[0], f.PUBLISHER, 0.5)
        before = snapshot(host.state)
        with pytest.raises(Conflict, match="FN-0623"):
            operator.publish_version(version, data, 1)
    after = snapshot(host.state)
    # Its Chunks are content, known by their digest. They remain for the next try.
    assert after.rows == before.rows
    assert after.under("updates") == before.under("updates")


def test_after_all_that_the_run_ends_bit_identical_and_accepts_only_the_next_version(
    host: Hosted, devices: list[Peer], tmp_path: Path
) -> None:
    for device in devices:
        device.take_part()
    assert [event.version_sha256 for event in host.published_versions()] == f.expected_digests(tmp_path)
    with host.operator() as operator:
        version, data = outside_version(operator, devices[0], f.PUBLISHER, 0.5)
        foreign_version, _ = outside_version(operator, devices[0], STRANGER, 0.5)
        later_version, _ = next_version(version, np.full(f.NUM_VALUES, 0.5, np.float32), devices[0].bundle, f.PUBLISHER)
        tampered_version = replace(version, number=3, parent=2)
        short_version = replace(version, parameters=devices[0].work.bundle.manifest)
        with pytest.raises(InvalidVersion):
            operator.publish_version(foreign_version, data, 0)
        before = snapshot(host.state)
        for candidate, kind, text in (
            (foreign_version, InvalidVersion, "expected the publisher"),
            (later_version, Conflict, "got version 3 made from 2, expected 2 made from 1"),
            (tampered_version, InvalidVersion, "the signature does not match; it was changed after it was signed"),
            (short_version, InvalidVersion, "the signature does not match"),
        ):
            with pytest.raises(kind, match=text):
                operator.publish_version(candidate, data, 0)
        assert snapshot(host.state) == before
        assert operator.publish_version(version, data, 0).version == 2
        state = snapshot(host.state)
        assert operator.publish_version(version, data, 0).version == 2
        assert snapshot(host.state) == state
        other_version, other_data = next_version(
            devices[0].work.version, np.ones(f.NUM_VALUES, np.float32), devices[0].bundle, f.PUBLISHER
        )
        with pytest.raises(Conflict, match="FN-0624"):
            operator.publish_version(other_version, other_data, 0)
        assert snapshot(host.state).rows == state.rows


def test_a_plan_that_needs_an_input_which_the_bundle_lacks_is_refused(host: Hosted, devices: list[Peer]) -> None:
    plan = replace(f.plan(), training=replace(f.plan().training, proximal_weight=0.1))
    with host.operator() as operator:
        with pytest.raises(InvalidPlan, match="FN-0266"):
            operator.start_run("pulled", plan, devices[0].bundle, f.PUBLISHER)
        with pytest.raises(NotFound):
            operator.run("pulled")
        plan = replace(f.plan(), training=replace(f.plan().training, optimizer={"momentum": 0.5}))
        with pytest.raises(InvalidPlan, match="FN-0264"):
            operator.start_run("pulled", plan, devices[0].bundle, f.PUBLISHER)


def test_a_plan_for_another_batch_size_is_refused_and_one_for_the_bundles_own_is_not(
    host: Hosted, devices: list[Peer]
) -> None:
    bundle = devices[0].bundle
    size = bundle.manifest.batch_size
    plans = [replace(f.plan(), training=replace(f.plan().training, batch_size=value)) for value in (size + 1, size)]
    with host.operator() as operator:
        expected = rf"got training\.batch_size {size + 1}, but the bundle's train graphs are for {size}; choose one"
        with pytest.raises(InvalidPlan, match=expected):
            operator.start_run("batched", plans[0], bundle, f.PUBLISHER)
        with pytest.raises(NotFound):
            operator.run("batched")
        assert operator.start_run("batched", plans[1], bundle, f.PUBLISHER).plan == plans[1]


def test_a_call_that_the_coordinator_does_not_know_is_a_matter_of_releases(host: Hosted) -> None:
    options = CallOptions(metadata=((AUTHORIZATION, f"{BEARER}{host.operator_token}"),), timeout_s=20.0)
    with (
        closing(Connection(host.address, host.ca)) as connection,
        pytest.raises(Untrusted, match=r"does not know this call .*; compare the releases of fanin") as excinfo,
    ):
        connection.unary(f"{CONTROL}CheckNothing", b"", control_pb2.CheckPlanReply.FromString, options)
    assert excinfo.value.code == "FN-0817"
