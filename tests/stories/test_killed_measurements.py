"""A coordinator that is killed around a measurement of ranges: what it recorded is what its successor publishes.

The library of each life measures other ranges here, as another build or processor may.
"""

import random
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
from support.endings import NUM_DEVICES, Ending, begin, ending, work_times
from support.measured import FakeData, ranges
from support.mortal import Mortal
from support.nightly import in_ci
from support.virtual import plan

from fanin.edge.ranges import ranges_table
from fanin.edge.tensors import encode_parameters
from fanin.protos.chunks import artifact_of
from fanin.server.runs.recorded_setup import Parts
from fanin.simulation.federation.synthetic import ACTIVATION

NUM_MOMENTS = 50


def measured_in(life: int) -> Parts:
    """Return the parts of a coordinator whose library measures other ranges in each life."""
    return Parts(data=FakeData(lambda version: ranges(-1.0 - life, 1.0 + life)))


async def measure(folder: Path, kill_at: Collection[int], loses_power: bool = False) -> Ending:
    """Run two Rounds whose ranges the coordinator measures."""
    run_plan = plan(concurrency=NUM_DEVICES, buffer=NUM_DEVICES, quorum=NUM_DEVICES, max_rounds=2, ranges="data")
    mortal = Mortal(folder, kill_at, loses_power=loses_power, parts=measured_in)
    scene = await begin(mortal, folder, run_plan, work_times(10.0, 10.0))
    await scene.await_rest()
    return await scene.end({})


@pytest.fixture(scope="module")
def measured_ending(tmp_path_factory: pytest.TempPathFactory) -> Ending:
    """The ending of the undisturbed Run whose ranges the coordinator measures."""
    return ending(measure, tmp_path_factory.mktemp("measured"))


def ranges_digest(life: int) -> str:
    """Return the digest of the ranges that a life of the coordinator measures."""
    vector = np.array([-1.0 - life, 1.0 + life], np.float32)
    return artifact_of(encode_parameters(ranges_table([ACTIVATION]), vector)).sha256


@pytest.mark.parametrize(
    ("moment", "life"), [("before Fold", 1), ("after Fold", 0), ("before Publish", 0), ("after Publish", 0)]
)
def test_ranges_that_were_measured_before_a_kill_are_those_of_the_version(
    measured_ending: Ending, tmp_path: Path, moment: str, life: int
) -> None:
    digests_before = measured_ending.record[0]
    assert isinstance(digests_before, tuple)
    assert digests_before[1:] == (ranges_digest(0),)
    # In the last Round. ``end`` verifies the record, so a Version has the ranges that it keeps.
    last = max(number for number, name in enumerate(measured_ending.moments, 1) if name == moment)
    killed_ending = ending(measure, tmp_path, [last])
    assert killed_ending.kills == (moment,)
    assert killed_ending.record == ((digests_before[0], ranges_digest(life)), *measured_ending.record[1:])


@pytest.mark.parametrize("seed", in_ci(range(NUM_MOMENTS), range(NUM_MOMENTS // 16)))
def test_a_kill_around_a_measurement_changes_no_parameter_and_no_record(
    measured_ending: Ending, tmp_path: Path, seed: int
) -> None:
    moments = measured_ending.moments
    first, last = moments.index("before Fold"), len(moments) - 1 - moments[::-1].index("after Publish")
    number = random.Random(f"measured {seed}").randint(first, last) + 1
    killed_ending = ending(measure, tmp_path, [number], loses_power=seed % 2 == 1)
    assert killed_ending.kills
    (sha256, own), (expected, _) = killed_ending.record[0], measured_ending.record[0]
    assert (sha256, killed_ending.record[1:]) == (expected, measured_ending.record[1:])
    assert own in (ranges_digest(0), ranges_digest(1))
