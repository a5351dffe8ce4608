"""The Rounds whose Updates still count, and who is at work for them.

That is the open Round, and with a Plan that allows staleness those shortly before it. A Version from outside, or one
that was rolled back to, is a new beginning: what was trained before it never counts.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from fanin.protos.messages import Version
from fanin.server.storage.sqlite.rounds import RoundRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What the Assignments of a Round are made of."""

    record: RoundRecord
    base: Version


class RecentRounds:
    """The Rounds of one Run that devices may still be at work for, by number."""

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self._rounds: dict[int, Made] = {}
        self._chunks: Counter[str] = Counter()
        self._beginning = 0

    def __iter__(self) -> Iterator[Made]:
        return iter(tuple(self._rounds.values()))

    def begin_at(self, version: int) -> None:
        """Let nothing count that was trained from a Version before this one, the newest that no Round made."""
        self._beginning = version

    def add(self, made: Made) -> None:
        """Remember a Round."""
        if made.record.round not in self._rounds:
            self._chunks.update(ref.sha256 for ref in made.base.parameters.chunks)
        self._rounds[made.record.round] = made

    def get(self, round_number: int) -> Made | None:
        """A Round, if it is remembered."""
        return self._rounds.get(round_number)

    def begins_with(self, sha256: str) -> bool:
        """Whether a Chunk is one of a Version that a remembered Round starts from."""
        return self._chunks[sha256] > 0

    def oldest_base(self, base_version: int) -> int:
        """The first Version that an Update for a Round from ``base_version`` may have been trained from."""
        return max(base_version - self.max_staleness, self._beginning)

    def counts_from(self, round_number: int, base_version: int) -> bool:
        """Whether, by staleness, an Update that was made for a Round counts in another one from this Version."""
        made = self._rounds.get(round_number)
        if made is None or not self.max_staleness:
            return False
        return made.record.base_version >= self.oldest_base(base_version)

    def counts_in(self, round_number: int, current: RoundRecord) -> bool:
        """Whether an Update that was made for a Round counts in the current one."""
        return round_number == current.round or self.counts_from(round_number, current.base_version)

    def forget(self, record: RoundRecord) -> None:
        """Forget a Round."""
        made = self._rounds.pop(record.round)
        self._chunks.subtract(ref.sha256 for ref in made.base.parameters.chunks)
        self._chunks = +self._chunks


class AtWork:
    """Which Round each device is at work for, and until when it keeps its place over the end of a Round."""

    def __init__(self) -> None:
        self._work: dict[str, tuple[int, float]] = {}

    def begin(self, device: str, round_number: int, due: float) -> None:
        """A device was given an Assignment, and a deadline on the caller's clock."""
        self._work[device] = (round_number, due)

    def end(self, device: str) -> None:
        """A device is done, or will never be."""
        self._work.pop(device, None)

    def round_of(self, device: str) -> int | None:
        """The Round that a device is at work for."""
        found = self._work.get(device)
        return None if found is None else found[0]

    def carry(self, recent: RecentRounds, current: RoundRecord, now: float) -> frozenset[str]:
        """Those whose work counts in a Round that begins, and who may still be expected; all others are forgotten."""
        self._work = {
            device: (number, due)
            for device, (number, due) in self._work.items()
            if now < due and recent.counts_from(number, current.base_version)
        }
        return frozenset(self._work)
