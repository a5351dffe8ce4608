"""A device in another language needs only the .proto files: such a device takes part, and its Update is accepted."""

import ast
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from support import federations as f
from support import stranger as stranger_module
from support.hosted import Hosted
from support.stranger import CHUNK_BYTES, Stranger, update_of

from fanin.protos.messages import CodecSpec
from fanin.v1 import fleet_pb2 as pb


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    host = Hosted(tmp_path).start()
    yield host
    host.stop()


def test_the_device_imports_only_the_generated_code_of_fanin() -> None:
    tree = ast.parse(Path(stranger_module.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {name for name in modules if name and name.split(".")[0] in ("fanin", "support")} == {"fanin.v1"}


@pytest.mark.parametrize("codec", ["fixed32", "int16", "int8", "int4"])
def test_a_device_built_from_the_proto_files_moves_the_next_version(host: Hosted, tmp_path: Path, codec: str) -> None:
    # More than one Chunk, so that an upload can stop between two of them.
    rows = {"fixed32": 600, "int16": 1200, "int8": 2400, "int4": 4801}[codec]
    bundle = f.bundle_in(tmp_path, {"a": (rows, 500), "b": (3,)})
    plan = f.plan()
    cohort = replace(plan.cohort, concurrency=1, buffer=1, quorum=1)
    host.start_run(replace(plan, cohort=cohort, codec=CodecSpec(name=codec, max_shift=8)), bundle, f.PUBLISHER)
    device = Stranger(host.address, host.ca, bytes.fromhex(f.PUBLISHER.public))
    with closing(device):
        assert device.enroll(host.device_token) == device.device_id
        work = device.check_in().assigned
        # A check-in after a restart returns the same Assignment.
        assert device.check_in().assigned.assignment_id == work.assignment_id
        model = device.fetch(work)
        change = np.linspace(-0.5, 0.25, model.values.size, dtype=np.float32)
        header, payload = update_of(work, model, change, 7)
        assert len(payload) > CHUNK_BYTES
        reply = device.upload(header, payload, break_at=CHUNK_BYTES)
        assert (reply.update_state, reply.received_bytes) == (pb.UPDATE_STATE_RECEIVING, CHUNK_BYTES)
        assert device.report(work.assignment_id).update_state == pb.UPDATE_STATE_RECEIVING
        # The first reply of the second call names the complete Chunk that is stored already.
        assert device.upload(header, payload).update_state == pb.UPDATE_STATE_ACCEPTED
        assert device.report(work.assignment_id).update_state == pb.UPDATE_STATE_ACCEPTED
        # A second complete upload changes nothing.
        assert device.upload(header, payload).update_state == pb.UPDATE_STATE_ACCEPTED
    (version,) = host.published_versions()
    assert (version.number, version.total_examples) == (1, 7)
    assert version.bytes_up_resumed == CHUNK_BYTES
    step = 2.0 ** (max(work.grid.exponents) + max(header.shifts))
    with host.operator() as operator:
        parameters = operator.parameters(operator.version("run", 1).version)
    np.testing.assert_allclose(parameters, model.values + change, rtol=0.0, atol=step + 1e-6)


def test_the_same_signed_call_is_refused_by_name(host: Hosted) -> None:
    device = Stranger(host.address, host.ca, bytes.fromhex(f.PUBLISHER.public))
    request = pb.EnrollRequest(protocol=1, token=host.device_token, public_key=device.public_key)
    metadata = device.sign("Enroll", request.SerializeToString())
    with closing(device):
        device.fleet.Enroll(request, metadata=metadata, timeout=30.0)
        with pytest.raises(grpc.RpcError) as excinfo:
            device.fleet.Enroll(request, metadata=metadata, timeout=30.0)
    trailers = {item.key: item.value for item in excinfo.value.trailing_metadata()}
    assert (excinfo.value.code(), trailers["fanin-error"]) == (grpc.StatusCode.UNAVAILABLE, "Untimely")
    assert trailers["fanin-code"] == "FN-0019", "the code of the class: the log has which check failed"
    assert abs(int(trailers["fanin-server-time"]) - device.last_time_us) < 60_000_000
