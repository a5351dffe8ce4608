"""A device of a Run whose Versions have ranges: it downloads them, trains with them, and reports counts if asked to."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from support.staged import Course, course, take_part
from support.values import PUBLISHER

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.edge.bundles.versions import add_auxiliary
from fanin.edge.ranges import NUM_BINS, RANGES
from fanin.edge.tensors import Float32s, TensorTable, encode_parameters
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of, cut
from fanin.simulation import SyntheticTrainer


@dataclass(frozen=True)
class Observer:
    """A trainer that notes the ranges of its models."""

    inner: SyntheticTrainer = field(default_factory=lambda: SyntheticTrainer(partition=0))
    ranges: list[list[float] | None] = field(default_factory=list)
    runtime: str = "synthetic 1"
    graph_format: str = "onnx"

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        self.ranges.append(None if model.ranges is None else model.ranges.tolist())
        return self.inner.train(model, assignment, should_continue)


def course_with(folder: Path, ranges: Float32s, range_examples: int = m.RANGE_EXAMPLES) -> Course:
    """Return a Run of two Rounds whose second Version has these ranges."""
    fleet = course(folder, [(0, 0), (0, 0)], (), range_examples=range_examples)
    data = encode_parameters(TensorTable.of({RANGES: ranges.shape}), ranges)
    version = add_auxiliary(PUBLISHER, fleet.works[-1].version, {RANGES: artifact_of(data)})
    fleet.works[-1] = replace(fleet.works[-1], version=version)
    fleet.chunks |= {ref.sha256: piece for ref, piece in cut(data)}
    return fleet


def test_a_device_trains_with_the_ranges_of_its_version_and_reports_counts(tmp_path: Path) -> None:
    fleet, trainer = course_with(tmp_path, np.array([-2.0, 3.0], np.float32)), Observer()
    take_part(fleet, tmp_path, trainer)
    assert fleet.failures == []
    assert trainer.ranges == [None, [-2.0, 3.0]]
    for header in fleet.headers.values():
        sides = np.bincount(np.array(header.ranges.cells) // NUM_BINS, header.ranges.counts)
        assert sides.tolist() == [m.RANGE_WEIGHT, m.RANGE_WEIGHT]


def test_a_device_reports_no_counts_unless_its_assignment_asks_for_them(tmp_path: Path) -> None:
    fleet = course_with(tmp_path, np.array([-2.0, 3.0], np.float32), range_examples=0)
    take_part(fleet, tmp_path, Observer())
    assert [header.ranges for header in fleet.headers.values()] == [m.RangeCounts()] * 2


@pytest.mark.parametrize(
    ("ranges", "problem"),
    [
        ([-1.0, 1.0, 1.0], "got the auxiliary tensor 'ranges' of"),
        ([1.0, 2.0], "ranges: got float32 (2,), expected float32 (2,): for each activation of the bundle"),
        ([-1.0, np.inf], "ranges: got float32 (2,), expected float32 (2,): for each activation of the bundle"),
    ],
)
def test_a_device_refuses_a_version_with_wrong_ranges(tmp_path: Path, ranges: list[float], problem: str) -> None:
    fleet, trainer = course_with(tmp_path, np.array(ranges, np.float32)), Observer()
    take_part(fleet, tmp_path, trainer)
    assert len(trainer.ranges) == 1
    (failure,) = fleet.failures
    assert problem in failure
