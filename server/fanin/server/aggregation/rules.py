"""Rules: how the Updates of a Round become one aggregate.

There are three kinds. A ``Rule`` adds Updates up, in any order and in a tree of partial sums. A ``ColumnRule`` sees all
Updates of a value at once, so it can be robust: it may ignore extreme values. A Plan names its rule in
``aggregation.rule``. An installed distribution adds rules by the entry point group ``fanin.rules``. The third kind is a
strategy of Flower, which a Plan names in ``flower.strategy`` instead. It is neither a sum nor a function of columns: it
sees the arrays of each device and returns those of the next Version. Its code runs in another process
(``server.strategies``, docs/decisions/0046).

``weighted_mean`` is the mean of FedAvg (McMahan et al. 2017, arXiv 1602.05629, algorithm 1). ``trimmed_mean`` is the
coordinate-wise trimmed mean (Yin et al. 2018, arXiv 1803.01498, definition 2). ``robust`` has the other rules.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import Annotated, Final, Protocol, runtime_checkable

import numpy as np

from fanin.edge.codecs.methods.fednova import FEDNOVA
from fanin.edge.codecs.methods.qfedavg import QFEDAVG
from fanin.edge.tensors import Float32s, Float64s, Int64s, TensorTable
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import BY_SITE, Plan
from fanin.protos.plans.entries import Setting
from fanin.protos.plans.keys import Key, shown
from fanin.protos.plans.named import blamed, wrong_object
from fanin.server.aggregation import fold
from fanin.server.aggregation.exact_sums import STATISTICS_RULE, exact_sums
from fanin.server.aggregation.fold import Contribution, PartialSum
from fanin.server.aggregation.methods.means import ScaledMean, effective_steps, inverse_scale
from fanin.server.aggregation.robust import ROBUST_RULES

GROUP: Final = "fanin.rules"
"""The entry point group of rules in other distributions. An entry is a function of the Plan and of options."""
STRATEGY_STATE: Final = "strategy"
"""The name of a strategy's state in the outer state of a Round."""
MAX_COLUMN_UPDATES: Final = 1024
"""Most Updates of a Round with a column rule: all of them are read side by side."""
MAX_STATE_BYTES: Final = 64 << 20
"""Most bytes of the state that a column rule keeps between two passes."""


@runtime_checkable
class Rule(Protocol):
    """A rule that adds Updates up. ``accept`` and ``merge`` must not depend on an order (tests/laws/test_fold.py)."""

    def begin(self, table: TensorTable) -> PartialSum:
        """Return the sum of no Updates."""
        ...

    def accept(self, state: PartialSum, table: TensorTable, update: Contribution) -> PartialSum:
        """Add one Update to a sum, in place, and return the sum."""
        ...

    def merge(self, left: PartialSum, right: PartialSum) -> PartialSum:
        """Add ``right`` to ``left``, in place, and return ``left``."""
        ...

    def finish(self, state: PartialSum, table: TensorTable, grid: Sequence[int], part: tuple[int, int]) -> Float64s:
        """Return the aggregate for the values from ``part[0]`` to ``part[1]``.

        Args:
            state: The sum.
            table: The layout of the vector: the blocks of all groups.
            grid: An exponent for each block.
            part: The first and the last position (exclusive).

        Returns:
            The change of the vector's values, finite (part[1] - part[0],).
        """
        ...


@runtime_checkable
class ColumnRule(Protocol):
    """A rule that sees the Updates of a value side by side. It ignores weights: each Update counts the same.

    The rule is called for consecutive parts of the values, from the first to the last, once in each pass. All passes
    but the last call ``look``; the last one calls ``reduce``. The results must not depend on the lengths of the parts.
    """

    @property
    def num_passes(self) -> int:
        """Number of passes over the Updates, at least 1."""
        ...

    def begin(self, num_updates: int) -> Mapping[str, np.ndarray]:
        """Return the state before the first pass, at most ``MAX_STATE_BYTES``."""
        ...

    def look(self, state: Mapping[str, np.ndarray], columns: Int64s, number: int) -> Mapping[str, np.ndarray]:
        """Return the state after one part of a pass.

        Args:
            state: The state so far.
            columns: The Updates' values in steps of the Round's grid (num_values_of_part, num_updates).
            number: The number of the pass, from 0.
        """
        ...

    def reduce(self, state: Mapping[str, np.ndarray], columns: Int64s) -> Float64s:
        """Return the aggregate of one part in steps of the Round's grid (num_values_of_part,).

        Args:
            state: The state after all passes before.
            columns: The Updates' values in steps of the Round's grid (num_values_of_part, num_updates).
        """
        ...


