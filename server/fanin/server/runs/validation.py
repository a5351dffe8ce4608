"""Validation of an Update's header against its Assignment, before a byte of the payload is stored.

A device can report any statistics about its own data. These checks reject statistics that are undeclared, beyond their
bounds, or that no data can have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fanin.edge.codecs.statistics import CLASS_COUNTS, SQUARES
from fanin.edge.ranges import NUM_BINS
from fanin.edge.runtimes.evaluations import REST, largest_loss_count
from fanin.edge.tensors import TensorTable
from fanin.protos.chunks import CHUNK_BYTES, short
from fanin.protos.errors import InvalidUpdate
from fanin.protos.messages import (
    EVAL_AGREE,
    EVAL_CORRECT_FLOAT,
    EVAL_CORRECT_INT8,
    EVAL_EXAMPLES,
    EVAL_LOSS,
    EVAL_PREDICTIONS,
    EXAMPLES,
    RANGE_WEIGHT,
    ROUNDED,
    SATURATED,
    TRAIN_LOSS,
    TRAINED,
    UPDATE_FORMAT,
    CodecSpec,
    RangeCounts,
    Statistic,
    UpdateHeader,
)

_NO_MATCH: Final = "check in again"
_OF_EVALUATION: Final = frozenset({*CLASS_COUNTS, *SQUARES, *(name + REST for name in SQUARES)})
_COUNTED: Final = _OF_EVALUATION | {ROUNDED, SATURATED, EVAL_EXAMPLES}
"""The statistics that cannot be negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The values that an Update's header must match.

    Attributes:
        run_id: The Run.
        round: The Round of the Assignment.
        version_sha256: The digest of the Round's base Version.
        codec: The Plan's codec.
        payload_bytes: The exact size of the payload.
        table: The layout of the whole vector.
        num_labels: Largest number of labels of one validation example, 0 for a model of values.
        statistics: The statistics of the Run, with their bounds.
        num_range_cells: Cells of the counts of ranges, 0 if the Run has none.
    """

    run_id: str
    round: int
    version_sha256: str
    codec: CodecSpec
    payload_bytes: int
    table: TensorTable
    num_labels: int
    statistics: Sequence[Statistic]
    num_range_cells: int = 0


def check_header(header: UpdateHeader, expected: Expected) -> None:
    """Raise InvalidUpdate unless an Update's header matches its Assignment.

    The checks are, in this order: format, Run and Round, Version, codec, shape and sizes, statistics, ranges.
    """
    if header.format != UPDATE_FORMAT:
        raise InvalidUpdate(f"update: got format {header.format}, expected {UPDATE_FORMAT}", code="FN-0631")
    if header.run_id != expected.run_id or header.round != expected.round:
        raise InvalidUpdate(
            f"update: got run {header.run_id!r} round {header.round}, expected run {expected.run_id!r} "
            f"round {expected.round}; {_NO_MATCH}",
            code="FN-0630",
        )
    if header.version_sha256 != expected.version_sha256:
        raise InvalidUpdate(
            f"update: trained from version {short(header.version_sha256)}, expected "
            f"{short(expected.version_sha256)}; {_NO_MATCH}",
            code="FN-0630",
        )
    if header.codec != expected.codec.name:
        raise InvalidUpdate(f"update: got codec {header.codec!r}, expected {expected.codec.name!r}", code="FN-0631")
    _check_shape(header, expected)
    _check_counts(header, expected)
    _check_evaluation(header.statistics.counts, expected)
    _check_ranges(header.ranges, expected.num_range_cells)


def _check_ranges(ranges: RangeCounts, num_range_cells: int) -> None:
    """Raise InvalidUpdate unless each activation has the weight of one device on both sides, or no counts."""
    if not ranges.cells:
        return
    if ranges.cells[-1] >= num_range_cells:
        limit = f"a number below {num_range_cells}" if num_range_cells else "no ranges in this run"
        raise InvalidUpdate(f"update: got the range cell {ranges.cells[-1]}, expected {limit}", code="FN-0644")
    sides = np.bincount(np.array(ranges.cells) // NUM_BINS, ranges.counts, num_range_cells // NUM_BINS).reshape(-1, 2)
    is_wrong = (sides != RANGE_WEIGHT).any(axis=1) & sides.any(axis=1)
    if is_wrong.any():
        activation = int(is_wrong.argmax())
        low, high = sides[activation].astype(np.int64).tolist()
        raise InvalidUpdate(
            f"update: got counts of the range of activation {activation} with the sums {low} and {high}, expected "
            f"{RANGE_WEIGHT} on each side, or none",
            code="FN-0644",
        )


def _check_counts(header: UpdateHeader, expected: Expected) -> None:
    counts, bounds = header.statistics.counts, {each.name: each.bound for each in expected.statistics}
    if undeclared := sorted(set(counts) - set(bounds)):
        raise InvalidUpdate(f"update: got statistics {undeclared}, expected only {sorted(bounds)}", code="FN-0634")
    for name, count in counts.items():
        # A negative count would cancel the counts of other devices. Only losses and the Plan's own statistics may be
        # negative.
        if count < 0 and name in _COUNTED:
            raise InvalidUpdate(f"update: got {name} = {count}, expected at least 0", code="FN-0634")
        if abs(count) > bounds[name]:
            least = "at most" if name in _COUNTED | {EXAMPLES, TRAINED} else f"{-bounds[name]} to"
            raise InvalidUpdate(f"update: got {name} = {count}, expected {least} {bounds[name]}", code="FN-0634")
    examples = counts.get(EXAMPLES, 0)
    if examples < 1:
        # It has no weight, so it must fill neither the buffer nor the quorum of a Round.
        raise InvalidUpdate(
            f"update: got {EXAMPLES} = {counts.get(EXAMPLES, 'none')}, expected at least 1; check in again when this "
            "device has examples",
            code="FN-0635",
        )
    trained = counts.get(TRAINED, examples)
    if min(trained, bounds[EXAMPLES]) != examples:
        raise InvalidUpdate(
            f"update: got {EXAMPLES} = {examples} and {TRAINED} = {trained}, expected {EXAMPLES} = "
            f"{min(trained, bounds[EXAMPLES])}: the smaller one of {TRAINED} and the bound {bounds[EXAMPLES]}",
            code="FN-0636",
        )
    # One device must not decide the mean loss of a Round. The loss of a model of values has no natural bound.
    for name, of in ((TRAIN_LOSS, EXAMPLES), (EVAL_LOSS, EVAL_EXAMPLES)):
        num_examples = counts.get(of, 0)
        largest = largest_loss_count(num_examples, expected.num_labels) if num_examples else 0
        if abs(counts.get(name, 0)) > largest:
            limits = f"{-largest} to {largest}" if largest else "0"
            raise InvalidUpdate(
                f"update: got {name} = {counts[name]} and {of} = {num_examples}, expected {limits}", code="FN-0636"
            )
    # Only a block with the largest shift is cut.
    most = sum(
        spec.num_values
        for spec, shift in zip(expected.table.specs, header.shifts, strict=True)
        if shift == expected.codec.max_shift
    )
    if counts.get(SATURATED, 0) > most:
        raise InvalidUpdate(
            f"update: got {SATURATED} = {counts[SATURATED]}, expected at most {most}: the values of the blocks with "
            f"the largest shift, {expected.codec.max_shift}",
            code="FN-0636",
        )


def _check_evaluation(counts: Mapping[str, int], expected: Expected) -> None:
    """Raise InvalidUpdate if no validation data can have these statistics."""
    num_examples, num_labels = counts.get(EVAL_EXAMPLES, 0), counts.get(EVAL_PREDICTIONS, 0)
    for name in sorted((_OF_EVALUATION | {EVAL_LOSS}) & set(counts)):
        if counts[name] and not num_examples:
            raise InvalidUpdate(
                f"update: got {name} = {counts[name]} and {EVAL_EXAMPLES} = 0, expected 0", code="FN-0637"
            )
    _check_complete(counts)
    if num_labels > num_examples * expected.num_labels:
        raise InvalidUpdate(
            f"update: got {EVAL_PREDICTIONS} = {num_labels} and {EVAL_EXAMPLES} = {num_examples}, expected at most "
            f"{expected.num_labels} an example",
            code="FN-0637",
        )
    in_float, in_int8, agree = (counts.get(name, 0) for name in (EVAL_CORRECT_FLOAT, EVAL_CORRECT_INT8, EVAL_AGREE))
    for name in (EVAL_CORRECT_FLOAT, EVAL_CORRECT_INT8, EVAL_AGREE):
        if counts.get(name, 0) > num_labels:
            raise InvalidUpdate(
                f"update: got {name} = {counts[name]}, expected at most {EVAL_PREDICTIONS} = {num_labels}",
                code="FN-0637",
            )
    # Two forms that agree are both right or both wrong, and two forms that are right agree.
    fewest, most = in_float + in_int8 - num_labels, num_labels - abs(in_float - in_int8)
    if not fewest <= agree <= most:
        raise InvalidUpdate(
            f"update: got {EVAL_AGREE} = {agree}, expected {max(fewest, 0)} to {most} with {EVAL_CORRECT_FLOAT} = "
            f"{in_float} and {EVAL_CORRECT_INT8} = {in_int8} of {num_labels}",
            code="FN-0637",
        )


def _check_complete(counts: Mapping[str, int]) -> None:
    """Raise InvalidUpdate for a part of the counts that compare float with int8. A missing one would count as 0."""
    for names in (CLASS_COUNTS, SQUARES):
        present = [name for name in names if name in counts]
        if present and len(present) < len(names):
            missing = [name for name in names if name not in counts]
            raise InvalidUpdate(
                f"update: got {', '.join(present)} without {', '.join(missing)}, expected all of them or none: without "
                "an int8 model, report eval_loss_q16 alone",
                code="FN-0637",
            )
    if rests := [name for name in SQUARES if name + REST in counts and name not in counts]:
        raise InvalidUpdate(f"update: got {rests[0] + REST} without {rests[0]}, expected both or none", code="FN-0637")


def _check_shape(header: UpdateHeader, expected: Expected) -> None:
    num_blocks = len(expected.table.specs)
    if len(header.shifts) != num_blocks or any(shift > expected.codec.max_shift for shift in header.shifts):
        raise InvalidUpdate(
            f"update: got {len(header.shifts)} shifts up to {max(header.shifts, default=0)}, expected {num_blocks} "
            f"up to {expected.codec.max_shift}",
            code="FN-0639",
        )
    if header.payload.size_bytes != expected.payload_bytes:
        raise InvalidUpdate(
            f"update: got {header.payload.size_bytes} bytes, expected {expected.payload_bytes} for "
            f"{expected.table.num_values} values; the model has another shape",
            code="FN-0639",
        )
    sizes = [ref.size_bytes for ref in header.payload.chunks]
    if any(chunk != CHUNK_BYTES for chunk in sizes[:-1]) or any(chunk > CHUNK_BYTES for chunk in sizes[-1:]):
        raise InvalidUpdate(
            f"update: got chunks of {sorted(set(sizes))} bytes, expected all but the last {CHUNK_BYTES}", code="FN-0639"
        )
    # Each Chunk and the payload are compared with their digests when they arrive. Two digests of the same bytes can be
    # compared before.
    if len(sizes) == 1 and (chunk := header.payload.chunks[0].sha256) != header.payload.sha256:
        raise InvalidUpdate(
            f"update: got the digest {header.payload.sha256}, expected {chunk} of its only chunk", code="FN-0117"
        )
