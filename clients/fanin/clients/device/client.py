"""The device's client: it drives a session over a transport, with a cache, on one thread.

    client = Client(parts, options)
    client.run()                  # until stop() is called, from a signal handler or another thread
    client.predict({"x": x})      # from any thread: the int8 prediction of the newest verified Version

A temporary failure (connection, coordinator, this process) leads to a retry or a resumed download. A permanent one (a
wrong token, an old protocol, ``max_failures``) ends ``run`` with an error.

The app's code (``may_work``, the trainer, the example store) runs inside a guard. The client logs its exceptions with
their traceback, and they never end ``run``. ``failure`` is the error that did end it.
"""

import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

from fanin.clients.device.conditions import ASK_EVERY_S, RECHECK_S, Conditions, ShouldContinue
from fanin.clients.device.downloads import Fetching, StoreChunk
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.serving import Serving
from fanin.clients.device.session import events as e
from fanin.clients.device.session import machine as s
from fanin.clients.device.session.known import is_hidden
from fanin.clients.device.session.progress import progress
from fanin.clients.device.session.protocols import DeviceIdentity
from fanin.clients.device.session.tracing import DeviceTraces
from fanin.clients.device.session_driver import DriverParts, SessionDriver
from fanin.clients.device.site.journal import Journal
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.training.tuner import DeviceTuner
from fanin.clients.device.updates import Change, Trainer, progress_of
from fanin.clients.machine import condition_of
from fanin.clients.transport import ReadPayload, Transport
from fanin.edge.runtimes.base import NamedInputs
from fanin.edge.scopes import current_scope, note_scope
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.chunks import ChunkRef
from fanin.protos.errors import FaninError, NotFound, PermissionDenied, Unauthenticated

MAX_DELAY_S: Final = 0.3  # before an upload with a ``delay_seed``
LOG = logging.getLogger("fanin.clients")
T = TypeVar("T")


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
        tuner: Fine-tunes the last Version of a Run for ``predict``; None for no fine-tuning.
        traces: The spans of this device; None for no traces.
        journal: Writes the state of the device for its owner; None for none.
        identity: The device, for protocols with messages; None without a key.
    """

    transport: Transport
    cache: Cache
    trainer: Trainer
    trusted: Collection[str]
    rng: random.Random
    serving: Serving | None = None
    tuner: DeviceTuner | None = None
    traces: DeviceTraces | None = None
    journal: Journal | None = None
    identity: DeviceIdentity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Options of a client.

    Attributes:
        token: The enrollment token.
        max_updates: Number of accepted Updates after which ``run`` returns; 0 for no limit.
        max_failures: Number of consecutive failed trainings after which ``run`` raises Conflict; 0 for no limit. Set it
            for code of this device, such as a Flower app. The graphs of a Bundle come with the Run, so the trainings of
            another Run may succeed.
        delay_seed: Seed of a random delay of at most ``MAX_DELAY_S`` before each upload. Another seed changes the order
            of arrival, which must not change the Versions.
        may_work: Called before each step: a check-in, a download, training, an upload. Also called inside a step
            between batches and pieces, at most every ``ask_every_s``. Never called by two threads at once. An upload
            calls it on a thread of gRPC. Return False to pause, for example on battery. The client then stops within
            one batch or piece, keeps its state and calls again after ``recheck_s``. An exception counts as False.
        recheck_s: Seconds between two calls of a ``may_work`` that returned False.
        ask_every_s: Shortest time between two calls of ``may_work`` inside a step.
        partition: The number of this device's part of all data. The coordinator warns of two devices with one number.
            None if the parts have no numbers.
        shares_condition: Whether check-ins report battery and network of this machine to the operators.
    """

    token: str
    max_updates: int = 0
    max_failures: int = 0
    delay_seed: str | None = None
    may_work: Callable[[], bool] = lambda: True
    recheck_s: float = RECHECK_S
    ask_every_s: float = ASK_EVERY_S
    partition: int | None = None
    shares_condition: bool = True


