"""The contracts of rules and outer optimizers, as checks for the tests of an implementation.

``check_rule`` folds the same Updates in several ways, and ``check_optimizer`` takes the same steps in several ways. The
results must be bit-identical, because a restarted coordinator and ``fanin verify`` on another machine fold in another
order and in other slices.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Final

import numpy as np

from fanin.edge.codecs.grid import no_reaches
from fanin.edge.codecs.vector import VectorLayout
from fanin.edge.tensors import Float32s, Float64s, Int32s, TensorTable
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import CodecSpec
from fanin.server.aggregation.checked import guarded_optimizer, guarded_rule
from fanin.server.aggregation.fold import Contribution, PartialSum
from fanin.server.aggregation.folding import OuterStep
from fanin.server.aggregation.outer import OuterOptimizer, RoundStep
from fanin.server.aggregation.rules import ColumnRule, Rule
from fanin.server.aggregation.sets import Aggregate, SetFold

_TABLE: Final = TensorTable.of({"weights": (7, 9), "bias": (9,), "none": (0,)})
_LAYOUT: Final = VectorLayout(table=_TABLE)
_GRID: Final = (-12, -9, 0)
_MAX_SHIFT: Final = 4


def check_rule(rule: Rule | ColumnRule, *, num_updates: int = 7, seed: int = 1) -> None:
    """Check that a rule keeps the contract that the coordinator relies on.

    Args:
        rule: The rule.
        num_updates: Number of Updates that are folded, as many as the rule needs.
        seed: Seed of their values.

    Raises:
        AssertionError: The rule breaks the contract. The text is that of the coordinator.
    """
    with _refusals_as_assertions():
        _check_folds(guarded_rule(rule, "rule"), num_updates, seed)


def _check_folds(rule: Rule | ColumnRule, num_updates: int, seed: int) -> None:
    updates, rng = _updates(num_updates, seed), random.Random(seed)
    devices = list(updates)
    expected = _complete_aggregate(rule, updates, devices)
    assert np.array_equal(_complete_aggregate(rule, updates, devices), expected), (
        "aggregate: a repetition gave other bits"
    )
    other_order = _complete_aggregate(rule, updates, rng.sample(devices, num_updates))
    assert np.array_equal(other_order, expected), "aggregate: the order of the updates changed bits"
    cuts = sorted(rng.sample(range(1, _TABLE.num_values), 4))
    aggregate = _fold(rule, updates).complete(devices)
    parts = [aggregate.part(first, last) for first, last in pairwise([0, *cuts, _TABLE.num_values])]
    assert np.array_equal(np.concatenate(parts), expected), "aggregate: the lengths of the parts changed bits"
    if not isinstance(rule, ColumnRule):
        _check_merge(rule, updates, devices, expected)


@contextmanager
def _refusals_as_assertions() -> Iterator[None]:
    try:
        yield
    except InvalidPlan as exc:
        raise AssertionError(str(exc)) from exc


def check_optimizer(optimizer: OuterOptimizer, *, num_steps: int = 4, seed: int = 1) -> None:
    """Check that an outer optimizer keeps the contract that the coordinator relies on.

    Args:
        optimizer: The optimizer.
        num_steps: Number of steps that are taken.
        seed: Seed of parameters and aggregates.

    Raises:
        AssertionError: The optimizer breaks the contract. The text is that of the coordinator.
    """
    with _refusals_as_assertions():
        optimizer = guarded_optimizer(optimizer, "outer optimizer")
        expected = _steps(optimizer, num_steps, seed, cuts=())
        assert _steps(optimizer, num_steps, seed, cuts=()) == expected, "step: a repetition gave other bits"
        for cuts in ((1,), (5, 6, 40), tuple(range(1, _TABLE.num_values))):
            assert _steps(optimizer, num_steps, seed, cuts=cuts) == expected, "step: the lengths of slices changed bits"


def _steps(optimizer: OuterOptimizer, num_steps: int, seed: int, cuts: Sequence[int]) -> list[bytes]:
    """Return the bits of the parameters and of the state's tensors after some steps, each taken in slices."""
    rng = np.random.default_rng(seed)
    parameters, state = rng.normal(0.0, 1.0, _TABLE.num_values).astype(np.float32), dict[str, list[Float32s]]()
    for number in range(1, num_steps + 1):
        aggregate = _aggregate(rng.normal(0.0, 0.1, _TABLE.num_values))
        round_step = RoundStep(optimizer=optimizer, number=number)
        step = OuterStep(aggregate, _LAYOUT, _GRID, CodecSpec(name="fixed32", max_shift=0), round_step)
        slices = np.split(parameters, cuts)
        after = np.concatenate(list(step.parameters(slices, state)))
        state = {name: list(step.state(name, slices, state)) for name in optimizer.tensors}
        parameters = after
    return [parameters.tobytes(), *(np.concatenate(tensor).tobytes() for tensor in state.values())]


def _aggregate(mean: Float64s) -> Aggregate:
    return Aggregate(part=lambda first, last: mean[first:last], reaches=no_reaches(_TABLE), counts={}, shifts=(0, 0, 0))


def _check_merge(rule: Rule, updates: Mapping[str, Int32s], devices: Sequence[str], expected: Float64s) -> None:
    """Check sums of sums, as relays send them."""

    def partial(some: Sequence[str]) -> PartialSum:
        total = rule.begin(_TABLE)
        for device in some:
            total = rule.accept(total, _TABLE, _contribution(device, updates[device]))
        return total

    half = len(devices) // 2
    for left, right in ((devices[:half], devices[half:]), (devices[half:], devices[:half]), (devices, [])):
        total = rule.merge(partial(left), partial(right))
        merged = rule.finish(total, _TABLE, _GRID, (0, _TABLE.num_values))
        assert np.array_equal(merged, expected), "merge: a sum of two partial sums gave other bits"


def _updates(num_updates: int, seed: int) -> dict[str, Int32s]:
    rng = np.random.default_rng(seed)
    scales = 2.0 ** rng.integers(0, 20, num_updates)
    return {
        f"device-{index}": np.rint(rng.normal(0.0, scale, _TABLE.num_values)).astype(np.int32)
        for index, scale in enumerate(scales)
    }


def _complete_aggregate(rule: Rule | ColumnRule, updates: Mapping[str, Int32s], devices: Sequence[str]) -> Float64s:
    return _fold(rule, updates).complete(devices).part(0, _TABLE.num_values)


def _fold(rule: Rule | ColumnRule, updates: Mapping[str, Int32s]) -> SetFold:
    return SetFold(rule, _TABLE, _GRID, lambda device, _scale: _contribution(device, updates[device]))


def _contribution(device: str, values: Int32s) -> Contribution:
    number = int(device.rsplit("-", 1)[1])
    # The last blocks are those of a group in which all Updates count the same.
    weights = (256 * (number + 1), 256, 256)
    return Contribution(
        weights=weights,
        fresh_weights=weights,
        shifts=tuple((number + block) % (_MAX_SHIFT + 1) for block in range(len(_TABLE.specs))),
        bits=32,
        max_shift=_MAX_SHIFT,
        counts={},
        pieces=[values],
        read=lambda first, last: values[first:last],
    )
