"""A draw is the same in any chunks of its examples and in any shards of its values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.heavy


@given(
    outer=st.sampled_from([(), (3,)]),
    inner=st.sampled_from([(), (4,), (2, 3)]),
    merged=st.sampled_from([1, 4]),
    num_chunks=st.sampled_from([1, 2, 4]),
    num_ranks=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from(["uniform", "normal"]),
)
def test_chunks_and_shards_are_slices_of_the_complete_draw(
    outer: tuple[int, ...],
    inner: tuple[int, ...],
    merged: int,
    num_chunks: int,
    num_ranks: int,
    kind: str,
) -> None:
    import torch
    from torch import Tensor

    from fanin.datacenter.parallel.draws.sites import DrawShape, ModelDraws, Site
    from fanin.datacenter.parallel.draws.step import RankDraws

    dim, num = len(outer), 4
    shape = DrawShape(kind="uniform" if kind == "uniform" else "normal", shape=(*outer, merged, *inner), dim=dim)
    model = ModelDraws(sites={"drop": Site(names=("drop",), train=(shape,))})

    def drawn(first: int, size: int, rank: int, shares: int) -> Tensor:
        draws = RankDraws(model, (rank, shares))
        draws.begin(7, range(first, first + size), training=True)
        local = (*outer, size * (merged // shares if merged > 1 else 1), *inner)
        return draws.of("drop", torch.rand if kind == "uniform" else torch.randn)(local)

    complete = drawn(0, num, 0, 1)
    size, shares = num // num_chunks, num_ranks if merged > 1 else 1
    chunks = [
        torch.cat(
            [drawn(first, size, rank, shares).unflatten(dim, (size, -1)) for rank in range(shares)], dim=dim + 1
        ).flatten(dim, dim + 1)
        for first in range(0, num, size)
    ]
    assert torch.equal(torch.cat(chunks, dim=dim), complete)
    assert len(complete.unique()) == complete.numel()
