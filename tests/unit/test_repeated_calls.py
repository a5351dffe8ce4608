"""Repeated calls of operators: an equal call has no further effect, a different call under a used name is refused."""

from pathlib import Path

import numpy as np
import pytest
from support.errors import raises
from support.staleness import send, settle
from support.virtual import PUBLISHER, Place, bundle_in, open_place, plan, start

from fanin.clients.operator import ref_of
from fanin.clients.versions import next_version
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.chunks import short
from fanin.protos.errors import Conflict
from fanin.protos.messages import RunEvent, Version
from fanin.simulation import run_virtual, synthetic_bundle

ALONE = plan(concurrency=1, buffer=1, quorum=1, max_rounds=1)


def events(place: Place) -> list[RunEvent]:
    return [entry.event for entry in place.state.runs.events("run")]


async def publish(place: Place, bundle: Bundle) -> Version:
    """Publish a Version with one Round, and complete that Round."""
    await start(place.runs, bundle, ALONE)
    await settle()
    await send(place, "a")
    await settle()
    parent = (await place.runs.version("run", None)).version
    version, data = next_version(parent, np.ones(22, np.float32), bundle, PUBLISHER)
    place.state.blobs.put_pieces([data])
    await place.runs.publish_version(version, 1)
    await settle()
    await send(place, "a")
    await settle()
    return version


def test_a_version_that_is_published_again_after_a_round_changes_nothing_more(tmp_path: Path) -> None:
    async def main() -> None:
        place, bundle = open_place(tmp_path), bundle_in(tmp_path)
        version = await publish(place, bundle)
        before = events(place)
        assert (await place.runs.publish_version(version, 1)).version == version.number + 1
        with raises(
            Conflict,
            "run run: got version 2 again with 5 rounds, but it was published with 1; resume the run to give it other "
            "rounds",
        ):
            await place.runs.publish_version(version, 5)
        other, data = next_version(
            (await place.runs.version("run", 1)).version, np.zeros(22, np.float32), bundle, PUBLISHER
        )
        place.state.blobs.put_pieces([data])
        with raises(Conflict, "run run: got version 2 made from 1, expected 4 made from 3"):
            await place.runs.publish_version(other, 1)
        await settle()
        assert events(place) == before
        await place.runs.stop()

    run_virtual(main())


def test_a_run_that_is_started_again_changes_nothing_more(tmp_path: Path) -> None:
    async def main() -> None:
        place, bundle = open_place(tmp_path), bundle_in(tmp_path)
        await publish(place, bundle)
        before = events(place)
        await start(place.runs, bundle, ALONE)
        with pytest.raises(Conflict, match="FN-0604"):
            await start(place.runs, bundle, plan())
        await settle()
        assert events(place) == before
        await place.runs.stop()

    run_virtual(main())


def test_a_bundle_that_is_known_under_another_publishers_key_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        place, bundle = open_place(tmp_path), bundle_in(tmp_path)
        await start(place.runs, bundle, ALONE)
        await place.runs.publish_bundle(ref_of(bundle.signed))
        stranger = SigningKey(bytes(32))
        other = synthetic_bundle(tmp_path / "other", stranger, {"a": (3, 5), "b": (7,)})
        assert other.sha256 == bundle.sha256
        with raises(
            Conflict,
            f"bundle {short(bundle.sha256)}: signed by {short(stranger.public)}, but it is published here by "
            f"{short(PUBLISHER.public)}; start runs with that key (--key), or export the bundle under another name",
        ):
            await place.runs.publish_bundle(ref_of(other.signed))
        await place.runs.stop()

    run_virtual(main())
