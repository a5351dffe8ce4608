"""The record of a simulation on a disk that damages or refuses files."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.models import app_of, samples

from fanin.clients.data.examples import Examples
from fanin.simulation import ClientFailed, Iid, Partition, Result, RoundRow, SimulationSettings, partition, simulate

PLAN = {"training.learning_rate": 0.1}
COHORT, ROUNDS = 3, 3


def clients() -> Partition:
    x, y = samples(60, seed=5)
    return partition(Examples(inputs={"x": x}, y=y), 6, Iid())


def run(folder: Path, on_round: Callable[[RoundRow], None] | None = None) -> Result:
    settings = SimulationSettings(plan=PLAN, resume=folder, quiet=True)
    settings = settings if on_round is None else replace(settings, on_round=on_round)
    return simulate(app_of("mlp"), clients(), cohort=COHORT, rounds=ROUNDS, settings=settings)


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: bytes(len(data)), lambda data: data[:-100]])
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
