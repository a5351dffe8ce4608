"""The masked sum equals the plain one bit for bit, for few and many devices, with dropouts in each phase."""

import numpy as np
import pytest
from support.masked import (
    CLIP,
    NUM_VALUES,
    attempt_of,
    check_sum,
    completed,
    later,
    terms_of,
    update_of,
)

from fanin.commands.bench.harness.masked import MaskedAttempt, PlainUpdate
from fanin.edge.masking.keystream import MaskKey, masked_payload
from fanin.edge.masking.parameters import Threat
from fanin.edge.rings import Ring, RingVector, smallest_ring
from fanin.protos.errors import Conflict, FaninError, InvalidPlan


@pytest.mark.parametrize("threat", Threat)
@pytest.mark.parametrize("num_devices", [3, 4, 10])
def test_the_masked_sum_is_the_plain_sum(num_devices: int, threat: Threat) -> None:
    completed(attempt_of(terms_of(num_devices, threat), num_devices))


def test_two_devices_are_refused_and_their_masks_cancel() -> None:
    with pytest.raises(InvalidPlan) as caught:
        terms_of(2)
    assert caught.value.code == "FN-1627"
    layout = RingVector(ring=Ring(bits=16), num_values=NUM_VALUES, num_tail=2)
    total = np.zeros(NUM_VALUES, layout.ring.dtype)
    for index in (0, 1):
        update, keys = update_of(index), [MaskKey(b"k" * 32, is_negative=index == 1)]
        payload = b"".join(masked_payload(layout, keys, update.pieces, update.weight, update.tail))
        total += layout.ring.unpacked(memoryview(payload)[: 2 * NUM_VALUES])
    expected = sum(np.concatenate(update_of(index).pieces).astype(np.int64) for index in (0, 1))
    assert np.array_equal(layout.ring.signed(total), expected)


def test_dropouts_in_each_phase_of_a_sparse_graph() -> None:
    attempt = attempt_of(terms_of(40, adversarial=0.05, dropout=0.2), 40)
    completed(attempt, absent=(2, 2, 2, 2))
    assert attempt.total.dtype == np.uint16


def test_dropouts_in_each_phase_with_an_active_coordinator() -> None:
    completed(attempt_of(terms_of(12, Threat.ACTIVE, adversarial=0.1, dropout=0.3), 12), absent=(1, 1, 1, 1))


def test_weights_and_statistics_are_summed_in_the_tail() -> None:
    weights = [1, 3, 250, 1000]
    terms = terms_of(4, max_weight=1000)
    attempt = completed(attempt_of(terms, 4), lambda index: update_of(index, weights[index]))
    assert attempt.tail.astype(np.int64).tolist() == [sum(weights), -6]


def test_a_weighted_mean_is_that_without_masks() -> None:
    """Values 1 and 5 with the weights 1 and 3: the mean is 4."""
    values = (1, 5, 0)
    weights = (1, 3, 0)

    def update(index: int) -> PlainUpdate:
        piece = np.full(NUM_VALUES, values[index], np.int8)
        return PlainUpdate(pieces=(piece,), weight=weights[index], tail=(weights[index], 0))

    terms = terms_of(3, max_weight=3)
    attempt = completed(attempt_of(terms, 3), update)
    assert set((terms.layout.ring.signed(attempt.total) / int(attempt.tail[0])).tolist()) == {4.0}


@pytest.mark.parametrize(("num_devices", "bits"), [(256, 16), (257, 24), (1025, 24), (65_536, 24), (65_537, 32)])
def test_the_ring_holds_the_largest_sum(num_devices: int, bits: int) -> None:
    assert smallest_ring(8, num_devices) == Ring(bits=bits)
    layout = RingVector(ring=Ring(bits=bits), num_values=1, num_tail=0)
    for edge in (-CLIP - 1, CLIP):
        words = layout.ring.words_of(np.array([edge]), 1) * layout.ring.dtype.type(num_devices)
        assert layout.ring.signed(words).tolist() == [edge * num_devices]


def test_a_failure_says_what_was_missing() -> None:
    attempt = attempt_of(terms_of(10, Threat.ACTIVE, dropout=0.1), 10)
    attempt.advertise()
    attempt.share()
    with pytest.raises(Conflict, match="10 devices \\(0, 1, 2") as caught:
        attempt.mask(update_of, range(5))
    assert caught.value.code == "FN-1638"


def test_missing_shares_may_still_come() -> None:
    attempt = attempt_of(terms_of(6, Threat.ACTIVE, dropout=0.2), 6)
    attempt.advertise()
    attempt.share()
    attempt.mask(update_of, {5})
    attempt.confirm()
    with pytest.raises(Conflict, match="fewer than 4 shares") as caught:
        attempt.unmask({0, 1})
    assert caught.value.code == "FN-1638"
    attempt.unmask()
    check_sum(attempt, [update_of(index) for index in range(5)])


def test_too_few_devices_fail_in_each_phase() -> None:
    attempt = attempt_of(terms_of(4), 4)
    with pytest.raises(Conflict, match="2 advertisements"):
        attempt.advertise({0, 1})
    attempt = attempt_of(terms_of(4), 4)
    attempt.advertise()
    with pytest.raises(FaninError, match="0 devices that sent shares"):
        attempt.share({0, 1, 2})


@pytest.mark.nightly
@pytest.mark.parametrize("num_devices", [255, 1025])
def test_the_masked_sum_of_many_devices(num_devices: int) -> None:
    completed(attempt_of(terms_of(num_devices, adversarial=0.05, dropout=0.05), num_devices))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("num_devices", "absent"), [(100, (10, 9, 8, 7)), (1000, (100, 90, 81, 72))], ids=["100", "1000"]
)
def test_a_tenth_drops_out_in_each_phase(num_devices: int, absent: tuple[int, int, int, int]) -> None:
    completed(attempt_of(terms_of(num_devices, adversarial=0.05, dropout=0.33), num_devices), absent=absent)


@pytest.mark.nightly
def test_the_masked_sum_of_ten_devices_over_150_rounds() -> None:
    """The same devices take part in each Round. No masked payload occurs twice, though the Updates do."""
    terms = terms_of(10, adversarial=0.1)
    attempt, digests = attempt_of(terms, 10), set()
    for number in range(150):
        again = MaskedAttempt(terms=later(terms, rounds=number), devices=attempt.devices, authority=attempt.authority)
        completed(again)
        for each in again.devices:
            assert each.state.payload is not None
            digests.add(each.state.payload.sha256)
            each.finish()
    assert len(digests) == 1500
