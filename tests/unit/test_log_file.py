"""The log file of a coordinator is rotated by its size, or by another program, and only this user can read it."""

import logging
from pathlib import Path

import pytest

from fanin.commands.console.streams import LogFile
from fanin.commands.serve.command import open_log
from fanin.protos.errors import InvalidInput


def record(text: str) -> logging.LogRecord:
    """Return a record of the log."""
    return logging.LogRecord("fanin", logging.INFO, "file", 1, text, (), None)


def test_a_full_file_is_rotated_and_the_oldest_goes(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "fanin.log", 100, 2)
    for number in range(10):
        log.emit(record(f"{number} " + "x" * 80))
    log.close()
    texts = {path.name: path.read_text()[0] for path in tmp_path.iterdir()}
    assert texts == {"fanin.log": "9", "fanin.log.1": "8", "fanin.log.2": "7"}
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("is_moved", [True, False])
def test_a_file_that_logrotate_takes_is_opened_again(tmp_path: Path, is_moved: bool) -> None:
    path = tmp_path / "fanin.log"
    log = LogFile(path, 0, 1)
    log.emit(record("before"))
    if is_moved:
        path.rename(tmp_path / "moved")
    else:
        path.unlink()
    log.emit(record("after"))
    log.close()
    assert path.read_text() == "after\n"


def test_a_file_in_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as error:
        open_log(tmp_path / "none" / "fanin.log", 1, 1)
    assert error.value.code == "FN-1450"
