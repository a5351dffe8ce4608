"""The checks of every request of the page, in this order:

1. The Host header has a name of this coordinator. A foreign name that resolves to this machine (DNS rebinding) is
   refused before anything is read.
2. A POST comes from a page of this host: its Origin is the Host. It has at most ``MAX_FORM_BYTES``.
3. A POST carries the form token of its session.
4. The token of the session permits the request: reading, or a command.

Every response forbids framing, scripts and styles of others, and caching of what it shows.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from hmac import compare_digest
from types import MappingProxyType
from typing import Final
from urllib.parse import parse_qsl, quote, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fanin.protos.calls import BEARER
from fanin.protos.errors import FaninError, InvalidInput, PermissionDenied, Unauthenticated, Unavailable, coded
from fanin.protos.messages import Principal, PrincipalKind
from fanin.server.access.limited_log import LimitedLog
from fanin.server.access.rates import Sources, network_of, wrong_too_often
from fanin.server.access.registry import token_sha256
from fanin.server.web.sessions import COOKIE, SESSION_S, PageSession, Sessions

LOG = logging.getLogger("fanin.server.web.guard")
MAX_FORM_BYTES: Final = 16 << 10
FORM_S: Final = 10.0
"""Seconds in which a form must arrive."""
MAX_REQUESTS: Final = 192
"""Requests at a time, fewer than connections: the others are for ``OPEN_PATHS``."""
MAX_SIGN_INS: Final = 16
"""Requests beyond them to sign in: an operator gets in while others read."""
FORM_TOKEN: Final = "form_token"
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
"""Paths without a check: programs of a load balancer call them by an address."""
PUBLIC_PATHS: Final = frozenset({"/login"})
METRICS_PATH: Final = "/metrics"
"""The path that programs read, which have a token and no session."""
PUBLIC_FOLDER: Final = "/static/"
POLICY: Final = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
HEADERS: Final = MappingProxyType(
    {
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "same-origin",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }
)
_ACTORS: Final = frozenset({PrincipalKind.OPERATOR, PrincipalKind.ADMIN})
_VISITOR: Final = "fanin.visitor"
_FORM: Final = "fanin.form"


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """The person before a browser.

    Attributes:
        principal: The bearer of the session's token; None without a session.
        form_token: The token for the forms of its pages.
    """

    principal: Principal | None
    form_token: str

    @property
    def can_act(self) -> bool:
        """Whether it may send commands."""
        return self.principal is not None and self.principal.kind in _ACTORS


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """What a request must fulfil.

    Attributes:
        sessions: Reads the cookies.
        bearer: Returns the principal of a token's digest. Raises Unauthenticated if the token is not valid now.
        hosts: The names of this coordinator, in lower case.
        is_local: Whether only this machine reaches the page. Then reading needs no session.
        is_secure: Whether the page is served over TLS.
        sources: The addresses that send wrong tokens.
    """

    sessions: Sessions
    bearer: Callable[[str], Principal]
    sources: Sources
    hosts: Collection[str]
    is_local: bool
    is_secure: bool

    def reader(self, request: Request) -> tuple[PageSession | None, Principal | None]:
        """Return the session of a request and its principal; None without one. Raises Unauthenticated for a token."""
        if token := _bearer_token(request):
            return None, self.bearer(token_sha256(token))
        session = self.sessions.read(request.cookies.get(COOKIE, ""))
        if session is None:
            return None, None
        try:
            return session, self.bearer(session.token_sha256)
        except Unauthenticated:
            # Its token was revoked or has expired. On a page for this machine alone, reading needs none.
            return None, None

    def check_reader(self, request: Request, principal: Principal | None) -> None:
        """Raise Unauthenticated unless a request may read."""
        path = request.url.path
        is_public = path in PUBLIC_PATHS or path.startswith(PUBLIC_FOLDER)
        # A proxy before the page lets others than this machine reach it.
        is_local = self.is_local and not {"forwarded", "x-forwarded-for"} & set(request.headers.keys())
        if principal is None and not is_public and not is_local:
            raise Unauthenticated("page: got no session, expected one of a viewer or operator; sign in", code="FN-1425")

    def count_wrong(self, request: Request, error: Unauthenticated) -> float:
        """Count a wrong token. Return the seconds until its address may send another, 0 for now."""
        return self.sources.count(address_of(request), error.code)

    def may_read(self, request: Request) -> bool:
        """Return whether a request that was admitted may still read: its token may have been revoked."""
        try:
            self.check_reader(request, self.reader(request)[1])
        except Unauthenticated:
            return False
        return True

    def cookie(self, token_sha256: str) -> str:
        """Return the Set-Cookie header of a new session."""
        secure = "; Secure" if self.is_secure else ""
        value = self.sessions.open(token_sha256)
        return f"{COOKIE}={value}; Max-Age={SESSION_S}; Path=/; HttpOnly; SameSite=Strict{secure}"


class Guard:
    """The application behind its checks."""

    def __init__(self, app: ASGIApp, entrance: Entrance) -> None:
        self._app = app
        self._entrance = entrance
        self._refused = LimitedLog(LOG)
        self._num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        if self._num_requests >= MAX_REQUESTS + (MAX_SIGN_INS if scope["path"] in PUBLIC_PATHS else 0):
            text = f"page: serves {MAX_REQUESTS} requests, expected fewer; load it again"
            await PlainTextResponse(f"{coded(Unavailable(text, code='FN-1505'))}\n", 503)(scope, receive, send)
            return
        self._num_requests += 1
        try:
            await self._serve(scope, receive, send)
        except ClientDisconnect:
            pass  # The browser left in the middle of a form.
        finally:
            self._num_requests -= 1

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        headers: dict[str, str] = {}
        try:
            self._check_host(request)
            form = await self._form(request)
            session, principal = self._entrance.reader(request)
            if session is not None and self._entrance.sessions.is_old(session):
                headers["set-cookie"] = self._entrance.cookie(session.token_sha256)
            token = self._entrance.sessions.form_token(session)
            if form is not None:
                _check_form(form, token)
            self._entrance.check_reader(request, principal)
        except FaninError as exc:
            self._refused.log(type(exc).__name__, f"page: {scope['method']}: {coded(exc)}"[:400])
            refusal = _refusal(request, exc)
            if isinstance(exc, Unauthenticated) and _bearer_token(request):
                refusal = _slowed(self._entrance.count_wrong(request, exc)) or refusal
            await _protected(refusal, scope, headers)(scope, receive, send)
            return
        scope[_VISITOR], scope[_FORM] = Visitor(principal=principal, form_token=token), form or {}
        await self._app(scope, receive, _protecting(send, scope, headers))

    def _check_host(self, request: Request) -> None:
        host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
        if host not in self._entrance.hosts:
            raise InvalidInput(
                f"host: got {host[:64]!r}, expected a name of this coordinator; open the page by the address that "
                "fanin serve printed, or start it with --name",
                code="FN-1422",
            )

    async def _form(self, request: Request) -> Mapping[str, str] | None:
        """Return the fields of a POST, None for another method."""
        if request.method != "POST":
            return None
        origin = urlsplit(request.headers.get("origin", ""))
        if not origin.netloc or origin.netloc != request.headers.get("host"):
            raise PermissionDenied(
                f"origin: got {request.headers.get('origin', '')[:64]!r}, expected the page of this coordinator; send "
                "the form from the page itself",
                code="FN-1423",
            )
        body = bytearray()
        try:
            async with asyncio.timeout(FORM_S):
                async for piece in request.stream():
                    body += piece
                    if len(body) > MAX_FORM_BYTES:
                        raise InvalidInput(
                            f"form: got more than {MAX_FORM_BYTES} bytes, expected fewer; shorten the texts",
                            code="FN-1424",
                        )
        except TimeoutError as exc:
            raise InvalidInput(
                f"form: got {len(body)} bytes in {FORM_S:g} s, expected all; send it again", code="FN-1424"
            ) from exc
        try:
            return dict(parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=True, max_num_fields=64))
        except ValueError as exc:
            raise InvalidInput("form: got a body that is no form; send the form of the page", code="FN-1424") from exc


def visitor_of(request: Request) -> Visitor:
    """Return the visitor of a request."""
    visitor = request.scope[_VISITOR]
    assert isinstance(visitor, Visitor), "the guard has passed the request"
    return visitor


def form_of(request: Request) -> Mapping[str, str]:
    """Return the fields of a POST that passed the checks."""
    form: Mapping[str, str] = request.scope[_FORM]
    return form


def operator_of(request: Request) -> Principal:
    """Return the operator of a request. Raises PermissionDenied if the visitor may only read."""
    visitor = visitor_of(request)
    if visitor.principal is None or not visitor.can_act:
        raise PermissionDenied(
            "page: got a session that may only read, expected one of an operator; sign in with an operator's token",
            code="FN-1426",
        )
    return visitor.principal


def address_of(request: Request) -> str:
    """Return the address that wrong tokens of a request count for."""
    return network_of("" if request.client is None else request.client.host)


def _bearer_token(request: Request) -> str:
    """Return the token of a program that reads the metrics, "" for another request."""
    authorization = request.headers.get("authorization", "")
    is_program = request.url.path == METRICS_PATH and authorization.startswith(BEARER)
    return authorization.removeprefix(BEARER) if is_program else ""


def _slowed(delay_s: float) -> Response | None:
    """Return the answer to a program that must wait; None if it need not."""
    if not delay_s:
        return None
    text = f"{coded(wrong_too_often('page', delay_s))}\n"
    return PlainTextResponse(text, 429, {"retry-after": str(math.ceil(delay_s))})


def _check_form(form: Mapping[str, str], token: str) -> None:
    if not compare_digest(form.get(FORM_TOKEN, "").encode(), token.encode()):
        raise PermissionDenied(
            "form: got a form of another session, expected one of this session; load the page again and repeat it",
            code="FN-1427",
        )


def _refusal(request: Request, error: FaninError) -> Response:
    if (
        isinstance(error, Unauthenticated)
        and request.method == "GET"
        and "text/html" in request.headers.get("accept", "")
    ):
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"/login?next={quote(target)}", status_code=303)
    status = {Unauthenticated: 401, PermissionDenied: 403}.get(type(error), 400)
    return PlainTextResponse(f"{coded(error)}\n", status_code=status)


def _protected(response: Response, scope: Scope, headers: Mapping[str, str]) -> ASGIApp:
    async def serve(inner: Scope, receive: Receive, send: Send) -> None:
        await response(inner, receive, _protecting(send, scope, headers))

    return serve


def _protecting(send: Send, scope: Scope, headers: Mapping[str, str]) -> Send:
    """Return a ``send`` that adds the headers of every response."""
    # A module is imported by a name without the digest of its content.
    is_kept = scope["path"].startswith(PUBLIC_FOLDER) and scope["query_string"].startswith(b"v=")
    is_static = scope["path"].startswith(PUBLIC_FOLDER)
    caching = "public, max-age=31536000, immutable" if is_kept else "no-cache" if is_static else "no-store"

    async def send_protected(message: Message) -> None:
        if message["type"] == "http.response.start":
            merged = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                merged.setdefault(name, value)
            merged.setdefault("cache-control", caching)
            for name, value in headers.items():
                merged.append(name, value)
        await send(message)

    return send_protected
