"""Warnings about the Updates of a Run: numbers that are right by the Plan, and probably not what an operator expects.

    examples_capped     ``aggregation.max_examples`` cut the weight of an Update
    statistic_cut       the sum of a device is the bound of the statistic, so it may have been cut to it
    shared_partition    two devices report the same partition, so its examples count twice
    scaffold_devices    ``num_devices`` of scaffold or feddyn is not the number of devices that take part
    strategy_state      the state of the Flower strategy cannot be saved, so the Run cannot resume after a restart
    ranges_kept         a Version kept the ranges of the one before, because they could not be measured on the data set

The store records each code and subject once a Run (``RunWriter.warn``). A Run continues after each of them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from fanin.edge.codecs.scaffold import NUM_DEVICES, declared_devices, named_devices
from fanin.protos.messages import RunWarned
from fanin.protos.plans import Plan
from fanin.protos.texts import counted
from fanin.server.rounds.reported import UpdateFacts
from fanin.server.storage.records import Contributors, MeasuredRanges

MAX_PARTITIONS: Final = 100_000
"""Partitions that are remembered, one device each. Later ones are not compared."""


class UpdateWarnings:
    """The warnings about the Updates of a Run.

    Args:
        plan: The Plan of the Run.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._devices: dict[int, str] = {}
        self._recorded: set[tuple[str, str]] = set()

    def of_round(self, round_number: int, updates: Mapping[str, UpdateFacts]) -> tuple[RunWarned, ...]:
        """Return the new warnings about the Updates of a published Round, by device."""
        warnings = [*self._capped(round_number, updates), *self._cut(round_number, updates), *self._shared(updates)]
        return tuple(each for each in warnings if self.is_new(each))

    def of_devices(self, contributors: Contributors, *, has_ended: bool) -> tuple[RunWarned, ...]:
        """Return the new warning about the number of devices of the Run so far.

        Args:
            contributors: The devices so far.
            has_ended: Whether the Run has ended. Before, more devices may take part later.
        """
        declared = declared_devices(self._plan.stages)
        num_devices = contributors.num_devices
        if declared is None:
            return ()
        if num_devices <= declared and not (has_ended and _are_few(contributors, declared)):
            return ()
        compared = "more" if num_devices > declared else "far fewer"
        text = (
            f"{counted(num_devices, 'device')} took part, {compared} than {NUM_DEVICES} = {declared} of the stage "
            f"{named_devices(self._plan.stages)}, whose states assume that number; set {NUM_DEVICES} to the number of "
            "all devices of the run"
        )
        is_known = ("scaffold_devices", compared) in self._recorded
        return () if is_known else (RunWarned(code="scaffold_devices", subject=compared, text=text),)

    def of_strategy(self, unsaved: str) -> tuple[RunWarned, ...]:
        """Return the new warning about the state of the strategy. ``unsaved`` is empty if it is saved."""
        text = (
            f"the run cannot resume after a restart of the coordinator: the state of the strategy "
            f"{self._plan.flower.strategy} cannot be saved ({unsaved}); define __getstate__ and __setstate__ of plain "
            "values and arrays"
        )
        warning = RunWarned(code="strategy_state", text=text)
        return (warning,) if unsaved and self.is_new(warning) else ()

    def of_ranges(self, round_number: int, measured: MeasuredRanges | None) -> tuple[RunWarned, ...]:
        """Return the new warning about the ranges of the Version of a Round, None if nothing was to be measured."""
        if measured is None or not measured.problem:
            return ()
        text = (
            f"the version of round {round_number} has the ranges of activations of the version before it, because they "
            f"could not be measured on {measured.data!r}: {measured.problem}. Each round measures again; fanin verify "
            "lists the versions that kept their ranges"
        )
        warning = RunWarned(code="ranges_kept", subject=measured.data, text=text)
        return (warning,) if self.is_new(warning) else ()

    def is_new(self, warning: RunWarned) -> bool:
        """Return whether a warning is not recorded yet."""
        return (warning.code, warning.subject) not in self._recorded

    def note(self, recorded: Iterable[RunWarned]) -> None:
        """Remember recorded warnings, which are not new any more."""
        self._recorded |= {(each.code, each.subject) for each in recorded}

    def _capped(self, round_number: int, updates: Mapping[str, UpdateFacts]) -> list[RunWarned]:
        capped = [each for each in updates.values() if each.examples < each.trained]
        if not capped:
            return []
        largest, total = max(each.trained for each in capped), sum(each.trained for each in updates.values())
        text = (
            f"aggregation.max_examples = {self._plan.max_examples} cuts the weight of {len(capped)} of "
            f"{counted(len(updates), 'update')} of round {round_number}: the largest has {largest} examples, and "
            f"{sum(each.examples for each in updates.values())} of {total} examples count; raise it, or remove it "
            "for the mean over all examples"
        )
        return [RunWarned(code="examples_capped", text=text)]

    def _cut(self, round_number: int, updates: Mapping[str, UpdateFacts]) -> list[RunWarned]:
        own = {each.name for each in self._plan.statistics}
        bounds = {name: bound for update in updates.values() for name, bound in update.at_bound.items()}
        numbers = Counter(name for update in updates.values() for name in update.at_bound)
        return [
            RunWarned(
                code="statistic_cut",
                subject=name,
                text=f"{number} of {counted(len(updates), 'update')} of round {round_number} report {name} at its "
                f"bound, {bounds[name]}: a larger sum is cut to it, so its mean may be wrong; "
                + ("raise its bound in the plan" if name in own else "lower the learning rate if it diverges"),
            )
            for name, number in sorted(numbers.items())
        ]

    def _shared(self, updates: Mapping[str, UpdateFacts]) -> list[RunWarned]:
        warnings = []
        for device, update in updates.items():
            if (partition := update.telemetry.partition) is None:
                continue
            if len(self._devices) < MAX_PARTITIONS:
                self._devices.setdefault(partition, device)
            first = self._devices.get(partition, device)
            if first != device:
                text = (
                    f"the devices {first} and {device} both report partition {partition}: if both have its "
                    "examples, these count twice; start each device with its own --partition"
                )
                warnings.append(
                    RunWarned(code="shared_partition", subject=" ".join(sorted((first, device))), text=text)
                )
        return warnings


def _are_few(contributors: Contributors, declared: int) -> bool:
    """Return whether so few devices take part that ``declared`` devices with equal chances would be surprising."""
    expected = declared * (1.0 - (1.0 - 1.0 / declared) ** contributors.num_updates)
    return 2 * contributors.num_devices < expected
