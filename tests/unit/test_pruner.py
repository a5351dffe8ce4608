"""The pruner: what retention does not keep goes, and nothing that work, a rollback or a kept verification needs."""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.mortal import Life, Mortal
from support.virtual import bundle_in, plan, start

from fanin.protos.errors import Conflict, FaninError, InvalidPlan
from fanin.protos.messages import Adopt, Command, Prune, Pruned
from fanin.protos.plans import Plan, RetentionPlan
from fanin.server.aggregation.verify import Verdict, verify_run
from fanin.server.care.pruner import Pruner
from fanin.server.runs.catalog import Runs
from fanin.server.storage.retention import GRACE_S
from fanin.simulation import run_virtual

LATER_S = 30 * 86400.0
STALE = {"buffer": 2, "quorum": 1, "concurrency": 3, "deadline_s": 60.0, "max_rounds": 8, "max_staleness": 2}
LIMITS = RetentionPlan(keep_versions=6, keep_updates=2)


@dataclass(frozen=True)
class Left:
    """What is left of a Run: the files, the removals and the verdicts."""

    blobs: frozenset[str]
    payloads: frozenset[str]
    verdicts: tuple[Verdict, ...]

    def versions(self, of: str) -> list[int]:
        """Return the Versions that were recomputed, or those whose record alone was verified."""
        is_digest_only = of == "digest-only"
        return [each.version for each in self.verdicts if each.round and bool(each.digest_only) is is_digest_only]


@contextmanager
def refused(kind: type[FaninError], code: str) -> Iterator[None]:
    """Expect an error of this code."""
    with pytest.raises(kind) as error:
        yield
    assert error.value.code == code


def pruner_of(life: Life) -> Pruner:
    """Return a pruner a month later."""
    state = life.state
    return Pruner(replace(state.stores, wall=lambda: time.time() + LATER_S), state.files)


def left(life: Life) -> Left:
    """Return what is left, and check that nothing that is left is damaged."""
    verdicts = tuple(verify_run(life.state, "run"))
    assert [each.problem for each in verdicts if each.problem] == []
    return Left(
        blobs=frozenset(path.name for path in life.folder.glob("blobs/*/*")),
        payloads=frozenset(path.name for path in life.folder.glob("updates/run/*/*")),
        verdicts=verdicts,
    )


async def ended_run(folder: Path, run_plan: Plan) -> Mortal:
    """Return a coordinator whose Run has published all its Versions."""
    mortal = Mortal(folder)
    await mortal.start()
    await mortal.operate(lambda runs: start(runs, bundle_in(folder), run_plan))
    times: Iterator[float] = iter([25.0, *[10.0] * 1000])
    tasks = [asyncio.create_task(device.run()) for device in mortal.devices(3, lambda _: next(times))]

    async def watch(runs: Runs) -> None:
        async for _ in runs.watch("run", 0):
            pass

    await mortal.operate(watch)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return mortal


def play(folder: Path, story: Callable[[Mortal], Awaitable[None]], **changes: object) -> None:
    """Play a story after a Run with eight Versions has ended."""

    async def main() -> None:
        mortal = await ended_run(folder, plan(**{**STALE, "outer_optimizer": "nesterov", **changes}))
        await story(mortal)
        await mortal.stop()

    run_virtual(main())


def request(*, apply: bool, limits: RetentionPlan | None = LIMITS) -> Prune:
    """Return a request about the Run."""
    return Prune(run_id="run", retention=limits, apply=apply)


def test_a_dry_run_tells_what_goes_and_changes_nothing(tmp_path: Path) -> None:
    async def story(mortal: Mortal) -> None:
        before = left(mortal.life)
        wanted = await pruner_of(mortal.life).prune(request(apply=False))
        assert left(mortal.life) == before
        applied = await pruner_of(mortal.life).prune(request(apply=True))
        assert applied == replace(wanted, applied=True)
        assert (applied.num_versions, applied.num_rounds) == (3, 6)
        after = left(mortal.life)
        assert len(before.payloads) - len(after.payloads) == applied.num_updates
        assert applied.update_bytes > 0 and applied.version_bytes > 0
        again = Pruned(applied=True, retention=LIMITS, num_stored_versions=6, num_stored_rounds=2)
        assert await pruner_of(mortal.life).prune(request(apply=True)) == again

    play(tmp_path, story)


def test_what_is_too_young_is_named_and_goes_when_it_is_old_enough(tmp_path: Path) -> None:
    async def story(mortal: Mortal) -> None:
        state = mortal.life.state

        async def prune_at(now_s: float, **limits: float) -> Pruned:
            pruner = Pruner(replace(state.stores, wall=lambda: now_s), state.files)
            return await pruner.prune(request(apply=False, limits=RetentionPlan(**limits)))

        counts = {"keep_versions": 2, "keep_updates": 0}
        later = await prune_at(time.time() + LATER_S, **counts)
        assert (later.num_young_versions, later.num_young_rounds, later.old_enough_at) == (0, 0, 0.0)
        now_s = state.stores.wall()
        early = await prune_at(now_s, **counts)
        assert (early.num_stored_versions, early.num_stored_rounds) == (9, 8)
        assert (early.num_versions, early.num_rounds, early.num_young_rounds) == (0, 8, 0)
        assert early.num_young_versions == later.num_versions > 0
        assert now_s < early.old_enough_at < now_s + GRACE_S + 2.0
        assert (await prune_at(early.old_enough_at - 2.0, **counts)).num_versions == 0
        assert (await prune_at(early.old_enough_at, **counts)).num_versions > 0

        by_days = await prune_at(now_s, keep_days=2.0)
        assert (by_days.num_versions, by_days.num_rounds, by_days.num_young_rounds) == (0, 0, 8)
        at = await prune_at(by_days.old_enough_at, keep_days=2.0)
        assert at.num_versions + at.num_rounds > 0
        assert (await prune_at(by_days.old_enough_at - 2.0, keep_days=2.0)).num_rounds == 0

    play(tmp_path, story)


