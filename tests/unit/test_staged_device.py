"""A device whose Run has stages: the initial state of each Update, and bit-identical Updates after every crash."""

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.staged import (
    EXPONENT,
    FEEDBACK,
    NUM,
    SCAFFOLD,
    Course,
    Killed,
    Moments,
    course,
    scaffold,
    take_part,
)

from fanin.clients.device.contract import Countdown, example_model
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.simulation import SyntheticTrainer

PUBLISHED = [(0, 0), (0, 1), (0, 2), (0, 3)]
"""Every Round publishes a Version with the device's Update."""
FAILED = [(0, 0), (0, 1), (0, 1), (0, 3)]
"""Round 2 fails after the device has trained for it."""
ROLLED_BACK = [(0, 0), (0, 1), (2, 0), (2, 3)]
"""Version 2 is a rollback: a new lineage."""


def change_of(fleet: Course, work: m.Assignment) -> Float32s:
    """Return the change of the synthetic trainer for an Assignment."""
    return SyntheticTrainer(partition=0).train(example_model(fleet.bundle), work, Countdown()).values


def feedback(fleet: Course, works: Sequence[m.Assignment], lost: Sequence[int] = ()) -> Mapping[int, bytes]:
    """Compute the payloads of error feedback by Round. States of ``lost`` Rounds are missing on the device."""
    residuals: dict[tuple[int, int], Float32s] = {}
    payloads = {}
    for work in works:
        state = (work.state.lineage, work.state.round)
        before = residuals.get(state, np.zeros(NUM, np.float32))
        total = change_of(fleet, work) + before
        steps = np.rint(total.astype(np.float64) / 2.0**EXPONENT)
        payloads[work.round] = steps.astype("<i4").tobytes()
        if work.round not in lost:
            residuals[work.state.lineage, work.round] = (total - steps * 2.0**EXPONENT).astype(np.float32)
    return payloads


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "device" / "states").iterdir())


