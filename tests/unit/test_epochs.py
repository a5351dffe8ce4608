"""Epochs: a publisher reclaims its Run, on a virtual clock and across restarts, and nobody else can."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.epochs import reclaim_of
from support.scenes import Scene, play, versions, wait_for_end
from support.values import STRANGER
from support.virtual import PUBLISHER

from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.versions import add_auxiliary, check_version, sign_delegation
from fanin.protos.chunks import short
from fanin.protos.errors import FaninError
from fanin.protos.messages import (
    Delegation,
    Pause,
    Principal,
    PrincipalKind,
    Reclaim,
    RunState,
    Stop,
    Version,
    VersionPublished,
)


def signed(version: Version, key: SigningKey = PUBLISHER) -> Version:
    """Return a Version signed by a key."""
    return add_auxiliary(key, replace(version, public_key=key.public), {})


def permit(delegation: Delegation, key: SigningKey = PUBLISHER) -> Delegation:
    """Return a delegation signed by a key."""
    return sign_delegation(
        key,
        run_id=delegation.run_id,
        epoch=delegation.epoch,
        bundle_sha256=delegation.bundle_sha256,
        run_public_key=delegation.run_public_key,
    )


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("action", [None, Pause(), Stop()])
def test_a_publisher_reclaims_a_run_in_any_state(tmp_path: Path, action: Pause | Stop | None, restarts: bool) -> None:
    """The devices saw Version 98 of the first epoch, whose key was stolen. They accept those of the second one."""

    async def story(scene: Scene) -> None:
        await scene.until(VersionPublished, 1)
        if action is not None:
            await scene.command(action)
        newest = await scene.place.state.stores.runs.newest_version("run")
        reclaim = await reclaim_of(scene.place.runs, newest, rounds=2)
        by = Principal(kind=PrincipalKind.OPERATOR, id="me")
        info = await scene.place.runs.reclaim(reclaim, by)
        assert await scene.place.runs.reclaim(reclaim, by) == info
        assert (info.state, info.epoch, info.version) == (RunState.RUNNING, 2, newest.number + 1)
        check_version(
            reclaim.version,
            run_id="run",
            bundle_sha256=newest.bundle_sha256,
            publisher=PUBLISHER.public,
            seen=(1, 98),
        )
        if restarts:
            await scene.restart()
        await wait_for_end(scene)
        last = await scene.place.state.stores.runs.newest_version("run")
        assert (last.order, last.public_key) == ((2, newest.number + 3), reclaim.delegation.run_public_key)
        assert last.delegation == reclaim.delegation

    events = play(tmp_path, story)
    reclaimed = [event for event in versions(events) if event.new_epoch]
    assert [(event.round, event.adopted_run_id, event.adopted_number) for event in reclaimed] == [(0, "run", 1)]


@pytest.mark.parametrize(
    ("alter", "text"),
    [
        (lambda asked: replace(asked, version=signed(asked.version, STRANGER)), "signed by"),
        (lambda asked: replace(asked, delegation=permit(asked.delegation, STRANGER)), "not signed by the publisher"),
        (
            lambda asked: replace(asked, delegation=permit(replace(asked.delegation, run_public_key=STRANGER.public))),
            f"key {short(STRANGER.public)}, expected this run",
        ),
        (
            lambda asked: replace(asked, version=signed(replace(asked.version, number=9))),
            "got version 9 made from 1, expected 2 made from 1",
        ),
        (
            lambda asked: Reclaim(
                delegation=permit(replace(asked.delegation, epoch=3)),
                version=signed(replace(asked.version, epoch=3)),
                adopted_number=1,
            ),
            "in epoch 2 instead of 3",
        ),
        (lambda asked: replace(asked, adopted_number=0), "of version 0"),
        (lambda asked: replace(asked, adopted_number=7), "has no version 7"),
    ],
    ids=["version", "delegation", "key", "number", "epoch", "parameters", "source"],
)
def test_only_the_publisher_reclaims_a_run(tmp_path: Path, alter: Callable[[Reclaim], Reclaim], text: str) -> None:
    async def story(scene: Scene) -> None:
        await scene.until(VersionPublished, 1)
        await scene.command(Stop())
        newest = await scene.place.state.stores.runs.newest_version("run")
        asked = await reclaim_of(scene.place.runs, newest)
        before = await scene.events()
        with pytest.raises(FaninError) as excinfo:
            await scene.place.runs.reclaim(alter(asked))
        assert text in str(excinfo.value)
        assert await scene.events() == before
        await scene.place.runs.reclaim(asked)

    play(tmp_path, story)
