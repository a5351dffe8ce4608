"""Laws of rings: masks that cancel leave the exact sum, in any order, and the smallest ring holds it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanin.edge.rings import Adjustment, Ring, largest_weight, smallest_ring
from fanin.edge.tensors import TensorTable
from fanin.server.aggregation import fold

BITS = st.sampled_from(range(8, 65, 8))
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


@given(BITS, st.lists(INT64, min_size=1, max_size=20))
def test_a_representative_survives_the_wire(bits: int, numbers: list[int]) -> None:
    ring = Ring(bits=bits)
    values = ring.reduce(np.array(numbers, np.int64))
    assert [int(value) for value in values] == [(n + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1) for n in numbers]
    data = ring.encode(values)
    assert len(data) == len(numbers) * bits // 8
    assert np.array_equal(ring.decode(memoryview(data)), values)


@given(st.integers(2, 6), st.integers(1, 1025), st.randoms(use_true_random=False))
def test_masks_that_cancel_leave_the_exact_sum(num_devices: int, weight: int, random: object) -> None:
    rng = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
    ring = smallest_ring(8, num_devices * weight)
    values = rng.integers(-128, 128, (num_devices, 50)) * weight
    masks = rng.integers(-(1 << 62), 1 << 62, (num_devices, 50))
    # The last device has the mask that cancels all others, in the ring.
    masks[-1] = -masks[:-1].sum(axis=0)
    table = TensorTable.of({"w": (50,)})
    state = fold.begin(table)
    for each in rng.permutation(num_devices):
        state.values += ring.decode(memoryview(ring.encode(ring.reduce(values[each] + masks[each]))))
    fold.adjust(state, Adjustment(ring=ring))
    assert np.array_equal(state.values, values.sum(axis=0))


@given(st.integers(2, 32), st.integers(1, 1 << 30))
def test_the_smallest_ring_holds_the_largest_sum_and_no_smaller_one_is_proven(value_bits: int, weight: int) -> None:
    ring = smallest_ring(value_bits, weight)
    largest = (1 << value_bits - 1) * weight
    # The lowest sum is -largest; the highest one is smaller, because no value is 2^(value_bits - 1).
    assert largest <= 1 << ring.bits - 1
    assert ring.bits == 8 or largest > 1 << ring.bits - 9
    assert weight <= largest_weight(ring, value_bits)


@pytest.mark.parametrize(("value_bits", "weight"), [(32, (1 << 32) + 1), (64, 2)])
def test_a_sum_that_no_ring_holds_is_refused(value_bits: int, weight: int) -> None:
    with pytest.raises(ValueError, match="expected at most 64"):
        smallest_ring(value_bits, weight)


@pytest.mark.parametrize("bits", [0, 7, 12, 72])
def test_a_ring_has_whole_bytes(bits: int) -> None:
    with pytest.raises(ValueError, match="expected a multiple of 8"):
        Ring(bits=bits)


def test_a_correction_is_added_once_before_the_reduction() -> None:
    state = fold.begin(TensorTable.of({"w": (200_000,)}))
    state.values[:] = (1 << 15) - 1
    adjustment = Adjustment(ring=Ring(bits=16), correction=lambda first, last: np.arange(first, last, dtype=np.int64))
    fold.adjust(state, adjustment)
    assert state.values[:3].tolist() == [(1 << 15) - 1, -(1 << 15), -(1 << 15) + 1]
    assert int(state.values[65_537]) == int(Ring(bits=16).reduce(np.array([(1 << 15) - 1 + 65_537]))[0])
