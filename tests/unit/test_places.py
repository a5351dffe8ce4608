"""The drafts of ``fanin fetch``: those of killed fetches are removed, and those of running ones stay."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from fanin.commands.control.places import put, restore

WRITER: Final = """
import sys, time
from pathlib import Path
from fanin.commands.control.places import put

def write(draft):
    (draft if {is_file} else draft / "parameters").write_bytes(b"half")
    print(flush=True)
    time.sleep(60)

put(Path(sys.argv[1]), write, is_file={is_file}, option="--out", force=False)
"""


def write_file(draft: Path) -> None:
    draft.write_bytes(b"new")


def write_folder(draft: Path) -> None:
    (draft / "parameters").write_bytes(b"new")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("is_file", [True, False])
def test_the_draft_of_a_killed_fetch_is_removed_by_the_next_one(is_file: bool, tmp_path: Path) -> None:
    out = tmp_path / "version"
    code = WRITER.format(is_file=is_file)
    with subprocess.Popen([sys.executable, "-c", code, out], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (draft,) = names_in(tmp_path)
        # A fetch that runs keeps its draft.
        put(out, write_file if is_file else write_folder, is_file=is_file, option="--out", force=False)
        assert names_in(tmp_path) == [draft, "version"]
        process.send_signal(signal.SIGKILL)
    assert not put(out, write_file if is_file else write_folder, is_file=is_file, option="--out", force=False)
    assert names_in(tmp_path) == ["version"]


def test_files_that_no_fetch_wrote_stay(tmp_path: Path) -> None:
    (tmp_path / ".version.0123abcd.new").mkdir()
    (tmp_path / ".version.0123abcd.new" / "notes").write_text("mine")
    for name in (".other.0123abcd.new", ".version.new", ".version.0123abcd.old"):
        (tmp_path / name).write_text("mine")
    before = names_in(tmp_path)
    restore(tmp_path / "version")
    assert put(tmp_path / "version", write_folder, is_file=False, option="--out", force=False)
    assert names_in(tmp_path) == sorted([*before, "version"])


def test_a_folder_whose_fetch_is_between_the_renames_stays_aside(tmp_path: Path) -> None:
    draft, aside = (tmp_path / f".version.0123abcd{suffix}" for suffix in (".new", ".old"))
    for folder in (draft, aside):
        folder.mkdir()
    descriptor = os.open(draft, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    restore(tmp_path / "version")
    assert names_in(tmp_path) == [draft.name, aside.name]
    os.close(descriptor)
    restore(tmp_path / "version")
    assert names_in(tmp_path) == [draft.name, "version"]
