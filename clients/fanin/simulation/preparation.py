"""The parts that the simulations of all seeds share: the subject, and its Bundle."""

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.simulation.arguments import check_arguments, check_flower_settings, check_settings
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.devices.attackers import check_flower_attackers
from fanin.simulation.engines.exporting import AppBundle, app_bundle
from fanin.simulation.flower import FlowerSubject, is_flower_app
from fanin.simulation.progress import SimulationProgress
from fanin.simulation.settings import SimulationSettings
from fanin.simulation.studies.records import BUNDLE, RecordFolder, Subject, subject_of
from fanin.simulation.workers import PlacedBundle

if TYPE_CHECKING:
    from fanin.edge.export.app.app import App
    from fanin.edge.export.module.prepare import StateDict


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSubject:
    """An App and the examples of its clients."""

    app: "App"
    clients: Partition

    @property
    def name(self) -> str:
        """The name of the App."""
        return self.app.name

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.clients)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """The parts that the simulations of all seeds share: the subject with its Bundle, and the folder of the Bundle."""

    subject: ModuleSubject | FlowerSubject
    bundle: Bundle
    graphs: AppBundle | None = None
    key: SigningKey
    folder: Path
    progress: SimulationProgress
    record: RecordFolder | None = None

    @property
    def placed(self) -> PlacedBundle:
        """The Bundle, for workers."""
        return PlacedBundle.read(self.bundle, self.folder / BUNDLE)


def subject_for(app: object, clients: Partition | int, settings: SimulationSettings) -> ModuleSubject | FlowerSubject:
    """Return the subject of these arguments. Raises InvalidInput."""
    if is_flower_app(app):
        check_settings(settings)
        check_flower_settings(settings)
        subject = FlowerSubject.of(app, clients)
        check_flower_attackers(settings.devices.attackers, subject.num_clients)
        return subject
    checked = check_arguments(app, clients, settings)
    if settings.devices.attackers is not None:
        checked["clients"] = settings.devices.attackers.poison(checked["clients"])
    return ModuleSubject(**checked)


def prepare(subject: ModuleSubject | FlowerSubject, settings: SimulationSettings, folder: Path) -> Preparation:
    """Write the Bundle, or open that of the record. Raises the errors of ``simulate``."""
    progress, key = SimulationProgress(quiet=settings.quiet), SigningKey(hashlib.sha256(b"fanin simulation").digest())
    if isinstance(subject, FlowerSubject):
        bundle = subject.bundle(settings.initial, settings.keep, folder / BUNDLE, key)
        return Preparation(subject=subject, bundle=bundle, key=key, folder=folder, progress=progress)
    from fanin.edge.export.module.prepare import with_state

    app = subject.app
    if settings.initial is not None:
        app = with_state(app, cast("StateDict", settings.initial))
    record = recorded = None
    if settings.resume is not None:
        options: Subject = {"validation_fraction": settings.validation_fraction, "engine": settings.engine}
        record = RecordFolder(settings.resume, {**options, **subject_of(app, subject.clients)})
        folder = record.folder
        recorded = record.bundle(key.public)
    with progress.exporting(app.name) if recorded is None else nullcontext():
        graphs = app_bundle(app, folder / BUNDLE, key, settings.engine, recorded)
    if graphs.note:
        progress.show(f"note: {graphs.note}")
    subject = replace(subject, app=app)
    return Preparation(
        subject=subject, bundle=graphs.bundle, graphs=graphs, key=key, folder=folder, progress=progress, record=record
    )
