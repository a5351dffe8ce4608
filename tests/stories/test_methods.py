"""FedNova, q-FedAvg and FedDyn over gRPC: two devices, a killed coordinator, a rollback, and recomputed Versions."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from support.hosted import Hosted
from support.models import PUBLISHER, app_of, export_bundle, samples
from support.values import plan

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.client import Client, ClientOptions, ClientParts
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.clients.device.training.work import WorkLimit
from fanin.clients.transport import Connection, GrpcTransport
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import Recipe, Sgd
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.messages import Adopt, Command, Pause
from fanin.protos.plans import Plan
from fanin.server.aggregation.parameters import parameter_pieces, state_slices
from fanin.server.aggregation.verify import verify_run
from fanin.server.folder import open_state
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import inline
from fanin.server.storage.stores import CoordinatorState

NUM_DEVICES = 2
STAGES = {
    "fednova": m.StageSpec(name="fednova"),
    "qfedavg": m.StageSpec(name="qfedavg", options={"q": 1.0}),
    "feddyn": m.StageSpec(name="feddyn", options={"num_devices": 3.0}),
}


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    recipe = Recipe(optimizer=Sgd(momentum=0.0), scaffold=True, proximal=True)
    return export_bundle(replace(app_of("mlp"), recipe=recipe))


@pytest.fixture(scope="module")
def plain_bundle() -> Bundle:
    return export_bundle(app_of("mlp"))


def plan_of(name: str) -> Plan:
    """Return the Plan of an algorithm, with int8 and error feedback after it."""
    base = plan(buffer=NUM_DEVICES, max_rounds=4)
    keys = {"outer_optimizer": name} if name == "feddyn" else {"rule": name}
    training = m.Training(epochs=2, learning_rate=0.1, seed=1, proximal_weight=0.1 if name == "feddyn" else 0.0)
    return replace(
        base,
        training=training,
        stages=(STAGES[name], m.StageSpec(name="error_feedback")),
        codec=m.CodecSpec(name="int8", max_shift=12),
        aggregation=replace(base.aggregation, **keys),  # type: ignore[arg-type]
    )


def send_update(host: Hosted, device: int) -> None:
    x, y = samples(45, seed=device)
    store = MemoryStore(train=Examples(inputs={"x": x}, y=y), validation=None, partition=device)
    with closing(Connection(host.address, host.ca)) as connection:
        cache = Cache(host.folder / f"device-{device}")
        work = WorkLimit(steps=4 + 3 * device)
        parts = ClientParts(
            transport=GrpcTransport(connection, cache.key()),
            cache=cache,
            trainer=RuntimeTrainer(open_runtime("onnx"), store, work=work),
            trusted=(PUBLISHER.public,),
            rng=Random(device),
        )
        Client(parts, ClientOptions(token=host.device_token, max_updates=1)).run()


def take_round(host: Hosted, following: int) -> None:
    """Run a Round with new clients, until the Round after it is open."""
    with ThreadPoolExecutor(NUM_DEVICES) as pool:
        list(pool.map(lambda device: send_update(host, device), range(NUM_DEVICES)))
    host.await_round("run", following)


def parameters_of(state: CoordinatorState, bundle: Bundle, number: int) -> Float32s:
    version = state.runs.version("run", number)
    assert version is not None
    return np.concatenate(list(parameter_pieces(state.blobs, version, bundle.manifest.table)))


@pytest.mark.parametrize("name", STAGES)
def test_a_run_over_grpc_survives_a_restart_and_is_recomputed(
    tmp_path: Path, bundle: Bundle, plain_bundle: Bundle, name: str
) -> None:
    host = Hosted(tmp_path).start()
    host.start_run(plan_of(name), bundle if name == "feddyn" else plain_bundle, PUBLISHER)
    take_round(host, following=2)
    host.stop()
    host.start()
    take_round(host, following=3)
    if name == "feddyn":
        with host.operator() as operator:
            operator.command(Command(command_id="pause", run_id="run", what=Pause()))
            what = Adopt(from_run_id="run", number=1, rounds=2)
            operator.command(Command(command_id="adopt", run_id="run", what=what))
        take_round(host, following=5)
    host.stop()
    state = open_state(host.state, Durability.PROCESS, (inline, inline), lambda: 0.0)
    verdicts = verify_run(state, "run")
    assert [verdict.problem for verdict in verdicts if verdict.problem] == []
    assert len(list(verify_run(state, "run"))) == (5 if name == "feddyn" else 3)
    if name == "feddyn":
        # The drift began with 0 after the rollback: it is 2 of 3 devices times the mean change of the last Round.
        (drift,) = state_slices(state.blobs, state.rounds.outer_state("run", 4)).values()
        before, after = (parameters_of(state, bundle, number) for number in (3, 4))
        moved = (after - before).astype(np.float64)
        np.testing.assert_allclose(np.concatenate(list(drift)), moved * (2 / 3) / (1 + 2 / 3), atol=1e-6)
