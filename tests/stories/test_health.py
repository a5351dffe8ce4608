"""The standard services of gRPC: health, also while a coordinator drains, and reflection."""

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.hosted import Hosted

from fanin.server.access.interceptors import MAX_OPEN_BYTES, MAX_OPEN_CALLS
from fanin.server.service import CONTROL_SERVICE, FLEET_SERVICE

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    hosted = Hosted(tmp_path).start()
    yield hosted
    hosted.stop()


def open_channel(host: Hosted) -> grpc.Channel:
    return grpc.secure_channel(host.address, grpc.ssl_channel_credentials(host.ca))


@pytest.mark.parametrize("service", ["", FLEET_SERVICE, CONTROL_SERVICE])
def test_a_watch_reports_that_a_coordinator_serves_and_that_it_stops(host: Hosted, service: str) -> None:
    with open_channel(host) as channel:
        replies = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=service), timeout=20.0
        )
        assert next(replies).status == SERVING
        host.stop()
        assert next(replies).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_the_protocol_can_be_inspected_without_a_token(host: Hosted) -> None:
    with open_channel(host) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (reply,) = stub.ServerReflectionInfo(iter((request,)), timeout=20.0)
        names = {service.name for service in reply.list_services_response.service}
        assert {FLEET_SERVICE, CONTROL_SERVICE, "grpc.health.v1.Health"} <= names


OPEN_METHODS = ["grpc.health.v1.Health/Check", "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]


@pytest.mark.parametrize("method", OPEN_METHODS)
def test_garbage_without_a_credential_is_refused_like_any_other_call(
    host: Hosted, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    caplog.set_level("INFO")
    with open_channel(host) as channel:
        call: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(f"/{method}")
        with pytest.raises(grpc.RpcError) as excinfo:
            call(iter((b"\xff\xff",)), timeout=20.0)
        assert excinfo.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    # The log of refused calls is limited. gRPC's own log would have a traceback for each call.
    assert [(record.name, record.exc_info) for record in caplog.records] == [("fanin.server.access", None)]


def test_calls_without_a_credential_are_small_and_few(host: Hosted) -> None:
    with open_channel(host) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch
        with pytest.raises(grpc.RpcError) as excinfo:
            next(watch(health_pb2.HealthCheckRequest(service="x" * MAX_OPEN_BYTES), timeout=20.0))
        assert excinfo.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        watches = [
            watch(health_pb2.HealthCheckRequest(service=str(each)), timeout=60.0) for each in range(MAX_OPEN_CALLS)
        ]
        assert {next(each).status for each in watches} == {health_pb2.HealthCheckResponse.SERVICE_UNKNOWN}
        with pytest.raises(grpc.RpcError) as excinfo:
            next(watch(health_pb2.HealthCheckRequest(), timeout=20.0))
        assert excinfo.value.code() is grpc.StatusCode.UNAVAILABLE
        for each in watches:
            each.cancel()
        # The places are free again, and devices were served all the time.
        deadline = time.monotonic() + 20.0
        while True:
            try:
                assert next(watch(health_pb2.HealthCheckRequest(), timeout=20.0)).status == SERVING
                break
            except grpc.RpcError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
