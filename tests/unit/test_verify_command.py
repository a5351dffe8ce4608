"""``fanin verify`` prints each Version as soon as it is verified."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.staleness import send, settle
from support.virtual import bundle_in, open_place, plan, start

from fanin.clients.testing import run_virtual
from fanin.commands.control.verify import main as verify
from fanin.protos.errors import Corrupted


def test_a_version_is_printed_before_the_next_one_is_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan())
        for device in "abcd":
            await send(place, device)
        await settle()
        assert (await place.runs.info("run")).version == 1
        await place.runs.stop()

    run_virtual(serve())
    # The record of Version 1 ends the command with an error.
    with closing(sqlite3.connect(tmp_path / "state" / "fanin.db")) as connection, connection:
        connection.execute("UPDATE versions SET version_proto = x'ff' WHERE number = 1")
    with pytest.raises(Corrupted):
        verify(["run", "--state", str(tmp_path / "state")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith("version 0 ") and lines[0].endswith(": verified")
