"""The device's client: a session driven over a transport, with a cache, on one thread.

    client = Client(parts, options)
    client.run()                  # until stop() is called from a signal handler or another thread
    client.predict(x)             # from any thread: what the newest verified Version says, as an int8 model

What can break while it runs (the line, the coordinator, this process) is repeated or taken up again; what
cannot be mended (a wrong token, a protocol that is too old) ends ``run`` with an error.

The app's own code (``may_work``, the trainer, the example store) is called inside a guard. An exception there is
logged with its traceback and never ends ``run``. ``failure`` is the error that did end it.
"""

import logging
import random
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, assert_never

from fanin.clients.device import session as s
from fanin.clients.device.cache import Cache
from fanin.clients.device.fetching import Fetching
from fanin.clients.device.models import (
    OpenedModel,
    graph_chunks,
    manifest_chunks,
    open_bundle,
    open_parameters,
    verify_version,
)
from fanin.clients.device.outcomes import event_of
from fanin.clients.device.progress import progress
from fanin.clients.device.serving import Serving
from fanin.clients.device.updates import Trainer, make_update
from fanin.clients.transport import Transport
from fanin.edge.codecs.fixed import CODECS
from fanin.edge.runtimes.base import Inputs
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.chunks import ChunkRef
from fanin.protos.errors import Conflict, FaninError, InvalidBundle, InvalidInput, NotFound

MAX_DELAY_S: Final = 0.3
LOG = logging.getLogger("fanin.clients")
RECHECK_S: Final = 1.0
"""Seconds between two calls of a ``may_work`` that returned False or raised."""
WAIT_S: Final = 40.0
"""How long a check-in hangs: under the 60 s after which common proxies cut an idle line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a client works with. ``trusted`` are the publishers' public keys (hex); with ``serving`` it predicts."""

    transport: Transport
    cache: Cache
    trainer: Trainer
    trusted: Collection[str]
    rng: random.Random
    serving: Serving | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """``token`` enrolls; ``max_updates`` ends ``run`` after so many accepted Updates, 0 for never.

    With a ``delay_seed`` each upload waits a moment that is drawn from it, up to ``MAX_DELAY_S``: devices then
    arrive in another order for another seed, and the Versions must be the same.

    ``may_work`` is called before each step (a check-in, a download, training, an upload), on the thread of ``run``.
    Return False to pause (for example on battery). The client then keeps its state and calls again every ``recheck_s``
    seconds. An exception counts as False: the first one in a row is logged with its traceback, and the client keeps
    asking.
    """

    token: str
    max_updates: int = 0
    delay_seed: str | None = None
    may_work: Callable[[], bool] = lambda: True
    recheck_s: float = RECHECK_S


