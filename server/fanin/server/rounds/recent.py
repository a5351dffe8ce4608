"""The Rounds whose Updates still count, and the devices that work for them.

These are the open Round and, if the Plan allows staleness, the Rounds shortly before it. A Version that no Round
published (from outside, or by a rollback) starts a new lineage. Updates trained before it never count.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fanin.protos.messages import RoundTimes, Version
from fanin.server.privacy.noising import CentralNoise, SharedNoise
from fanin.server.storage.records import RoundRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRound:
    """A recorded Round and its base Version: all that varies in the Assignments of a Round but the device.

    Attributes:
        record: The Round.
        base: Its base Version.
        noise: Its noise; None without differential privacy, and for a Round that assigns no more.
        only: The devices that alone may take part, and all must (``opening.devices_of_query``); None: any device.
    """

    record: RoundRecord
    base: Version
    noise: CentralNoise | SharedNoise | None = None
    only: frozenset[str] | None = None

    @property
    def clip_norm(self) -> float:
        """Largest L2 norm of a change, 0 without differential privacy."""
        return 0.0 if self.noise is None else self.noise.grid.clip_norm


def counts_from(origin: RoundRecord, base_version: int, max_staleness: int, lineage: int) -> bool:
    """Return whether a stale Update for a Round counts in a later Round on ``base_version``."""
    return max_staleness > 0 and origin.base_version >= max(base_version - max_staleness, lineage)


class RecentRounds:
    """The Rounds of one Run for which devices may still work, by number.

    Attributes:
        max_staleness: The largest staleness of the Plan.
        lineage: The newest Version that no Round published. Updates trained from Versions before it never count.
    """

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self._rounds: dict[int, OpenedRound] = {}
        # By Round: the devices whose Assignment is over, because they gave it up or their Update was refused.
        self._over: dict[int, set[str]] = {}
        # Number of these Rounds that start from a Version with this Chunk.
        self._chunks: Counter[str] = Counter()
        self.lineage = 0

    def __iter__(self) -> Iterator[OpenedRound]:
        return iter(tuple(self._rounds.values()))

    def add(self, opened: OpenedRound) -> None:
        """Remember a Round."""
        if opened.record.round not in self._rounds:
            self._chunks.update(ref.sha256 for ref in opened.base.chunks)
        self._rounds[opened.record.round] = opened

    def get(self, round_number: int) -> OpenedRound | None:
        """Return a Round, or None if it is not remembered."""
        return self._rounds.get(round_number)

    def base(self, number: int) -> Version:
        """Return the base Version of a remembered Round by its number."""
        return next(opened.base for opened in self if opened.base.number == number)

    def has_base_chunk(self, sha256: str) -> bool:
        """Return whether a Chunk belongs to the base Version of a remembered Round."""
        return self._chunks[sha256] > 0

    def oldest_base(self, base_version: int) -> int:
        """Return the oldest Version from which an Update for a Round on ``base_version`` may be trained."""
        return max(base_version - self.max_staleness, self.lineage)

    def counts_from(self, round_number: int, base_version: int) -> bool:
        """Return whether a stale Update of a Round counts in a later Round on ``base_version``."""
        opened = self._rounds.get(round_number)
        return opened is not None and counts_from(opened.record, base_version, self.max_staleness, self.lineage)

    def counts_in(self, round_number: int, current: RoundRecord) -> bool:
        """Return whether an Update for a Round counts in the current Round."""
        return round_number == current.round or self.counts_from(round_number, current.base_version)

    def begin_assignment(self, round_number: int, device: str) -> None:
        """Note that a device received the Assignment of a Round, perhaps once more after it was over."""
        self._over.get(round_number, set()).discard(device)

    def end_assignment(self, round_number: int, device: str) -> None:
        """Note that a device gave up its Assignment of a Round, or that its Update was refused."""
        if round_number in self._rounds:
            self._over.setdefault(round_number, set()).add(device)

    def is_over(self, round_number: int, device: str) -> bool:
        """Return whether the Assignment of a device is over, although its Round may be open."""
        return device in self._over.get(round_number, ())

    def forget(self, record: RoundRecord) -> None:
        """Forget a Round."""
        self._over.pop(record.round, None)
        opened = self._rounds.pop(record.round)
        self._chunks.subtract(ref.sha256 for ref in opened.base.chunks)
        self._chunks = +self._chunks


class AtWork:
    """The Round for which each device works, and how long the device keeps its place after the end of that Round."""

    def __init__(self) -> None:
        # By device: the number of the Round, and the deadline on the caller's clock.
        self._work: dict[str, tuple[int, float]] = {}

    def begin(self, device: str, round_number: int, deadline: float) -> None:
        """Note that a device received an Assignment. ``deadline`` is a time on the caller's clock, in seconds."""
        self._work[device] = (round_number, deadline)

    def end(self, device: str) -> None:
        """Note that a device has finished its Assignment, or never will."""
        self._work.pop(device, None)

    def round_of(self, device: str) -> int | None:
        """Return the number of the Round for which a device works."""
        entry = self._work.get(device)
        return None if entry is None else entry[0]

    def carry(self, recent: RecentRounds, current: RoundRecord, now: float) -> frozenset[str]:
        """Return the devices that keep a place in a Round that begins, and forget all others.

        A device keeps its place if its Update counts in the new Round and its deadline has not passed.
        """
        self._work = {
            device: (number, deadline)
            for device, (number, deadline) in self._work.items()
            if now < deadline and recent.counts_from(number, current.base_version)
        }
        return frozenset(self._work)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkTime:
    """When a device worked for a Round, in seconds since the Round was opened."""

    assigned_s: float
    upload_s: float
    committed_s: float


