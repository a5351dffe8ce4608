"""A coordinator in this process, composed of its parts, from its start to SIGTERM."""

import asyncio
import logging
import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from fanin.commands.console.terminal import (
    ADDRESS_FILE,
    CA_FILE,
    DEVICE_TOKEN,
    OPERATOR_TOKEN,
)
from fanin.commands.serve.page import Care, device_files, open_page
from fanin.edge.spans import SpanSink
from fanin.protos.messages import Role
from fanin.server.access.authority import ServerIdentity
from fanin.server.access.connections import Connections, enough_descriptors, raise_descriptor_limit, share_descriptors
from fanin.server.access.limited_log import limit_loop_errors
from fanin.server.access.limits import Limits
from fanin.server.access.registry import Registry
from fanin.server.addresses import announcement, page_announcement
from fanin.server.administration.audit import AuditLog
from fanin.server.administration.token_files import ensure_token
from fanin.server.care.certificates import Certificates, local_certificates, own_certificates, utc_now
from fanin.server.care.forecast import DiskWatch, published_rounds
from fanin.server.care.notify import ServiceManager
from fanin.server.care.pruner import Pruner
from fanin.server.evaluation.datasets import DataSets
from fanin.server.evaluation.evaluator import HeldOutEvaluator
from fanin.server.evaluation.process import EvaluatorProcess
from fanin.server.fleet.coordinator import Coordinator
from fanin.server.folder import BLOBS_FOLDER, check_authority, exposed_secrets, hold_folder, open_state
from fanin.server.health import Readiness, watch_storage
from fanin.server.rounds.worker import Observer
from fanin.server.runs.catalog import Runs
from fanin.server.runs.recorded_setup import Parts
from fanin.server.runs.stream import LiveStream
from fanin.server.service import Services, bind_server, check_free
from fanin.server.settings import Settings
from fanin.server.storage.collector import Collector
from fanin.server.storage.disk import Durability, write_file
from fanin.server.storage.lanes import Lane, ThreadLane
from fanin.server.storage.stores import CoordinatorState
from fanin.server.strategies.process import Strategies
from fanin.server.telemetry.instruments import Instruments
from fanin.server.web.listener import PageServer

LOG = logging.getLogger("fanin.commands.serve")
DISK_THREADS = 4
DRAIN_S = 5.0
EVALUATOR = (sys.executable, "-m", "fanin.commands.evaluator")
OpenStores = Callable[[Path, Durability, tuple[Lane, Lane], Callable[[], float]], CoordinatorState]


async def run_coordinator(settings: Settings, observer: Observer, composition: "Composition | None" = None) -> None:
    """Serve until SIGTERM or SIGINT, then wait for the calls in progress.

    Args:
        settings: The settings.
        observer: Sees each effect of each Run.
        composition: Its exchangeable parts; default: those of ``fanin serve``, and no traces.

    Raises:
        Conflict: The folder or the port is in use. No Run has changed.
    """
    # The database holds the keys that sign Versions; an existing folder may be readable by everyone.
    os.umask(0o077)
    check_free(settings.listen)
    with hold_folder(settings.state):
        lanes = Lanes(store=ThreadLane(1, "store"), disk=ThreadLane(DISK_THREADS, "disk"))
        try:
            await _serve(settings, observer, lanes, composition or Composition())
        finally:
            lanes.close()


async def _serve(settings: Settings, observer: Observer, lanes: "Lanes", composition: "Composition") -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    limit_loop_errors(loop)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # Before the database opens: a folder with unusable certificates is rejected with its database unchanged.
    certificates = _certificates(settings)
    # The end of a terminal session must not end a coordinator.
    loop.add_signal_handler(signal.SIGHUP, certificates.request)
    state = composition.open_stores(settings.state, settings.durability, (lanes.store, lanes.disk), time.time)
    registry = Registry(state.devices, time.time)
    ensure_token(settings.state / DEVICE_TOKEN, Role.DEVICE, registry)
    ensure_token(settings.state / OPERATOR_TOKEN, Role.ADMIN, registry)
    _warn_of_exposure(settings.state)
    composed = _compose(settings, observer, state, registry, composition)
    services, data, evaluator = composed.services, composed.data, composed.evaluator
    coordinator, runs, pruner = services.coordinator, services.runs, services.pruner
    collector, audit = Collector(state.stores, state.files), AuditLog(state.stores)
    # Bind the port first: a coordinator that cannot serve must not drive Runs.
    bound = bind_server(services, lambda: certificates.current, settings.listen)
    readiness = Readiness()
    address = replace(settings.address, port=bound.port)
    care = Care(certificates=certificates, readiness=readiness)
    page = open_page(replace(settings, listen=str(address)), services, state, composed.limits, care)
    async with AsyncExitStack() as stack:
        # Each part stops, in the reverse order, also after an error of another one such as a full disk. Otherwise a
        # running driver would end with a traceback.
        stack.push_async_callback(audit.stop)
        stack.push_async_callback(coordinator.activity.stop)
        stack.push_async_callback(data.stop)
        stack.push_async_callback(runs.stop)
        if page is not None:
            page.start()
            stack.push_async_callback(page.stop)
        stack.push_async_callback(bound.drain, DRAIN_S)
        stack.push_async_callback(coordinator.stop)
        stack.push_async_callback(evaluator.stop)
        stack.push_async_callback(collector.stop)
        stack.push_async_callback(pruner.stop)
        stack.callback(services.stream.close)
        await audit.start()
        coordinator.activity.start()
        await runs.start()
        services.instruments.resume(runs)
        evaluator.start()
        collector.start()
        pruner.start()
        await bound.start()
        health = asyncio.create_task(watch_storage(state.check, bound.report, readiness), name="health")
        stack.callback(health.cancel)
        manager = ServiceManager()
        for work in (certificates.watch(), services.disk.watch(), manager.keep_alive()):
            stack.callback(asyncio.create_task(work).cancel)
        _announce(settings, bound.port, certificates.current, page)
        manager.tell("READY=1", f"STATUS=serving on port {bound.port}")
        await stop.wait()
        manager.tell("STOPPING=1")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Composed:
    """The parts of a coordinator that is not started yet."""

    services: Services
    data: DataSets
    evaluator: HeldOutEvaluator
    limits: Limits


