"""The answer of a device to the query of a statistics Run: counts of its examples, and no training.

The examples are those of the device's store, training and validation part alike, before any ``preprocess``. The answer
is the change of the Version's parameters: whole numbers (``fanin.edge.queries``). Each device has the weight 1, so its
Update has no number of examples.
"""

import weakref
from functools import partial
from typing import Final, Protocol, runtime_checkable

import numpy as np

from fanin.clients.data.examples import Y
from fanin.clients.data.stores import ExampleStore, snapshot
from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.session.known import known_protocols
from fanin.clients.device.updates import Change, Trainer, UnfitExamples
from fanin.edge.bundles.manifest import STATISTICS
from fanin.edge.codecs.known import known_codecs, known_stages
from fanin.edge.queries.cells import cells_of
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput

RUNTIME: Final = "counts"


@runtime_checkable
class AnswersQueries(Protocol):
    """A Trainer that also answers the queries of statistics Runs."""

    @property
    def answers_queries(self) -> bool:
        """Whether it does."""
        ...


def answers_queries(trainer: object) -> bool:
    """Return whether a Trainer answers queries about its examples. A Flower app does not: it has data of its own."""
    return isinstance(trainer, AnswersQueries) and trainer.answers_queries


def formats_of(trainer: Trainer) -> tuple[str, ...]:
    """Return the formats of Bundles that a device reports: that of its graphs, and queries if it answers them."""
    return tuple(dict.fromkeys((trainer.graph_format, *([STATISTICS] if answers_queries(trainer) else []))))


def capabilities_of(trainer: Trainer) -> m.Capabilities:
    """Return what a device with this trainer can do."""
    return m.Capabilities(
        codecs=known_codecs(),
        runtimes=(trainer.runtime,),
        graph_formats=formats_of(trainer),
        stages=known_stages(),
        reports_progress=True,
        round_protocols=known_protocols(),
    )


def answer(model: OpenedModel, store: ExampleStore) -> Change:
    """Return the answer to the query of a Bundle.

    Raises:
        UnfitExamples: The examples do not have the features of the query, or too many values.
        InvalidInput: The store cannot be read.
    """
    query = model.bundle.manifest.query
    assert query is not None, "the Bundle has a query"
    now = snapshot(store)
    names = [*now.train.inputs, Y]
    parts = [{**part.inputs, Y: part.y} for part in now.parts.values()]
    examples = {name: np.concatenate([part[name] for part in parts]) for name in names}
    try:
        values = cells_of(query, model.parameters, examples)
    except ValueError as exc:
        raise UnfitExamples(str(exc), partial(_has_changed, store, weakref.ref(now.train))) from exc
    return Change(values=values, counts={m.EXAMPLES: 1})


def _has_changed(store: ExampleStore, seen: "weakref.ref[object]") -> bool:
    try:
        return snapshot(store).train is not seen()
    except InvalidInput:
        return True  # the next Round reports it


class QueryTrainer:
    """A Trainer of a device without a runtime: it answers queries, and trains no model.

    Args:
        store: The examples.
    """

    runtime = RUNTIME
    graph_format = STATISTICS
    answers_queries = True

    def __init__(self, store: ExampleStore) -> None:
        self._store = store

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """Answer the query of the Bundle. See Trainer."""
        should_continue()
        return answer(model, self._store)
