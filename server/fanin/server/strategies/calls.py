"""The calls of a strategy in one Round, in the order of Flower's own loop.

    aggregate_evaluate(round - 1)    what the devices measured of the base Version
    configure_train(round)           for what the strategy remembers: the Plan has selected and configured the devices
    aggregate_train(round)           the next parameters

The strategy is created for each Round, and gets the state after the Round of the base Version. If this state cannot be
saved, the object itself is kept for the next Round, and a token in the saved state names it.

Reference:
    Flower 1.41, ``flwr.serverapp.strategy.Strategy.start``.
"""

import copy
import importlib
import logging
import secrets
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedXgbBagging,
    FedXgbCyclic,
    Strategy,
)

from fanin.edge.tensors import Float32s
from fanin.protos.errors import foreign_text
from fanin.server.aggregation.rules import Reply, StrategyResult, StrategyTask
from fanin.server.strategies.process import FLOWER, StrategySettings
from fanin.server.strategies.records import (
    RoundNodes,
    Unfit,
    array_record,
    check_messages,
    checked_parameters,
    config_record,
    evaluate_reply,
    numbers_of,
    prepare_flower,
    train_reply,
)
from fanin.server.strategies.saved import NotSaved, restore, save

LOG: Final = logging.getLogger("fanin.server.strategies")
NOISY: Final = (
    DifferentialPrivacyServerSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
)
"""Strategies that add noise. Those that let the devices clip need messages of Flower's server, and are refused."""
NOT_SAVED: Final = b"fanin-s0"
PAGE: Final = "docs/howto/flower.md"


