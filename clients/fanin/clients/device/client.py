"""The device's client: it drives a session over a transport, with a cache, on one thread.

    client = Client(parts, options)
    client.run()                  # until stop() is called, from a signal handler or another thread
    client.predict(x)             # from any thread: the int8 prediction of the newest verified Version

A temporary failure (connection, coordinator, this process) leads to a retry or a resumed download. A permanent one (a
wrong token, an old protocol) ends ``run`` with an error.

The app's code (``may_work``, the trainer, the example store) runs inside a guard. The client logs its exceptions with
their traceback, and they never end ``run``. ``failure`` is the error that did end it.
"""

import logging
import random
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, assert_never

from fanin.clients.device.downloads import Downloader
from fanin.clients.device.models import OpenedModel, graph_chunks
from fanin.clients.device.serving import Serving
from fanin.clients.device.session import events as e
from fanin.clients.device.session import machine as s
from fanin.clients.device.session.outcomes import event_of
from fanin.clients.device.session.progress import progress
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.updates import Trainer, make_update
from fanin.clients.transport import Transport
from fanin.edge.codecs.fixed import CODECS
from fanin.edge.runtimes.base import Inputs
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.chunks import ChunkRef
from fanin.protos.errors import Conflict, FaninError, InvalidBundle, InvalidInput, NotFound

MAX_DELAY_S: Final = 0.3
"""Longest delay before an upload with a ``delay_seed``."""
LOG = logging.getLogger("fanin.clients")
RECHECK_S: Final = 1.0
"""Seconds between two calls of a ``may_work`` that returned False or raised."""
CHECK_IN_WAIT_S: Final = 40.0
"""Seconds that a check-in waits for work; common proxies cut an idle connection after 60 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientParts:
    """The parts of a client.

    Attributes:
        transport: The calls to the coordinator.
        cache: The device's folder.
        trainer: Trains on the device's examples.
        trusted: Public keys (hex) of the publishers whose Bundles the device runs.
        rng: Source of the session's random pauses.
        serving: The model for ``predict``; None for a client that only trains.
    """

    transport: Transport
    cache: Cache
    trainer: Trainer
    trusted: Collection[str]
    rng: random.Random
    serving: Serving | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Options of a client.

    Attributes:
        token: The enrollment token.
        max_updates: Number of accepted Updates after which ``run`` returns; 0 for no limit.
        delay_seed: Seed of a random delay of at most ``MAX_DELAY_S`` before each upload. Another seed changes the order
            of arrival, which must not change the Versions.
        may_work: Called before each step (a check-in, a download, training, an upload) on the thread of ``run``.
            Return False to pause, for example on battery. The client then keeps its state and calls again after
            ``recheck_s``. An exception counts as False; the first of several is logged with its traceback.
        recheck_s: Seconds between two calls of a ``may_work`` that returned False.
    """

    token: str
    max_updates: int = 0
    delay_seed: str | None = None
    may_work: Callable[[], bool] = lambda: True
    recheck_s: float = RECHECK_S


