"""Statistics of stale Updates: a Version has the weighted mean of the devices' values, not of their changes."""

from pathlib import Path
from typing import Final

import numpy as np
import pytest
from support.staleness import assignment, settle
from support.virtual import PUBLISHER, Place, open_place, plan, start

from fanin.clients.device.updates import Change, make_update
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos import messages as m
from fanin.protos.plans import Plan
from fanin.server.aggregation.parameters import load_parameters
from fanin.server.aggregation.verify import verify_run
from fanin.simulation import LoopbackTransport, run_virtual, synthetic_bundle

SHAPES: Final = {"first": (2,), "norm.num_batches_tracked": (), "norm.running_var": (3,), "weight": (2,)}
TABLE: Final = TensorTable.of(SHAPES)
VAR, COUNT = slice(3, 6), 2
OPTIMIZERS: Final = {
    "fedavg": {},
    "nesterov": {"outer_optimizer": "nesterov", "outer_options": {"learning_rate": 0.7, "momentum": 0.9}},
}


def buffered(buffer: int, max_staleness: int, **changes: object) -> Plan:
    return plan(
        concurrency=4, buffer=buffer, quorum=buffer, max_staleness=max_staleness, max_rounds=50, **changes
    )  # fmt: skip


async def open_run(folder: Path, run_plan: Plan) -> Place:
    place = open_place(folder)
    await start(place.runs, synthetic_bundle(folder / "bundle", PUBLISHER, SHAPES), run_plan)
    await settle()
    return place


async def parameters(place: Place) -> Float32s:
    version = await place.state.stores.runs.newest_version("run")
    return load_parameters(place.state.blobs, version, TABLE)


async def send(place: Place, device: str, work: m.Assignment, change: np.ndarray, num_examples: int) -> None:
    """Send the Update of a device with this change of all values (num_values,), and let the Round end."""
    trained = Change(values=change.astype(np.float32), counts={m.EXAMPLES: num_examples})
    header, payload = make_update(work, TABLE, trained, m.Telemetry(runtime="synthetic 1"))
    line = LoopbackTransport(fleet=place.coordinator, device=device, latency_s=0.01)
    reply = await line.upload(header, lambda offset, size_bytes: payload[offset : offset + size_bytes])
    assert reply.update_state is m.UpdateState.ACCEPTED
    await settle()


def change_to(var: float, before: Float32s) -> np.ndarray:
    """Return the change of a device whose variances become ``var``."""
    change = np.full(TABLE.num_values, 0.25)
    change[VAR] = var - before[VAR].astype(np.float64)
    change[COUNT] = 3
    return change


def problems(place: Place) -> list[str]:
    return [verdict.problem for verdict in verify_run(place.state, "run")]


def test_honest_variances_of_stale_updates_stay_within_those_of_the_devices(tmp_path: Path) -> None:
    async def main() -> None:
        place = await open_run(tmp_path, buffered(buffer=1, max_staleness=5))
        work = await assignment(place, "first")
        await send(place, "first", work, change_to(1.0, await parameters(place)), 10)
        base = await parameters(place)
        at_work = {device: await assignment(place, device) for device in "abc"}
        for device, var in (("a", 0.2), ("b", 0.1), ("c", 0.3)):
            await send(place, device, at_work[device], change_to(var, base), 10)
            assert np.allclose((await parameters(place))[VAR], var)
        assert problems(place) == [""] * 5
        await place.runs.stop()

    run_virtual(main())


@pytest.mark.parametrize("outer", OPTIMIZERS)
@pytest.mark.parametrize("max_staleness", [0, 3])
def test_statistics_are_the_weighted_mean_of_the_values_of_the_devices(
    tmp_path: Path, outer: str, max_staleness: int
) -> None:
    """numpy recomputes each Version from the values of the devices alone; the outer optimizer changes none of them."""

    async def main() -> None:
        buffer = 2 if max_staleness else 4
        place = await open_run(tmp_path, buffered(buffer, max_staleness, **OPTIMIZERS[outer]))
        rng, number, num_stale = np.random.default_rng(5), 0, 0
        held: dict[str, tuple[int, Float32s, m.Assignment]] = {}
        waiting: list[tuple[np.ndarray, float]] = []
        for turn in range(24):
            # A new device each time: a Round has one Update of each.
            while len(held) + len(waiting) < 4:
                name = f"device-{turn}-{len(held)}"
                held[name] = (number, await parameters(place), await assignment(place, name))
            oldest = min(held, key=lambda each: held[each][0])
            is_due = number - held[oldest][0] >= max_staleness
            device = oldest if is_due else str(rng.choice(sorted(held)))
            base_number, base, work = held.pop(device)
            values, num_examples = rng.uniform(0.001, 2.0, 3), int(rng.choice([1, 40, 3000]))
            change = np.full(TABLE.num_values, 0.01)
            change[VAR], change[COUNT] = values - base[VAR], rng.integers(1, 9)
            unit = round(256 / np.sqrt(1 + number - base_number)) if max_staleness else 1
            own = np.append(values, base[COUNT] + change[COUNT])
            waiting.append((own, float(num_examples * unit)))
            num_stale += number != base_number
            before = await parameters(place)
            await send(place, device, work, change, num_examples)
            if len(waiting) < buffer:
                continue
            rows, weights = zip(*waiting, strict=True)
            waiting, number = [], number + 1
            expected = np.average(rows, axis=0, weights=weights)
            after = await parameters(place)
            np.testing.assert_allclose(after[VAR], expected[:3], atol=2e-6, err_msg=str(turn))
            assert after[COUNT] == before[COUNT] + np.rint(expected[3] - before[COUNT])
        assert bool(num_stale) == bool(max_staleness)
        assert problems(place) == [""] * (number + 1)
        await place.runs.stop()

    run_virtual(main())