class WorkTimes:
    """When the devices of the open Round began to work and to upload.

    Args:
        opened: The time at which the Round was opened, on the machine's clock.
    """

    def __init__(self, opened: float) -> None:
        self._opened = opened
        self._assigned: dict[str, float] = {}
        self._uploads: dict[str, float] = {}

    def begin(self, device: str, now: float) -> None:
        """Note that a device got its Assignment."""
        self._assigned[device] = now - self._opened

    def upload(self, device: str, now: float) -> None:
        """Note that a device uploads. Later connections of the same upload change nothing."""
        self._uploads.setdefault(device, now - self._opened)

    def commit(self, device: str, now: float) -> WorkTime | None:
        """Return when a device worked whose Update is committed now; None if it began in an earlier Round."""
        if device not in self._assigned or device not in self._uploads:
            return None
        return WorkTime(
            assigned_s=self._assigned[device], upload_s=self._uploads[device], committed_s=now - self._opened
        )


def round_times(work: Sequence[tuple[WorkTime, float]], closed_s: float, published_s: float) -> RoundTimes | None:
    """Return the parts of a Round's duration, the mean over its devices.

    Args:
        work: When each device worked, and the seconds of its training.
        closed_s: When the Round closed, in seconds since it was opened.
        published_s: When it published its Version, likewise.

    Returns:
        The parts, None without a device.
    """
    if not work:
        return None
    num = len(work)
    # A device reports the time of its training, so it may report more than passed.
    train_s = [min(seconds, max(one.upload_s - one.assigned_s, 0.0)) for one, seconds in work]
    busy_s = sum(one.upload_s - one.assigned_s for one, _ in work) / num
    upload_s = sum(one.committed_s - one.upload_s for one, _ in work) / num
    return RoundTimes(
        num_devices=num,
        wait_s=max(closed_s - busy_s - upload_s, 0.0),
        download_s=max(busy_s - sum(train_s) / num, 0.0),
        train_s=sum(train_s) / num,
        upload_s=upload_s,
        fold_s=max(published_s - closed_s, 0.0),
    )
