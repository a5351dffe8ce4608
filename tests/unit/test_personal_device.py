"""Personal parameters on a device: each training begins with the last ones, and none is sent. Kills change no bit."""

import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.staged import EXPONENT, NUM, SCAFFOLD, Course, Killed, Moments, course, take_part

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.contract import Countdown, check_trainer, example_assignment, example_model
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.storage.personal import local_values
from fanin.clients.device.updates import Change, Trainer
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.simulation import SyntheticTrainer

LOCAL = {"head.bias": (3,), "head.weight": (2, 3)}
NUM_LOCAL = 9
STATES = [(0, 0)] * 4
"""A Run without stages: no Assignment names a state, whether the Rounds are published, fail or follow a rollback."""


def personal_course(folder: Path, stages: tuple[m.StageSpec, ...] = ()) -> Course:
    return course(folder, STATES, stages, local=LOCAL)


def trained(fleet: Course, works: Sequence[m.Assignment]) -> tuple[Mapping[int, bytes], Float32s]:
    """Compute (the payloads by Round, the last personal parameters): each training begins with those of the last."""
    model, payloads = example_model(fleet.bundle), {}
    for work in works:
        change = SyntheticTrainer(partition=0).train(model, work, Countdown())
        payloads[work.round] = np.rint(change.values.astype(np.float64) / 2.0**EXPONENT).astype("<i4").tobytes()
        model = replace(model, local=change.local)
    assert model.local is not None
    return payloads, model.local


def stored(fleet: Course, folder: Path, before: int | None = None) -> Float32s | None:
    return local_values(Cache(folder / "device").locals, fleet.bundle, "run", before)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "device" / "locals").iterdir())


def test_each_training_begins_with_the_personal_parameters_after_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = personal_course(tmp_path)
    payloads, last = trained(fleet, list(fleet.works))
    assert take_part(fleet, tmp_path) == payloads
    assert fleet.failures == []
    np.testing.assert_array_equal(stored(fleet, tmp_path), last)
    # The personal parameters before the last training are kept, so that it can be repeated.
    assert files(tmp_path) == ["run.3.state", "run.4.state"]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_an_update_has_no_room_for_personal_parameters(tmp_path: Path) -> None:
    fleet = personal_course(tmp_path)
    take_part(fleet, tmp_path)
    assert [len(payload) for payload in fleet.payloads.values()] == [4 * NUM] * 4
    assert [spec.name for spec in fleet.table.specs] == ["a", "b"]
    # The device downloads the initial personal parameters with the graphs.
    assert fleet.bundle.manifest.local is not None
    initial = fleet.bundle.manifest.artifacts[fleet.bundle.manifest.local.initial]
    assert {ref.sha256 for ref in initial.chunks} <= fleet.served


@pytest.mark.heavy
def test_a_device_that_is_killed_at_any_moment_sends_and_keeps_the_same_bits(tmp_path: Path) -> None:
    fleet, moments = personal_course(tmp_path / "whole"), Moments()
    works = list(fleet.works)
    payloads, last = trained(fleet, works)
    assert take_part(fleet, tmp_path / "whole", moments=moments) == payloads
    first = moments.names.index("StateStore.put")
    names = ["StateStore.put", "UpdateStore.put", "TrainingStore.clear", "StateStore.keep", "Course.upload"]
    assert moments.names[first : first + 5] == names
    for number, name in enumerate(moments.names, start=1):
        folder = tmp_path / str(number)
        repeat = Course(bundle=fleet.bundle, works=list(works), chunks=fleet.chunks)
        with pytest.raises(Killed, match=f"^{name}$"):
            take_part(repeat, folder, moments=Moments(number))
        assert take_part(repeat, folder) == payloads, f"killed at moment {number}: {name}"
        np.testing.assert_array_equal(stored(repeat, folder), last)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 30), max_size=4))
