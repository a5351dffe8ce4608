"""Templates, and the forms of values in them.

Everything that a template writes is escaped, and control characters are replaced: names, reasons and labels may be
texts of peers.
"""

import asyncio
import hashlib
import math
import unicodedata
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from fanin.protos.errors import Unavailable
from fanin.protos.release import __version__
from fanin.protos.texts import epsilon_text
from fanin.server.web.guard import FORM_TOKEN, visitor_of

ROOM: Final = Path(__file__).parent
STATIC: Final = ROOM / "static"
REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
SHORT_CHARS: Final = 12
MAX_PAGES: Final = 2
"""Pages that are read and rendered at a time."""
TURN_S: Final = 5.0
NONE: Final = "\N{EN DASH}"
"""The text of a value that is not recorded."""
_ABOVE: Final = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_KEPT: Final = frozenset("\n\t")
_SECONDS: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def clean(value: object) -> object:
    """Return a value of a template without control characters and changes of the writing direction."""
    if isinstance(value, Markup) or not isinstance(value, str) or value.isprintable():
        return value
    return "".join(REPLACEMENT if char not in _KEPT and _is_control(char) else char for char in value)


def _is_control(char: str) -> bool:
    category = unicodedata.category(char)
    return category.startswith("C") or category in ("Zl", "Zp")


def number(value: float | None, digits: int = 0) -> str:
    """Return a number with separators of thousands."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:,.{digits}f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def percent(value: float | None) -> str:
    """Return a share in percent."""
    return NONE if value is None else f"{100 * value:.2f} %"


def size(value: float | None) -> str:
    """Return bytes in the unit that fits."""
    if value is None:
        return NONE
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def power(exponent: int) -> str:
    """Return a power of two with its exponent above the line."""
    return "2" + str(exponent).translate(_ABOVE)


def duration(value: float | None) -> str:
    """Return seconds in the units that fit."""
    if value is None or not math.isfinite(value):
        return NONE
    if value < 10:
        return f"{value:.1f} s"
    for index, (length, unit) in enumerate(_SECONDS):
        if value >= length:
            whole, rest = divmod(round(value), length)
            if index + 1 == len(_SECONDS):
                return f"{whole} {unit}"
            smaller, small_unit = _SECONDS[index + 1]
            return f"{whole} {unit} {rest // smaller} {small_unit}" if rest >= smaller else f"{whole} {unit}"
    return f"{value:.0f} s"


def moment(value: float | None) -> Markup:
    """Return a time as an element that the browser shows in its time zone."""
    if value is None:
        return Markup(NONE)
    at = datetime.fromtimestamp(value, UTC)
    return Markup('<time datetime="{}">{}</time>').format(
        at.isoformat(timespec="milliseconds"), at.strftime("%Y-%m-%d %H:%M:%S UTC")
    )


def short(value: str) -> Markup:
    """Return the beginning of a digest or of a device's id, with all of it as its title."""
    text = str(clean(value))
    if len(text) <= SHORT_CHARS:
        return Markup('<span class="mono">{}</span>').format(text)
    return Markup('<span class="mono" title="{}">{}…</span>').format(text, text[:SHORT_CHARS])


def segment(value: object) -> str:
    """Return a text as one segment of a path."""
    return quote(str(value), safe="")


@cache
def static_url(name: str) -> str:
    """Return the URL of a static file. It changes with the content, so a browser may keep the file."""
    digest = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:SHORT_CHARS]
    return f"/static/{name}?v={digest}"


@cache
def environment() -> Environment:
    """Return the environment of all templates."""
    env = Environment(
        loader=FileSystemLoader(ROOM / "templates"),
        autoescape=True,
        finalize=clean,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {
        "epsilon": epsilon_text,
        "number": number,
        "percent": percent,
        "size": size,
        "duration": duration,
        "power": power,
        "moment": moment,
        "short": short,
        "segment": segment,
    }
    env.globals |= {"static": static_url, "version": __version__, "FORM_TOKEN": FORM_TOKEN, "NONE": NONE}
    return env


class RenderedPage(HTMLResponse):
    """A page whose text is rendered on a thread: a large one would keep the event loop from the calls of devices.

    Args:
        render: Returns the text.
        status: The status of the response.
    """

    def __init__(self, render: Callable[[], str], status: int) -> None:
        super().__init__("", status_code=status)
        self._render = render

    async def fill(self) -> None:
        """Render the text."""
        if not self.body:
            self.body = (await asyncio.to_thread(self._render)).encode()
            self.headers["content-length"] = str(len(self.body))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the page."""
        await self.fill()
        await super().__call__(scope, receive, send)


class Turns:
    """A few pages are read and rendered at a time, and the others wait: the database and the processor are shared.

    Args:
        max_pages: Pages at a time.
        wait_s: Seconds after which a request that waits is refused.
    """

    def __init__(self, max_pages: int = MAX_PAGES, wait_s: float = TURN_S) -> None:
        self._places = asyncio.Semaphore(max_pages)
        self._wait_s = wait_s

    def of(self, view: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return a view that waits for its turn. Sending the page is not part of it: a browser may read slowly."""

        async def turn(request: Request) -> Response:
            try:
                async with asyncio.timeout(self._wait_s):
                    await self._places.acquire()
            except TimeoutError as exc:
                raise Unavailable(
                    f"page: busy, because many pages are read; a page waits {self._wait_s:g} s at most; load it again",
                    code="FN-1505",
                ) from exc
            try:
                response = await view(request)
                if isinstance(response, RenderedPage):
                    await response.fill()
                return response
            finally:
                self._places.release()

        return turn


def page(request: Request, template: str, values: Mapping[str, object], status: int = 200) -> RenderedPage:
    """Return a page: a template with its values, and with the visitor."""
    known = {"visitor": visitor_of(request), "path": request.url.path, **values}
    return RenderedPage(lambda: environment().get_template(template).render(known), status)
