"""What retention removes: a pure function of the record of a Run, its limits and the time.

    keep    what a key of the Plan keeps, and what was recorded less than ``GRACE_S`` ago
    need    what work needs, whatever the keys say:
              the newest Version, the Versions that Updates of an open Round may have been trained from,
              the best evaluated Version, and each Version that a rollback or a promotion adopted or published
    verify  the Versions that the Updates of a kept Round are folded into and were trained from

The parameters of a Version include its auxiliary tensors and the outer state after its Round, because a rollback needs
them together. The record of a Version, its signature and the digests of its Updates are never removed.

The removal is recorded before the first file is removed (``protocols.retention``). So the record never promises a file
that is gone, and a process that is killed in between leaves files that the next pass removes.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Final

from fanin.protos.errors import Conflict
from fanin.protos.messages import AcceptedDevices
from fanin.protos.plans import RetentionPlan

DAY_S: Final = 86400.0
GRACE_S: Final = 3600.0
"""Devices may still download a Version, and operators fetch it, for so long after the next one was published."""


_AFTER_S: Final = 1.0
"""Time after the limit of an age at which it has passed, whatever the rounding."""


class RemovedKind(Enum):
    """What was removed: the parameters of a Version, or the Updates of a Round."""

    PARAMETERS = "parameters"
    UPDATES = "updates"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFact:
    """A Version whose parameters are stored.

    Attributes:
        round: The Round that published it, 0 for a Version from outside.
        published_at_s: Wall time of its publication.
    """

    round: int
    published_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFact:
    """A Round with a Version whose Updates are stored.

    Attributes:
        bases: The Versions that its Updates were trained from, its own base included.
        published_at_s: Wall time of the publication of its Version.
    """

    bases: frozenset[int]
    published_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The record of a Run, as far as retention reads it.

    Attributes:
        versions: The Versions whose parameters are stored, by number. The newest one is always among them.
        rounds: The Rounds whose Updates are stored, by number. Rounds without a Version are not among them.
        needed: The lowest Version that Updates of an open Round may be trained from; None without an open Round.
        pinned: Versions that stay: adopted ones, those that adopted them, and the best evaluated one.
    """

    versions: Mapping[int, VersionFact]
    rounds: Mapping[int, RoundFact]
    needed: int | None
    pinned: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Removable:
    """What is removed.

    Attributes:
        versions: The Versions whose parameters go, in order.
        rounds: The Rounds whose Updates go, in order.
        events_before_s: Events that only tell the progress of a Round go if they are older; None: none.
    """

    versions: tuple[int, ...] = ()
    rounds: tuple[int, ...] = ()
    events_before_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Young:
    """What limits do not keep, and what stays because it is not old enough yet.

    Attributes:
        versions: The number of Versions.
        rounds: The number of Rounds.
        until_s: Wall time from which on the first of them is old enough, 0 without any.
    """

    versions: int = 0
    rounds: int = 0
    until_s: float = 0.0


def removable(facts: RunFacts, retention: RetentionPlan, now_s: float) -> Removable:
    """Return what the limits do not keep and nothing needs."""
    if not retention:
        return Removable()
    days = retention.keep_days
    kept_after_s = now_s - max(GRACE_S, (days or 0.0) * DAY_S)
    rounds = {
        number
        for number in _beyond(facts.rounds, retention.keep_updates, by_days=days is not None)
        if facts.rounds[number].published_at_s < now_s - (days or 0.0) * DAY_S
    }
    needed = {max(facts.versions)} | facts.pinned
    for number in facts.rounds.keys() - rounds:
        needed |= facts.rounds[number].bases
    if facts.needed is not None:
        needed |= {number for number in facts.versions if number >= facts.needed}
    superseded = _superseded(facts.versions)
    versions = {
        number
        for number in _beyond(facts.versions, retention.keep_versions, by_days=days is not None)
        if number not in needed and superseded[number] < kept_after_s
    }
    return Removable(
        versions=tuple(sorted(versions)),
        rounds=tuple(sorted(rounds)),
        events_before_s=None if days is None else kept_after_s,
    )


def young(facts: RunFacts, retention: RetentionPlan, now_s: float) -> Young:
    """Return what the limits would not keep of a Run that rests, only because of its age."""
    old = removable(facts, retention, now_s)
    ages = (retention.keep_days or 0.0) * DAY_S
    starts = [each.published_at_s + ages for each in facts.rounds.values()]
    starts += [superseded_s + max(GRACE_S, ages) for superseded_s in _superseded(facts.versions).values()]
    # What is removable only grows with the time, so the first moment is found by bisection.
    moments = sorted(start_s + _AFTER_S for start_s in starts if start_s >= now_s - _AFTER_S)
    first = bisect_right(moments, _size(old), key=lambda at_s: _size(removable(facts, retention, at_s)))
    if first == len(moments):
        return Young()
    last = removable(facts, retention, moments[-1])
    return Young(
        versions=len(last.versions) - len(old.versions),
        rounds=len(last.rounds) - len(old.rounds),
        until_s=moments[first],
    )


def _size(what: Removable) -> int:
    return len(what.versions) + len(what.rounds)


def _beyond(numbers: Mapping[int, object], keep: int | None, *, by_days: bool) -> list[int]:
    """Return the numbers that a count does not keep. Without a count, ``keep_days`` alone decides, or nothing goes."""
    if keep is None:
        return list(numbers) if by_days else []
    return sorted(numbers)[: max(len(numbers) - keep, 0)]


def _superseded(versions: Mapping[int, VersionFact]) -> dict[int, float]:
    """Return for each Version the time at which the next one was published, from which on it is old."""
    numbers = sorted(versions)
    later = {number: versions[following].published_at_s for number, following in pairwise(numbers)}
    return {**later, numbers[-1]: versions[numbers[-1]].published_at_s}


def check_has_parameters(run_id: str, number: int, removed_at_s: float | None) -> None:
    """Raise Conflict if retention removed the parameters of a Version.

    Args:
        run_id: The Run.
        number: The Version.
        removed_at_s: Wall time of the removal, None without one.
    """
    if removed_at_s is not None:
        raise Conflict(
            f"run {run_id}: the parameters of version {number} were removed by retention, only its record is left; "
            "choose a later version, or restore a backup in another folder",
            code="FN-1441",
        )


def check_has_devices(run_id: str, round_number: int, page: AcceptedDevices, from_index: int) -> None:
    """Raise Conflict if retention removed the list of the devices of a Round, of which this page starts at an index."""
    if from_index < page.num_accepted and not page.device_ids:
        raise Conflict(
            f"run {run_id}: retention removed the list of the {page.num_accepted} devices of round {round_number}, "
            "their number and a digest are left; restore a backup in another folder to read it",
            code="FN-1451",
        )
