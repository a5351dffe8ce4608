"""What a device does with its honest change: it sends it, or attacks. Colluding attackers share what they know.

    ObservedTrainer --(honest change)--> Conduct --(change that is sent)--> session, stages, codec
                                            |  ^
                                            v  |
                                         Collusion: the honest changes of each Round

An attacker that colludes ends its training after the honest devices that train for the same Round, so it knows their
changes. All of it happens on the virtual clock, so the same seed gives the same attack.
"""

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.edge.bundles.arrays import table_in
from fanin.edge.codecs.statistics import range_counts_of
from fanin.edge.codecs.trained import TrainedPart
from fanin.edge.ranges import columns, counts
from fanin.edge.tensors import Float32s, Float64s
from fanin.protos.messages import EXAMPLES, Assignment, RangeCounts
from fanin.simulation.devices.attacks import LARGEST, Attack, HonestUpdates
from fanin.simulation.devices.habits import Habits

AFTER_S: Final = 0.001
"""Seconds by which a colluding attacker ends its training after the last honest device."""
KEPT_ROUNDS: Final = 4
"""Rounds whose honest changes are known. Two vectors of float64 each."""


@dataclass(slots=True, kw_only=True)
class _Known:
    """The devices and the honest changes of one Round. Mean and deviation are updated by each change (Welford)."""

    due_s: dict[str, float] = field(default_factory=dict)
    attackers: set[str] = field(default_factory=set)
    honest: set[str] = field(default_factory=set)
    mean: Float64s = field(default_factory=lambda: np.zeros(0))
    squares: Float64s = field(default_factory=lambda: np.zeros(0))

    def add(self, device: str, values: Float32s) -> None:
        if device in self.honest:
            # The device trained again after it had left.
            return
        self.honest.add(device)
        if len(self.honest) == 1:
            self.mean, self.squares = np.zeros(values.size), np.zeros(values.size)
        before = values - self.mean
        self.mean += before / len(self.honest)
        self.squares += before * (values - self.mean)


class Collusion:
    """What the colluding attackers of a federation know of each Round. Without one of them, no change is kept.

    Attributes:
        is_active: Whether one of them has trained.
    """

    def __init__(self) -> None:
        self.is_active = False
        self._rounds: dict[int, _Known] = {}

    def begin(self, device: str, attack: Attack | None, round_number: int, due_s: float) -> None:
        """Note that a device has begun a training, which ends at the virtual time ``due_s``."""
        self.is_active |= attack is not None and attack.colludes
        known = self._known(round_number)
        if attack is None:
            known.due_s[device] = due_s
        else:
            known.attackers.add(device)

    def add(self, device: str, round_number: int, values: Float32s) -> None:
        """Add the change of an honest device: its trained parameters (num_trained,)."""
        self._known(round_number).add(device, values)

    def delay_s(self, round_number: int, now_s: float) -> float:
        """Return the seconds after which all honest trainings of a Round that have begun are over; 0 if they are."""
        late_s = max(self._known(round_number).due_s.values(), default=now_s - AFTER_S) + AFTER_S - now_s
        # A wait that is too short for the clock would never end.
        return late_s if late_s > AFTER_S / 2.0 else 0.0

    def honest(self, round_number: int) -> HonestUpdates | None:
        """Return what is known of the honest Updates of a Round; None without any."""
        known = self._known(round_number)
        if not known.honest:
            return None
        num_honest = len(known.honest)
        return HonestUpdates(
            mean=known.mean,
            deviation=np.sqrt(known.squares / max(num_honest - 1, 1)),
            num_honest=num_honest,
            num_attackers=len(known.attackers),
        )

    def _known(self, round_number: int) -> _Known:
        if round_number not in self._rounds:
            self._rounds[round_number] = _Known()
            for old in sorted(self._rounds)[:-KEPT_ROUNDS]:
                del self._rounds[old]
        return self._rounds.setdefault(round_number, _Known())


class Conduct:
    """The conduct of one device.

    Args:
        device: Its name.
        habits: Its habits.
        collusion: What the attackers of the federation know.
    """

    def __init__(self, device: str, habits: Habits, collusion: Collusion) -> None:
        self._device = device
        self._attack, self._claim = habits.attack, habits.claim
        self._collusion = collusion

    def begin(self, assignment: Assignment, due_s: float) -> None:
        """Note that the device has begun its training, which ends at the virtual time ``due_s``."""
        self._collusion.begin(self._device, self._attack, assignment.round, due_s)

    def delay_s(self, assignment: Assignment, now_s: float) -> float:
        """Return the seconds for which the device waits for the Updates of others before it sends its own."""
        if self._attack is None or not self._attack.colludes:
            return 0.0
        return self._collusion.delay_s(assignment.round, now_s)

    def apply(self, model: OpenedModel, assignment: Assignment, change: Change, graph_format: str) -> Change:
        """Return the change that the device sends. A colluding attacker that knows no other Update is honest."""
        attack = self._attack
        if self._claim:
            change = replace(change, counts={**change.counts, EXAMPLES: self._claim})
        if attack is None and not self._collusion.is_active:
            return change
        part = TrainedPart(table_in(model.bundle.manifest, assignment.flower))
        own, others = part.split(change.values, 0)
        if attack is None:
            self._collusion.add(self._device, assignment.round, own)
            return change
        if attack.extreme is not None:
            change = replace(change, ranges=_ranges(model, attack.extreme, graph_format))
        values = attack.change(own)
        if attack.colludes:
            honest = self._collusion.honest(assignment.round)
            if honest is None:
                return change
            values = attack.collude(honest)
        limited = np.clip(values, -LARGEST, LARGEST).astype(np.float32)
        return replace(change, values=part.join(limited, others, 0))


def _ranges(model: OpenedModel, extreme: float, graph_format: str) -> RangeCounts:
    """Return ranges of all activations from -``extreme`` to ``extreme``, as of one example."""
    measured = columns(model.bundle.manifest.activations, graph_format)
    highs = np.full((1, measured.size), extreme, np.float32)
    return range_counts_of(counts(-highs, highs), measured)
