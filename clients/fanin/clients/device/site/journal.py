"""The journal of a device: it writes the device's state to ``status.json`` while the device runs.

The client reports what happens. A thread of the journal writes the file, at most once every ``WRITE_S``, so a Round of
milliseconds costs no more writes than one of hours. During a training it also reads how far the trainer is. The first
of several failed writes is logged; none disturbs the device. The totals and errors of earlier processes are kept.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from fanin.clients.device.session import events as e
from fanin.clients.device.session.machine import Session
from fanin.clients.device.site.leaving import leaving
from fanin.clients.device.site.record import (
    MAX_ERRORS,
    MAX_SENT_RUNS,
    MAX_TEXT_CHARS,
    RECORD_FILE,
    PastError,
    Sent,
    SiteCompared,
    SiteLink,
    SitePlace,
    SiteRecord,
    SiteTuned,
    SiteWork,
    read_record,
    to_json,
)
from fanin.edge.runtimes.evaluations import METRIC_UNIT, OF_GLOBAL, OF_PERSONAL
from fanin.protos import messages as m
from fanin.protos.errors import FaninError
from fanin.protos.messages import Assigned, UpdateState
from fanin.protos.release import __version__

LOG = logging.getLogger("fanin.clients")
WRITE_S: Final = 1.0
"""Shortest time between two writes."""
PROGRESS_S: Final = 3.0
"""Seconds between two readings of the progress of a training."""
Progress = Callable[[str], m.TrainingProgress]
"""Returns how far the training of an Assignment is."""


class Journal:
    """Writes the state of one device to its folder. Its methods may be called from any thread.

    Args:
        folder: The device's folder.
        place: How the device was started.
        device_id: The id of the device's key; "" before it is known.
        wall: The device's clock.
    """

    def __init__(self, folder: Path, place: SitePlace, device_id: str, wall: Callable[[], float] = time.time) -> None:
        self._path = folder / RECORD_FILE
        self._wall = wall
        before = SiteRecord()
        with suppress(OSError):
            before = read_record(folder) or before
        now, known = wall(), leaving(place.data, None)
        if before.sent:
            # An earlier process had an Assignment; what left then is still true.
            known = replace(known, leaves=before.leaving.leaves)
        self._record = SiteRecord(
            release=__version__,
            pid=os.getpid(),
            started_at=now,
            device_id=device_id or before.device_id,
            connected_at=before.connected_at,
            phase=e.SessionPhase.ENROLLING.value,
            place=place,
            link=SiteLink(since=now),
            tuned=before.tuned,
            compared=before.compared,
            sent=before.sent,
            errors=before.errors,
            leaving=known,
        )
        self._assignment: m.Assignment | None = None
        self._has_failed = False
        self._changed = threading.Condition()
        self._is_dirty = True
        self._is_over = False
        self._progress: Progress = lambda _: m.TrainingProgress()
        self._thread: threading.Thread | None = None

    @property
    def record(self) -> SiteRecord:
        """The current state."""
        return self._record

    def start(self, progress: Progress) -> None:
        """Write the state now, and from now on after each change."""
        self._progress = progress
        self._write()
        self._thread = threading.Thread(target=self._run, name="fanin status", daemon=True)
        self._thread.start()

    def stop(self, error: BaseException | None) -> None:
        """Write the last state: the process has ended, because of this error."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        ended = (
            "it ended as asked" if error is None or isinstance(error, SystemExit | KeyboardInterrupt) else _text(error)
        )
        link = replace(self._record.link, is_connected=False, next_try_at=0.0)
        if self._record.link.is_connected:
            link = replace(link, since=self._wall())
        if isinstance(error, Exception):
            link = replace(link, reason=_text(error), code=error.code if isinstance(error, FaninError) else "")
        self._record = replace(self._record, ended=ended, phase="stopped", link=link, work=SiteWork())
        self._write()

    def retry(self, action: str, error: FaninError, pause_s: float) -> None:
        """Write the state after an error before the first call. The process tries again after a pause."""
        self._trouble(action, error.code, _text(error))
        self._link(is_connected=False, reason=_text(error), code=error.code)
        self._record = replace(self._record, link=replace(self._record.link, next_try_at=self._wall() + pause_s))
        self._write()

    def observe(self, action: e.SessionAction, event: e.SessionEvent) -> None:
        """Note the outcome of an action."""
        match event:
            case e.Lost():
                self._trouble(action.label, event.code, event.reason)
                if not event.is_local:
                    self._link(is_connected=False, reason=event.reason, code=event.code)
            case e.Denied():
                self._trouble(action.label, event.code, event.reason)
                self._link(is_connected=False, reason=event.reason, code=event.code)
            case e.Unable() | e.Moot():
                self._trouble(action.label, event.code, event.reason)
            case e.Answered(answer=m.Rejected() as answer):
                self._trouble(action.label, "", f"rejected ({answer.reason.value}): {answer.text}")
                self._link(is_connected=True)
            case e.UpdateStored() | e.WorkPaused():
                pass
            case _:
                self._link(is_connected=True)
        if isinstance(event, e.Answered) and isinstance(event.answer, Assigned):
            self._assigned(event.answer.assignment)
        if isinstance(event, e.Tuned):
            self._tuned(event)
        if isinstance(event, e.UpdateStored):
            self._compared(event.counts)
        if isinstance(event, e.Replied) and event.reply.update_state is UpdateState.ACCEPTED:
            self._add(num_rounds=1)

    def step(self, session: Session, pause_s: float, served: tuple[str, int] | None) -> None:
        """Note the session before its next step, which begins after a pause."""
        with self._changed:
            link, work = self._record.link, self._record.work
            waits = not link.is_connected and pause_s > 0
            link = replace(link, next_try_at=self._wall() + pause_s if waits else 0.0)
            if session.assignment is None and work.run:
                work = SiteWork()
            name = "" if served is None else f"{served[0]}/{served[1]}"
            self._change(replace(self._record, phase=session.phase.value, link=link, work=work, served=name))

    def uploading(self, sent_bytes: int, num_bytes: int, update_bytes: int) -> None:
        """Note that the first ``sent_bytes`` of the Update have left, ``num_bytes`` of them just now."""
        with self._changed:
            work = replace(self._record.work, sent_bytes=sent_bytes, update_bytes=update_bytes)
            self._change(replace(self._record, work=work))
        self._add(num_bytes=num_bytes)

    def _tuned(self, event: e.Tuned) -> None:
        before, after = event.before, event.after
        tuned = SiteTuned(run=event.run_id, version=event.version, at=self._wall(), epochs=event.epochs)
        if after.num_predictions:
            pair = before.accuracy_float, after.accuracy_float
            tuned = replace(tuned, metric="accuracy", personal_int8=after.accuracy_int8)
        else:
            num = max(1, after.num_examples)
            pair = before.loss_sum / num, after.loss_sum / num
            tuned = replace(tuned, metric="loss")
        with self._changed:
            tuned = replace(tuned, num_examples=after.num_examples, global_model=pair[0], personal_model=pair[1])
            self._change(replace(self._record, tuned=tuned))

    def _compared(self, counts: Mapping[str, int]) -> None:
        means = [
            {
                name.removeprefix(prefix): count / METRIC_UNIT / num
                for name, count in counts.items()
                if name.startswith(prefix)
            }
            for prefix in (OF_GLOBAL, OF_PERSONAL)
            if (num := counts.get(m.EVAL_EXAMPLES, 0))
        ]
        work = self._assignment
        if not any(means) or work is None:
            return
        with self._changed:
            compared = SiteCompared(
                run=work.run_id,
                round=work.round,
                version=work.version.number,
                num_examples=counts[m.EVAL_EXAMPLES],
                global_model=means[0],
                personal_model=means[1],
            )
            self._change(replace(self._record, compared=compared))

    def _assigned(self, work: m.Assignment) -> None:
        with self._changed:
            self._assignment = work
            bundle, publisher = work.bundle.manifest.sha256, work.bundle.public_key
            sent = replace(self._record.sent.get(work.run_id, Sent()), bundle=bundle, publisher=publisher)
            totals = {**self._record.sent, work.run_id: sent}
            newest = sorted(totals, key=lambda run: (run == work.run_id, totals[run].last_at))[-MAX_SENT_RUNS:]
            self._change(
                replace(
                    self._record,
                    sent={run: totals[run] for run in totals if run in newest},
                    leaving=leaving(self._record.place.data, work),
                    work=SiteWork(
                        run=work.run_id,
                        round=work.round,
                        version=work.version.number,
                        bundle=bundle,
                        since=self._wall(),
                    ),
                )
            )

    def _add(self, num_bytes: int = 0, num_rounds: int = 0) -> None:
        with self._changed:
            if self._assignment is None:
                return
            run = self._assignment.run_id
            sent = self._record.sent[run]
            after = replace(
                sent,
                num_bytes=sent.num_bytes + num_bytes,
                num_rounds=sent.num_rounds + num_rounds,
                last_at=self._wall(),
            )
            self._change(replace(self._record, sent={**self._record.sent, run: after}))

    def _link(self, *, is_connected: bool, reason: str = "", code: str = "") -> None:
        with self._changed:
            link = self._record.link
            since = link.since if link.is_connected == is_connected else self._wall()
            after = SiteLink(is_connected=is_connected, since=since, reason=reason[:MAX_TEXT_CHARS], code=code)
            connected_at = since if is_connected else self._record.connected_at
            self._change(replace(self._record, link=after, connected_at=connected_at))

    def _trouble(self, action: str, code: str, text: str) -> None:
        with self._changed:
            errors, text = self._record.errors, text[:MAX_TEXT_CHARS]
            trouble = PastError(at=self._wall(), action=action, code=code, text=text)
            if errors and (errors[-1].action, errors[-1].code, errors[-1].text) == (action, code, text):
                # The same error again and again must not push out the others.
                trouble, errors = replace(trouble, times=errors[-1].times + 1), errors[:-1]
            self._change(replace(self._record, errors=(*errors, trouble)[-MAX_ERRORS:]))

    def _change(self, record: SiteRecord) -> None:
        if record != self._record:
            self._record = record
            self._is_dirty = True
            self._changed.notify()

    def _run(self) -> None:
        while self._wait():
            self._read_progress()
            if self._is_dirty:
                self._write()
            # The next changes are written together.
            with self._changed:
                if not self._is_over:
                    self._changed.wait_for(lambda: self._is_over, WRITE_S)

    def _wait(self) -> bool:
        """Wait until there is something to write. Return False at the end."""
        with self._changed:
            trains = self._record.phase == e.SessionPhase.TRAINING.value
            self._changed.wait_for(lambda: self._is_dirty or self._is_over, PROGRESS_S if trains else None)
            return not self._is_over

    def _read_progress(self) -> None:
        assignment = self._assignment
        if assignment is None or self._record.phase != e.SessionPhase.TRAINING.value:
            return
        now = self._progress(assignment.assignment_id)
        with self._changed:
            work = replace(self._record.work, step=now.step, num_steps=now.num_steps)
            work = replace(work, epoch=now.epoch, num_epochs=now.num_epochs)
            self._change(replace(self._record, work=work))

    def _write(self) -> None:
        with self._changed:
            self._is_dirty = False
            text = to_json(replace(self._record, written_at=self._wall()))
        draft = self._path.with_name(f"{RECORD_FILE}.new")
        try:
            # Without a sync: after a loss of power the file may be an old one or damaged, which readers accept.
            draft.unlink(missing_ok=True)
            draft.touch(mode=0o600)
            draft.write_text(text, "utf-8")
            draft.replace(self._path)
        except OSError as exc:
            if not self._has_failed:
                LOG.warning("%s: cannot be written (%s); fanin status shows an old state", self._path, exc.strerror)
            self._has_failed = True
        else:
            self._has_failed = False


def _text(error: BaseException) -> str:
    return f"{error}"[:MAX_TEXT_CHARS] or type(error).__name__
