"""Runs with Nesterov momentum through the production coordinator: the state is durable and belongs to a Version."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import text
from support.outside import install_module
from support.staleness import TABLE, assignment, settle, update
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.messages import Adopt, Command, Pause
from fanin.protos.plans import Plan, ScheduledChange
from fanin.server.aggregation.outer import Nesterov
from fanin.server.aggregation.parameters import load_parameters, state_slices
from fanin.server.aggregation.verify import Verdict, verify_run
from fanin.server.storage.disk import Durability
from fanin.server.storage.sqlite.engine import open_engine
from fanin.simulation import LoopbackTransport, run_virtual

NESTEROV = plan(
    concurrency=2, buffer=2, quorum=2, max_rounds=9, outer_optimizer="nesterov",
    outer_options={"learning_rate": 0.5, "momentum": 0.8},
)  # fmt: skip
SIZES = (0.01, 0.03, -0.02, 0.05)
"""The change of every parameter by both devices in each Round."""


async def take_round(place: Place, size: float) -> None:
    for device in "ab":
        work = await assignment(place, device)
        header, payload = update(work, size)
        transport = LoopbackTransport(fleet=place.coordinator, device=device, latency_s=0.01)
        reply = await transport.upload(
            header, lambda offset, size_bytes, data=payload: data[offset : offset + size_bytes]
        )
        assert reply.update_state is m.UpdateState.ACCEPTED
    await settle()


async def after_rounds(folder: Path, sizes: Sequence[float], plan: Plan = NESTEROV) -> Place:
    """Return a coordinator whose Run has completed these Rounds."""
    place = open_place(folder)
    await start(place.runs, bundle_in(folder), plan)
    await settle()
    for size in sizes:
        await take_round(place, size)
    return place


async def back_to(place: Place, command_id: str, number: int) -> None:
    """Roll back to a Version."""
    await place.runs.command(Command(command_id=f"pause-{command_id}", run_id="run", what=Pause()))
    await settle()
    adopt = Adopt(from_run_id="run", number=number, rounds=5)
    await place.runs.command(Command(command_id=command_id, run_id="run", what=adopt))
    await settle()


NUMBERED = """
class Numbered:
    tensors = ()

    def begin(self, parameters):
        return {}

    def step(self, state, parameters, aggregate, number):
        return state, parameters + number


def own(plan):
    return Numbered()
"""


async def newest(place: Place) -> Float32s:
    version = await place.state.stores.runs.newest_version("run")
    return load_parameters(place.state.blobs, version, TABLE)


def expected(sizes: Sequence[float], start_at: float = 0.0) -> float:
    """Return the parameters after these Rounds, computed in numpy without the grid's rounding."""
    optimizer, values = Nesterov(0.5, 0.8), np.array([start_at])
    state = optimizer.begin(values)
    for number, size in enumerate(sizes, start=1):
        state, values = optimizer.step(state, values, np.array([size]), number)
    return float(values[0])


def verdicts(place: Place) -> list[Verdict]:
    return list(verify_run(place.state, "run"))


def test_momentum_continues_over_rounds_and_restarts(tmp_path: Path) -> None:
    async def main() -> None:
        place = await after_rounds(tmp_path, ())
        for index, size in enumerate(SIZES):
            if index == 2:
                await place.runs.stop()
                place = open_place(tmp_path)
                await place.runs.start()
                await settle()
            await take_round(place, size)
            assert np.allclose(await newest(place), expected(SIZES[: index + 1]), rtol=1e-4)
        assert [verdict.problem for verdict in verdicts(place)] == [""] * 5
        await place.runs.stop()

    run_virtual(main())


def test_a_rollback_restores_the_momentum_of_its_version(tmp_path: Path) -> None:
    async def main() -> None:
        place = await after_rounds(tmp_path, SIZES[:3])
        await back_to(place, "1", 1)
        assert np.allclose(await newest(place), expected(SIZES[:1]), rtol=1e-4)
        await take_round(place, SIZES[3])
        # The result is the same as without the Rounds in between.
        assert np.allclose(await newest(place), expected((SIZES[0], SIZES[3])), rtol=1e-4)
        assert [verdict.problem for verdict in verdicts(place) if verdict.problem] == []
        await place.runs.stop()

    run_virtual(main())


