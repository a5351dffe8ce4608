"""The application of the page: its routes, its errors, and the guard before them."""

import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from fanin.protos.errors import (
    Conflict,
    FaninError,
    InvalidInput,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    public,
)
from fanin.server.access.limited_log import LimitedLog
from fanin.server.access.open_calls import OpenCalls
from fanin.server.administration.audit import AuditLog
from fanin.server.administration.devices import Devices
from fanin.server.health import Readiness
from fanin.server.runs.catalog import Runs
from fanin.server.runs.stream import LiveStream
from fanin.server.storage.protocols.history import HistoryStore
from fanin.server.storage.stores import Files
from fanin.server.web.actions import HOME, Actions
from fanin.server.web.devices import DeviceViews
from fanin.server.web.guard import METRICS_PATH, Entrance, Guard, visitor_of
from fanin.server.web.overview import Overview
from fanin.server.web.rendering import STATIC, Turns, page
from fanin.server.web.stream import OpenPages, StreamResponse
from fanin.server.web.views import RunViews

LOG = logging.getLogger("fanin.server.web.app")
_STATUSES = (
    (NotFound, 404),
    (Conflict, 409),
    (InvalidInput, 400),
    (Unauthenticated, 401),
    (PermissionDenied, 403),
    (Unavailable, 503),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageParts:
    """What the page shows and commands.

    Attributes:
        runs: The Runs.
        stream: Their live stream.
        history: The record in pages.
        audit: The log of commands.
        devices: The devices.
        join_line: The command with which a device joins.
        overview: What the page of settings shows.
        entrance: Who may read and command.
        readiness: Whether the coordinator can serve.
        files: The lane of files.
        calls: The calls under way, which a revocation of their token ends: here, open pages.
    """

    runs: Runs
    stream: LiveStream
    history: HistoryStore
    audit: AuditLog
    devices: Devices
    join_line: str
    overview: Overview
    entrance: Entrance
    readiness: Readiness
    files: Files
    calls: OpenCalls


def build_app(parts: PageParts) -> Starlette:
    """Return the application of the page."""
    pages = OpenPages(parts.stream, parts.history)
    views = RunViews(runs=parts.runs, history=parts.history, overview=parts.overview)
    devices = DeviceViews(desk=parts.devices, join_line=parts.join_line)
    actions = Actions(runs=parts.runs, audit=parts.audit, entrance=parts.entrance, files=parts.files)

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def readyz(request: Request) -> Response:
        problem = parts.readiness.problem
        texts = (problem or "ready", *parts.overview.alarms())
        return PlainTextResponse("".join(f"{text}\n" for text in texts), status_code=503 if problem else 200)

    async def home(request: Request) -> Response:
        return RedirectResponse(HOME, status_code=303)

    async def stream(request: Request) -> Response | StreamResponse:
        last_id = request.headers.get("last-event-id", "") or request.query_params.get("after", "")
        hold = partial(parts.calls.hold, visitor_of(request).principal, math.inf)
        return pages.open(last_id, partial(parts.entrance.may_read, request), hold)

    run, turns, sign_in = "/runs/{run_id}", Turns(), Turns(max_pages=1)
    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/", home),
            Route("/login", sign_in.of(actions.login_form), methods=["GET"]),
            Route("/login", actions.login, methods=["POST"]),
            Route("/logout", actions.logout, methods=["POST"]),
            Route("/stream", stream),
            Route(HOME, turns.of(views.runs_list)),
            Route(run, turns.of(views.run)),
            Route(f"{run}/live", turns.of(views.live)),
            Route(f"{run}/rounds/{{number}}", turns.of(views.round)),
            Route(f"{run}/versions", turns.of(views.versions)),
            Route(f"{run}/versions/{{number}}/parameters", views.parameters),
            Route(f"{run}/plan", turns.of(views.plan)),
            Route(f"{run}/events", turns.of(views.events)),
            Route(f"{run}/commands", actions.command, methods=["POST"]),
            Route("/devices", turns.of(devices.devices)),
            Route("/devices/{device_id}", turns.of(devices.device)),
            Route("/devices/{device_id}/changes", devices.change, methods=["POST"]),
            Route("/activity", turns.of(views.activity)),
            Route("/settings", turns.of(views.settings)),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(Guard, entrance=parts.entrance)],
        exception_handlers=error_handlers(),
    )


def error_handlers() -> dict[object, Callable[[Request, Exception], Awaitable[Response]]]:
    """Return the handler of each kind of error."""
    failures = LimitedLog(LOG, max_lines=1, what="failed requests")

    async def refused(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, FaninError)
        text, code = public(exc)
        status = next((status for kind, status in _STATUSES if isinstance(exc, kind)), 500)
        return error_page(request, status, text, code)

    async def absent(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        return error_page(request, exc.status_code, exc.detail, "")

    async def failed(request: Request, exc: Exception) -> Response:
        failures.exception("page: unexpected error")
        return PlainTextResponse("internal error; the coordinator's log has the details\n", status_code=500)

    return {FaninError: refused, HTTPException: absent, Exception: failed}


def error_page(request: Request, status: int, text: str, code: str) -> Response:
    """Return the page of an error."""
    return page(request, "error.html", {"status": status, "text": text, "code": code}, status)


def metrics_route(render: Callable[[str], Awaitable[tuple[bytes, str]]]) -> Route:
    """Return the route of the metrics for Prometheus.

    Args:
        render: Returns the metrics and their content type. Its argument is the header ``Accept``.
    """

    turns = Turns(max_pages=1)

    async def metrics(request: Request) -> Response:
        body, content_type = await render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return Route(METRICS_PATH, turns.of(metrics))
