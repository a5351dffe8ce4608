"""``Rotation``: a population of clients of which only a part is present at a time."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.stage_runs import FEEDBACK, scaffold
from support.values import PUBLISHER
from support.virtual import SHAPES, plan
from torch import nn

from fanin.clients.data.examples import Examples
from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import App
from fanin.edge.tensors import Float32s
from fanin.protos.messages import Assignment, CodecSpec, RoundClosed
from fanin.protos.plans import Plan
from fanin.simulation import (
    Federation,
    Habits,
    Iid,
    Member,
    SimulationSettings,
    SyntheticTrainer,
    partition,
    run_virtual,
    simulate,
    synthetic_bundle,
)
from fanin.simulation.devices.availability import Stay
from fanin.simulation.federation.rotation import Rotation

UNSTEADY = Habits(work_s=(1.0, 20.0), cut=0.1, quit=0.1, stay_s=60.0, away_s=(1.0, 20.0))
STEADY = Habits(work_s=(1.0, 2.0))


class NoAvailability:
    """An Availability of a device that is always away."""

    def stays(self, rng: object) -> Iterator[Stay]:
        """See Availability."""
        yield 0.0, None


def closed_rounds(run_plan: Plan, bundle: Bundle, rotation: Rotation) -> list[RoundClosed]:
    """Run a federation of the rotation alone. Return its closed Rounds."""

    async def run() -> list[RoundClosed]:
        async with Federation(seed=5) as federation:
            await federation.start_run("run", run_plan, bundle, PUBLISHER)
            federation.join_rotation(rotation, bundle)
            events = [entry.event async for entry in federation.watch("run")]
        return [event for event in events if isinstance(event, RoundClosed)]

    return run_virtual(run())


def rotation_of(num: int, present: int, habits: Callable[[int], Habits], visitors: list[int] | None = None) -> Rotation:
    """Synthetic clients. ``visitors`` receives the index of each visitor."""

    def member(client: int) -> Member:
        if visitors is not None:
            visitors.append(client)
        trainer = SyntheticTrainer(partition=client % 100)
        return Member(device=f"client-{client}", trainer=trainer, habits=habits(client))

    return Rotation(num, present, member, seed=5)


def test_each_round_has_other_clients_of_a_million(tmp_path: Path) -> None:
    bundle = synthetic_bundle(tmp_path, PUBLISHER, SHAPES)
    run_plan = plan(quorum=8, buffer=8, concurrency=8, max_rounds=5)
    visitors: list[int] = []
    rounds = closed_rounds(run_plan, bundle, rotation_of(10**6, 12, lambda client: STEADY, visitors))
    clients = [device for event in rounds for device in event.accepted]
    assert len(rounds) == 5 and len(clients) == len(set(clients)) == 40
    # Only visitors were ever built, and the draws cover the whole range of indices.
    assert 40 <= len(visitors) <= 60 and max(visitors) - min(visitors) > 800_000
    repeat = closed_rounds(run_plan, bundle, rotation_of(10**6, 12, lambda client: STEADY))
    assert [event.accepted for event in repeat] == [event.accepted for event in rounds]


def test_clients_return_with_the_states_of_their_stages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A device without the state that its Assignment names would log a warning."""
    bundle = synthetic_bundle(tmp_path, PUBLISHER, SHAPES, scaffold=True)
    codec, stages = CodecSpec(name="int8", max_shift=0), (scaffold(9), FEEDBACK)
    run_plan = plan(stages=stages, codec=codec, concurrency=4, buffer=3, quorum=2, max_rounds=8)
    rounds = closed_rounds(run_plan, bundle, rotation_of(9, 6, lambda client: UNSTEADY))
    clients = [device for event in rounds for device in event.accepted]
    assert len(rounds) == 8 and len(set(clients)) < len(clients)
    warnings = [
        record for record in caplog.records if record.name == "fanin.clients" and record.levelno >= logging.WARNING
    ]
    assert [record.getMessage() for record in warnings] == []


class CheckingTrainer:
    """A Trainer that checks that each training begins with the personal parameters of the client's last training."""

    runtime, graph_format = "synthetic 1", "onnx"

    def __init__(self, client: int, last: dict[int, Float32s], returns: list[int]) -> None:
        self._client = client
        self._last = last
        self._returns = returns

    def train(self, model: OpenedModel, assignment: Assignment, should_continue: ShouldContinue) -> Change:
        change = SyntheticTrainer(partition=self._client).train(model, assignment, should_continue)
        if self._client in self._last:
            assert model.local is not None and np.array_equal(model.local, self._last[self._client])
            self._returns.append(self._client)
        assert change.local is not None
        self._last[self._client] = change.local
        return change


def test_clients_return_with_their_personal_parameters(tmp_path: Path) -> None:
    bundle = synthetic_bundle(tmp_path, PUBLISHER, SHAPES, local={"head": (3,)})
    last: dict[int, Float32s] = {}
    returns: list[int] = []

    def member(client: int) -> Member:
        return Member(device=f"client-{client}", trainer=CheckingTrainer(client, last, returns), habits=STEADY)

    run_plan = plan(quorum=3, buffer=3, concurrency=3, max_rounds=8)
    assert len(closed_rounds(run_plan, bundle, Rotation(9, 6, member, seed=5))) == 8
    assert len(returns) >= 8


def test_absent_clients_do_not_participate(tmp_path: Path) -> None:
    bundle = synthetic_bundle(tmp_path, PUBLISHER, SHAPES)
    run_plan = plan(quorum=4, buffer=4, concurrency=4, max_rounds=4)
    away_habits = Habits(work_s=STEADY.work_s, availability=NoAvailability())
    rounds = closed_rounds(run_plan, bundle, rotation_of(1000, 8, lambda client: away_habits if client % 3 else STEADY))
    indices = {int(device.removeprefix("client-")) for event in rounds for device in event.accepted}
    assert len(indices) == 16 and not any(index % 3 for index in indices)


def test_a_simulation_of_twelve_thousand_clients_finishes() -> None:
    """12,000 clients exceed ``Limits.max_parked``. If all were present at once, they would poll without end."""
    torch.manual_seed(0)
    x = torch.randn(24_000, 4)
    y = (x @ torch.randn(4, 3)).argmax(1)
    app = App(name="linear", module=nn.Linear(4, 3), calibration=x[:32], batch_size=2, num_classes=3)
    clients = partition(Examples(inputs={"x": x.numpy()}, y=y.numpy().astype(np.int32)), 12_000, by=Iid())
    settings = SimulationSettings(plan={"training.learning_rate": 0.1}, quiet=True)
    result = simulate(app, clients, cohort=20, rounds=3, settings=settings)
    assert [row.num_clients for row in result.rounds] == [0, 20, 20, 20]
    assert len({row.client for row in result.clients}) > 55
    assert simulate(app, clients, cohort=20, rounds=3, settings=settings).digests == result.digests
