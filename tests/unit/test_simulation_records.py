"""The record of a simulation on a disk that damages or refuses files."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.models import app_of, samples
from support.nightly import in_ci

from fanin.clients.data.examples import Examples
from fanin.protos.errors import Conflict
from fanin.simulation import (
    ClientFailed,
    ClientWork,
    Iid,
    Partition,
    Result,
    RoundRow,
    SimulationSettings,
    partition,
    simulate,
)

PLAN = {"training.learning_rate": 0.1}
COHORT, ROUNDS = 3, 3
DAMAGES = [lambda data: b"", lambda data: bytes(len(data)), lambda data: data[:-100]]


def clients() -> Partition:
    x, y = samples(60, seed=5)
    return partition(Examples(inputs={"x": x}, y=y), 6, Iid())


def run(folder: Path | None, on_round: Callable[[RoundRow], None] | None = None, **options: object) -> Result:
    settings = SimulationSettings(**{"plan": PLAN, "resume": folder, "quiet": True} | options)  # type: ignore[arg-type]
    settings = settings if on_round is None else replace(settings, on_round=on_round)
    return simulate(app_of("mlp"), clients(), cohort=COHORT, rounds=ROUNDS, settings=settings)


@pytest.mark.parametrize("damage", in_ci(DAMAGES, DAMAGES[2:]))
def test_a_damaged_result_is_computed_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    first = run(tmp_path / "record")
    for path in sorted((tmp_path / "record" / "trainings").iterdir())[::2]:
        path.write_bytes(damage(path.read_bytes()))
    again = run(tmp_path / "record")
    assert (again.failures, again.digests) == ((), first.digests)


def test_a_record_that_cannot_be_written_ends_a_simulation_and_not_the_training_of_a_client(tmp_path: Path) -> None:
    """Otherwise the simulation would go on without the clients whose results cannot be recorded."""
    folder = tmp_path / "record" / "trainings"

    def replace_folder(row: RoundRow) -> None:
        if row.round == 1:
            shutil.rmtree(folder)
            folder.touch()

    text = r"simulate: resume: .*trainings cannot be written: Not a directory; then resume"
    with pytest.raises(ClientFailed, match=text) as failed:
        run(tmp_path / "record", replace_folder)
    assert [row.round for row in failed.value.result.rounds] == [0, 1]


@pytest.mark.parametrize(
    "other",
    [
        {"work": ClientWork(steps=lambda client, number: 1 + client % 2)},
        pytest.param(
            {"plan": {**PLAN, "statistics": [{"name": "train.version_loss", "bound": 10**9}]}},
            marks=pytest.mark.nightly,
        ),
        pytest.param({"plan": {**PLAN, "stages": [{"name": "evaluate_only"}]}}, marks=pytest.mark.nightly),
    ],
)
def test_a_record_with_other_trainings_changes_no_result(tmp_path: Path, other: dict[str, object]) -> None:
    """Twice: the record of the first one has no such training, and that of the second one has all of them."""
    run(tmp_path / "record")
    expected = run(None, **other)
    for _ in range(2):
        result = run(tmp_path / "record", **other)
        assert result.digests == expected.digests and result.failures == expected.failures
        assert [replace(row, seconds=0.0) for row in result.clients] == [
            replace(row, seconds=0.0) for row in expected.clients
        ]


def test_the_ranges_that_devices_count_are_recorded(tmp_path: Path) -> None:
    x, y = samples(20, seed=6)
    with_nll = {**PLAN, "evaluation.metrics": [{"name": "nll"}]}
    options = {"plan": {**with_nll, "int8.ranges": "devices"}, "test": Examples(inputs={"x": x}, y=y)}
    first, again = (run(tmp_path / "record", **options) for _ in range(2))
    assert [row.metrics["nll_int8"] for row in first.rounds] == [row.metrics["nll_int8"] for row in again.rounds]
    stale = run(None, **options | {"plan": with_nll})
    assert first.rounds[-1].metrics["nll_int8"] != stale.rounds[-1].metrics["nll_int8"]


def test_a_second_simulation_of_one_record_is_refused_at_once(tmp_path: Path) -> None:
    """Both would write the files of the other one, and fail with an error about the disk."""
    refusals = []

    def try_again(row: RoundRow) -> None:
        with pytest.raises(Conflict) as refusal:
            run(tmp_path / "record")
        refusals.append(str(refusal.value))

    first = run(tmp_path / "record", try_again)
    text = f"{tmp_path / 'record'}: in use by process {os.getpid()}; wait for that simulation to end, or give another "
    assert refusals == [f"{text}folder to resume"] * (ROUNDS + 1)
    assert run(tmp_path / "record").digests == first.digests


def test_the_baseline_takes_the_steps_of_all_examples_whatever_their_weight() -> None:
    app = app_of("mlp")
    settings = SimulationSettings(plan={**PLAN, "aggregation.max_examples": 1}, baseline=True, quiet=True)
    result = simulate(app, clients(), cohort=COHORT, rounds=1, settings=settings)
    num_examples = [row.num_examples for row in result.clients]
    assert min(num_examples) > 1 and result.rounds[1].num_examples == sum(num_examples)
    assert result.baseline[-1].num_steps == sum(-(-number // app.batch_size) for number in num_examples)