class Client:
    """One device that takes part in federated training."""

    def __init__(self, parts: ClientParts, options: ClientOptions) -> None:
        self._parts = parts
        self._failure: BaseException | None = None
        self._conditions = Conditions(options.may_work, time.monotonic, options.recheck_s, options.ask_every_s)
        self._host = _ClientHost(self, parts, self._conditions, options.max_updates)
        self._driver = SessionDriver(
            DriverParts(
                host=self._host,
                calls=_BlockingCalls(parts, options, self._conditions),
                store=parts.cache,
                trainer=parts.trainer,
                trusted=parts.trusted,
                rng=parts.rng,
                conditions=self._conditions,
                serving=parts.serving,
                tuner=parts.tuner,
                partition=options.partition,
                identity=parts.identity,
                condition=condition_of if options.shares_condition else lambda: None,
            ),
            s.Session(max_failures=options.max_failures),
        )

    @property
    def session(self) -> s.Session:
        """The state of the session."""
        return self._driver.session

    @property
    def num_accepted(self) -> int:
        """Number of accepted Updates since this client was created."""
        return self._driver.session.num_accepted

    @property
    def failure(self) -> BaseException | None:
        """The error that ended ``run``; None while it runs, and after ``stop`` or ``max_updates`` ended it."""
        return self._failure

    @property
    def served_version(self) -> tuple[str, int] | None:
        """(run id, number) of the Version that ``predict`` uses; None before the first one."""
        return None if self._parts.serving is None else self._parts.serving.version

    def predict(self, inputs: NamedInputs) -> Float32s:
        """Predict with the int8 model of the newest verified Version; may be called from any thread.

        Args:
            inputs: Arrays (n, ...) by name: the inputs of the model, or raw ones if the Bundle has ``preprocess``.

        Returns:
            Logits or values (n, ...), float32.

        Raises:
            NotFound: There is no Version yet.
            ValueError: An input is missing or has another shape or type, or this client has no ``serving``.
        """
        if self._parts.serving is None:
            raise ValueError("predict: this client was made without serving; give ClientParts a Serving")
        return self._parts.serving.predict(inputs)

    def stop(self) -> None:
        """Make ``run`` return: a training or a transfer ends within one batch or piece."""
        self._conditions.stop()

    def run(self) -> None:
        """Take part until ``stop``.

        Raises:
            Conflict: The coordinator rejects this device permanently, or ``max_failures`` trainings failed in a row.
        """
        journal = self._parts.journal
        if journal is not None:
            journal.start(partial(progress_of, self._parts.trainer))
        try:
            run_blocking(self._driver.run())
        except BaseException as exc:
            # An app may run this on a thread that it never joins; it reads the reason here.
            self._failure = exc
            raise
        finally:
            self._host.stop()
            if journal is not None:
                journal.stop(self._failure)


class _ClientHost:
    """The ``SessionHost`` of a process."""

    def __init__(self, client: Client, parts: ClientParts, conditions: Conditions, max_updates: int) -> None:
        self._client = client
        self._trainer = parts.trainer
        self._traces = parts.traces
        self._journal = parts.journal
        self._heartbeat = Heartbeat(parts.transport.report, parts.trainer, conditions)
        self._conditions = conditions
        self._max_updates = max_updates
        self._logged = ("", "")

    def now(self) -> float:
        return time.monotonic()

    async def pause(self, seconds: float) -> bool:
        if self._max_updates and self._client.num_accepted >= self._max_updates:
            return False
        if self._journal is not None:
            self._journal.step(self._client.session, seconds, self._client.served_version)
        return not self._conditions.wait(seconds)

    async def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        return self._trainer.train(model, assignment, should_continue)

    def follow(self, assignment: m.Assignment | None) -> None:
        self._heartbeat.follow(assignment)

    def stop(self) -> None:
        """End the thread that reports progress."""
        self._heartbeat.stop()

    def observe(self, session: s.Session, action: e.SessionAction, event: e.SessionEvent) -> None:
        if isinstance(event, e.Answered) and isinstance(event.answer, m.Assigned):
            _note_work(event.answer.assignment)
        # After ``stop`` the app closes the connection, so the call under way fails as intended.
        # An event Denied ends ``run`` with its reason as the error, which is printed once, by the caller.
        if isinstance(event, e.Lost | e.Moot | e.Unable) and not self._conditions.is_stopping:
            LOG.warning("%s: %s", action.label, event.reason)
        if isinstance(event, e.Answered) and isinstance(event.answer, m.Rejected):
            LOG.warning("checkin: rejected (%s): %s", event.answer.reason.value, event.answer.text)
        if self._journal is not None and not self._conditions.is_stopping:
            self._journal.observe(action, event)
        if isinstance(event, e.UpdateStored) and event.warning:
            LOG.warning("%s: %s", action.label, event.warning)
        if (line := progress(session, event)) is not None:
            LOG.info(line)

    async def guard(self, action: e.SessionAction, work: Awaitable[e.SessionEvent]) -> e.SessionEvent:
        _note_work(
            action.assignment if isinstance(action, e.Fetch | e.SendMessage | e.Train | e.Send | e.Abandon) else None
        )
        try:
            return await (work if self._traces is None else self._traces.traced(action, work))
        except Exception as exc:
            # The only handler of unexpected errors. A device that ends here would be restarted and end again, unseen.
            # The coordinator receives a report and selects another device.
            reason = f"unexpected error: {type(exc).__name__}: {exc}"
            if (action.label, reason) != self._logged:
                # Once: the same error may come back at every attempt, and ``observe`` logs each in one line.
                LOG.exception("%s: unexpected error", action.label)
            self._logged = action.label, reason
        is_call = isinstance(action, e.Enroll | e.Poll | e.Abandon | e.EndSession)
        return e.Lost(reason=reason, is_local=True) if is_call else e.Unable(reason=reason)


