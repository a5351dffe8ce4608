"""The actions of the page: signing in, and commands of operators.

A command goes through the same code as the call of an operator's program (``administration.commands``), with the same
record, the same errors and the same entries in the audit log. ``guard`` has checked the form.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from fanin.protos.errors import InvalidInput, Unauthenticated, coded
from fanin.protos.messages import Adopt, Command, Pause, Resume, Stop
from fanin.server.access.limited_log import LimitedLog
from fanin.server.access.rates import wrong_too_often
from fanin.server.access.registry import token_sha256
from fanin.server.administration.audit import AuditLog
from fanin.server.administration.commands import carry_out
from fanin.server.runs.catalog import Runs
from fanin.server.storage.stores import Files
from fanin.server.web.guard import Entrance, address_of, form_of, operator_of
from fanin.server.web.rendering import page
from fanin.server.web.sessions import COOKIE
from fanin.server.web.views import number_of

LOG: Final = logging.getLogger("fanin.server.web.actions")
HOME: Final = "/runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """The actions.

    Attributes:
        runs: The Runs.
        audit: The log of the commands.
        entrance: Opens sessions.
        files: The lane of files.
        refused: The log of refused tokens.
    """

    runs: Runs
    audit: AuditLog
    entrance: Entrance
    files: Files
    refused: LimitedLog = field(default_factory=lambda: LimitedLog(LOG, what="refused sign-ins"))

    async def login_form(self, request: Request) -> Response:
        """Show the form for a token."""
        return page(request, "login.html", {"next": target_of(request.query_params.get("next", "")), "problem": ""})

    async def login(self, request: Request) -> Response:
        """Open a session with a token."""
        form = form_of(request)
        digest, target = token_sha256(form.get("token", "").strip()), target_of(form.get("next", ""))
        try:
            self.entrance.bearer(digest)
        except Unauthenticated as exc:
            text = f"page: sign-in refused from {address_of(request)}: {coded(exc)}"
            self.refused.log(type(exc).__name__, text, exc.code)
            if delay_s := self.entrance.count_wrong(request, exc):
                error = wrong_too_often("page", delay_s)
                answer = page(request, "login.html", {"next": target, "problem": f"{coded(error)}."}, 429)
                answer.headers["retry-after"] = str(math.ceil(delay_s))
                return answer
            problem = "This coordinator does not know the token, or it was revoked or has expired."
            return page(request, "login.html", {"next": target, "problem": problem}, 401)
        return RedirectResponse(target, status_code=303, headers={"set-cookie": self.entrance.cookie(digest)})

    async def logout(self, request: Request) -> Response:
        """End the sessions of this token: a copy of the cookie is worth nothing any more."""
        if (session := self.entrance.reader(request)[0]) is not None:
            await self.files.run(self.entrance.sessions.end, session.token_sha256)
        response = RedirectResponse(HOME, status_code=303)
        response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict", secure=self.entrance.is_secure)
        return response

    async def command(self, request: Request) -> Response:
        """Carry out a command to a Run."""
        by, form, run_id = operator_of(request), form_of(request), request.path_params["run_id"]
        kind = form.get("what", "")
        if kind not in _COMMANDS:
            raise InvalidInput(f"command: got {kind[:32]!r}, expected one of {', '.join(_COMMANDS)}", code="FN-1424")
        command_id = form.get("command_id", "")
        command = Command(command_id=command_id, run_id=run_id, what=_COMMANDS[kind](form), by=by)
        await carry_out(command, by, self.runs, self.audit)
        return RedirectResponse(f"{target_of(form.get('next', ''))}?done={kind}", status_code=303)


def target_of(text: str) -> str:
    """Return the page to show next: a path of this page, never another site."""
    is_ours = text.startswith("/") and not text.startswith("//") and "\\" not in text and text.isprintable()
    return text if is_ours else HOME


def _number(form: Mapping[str, str], name: str) -> int:
    return number_of(form.get(name, "").strip() or "0")


_COMMANDS: Final[dict[str, Callable[[Mapping[str, str]], Pause | Resume | Stop | Adopt]]] = {
    "pause": lambda _form: Pause(),
    "resume": lambda form: Resume(rounds=_number(form, "rounds")),
    "stop": lambda _form: Stop(),
    "adopt": lambda form: Adopt(
        from_run_id=form.get("from_run_id", ""), number=_number(form, "number"), rounds=_number(form, "rounds")
    ),
}
