"""Laws of roles: the parts of a vector, and the outer step in slices of any lengths."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanin.edge.codecs.grid import no_reaches
from fanin.edge.codecs.trained import TrainedPart
from fanin.edge.codecs.vector import VectorLayout
from fanin.edge.tensors import Float32s, Float64s, TensorTable
from fanin.protos.errors import InvalidVersion
from fanin.protos.messages import CodecSpec
from fanin.protos.roles import RoleKind, TensorRole
from fanin.server.aggregation.folding import OuterStep
from fanin.server.aggregation.outer import Nesterov, RoundStep
from fanin.server.aggregation.sets import Aggregate

CODEC = CodecSpec(name="fixed32", max_shift=0)
NESTEROV = RoundStep(optimizer=Nesterov(0.5, 0.5), number=1)
TRAINED = (RoleKind.PARAMETER, RoleKind.SUM)
BLOCKS = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(RoleKind)), min_size=1, max_size=8)


def table_of(blocks: list[tuple[int, RoleKind]]) -> TensorTable:
    table = TensorTable.of({f"{number:02}": (size,) for number, (size, _) in enumerate(blocks)})
    return table.with_roles({f"{number:02}": TensorRole(role=role) for number, (_, role) in enumerate(blocks)})


def is_trained(table: TensorTable) -> list[bool]:
    return [spec.role.role in TRAINED for spec in table.specs for _ in range(spec.num_values)]


@given(BLOCKS, st.data())
def test_any_slice_is_split_by_roles_and_joined_again(blocks: list[tuple[int, RoleKind]], data: st.DataObject) -> None:
    table = table_of(blocks)
    part, chosen, size = TrainedPart(table), is_trained(table), table.num_values
    first = data.draw(st.integers(0, size))
    last = data.draw(st.integers(first, size))
    values = np.arange(first, last)
    trained, averaged = part.split(values, first)
    assert trained.tolist() == [each for each in range(first, last) if chosen[each]]
    assert averaged.tolist() == [each for each in range(first, last) if not chosen[each]]
    assert part.join(trained, averaged, first).tolist() == values.tolist()
    assert part.rank(first) == sum(chosen[:first])
    for position in trained.tolist():
        assert part.position(part.rank(position)) == position
    assert (part.trained.num_values, part.averaged.num_values) == (sum(chosen), size - sum(chosen))


@given(BLOCKS, st.integers(0, 1000), st.data())
def test_the_outer_step_of_each_role_is_the_same_in_any_slices(
    blocks: list[tuple[int, RoleKind]], seed: int, data: st.DataObject
) -> None:
    table, rng = table_of(blocks), np.random.default_rng(seed)
    before = rng.normal(size=table.num_values).astype(np.float32)
    mean, momentum = rng.normal(scale=3.0, size=table.num_values), np.ones(table.num_values, np.float32)
    roles = np.array([spec.role.role for spec in table.specs for _ in range(spec.num_values)])
    cuts = data.draw(st.lists(st.integers(0, table.num_values), max_size=4).map(sorted))

    step = OuterStep(aggregate_of(table, mean), VectorLayout(table=table), [0] * len(blocks), CODEC, NESTEROV)
    slices, state = np.split(before, cuts), {"momentum": [momentum]}
    after = np.concatenate(list(step.parameters(slices, state)))
    velocity = np.concatenate(list(step.state("momentum", slices, state)))

    expected = expected_step(before.astype(np.float64), mean, roles)
    assert after.tobytes() == expected["values"].tobytes()
    assert velocity.tobytes() == expected["momentum"].tobytes()


def aggregate_of(table: TensorTable, mean: Float64s) -> Aggregate:
    return Aggregate(
        part=lambda first, last: mean[first:last],
        reaches=no_reaches(table),
        counts={},
        shifts=[0] * len(table.specs),
    )


def expected_step(before: Float64s, mean: Float64s, roles: np.ndarray) -> Mapping[str, Float32s]:
    velocity = 0.5 * 1.0 + mean
    by_role = {
        **dict.fromkeys(TRAINED, before + 0.5 * (mean + 0.5 * velocity)),
        RoleKind.STATISTIC: before + mean,
        RoleKind.COUNTER: before + np.array([round(each) for each in mean.tolist()], np.float64),
    }
    values = np.zeros_like(before)
    for role, step in by_role.items():
        values[roles == role] = step[roles == role]
    return {
        "values": values.astype(np.float32),
        "momentum": np.where(np.isin(roles, TRAINED), velocity, 0.0).astype(np.float32),
    }


@given(st.integers(-3, 3), st.integers(0, 4), st.floats(-2.0, 6.0, width=32))
def test_a_value_out_of_range_by_a_step_is_limited_and_beyond_that_refused(
    exponent: int, shift: int, start: float
) -> None:
    """A step is that of the coarsest Update: its device rounded to it."""
    table = TensorTable.of({"v": (2,)}).with_roles({"v": TensorRole(role=RoleKind.STATISTIC, lowest=0.0, highest=4.0)})
    mean = Aggregate(
        part=lambda first, last: np.zeros(last - first), reaches=no_reaches(table), counts={}, shifts=[shift]
    )
    step = OuterStep(mean, VectorLayout(table=table), [exponent], CODEC, NESTEROV)
    limit, distance = 2.0 ** (exponent + shift), max(0.0 - start, start - 4.0, 0.0)
    parent = np.array([start, 1.0], np.float32)
    if distance > limit:
        with pytest.raises(InvalidVersion, match="FN-0642"):
            list(step.parameters([parent], {}))
        return
    (after,) = step.parameters([parent], {})
    assert after.tolist() == [min(max(start, 0.0), 4.0), 1.0]
    assert step.result().num_clamped == (distance > 0.0)