def test_the_kept_versions_are_recomputed_and_of_others_the_record_is_verified(tmp_path: Path) -> None:
    async def story(mortal: Mortal) -> None:
        await pruner_of(mortal.life).prune(request(apply=True))
        kept = left(mortal.life)
        assert kept.versions("recomputed") == [7, 8]
        assert kept.versions("digest-only") == [1, 2, 3, 4, 5, 6]
        description = await mortal.life.runs.describe("run", 1)
        assert (description.num_digest_only, description.num_without_parameters) == (6, 3)

    play(tmp_path, story)


def test_the_versions_that_stale_updates_were_trained_from_are_kept(tmp_path: Path) -> None:
    async def story(mortal: Mortal) -> None:
        # The limits of days contradict nothing, so the closure has to keep the bases.
        await pruner_of(mortal.life).prune(request(apply=True, limits=RetentionPlan(keep_updates=8, keep_days=0.0)))
        assert left(mortal.life).versions("recomputed") == [1, 2, 3, 4, 5, 6, 7, 8]

    play(tmp_path, story)


def test_a_removed_version_is_refused_and_an_adopted_one_is_kept(tmp_path: Path) -> None:
    async def story(mortal: Mortal) -> None:
        runs = mortal.life.runs

        def adopt(number: int, again: str = "") -> Command:
            return Command(command_id=f"to-{number}{again}", run_id="run", what=Adopt(number=number))

        await runs.command(adopt(2))
        await pruner_of(mortal.life).prune(request(apply=True, limits=RetentionPlan(keep_versions=1, keep_updates=0)))
        with refused(Conflict, "FN-1441"):
            await runs.version("run", 5)
        with refused(Conflict, "FN-1441"):
            await runs.command(adopt(5))
        assert (await runs.command(adopt(2, again="-again"))).version == 10
        kept = left(mortal.life)
        assert kept.payloads == frozenset()
        assert [each.version for each in kept.verdicts if not each.round and not each.digest_only] == [9, 10]

    play(tmp_path, story)


def test_a_run_goes_on_after_everything_was_removed(tmp_path: Path) -> None:
    async def story(mortal: Mortal) -> None:
        await pruner_of(mortal.life).prune(request(apply=True, limits=RetentionPlan(keep_versions=1, keep_updates=0)))
        before = len(left(mortal.life).blobs)
        await mortal.life.runs.command(Command(command_id="on", run_id="run", what=Adopt(number=8, rounds=1)))
        tasks = [asyncio.create_task(device.run()) for device in mortal.devices(3, lambda _: 1.0)]
        async for _ in mortal.life.runs.watch("run", 0):
            pass
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        kept = left(mortal.life)
        assert kept.versions("recomputed") == [10]
        assert len(kept.blobs) > before

    play(tmp_path, story)


def test_events_that_only_tell_progress_go_after_the_days(tmp_path: Path) -> None:
    async def story(mortal: Mortal) -> None:
        count = len(list(mortal.life.state.runs.events("run")))
        pruned = await pruner_of(mortal.life).prune(request(apply=True, limits=RetentionPlan(keep_days=1.0)))
        events = [each async for each in mortal.life.runs.watch("run", 0)]
        assert len(events) == count - pruned.num_events
        assert {type(each.event).__name__ for each in events} == {"VersionPublished", "RunRested"}
        assert (await mortal.life.runs.info("run")).version == 8

    play(tmp_path, story)


def test_limits_that_contradict_each_other_are_refused() -> None:
    with refused(InvalidPlan, "FN-1440"):
        replace(plan(max_staleness=2), retention=RetentionPlan(keep_versions=6, keep_updates=4))
    assert replace(plan(max_staleness=2), retention=RetentionPlan(keep_versions=7, keep_updates=4)).retention
    assert not plan().retention


async def pruned_with_kill(folder: Path, prepared: Path, kill_at: tuple[int, ...]) -> tuple[Left, range]:
    """Prune a copy of a Run, killed at a moment. Return what is left, and the moments of the call."""
    shutil.copytree(prepared, folder / "life-0")
    mortal = Mortal(folder, kill_at)
    await mortal.start()
    first = len(mortal.moments) + 1

    async def prune(_: Runs) -> Pruned:
        return await pruner_of(mortal.life).prune(request(apply=True))

    await mortal.operate(prune)
    assert len(mortal.kills) == len(kill_at)
    ending = left(mortal.life), range(first, len(mortal.moments) + 1)
    await mortal.stop()
    return ending


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.nightly), 15])
def test_a_kill_at_any_moment_leaves_nothing_behind(tmp_path: Path, step: int) -> None:
    async def story(mortal: Mortal) -> None:
        prepared = mortal.life.folder
        expected, moments = await pruned_with_kill(tmp_path / "undisturbed", prepared, ())
        assert len(moments) > 20
        for moment in moments[::step]:
            ending, _ = await pruned_with_kill(tmp_path / f"kill-{moment}", prepared, (moment,))
            assert ending == expected, moment

    play(tmp_path, story)
