"""Serving: the newest verified Version as an int8 model, swapped while the app goes on asking.

An app calls ``predict`` from any thread; the client offers a model whenever it has verified one. What is offered
takes the place of what is served only when

1. its Version is of another Run or of a higher number than the one that is served;
2. the runtime opens its ``infer`` graph with the Version's slots, and ``preprocess`` where there is one;
3. it says finite numbers to a probe;
4. the record that names it is on disk, so that a restart serves it again.

Until then, and if any of it fails, the last good Version goes on being served. The swap is one assignment of one
reference: a call that is under way ends on the model that it began with.
"""

import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from fanin.clients.cache import Cache
from fanin.clients.models import (
    OpenedModel,
    graph_chunks,
    manifest_chunks,
    open_bundle,
    open_parameters,
    verify_version,
)
from fanin.edge.bundle import Bundle
from fanin.edge.runtimes.base import Inputs, Predict, Preprocess, Runtime
from fanin.edge.runtimes.models import model_inputs, open_preprocess
from fanin.edge.tensors import Float32s
from fanin.protos.errors import FaninError, InvalidVersion, NotFound
from fanin.protos.messages import Assignment

LOG = logging.getLogger("fanin.clients")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What is served: the Assignment that brought it, and the open model."""

    assignment: Assignment
    predict: Predict
    bundle: Bundle
    preprocess: Preprocess | None
    lock: threading.Lock
    """A runtime's graph is one set of buffers: one call at a time."""
    chunks: tuple[str, ...]
    """The digests of the Chunks that a restart needs."""


class Serving:
    """The model that an app asks, over a runtime and a device's cache."""

    def __init__(self, runtime: Runtime, cache: Cache, trusted: Collection[str]) -> None:
        self._runtime = runtime
        self._cache = cache
        self._served: Served | None = None
        self._restore(trusted)

    @property
    def version(self) -> tuple[str, int] | None:
        """(run id, number) of the Version that is served; None before there is one."""
        served = self._served
        return None if served is None else (served.assignment.run_id, served.assignment.version.number)

    @property
    def chunks(self) -> tuple[str, ...]:
        """The digests of the Chunks that a restart needs."""
        served = self._served
        return () if served is None else served.chunks

    def predict(self, x: Inputs) -> Float32s:
        """What the served Version says to ``x`` (n, ...), raw inputs or the model's own: logits, or values, float32.

        Raises NotFound before there is a Version, ValueError for inputs of another form.
        """
        served = self._served
        if served is None:
            raise NotFound("predict: this device has no version yet; let its client run until it has taken part once")
        with served.lock:
            return served.predict(model_inputs(served.bundle, x, served.preprocess))

    def offer(self, assignment: Assignment, model: OpenedModel) -> bool:
        """Serve this verified model from now on, if it is newer and good (the module's checklist).

        Returns whether it is the one that is served.
        """
        served = self._served
        # (1)
        if served is not None and served.assignment.run_id == assignment.run_id:
            number, mine = assignment.version.number, served.assignment.version.number
            if number <= mine:
                return number == mine
        try:
            # (2) and (3)
            following = self._open(assignment, model)
            # (4)
            self._cache.put_served(assignment)
        except (FaninError, ValueError) as exc:
            version = assignment.version
            LOG.warning("serving: version %d of run %s is not served (%s)", version.number, version.run_id, exc)
            return False
        self._served = following
        return True

    def _open(self, assignment: Assignment, model: OpenedModel) -> Served:
        predict = self._runtime.open_predict(model.bundle, model.parameters)
        said = predict(probe_of(model.bundle))
        if not np.isfinite(said).all():
            raise InvalidVersion(
                f"version {assignment.version.number} of run {assignment.run_id}: its int8 model says NaN or infinity "
                "to an input of zeros, expected finite numbers"
            )
        return Served(
            assignment=assignment,
            predict=predict,
            bundle=model.bundle,
            preprocess=open_preprocess(self._runtime, model.bundle),
            lock=threading.Lock(),
            chunks=self._chunks(assignment, model.bundle),
        )

    def _chunks(self, assignment: Assignment, bundle: Bundle) -> tuple[str, ...]:
        graphs = graph_chunks(bundle, self._runtime.graph_format)
        refs = (*manifest_chunks(assignment), *graphs, *assignment.version.parameters.chunks)
        return tuple(ref.sha256 for ref in refs)

    def _restore(self, trusted: Collection[str]) -> None:
        """Serve what was served before this process; a record that does not verify any more is only told."""
        assignment = self._cache.served()
        if assignment is None:
            return
        try:
            bundle = open_bundle(assignment, trusted, self._cache.read)
            # Its number may be lower than the highest seen: it is the last that was good.
            verify_version(assignment, bundle, -1)
            parameters = open_parameters(assignment, bundle, self._cache.read)
            self._served = self._open(assignment, OpenedModel(bundle=bundle, parameters=parameters))
        except (FaninError, ValueError) as exc:
            LOG.warning("serving: the version of the last time is not served (%s)", exc)


def probe_of(bundle: Bundle) -> Inputs:
    """One input of zeros for a Bundle's ``infer`` graph."""
    (port,) = bundle.manifest.signatures["infer"].inputs
    shape = (1, *port.shape[1:])
    return np.zeros(shape, np.int32) if port.dtype == "int32" else np.zeros(shape, np.float32)
