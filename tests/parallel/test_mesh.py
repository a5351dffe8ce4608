"""A mesh shape is checked against the world size before a process starts, and round-trips through its text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanin.datacenter.ranks.axes import Axes
from fanin.datacenter.ranks.mesh import AXES, LOSS_AXES, SAMPLE_AXES, MeshShape
from fanin.protos.errors import InvalidInput

sizes = st.tuples(*(st.integers(1, 9) for _ in AXES))


def shape_of(sizes: tuple[int, ...]) -> MeshShape:
    return MeshShape(**dict(zip(AXES, sizes, strict=True)))


@given(sizes=sizes, world=st.integers(1, 64))
def test_a_shape_fits_the_world_that_is_its_product_and_no_other(sizes: tuple[int, ...], world: int) -> None:
    shape = shape_of(sizes)
    product = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    assert tuple(shape.sizes) == AXES
    assert (shape.num_ranks, shape.num_parts) == (product, sizes[1] * sizes[2])
    if product == world:
        shape.check(world)
    else:
        with pytest.raises(InvalidInput, match=f"= {product} ranks, got a world of {world}; start {product} processes"):
            shape.check(world)


@given(sizes=sizes, parts=st.integers(1, 64))
def test_a_shape_fits_another_world_by_its_copies_alone(sizes: tuple[int, ...], parts: int) -> None:
    shape = shape_of(sizes)
    world = parts * shape.pp * shape.tp
    fitted_shape = shape.fit(world)
    fitted_shape.check(world)
    assert (fitted_shape.pp, fitted_shape.tp, fitted_shape.num_parts) == (shape.pp, shape.tp, parts)
    assert shape.fit(shape.num_ranks) == shape
    assert fitted_shape.fit(world) == fitted_shape
    # No rank receives more of the parameters than before while there are ranks to share them. Nor do ranks share more
    # finely than necessary.
    assert fitted_shape.dp_shard >= min(shape.dp_shard, parts)
    assert not [size for size in range(shape.dp_shard, fitted_shape.dp_shard) if parts % size == 0]


@given(sizes=sizes, world=st.integers(-8, 500))
def test_a_world_that_a_shape_cannot_fit_is_refused(sizes: tuple[int, ...], world: int) -> None:
    shape = shape_of(sizes)
    multiple = shape.pp * shape.tp
    if world > 0 and world % multiple == 0:
        assert shape.fit(world).num_ranks == world
        return
    message = (
        f"got a world of {world}, expected a multiple of pp {shape.pp} x tp {shape.tp} = {multiple} ranks: .*; start "
    )
    with pytest.raises(InvalidInput, match=message):
        shape.fit(world)


@pytest.mark.parametrize(
    ("text", "world", "expected"),
    [
        ("dp_replicate=4,tp=2", 6, "dp_replicate=3,tp=2"),
        ("dp_replicate=2,dp_shard=4", 4, "dp_shard=4"),
        ("dp_replicate=2,dp_shard=4", 6, "dp_shard=6"),
        ("dp_shard=4", 2, "dp_shard=2"),
        ("dp_shard=4", 5, "dp_shard=5"),
        ("dp_shard=4", 8, "dp_replicate=2,dp_shard=4"),
        ("pp=2", 4, "pp=2,dp_replicate=2"),
        ("dp_replicate=2", 1, "none"),
    ],
)
def test_copies_are_reduced_first_and_shards_last(text: str, world: int, expected: str) -> None:
    assert str(MeshShape.parse(text).fit(world)) == expected


@given(sizes=sizes)
def test_a_shape_round_trips_through_its_text(sizes: tuple[int, ...]) -> None:
    shape = shape_of(sizes)
    assert MeshShape.parse(str(shape)) == shape
    assert (str(shape) == "none") == (set(sizes) == {1})


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("none", MeshShape()),
        (" none ", MeshShape()),
        ("pp=2,dp_shard=2,tp=2", MeshShape(pp=2, dp_shard=2, tp=2)),
        ("tp = 4, pp=1", MeshShape(tp=4)),
    ],
)
def test_a_text_names_a_shape(text: str, shape: MeshShape) -> None:
    assert MeshShape.parse(text) == shape


@pytest.mark.parametrize("text", ["", "pp", "pp=", "pp=x", "pp=-1", "pp=2,pp=2", "cp=2", "none,tp=2", "pp=2,", "pp=²"])
def test_texts_that_name_no_shape_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="FN-1265"):
        MeshShape.parse(text)


@pytest.mark.parametrize("size", [0, -2])
@pytest.mark.parametrize("axis", AXES)
def test_an_axis_has_at_least_one_rank(axis: str, size: int) -> None:
    with pytest.raises(InvalidInput, match=f"mesh: got {axis} {size}, expected at least 1"):
        MeshShape(**{axis: size})


def test_sums_run_over_the_axes_with_other_samples_and_losses_over_the_stages_too() -> None:
    shape = MeshShape.parse("pp=2,dp_shard=2,tp=2")
    assert shape.used(SAMPLE_AXES) == ["dp_shard"]
    assert shape.used(LOSS_AXES) == ["dp_shard", "pp"]
    assert shape.batch_multiple(3, 4) == 2 * 3 * 4
    axes = Axes(shape=MeshShape(), mesh=None)
    assert (axes.sample_groups, axes.loss_groups, axes.pipeline, axes.share) == ([], [], None, (0, 1))
