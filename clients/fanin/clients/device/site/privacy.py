"""The privacy of a device for its owner: the floor in force with the origin of each value, and the device's ledger.

Both are read from the files of the device's folder, so the device may run or be stopped.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from fanin.clients.device.policy.guard import MANIFEST, OWNER
from fanin.clients.device.policy.ledger import PrivacyRecord, RunPrivacy, read_ledger
from fanin.clients.device.policy.owner import read_policy
from fanin.edge.floors.floor import PrivacyFloor, origins, value_text
from fanin.edge.floors.rows import parse_floor
from fanin.protos.errors import InvalidInput
from fanin.protos.plans import SECAGG_PROTOCOL
from fanin.protos.texts import counted

MAX_SHOWN_RUNS: Final = 5
MASKS_TEXT: Final = (
    "the coordinator has sums of the updates of several devices, and not this device's alone; without differential "
    "privacy, nothing bounds what the sums show, and two sums that differ by this device show its update"
)
NO_DEMANDS: Final = "none: this device takes part in every run whose bundle comes from a publisher that it trusts"


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorValue:
    """A value of the floor in force, and who demands it: ``owner``, ``manifest`` or both."""

    key: str
    value: object
    origins: tuple[str, ...]

    @property
    def text(self) -> str:
        """The value on one line."""
        return f"{self.key} {value_text(self.value)} ({' and '.join(self.origins)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePrivacy:
    """The privacy of a device.

    Attributes:
        owner: The floor of the owner, which holds for every Run.
        runs: The floors of the newest Runs whose manifest has one, by Run, together with the owner's.
        problem: Why the device takes part in nothing; "" if it does.
        ledger: The ledger.
        ledger_problem: Why it cannot be shown; "" if it can.
    """

    owner: tuple[FloorValue, ...] = ()
    runs: dict[str, tuple[FloorValue, ...]] = field(default_factory=dict)
    problem: str = ""
    ledger: PrivacyRecord = field(default_factory=PrivacyRecord)
    ledger_problem: str = ""

    def document(self) -> dict[str, object]:
        """Return the privacy as a JSON object."""
        runs = {
            run: {**asdict(each), "epsilon": self._epsilon(each)} for run, each in _newest_first(self.ledger).items()
        }
        total = self.ledger.total
        return {
            "floor": [asdict(each) for each in self.owner],
            "floors": {run: [asdict(each) for each in values] for run, values in self.runs.items()},
            "problem": self.problem,
            "ledger_problem": self.ledger_problem,
            "runs": runs,
            "populations": {
                name: {**asdict(each), "epsilon": self._epsilon(each)} for name, each in self.ledger.populations.items()
            },
            "total": {**asdict(total), "epsilon": self._epsilon(total)},
            "damaged_at": self.ledger.damaged_at,
            "floor_texts": list(self.floor_texts()),
            "ledger_texts": list(self.ledger_texts()),
        }

    def floor_texts(self) -> Iterator[str]:
        """Yield the floor in force as lines for people."""
        if self.problem:
            yield self.problem
            return
        yield ", ".join(each.text for each in self.owner) or ("none of the owner" if self.runs else NO_DEMANDS)
        for run, values in self.runs.items():
            yield f"run {run}: {', '.join(each.text for each in values)}"

    def ledger_texts(self) -> Iterator[str]:
        """Yield the ledger as lines for people."""
        if self.ledger_problem:
            yield self.ledger_problem
            return
        runs = _newest_first(self.ledger)
        for run, each in list(runs.items())[:MAX_SHOWN_RUNS]:
            yield from (f"run {run}: asks for statistics of the examples: {text}" for text in each.asked)
            if each.num_rounds:
                population = f" of population {each.population}" if each.population else ""
                yield f"run {run}{population}: {self._spent(each)}"
            if each.num_refused:
                times = counted(each.num_refused, "assignment")
                yield f"run {run}: refused {times}, last {_time(each.refused_at)}: {each.refusal}"
        for name, each in self.ledger.populations.items():
            yield f"population {name}, all its runs: {self._spent(each)}"
        total = self.ledger.total
        if len(runs) > 1 and total.num_rounds:
            yield f"all runs: {self._spent(total)}"
        if self.ledger.damaged_at:
            yield f"the ledger was damaged before {_time(self.ledger.damaged_at)}: what was sent until then is unknown"
        if not runs:
            yield "nothing was sent yet"

    def _epsilon(self, run: RunPrivacy) -> float | None:
        return None if self.ledger.damaged_at else run.epsilon

    def _spent(self, run: RunPrivacy) -> str:
        rounds = counted(run.num_rounds, "round")
        if run.num_bare == run.num_rounds:
            if run.protocol != SECAGG_PROTOCOL:
                # Also of a total, which has no protocol.
                return f"{rounds} without differential privacy"
            return f"{rounds}, the last under masks: {MASKS_TEXT}"
        terms = (
            f", the last with {run.mechanism} noise, clip norm {run.clip_norm:g}, noise multiplier "
            f"{run.noise_multiplier:g}"
            if run.mechanism
            else ""
        )
        epsilon = self._epsilon(run)
        if epsilon is not None:
            return f"{rounds}{terms}: epsilon at most {epsilon:.3g} at delta {run.delta:g}"
        bare = f"{counted(run.num_bare, 'round')} without differential privacy" if run.num_bare else ""
        return f"{rounds}{terms}: no bound of epsilon{f', {bare}' if bare else ''}"


def site_privacy(folder: Path) -> SitePrivacy:
    """Return the privacy of a device from its folder. Raises OSError if a file in it cannot be read."""
    ledger, ledger_problem = PrivacyRecord(), ""
    try:
        ledger = read_ledger(folder)
    except ValueError as exc:
        ledger_problem = f"the ledger is damaged ({exc}); the device begins a new one with its next round"
    runs: dict[str, tuple[FloorValue, ...]] = {}
    try:
        owner = read_policy(folder)
        for run, each in _newest_first(ledger).items():
            if each.floor and len(runs) < MAX_SHOWN_RUNS:
                runs[run] = _values({OWNER: owner, MANIFEST: parse_floor(each.floor, MANIFEST)})
        values = _values({OWNER: owner})
    except InvalidInput as exc:
        problem = f"this device takes part in nothing: {exc} [{exc.code}]"
        return SitePrivacy(problem=problem, ledger=ledger, ledger_problem=ledger_problem)
    return SitePrivacy(owner=values, runs=runs, ledger=ledger, ledger_problem=ledger_problem)


def _values(floors: dict[str, PrivacyFloor]) -> tuple[FloorValue, ...]:
    rows = origins(floors)
    return tuple(FloorValue(key=key, value=value, origins=names) for key, (value, names) in rows.items())


def _newest_first(ledger: PrivacyRecord) -> dict[str, RunPrivacy]:
    rows = sorted(ledger.runs.items(), key=lambda item: -max(item[1].last_at, item[1].refused_at))
    return dict(rows)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
