"""The tasks and replies of a Flower app. These records cross the pipe to the child process."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from fanin.clients.device.conditions import ShouldContinue
from fanin.edge.tensors import Array
from fanin.protos.errors import InvalidInput
from fanin.protos.plans.entries import Scalar

Number = int | float
ConfigValue = Scalar | list[Scalar]
"""A value of a ConfigRecord."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerSettings:
    """The app of a device, and the configuration that stays on the device.

    Attributes:
        app: ``package.module:name`` or ``path/to/file.py:name`` of a ClientApp, a NumPyClient, or a function
            ``client_fn(context)``. Or a folder, whose pyproject.toml names the app in ``[tool.flwr.app.components]``.
        folder: The folder that the module is imported from, as Flower's ``flwr run FOLDER``.
        partition: The default of ``partition-id`` in ``context.node_config``.
        node_config: Further entries of ``context.node_config``, as in Flower: ``partition-id=0 num-partitions=2``.
        run_config: Entries of ``context.run_config`` that replace those of the app's pyproject.toml, in the same form.
    """

    app: str
    folder: Path
    partition: int = 0
    node_config: str = ""
    run_config: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerTask:
    """The work of an app in one Round.

    Attributes:
        run_id: The Run.
        round: The Round's number.
        seed: Seeds the global random generators before the app is called: 32 bits of the Plan, or 256 bits of the
            device (``app_seed``).
        config: The ConfigRecord ``config`` of the message to train; None to evaluate alone.
        evaluate_config: That of the message to evaluate, which comes first.
        arrays: The arrays of the model by name, in the order of the app.
        state: The app's ``context.state``, serialized; empty in the beginning.
    """

    run_id: str
    round: int
    seed: int
    config: Mapping[str, ConfigValue] | None
    evaluate_config: Mapping[str, ConfigValue]
    arrays: Mapping[str, Array]
    state: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerReport:
    """The metrics of a training or an evaluation.

    Attributes:
        num_examples: Its weight, ``num-examples``.
        metrics: The other numbers, by name.
        others: The names of texts, bytes and ConfigRecords beside them, which no device sends.
        problem: The error of an evaluation that failed, with its traceback; empty otherwise.
    """

    num_examples: Number
    metrics: Mapping[str, Number] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    problem: str = ""


NO_REPORT: Final = FlowerReport(num_examples=0)
"""The report of an app that does not evaluate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerReply:
    """The result of an app in one Round.

    Attributes:
        arrays: The arrays after the training, by name; none without a training.
        training: The report of the training.
        evaluation: The report of the evaluation.
        state: ``context.state`` after both messages, serialized.
    """

    arrays: Mapping[str, Array]
    training: FlowerReport
    evaluation: FlowerReport
    state: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AppReady:
    """The app is imported. ``name`` is the library and its version, and ``warnings`` is what its device logs."""

    name: str
    warnings: tuple[str, ...]


class AppFailed(InvalidInput):
    """The code of an app raised an error, or returned an invalid value. ``trace`` is its traceback."""

    def __init__(self, message: str, trace: str = "", *, code: str = "") -> None:
        super().__init__(message, code=code)
        self.trace = trace


Words = FlowerSettings | FlowerTask
"""The messages of the device to the child process."""
Answer = AppReady | AppFailed | FlowerReply
"""The replies of the child process."""


class FlowerRunner(Protocol):
    """Runs the tasks of one app."""

    @property
    def name(self) -> str:
        """The library and its version."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the app uses that fanin does not support."""
        ...

    def run(self, task: FlowerTask, should_continue: ShouldContinue) -> FlowerReply:
        """Run a task.

        Raises:
            Interrupted: ``should_continue`` raised it.
            AppFailed: The app raised an error, or returned an invalid value.
        """
        ...
