"""The recent Rounds of a Run, and the Chunks that devices may download for them."""

import pytest
from support.values import assignment, version

from fanin.protos.chunks import artifact_of
from fanin.server.rounds.recent import OpenedRound, RecentRounds
from fanin.server.storage.contracts.values import opened

BASE = assignment().version
SECOND = version(parent=BASE, auxiliary={"control": artifact_of(b"control")})


def recent_rounds(*rounds: OpenedRound) -> RecentRounds:
    recent = RecentRounds(max_staleness=1)
    for each in rounds:
        recent.add(each)
    return recent


def test_a_chunk_is_known_until_the_last_round_on_its_version_is_forgotten() -> None:
    first, second = (OpenedRound(record=opened(number), base=BASE) for number in (1, 2))
    recent = recent_rounds(first, second)
    (sha256,) = {ref.sha256 for ref in BASE.chunks}
    assert recent.has_base_chunk(sha256)
    recent.forget(first.record)
    assert recent.has_base_chunk(sha256)
    recent.forget(second.record)
    assert not recent.has_base_chunk(sha256)


def test_a_round_that_is_added_again_is_counted_once() -> None:
    """``add`` is idempotent."""
    first = OpenedRound(record=opened(), base=BASE)
    recent = recent_rounds(first, first)
    recent.forget(first.record)
    assert not any(recent.has_base_chunk(ref.sha256) for ref in BASE.chunks)
    assert recent.get(1) is None


@pytest.mark.parametrize("name", ["parameters", "control"])
def test_the_chunks_of_auxiliary_tensors_are_known_as_long_as_their_version(name: str) -> None:
    last = OpenedRound(record=opened(2, base_version=1), base=SECOND)
    tensor = SECOND.auxiliary.get(name, SECOND.parameters)
    recent = recent_rounds(last)
    assert all(recent.has_base_chunk(ref.sha256) for ref in tensor.chunks)
    recent.forget(last.record)
    assert not any(recent.has_base_chunk(ref.sha256) for ref in tensor.chunks)
