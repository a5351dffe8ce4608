"""The pages that show something: each reads its model (``reads``) and renders its template."""

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from fanin.protos.errors import InvalidInput, NotFound
from fanin.protos.messages import MAX_NUMBER, AcceptedDevices, RunDescription, RunState
from fanin.server.runs.catalog import Runs
from fanin.server.storage.protocols.history import HistoryStore
from fanin.server.web import reads
from fanin.server.web.guard import visitor_of
from fanin.server.web.overview import Overview
from fanin.server.web.rendering import page
from fanin.server.web.texts import event_kind, event_text, is_bad

MAX_CURSOR: Final = MAX_NUMBER
MAX_SOURCE_ROWS: Final = 20
"""Addresses with wrong credentials that a page shows."""
DONE: Final = {
    "pause": (RunState.PAUSED, "The Run is paused."),
    "resume": (RunState.RUNNING, "The Run is running."),
    "stop": (RunState.STOPPED, "The Run is stopped."),
}
"""What a page says after an action, while the Run is in this state: a link may say anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunViews:
    """The pages.

    Attributes:
        runs: The Runs.
        history: The record in pages.
        overview: What the page of settings shows.
    """

    runs: Runs
    history: HistoryStore
    overview: Overview

    async def runs_list(self, request: Request) -> Response:
        """Show all Runs, newest first."""
        rows, num_runs = await reads.runs_page(self.runs, cursor_of(request))
        return page(request, "runs.html", {"page": rows, "num_runs": num_runs})

    async def run(self, request: Request) -> Response:
        """Show a Run: its quality, its bytes, and its last Rounds."""
        description = await self._describe(request)
        run_id = description.run.run_id
        values = {
            "quality": await reads.quality(self.history, description.run),
            "page": await reads.rounds_page(self.history, run_id, cursor_of(request)),
        }
        return page(request, "run.html", {**self._common(request, description), **values})

    async def live(self, request: Request) -> Response:
        """Show the open Round of a Run, or its last one."""
        description = await self._describe(request)
        run_id = description.run.run_id
        rounds = await reads.rounds_page(self.history, run_id, None, 1)
        last = rounds.rows[0] if rounds.rows else None
        work = reads.work_of(description.live)
        return page(request, "live.html", {**self._common(request, description), "last": last, "work": work})

    async def round(self, request: Request) -> Response:
        """Show a Round that is over, with the first of its devices."""
        description = await self._describe(request)
        run_id, number = description.run.run_id, number_of(request.path_params["number"])
        row = await reads.find_round(self.history, run_id, number)
        if row is None:
            raise NotFound(f"run {run_id}: has no round {number}", code="FN-0611")
        first = cursor_of(request) or 0
        record = row.summary.record
        is_forgotten = record.forgotten is not None
        accepted = AcceptedDevices(num_accepted=record.num_accepted, device_ids=())
        if not is_forgotten:
            accepted = await self.runs.accepted_devices(run_id, number, first)
        values = {"row": row, "accepted": accepted.device_ids[: reads.FEED_ROWS], "first": first}
        num_accepted = accepted.num_accepted
        return page(
            request,
            "round.html",
            {
                **self._common(request, description),
                **values,
                "num_accepted": num_accepted,
                "more": first + reads.FEED_ROWS if first + reads.FEED_ROWS < num_accepted and not is_forgotten else 0,
            },
        )

    async def versions(self, request: Request) -> Response:
        """Show the Versions of a Run, newest first."""
        description = await self._describe(request)
        rows, evaluations = await reads.versions_page(self.history, description.run, cursor_of(request))
        values = {"page": rows, "evaluations": evaluations, "run_ids": await self._others(description)}
        return page(request, "versions.html", {**self._common(request, description), **values})

    async def plan(self, request: Request) -> Response:
        """Show the Plan of a Run, its codec and its grid."""
        description = await self._describe(request)
        plan = description.run.plan
        values = {
            "sections": {} if plan is None else reads.plan_rows(plan),
            "grid": await reads.grid_view(self.history, self.runs, description.run),
        }
        return page(request, "plan.html", {**self._common(request, description), **values})

    async def events(self, request: Request) -> Response:
        """Show the events of a Run, newest first."""
        description = await self._describe(request)
        feed = await reads.feed_page(self.history, cursor_of(request), description.run.run_id)
        return page(request, "events.html", {**self._common(request, description), **feed_values(feed)})

    async def activity(self, request: Request) -> Response:
        """Show the events of all Runs, newest first."""
        feed = await reads.feed_page(self.history, cursor_of(request))
        refused = self.overview.sources.newest(MAX_SOURCE_ROWS)
        values = {"alarms": self.overview.alarms(), "refused": refused}
        return page(request, "activity.html", {**feed_values(feed), **values})

    async def settings(self, request: Request) -> Response:
        """Show the effective settings of the coordinator."""
        sections = await self.overview.sections(has_paths=visitor_of(request).can_act)
        return page(request, "settings.html", {"sections": sections, "alarms": self.overview.alarms()})

    async def parameters(self, request: Request) -> Response:
        """Send the parameters of a Version: its canonical bytes."""
        run_id = request.path_params["run_id"]
        found = await self.runs.version(run_id, number_of(request.path_params["number"]))
        artifact = found.version.parameters
        name = f"{run_id}-{found.version.number}.parameters"

        async def pieces() -> AsyncIterator[bytes]:
            for ref in artifact.chunks:
                yield await self.runs.get_chunk(ref.sha256, 0)

        headers = {
            "content-length": str(artifact.size_bytes),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        }
        return StreamingResponse(pieces(), media_type="application/octet-stream", headers=headers)

    async def _describe(self, request: Request) -> RunDescription:
        return await self.runs.describe(request.path_params["run_id"], 1)

    async def _others(self, description: RunDescription) -> tuple[str, ...]:
        """Return other Runs of the same Bundle, the newest first, to promote a Version from."""
        run_ids = [each for each in reversed(await self.runs.run_ids()) if each != description.run.run_id]
        infos = [await self.runs.info(run_id) for run_id in run_ids[: reads.PAGE_ROWS]]
        return tuple(each.run_id for each in infos if each.bundle_sha256 == description.run.bundle_sha256)

    def _common(self, request: Request, description: RunDescription) -> dict[str, object]:
        """Return the values of all pages of a Run."""
        state, text = DONE.get(request.query_params.get("done", ""), (None, ""))
        return {
            "described": description,
            "run": description.run,
            "done": text if state is description.run.state else "",
            # A form that is sent twice is carried out once.
            "command_id": secrets.token_hex(8),
        }


def feed_values(feed: reads.Page) -> dict[str, object]:
    """Return the values of a list of events."""
    return {"page": feed, "event_kind": event_kind, "event_text": event_text, "is_bad": is_bad}


def cursor_of(request: Request) -> int | None:
    """Return the cursor of a page, None for the first one. Raises InvalidInput."""
    text = request.query_params.get("before")
    return None if text is None else number_of(text)


def number_of(text: str) -> int:
    """Return a number of a URL. Raises InvalidInput."""
    if not (text.isascii() and text.isdecimal() and int(text) <= MAX_CURSOR):
        raise InvalidInput(f"page: got {text[:32]!r}, expected a number from 0 to {MAX_CURSOR}", code="FN-1424")
    return int(text)
