"""Devices whose journal of masks lost whole records in the middle of a Round: they give up, and no key serves twice."""

import asyncio
from pathlib import Path

import pytest
from support.secagg import PUBLISHER, SHAPES, await_rest, device_of, open_place, outcome_of, plan_of, start

from fanin.clients.device.storage.journals import JournalStore
from fanin.edge.masking.journal import read_journal, record_of
from fanin.protos import messages as m
from fanin.simulation import run_virtual, synthetic_bundle

NUM_DEVICES = 5
VICTIM = 2


def cut(path: Path, num_left: int) -> None:
    """Cut a journal exactly after a number of records, as a copy of an earlier one would be."""
    path.write_bytes(b"".join(map(record_of, read_journal(path.read_bytes())[:num_left])))


@pytest.mark.parametrize(
    ("phase", "num_left", "counts"),
    [
        ("sharing", 1, False),
        ("training", 3, True),
        pytest.param("advertising", 0, False, marks=pytest.mark.nightly),
        pytest.param("unmasking", 4, True, marks=pytest.mark.nightly),
    ],
)
def test_a_device_whose_journal_lost_whole_records_gives_up_and_comes_back(
    tmp_path: Path, phase: str, num_left: int, counts: bool
) -> None:
    """The journal is cut while a message of a phase is under way. The device sends no further one in this Round."""
    sent: list[m.ExchangeRequest] = []

    def change(request: m.ExchangeRequest) -> m.ExchangeRequest:
        if request.phase == phase and phase not in {each.phase for each in sent}:
            cut(tmp_path / "journals" / "run.journal", num_left)
        sent.append(request)
        return request

    async def main() -> None:
        place = open_place(tmp_path)
        whole = plan_of("secagg", NUM_DEVICES, NUM_DEVICES - 1, max_rounds=4, dropout_fraction=0.2)
        await start(place.runs, synthetic_bundle(tmp_path / "bundle", PUBLISHER, SHAPES), whole)
        lines = {VICTIM: {"change": change}}
        devices = [device_of(place.coordinator, index, **lines.get(index, {})) for index in range(NUM_DEVICES)]
        victim = devices[VICTIM]
        victim.folder.journals = JournalStore(tmp_path / "journals")  # type: ignore[assignment]  # one on a disk
        victim.restart()
        tasks = [asyncio.create_task(device.run()) for device in devices]
        async with asyncio.timeout(10_000.0):
            await await_rest(place)
        assert not any(task.done() for task in tasks), "a device has ended"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        outcome = await outcome_of(place)
        await place.coordinator.stop()
        await place.runs.stop()
        assert outcome.failures == ()
        is_in = [f"device-{VICTIM}" in closed for closed in outcome.closed]
        assert is_in[0] is counts
        assert is_in[-1]
        first = [each.phase for each in sent if each.assignment_id == sent[0].assignment_id]
        assert list(dict.fromkeys(first))[-1] == phase
        messages = {(each.assignment_id, each.phase): each.payload for each in sent}
        assert all(each.payload == messages[each.assignment_id, each.phase] for each in sent)

    run_virtual(main())
