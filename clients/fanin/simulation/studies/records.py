"""The record of a simulation, from which it resumes after a stop with bit-identical results.

    FOLDER/simulation.json     the format, and the values or digests of what must not change
    FOLDER/bundle/             the exported App
    FOLDER/trainings/KEY.npz   the result of each training that has ended

A simulation is a function of its arguments, so a resumed one plays the same Run from its beginning. The results of the
completed trainings are read from the record, and only the others are computed. Each file is complete when it has its
name, so the simulation may be killed at any moment.

A training is a function of the client and its work, the Version, the client's personal parameters, the Assignment and
the inputs of its stages. ``KEY`` is their digest. A Run with more Rounds, other devices or other work can therefore use
the same record.
"""

import hashlib
import json
import zipfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.edge.bundles.bundle import Bundle, open_folder
from fanin.edge.files import disk_problem, held, replace_file, without_foreign
from fanin.protos import messages as m
from fanin.protos.chunks import short
from fanin.protos.errors import InvalidBundle, InvalidInput
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.devices.work import ClientWork
from fanin.simulation.studies.digests import digest_of
from fanin.simulation.workers import PendingTraining, RecordFailed, Trainings

if TYPE_CHECKING:
    from fanin.edge.export.app.app import App

RECORD_FORMAT: Final = 2
BUNDLE: Final = "bundle"
LOCK: Final = ".lock"
SHA256: Final = "SHA-256 "
"""Begin of a fact that is the digest of a value."""
Fact = str | int | float | None
Subject = Mapping[str, Fact]
"""What must not change: values, and digests of larger ones, by name."""


def hold_record(folder: Path | str | None) -> AbstractContextManager[None]:
    """Reserve the folder of a record for one simulation: two of them would replace each other's files.

    Without a folder nothing is reserved.

    Raises:
        Conflict: Another simulation uses the folder.
    """
    if folder is None:
        return nullcontext()
    return held(Path(folder), "wait for that simulation to end, or give another folder to resume", lock=LOCK)


class RecordFolder:
    """The folder of a record.

    Args:
        folder: A new folder, or one with a record.
        subject: The training options, and the App with its code and the examples (``subject_of``).

    Raises:
        InvalidInput: The folder has other files, or the record of another simulation. The message names each
            difference.
    """

    def __init__(self, folder: Path | str, subject: Subject) -> None:
        self.folder = Path(folder)
        about = self.folder / "simulation.json"
        if not about.exists():
            if self.folder.exists() and (not self.folder.is_dir() or without_foreign(self.folder.iterdir())):
                raise InvalidInput(
                    f"resume: {folder} has other files, expected a new folder or one with a record", code="FN-1192"
                )
            (self.folder / "trainings").mkdir(parents=True, exist_ok=True)
            replace_file(about, json.dumps({"format": RECORD_FORMAT, "subject": subject}).encode())
        try:
            record = json.loads(about.read_text(encoding="utf-8"))
            number, before = record["format"], record["subject"]
        except (ValueError, TypeError, KeyError) as exc:
            raise InvalidInput(f"resume: {about} is damaged ({exc}); use a new folder", code="FN-1192") from exc
        if number != RECORD_FORMAT:
            raise InvalidInput(
                f"resume: {folder} has format {number}, expected {RECORD_FORMAT}; use a new folder", code="FN-1192"
            )
        if before != subject:
            raise InvalidInput(
                f"resume: {folder} has the record of another simulation: {_differences(before, subject)}; use a new "
                "folder, or the App, clients and settings of the record",
                code="FN-1194",
            )

    def bundle(self, publisher: str) -> Bundle | None:
        """Return the exported App; None if the simulation stopped before it was complete."""
        path = self.folder / BUNDLE
        if not path.is_dir() or not without_foreign(path.iterdir()):
            return None
        try:
            return open_folder(path, trusted=(publisher,))
        except InvalidBundle as exc:
            raise InvalidInput(f"resume: {path} is damaged ({exc}); use a new folder", code="FN-1192") from exc


