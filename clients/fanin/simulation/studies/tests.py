"""Test sets: their forms, their checks, and the names of their values.

A simulation has one test set or several by name. The first one is the test data of the columns ``test_...``, of the
best Version and of the baseline. With names, each set ``S`` has the further metrics ``S.loss``, ``S.accuracy`` and so
on.

A set of a Flower app is a function: fanin has no graphs of it, so the function loads the arrays and returns values::

    test={"clean": lambda arrays: {"loss": ..., "accuracy": ...}}
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fanin.clients.data.examples import Examples
from fanin.clients.device.training.tuning import FineTuning
from fanin.edge.bundles.arrays import ArrayLayout
from fanin.edge.runtimes.base import VersionValues
from fanin.edge.tensors import Array, TensorTable
from fanin.protos.errors import InvalidInput
from fanin.protos.names import check_name
from fanin.server.evaluation.metrics import VersionMetrics, score_of
from fanin.simulation.data.partitioning import Partition

TestFunction = Callable[[Mapping[str, Array]], Mapping[str, float]]
"""Evaluates the arrays of a Flower app by name, as ``Result.arrays`` has them."""
TestData = Examples | TestFunction
SEPARATOR = "."


def check_tests(tests: Mapping[str, TestData], *, of_flower: bool) -> None:
    """Raise InvalidInput unless each test set has a name and the form that the app needs."""
    for name, test in tests.items():
        what = "simulate: test" + (f": {name!r}" if name else "")
        if len(tests) > 1 or name:
            check_name(what, name)
        if of_flower and (isinstance(test, Examples) or not callable(test)):
            raise InvalidInput(
                f"{what}: got {type(test).__name__} with a Flower app, expected a function (arrays by name) -> values "
                "by name, because no graphs exist: load the arrays into the model, and return {'accuracy': ...}",
                code="FN-1894",
            )
        if not of_flower and not isinstance(test, Examples):
            raise InvalidInput(
                f"{what}: got {type(test).__name__}, expected Examples, or several of them by name; write "
                "Examples(inputs={'x': x}, y=y), or load_data(name).test",
                code="FN-1134",
            )


def check_client_tests(tests: object, fine_tune: object, num_clients: int) -> None:
    """Raise InvalidInput unless the test examples are a partition of as many clients, and a fine-tuning has some."""
    if fine_tune is not None and not isinstance(fine_tune, FineTuning):
        raise InvalidInput(f"simulate: fine_tune: got {fine_tune!r}, expected FineTuning(epochs=...)", code="FN-1836")
    if tests is None:
        if fine_tune is None:
            return
        raise InvalidInput(
            "simulate: got fine_tune without client_test, expected test examples of each client; write train, test = "
            "clients.split(0.2), and pass test as client_test",
            code="FN-1837",
        )
    if not isinstance(tests, Partition) or len(tests) != num_clients:
        received = f"{len(tests)} clients" if isinstance(tests, Partition) else type(tests).__name__
        raise InvalidInput(
            f"simulate: client_test: got {received}, expected a Partition of the {num_clients} clients; write train, "
            "test = clients.split(0.2)",
            code="FN-1837",
        )


def joined_values(sets: Mapping[str, VersionMetrics]) -> VersionMetrics:
    """Return the metrics of all test sets: those of the first one, and with names also ``SET.METRIC`` of each."""
    first = next(iter(sets.values()))
    if "" in sets:
        return first
    named = {f"{name}{SEPARATOR}{key}": value for name, each in sets.items() for key, value in each.values.items()}
    return VersionMetrics(num_examples=first.num_examples, values={**first.values, **named})


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedArrays:
    """The evaluation of a Flower app's Versions by functions.

    Attributes:
        tests: The functions by the name of the set. None evaluates nothing.
        table: The layout of the parameters.
        layout: The arrays of the app.
        every: The Versions whose number is a multiple of this are evaluated.
        best: The value that ranks Versions.
    """

    tests: Mapping[str, TestData]
    table: TensorTable
    layout: ArrayLayout
    every: int
    best: str

    def quality(self, number: int, version: VersionValues) -> VersionMetrics:
        """Return the values of a Version. Raises InvalidInput if a function returns another form."""
        if not self.tests or number % self.every:
            return VersionMetrics(num_examples=0, values={})
        arrays, sets = self.layout.complete(self.table.views(version.parameters)), {}
        for name, function in self.tests.items():
            assert not isinstance(function, Examples), "checked before the simulation"
            values: object = function(arrays)
            if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
                raise InvalidInput(
                    f"simulate: test: got {type(values).__name__} from the function {name!r}, expected values by name, "
                    "such as {'accuracy': 0.5}",
                    code="FN-1894",
                )
            sets[name] = VersionMetrics(num_examples=1, values={key: float(value) for key, value in values.items()})
        return joined_values(sets)

    def score(self, metrics: VersionMetrics) -> float:
        """Return the number that ranks Versions; NaN if the functions do not return it."""
        return score_of(self.best, metrics.values) if self.best in metrics.values else math.nan