class Client:
    """One device."""

    def __init__(self, parts: Parts, options: Options) -> None:
        self._parts = parts
        self._options = options
        self._session = s.Session()
        self._model: OpenedModel | None = None
        # Of one Assignment or Publication: a fetch that is tried again adds to what its first try cost.
        self._counted_for, self._bytes_downloaded, self._bytes_resumed = "", 0, 0
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._may_work_failed = False
        self._delays = None if options.delay_seed is None else random.Random(options.delay_seed)

    @property
    def num_accepted(self) -> int:
        """Updates that were accepted since this client was made."""
        return self._session.num_accepted

    @property
    def failure(self) -> BaseException | None:
        """The error that ended ``run``; None while it runs, and after ``stop`` or ``max_updates`` ended it."""
        return self._failure

    @property
    def served_version(self) -> tuple[str, int] | None:
        """(run id, number) of the Version that ``predict`` asks; None before there is one."""
        return None if self._parts.serving is None else self._parts.serving.version

    def predict(self, x: Inputs) -> Float32s:
        """What the newest verified Version says to ``x`` (n, ...): logits, or values, float32; from any thread.

        Raises NotFound before there is a Version, ValueError for inputs of another form.
        """
        serving = self._parts.serving
        if serving is None:
            raise ValueError("predict: this client was made without serving; give Parts a Serving")
        return serving.predict(x)

    def stop(self) -> None:
        """Let ``run`` return after the step it is in."""
        self._stopping.set()

    def run(self) -> None:
        """Take part until ``stop``. Raises Conflict, and nothing else, when the coordinator refuses for good."""
        try:
            self._run()
        except BaseException as exc:
            # An app runs this on a thread that nothing joins: it reads here why its device stopped.
            self._failure = exc
            raise

    def _run(self) -> None:
        todo = self._session.begin()
        pause_s = todo.pause_s
        while not self._stopping.wait(pause_s):
            if not self._may_work():
                pause_s = self._options.recheck_s
                continue
            if isinstance(todo.action, s.Stop):
                raise Conflict(f"stopped: {todo.action.reason}")
            event = self._attempt(todo.action)
            if not isinstance(event, s.Enrolled | s.Answered | s.Refreshed | s.Fetched | s.Trained | s.Replied):
                LOG.warning("%s: %s", type(todo.action).__name__.lower(), event.reason)
            if isinstance(event, s.Answered) and isinstance(event.answer, m.Rejected):
                LOG.warning("checkin: rejected (%s): %s", event.answer.reason.value, event.answer.text)
            line = progress(self._session, event)
            if line is not None:
                LOG.info(line)
            self._session, todo = self._session.step(event, self._parts.rng)
            pause_s = todo.pause_s
            if todo.forget:
                self._forget_updates()
            if self._options.max_updates and self.num_accepted >= self._options.max_updates:
                return

    def _may_work(self) -> bool:
        try:
            may_work = bool(self._options.may_work())
        except Exception as exc:  # the app's own code may raise anything
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
            self._parts.cache.forget_updates()
        except OSError as exc:
            # The next training removes them before it begins, and repeats that until it succeeds.
            LOG.warning("updates cannot be removed (%s); the client tries again before it trains", exc)

    def _attempt(self, action: s.Action) -> s.Event:
        """Do one thing; every outcome is an event."""
        try:
            return self._do(action)
        except (FaninError, OSError) as exc:
            event = event_of(action, exc)
            if isinstance(event, s.Unable):
                self._skip(action)
            return event
        except Exception as exc:
            # The one place for what nobody foresaw: a device that dies of it would be started again and die again,
            # for nobody looks at it. The coordinator is told, and gives the work to another.
            LOG.exception("%s: unexpected error", type(action).__name__.lower())
            reason = f"unexpected error: {type(exc).__name__}: {exc}"
            self._skip(action)
            is_work = isinstance(action, s.Refresh | s.Fetch | s.Train | s.Send)
            return s.Unable(reason=reason) if is_work else s.Lost(reason=reason)

    def _skip(self, action: s.Action) -> None:
        """A Version that does not verify is not asked for again."""
        if isinstance(action, s.Refresh) and self._parts.serving is not None:
            self._parts.serving.skip(action.publication)

    def _do(self, action: s.Action) -> s.Event:
        transport = self._parts.transport
        match action:
            case s.Enroll():
                transport.enroll(self._options.token)
                return s.Enrolled()
            case s.CheckIn():
                return s.Answered(answer=transport.check_in(self._check_in()))
            case s.Refresh():
                self._fetch(action.publication)
                return s.Refreshed()
            case s.Fetch():
                self._fetch(action.assignment.publication)
                return s.Fetched()
            case s.Train():
                self._train(action.assignment)
                return s.Trained()
            case s.Send():
                return s.Replied(reply=self._send(action.assignment))
            case s.GiveUp():
                report = m.Report(assignment_id=action.assignment.assignment_id, failure=action.reason)
                return s.Replied(reply=transport.report(report))
            case s.Stop():
                raise AssertionError("run ends at Stop")
            case _:
                assert_never(action)

    def _check_in(self) -> m.CheckIn:
        trainer, serving = self._parts.trainer, self._parts.serving
        capabilities = m.Capabilities(
            codecs=tuple(CODECS), runtimes=(trainer.runtime,), graph_formats=(trainer.graph_format,)
        )
        served = None if serving is None else serving.latest
        return m.CheckIn(protocol=m.PROTOCOL, capabilities=capabilities, wait_s=WAIT_S, served=served)

    def _fetch(self, publication: m.Publication) -> None:
        if self._counted_for != publication.download_id:
            self._counted_for, self._bytes_downloaded, self._bytes_resumed = publication.download_id, 0, 0
        needed: list[ChunkRef] = []
        try:
            self._model = self._fetch_model(publication, needed)
            if self._parts.serving is not None:
                self._parts.serving.offer(publication, self._model)
        finally:
            # After a failure too, or Assignments that come to nothing would fill this disk. What the next try goes
            # on with stays.
            kept = [ref.sha256 for ref in needed]
            served = () if self._parts.serving is None else self._parts.serving.chunks
            self._parts.cache.trim((*kept, *(f"{sha256}.part" for sha256 in kept), *served))

    def _fetch_model(self, publication: m.Publication, needed: list[ChunkRef]) -> OpenedModel:
        """The Publication's model, verified. ``needed`` gets the Chunks that it takes, before they are fetched."""
        cache = self._parts.cache
        needed += manifest_chunks(publication)
        self._fetch_chunks(publication, "manifest", needed)
        try:
            bundle = open_bundle(publication, self._parts.trusted, cache.read)
            verify_version(publication, bundle, cache.seen(publication.run_id))
            graphs = graph_chunks(bundle, self._parts.trainer.graph_format)
            needed += (*graphs, *publication.version.parameters.chunks)
            self._fetch_chunks(publication, "graphs", graphs)
            self._fetch_chunks(publication, "parameters", publication.version.parameters.chunks)
            parameters = open_parameters(publication, bundle, cache.read)
        except InvalidInput:
            # The bytes on this disk may be at fault: let the next try fetch them anew.
            cache.forget((*publication.bundle.manifest.chunks, *publication.version.parameters.chunks))
            raise
        # Only now: a Version that did not verify must not raise the bar for those that do.
        cache.remember_seen(publication.run_id, publication.version.number)
        return OpenedModel(bundle=bundle, parameters=parameters)

    def _fetch_chunks(self, publication: m.Publication, what: str, refs: Iterable[ChunkRef]) -> None:
        cache = self._parts.cache
        missing = tuple(ref for ref in dict.fromkeys(refs) if not cache.has(ref))
        with Fetching(self._parts.transport.download, publication.download_id, missing) as fetching:
            for ref in missing:
                try:
                    self._bytes_resumed += ref.size_bytes - cache.fetch(ref, partial(self._counted, fetching, ref))
                except InvalidInput as exc:
                    raise InvalidInput(f"{what}: {exc}; what the coordinator serves was changed") from exc

    def _counted(self, fetching: Fetching, ref: ChunkRef, offset: int) -> Iterator[bytes]:
        for data in fetching.chunk(ref, offset):
            # Counted as it comes: what a broken line brought was paid for too.
            self._bytes_downloaded += len(data)
            yield data

    def _train(self, assignment: m.Assignment) -> None:
        cache = self._parts.cache
        if cache.update(assignment.assignment_id) is not None:
            return
        cache.forget_updates()
        assert self._model is not None, "training comes after fetching"
        try:
            outcome = self._parts.trainer.train(self._model, assignment, self._bytes_downloaded)
            telemetry = replace(outcome.telemetry, bytes_resumed=self._bytes_resumed)
            outcome = replace(outcome, telemetry=telemetry)
            header, payload = make_update(assignment, self._model.bundle.manifest.table, outcome)
        except InvalidBundle:
            # A graph was damaged on this disk since it was fetched: let the next try fetch it anew.
            cache.forget(graph_chunks(self._model.bundle, self._parts.trainer.graph_format))
            raise
        except ValueError as exc:
            raise InvalidInput(f"training: {exc}") from exc
        cache.put_update(header, payload)

    def _send(self, assignment: m.Assignment) -> m.UploadReply:
        cache, name = self._parts.cache, assignment.assignment_id
        header = cache.update(name)
        if header is None:
            raise NotFound(f"update of {name}: it is no longer in the cache")
        if self._delays is not None:
            self._stopping.wait(self._delays.uniform(0.0, MAX_DELAY_S))
        return self._parts.transport.upload(header, partial(cache.read_update, name))