class Client:
    """One device that takes part in federated training."""

    def __init__(self, parts: ClientParts, options: ClientOptions) -> None:
        self._parts = parts
        self._options = options
        self._session = s.Session()
        self._model: OpenedModel | None = None
        self._downloader = Downloader(parts.transport, parts.cache, parts.trusted, parts.trainer)
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._may_work_failed = False
        self._delays = None if options.delay_seed is None else random.Random(options.delay_seed)

    @property
    def num_accepted(self) -> int:
        """Number of accepted Updates since this client was created."""
        return self._session.num_accepted

    @property
    def failure(self) -> BaseException | None:
        """The error that ended ``run``; None while it runs, and after ``stop`` or ``max_updates`` ended it."""
        return self._failure

    @property
    def served_version(self) -> tuple[str, int] | None:
        """(run id, number) of the Version that ``predict`` uses; None before the first one."""
        return None if self._parts.serving is None else self._parts.serving.version

    def predict(self, x: Inputs) -> Float32s:
        """Predict with the int8 model of the newest verified Version; may be called from any thread.

        Args:
            x: Inputs (n, ...): those of the model, or raw ones if the Bundle has ``preprocess``.

        Returns:
            Logits or values (n, ...), float32.

        Raises:
            NotFound: There is no Version yet.
            ValueError: The inputs have another shape or type, or this client has no ``serving``.
        """
        serving = self._parts.serving
        if serving is None:
            raise ValueError("predict: this client was made without serving; give ClientParts a Serving")
        return serving.predict(x)

    def stop(self) -> None:
        """Make ``run`` return after its current step."""
        self._stopping.set()

    def run(self) -> None:
        """Take part until ``stop``. Raises Conflict if the coordinator rejects this device permanently."""
        try:
            self._run()
        except BaseException as exc:
            # An app may run this on a thread that it never joins; it reads the reason here.
            self._failure = exc
            raise

    def _run(self) -> None:
        step = self._session.begin()
        pause_s = step.pause_s
        while not self._stopping.wait(pause_s):
            if not self._may_work():
                pause_s = self._options.recheck_s
                continue
            if isinstance(step.action, e.EndSession):
                raise Conflict(step.action.reason)
            event = self._attempt(step.action)
            # After ``stop`` the app closes the connection, so the call under way fails as intended.
            if isinstance(event, e.Lost | e.Moot | e.Unable | e.Denied) and not self._stopping.is_set():
                LOG.warning("%s: %s", step.action.label, event.reason)
            if isinstance(event, e.Answered) and isinstance(event.answer, m.Rejected):
                LOG.warning("checkin: rejected (%s): %s", event.answer.reason.value, event.answer.text)
            line = progress(self._session, event)
            if line is not None:
                LOG.info(line)
            self._session, step = self._session.step(event, self._parts.rng)
            pause_s = step.pause_s
            if step.forget:
                self._forget_updates()
            if self._options.max_updates and self.num_accepted >= self._options.max_updates:
                return

    def _may_work(self) -> bool:
        try:
            may_work = bool(self._options.may_work())
        except Exception as exc:  # the app's code may raise anything
            if not self._may_work_failed:
                LOG.exception(
                    "may_work: %s: %s; the client pauses and calls it again every %g s",
                    type(exc).__name__,
                    exc,
                    self._options.recheck_s,
                )
            self._may_work_failed = True
            return False
        self._may_work_failed = False
        return may_work

    def _forget_updates(self) -> None:
        try:
            self._parts.cache.updates.clear()
        except OSError as exc:
            # The next training removes them before it begins, and retries until it succeeds.
            LOG.warning("updates cannot be removed (%s); the client tries again before it trains", exc)

    def _attempt(self, action: e.SessionAction) -> e.SessionEvent:
        """Carry out one action and return its outcome as an event."""
        try:
            return self._do(action)
        except (FaninError, OSError) as exc:
            event = event_of(action, exc)
            if isinstance(event, e.Unable):
                self._skip(action)
            return event
        except Exception as exc:
            # The only handler of unexpected errors. A device that ends here would be restarted and end again, unseen.
            # The coordinator receives a report and selects another device.
            LOG.exception("%s: unexpected error", action.label)
            reason = f"unexpected error: {type(exc).__name__}: {exc}"
            self._skip(action)
            is_work = isinstance(action, e.Refresh | e.Fetch | e.Train | e.Send)
            return e.Unable(reason=reason) if is_work else e.Lost(reason=reason)

    def _skip(self, action: e.SessionAction) -> None:
        """Do not request this Version again, if it did not verify."""
        if isinstance(action, e.Refresh) and self._parts.serving is not None:
            self._parts.serving.skip(action.publication)

    def _do(self, action: e.SessionAction) -> e.SessionEvent:
        transport = self._parts.transport
        match action:
            case e.Enroll():
                transport.enroll(self._options.token)
                return e.Enrolled()
            case e.Poll():
                return e.Answered(answer=transport.check_in(self._check_in()))
            case e.Refresh():
                self._fetch(action.publication)
                return e.Refreshed()
            case e.Fetch():
                self._fetch(action.assignment.publication)
                return e.Fetched()
            case e.Train():
                self._train(action.assignment)
                return e.UpdateStored()
            case e.Send():
                return e.Replied(reply=self._send(action.assignment))
            case e.Abandon():
                report = m.Report(assignment_id=action.assignment.assignment_id, failure=action.reason)
                return e.Replied(reply=transport.report(report))
            case e.EndSession():
                raise AssertionError("run ends at EndSession")
            case _:
                assert_never(action)

    def _check_in(self) -> m.CheckIn:
        trainer, serving = self._parts.trainer, self._parts.serving
        capabilities = m.Capabilities(
            codecs=tuple(CODECS), runtimes=(trainer.runtime,), graph_formats=(trainer.graph_format,)
        )
        served = None if serving is None else serving.latest
        return m.CheckIn(protocol=m.PROTOCOL, capabilities=capabilities, wait_s=CHECK_IN_WAIT_S, served=served)

    def _fetch(self, publication: m.Publication) -> None:
        needed: list[ChunkRef] = []
        try:
            self._model = self._downloader.fetch(publication, needed)
            if self._parts.serving is not None:
                self._parts.serving.offer(publication, self._model)
        finally:
            # Also after a failure: otherwise failed Assignments would fill this disk. The Chunks that the next try
            # resumes from are kept.
            keep = [ref.sha256 for ref in needed]
            served = () if self._parts.serving is None else self._parts.serving.chunks
            self._parts.cache.chunks.trim((*keep, *(f"{sha256}.part" for sha256 in keep), *served))

    def _train(self, assignment: m.Assignment) -> None:
        cache = self._parts.cache
        if cache.updates.header(assignment.assignment_id) is not None:
            return
        cache.updates.clear()
        assert self._model is not None, "training comes after fetching"
        try:
            outcome = self._parts.trainer.train(self._model, assignment, self._downloader.num_bytes)
            telemetry = replace(outcome.telemetry, bytes_resumed=self._downloader.num_bytes_resumed)
            outcome = replace(outcome, telemetry=telemetry)
            header, payload = make_update(assignment, self._model.bundle.manifest.table, outcome)
        except InvalidBundle:
            # A graph was damaged on this disk after its download: the next try downloads it again.
            cache.chunks.remove_damaged(graph_chunks(self._model.bundle, self._parts.trainer.graph_format))
            raise
        except ValueError as exc:
            raise InvalidInput(f"training: {exc}") from exc
        cache.updates.put(header, payload)

    def _send(self, assignment: m.Assignment) -> m.UploadReply:
        cache, name = self._parts.cache, assignment.assignment_id
        header = cache.updates.header(name)
        if header is None:
            raise NotFound(f"update of {name}: it is no longer in the cache")
        if self._delays is not None:
            self._stopping.wait(self._delays.uniform(0.0, MAX_DELAY_S))
        return self._parts.transport.upload(header, partial(cache.updates.read, name))
