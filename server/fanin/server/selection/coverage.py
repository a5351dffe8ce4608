"""Which required participants a Round still lacks. Pure: the caller names the entries that a device meets.

The Plan's ``participants`` require numbers of devices by entry (``id:DEVICE``, ``tag:NAME=VALUE``), and least numbers
of devices and examples. Only an Update changes what is missing, and lowers it. So a Round that is complete stays so.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from fanin.protos.messages import VersionPublished
from fanin.protos.plans.participants import ID, TAG, ParticipantsPlan
from fanin.protos.texts import counted

MIN_DEVICES: Final = "min_devices"
MIN_EXAMPLES: Final = "min_examples"


@dataclass(frozen=True, slots=True)
class Lack:
    """What a Round lacks: pairs of an entry or key of the Plan and the missing number, in a fixed order."""

    pairs: tuple[tuple[str, int], ...] = ()

    def __bool__(self) -> bool:
        return any(number > 0 for _, number in self.pairs)

    @property
    def missing(self) -> Mapping[str, int]:
        """The missing numbers, without what is there."""
        return MappingProxyType({name: number for name, number in self.pairs if number > 0})

    @property
    def num_places(self) -> int:
        """The places that only required participants may take."""
        return sum(number for name, number in self.pairs if number > 0 and name.startswith((ID, TAG)))

    def after(self, meets: Collection[str], examples: int = 0) -> "Lack":
        """Return the lack after the Update of a device that meets these entries."""
        if not self.pairs:
            return self
        less = dict.fromkeys(meets, 1) | {MIN_DEVICES: 1, MIN_EXAMPLES: examples}
        return replace(self, pairs=tuple((name, max(number - less.get(name, 0), 0)) for name, number in self.pairs))


def lack_of(plan: ParticipantsPlan) -> Lack:
    """Return what a Round without Updates lacks."""
    numbers = {**plan.required, MIN_DEVICES: plan.min_devices, MIN_EXAMPLES: plan.min_examples}
    return Lack(tuple((name, number) for name, number in numbers.items() if number))


class Members:
    """The devices that the Plan's entries name.

    Args:
        plan: The Plan's section.
    """

    def __init__(self, plan: ParticipantsPlan) -> None:
        self._entries = frozenset(plan.required)
        self._tagged: dict[str, frozenset[str]] = {}

    def learn(self, entry: str, devices: Iterable[str]) -> None:
        """Replace the devices of an entry that names a tag."""
        self._tagged[entry] = frozenset(devices)

    def of(self, entry: str) -> frozenset[str]:
        """Return the devices that an entry names."""
        return frozenset((entry.removeprefix(ID),)) if entry.startswith(ID) else self._tagged.get(entry, frozenset())

    def met_by(self, device: str) -> frozenset[str]:
        """Return the entries that name a device."""
        tags = {entry for entry, devices in self._tagged.items() if device in devices}
        return frozenset(tags | (self._entries & {ID + device}))


def coverage_problem(
    plan: ParticipantsPlan, accepted: Collection[str], event: VersionPublished | None, num_examples: int
) -> str:
    """Return what is wrong about the recorded coverage of a Round, or an empty string.

    Devices and examples are recomputed from the set of Updates. Tags change after a Round, so their recorded numbers
    are compared with the Plan alone.
    """
    coverage = None if event is None else event.coverage
    if event is None or coverage is None:
        return "the event of its version has no coverage"
    recorded, actual = (coverage.num_devices, event.total_examples), (len(accepted), num_examples)
    if recorded != actual:
        devices, examples = counted(recorded[0], "device"), counted(recorded[1], "example")
        return f"recorded {devices} and {examples}, recomputed {actual[0]} and {actual[1]}"
    if coverage.required.keys() != plan.required.keys():
        return f"recorded the participants {sorted(coverage.required)}, not those of the plan"
    for entry, number in plan.required.items():
        covered = coverage.required[entry]
        if entry.startswith(ID):
            covered = min(covered, int(entry.removeprefix(ID) in accepted))
        if covered < number:
            return f"has {covered} of {number} required participants {entry}"
    if actual[0] < plan.min_devices or actual[1] < plan.min_examples:
        return f"has {counted(actual[0], 'device')} and {counted(actual[1], 'example')}, less than the plan requires"
    return ""
