"""The data sets of a coordinator, as the Plans of its Runs use them: for evaluations, and for ranges of activations."""

from collections.abc import Collection
from typing import Protocol

from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import BundleRef, StartRun, Version
from fanin.protos.plans import EvaluationPlan, Plan
from fanin.server.storage.records import MeasuredRanges


class DataSource(Protocol):
    """The data sets of a coordinator, for the Plans of its Runs."""

    @property
    def names(self) -> Collection[str]:
        """The names of the data sets."""
        ...

    async def check(self, start: StartRun, bundle: BundleRef) -> None:
        """Check the data set that a Plan names, with the Bundle. Raises InvalidPlan, Conflict."""
        ...

    async def measure(self, plan: Plan, bundle: BundleRef, version: Version) -> MeasuredRanges:
        """Return the ranges of the activations of a Version on the data set of its Plan.

        A failure of any kind is the ``problem`` of the result: it must not keep a Round from its Version.
        """
        ...

    async def stop(self) -> None:
        """End the work under way. ``measure`` may start again."""
        ...


class NoData:
    """The ``DataSource`` of a coordinator without data sets."""

    @property
    def names(self) -> Collection[str]:
        """See ``DataSource.names``."""
        return ()

    async def check(self, start: StartRun, bundle: BundleRef) -> None:
        """Do nothing: the name was refused before."""

    async def measure(self, plan: Plan, bundle: BundleRef, version: Version) -> MeasuredRanges:
        """See ``DataSource.measure``."""
        return no_data(plan.evaluation.data)

    async def stop(self) -> None:
        """Do nothing."""


def no_data(name: str) -> MeasuredRanges:
    """Return the result of a measurement on a data set that the coordinator does not have any more."""
    return MeasuredRanges(data=name, problem=f"got no data set {name!r}, expected fanin serve --data {name}=PATH")


def data_names(evaluation: EvaluationPlan) -> tuple[str, ...]:
    """Return the names of all data sets of a Plan, those of its metrics without a prefix first."""
    return (*filter(None, (evaluation.data,)), *(each.data for each in evaluation.sets))


def check_data_name(what: str, plan: Plan, known: Collection[str]) -> None:
    """Raise InvalidPlan if a Plan names a data set that this coordinator does not have."""
    unknown = [name for name in data_names(plan.evaluation) if name not in known]
    if not unknown:
        return
    key = "data" if unknown[0] == plan.evaluation.data else "sets"
    names = f"one of {sorted(known)}" if known else "none: this coordinator has no data sets"
    raise InvalidPlan(
        f"{what}: evaluation.{key}: got {unknown[0]!r}, expected {names}; its operator registers data sets with "
        "fanin serve --data NAME=PATH",
        code="FN-0250",
    )