def test_the_number_of_a_step_continues_at_the_version_of_a_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 1 and 2, a rollback to the Version after step 1, steps 2 and 3, and a step of a Version from outside."""
    (tmp_path / "site").mkdir()
    install_module(tmp_path / "site", ("own", "numbered_outer:own"), NUMBERED, "fanin.outer_optimizers")
    monkeypatch.syspath_prepend(tmp_path / "site")
    numbered = replace(NESTEROV, aggregation=replace(NESTEROV.aggregation, outer_optimizer="own", outer_options={}))

    async def main() -> None:
        place = await after_rounds(tmp_path, SIZES[:2], numbered)
        assert (await newest(place)).tolist() == [3.0] * TABLE.num_values
        await back_to(place, "1", 1)
        await take_round(place, SIZES[2])
        await place.runs.stop()
        place = open_place(tmp_path)
        await place.runs.start()
        await settle()
        await take_round(place, SIZES[3])
        assert (await newest(place)).tolist() == [1.0 + 2.0 + 3.0] * TABLE.num_values
        await back_to(place, "2", 3)
        await take_round(place, SIZES[0])
        assert (await newest(place)).tolist() == [1.0 + 2.0] * TABLE.num_values
        await back_to(place, "3", 0)
        await take_round(place, SIZES[0])
        assert (await newest(place)).tolist() == [1.0] * TABLE.num_values
        assert [verdict.problem for verdict in verdicts(place) if verdict.problem] == []
        await place.runs.stop()

    run_virtual(main())


def test_the_factor_of_the_schedule_applies_by_the_rounds_number(tmp_path: Path) -> None:
    schedule = (
        ScheduledChange(from_round=2, outer_factor=0.5, outer_decay=0.5),
        ScheduledChange(from_round=4, outer_factor=2.0),
    )
    plain = replace(NESTEROV.aggregation, outer_optimizer="fedavg", outer_options={})
    scheduled = replace(NESTEROV, aggregation=plain, schedule=schedule)

    async def main() -> None:
        place = await after_rounds(tmp_path, SIZES, scheduled)
        factors, total = (1.0, 0.5, 0.25, 2.0), 0.0
        for factor, size in zip(factors, SIZES, strict=True):
            total += factor * size
        assert np.allclose(await newest(place), total, rtol=1e-4)
        assert [verdict.problem for verdict in verdicts(place)] == [""] * 5
        await place.runs.stop()

    run_virtual(main())


def test_verify_finds_a_state_that_is_not_the_rounds(tmp_path: Path) -> None:
    async def main() -> None:
        place = await after_rounds(tmp_path, SIZES[:3])
        await place.runs.stop()
        engine = open_engine(tmp_path / "state" / "fanin.db", Durability.PROCESS)
        with engine.begin() as connection:
            statement = (
                "UPDATE outer_states SET artifact_proto = (SELECT artifact_proto FROM outer_states WHERE round = 1)"
            )
            connection.execute(text(f"{statement} WHERE round = 2"))
        assert [verdict.problem for verdict in verdicts(place)][:3] == [
            "",
            "",
            "round 2: recomputed another momentum of the outer optimizer",
        ]
        assert verdicts(place)[3].problem.startswith("round 3: recomputed ")
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM outer_states WHERE round = 2"))
        assert verdicts(place)[2].problem == "round 2: recorded the outer state [], not ['momentum']"
        engine.dispose()

    run_virtual(main())


def test_a_damaged_state_fails_the_round_with_a_reason(tmp_path: Path) -> None:
    async def main() -> None:
        place = await after_rounds(tmp_path, SIZES[:1])
        state = place.state.rounds.outer_state("run", 1)
        (ref,) = state["momentum"].chunks
        (values,) = state_slices(place.state.blobs, state)["momentum"]
        assert values.size == TABLE.num_values
        path = tmp_path / "state" / "blobs" / ref.sha256[:2] / ref.sha256
        path.write_bytes(bytes(len(path.read_bytes())))
        await take_round(place, SIZES[1])
        events = [record.event for record in place.state.runs.events("run")]
        reasons = [getattr(event, "reason", "") for event in events if type(event).__name__ == "RoundFailed"]
        assert reasons[:1] == ["version 1 is damaged on the coordinator's disk; the coordinator's log has the details"]
        await place.runs.stop()

    run_virtual(main())
