"""Observers that a config names: ``[watch] observers = ["package.module:factory", "path/to/file.py:factory"]``.

Every rank loads its own observers. The factory receives the rank's place, and returns an observer, or None if this rank
needs none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path

from fanin.datacenter.observers.observer import Guest, TrainingObserver
from fanin.protos.errors import FaninError, InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A rank of a job, by default the one of a job without a folder.

    Attributes:
        rank: Number of the rank, from 0.
        num_ranks: Ranks of the job.
        folder: The job's folder for measurements, shared by all ranks; None if the job has none.
    """

    rank: int = 0
    num_ranks: int = 1
    folder: Path | None = None


def load_observers(names: Sequence[str], place: RankPlace) -> list[Guest]:
    """Return the observers of a config on this rank, in the order of the config.

    Raises:
        InvalidInput: An observer cannot be imported, its factory raises an error, or the result is no observer.
    """
    guests = []
    for name in names:
        observer = _create(name, place)
        if observer is not None:
            guests.append(guest_of(repr(name), observer))
    return guests


def guest_of(name: str, observer: object) -> Guest:
    """Return an observer as a guest. Raises InvalidInput unless it has a method ``on`` that accepts one event."""
    if not isinstance(observer, TrainingObserver) or not callable(observer.on):
        raise InvalidInput(
            f"observer {name}: got {type(observer).__name__}, expected an object with a method on(event)",
            code="FN-1360",
        )
    try:
        signature(observer.on).bind(None)
    except (TypeError, ValueError) as exc:
        raise InvalidInput(
            f"observer {name}: got on{_arguments(observer)}, expected on(event) ({exc})", code="FN-1360"
        ) from exc
    return Guest(name, observer)


def _create(name: str, place: RankPlace) -> object:
    """Return the result of the factory with this name."""
    # Imported late: it imports torch.
    from fanin.edge.export.app.loading import load_object

    try:
        factory = load_object("observer", name)
        if not callable(factory):
            raise InvalidInput(
                f"observer {name!r}: got {type(factory).__name__}, expected a function of one RankPlace", code="FN-1360"
            )
        return factory(place)
    except FaninError as exc:
        raise InvalidInput(str(exc), code=exc.code) from exc
    except (Exception, SystemExit) as exc:  # Any error: the code is not fanin's. It may even call sys.exit.
        raise InvalidInput(
            f"observer {name!r}: its factory raised {type(exc).__name__}: {exc}; correct the factory. It is called "
            "with one RankPlace",
            code="FN-1362",
        ) from exc


def _arguments(observer: TrainingObserver) -> str:
    try:
        return str(signature(observer.on))
    except (TypeError, ValueError):
        return "(...)"