@pytest.mark.parametrize("states", [PUBLISHED, FAILED, ROLLED_BACK], ids=["published", "failed", "rolled back"])
def test_an_update_begins_with_the_state_that_its_assignment_names(
    tmp_path: Path, states: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = course(tmp_path, states)
    works = list(fleet.works)
    assert take_part(fleet, tmp_path) == feedback(fleet, works)
    assert fleet.failures == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    # The initial state of a lineage has no file.
    assert files(tmp_path) == [f"run.{number}.state" for number in sorted({states[-1][1], 4} - {0})]


def test_the_states_of_the_three_courses_matter(tmp_path: Path) -> None:
    payloads = []
    for name, states in (("a", PUBLISHED), ("b", FAILED), ("c", ROLLED_BACK)):
        fleet = course(tmp_path / name, states)
        payloads.append(dict(take_part(fleet, tmp_path / name)))
    assert payloads[0][2] == payloads[1][2] == payloads[2][2]
    assert len({payload[3] for payload in payloads}) == 3


ALL = [(0, 0), (0, 1), (0, 1), (3, 0)]
"""Round 1 publishes a Version, Round 2 fails, and Version 3 is a rollback."""


@pytest.mark.heavy
def test_a_device_that_is_killed_at_any_moment_sends_the_same_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = course(tmp_path / "whole", ALL)
    works, moments = list(fleet.works), Moments()
    expected = feedback(fleet, works)
    assert take_part(fleet, tmp_path / "whole", moments=moments) == expected
    first = moments.names.index("StateStore.put")
    stored = ["StateStore.put", "UpdateStore.put", "TrainingStore.clear", "StateStore.keep", "Course.upload"]
    assert moments.names[first : first + 5] == stored
    for number, name in enumerate(moments.names, start=1):
        folder = tmp_path / str(number)
        second = Course(bundle=fleet.bundle, works=list(works), chunks=fleet.chunks)
        with pytest.raises(Killed, match=f"^{name}$"):
            take_part(second, folder, moments=Moments(number))
        assert take_part(second, folder) == expected, f"killed at moment {number}: {name}"
        assert files(folder) == ["run.4.state"]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_device_that_is_killed_again_and_again_sends_the_same_bits(tmp_path: Path) -> None:
    fleet = course(tmp_path, ALL)
    expected = feedback(fleet, list(fleet.works))
    num_lives = 0
    while fleet.works:
        num_lives += 1
        try:
            # A Round has about 13 moments, so most lives end before the upload.
            take_part(fleet, tmp_path, moments=Moments(1 + num_lives % 14))
        except Killed:
            continue
    assert num_lives > 10
    assert fleet.payloads == expected


FATES = st.lists(st.sampled_from(["published", "failed", "rolled back"]), min_size=2, max_size=6)
KILLS = st.lists(st.integers(1, 40), max_size=4)


@settings(max_examples=15)
@given(FATES, KILLS)
@pytest.mark.heavy
def test_no_course_of_a_run_and_no_kills_change_a_bit(fates: list[str], kills: list[int]) -> None:
    states = [(0, 0)]
    for number, fate in enumerate(fates, start=1):
        lineage, last = states[-1]
        states.append({"published": (lineage, number), "failed": (lineage, last), "rolled back": (number, 0)}[fate])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fleet = course(folder, states, (SCAFFOLD, FEEDBACK))
        expected = scaffold(fleet, list(fleet.works))
        for kill in kills:
            with suppress(Killed):
                take_part(fleet, folder, moments=Moments(kill))
        assert take_part(fleet, folder) == expected
        assert fleet.failures == []


def test_an_update_whose_payload_is_damaged_is_recomputed_from_the_same_state(tmp_path: Path) -> None:
    fleet = course(tmp_path, PUBLISHED)
    works = list(fleet.works)

    class Damaging(Moments):
        """Moments that damage the payload of Round 2 before its upload, and end the process."""

        def __call__(self, name: str) -> None:
            path = tmp_path / "device" / "updates" / f"{works[1].assignment_id}.payload"
            if name == "Course.upload" and path.exists():
                path.write_bytes(bytes(path.stat().st_size))
                raise Killed(name)

    with pytest.raises(Killed):
        take_part(fleet, tmp_path, moments=Damaging())
    assert files(tmp_path) == ["run.1.state", "run.2.state"]
    assert take_part(fleet, tmp_path) == feedback(fleet, works)


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change_format(path: Path) -> None:
    path.write_bytes(b"fanin-s2" + path.read_bytes()[8:])


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (remove, "got no file run.1.state, expected the one of that update"),
        (truncate, "damaged on this disk: got the digest"),
        (change_format, "got the format b'fanin-s2', expected b'fanin-s1'"),
    ],
)
def test_a_device_without_the_state_warns_once_and_begins_with_zeros(
    tmp_path: Path, harm: Callable[[Path], None], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = course(tmp_path, PUBLISHED)
    works = list(fleet.works)
    fleet.works = works[:1]
    take_part(fleet, tmp_path)
    harm(tmp_path / "device" / "states" / "run.1.state")
    fleet.works = works[1:]
    assert take_part(fleet, tmp_path) == feedback(fleet, works, lost=[1])
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert warning.startswith(f"state of run run, round 1: {text}")
    assert warning.endswith("; the stages begin with zeros")


def test_a_state_of_another_lineage_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fleet = course(tmp_path, [(0, 0), (1, 1)])
    works = list(fleet.works)
    assert take_part(fleet, tmp_path) == feedback(fleet, works)
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert warning == (
        "state of run run, round 1: got one of run run, lineage 0, round 1, expected run run, lineage 1, round 1; the "
        "stages begin with zeros"
    )


def test_without_stages_a_device_stores_no_state_and_needs_none(tmp_path: Path) -> None:
    fleet = course(tmp_path, [(0, 0), (0, 0)], stages=())
    take_part(fleet, tmp_path)
    assert sorted(fleet.payloads) == [1, 2]
    assert files(tmp_path) == []


def test_a_stage_without_tensors_looks_for_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_plain_stage(tmp_path / "site", monkeypatch)
    fleet, moments = course(tmp_path, [(0, 0), (0, 1)], stages=(m.StageSpec(name="plain"),)), Moments()
    take_part(fleet, tmp_path, moments=moments)
    assert sorted(fleet.payloads) == [1, 2]
    assert fleet.failures == []
    assert {"StateStore.get", "StateStore.put"} & set(moments.names) == set()
    assert files(tmp_path) == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


PLAIN = """
class Plain:
    tensors = ()

    def apply(self, vector, state, context):
        context.send(vector)
        return {}


def plain():
    return Plain()
"""


def install_plain_stage(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution with the stage ``plain``, which has no state."""
    info = site / "plain_stage-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "plain_stage.py").write_text(PLAIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plain_stage\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fanin.stages]\nplain = plain_stage:plain\n")
    monkeypatch.syspath_prepend(str(site))


def test_a_round_without_stages_leaves_the_states_of_the_run_alone(tmp_path: Path) -> None:
    fleet = course(tmp_path, PUBLISHED)
    works = list(fleet.works)
    fleet.works = [works[0], replace(works[1], stages=(), state=m.StageState())]
    take_part(fleet, tmp_path)
    assert sorted(fleet.payloads) == [1, 2]
    assert files(tmp_path) == ["run.1.state"]


def test_a_check_in_names_the_stages_of_the_device(tmp_path: Path) -> None:
    fleet = course(tmp_path, [])
    take_part(fleet, tmp_path)
    assert fleet.check_ins[0].capabilities.stages == (
        "error_feedback",
        "evaluate_only",
        "feddyn",
        "fednova",
        "qfedavg",
        "scaffold",
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"stages": (m.StageSpec(name="random_share"),)},
            (
                "plan: stages: got 'random_share', expected one of ['error_feedback', 'evaluate_only', 'feddyn', "
                "'fednova', 'qfedavg', 'scaffold'], which are installed here [FN-0210]"
            ),
        ),
        (
            {"stages": (replace(FEEDBACK, options={"share": 0.5}),)},
            "plan: stages: error_feedback: options.share: unknown option, expected none; remove it [FN-0216]",
        ),
        (
            {"codec": m.CodecSpec(name="int8", max_shift=4, options={"levels": 7})},
            "plan: codec.options.levels: unknown option, expected none; remove it [FN-0216]",
        ),
        (
            {"state": m.StageState(lineage=0, round=1)},
            (
                "assignment run.1.device: got the state of round 1, lineage 0, expected a round before 1 and a lineage "
                "up to version 0 [FN-0831]"
            ),
        ),
        (
            {"state": m.StageState(lineage=1, round=0)},
            (
                "assignment run.1.device: got the state of round 0, lineage 1, expected a round before 1 and a lineage "
                "up to version 0 [FN-0831]"
            ),
        ),
    ],
)
def test_an_assignment_that_no_device_could_begin_is_given_up(
    tmp_path: Path, fields: Mapping[str, object], text: str
) -> None:
    fleet = course(tmp_path, [(0, 0)], **fields)
    take_part(fleet, tmp_path)
    assert fleet.failures == [text]
    assert fleet.served == set()
