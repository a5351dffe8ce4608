"""Serving: the newest verified Version as an int8 model, swapped while the app keeps predicting.

An app calls ``predict`` from any thread. The client offers each model that it has verified. An offered model replaces
the served one only if all checks pass:

1. Its Version is of another Run, or of a later epoch, or has a higher number than the served one.
2. The runtime opens its ``infer`` graph with the Version's slots, and ``preprocess`` if the Bundle has one.
3. It returns finite numbers for a probe.
4. The record that names it is on disk, so that a restart serves it again.

Slots are filled from the Version and from the newest personal parameters of the device, if the Bundle has any; in a
Run with Ditto from the device's copy alone. After the end of the Run they may be filled from the parameters that the
device has fine-tuned (``training.tuner``).

Otherwise the last good Version stays in service. The swap is one assignment of one reference, so a call in progress
ends on the model with which it started.
"""

import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from fanin.clients.device.models import (
    OpenedModel,
    file_chunks,
    manifest_chunks,
    open_bundle,
    open_parameters,
    open_ranges,
    served_files,
    verify_version,
)
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.storage.personal import local_values, tuned_model
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.ranges import RANGES
from fanin.edge.runtimes.base import NamedInputs, Predict, Preprocess, Runtime
from fanin.edge.runtimes.graphs import probe_inputs
from fanin.edge.runtimes.models import model_inputs, open_preprocess
from fanin.edge.tensors import Float32s
from fanin.protos.errors import FaninError, InvalidVersion, NotFound
from fanin.protos.messages import UNSEEN, Publication, ServedVersion

LOG = logging.getLogger("fanin.clients")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The served model: its Publication and its open graph."""

    publication: Publication
    predict: Predict
    bundle: Bundle
    preprocess: Preprocess | None
    lock: threading.Lock
    """Allows one call at a time: a runtime's graph has one set of buffers."""
    chunks: tuple[str, ...]
    """The digests of the Chunks that a restart needs."""
    is_tuned: bool = False
    """Whether the parameters are fine-tuned on this device."""


class Serving:
    """The model for an app's predictions, over a runtime and a device's cache."""

    def __init__(self, runtime: Runtime, cache: Cache, trusted: Collection[str]) -> None:
        self._runtime = runtime
        self._cache = cache
        self._served: Served | None = None
        self._latest = ServedVersion()
        self._restore(trusted)

    @property
    def version(self) -> tuple[str, int] | None:
        """(run id, number) of the served Version; None before the first one."""
        served = self._served
        return None if served is None else (served.publication.run_id, served.publication.version.number)

    @property
    def publication(self) -> Publication | None:
        """The Publication of the served Version; None before the first one."""
        served = self._served
        return None if served is None else served.publication

    @property
    def is_tuned(self) -> bool:
        """Whether the served parameters are fine-tuned on this device."""
        served = self._served
        return served is not None and served.is_tuned

    @property
    def bundle(self) -> Bundle | None:
        """The Bundle of the served Version; None before the first one."""
        served = self._served
        return None if served is None else served.bundle

    @property
    def latest(self) -> ServedVersion:
        """The Version that was offered last, served or rejected; the coordinator names only newer ones."""
        return self._latest

    @property
    def chunks(self) -> tuple[str, ...]:
        """The digests of the Chunks that a restart needs."""
        served = self._served
        return () if served is None else served.chunks

    def predict(self, inputs: NamedInputs) -> Float32s:
        """Predict with the served Version.

        Args:
            inputs: Inputs (n, ...) of the model by name, or raw data of ``preprocess`` with the name of the only input.

        Returns:
            Logits or values (n, ...), float32.

        Raises:
            NotFound: There is no Version yet.
            ValueError: An input is missing, or has another shape or type.
        """
        served = self._served
        if served is None:
            raise NotFound(
                "predict: this device has no version yet; let its client run until it has taken part once",
                code="FN-0833",
            )
        with served.lock:
            return served.predict(model_inputs(served.bundle, inputs, served.preprocess))

    def offer(self, publication: Publication, model: OpenedModel) -> bool:
        """Serve this verified model if it passes the module's checks. Returns whether it is served now."""
        served = self._served
        self.skip(publication)
        # (1)
        if served is not None and served.publication.run_id == publication.run_id:
            order, mine = publication.version.order, served.publication.version.order
            if order <= mine:
                return order == mine
        try:
            # (2) and (3)
            candidate = self._open(publication, model)
            # (4)
            self._cache.records.put_served(publication)
        except (FaninError, ValueError) as exc:
            version = publication.version
            LOG.warning("serving: version %d of run %s is not served (%s)", version.number, version.run_id, exc)
            return False
        self._served = candidate
        return True

    def tune(self, publication: Publication, model: OpenedModel) -> None:
        """Serve a fine-tuned and stored model of the served Version. Raises InvalidVersion if it fails the checks."""
        self._served = replace(self._open(publication, model), is_tuned=True)

    def skip(self, publication: Publication) -> None:
        """Do not request this Version again in this process, for example because it does not verify."""
        version, latest = publication.version, self._latest
        if latest.run_id != publication.run_id or latest.order < version.order:
            self._latest = ServedVersion(run_id=publication.run_id, epoch=version.epoch, number=version.number)

    def _open(self, publication: Publication, model: OpenedModel) -> Served:
        predict = self._runtime.open_predict(model.bundle, model.own_values(), model.ranges)
        outputs = predict(probe_inputs(model.bundle.manifest, 1))
        if not np.isfinite(outputs).all():
            raise InvalidVersion(
                f"version {publication.version.number} of run {publication.run_id}: its int8 model returns NaN "
                "or infinity for inputs of ones, expected finite numbers",
                code="FN-0834",
            )
        return Served(
            publication=publication,
            predict=predict,
            bundle=model.bundle,
            preprocess=open_preprocess(self._runtime, model.bundle),
            lock=threading.Lock(),
            chunks=self._chunks(publication, model.bundle),
        )

    def _chunks(self, publication: Publication, bundle: Bundle) -> tuple[str, ...]:
        graphs = file_chunks(bundle, served_files(bundle, self._runtime.graph_format))
        version = publication.version
        ranges = version.auxiliary[RANGES].chunks if RANGES in version.auxiliary else ()
        refs = (*manifest_chunks(publication), *graphs, *version.parameters.chunks, *ranges)
        return tuple(ref.sha256 for ref in refs)

    def _restore(self, trusted: Collection[str]) -> None:
        """Serve the model of the previous process; log a record that no longer verifies."""
        publication = self._cache.records.served()
        if publication is None:
            return
        try:
            bundle = open_bundle(publication, trusted, self._cache.chunks.read)
            # The last good Version may have a lower number than the highest verified one.
            verify_version(publication, bundle, UNSEEN)
            parameters = open_parameters(publication, bundle, self._cache.chunks.read)
            local = local_values(self._cache.locals, bundle, publication.run_id)
            ranges = open_ranges(publication, bundle, self._cache.chunks.read)
            model = OpenedModel(bundle=bundle, parameters=parameters, local=local, ranges=ranges)
            self.skip(publication)
            own = tuned_model(self._cache.tuned, publication.version, model)
            if own is None:
                self._served = self._open(publication, model)
            else:
                self.tune(publication, own)
        except (FaninError, ValueError) as exc:
            LOG.warning("serving: the version of the last time is not served (%s)", exc)
