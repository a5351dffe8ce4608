"""The rule and the outer optimizer that a Plan names. Those of other packages are checked whenever they are called.

Each exception of another package becomes an InvalidPlan that names the part and its method, and so does each state or
result of another type or form. Without the checks, a wrong shape could be broadcast over all parameters. An error in
the use of a wrong type would be repeated like an error of the disk. The parts of fanin are called as they are. Only
values beyond float32 are refused of every part, because a Plan can cause them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from fanin.edge.codecs.fixed import Integers
from fanin.edge.codecs.grid import NUM_REACHES
from fanin.edge.codecs.pipeline import form_of
from fanin.edge.tensors import Float32s, Float64s, Int64s, TensorTable
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import Plan
from fanin.protos.plans.named import Choice, blamed, created
from fanin.server.aggregation import outer, rules
from fanin.server.aggregation.fold import Contribution, PartialSum
from fanin.server.aggregation.outer import OPTIMIZERS, NextParameters, OuterOptimizer, State
from fanin.server.aggregation.rules import (
    MAX_STATE_BYTES,
    RULES,
    ColumnRule,
    DistanceRule,
    Rule,
    check_column_plan,
    check_passes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rule, an outer optimizer or a stage, as errors name it.

    Attributes:
        name: Kind and name, such as "rule Median".
        advice: The end of each error: the remedy.
        beyond: The remedy for values beyond float32.
    """

    name: str
    advice: str
    beyond: str = ""

    def blamed(self, method: str) -> AbstractContextManager[None]:
        """Convert any exception of a method within the block into InvalidPlan."""
        return blamed(f"{self.name}: {method}", self.advice)

    def error(self, text: str) -> InvalidPlan:
        """Return an error of this part."""
        return InvalidPlan(f"{self.name}: {text}; {self.advice}", code="FN-0640")

    def check_form(self, method: str, target: str, values: Float64s, num_values: int) -> None:
        """Raise InvalidPlan unless the result of a method is a float64 array (num_values,)."""
        expected = f"float64 ({num_values},)"
        if form_of(values) != expected:
            raise self.error(f"{method} returned {form_of(values)}{target}, expected {expected}")

    def rounded(self, method: str, target: str, values: Float64s, num_values: int) -> Float32s:
        """Return the result of a method as float32.

        Args:
            method: The method.
            target: The tensor, as errors name it after the result.
            values: The result.
            num_values: Its expected length.

        Raises:
            InvalidPlan: It is no float64 array (num_values,), or has NaN or values beyond float32.
        """
        self.check_form(method, target, values, num_values)
        # A value beyond float32 becomes infinite here, and is refused below.
        with np.errstate(over="ignore"):
            rounded = values.astype(np.float32)
        if not np.isfinite(rounded).all():
            if np.isnan(values).any():
                raise self.error(f"{method} returned NaN{target}, expected finite values")
            raise InvalidPlan(
                f"{self.name}: {method} returned values beyond float32{target}; {self.beyond}", code="FN-0642"
            )
        return rounded

    def check_change(self, method: str, change: Float64s, num_values: int) -> None:
        """Raise InvalidPlan unless a rule's change is a finite float64 array (num_values,)."""
        self.check_form(method, "", change, num_values)
        if not np.isfinite(change).all():
            raise self.error(f"{method} returned NaN or infinity, expected finite values")


def rule_of(plan: Plan) -> Rule | ColumnRule:
    """Return the rule that a Plan names.

    Raises:
        InvalidPlan: No rule has this name, or the rule rejects the Plan.
    """
    ours = plan.aggregation
    choice = Choice(
        key="aggregation.rule", name=ours.rule, options_key="aggregation.rule_options", options=ours.rule_options
    )
    rule = created(choice, RULES, rules.GROUP, plan, checked=guarded_rule)
    if isinstance(rule, ColumnRule):
        check_column_plan(plan)
    return rule


def guarded_rule(rule: Rule | ColumnRule, where: str) -> Rule | ColumnRule:
    """Return a rule of another package with its checks. ``where`` begins the error of an object that is no rule."""
    rules.check_members(rule, where)
    if isinstance(rule, DistanceRule):
        return CheckedDistanceRule(rule)
    return CheckedColumnRule(rule) if isinstance(rule, ColumnRule) else CheckedRule(rule)