def _compose(
    settings: Settings, observer: Observer, state: CoordinatorState, registry: Registry, composition: "Composition"
) -> _Composed:
    data = DataSets(blobs=settings.state / BLOBS_FOLDER, paths=settings.data, command=composition.evaluator)
    place = "the folder in which the coordinator was started"
    parts = Parts(data=data, strategies=Strategies(Path.cwd(), settings.strategies, place=place))
    instruments = Instruments(time.time, composition.spans)
    runs = Runs(state.stores, state.files, instruments.observing(observer), parts)
    instruments.follow(runs)
    evaluator = HeldOutEvaluator(runs, state.stores, data, EvaluatorProcess(composition.evaluator))
    pruner = Pruner(state.stores, state.files, settings.retention)
    limits, connections = _share_descriptors(Limits())
    coordinator = Coordinator(runs, state.stores, state.files, limits, random.Random())
    coordinator.observe(instruments.fleet)
    services = Services(
        coordinator=coordinator,
        runs=runs,
        stream=LiveStream(runs, state.history),
        registry=registry,
        stores=state.stores,
        pruner=pruner,
        disk=DiskWatch(settings.state, partial(published_rounds, state.stores), time.time),
        connections=connections,
        instruments=instruments,
    )
    return _Composed(services=services, data=data, evaluator=evaluator, limits=limits)


def _certificates(settings: Settings) -> Certificates:
    """Return the certificate to serve with: that of the operator, or one of the local authority."""
    own = settings.own_files
    if own is not None:
        return own_certificates(own, utc_now)
    check_authority(settings.state)
    return local_certificates(settings.state / "tls", settings.all_names, utc_now)


def _warn_of_exposure(folder: Path) -> None:
    if exposed := exposed_secrets(folder):
        LOG.warning(
            "%s: other users of this machine can read or change keys and tokens; run: chmod go= %s",
            *(folder, shlex.join(map(str, exposed))),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """The exchangeable parts of a coordinator.

    Attributes:
        open_stores: Opens the stores, as ``fanin.server.folder.open_state`` does.
        evaluator: The program that evaluates Versions, a call of ``fanin.commands.evaluator.main``. It reads Chunks, so
            other ``Blobs`` need another one.
        spans: Receives the spans of traces; None for no traces.
    """

    open_stores: OpenStores = open_state
    evaluator: Sequence[str] = EVALUATOR
    spans: SpanSink | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """The threads of a coordinator: one for the store, some for the disk."""

    store: ThreadLane
    disk: ThreadLane

    def close(self) -> None:
        """Wait for the work in progress, then end the threads."""
        self.store.close()
        self.disk.close()


def _share_descriptors(limits: Limits) -> tuple[Limits, Connections]:
    """Raise this process's descriptor limit, and lower the limits of the coordinator to it. Raises Conflict."""
    enough = enough_descriptors(limits)
    descriptors = raise_descriptor_limit(enough)
    lowered, connections = share_descriptors(descriptors, limits)
    if lowered != limits:
        LOG.warning(
            "descriptors: this process may open %d, expected %d; at most %d devices wait at a time instead of %d, "
            "and %d upload instead of %d; raise the hard limit (ulimit -Hn, LimitNOFILE= in systemd)",
            *(descriptors, enough),
            *(lowered.max_parked, limits.max_parked),
            *(lowered.max_uploads, limits.max_uploads),
        )
    return lowered, connections


def _announce(settings: Settings, port: int, identity: ServerIdentity, page: PageServer | None) -> None:
    address = replace(settings.address, port=port)
    # The file is for commands on this machine, which cannot connect to 0.0.0.0.
    write_file(settings.state / ADDRESS_FILE, f"{address.loopback}\n".encode())
    page_lines = ""
    if page is not None:
        listen, page_port = settings.web_address, urlsplit(page.url).port
        listen = listen and replace(listen, port=page_port or listen.port)
        page_lines = page_announcement(page.url, listen, settings.all_names)
    files = replace(device_files(settings), fingerprint=identity.fingerprint)
    authority = "that of --tls-cert" if settings.own_files else settings.state / CA_FILE
    sys.stdout.write(
        f"serving on {address}\n"
        f"  authority for clients  {authority}\n"
        f"  token for devices      {settings.state / DEVICE_TOKEN}\n"
        f"  token for operators    {settings.state / OPERATOR_TOKEN}\n"
        f"{announcement(address, settings.all_names, files)}"
        f"{page_lines}"
    )
    sys.stdout.flush()
