"""The decision about a complete upload, in each state of a Run."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.staleness import assignment, send, settle, slow_store, update
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.protos import messages as m
from fanin.protos.errors import Unavailable
from fanin.protos.messages import Command, Pause, Resume, Stop
from fanin.protos.plans import Plan
from fanin.server.rounds.decision import Accepted, Decision, Discarded, Later, Undecided
from fanin.server.storage.lanes import Lane, inline
from fanin.server.storage.protocols.files import Upload
from fanin.simulation import run_virtual

TWO = plan(concurrency=2, buffer=2, quorum=2, max_rounds=9)
STALE = plan(concurrency=3, buffer=2, quorum=2, max_rounds=9, max_staleness=2)


@dataclass
class Scene:
    """A coordinator with one Run, and the uploads to close at the end of the test."""

    place: Place
    resources: ExitStack

    def complete(self, device: str, work: m.Assignment, size: float = 0.01) -> tuple[str, Upload]:
        """Return an upload whose payload is complete in the spool."""
        header, payload = update(work, size)
        upload = self.resources.enter_context(closing(self.place.state.spool.open(header, device)))
        if not upload.is_complete():
            upload.add(m.Piece(offset=0, data=payload))
            upload.store()
        return device, upload

    async def decide(self, update: tuple[str, Upload]) -> Decision:
        """Commit the upload of a device. Return the decision."""
        return await self.place.runs.driver("run").updates.commit(*update)


async def command(place: Place, action: Pause | Resume | Stop) -> None:
    await place.runs.command(Command(command_id=type(action).__name__, run_id="run", what=action))


def files(folder: Path) -> tuple[int, int]:
    """Return the number of files in the spool, and of committed payloads."""
    state = folder / "state"
    uploads = [path for path in (state / "spool").rglob("*") if path.is_file()]
    return len(uploads), len(list((state / "updates").rglob("*.payload")))


def play(folder: Path, run_plan: Plan, story: Callable[[Scene], Awaitable[None]], store_lane: Lane = inline) -> None:
    async def main() -> None:
        place = open_place(folder, store_lane=store_lane)
        await start(place.runs, bundle_in(folder), run_plan)
        await settle()
        with ExitStack() as resources:
            scene = Scene(place, resources)
            await story(scene)
        await scene.place.runs.stop()

    run_virtual(main())


def test_an_update_for_the_open_round_is_accepted_once_however_often_it_is_repeated(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        work = await assignment(scene.place, "a")
        update = scene.complete("a", work)
        assert files(tmp_path) == (2, 0)
        assert isinstance(await scene.decide(update), Accepted)
        assert files(tmp_path) == (0, 1)
        assert isinstance(await scene.decide(scene.complete("a", work)), Accepted)
        # Another Update for the same Assignment does not replace it, and leaves no file.
        assert isinstance(await scene.decide(scene.complete("a", work, size=0.02)), Accepted)
        assert files(tmp_path) == (0, 1)
        assert len(await scene.place.state.stores.rounds.updates("run", 1)) == 1

    play(tmp_path, TWO, story)


def test_an_update_for_a_round_that_has_ended_is_discarded(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        update = scene.complete("a", await assignment(scene.place, "a"))
        await command(scene.place, Stop())
        assert await scene.decide(update) == Discarded()
        assert files(tmp_path) == (0, 0)

    play(tmp_path, TWO, story)


def test_an_update_beyond_the_buffer_is_discarded_without_staleness(tmp_path: Path) -> None:
    """All three uploads were complete while the Round was open. The record decides which of them count."""

    async def story(scene: Scene) -> None:
        updates = [scene.complete(device, await assignment(scene.place, device)) for device in "abc"]
        fates = await asyncio.gather(*(scene.decide(update) for update in updates))
        assert sorted(type(fate).__name__ for fate in fates) == ["Accepted", "Accepted", "Discarded"]
        assert files(tmp_path) == (0, 2)

    play(tmp_path, plan(concurrency=3, buffer=2, quorum=2, max_rounds=9), story, slow_store)


def test_an_update_beyond_the_buffer_is_decided_later_with_staleness(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        updates = [scene.complete(device, await assignment(scene.place, device)) for device in "abc"]
        changed = scene.place.runs.driver("run").course.changed
        fates = dict(zip("abc", await asyncio.gather(*(scene.decide(update) for update in updates)), strict=True))
        (device,) = (device for device, fate in fates.items() if isinstance(fate, Later))
        assert len([fate for fate in fates.values() if isinstance(fate, Accepted)]) == 2
        await changed.wait()
        await settle()
        assert isinstance(await scene.decide(updates["abc".index(device)]), Accepted)
        (committed_update,) = await scene.place.state.stores.rounds.updates("run", 2)
        assert (committed_update.device_id, committed_update.header.round) == (device, 1)

    play(tmp_path, STALE, story, slow_store)


def test_a_round_that_only_the_record_has_ended_decides_nothing_yet_with_staleness(tmp_path: Path) -> None:
    """The driver reads the record a moment later. Until then the next Round may still count the Update."""

    async def story(scene: Scene) -> None:
        upload = scene.complete("a", await assignment(scene.place, "a"))
        stop = Command(command_id="1", run_id="run", what=Stop())
        await scene.place.state.stores.control.stop(stop, asyncio.get_running_loop().time())
        changed = scene.place.runs.driver("run").course.changed
        assert isinstance(await scene.decide(upload), Later)
        await scene.place.runs.driver("run").refresh()
        assert changed.is_set()
        assert await scene.decide(upload) == Discarded()

    play(tmp_path, STALE, story)


def test_the_fate_is_undecided_while_a_run_is_paused_between_two_rounds(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        works = {device: await assignment(scene.place, device) for device in "abc"}
        late_upload = scene.complete("c", works["c"])
        # The pause takes effect while the Round ends, so no next Round opens.
        for device in "ab":
            await send(scene.place, device, works[device])
        await command(scene.place, Pause())
        await settle()
        assert await scene.decide(late_upload) == Undecided()
        assert files(tmp_path)[0] == 2
        # That of an accepted Update is known. Its device need not wait for the Run.
        reply = await scene.place.coordinator.report("a", m.Report(assignment_id=works["a"].assignment_id))
        assert (reply.update_state, reply.round_state) == (m.UpdateState.ACCEPTED, m.RoundState.CLOSED)
        with pytest.raises(Unavailable, match="FN-0696"):
            await scene.place.coordinator.report("c", m.Report(assignment_id=works["c"].assignment_id))
        await command(scene.place, Resume())
        await settle()
        assert isinstance(await scene.decide(late_upload), Accepted)

    play(tmp_path, STALE, story, slow_store)


def test_a_crash_between_payload_and_row_loses_no_update(tmp_path: Path) -> None:
    """The device repeats the upload, and the coordinator finds the stored payload."""

    async def story(scene: Scene) -> None:
        work = await assignment(scene.place, "a")
        device, upload = scene.complete("a", work)
        scene.place.state.spool.commit(upload, device)
        await scene.place.runs.stop()
        scene.place = open_place(tmp_path)
        await scene.place.runs.start()
        await settle()
        assert isinstance(await scene.decide(scene.complete("a", work)), Accepted)
        assert files(tmp_path) == (0, 1)

    play(tmp_path, TWO, story)
