"""gRPC's own services beside ours: health, also while a coordinator drains, and reflection."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.hosted import Hosted

from fanin.server.service import CONTROL_SERVICE, FLEET_SERVICE

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    started = Hosted(tmp_path).start()
    yield started
    started.stop()


def channel(host: Hosted) -> grpc.Channel:
    return grpc.secure_channel(host.address, grpc.ssl_channel_credentials(host.ca))


@pytest.mark.parametrize("service", ["", FLEET_SERVICE, CONTROL_SERVICE])
def test_a_watcher_is_told_that_a_coordinator_serves_and_that_it_goes(host: Hosted, service: str) -> None:
    with channel(host) as line:
        watched = health_pb2_grpc.HealthStub(line).Watch(health_pb2.HealthCheckRequest(service=service), timeout=20.0)
        assert next(watched).status == SERVING
        host.stop()
        assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_the_protocol_can_be_looked_at_without_a_token(host: Hosted) -> None:
    with channel(host) as line:
        stub = reflection_pb2_grpc.ServerReflectionStub(line)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (reply,) = stub.ServerReflectionInfo(iter((request,)), timeout=20.0)
        names = {service.name for service in reply.list_services_response.service}
        assert {FLEET_SERVICE, CONTROL_SERVICE, "grpc.health.v1.Health"} <= names
