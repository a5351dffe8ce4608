"""A coordinator whose state cannot be written: the cause that operators read, and the health service."""

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support import federations as f
from support.processes import Site, limit_files

from fanin.edge.files import DISK_PROBLEMS
from fanin.protos.errors import StorageFull
from fanin.server.health import CHECK_S
from fanin.server.service import CONTROL_SERVICE, FLEET_SERVICE

Status = health_pb2.HealthCheckResponse
SERVICES = ("", FLEET_SERVICE, CONTROL_SERVICE)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A folder for a coordinator's process, which is killed at the end."""
    site = Site(tmp_path)
    yield site
    site.close()


@contextmanager
def health(site: Site) -> Iterator[health_pb2_grpc.HealthStub]:
    """Yield the health service of a coordinator."""
    with grpc.secure_channel(site.address, grpc.ssl_channel_credentials(site.ca)) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def await_status(stub: health_pb2_grpc.HealthStub, status: int) -> float:
    """Wait until all services have a status. Return the seconds."""
    began_s = time.monotonic()
    requests = [health_pb2.HealthCheckRequest(service=service) for service in SERVICES]
    while {stub.Check(request, timeout=10.0).status for request in requests} != {status}:
        assert time.monotonic() - began_s < 30.0, "the health does not change"
        time.sleep(0.05)
    return time.monotonic() - began_s


@pytest.mark.nightly
def test_health_follows_whether_the_state_can_be_written(site: Site) -> None:
    coordinator = site.serve()
    bundle = f.bundle_in(site.folder, f.SMALL_SHAPES)
    with health(site) as stub, site.operator() as operator:
        await_status(stub, Status.SERVING)
        limit_files(coordinator, (site.state / "fanin.db-wal").stat().st_size)
        assert await_status(stub, Status.NOT_SERVING) < CHECK_S + 3.0
        problem = DISK_PROBLEMS[errno.EFBIG]
        assert f"reports NOT_SERVING: {site.state}/fanin.db: cannot be written: {problem}" in coordinator.text()
        with pytest.raises(StorageFull):
            operator.publish_bundle(bundle)
        # The cause has gone, and no call comes that could find out.
        limit_files(coordinator, 0)
        await_status(stub, Status.SERVING)
        operator.publish_bundle(bundle)
    assert coordinator.text().count("reports NOT_SERVING") == coordinator.text().count("reports SERVING") == 1