@runtime_checkable
class DistanceRule(ColumnRule, Protocol):
    """A column rule that also sees how far the Updates are from each other. They are read once more for that."""

    def measure(self, state: Mapping[str, np.ndarray], squares: Float64s) -> Mapping[str, np.ndarray]:
        """Return the state before the first pass.

        Args:
            state: The state of ``begin``.
            squares: The squared distances between the Updates, and those from zero on the diagonal, in the unit of the
                parameters (num_updates, num_updates). The order is that of the columns, by the ids of the devices.
        """
        ...


Metrics = Mapping[str, int | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The reply of one device, as a strategy sees it.

    Attributes:
        parameters: The parameters after the training (num_values,).
        metrics: ``num-examples``, and the metrics of the training that the Plan declares, by name.
    """

    parameters: Float32s
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyTask:
    """The work of a strategy in one Round.

    Attributes:
        round: The Round's number.
        config: The ConfigRecord that the devices received, without the Round's number.
        table: The layout of the parameters.
        parameters: The parameters of the base Version (num_values,).
        state: The strategy's state after the Round of the base Version; empty in the beginning.
        num_replies: Number of replies; 0 to check the strategy alone, before the Run starts.
        evaluations: The metrics of the base Version that the devices report, with ``num-examples``.
    """

    round: int
    config: Mapping[str, Setting]
    table: TensorTable
    parameters: Float32s
    state: bytes = b""
    num_replies: int = 0
    evaluations: tuple[Metrics, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyResult:
    """The result of a strategy in one Round.

    Attributes:
        parameters: The next parameters (num_values,), finite.
        state: The state after the Round.
        metrics: The metrics that the strategy returned, as ``train.NAME`` and ``evaluate.NAME``.
        unsaved: Why the state cannot be saved, so that the Run cannot resume after a restart; empty if it is saved.
    """

    parameters: Float32s
    state: bytes
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    unsaved: str = ""


class StrategyRunner(Protocol):
    """Runs the strategy of one Run."""

    def run(self, task: StrategyTask, replies: Iterable[Reply]) -> StrategyResult:
        """Run a task. The replies are read one after another.

        Raises:
            InvalidPlan: The strategy raised an error, does not answer, or returned an invalid result.
        """
        ...


class StrategySource(Protocol):
    """The strategies that may run here."""

    def runner(self, run_id: str, plan: Plan) -> StrategyRunner:
        """Return the runner of the strategy that a Run's Plan names. Raises InvalidPlan if it may not run here."""
        ...

    def close(self) -> None:
        """End the runners. A task that is under way raises Unavailable."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRule:
    """A strategy as the rule of one Round.

    Attributes:
        runner: Runs the strategy.
        plan: The Plan of the Run.
        round: The Round's number.
        table: The layout of the base Version's values.
        base: Returns these values in slices.
        is_first: Whether the base Version is the first one: Flower evaluates it on no device.
        state: Returns the state after the Round of the base Version; empty in the beginning.
    """

    runner: StrategyRunner
    plan: Plan
    round: int
    table: TensorTable
    base: Callable[[], Iterable[Float32s]]
    is_first: bool
    state: Callable[[], bytes]


def config_in(plan: Plan, round_number: int) -> dict[str, Setting]:
    """Return the ConfigRecord of the devices in a Round, without the Round's number."""
    rate = plan.training_in(round_number).learning_rate
    return {**({"lr": rate} if rate else {}), **plan.flower_in(round_number).config}


class WeightedMean:
    """The mean, in which an Update counts by its examples."""

    def begin(self, table: TensorTable) -> PartialSum:
        """See ``Rule.begin``."""
        return fold.begin(table)

    def accept(self, state: PartialSum, table: TensorTable, update: Contribution) -> PartialSum:
        """See ``fold.accept``."""
        return fold.accept(state, table, update)

    def merge(self, left: PartialSum, right: PartialSum) -> PartialSum:
        """See ``fold.merge``."""
        return fold.merge(left, right)

    def finish(self, state: PartialSum, table: TensorTable, grid: Sequence[int], part: tuple[int, int]) -> Float64s:
        """See ``fold.finish``."""
        return fold.finish(state, table, grid, part)


class TrimmedMean:
    """The mean of each value without its largest and its smallest Updates.

    Args:
        trim: The part of the Updates that is left out at each end, above 0 and below 0.5. It is rounded down to an
            integer number of Updates.
    """

    def __init__(self, trim: float) -> None:
        self._trim = trim

    @property
    def num_passes(self) -> int:
        """See ``ColumnRule.num_passes``."""
        return 1

    def begin(self, num_updates: int) -> Mapping[str, np.ndarray]:
        """See ``ColumnRule.begin``."""
        return {}

    def look(self, state: Mapping[str, np.ndarray], columns: Int64s, number: int) -> Mapping[str, np.ndarray]:
        """See ``ColumnRule.look``."""
        raise AssertionError("a trimmed mean has one pass")

    def reduce(self, state: Mapping[str, np.ndarray], columns: Int64s) -> Float64s:
        """See ``ColumnRule.reduce``. The integers are summed exactly; the division is one rounding."""
        num_updates = columns.shape[1]
        num_left_out = num_trimmed(self._trim, num_updates)
        first, last = num_left_out, num_updates - num_left_out
        # A complete sort uses vector instructions of the processor, and takes a fifth of the time of np.partition.
        total: Int64s = np.sort(columns, axis=1)[:, first:last].sum(axis=1, dtype=np.int64)
        return total.astype(np.float64) / float(last - first)


RuleFactory = Callable[..., Rule | ColumnRule]
"""Returns the rule for a Plan and options. Raises InvalidPlan if the rule cannot carry out the Plan."""


def num_trimmed(trim: float, num_updates: int) -> int:
    """Return how many Updates a trimmed mean leaves out at each end.

    The product is exact for the decimal number that the Plan names: 0.29 of 100 are 29, and not 28 as in float64.
    """
    return int(Fraction(repr(float(trim))) * num_updates)


def _trimmed_mean(
    plan: Plan,
    *,
    trim: Annotated[
        float,
        Key(
            text="The part of the Updates that is left out at each end of each value, rounded down to whole Updates.",
            above=0,
            below=0.5,
        ),
    ] = 0.1,
) -> ColumnRule:
    quorum = plan.cohort.quorum
    if not num_trimmed(trim, quorum):
        raise InvalidPlan(
            f"plan: got aggregation.rule_options.trim {trim:g} and cohort.quorum {quorum}, so that a trimmed mean of "
            f"{quorum} updates leaves out none; expected trim x quorum of at least 1: raise one of them",
            code="FN-0245",
        )
    return TrimmedMean(trim)


RULES: Final[Mapping[str, RuleFactory]] = MappingProxyType(
    {
        "weighted_mean": lambda _plan: WeightedMean(),
        "trimmed_mean": _trimmed_mean,
        FEDNOVA: lambda _plan: ScaledMean(effective_steps),
        QFEDAVG: lambda _plan: ScaledMean(inverse_scale),
        **ROBUST_RULES,
        STATISTICS_RULE: exact_sums,
    }
)
"""The rules of fanin, by name."""


def check_members(rule: object, where: str) -> None:
    """Check that an object is a rule.

    Args:
        rule: The object.
        where: Begins the error.

    Raises:
        InvalidPlan: This is no object with the members of a rule, or its ``num_passes`` is wrong.
    """
    with blamed(where, "correct it"):
        if isinstance(rule, type) or not isinstance(rule, ColumnRule | Rule):
            raise wrong_object(where, rule, "an object with the members of Rule or ColumnRule")
        if isinstance(rule, ColumnRule):
            check_passes(rule, where)


def check_passes(rule: ColumnRule, where: str) -> None:
    """Raise InvalidPlan unless the number of passes is an integer of at least 1. ``where`` begins the error."""
    num_passes: object = rule.num_passes
    if not isinstance(num_passes, int) or isinstance(num_passes, bool) or num_passes < 1:
        raise InvalidPlan(
            f"{where}: num_passes: got {shown(num_passes)}, expected an integer of at least 1; correct it",
            code="FN-0214",
        )


def check_column_plan(plan: Plan) -> None:
    """Raise InvalidPlan for a Plan that a column rule cannot carry out."""
    name, buffer, staleness = plan.aggregation.rule, plan.cohort.buffer, plan.aggregation.max_staleness
    if buffer > MAX_COLUMN_UPDATES:
        raise InvalidPlan(
            f"plan: got cohort.buffer {buffer} with the rule {name}, expected at most {MAX_COLUMN_UPDATES}: this rule "
            "reads all updates of a round side by side",
            code="FN-0246",
        )
    if plan.aggregation.weights == BY_SITE:
        raise InvalidPlan(
            f"plan: got aggregation.weights {BY_SITE!r} with the rule {name}, expected 'examples' or 'uniform': each "
            "update counts once with this rule; change one of them",
            code="FN-1853",
        )
    if staleness:
        raise InvalidPlan(
            f"plan: got aggregation.max_staleness {staleness} with the rule {name}, expected 0: this rule compares "
            "updates of one round",
            code="FN-0246",
        )