@pytest.mark.heavy
def test_no_kills_change_a_bit(kills: list[int]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fleet = personal_course(folder)
        payloads, last = trained(fleet, list(fleet.works))
        for kill in kills:
            with suppress(Killed):
                take_part(fleet, folder, moments=Moments(kill))
        assert take_part(fleet, folder) == payloads
        np.testing.assert_array_equal(stored(fleet, folder), last)


def test_stages_and_personal_parameters_are_stored_side_by_side(tmp_path: Path) -> None:
    fleet = personal_course(tmp_path, (SCAFFOLD,))
    _, last = trained(fleet, list(fleet.works))
    take_part(fleet, tmp_path)
    assert fleet.failures == []
    # Two groups of shared parameters.
    assert [len(payload) for payload in fleet.payloads.values()] == [2 * 4 * NUM] * 4
    assert stored(fleet, tmp_path) is not None and last.shape == (NUM_LOCAL,)


def test_damaged_personal_parameters_are_logged_and_older_ones_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = personal_course(tmp_path)
    take_part(fleet, tmp_path)
    older = stored(fleet, tmp_path, before=4)
    path = tmp_path / "device" / "locals" / "run.4.state"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    np.testing.assert_array_equal(stored(fleet, tmp_path), older)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("personal parameters: state of run run, round 4: damaged on this disk: got the digest ")
    assert text.endswith("; older ones are used, or the initial ones of the bundle")
    assert stored(fleet, tmp_path, before=3) is None


def test_personal_parameters_of_another_bundle_are_never_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fleet = personal_course(tmp_path / "one")
    take_part(fleet, tmp_path / "one")
    other = course(tmp_path / "two", STATES, (), local={"head.bias": (3,)})
    assert local_values(Cache(tmp_path / "one" / "device").locals, other.bundle, "run") is None
    assert "got the tensors" in caplog.text


class Faulty:
    """A Trainer that returns wrong personal parameters."""

    runtime, graph_format = "faulty 1", "onnx"

    def __init__(self, local: Float32s | None) -> None:
        self._local = local

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        change = SyntheticTrainer(partition=0).train(model, assignment, should_continue)
        return replace(change, local=self._local)


FORM = ", expected float32 (9,); return them as Change.local [FN-0841]"


@pytest.mark.parametrize(
    ("local", "problem"),
    [
        (None, f"training: got none as personal parameters{FORM}"),
        (np.zeros(8, np.float32), f"training: got float32 (8,) as personal parameters{FORM}"),
        (np.zeros(9), f"training: got float64 (9,) as personal parameters{FORM}"),
        (
            np.full(9, np.nan, np.float32),
            (
                "training: personal parameters: got NaN or infinity, expected finite values; lower the learning rate "
                "[FN-0842]"
            ),
        ),
    ],
)
def test_a_trainer_without_usable_personal_parameters_sends_nothing(
    tmp_path: Path, local: Float32s | None, problem: str
) -> None:
    fleet = personal_course(tmp_path)
    fleet.works = fleet.works[:1]
    trainer: Trainer = Faulty(local)
    assert take_part(fleet, tmp_path, trainer) == {}
    assert fleet.failures == [problem]
    assert files(tmp_path) == []


class Forgetful:
    """A Trainer that returns nothing."""

    runtime, graph_format = "forgetful 1", "onnx"

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        return None  # type: ignore[return-value]  # the mistake of this trainer


def test_a_trainer_that_returns_no_change_gives_the_round_up(tmp_path: Path) -> None:
    fleet = personal_course(tmp_path)
    fleet.works = fleet.works[:1]
    assert take_part(fleet, tmp_path, Forgetful()) == {}
    assert fleet.failures == ["training: the trainer returned NoneType, expected a Change [FN-0841]"]


def test_the_contract_of_a_trainer_covers_personal_parameters(tmp_path: Path) -> None:
    bundle = personal_course(tmp_path).bundle
    check_trainer(SyntheticTrainer(partition=0), example_model(bundle), example_assignment(bundle))
    with pytest.raises(AssertionError, match="local: got None, expected"):
        check_trainer(Faulty(None), example_model(bundle), example_assignment(bundle))
