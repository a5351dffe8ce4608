"""Batch sizes chosen by a Plan: over gRPC, simulated with both engines, and a size that the Bundle lacks."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.commands import fanin_in_process
from support.hosted import Hosted
from support.models import PUBLISHER, app_of, bundle_of, samples
from support.values import plan

from fanin.clients.data.examples import Examples
from fanin.clients.data.npz import write_npz
from fanin.protos.errors import InvalidInput, InvalidPlan, UnsupportedModel
from fanin.protos.messages import Training
from fanin.protos.plans import ScheduledChange
from fanin.simulation import Partition, SimulationSettings, simulate

SIZE = 3
SIZED_PLAN = replace(
    plan(buffer=1, max_rounds=2), training=Training(epochs=1, learning_rate=0.05, seed=7, batch_size=SIZE)
)
SCHEDULED_PLAN = replace(SIZED_PLAN, schedule=(ScheduledChange(from_round=2, batch_size=20),))

X, Y = samples(60, seed=10)
EXAMPLES = Examples(inputs={"x": X}, y=Y)
CLIENTS = Partition(examples=EXAMPLES, indices=(np.arange(60),))
SETTINGS = SimulationSettings(plan=SIZED_PLAN, validation_fraction=0.2, quiet=True)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    """A coordinator, and the files that a device needs to join it."""
    host = Hosted(tmp_path).start()
    (tmp_path / "ca.pem").write_bytes(host.ca)
    (tmp_path / "token").write_text(host.device_token)
    (tmp_path / "publisher.pub").write_text(PUBLISHER.public)
    yield host
    host.stop()


@pytest.mark.nightly
def test_a_run_and_a_simulation_of_one_plan_end_in_the_same_parameters(
    host: Hosted, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_of("sizes")
    with pytest.raises(InvalidPlan, match=r"got training\.batch_size 5, but the bundle's train graphs are for 3, 8"):
        host.start_run(replace(SIZED_PLAN, training=replace(SIZED_PLAN.training, batch_size=5)), bundle, PUBLISHER)
    with pytest.raises(InvalidPlan, match=r"got schedule\.0\.batch_size 5, but the bundle's train"):
        host.start_run(replace(SIZED_PLAN, schedule=(ScheduledChange(from_round=4, batch_size=5),)), bundle, PUBLISHER)
    host.start_run(SCHEDULED_PLAN, bundle, PUBLISHER)
    write_npz(host.folder / "data.npz", EXAMPLES)
    words = ("--ca", host.folder / "ca.pem", "--token-file", host.folder / "token", "--max-updates", 2)
    files = ("--publisher", host.folder / "publisher.pub", "--data", host.folder / "data.npz", "--partition", 0)
    device = ("--server", host.address, "--state", host.folder / "device")
    outcome = fanin_in_process(capsys, monkeypatch)("join", *device, *words, *files, "--runtime", "onnx")
    assert outcome.status == 0, outcome
    assert [event.number for event in host.published_versions()] == [1, 2]
    with host.operator() as operator:
        parameters = operator.parameters(operator.version("run").version)
    result = simulate(app_of("sizes"), CLIENTS, settings=replace(SETTINGS, plan=SCHEDULED_PLAN, baseline=True))
    assert np.array_equal(parameters, result.parameters)
    # 48 examples in batches of 3, and then in batches of 20.
    assert [row.num_steps for row in result.baseline] == [0, 16, 19]
    assert np.abs(parameters - bundle.initial_parameters()).max() > 0.01


@pytest.mark.nightly
def test_a_simulation_trains_its_batch_size_by_both_engines() -> None:
    graph = simulate(app_of("sizes"), CLIENTS, settings=SETTINGS)
    vmap = simulate(app_of("sizes"), CLIENTS, settings=replace(SETTINGS, engine="vmap"))
    change = graph.parameters - bundle_of("sizes").initial_parameters()
    assert np.abs(vmap.parameters - graph.parameters).max() <= 1e-4 * np.abs(change).max()
    with pytest.raises(UnsupportedModel, match="FN-1111"):
        simulate(app_of("sizes"), CLIENTS, settings=replace(SETTINGS, plan=SCHEDULED_PLAN, engine="vmap"))
    plan_5 = replace(SIZED_PLAN, training=replace(SIZED_PLAN.training, batch_size=5))
    with pytest.raises(InvalidInput, match="batch_size 5, but the bundle's train graphs are for 3, 8, 20; choose"):
        simulate(app_of("sizes"), CLIENTS, settings=replace(SETTINGS, plan=plan_5))