class StrategyFailed(Exception):
    """The strategy raised an error, or returned an invalid result. ``trace`` is its traceback."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class StrategyCalls:
    """One strategy in this process.

    Args:
        settings: The strategy.

    Attributes:
        is_needed: Whether this process holds a state that is not saved.

    Raises:
        StrategyFailed: It cannot be imported or created, is no strategy, or cannot run here.
    """

    def __init__(self, settings: StrategySettings) -> None:
        self._settings = settings
        self._name = f"strategy {settings.name}"
        self._kept: tuple[str, Strategy] | None = None
        prepare_flower()
        with self._blamed("import"):
            self._source = _imported(settings)
            is_strategy = isinstance(self._source, type) and issubclass(self._source, Strategy)
            if settings.name.startswith(FLOWER) and not is_strategy:
                # Before it is called: a Plan may name it without the operator's permission.
                raise Unfit("is no strategy of flwr, expected one such as FedAdam")
        self._check(self._create())

    @property
    def is_needed(self) -> bool:
        """See the class."""
        return self._kept is not None

    def run(self, task: StrategyTask, base: Float32s, replies: Iterator[Reply]) -> StrategyResult:
        """Run a task over the parameters ``base`` (num_values,). Raises StrategyFailed."""
        strategy = self._restored(task.state)
        metrics = self._evaluate(strategy, task, base)
        arrays, nodes = array_record(task.table, base), RoundNodes(self._settings.num_nodes)
        with self._blamed("configure_train"):
            messages = strategy.configure_train(task.round, arrays, config_record(task.config), nodes)
            if not check_messages(messages, arrays, task.config, task.round):
                raise Unfit("returned no messages, expected one for each node: each Round trains")
        if not task.num_replies:
            return StrategyResult(parameters=base, state=b"", unsaved=self._unsaved(strategy))
        with self._blamed("aggregate_train"):
            content: object = strategy.aggregate_train(task.round, self._messages(task, replies))
            if not isinstance(content, tuple) or len(content) != 2:
                raise Unfit(f"returned {type(content).__name__}, expected an ArrayRecord and a MetricRecord")
            parameters = checked_parameters(content[0], task.table)
            metrics |= numbers_of(content[1], "train.")
        state, unsaved = self._saved(strategy)
        return StrategyResult(parameters=parameters, state=state, metrics=metrics, unsaved=unsaved)

    def _messages(self, task: StrategyTask, replies: Iterator[Reply]) -> object:
        messages = (train_reply(task.table, reply, node) for node, reply in enumerate(replies, start=1))
        return messages if self._settings.streams else list(messages)

    def _evaluate(self, strategy: Strategy, task: StrategyTask, base: Float32s) -> dict[str, float]:
        if not task.evaluations:
            return {}
        number, arrays, nodes = task.round - 1, array_record(task.table, base), RoundNodes(self._settings.num_nodes)
        with self._blamed("configure_evaluate"):
            messages = strategy.configure_evaluate(number, arrays, config_record(task.config), nodes)
            if not check_messages(messages, arrays, task.config, number):
                return {}
        with self._blamed("aggregate_evaluate"):
            replies = [evaluate_reply(each, node) for node, each in enumerate(task.evaluations, start=1)]
            return numbers_of(strategy.aggregate_evaluate(number, replies), "evaluate.")

    # The object and its state.

    def _create(self) -> Strategy:
        source, options = self._source, dict(self._settings.options)
        with self._blamed("the constructor"):
            if isinstance(source, Strategy) and not options:
                return copy.deepcopy(source)
            strategy: object = source(**options) if callable(source) else source
            if not isinstance(strategy, Strategy):
                raise Unfit(f"got {type(strategy).__name__}, expected a flwr.serverapp.strategy.Strategy")
            return strategy

    def _check(self, strategy: Strategy) -> None:
        """Raise StrategyFailed for a strategy that cannot run here."""
        if isinstance(strategy, FedXgbBagging | FedXgbCyclic):
            raise StrategyFailed(
                f"{self._name}: its trees grow from Round to Round, and a version has a fixed layout of arrays; "
                f"expected a strategy of such arrays ({PAGE}, Tree models)"
            )
        if self._settings.streams and type(strategy).aggregate_train.__module__.startswith("flwr."):
            raise StrategyFailed(
                f"{self._name}: got flower.strategy_streams, but aggregate_train of flwr puts all replies into a list; "
                "remove the key"
            )
        if isinstance(strategy, NOISY):
            LOG.warning(
                "%s: its noise is not supported: a Mersenne Twister draws it, and no privacy budget is counted. The "
                "versions are not differentially private; see docs/explanation/privacy.md",
                self._name,
            )
        unsaved = self._unsaved(strategy)
        if unsaved and self._settings.is_pure:
            raise StrategyFailed(
                f"{self._name}: got flower.strategy_is_pure, but its state cannot be saved: {unsaved}; define "
                f"__getstate__ and __setstate__ of plain values and arrays ({PAGE}, State)"
            )

    def _restored(self, state: bytes) -> Strategy:
        kept, self._kept = self._kept, None
        if state.startswith(NOT_SAVED):
            token, _, reason = state[len(NOT_SAVED) :].decode().partition(" ")
            if kept is None or kept[0] != token:
                raise StrategyFailed(
                    f"{self._name}: the run cannot resume: its state after the last Round was not saved ({reason}) and "
                    "has ended with its process; define __getstate__ and __setstate__ of plain values and arrays, and "
                    f"start a run from the version ({PAGE}, State)"
                )
            return kept[1]
        strategy = self._create()
        if state:
            with self._blamed("__setstate__"):
                restore(strategy, state)
        return strategy

    def _saved(self, strategy: Strategy) -> tuple[bytes, str]:
        """Return the state, and why it cannot be saved."""
        with self._blamed("__getstate__"):
            try:
                return save(strategy), ""
            except NotSaved as exc:
                token = secrets.token_hex(8)
                self._kept = token, strategy
                return NOT_SAVED + f"{token} {exc}".encode(), str(exc)

    def _unsaved(self, strategy: Strategy) -> str:
        with self._blamed("__getstate__"):
            try:
                save(strategy)
            except NotSaved as exc:
                return str(exc)
        return ""

    @contextmanager
    def _blamed(self, method: str) -> Iterator[None]:
        try:
            yield
        except StrategyFailed:
            raise
        except Unfit as exc:
            raise StrategyFailed(f"{self._name}: {method}: {exc}; correct the strategy") from exc
        except (Exception, SystemExit) as exc:  # Any error: the code is another's.
            text = foreign_text(exc) if isinstance(exc, Exception) else f"SystemExit: {exc}"
            raise StrategyFailed(
                f"{self._name}: {method} raised {text}; correct the strategy", traceback.format_exc()
            ) from exc


def _imported(settings: StrategySettings) -> object:
    """Return the object that the name stands for. Raises StrategyFailed if its module does not exist."""
    module, _, attribute = settings.name.partition(":")
    folder = Path.cwd()
    if module.endswith(".py"):
        # As for a Python script: its own folder is the one to import from.
        folder, module = (folder / module).parent, Path(module).stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        result: object = importlib.import_module(module)
    except ModuleNotFoundError as exc:
        if not f"{module}.".startswith(f"{exc.name}."):
            # A package that the strategy imports.
            raise
        raise StrategyFailed(
            f"strategy {settings.name}: import: no module {exc.name!r} is installed or in {settings.place}, which "
            "modules are imported from; correct flower.strategy, or start the command in the folder of the module"
        ) from exc
    for each in attribute.split("."):
        result = getattr(result, each)
    return result
