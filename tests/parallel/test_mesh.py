"""A mesh shape is checked against the world before a process is spent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanin.datacenter.mesh import AXES, MeshShape
from fanin.protos.errors import InvalidInput


@given(replicate=st.integers(1, 64), world=st.integers(1, 64))
def test_a_shape_fits_the_world_that_is_its_product_and_no_other(replicate: int, world: int) -> None:
    shape = MeshShape(dp_replicate=replicate)
    assert tuple(shape.sizes) == AXES
    if shape.num_ranks == world:
        shape.check(world)
    else:
        with pytest.raises(InvalidInput, match=f"= {replicate} ranks, got a world of {world}; start {replicate} proc"):
            shape.check(world)


@pytest.mark.parametrize("size", [0, -2])
def test_an_axis_has_at_least_one_rank(size: int) -> None:
    with pytest.raises(InvalidInput, match=f"mesh: got dp_replicate {size}, expected at least 1"):
        MeshShape(dp_replicate=size)
