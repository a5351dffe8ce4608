"""A device under attack: its masks, its payload, its answers, its floor."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.masked import FixedEntropy, attempt_of, check_sum, later, terms_of, update_of
from support.masked_attacks import kinds_given, masked, refused, shared, survivors_message

from fanin.commands.bench.harness.masked import MaskedDevice
from fanin.edge.masking import coordinator, device, messages
from fanin.edge.masking.coordinator import Confirming, Masking
from fanin.edge.masking.journal import Fact, Remember, Respond, read_journal, record_of
from fanin.edge.masking.keystream import MaskKey, MaskStream
from fanin.edge.masking.messages import Kind, ShareOf
from fanin.edge.masking.parameters import Threat
from fanin.edge.masking.terms import MaskFloor, MaskTerms
from fanin.protos.errors import Conflict, Corrupted, InvalidPlan

# A mask key serves one Run, lineage, Round, attempt, set of peers and pair.


@pytest.mark.parametrize(
    "change",
    [
        lambda terms: replace(terms, run_id="other"),
        lambda terms: replace(terms, lineage=4),
        lambda terms: later(terms, rounds=1),
        lambda terms: later(terms, attempts=1),
        lambda terms: replace(terms, version_sha256=bytes(32)),
        lambda terms: replace(terms, meaning_sha256=bytes(32)),
        lambda terms: replace(terms, layout=replace(terms.layout, num_tail=3)),
        lambda terms: replace(terms, min_survivors=4),
    ],
    ids=["Run", "lineage", "Round", "attempt", "Version", "meaning", "layout", "survivors"],
)
def test_the_same_secrets_give_other_masks_under_other_terms(change: Callable[[MaskTerms], MaskTerms]) -> None:
    """The adversary restores all secrets of all devices, and changes one part of the terms."""
    first, second = attempt_of(terms_of(5), 5), attempt_of(change(terms_of(5)), 5)
    keys = []
    for attempt in (first, second):
        attempt.advertise()
        (own,) = [each for each in attempt.devices if each.identity.public == first.devices[0].identity.public]
        attempt.share()
        assert isinstance(attempt.phase, Masking)
        own.receive(coordinator.respond(attempt.phase, attempt.devices.index(own))[0])
        keys.append({mask.key for mask in device.mask_keys(own.state)})
    assert first.devices[0].state.keys.seed == second.devices[0].state.keys.seed
    assert len(keys[0]) == len(keys[1]) == len(first.phase.roster.graph.neighbors(0)) + 1  # type: ignore[union-attr]
    assert keys[0].isdisjoint(keys[1])


def test_each_pair_has_a_mask_of_its_own() -> None:
    attempt = masked(6, Threat.ACTIVE)
    keys = [{mask.key for mask in device.mask_keys(each.state)} for each in attempt.devices]
    assert all(len(first & second) == 1 for index, first in enumerate(keys) for second in keys[:index])


def test_seeds_that_fold_to_one_word_give_other_masks() -> None:
    """Folding a seed to 32 bits by XOR, as some implementations do, makes these two seeds one."""
    first, second = bytes(range(32)), bytes((*range(4, 8), *range(4), *range(8, 32)))
    folded = [np.bitwise_xor.reduce(np.frombuffer(seed, "<u4")) for seed in (first, second)]
    assert folded[0] == folded[1]
    layout, words = terms_of(3).layout, []
    for seed in (first, second):
        words.append(np.zeros(layout.num_values, layout.ring.dtype))
        MaskStream(layout, [MaskKey(seed)]).add(words[-1], 0)
    assert np.count_nonzero(words[0] == words[1]) < 10


# A mask key serves one payload.


def test_a_second_payload_is_refused_also_after_a_restart() -> None:
    attempt = masked()
    each = attempt.devices[0]
    assert each.state.payload is not None
    assert device.masked(each.state, each.state.payload.sha256) == (each.state, ())
    restarted, _ = device.resume(each.identity, read_journal(b"".join(each.journal)))
    for state in (each.state, restarted):
        with refused("FN-1636", Conflict):
            device.masked(state, bytes(32))


def test_a_repeated_masking_gives_the_same_bytes() -> None:
    each = shared().devices[0]
    other = attempt_of(terms_of(6), 6)
    other.advertise()
    other.share()
    assert isinstance(other.phase, Masking)
    each.receive(coordinator.respond(other.phase, 0)[0])
    restarted = MaskedDevice(each.identity, each.entropy)
    restarted.carry_out(device.resume(each.identity, read_journal(b"".join(each.journal))))
    assert restarted.masked(update_of(0)) == each.masked(update_of(0))


def test_a_lost_journal_means_giving_up() -> None:
    each = masked().devices[0]
    with refused("FN-1634", Corrupted):
        device.resume(each.identity, ())
    with refused("FN-1634", Corrupted):
        device.resume(each.identity, read_journal(b"".join(each.journal[1:])))
    with refused("FN-1634", Corrupted):
        device.resume(each.identity, read_journal(b"".join((*each.journal, each.journal[0]))))
    with refused("FN-1634", Corrupted):
        device.resume(each.identity, read_journal(b"".join((each.journal[0], *each.journal[2:]))))
    with refused("FN-1634", Corrupted):
        device.resume(each.identity, read_journal(b"".join((*each.journal[:1], *masked(7).devices[0].journal[1:]))))


def test_a_damaged_or_cut_journal_is_detected() -> None:
    records = masked().devices[0].journal
    journal = b"".join(records)
    for place in (0, len(journal) // 2, len(journal) - 40):
        damaged = bytearray(journal)
        damaged[place] ^= 1
        with refused("FN-1634", Corrupted):
            read_journal(bytes(damaged))
    # A record that is cut is none that was never written: its key has served already.
    for num_bytes in (1, 31, 33, len(records[-1]) - 1):
        with refused("FN-1634", Corrupted):
            read_journal(journal[:-num_bytes])


def test_drawing_keys_again_gives_other_ones() -> None:
    each = attempt_of(terms_of(4), 4).devices[0]
    assert each.begin(terms_of(4)) != each.begin(terms_of(4))


# One set of survivors, and one kind of share for each peer.


@pytest.mark.parametrize("threat", [Threat.CURIOUS, Threat.ACTIVE])
def test_a_second_survivor_set_is_refused(threat: Threat) -> None:
    attempt = masked(6, threat)
    each = attempt.devices[0]
    first, second = survivors_message(attempt, [0, 1, 2, 3]), survivors_message(attempt, [0, 1, 2, 4])
    answer = each.receive(first)
    before, journal = each.state, list(each.journal)
    for state in (before, device.resume(each.identity, read_journal(b"".join(journal)))[0]):
        with refused("FN-1630", Conflict):
            device.receive(state, second, each.entropy)
        assert device.receive(state, first, each.entropy)[1] == tuple(map(Respond, answer))
    assert (each.state, each.journal) == (before, journal)


def test_both_kinds_of_a_peer_are_never_given() -> None:
    """The coordinator asks each device for each set of survivors, before and after each restart of the device."""
    attempt = masked(5, Threat.SEMI_MALICIOUS)
    given: dict[int, set[ShareOf]] = {}
    for members in ([0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 3, 4]):
        each = attempt.devices[0]
        each.carry_out(device.resume(each.identity, read_journal(b"".join(each.journal))))
        try:
            answers = each.receive(survivors_message(attempt, members))
        except Conflict:
            continue
        for owner, kind in kinds_given(answers[-1], attempt).items():
            given.setdefault(owner, set()).add(kind)
    assert given and {len(kinds) for kinds in given.values()} == {1}


@pytest.mark.parametrize("threat", Threat)
def test_nothing_is_answered_before_it_is_recorded(threat: Threat) -> None:
    """Each response follows a record from which a restart repeats it, byte for byte."""
    attempt = attempt_of(terms_of(5, threat), 5)
    effects: list[object] = []

    class Watched(MaskedDevice):
        def carry_out(self, step: device.Step) -> tuple[bytes, ...]:
            effects.extend(step[1])
            return MaskedDevice.carry_out(self, step)

    target = attempt.devices[2]
    attempt.devices[2] = Watched(target.identity, target.entropy)
    attempt.advertise()
    attempt.share()
    if isinstance(attempt.mask(update_of), Confirming):
        attempt.confirm()
    attempt.unmask()
    facts: list[Fact] = []
    num_responses = 0
    for effect in effects:
        if isinstance(effect, Remember):
            facts.append(effect.fact)
        elif isinstance(effect, Respond):
            num_responses += 1
            assert device.resume(target.identity, facts)[1] == (effect,)
    # Under the threat active the survivors come twice: for the confirmation, and with its proof.
    assert num_responses == (5 if threat is Threat.ACTIVE else 3)


@pytest.mark.parametrize("threat", Threat)
def test_a_device_killed_after_each_record_completes_the_attempt(threat: Threat) -> None:
    terms = terms_of(5, threat)
    whole = attempt_of(terms, 5)
    whole.advertise()
    whole.share()
    if isinstance(whole.mask(update_of), Confirming):
        whole.confirm()
    whole.unmask()

    class Mortal(MaskedDevice):
        def receive(self, message: bytes) -> tuple[bytes, ...]:
            """Die after each record, before anything is sent, and receive the message again."""
            responses = []
            for effect in device.receive(self.state, message, self.entropy)[1]:
                if isinstance(effect, Remember):
                    self.journal.append(record_of(effect.fact))
                    self.carry_out((device.resume(self.identity, read_journal(b"".join(self.journal)))[0], ()))
                    return self.receive(message)
                assert isinstance(effect, Respond)
                responses.append(effect.message)
            return tuple(responses)

    again = attempt_of(terms, 5)
    again.devices = [Mortal(each.identity, each.entropy) for each in again.devices]
    again.advertise()
    again.share()
    if isinstance(again.mask(update_of), Confirming):
        again.confirm()
    again.unmask()
    check_sum(again, [update_of(index) for index in range(5)])


def test_a_device_outside_the_survivors_gives_nothing() -> None:
    attempt = masked()
    with refused("FN-1639", Conflict):
        attempt.devices[5].receive(survivors_message(attempt, [0, 1, 2, 3]))


def test_survivors_below_the_least_number_are_refused() -> None:
    attempt = masked()
    with refused("FN-1638"):
        attempt.devices[0].receive(survivors_message(attempt, [0, 1]))


def test_a_sum_with_one_honest_device_is_refused() -> None:
    """Of 10 devices 4 may be adversarial. Five survivors could be these and one honest device."""
    attempt = masked(10, Threat.ACTIVE, adversarial=0.4)
    assert attempt.terms.min_survivors == 3 and attempt.terms.least_survivors(10) == 6
    with refused("FN-1638"):
        attempt.devices[0].receive(survivors_message(attempt, range(5)))
    attempt.devices[0].receive(survivors_message(attempt, range(6)))


def test_survivors_that_sent_no_shares_are_refused() -> None:
    attempt = attempt_of(terms_of(6, Threat.ACTIVE, dropout=0.2), 6)
    attempt.advertise()
    attempt.share({5})
    attempt.mask(update_of)
    with refused("FN-1633"):
        attempt.devices[0].receive(survivors_message(attempt, [0, 1, 2, 3, 5]))


def test_fewer_sharers_or_updates_than_survivors_are_needed_are_refused() -> None:
    terms = replace(terms_of(6, Threat.ACTIVE), min_survivors=5)
    attempt = attempt_of(terms, 6)
    attempt.advertise()
    masking = attempt.share()
    (whole,) = coordinator.respond(masking, 0)
    row = messages.read_sealed(terms.digest, whole, Kind.DELIVERY, 6)
    few = replace(row, members=b"\x0f", sealed={index: row.sealed[index] for index in (1, 2, 3)})
    with refused("FN-1638"):
        attempt.devices[0].receive(messages.delivery_bytes(terms.digest, few))
    with refused("FN-1638", Conflict):
        coordinator.freeze_survivors(masking, [0, 1, 2, 3])
    coordinator.freeze_survivors(masking, [0, 1, 2, 3, 4])


def test_survivors_of_another_set_of_sharers_are_refused() -> None:
    attempt = masked()
    message = messages.framed(Kind.SURVIVORS, attempt.terms.digest, bytes(32), b"\x3f")
    with refused("FN-1633"):
        attempt.devices[0].receive(message)


def test_shares_are_not_given_before_the_masked_payload() -> None:
    attempt = shared()
    assert isinstance(attempt.phase, Masking)
    each = attempt.devices[0]
    with refused("FN-1635"):
        each.receive(messages.framed(Kind.SURVIVORS, attempt.terms.digest, bytes(32), b"\x0f"))
    each.receive(coordinator.respond(attempt.phase, 0)[0])
    with refused("FN-1635"):
        each.receive(messages.framed(Kind.SURVIVORS, attempt.terms.digest, attempt.phase.sharers.digest, b"\x0f"))


# A later attempt of a Round in which shares were given.


def test_an_attempt_is_later_than_the_ones_before() -> None:
    attempt = masked()
    each = attempt.devices[0]
    each.receive(survivors_message(attempt, range(6)))
    gave, quiet = each, attempt.devices[1]
    for one in (gave, quiet):
        one.finish()
    for terms in (attempt.terms, later(attempt.terms, rounds=-1), later(attempt.terms, rounds=-1, attempts=5)):
        for one in (gave, quiet):
            with refused("FN-1641", Conflict):
                one.begin(terms)
    with refused("FN-1641", Conflict):
        gave.begin(later(attempt.terms, attempts=1))
    assert quiet.begin(later(attempt.terms, attempts=1))
    assert gave.begin(later(attempt.terms, rounds=1))
    assert gave.begin(replace(attempt.terms, run_id="other"))


# The floor.


@pytest.mark.parametrize(
    "floor",
    [
        MaskFloor(threat=Threat.SEMI_MALICIOUS),
        MaskFloor(threat=Threat.ACTIVE),
        MaskFloor(min_survivors=4),
        MaskFloor(adversarial_ppm=1),
        MaskFloor(security_bits=41),
    ],
    ids=["semi-malicious", "active", "survivors", "adversarial", "bits"],
)
def test_less_than_the_floor_is_refused_before_keys_are_drawn(floor: MaskFloor) -> None:
    def no_entropy(size: int) -> bytes:
        raise AssertionError("no keys are drawn")

    terms, own = terms_of(4), attempt_of(terms_of(4), 4).devices[0].identity
    with refused("FN-1628", InvalidPlan):
        device.begin(replace(own, floor=floor), terms, (), no_entropy)


def test_an_active_coordinator_needs_an_authority_on_the_device() -> None:
    terms = terms_of(4, Threat.ACTIVE)
    own = attempt_of(terms, 4).devices[0].identity
    with refused("FN-1628", InvalidPlan):
        device.begin(replace(own, floor=MaskFloor()), terms, (), FixedEntropy(1))