class RecordedTrainings:
    """Trainings whose results are recorded. A recorded training does not run again.

    Args:
        trainings: The trainings.
        folder: The folder of the record.
        work: The work of the clients. None: all steps.
    """

    def __init__(self, trainings: Trainings, folder: Path, work: ClientWork | None = None) -> None:
        self._trainings = trainings
        self._folder = folder / "trainings"
        self._work = digest_of(work or ClientWork())

    def begin(self, client: int, model: OpenedModel, assignment: m.Assignment, due_s: float = 0.0) -> PendingTraining:
        """See Trainings."""
        path = self._folder / f"{_key(client, self._work, model, assignment)}.npz"
        change = _read(path)
        if change is not None:
            return lambda: change
        pending = self._trainings.begin(client, model, assignment, due_s)

        def finish() -> Change:
            result = pending()
            try:
                _store(path, result)
            except OSError as exc:
                raise RecordFailed(
                    f"resume: {path.parent} cannot be written: {disk_problem(exc)}; then resume"
                ) from exc
            return result

        return finish


def recorded(trainings: Trainings, record: RecordFolder | None, work: ClientWork | None) -> Trainings:
    """Return trainings whose results are recorded, if there is a record."""
    return trainings if record is None else RecordedTrainings(trainings, record.folder, work)


def subject_of(app: "App", clients: Partition) -> dict[str, Fact]:
    """Return the facts of an App with its code, and of the examples of each client: values, or digests of others."""
    indices = np.concatenate(clients.indices)
    parts: dict[str, object] = {f"app.{each.name}": getattr(app, each.name) for each in fields(app) if each.compare}
    parts |= {"examples": clients.examples, "num_clients": len(clients), "partition": (indices, list(clients.sizes))}
    return {name: value if isinstance(value, Fact) else f"{SHA256}{digest_of(value)}" for name, value in parts.items()}


def _differences(before: Subject, now: Subject) -> str:
    """Return the facts that differ between the subject of a record and another one, in words."""
    names = [name for name in now if before.get(name) != now[name]]
    return ", ".join(f"{name} is {_shown(now[name])} and was {_shown(before.get(name))}" for name in names)


def _shown(fact: Fact) -> str:
    is_digest = isinstance(fact, str) and fact.startswith(SHA256)
    return f"{SHA256}{short(str(fact).removeprefix(SHA256))}" if is_digest else repr(fact)


def _key(client: int, work: str, model: OpenedModel, assignment: m.Assignment) -> str:
    """Return the digest of everything that a training depends on, except for the subject."""
    # A trainer counts the statistics that the Plan declares, and a stage may replace the training by an evaluation.
    names = [[each.name for each in several] for several in (assignment.statistics, assignment.stages)]
    values = (client, work, assignment.round, assignment.training, assignment.range_examples, names)
    digest = hashlib.sha256(repr(values).encode())
    digest.update(model.parameters.tobytes())
    if model.local is not None:
        digest.update(b"local" + model.local.tobytes())
    if model.ranges is not None:
        digest.update(b"ranges" + model.ranges.tobytes())
    for name, array in sorted(model.inputs.items()):
        digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()


def _store(path: Path, change: Change) -> None:
    draft = path.with_suffix(".part")
    with draft.open("wb") as file:
        about = json.dumps(
            {
                "counts": {name: int(count) for name, count in change.counts.items()},
                "num_steps": change.num_steps,
                "planned_steps": change.planned_steps,
                "ranges": {"cells": change.ranges.cells, "counts": change.ranges.counts},
            }
        )
        local = np.empty(0, np.float32) if change.local is None else change.local
        np.savez(file, values=change.values, local=local, about=np.frombuffer(about.encode(), np.uint8))
    draft.replace(path)


def _read(path: Path) -> Change | None:
    """Return a recorded result; None if there is none, or if its file is damaged."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            values, about = archive["values"], json.loads(archive["about"].tobytes())
            local = archive["local"] if archive["local"].size else None
        steps = {name: about[name] for name in ("num_steps", "planned_steps")}
        ranges = m.RangeCounts(**{name: tuple(numbers) for name, numbers in about["ranges"].items()})
        return Change(values=values, counts=about["counts"], local=local, ranges=ranges, **steps)
    except (OSError, EOFError, ValueError, LookupError, TypeError, InvalidInput, zipfile.BadZipFile):
        # The files are not synced, so a power failure may leave them empty or partly written.
        return None
