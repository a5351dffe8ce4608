"""The page of ``fanin serve``, composed: its application on its port."""

import time
from dataclasses import dataclass
from functools import partial

from fanin.commands.console.terminal import CA_FILE, DEVICE_TOKEN
from fanin.server.access.limits import Limits
from fanin.server.addresses import DeviceFiles, join_command
from fanin.server.administration.audit import AuditLog
from fanin.server.administration.devices import Devices
from fanin.server.care.backup import last_backup
from fanin.server.care.certificates import Certificates
from fanin.server.health import Readiness
from fanin.server.service import Services
from fanin.server.settings import Settings
from fanin.server.storage.stores import CoordinatorState
from fanin.server.telemetry.exposition import Exposition, MetricSources
from fanin.server.web.app import PageParts, build_app, metrics_route
from fanin.server.web.guard import Entrance
from fanin.server.web.listener import PageServer, open_listener, tls_context
from fanin.server.web.overview import Overview
from fanin.server.web.sessions import Sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class Care:
    """What the coordinator knows of its own condition.

    Attributes:
        certificates: Its certificate.
        readiness: Whether it can serve.
    """

    certificates: Certificates
    readiness: Readiness


def device_files(settings: Settings) -> DeviceFiles:
    """Return the files that a device needs of the folder of a coordinator."""
    authority = None if settings.own_files else settings.state / CA_FILE
    return DeviceFiles(token=settings.state / DEVICE_TOKEN, authority=authority)


def open_page(
    settings: Settings, services: Services, state: CoordinatorState, limits: Limits, care: Care
) -> PageServer | None:
    """Return the server of the page, whose port is bound; None without a page. Raises Conflict if the port is taken."""
    if not settings.has_page:
        return None
    listener = open_listener(settings.web_address)
    is_local = settings.is_local_page
    entrance = Entrance(
        sessions=Sessions(settings.state / "tokens", time.time),
        bearer=lambda sha256: services.registry.bearer_of(sha256)[0],
        hosts=frozenset(name.lower() for name in settings.all_names),
        is_local=is_local,
        is_secure=not is_local,
        sources=services.sources,
    )
    overview = Overview(
        settings=settings,
        limits=limits,
        certificates=care.certificates,
        disk=services.disk,
        ledger=state.stores.ledger,
        audit=state.stores.audit,
        num_devices=lambda: state.devices.num_devices,
        sources=services.sources,
        url=f"{'http' if is_local else 'https'}://{listener.address}/",
    )
    sources = MetricSources(
        runs=services.runs,
        state=state,
        coordinator=services.coordinator,
        limits=limits,
        readiness=care.readiness,
        instruments=services.instruments,
        disk=services.disk,
        certificates=care.certificates,
        last_backup=partial(last_backup, settings.state),
    )
    devices = Devices(
        stores=services.stores, registry=services.registry, coordinator=services.coordinator, runs=services.runs
    )
    parts = PageParts(
        runs=services.runs,
        history=state.history,
        stream=services.stream,
        audit=AuditLog(state.stores),
        devices=devices,
        join_line=join_command(settings.address, settings.all_names, device_files(settings)),
        overview=overview,
        entrance=entrance,
        readiness=care.readiness,
        files=state.files,
        calls=services.registry.calls,
    )
    app = build_app(parts)
    app.routes.append(metrics_route(Exposition(sources).render))
    context = None if is_local else tls_context(lambda: care.certificates.current, settings.state)
    return PageServer(app, listener, context, services.stream.close)
