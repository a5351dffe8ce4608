"""A Round with more Updates than a page of the record: the headers in memory, and the sum after a restart."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from support.staleness import TABLE, send, settle
from support.virtual import bundle_in, open_place, place_over, plan, start

from fanin.protos.messages import UpdateHeader
from fanin.server.aggregation.fold import PartialSum
from fanin.server.aggregation.parameters import load_parameters
from fanin.server.aggregation.verify import verify_run
from fanin.server.storage.disk import Durability
from fanin.server.storage.protocols.rounds import PAGE_UPDATES
from fanin.server.storage.spool import FolderSpool
from fanin.simulation import run_virtual

NUM_UPDATES = PAGE_UPDATES + 2
PLAN = plan(concurrency=NUM_UPDATES, buffer=NUM_UPDATES, quorum=NUM_UPDATES, max_rounds=1)
LAST = f"device-{NUM_UPDATES - 1}"


class FailingOnce(FolderSpool):
    """A spool whose first read of the last device's payload fails."""

    num_failures = 0

    def read(self, header: UpdateHeader, device: str) -> Iterator[memoryview]:
        """Raise OSError once."""
        if device == LAST and not self.num_failures:
            self.num_failures += 1
            raise OSError("spool: input/output error")
        return super().read(header, device)


def num_headers() -> int:
    """Return the number of Updates' headers in memory."""
    gc.collect()
    # ``isinstance`` would read ``__class__``, and some objects of other tests' imports then issue a warning.
    return sum(type(each) is UpdateHeader for each in gc.get_objects())


def test_a_restarted_sum_has_every_update_though_no_header_stays_in_memory(tmp_path: Path) -> None:
    async def main() -> None:
        state, before = open_place(tmp_path).state, num_headers()
        spool = FailingOnce(tmp_path / "state" / "spool", tmp_path / "state" / "updates", Durability.PROCESS)
        place = place_over(replace(state, files=replace(state.files, spool=spool)))
        await start(place.runs, bundle_in(tmp_path), PLAN)
        for index in range(NUM_UPDATES - 1):
            await send(place, f"device-{index}")
        await settle()
        assert len(place.state.rounds.updates("run", 1)) == NUM_UPDATES - 1
        # The header of a large model's Update lists thousands of Chunks.
        assert num_headers() <= before
        await send(place, LAST)
        await settle()
        assert spool.num_failures == 1
        await place.runs.stop()
        assert [(one.num_updates, one.problem) for one in verify_run(place.state, "run")] == [
            (0, ""),
            (NUM_UPDATES, ""),
        ]
        versions = [place.state.runs.version("run", number) for number in (0, 1)]
        first, second = (load_parameters(place.state.blobs, one, TABLE) for one in versions if one is not None)
        # All changes are 0.01, and so is their mean.
        np.testing.assert_allclose(second - first, 0.01, rtol=1e-4)

    run_virtual(main())


def num_sums() -> int:
    """Return the number of sums of Updates in memory."""
    gc.collect()
    return sum(type(each) is PartialSum for each in gc.get_objects())


def test_the_sum_of_a_round_is_freed_before_the_next_round_begins_its_own(tmp_path: Path) -> None:
    """A sum takes twice the memory of the model."""

    async def main() -> None:
        before = num_sums()
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(concurrency=2, buffer=2, quorum=2, max_rounds=2))
        for index in range(2):
            await send(place, f"device-{index}")
        await settle()
        assert num_sums() == before
        await send(place, "device-0")
        await settle()
        assert num_sums() == before + 1
        await place.runs.stop()

    run_virtual(main())
