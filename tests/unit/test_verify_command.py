"""``fanin verify`` prints each Version as soon as it is verified, and goes on after a damaged one."""

import io
import sqlite3
from contextlib import closing, redirect_stdout
from pathlib import Path

import pytest
from support.staleness import send, settle
from support.virtual import bundle_in, open_place, plan, start

from fanin.commands.control.verify import main as verify
from fanin.simulation import run_virtual

PROBLEM = "fanin.db: run run, a version: the record is damaged"


def run_rounds(folder: Path, num_rounds: int) -> Path:
    """Run some Rounds of a coordinator, and return its folder."""

    async def serve() -> None:
        place = open_place(folder)
        await start(place.runs, bundle_in(folder), plan())
        for _ in range(num_rounds):
            for device in "abcd":
                await send(place, device)
            await settle()
        assert (await place.runs.info("run")).version == num_rounds
        await place.runs.stop()

    run_virtual(serve())
    return folder / "state"


def damage(state: Path, number: int) -> None:
    """Damage the record of a Version."""
    with closing(sqlite3.connect(state / "fanin.db")) as connection, connection:
        connection.execute("UPDATE versions SET version_proto = x'ff' WHERE number = ?", (number,))


def test_a_version_is_printed_before_the_next_one_is_verified(tmp_path: Path) -> None:
    state = run_rounds(tmp_path, 1)

    class Damaging(io.StringIO):
        """Damages Version 1 when Version 0 is printed."""

        def write(self, text: str) -> int:
            """See io.StringIO."""
            damage(state, 1)
            return super().write(text)

    with redirect_stdout(Damaging()) as out:
        assert verify(["run", "--state", str(state)]) == 1
    first, second = out.getvalue().splitlines()
    assert first.startswith("version 0 ") and first.endswith(": verified")
    assert PROBLEM in second


def test_a_damaged_round_is_reported_and_the_others_are_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = run_rounds(tmp_path, 2)
    with closing(sqlite3.connect(state / "fanin.db")) as connection, connection:
        connection.execute("UPDATE rounds SET grid = 'x' WHERE round = 1")
    assert verify(["run", "--state", str(state)]) == 1
    first, damaged, last = capsys.readouterr().out.splitlines()
    assert first.endswith(": verified") and last.endswith(": verified"), last
    assert ": fanin.db: run run, round 1: the record is damaged (" in damaged


def test_a_damaged_version_is_reported_and_the_others_are_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = run_rounds(tmp_path, 3)
    damage(state, 1)
    assert verify(["run", "--state", str(state)]) == 1
    first, damaged, child, last = capsys.readouterr().out.splitlines()
    assert first.startswith("version 0 ") and first.endswith(": verified")
    assert damaged.startswith(f"version 1 of an unknown digest (round 1, 4 updates): {PROBLEM}"), damaged
    # Its parent is the damaged Version, so it cannot be recomputed.
    assert child.startswith("version 2 ") and PROBLEM in child
    assert last.startswith("version 3 ") and last.endswith(": verified"), last