def _note_work(assignment: m.Assignment | None) -> None:
    """Let the following lines of the log name the Round of an Assignment, or none."""
    run, round_number = ("", 0) if assignment is None else (assignment.run_id, assignment.round)
    note_scope(replace(current_scope(), run=run, round=round_number))


class _BlockingCalls:
    """The ``DeviceCalls`` over a Transport: each call blocks the thread until it ends."""

    def __init__(self, parts: ClientParts, options: ClientOptions, conditions: Conditions) -> None:
        self._transport = parts.transport
        self._journal = parts.journal
        self._token = options.token
        self._conditions = conditions
        self._delays = None if options.delay_seed is None else random.Random(options.delay_seed)

    async def enroll(self) -> None:
        self._transport.enroll(self._token)

    async def check_in(self, check_in: m.CheckIn) -> m.CheckInAnswer:
        return self._transport.check_in(check_in)

    async def download(self, download_id: str, missing: tuple[ChunkRef, ...], store: StoreChunk) -> None:
        with Fetching(self._transport.download, download_id, missing) as fetching:
            for ref in missing:
                store(ref, partial(fetching.chunk, ref))

    async def upload(self, header: m.UpdateHeader, read: ReadPayload) -> m.UploadReply:
        if self._delays is not None:
            self._conditions.wait(self._delays.uniform(0.0, MAX_DELAY_S))
        return self._transport.upload(header, partial(self._read, header, read))

    def _read(self, header: m.UpdateHeader, read: ReadPayload, offset: int, size_bytes: int) -> bytes:
        data = read(offset, size_bytes)
        if self._journal is not None:
            self._journal.uploading(offset + len(data), len(data), header.payload.size_bytes)
        return data

    async def report(self, report: m.Report) -> m.UploadReply:
        return self._transport.report(report)

    async def exchange(self, request: m.ExchangeRequest) -> m.ExchangeOutcome:
        return self._transport.exchange(request)


class Heartbeat:
    """Reports the progress of one device, on a thread of its own.

    A training may block its thread for minutes, and so may the code of a Flower app. The thread begins with the first
    Assignment that wants reports. A reply may say that the Assignment is over: then the work for it ends.

    Args:
        send: Sends a report. NotFound, PermissionDenied and Unauthenticated mean that the Assignment is over, another
            FaninError that this report was lost.
        trainer: Knows how far the training is, or does not.
        conditions: End the work.
    """

    def __init__(self, send: Callable[[m.Report], m.UploadReply], trainer: object, conditions: Conditions) -> None:
        self._send = send
        self._trainer = trainer
        self._conditions = conditions
        self._changed, self._is_over = threading.Condition(), False
        self._assignment: m.Assignment | None = None
        self._thread: threading.Thread | None = None

    def follow(self, assignment: m.Assignment | None) -> None:
        """Report the progress of this Assignment from now on, or of none."""
        with self._changed:
            wanted = assignment if assignment is not None and assignment.progress_s else None
            if _id(wanted) == _id(self._assignment):
                return
            self._assignment = wanted
            self._conditions.begin_assignment()
            self._changed.notify()
            if self._thread is None and wanted is not None:
                self._thread = threading.Thread(target=self._run, name="fanin progress", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread. A report under way may still arrive."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def _run(self) -> None:
        while (assignment := self._next()) is not None:
            assignment_id = assignment.assignment_id
            # The steps depend on data.
            progress = m.TrainingProgress() if is_hidden(assignment) else progress_of(self._trainer, assignment_id)
            report = m.Report(assignment_id=assignment_id, progress=progress)
            try:
                if self._send(report).round_state is m.RoundState.CLOSED:
                    self._end(assignment_id, "the round has closed, or does not need this update")
            except (NotFound, PermissionDenied, Unauthenticated) as exc:
                # Of the last two: an operator banned or removed this device.
                self._end(assignment_id, str(exc))
            except FaninError as exc:
                # The session notices a broken connection by its own calls.
                LOG.debug("progress: %s", exc)

    def _end(self, assignment_id: str, reason: str) -> None:
        """End the work for an Assignment, unless the device has gone on to another one."""
        with self._changed:
            if _id(self._assignment) == assignment_id:
                self._conditions.end_assignment(f"the assignment is over: {reason}")

    def _next(self) -> m.Assignment | None:
        """Wait until a report is due, and return its Assignment. Return None at the end."""
        with self._changed:
            while not self._is_over:
                assignment = self._assignment
                has_changed = self._changed.wait(None if assignment is None else assignment.progress_s)
                if not has_changed and assignment is not None:
                    return assignment
        return None


def _id(assignment: m.Assignment | None) -> str:
    return "" if assignment is None else assignment.assignment_id


def run_blocking(work: Coroutine[object, object, T]) -> T:
    """Run a coroutine whose awaits never suspend, and return its result."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise AssertionError("a blocking call has suspended")
