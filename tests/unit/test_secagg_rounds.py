"""Rounds of secure aggregation on a virtual clock: real coordinator, devices and journals, no network."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from support.nightly import in_ci
from support.secagg import SUMS, UPLOAD, outcome, plan_of

from fanin.protos.messages import CodecSpec, StageSpec, UpdateState

NUM_DEVICES = 6
LEAST = 4


def gone(call: str, devices: Collection[int] = (1, 4)) -> dict[int, dict[str, object]]:
    return {device: {"gone_at": call} for device in devices}


@pytest.mark.parametrize(("codec", "stages"), [("fixed32", ()), ("int8", ()), ("int8", ("error_feedback",))])
def test_the_masked_sum_is_the_plain_one(tmp_path: Path, codec: str, stages: tuple[str, ...]) -> None:
    plans = [plan_of(name, NUM_DEVICES, NUM_DEVICES) for name in ("plain", "secagg")]
    specs = tuple(StageSpec(name=name) for name in stages)
    plans = [replace(each, codec=CodecSpec(name=codec, max_shift=0), stages=specs) for each in plans]
    plain, masked = (outcome(each, tmp_path / each.round.protocol) for each in plans)
    assert masked == plain
    assert len(masked.versions) == 1
    assert plain.sums[0][SUMS.index("evaluation")] is not None


@pytest.mark.parametrize("call", ["sharing", UPLOAD, "training", "unmasking"])
def test_two_devices_that_vanish_in_a_phase_leave_the_sum_of_the_others(tmp_path: Path, call: str) -> None:
    masked = outcome(plan_of("secagg", NUM_DEVICES, LEAST, dropout_fraction=0.34), tmp_path / "masked", gone(call))
    # An Update counts once it is committed, whatever its device does afterwards.
    in_the_clear = gone(UPLOAD) if call in ("sharing", UPLOAD) else {}
    plain = outcome(plan_of("plain", NUM_DEVICES, LEAST), tmp_path / "plain", in_the_clear)
    assert masked == plain
    assert len(masked.closed[0]) == (LEAST if in_the_clear else NUM_DEVICES)


@pytest.mark.parametrize("call", in_ci(["advertising", "sharing", UPLOAD, "unmasking"], {"unmasking"}))
def test_a_round_below_a_threshold_says_what_was_missing_and_the_next_one_works(tmp_path: Path, call: str) -> None:
    lines = {device: {"gone_at": call, "gone_s": 700.0} for device in range(4)}
    result = outcome(plan_of("secagg", NUM_DEVICES, LEAST, dropout_fraction=0.34), tmp_path, lines)
    missing = (
        "2 updates within 600 s, expected at least 4"
        if call == UPLOAD
        else f"2 messages in the phase {call}, expected at least 4"
    )
    assert [missing in failure for failure in result.failures] == [True], result.failures
    assert len(result.closed[0]) == NUM_DEVICES


def test_a_masked_update_after_the_closed_set_is_discarded(tmp_path: Path) -> None:
    """It comes while the others still unmask the sum without it. Its device takes part in the next Round."""
    replies: list[UpdateState] = []
    late = {1: {"gone_at": UPLOAD, "gone_s": 20.0, "replies": replies}}
    others = {device: {"gone_at": "unmasking", "gone_s": 50.0} for device in (0, 2, 3, 4, 5)}
    masked = outcome(plan_of("secagg", NUM_DEVICES, 5, 2, dropout_fraction=0.2), tmp_path / "masked", late | others)
    plain = outcome(plan_of("plain", NUM_DEVICES, 5), tmp_path / "plain", {1: {"gone_at": UPLOAD}})
    assert (masked.versions[0], masked.closed[0]) == (plain.versions[0], plain.closed[0])
    assert (replies, masked.failures) == ([UpdateState.DISCARDED, UpdateState.ACCEPTED], ())


@pytest.mark.nightly
@pytest.mark.parametrize("tenth", [10, 100])
def test_a_tenth_of_a_hundred_or_a_thousand_devices_vanishes_in_each_phase(tmp_path: Path, tenth: int) -> None:
    calls = ["sharing", UPLOAD, "training", "unmasking"]
    lines = {tenth * number + index: {"gone_at": call} for number, call in enumerate(calls) for index in range(tenth)}
    num, least = 10 * tenth, 6 * tenth
    masked = outcome(plan_of("secagg", num, least, dropout_fraction=0.4), tmp_path / "masked", lines)
    absent = {device: {"gone_at": UPLOAD} for device, line in lines.items() if line["gone_at"] in calls[:2]}
    plain = outcome(plan_of("plain", num, least), tmp_path / "plain", absent)
    assert masked == plain
    assert len(masked.closed[0]) == 8 * tenth
