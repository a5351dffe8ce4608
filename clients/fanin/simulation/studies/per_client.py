"""The quality of the last Version for each client: on the client's own test examples, before and after it is personal.

    Version                                         -> the global model of all clients
    Version + personal parameters, then fine-tuning -> the personal model of one client

Both are evaluated with all metrics of the test data. The fine-tuning of a client is a training like that of a Round, so
the engine of the simulation carries it out.

Reference:
    Wang et al. 2019, arXiv 1910.10252: the distribution of the change of each client's accuracy. Li et al. 2020, Fair
    Resource Allocation in Federated Learning, arXiv 1905.10497, section 4.2: the worst 10 % of the clients.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from traceback import format_exception
from typing import Final

import numpy as np

from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.models import OpenedModel, keeps_copy
from fanin.clients.device.training.local_data import LocalData
from fanin.clients.device.training.tuning import FineTuning, start_of, tuned
from fanin.clients.device.updates import Change
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.metrics.metric import Metric, scale_of
from fanin.edge.runtimes.base import VersionValues
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.errors import FaninError, InvalidInput
from fanin.protos.plans import Training
from fanin.server.evaluation.metrics import evaluate_version
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.rows import ClientFailure, OnFailure
from fanin.simulation.workers import PendingTraining, SharedGraphs, Trainings

GLOBAL: Final = "global"
PERSONAL: Final = "personal"
WORST_SHARE: Final = 10
"""The worst clients are one of so many."""
NUM_TOGETHER: Final = 64
"""Clients whose fine-tunings begin together: ``vmap`` and worker processes carry them out at once."""
Columns = dict[str, list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientQuality:
    """The quality of the last Version for one client, on the client's own test examples.

    Attributes:
        client: The index of the client.
        version: The Version.
        num_examples: Its test examples. Without any, all metrics are missing.
        of_version: The metrics of the Version by name. Personal parameters have their initial values.
        personal: The metrics of the client's own model. Empty without personal parameters and fine-tuning, or if the
            fine-tuning failed.
        seed: The seed of the simulation.
    """

    client: int
    version: int
    num_examples: int
    of_version: Mapping[str, float] = field(default_factory=dict)
    personal: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    @property
    def global_accuracy(self) -> float:
        """The accuracy of the Version, in float; NaN without one."""
        return self.of_version.get("accuracy", math.nan)

    @property
    def personal_accuracy(self) -> float:
        """The accuracy of the client's own model, in float; NaN without one."""
        return self.personal.get("accuracy", math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualitySummary:
    """One column of the qualities over all clients that have a value.

    Attributes:
        mean: The mean over the clients.
        weighted_mean: The mean, weighted by the test examples of each client.
        worst_decile: The mean over the worst tenth of the clients, rounded up.
        num_clients: The clients that have a value.
    """

    mean: float
    weighted_mean: float
    worst_decile: float
    num_clients: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LastVersion:
    """The last Version of a simulation, and the personal parameters of the clients that have trained.

    Attributes:
        publication: Names it.
        values: Its parameters (num_values,) and ranges.
        local: The personal parameters (num_local_values,) by client; with Ditto their copies (num_values,).
    """

    publication: m.Publication
    values: VersionValues
    local: Mapping[int, Float32s]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTests:
    """The evaluation of the last Version by each client.

    Attributes:
        bundle: The Bundle.
        graphs: The open graphs.
        tests: The test examples of each client, as inputs of the model.
        stores: Returns the other examples of a client. Those of training measure the ranges of its own int8 model.
        metrics: The further metrics by name.
        trainings: Trains the clients.
        training: The Plan's settings of training in the last Round.
        fine_tune: How the clients fine-tune; None for no fine-tuning.
        fail: Called with each error in a fine-tuning.
    """

    bundle: Bundle
    graphs: SharedGraphs
    tests: Partition
    stores: Callable[[int], MemoryStore]
    metrics: Mapping[str, Metric]
    trainings: Trainings
    training: Training
    fine_tune: FineTuning | None
    fail: OnFailure

    def rows(self, last: LastVersion) -> Iterator[ClientQuality]:
        """Yield the quality of the Version for each client."""
        number = last.publication.version.number
        for first in range(0, len(self.tests), NUM_TOGETHER):
            clients = range(first, min(first + NUM_TOGETHER, len(self.tests)))
            begun = {client: self._begin(last, client) for client in clients}
            # The graphs of the Version are open once for all clients, so it is evaluated before the personal models.
            of_version = {client: self._metrics(self.tests[client], last.values) for client in clients}
            for client in clients:
                yield ClientQuality(
                    client=client,
                    version=number,
                    num_examples=self.tests.sizes[client],
                    of_version=of_version[client],
                    personal=begun.pop(client)(),
                )

    def _begin(self, last: LastVersion, client: int) -> Callable[[], Mapping[str, float]]:
        """Begin the fine-tuning of a client, and return a function that returns the metrics of its own model."""
        values, local = last.values, last.local.get(client)
        model = OpenedModel(bundle=self.bundle, parameters=values.parameters, local=local, ranges=values.ranges)
        if self.fine_tune is None:
            is_own = self.bundle.manifest.local is not None or keeps_copy(self.bundle, self.training)
            return lambda: self._evaluated(client, model) if is_own else {}
        model = start_of(model)
        assignment = self.fine_tune.assignment(last.publication, self.training)
        training = self.trainings.begin(client, model, assignment)

        def finish() -> Mapping[str, float]:
            try:
                own = tuned(model, _collected(training))
                data = LocalData(self.graphs, self.stores(client))
                return self._evaluated(client, replace(own, ranges=data.own_ranges(own, lambda: True)))
            except (FaninError, ValueError) as exc:
                trace, text = "".join(format_exception(exc)), f"fine-tuning: {exc}"
                self.fail(ClientFailure(round=assignment.round, client=client, error=text, traceback=trace))
                return {}

        return finish

    def _evaluated(self, client: int, model: OpenedModel) -> Mapping[str, float]:
        values = VersionValues(parameters=model.own_values(), ranges=model.ranges)
        return self._metrics(self.tests[client], values)

    def _metrics(self, examples: Examples, values: VersionValues) -> Mapping[str, float]:
        if not len(examples):
            return {}
        manifest = self.bundle.manifest
        batches = batches_in_order(examples, manifest.batch_size, manifest.lengths)
        return evaluate_version(self.graphs, self.bundle, values, batches, self.metrics).values


def _collected(training: PendingTraining) -> Change:
    """Return the result of a training. Raises FaninError or ValueError."""
    try:
        return training()
    except (FaninError, ValueError):
        raise
    except Exception as exc:  # Any error: a trainer of the settings is the user's code.
        raise InvalidInput(f"training: {type(exc).__name__}: {exc}", code="FN-1189") from exc


def quality_columns(rows: Sequence[ClientQuality]) -> Columns:
    """Return rows as columns by name: ``global.METRIC`` and ``personal.METRIC``, NaN where a row has none."""
    parts = {GLOBAL: [row.of_version for row in rows], PERSONAL: [row.personal for row in rows]}
    columns: Columns = {name: [getattr(row, name) for row in rows] for name in ("seed", "client", "num_examples")}
    for part, values in parts.items():
        for name in dict.fromkeys(name for each in values for name in each):
            columns[f"{part}.{name}"] = [each.get(name, math.nan) for each in values]
    return columns


def summary_of(rows: Sequence[ClientQuality], metrics: Mapping[str, Metric]) -> dict[str, QualitySummary]:
    """Return the mean, the weighted mean and the worst decile of each column that has a value.

    Args:
        rows: The rows of all clients.
        metrics: The further metrics by name, which say whether a larger value is better.
    """
    columns = quality_columns(rows)
    sizes = np.array(columns["num_examples"], np.float64)
    summary = {}
    for name, column in columns.items():
        values = np.array(column, np.float64)
        known = np.isfinite(values)
        part, _, metric = name.partition(".")
        if part not in (GLOBAL, PERSONAL) or not known.any():
            continue
        ordered = np.sort(values[known])[:: 1 if scale_of(metric, metrics).higher_is_better else -1]
        summary[name] = QualitySummary(
            mean=float(ordered.mean()),
            weighted_mean=float(np.average(values[known], weights=sizes[known])),
            worst_decile=float(ordered[: -(-len(ordered) // WORST_SHARE)].mean()),
            num_clients=len(ordered),
        )
    return summary