def optimizer_of(plan: Plan) -> OuterOptimizer:
    """Return the outer optimizer that a Plan names, or the outer step of its strategy.

    Raises:
        InvalidPlan: No optimizer has this name, or the optimizer rejects the Plan.
    """
    if plan.flower.strategy:
        return NextParameters()
    ours, key = plan.aggregation, "aggregation.outer_optimizer"
    choice = Choice(
        key=key, name=ours.outer_optimizer, options_key="aggregation.outer_options", options=ours.outer_options
    )
    return created(choice, OPTIMIZERS, outer.GROUP, plan, checked=guarded_optimizer)


def guarded_optimizer(optimizer: OuterOptimizer, where: str) -> OuterOptimizer:
    """Return an optimizer of another package with its checks. ``where`` begins the error of another object."""
    outer.check_members(optimizer, where)
    return CheckedOptimizer(optimizer)


def optimizer_part(optimizer: OuterOptimizer) -> Part:
    """Return an optimizer as errors name it: one with checks by the name of its class, too."""
    if isinstance(optimizer, CheckedOptimizer):
        return optimizer.part
    return Part(
        name=f"outer optimizer {type(optimizer).__name__}",
        advice="correct it",
        beyond="lower aggregation.outer_options.learning_rate",
    )


class CheckedRule:
    """A ``Rule`` whose errors name it.

    Args:
        rule: The rule.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._part = _part_of(rule)

    def begin(self, table: TensorTable) -> PartialSum:
        """See ``Rule.begin``."""
        with self._part.blamed("begin"):
            state = self._rule.begin(table)
        return self._checked("begin", state, (len(table.specs), NUM_REACHES))

    def accept(self, state: PartialSum, table: TensorTable, update: Contribution) -> PartialSum:
        """See ``Rule.accept``.

        An error of the Update's source is raised unchanged, also if the rule handles it or does not read all pieces.
        """
        pieces = _WatchedPieces(update.pieces)
        try:
            with self._part.blamed("accept"):
                after = self._rule.accept(state, table, replace(update, pieces=pieces))
        except InvalidPlan:
            if pieces.error is not None:
                raise pieces.error from None
            raise
        if pieces.error is not None:
            raise pieces.error
        pieces.read_rest()
        return self._checked("accept", after, (len(table.specs), NUM_REACHES))

    def merge(self, left: PartialSum, right: PartialSum) -> PartialSum:
        """See ``Rule.merge``."""
        expected = left.reaches.shape
        with self._part.blamed("merge"):
            state = self._rule.merge(left, right)
        return self._checked("merge", state, expected)

    def finish(self, state: PartialSum, table: TensorTable, grid: Sequence[int], part: tuple[int, int]) -> Float64s:
        """See ``Rule.finish``."""
        with self._part.blamed("finish"):
            change = self._rule.finish(state, table, grid, part)
        self._part.check_change("finish", change, part[1] - part[0])
        return change

    def _checked(self, method: str, state: object, expected: tuple[int, ...]) -> PartialSum:
        if not isinstance(state, PartialSum):
            raise self._part.error(f"{method} returned {form_of(state)}, expected a PartialSum")
        reaches, counts = form_of(state.reaches), form_of(state.counts)
        if reaches != f"int64 {expected}":
            raise self._part.error(
                f"{method} returned a PartialSum with {reaches} as its reaches, expected int64 {expected}"
            )
        if not isinstance(state.counts, Counter):
            raise self._part.error(f"{method} returned a PartialSum with {counts} as its counts, expected a Counter")
        return state


class CheckedColumnRule:
    """A ``ColumnRule`` whose errors name it.

    Args:
        rule: The rule.
    """

    def __init__(self, rule: ColumnRule) -> None:
        self._rule = rule
        self._part = _part_of(rule)

    @property
    def num_passes(self) -> int:
        """See ``ColumnRule.num_passes``."""
        with self._part.blamed("num_passes"):
            check_passes(self._rule, self._part.name)
            return self._rule.num_passes

    def begin(self, num_updates: int) -> Mapping[str, np.ndarray]:
        """See ``ColumnRule.begin``."""
        with self._part.blamed("begin"):
            state = self._rule.begin(num_updates)
        return self._checked("begin", state)

    def look(self, state: Mapping[str, np.ndarray], columns: Int64s, number: int) -> Mapping[str, np.ndarray]:
        """See ``ColumnRule.look``."""
        with self._part.blamed("look"):
            after = self._rule.look(state, columns, number)
        return self._checked("look", after)

    def reduce(self, state: Mapping[str, np.ndarray], columns: Int64s) -> Float64s:
        """See ``ColumnRule.reduce``."""
        with self._part.blamed("reduce"):
            change = self._rule.reduce(state, columns)
        self._part.check_change("reduce", change, len(columns))
        return change

    def _checked(self, method: str, state: object) -> Mapping[str, np.ndarray]:
        if not isinstance(state, Mapping):
            raise self._part.error(f"{method} returned {form_of(state)}, expected a mapping of arrays")
        for name, array in state.items():
            # An operation on arrays without a dimension returns a scalar of numpy.
            if not isinstance(array, np.ndarray | np.generic):
                raise self._part.error(f"{method} returned {form_of(array)} as its state {name!r}, expected an array")
        size_bytes = sum(array.nbytes for array in state.values())
        if size_bytes > MAX_STATE_BYTES:
            raise InvalidPlan(
                f"{self._part.name}: its state has {size_bytes} bytes, expected at most {MAX_STATE_BYTES}; keep less "
                "between its passes",
                code="FN-0640",
            )
        return state


class CheckedDistanceRule(CheckedColumnRule):
    """A ``DistanceRule`` whose errors name it.

    Args:
        rule: The rule.
    """

    def __init__(self, rule: DistanceRule) -> None:
        super().__init__(rule)
        self._distances = rule

    def measure(self, state: Mapping[str, np.ndarray], squares: Float64s) -> Mapping[str, np.ndarray]:
        """See ``DistanceRule.measure``."""
        with self._part.blamed("measure"):
            after = self._distances.measure(state, squares)
        return self._checked("measure", after)


class CheckedOptimizer:
    """An ``OuterOptimizer`` whose errors name it.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: OuterOptimizer) -> None:
        self._optimizer = optimizer
        self.part = optimizer_part(optimizer)

    @property
    def tensors(self) -> tuple[str, ...]:
        """See ``OuterOptimizer.tensors``."""
        return self._optimizer.tensors

    def begin(self, parameters: Float64s) -> State:
        """See ``OuterOptimizer.begin``."""
        with self.part.blamed("begin"):
            state = self._optimizer.begin(parameters)
        self._check_names("begin", state)
        for name in self._optimizer.tensors:
            self.part.check_form("begin", f" for the tensor {name!r}", state[name], parameters.size)
        return state

    def step(self, state: State, parameters: Float64s, aggregate: Float64s, number: int) -> tuple[State, Float64s]:
        """See ``OuterOptimizer.step``. The outer step checks the arrays, when it rounds them."""
        with self.part.blamed("step"):
            result: object = self._optimizer.step(state, parameters, aggregate, number)
        if not isinstance(result, tuple) or len(result) != 2:
            form = f"{len(result)} values" if isinstance(result, tuple) else form_of(result)
            raise self.part.error(f"step returned {form}, expected a state and parameters")
        after, values = result
        self._check_names("step", after)
        return after, values

    def _check_names(self, method: str, state: object) -> None:
        expected = sorted(self._optimizer.tensors)
        if not isinstance(state, Mapping):
            raise self.part.error(f"{method} returned {form_of(state)} as the state, expected a mapping of {expected}")
        if set(state) != set(expected):
            raise self.part.error(f"{method} returned the state {sorted(map(str, state))}, expected {expected}")


class _WatchedPieces(Iterator[Integers]):
    """The pieces of an Update that remember the error of their source. So it is not taken for an error of the rule."""

    def __init__(self, pieces: Iterable[Integers]) -> None:
        self._pieces = iter(pieces)
        self.error: Exception | None = None

    def __next__(self) -> Integers:
        try:
            return next(self._pieces)
        except StopIteration:
            raise
        except Exception as exc:
            self.error = exc
            raise

    def read_rest(self) -> None:
        """Read the pieces that the rule left. A damaged payload is found at its end. Raises the source's error."""
        for _ in self:
            pass


def _part_of(rule: Rule | ColumnRule) -> Part:
    return Part(name=f"rule {type(rule).__name__}", advice="correct the rule")
