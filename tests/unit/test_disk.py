"""Failed writes: each error of the operating system has its own cause and remedy, on coordinators and devices."""

import errno
import os
import resource
from pathlib import Path

import pytest
from support.full_disk import full_disk, in_child

from fanin.clients.device.storage.files import replace
from fanin.edge.files import DISK_PROBLEMS, disk_problem, storage_error
from fanin.protos.errors import StorageFull, StorageUnavailable
from fanin.server.rounds.troubles import reason_of
from fanin.server.storage.disk import disk_errors, failed_write

PATH = Path("/srv/fanin/spool/x")


@pytest.mark.parametrize("number", DISK_PROBLEMS)
def test_each_error_has_its_own_words_without_a_path(number: int) -> None:
    error = OSError(number, os.strerror(number), str(PATH))
    ours = storage_error(str(PATH), error)
    assert str(ours) == f"{PATH}: cannot be written: {DISK_PROBLEMS[number]}"
    assert ours.problem == DISK_PROBLEMS[number]
    assert type(ours) is (StorageFull if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else StorageUnavailable)
    # Operators of other machines read it.
    assert DISK_PROBLEMS[number] in reason_of(ours) and "/srv" not in reason_of(ours)
    assert DISK_PROBLEMS[number] in reason_of(error)
    texts = {DISK_PROBLEMS[each] for each in DISK_PROBLEMS if {each, number} != {errno.EACCES, errno.EPERM}}
    assert len(texts) >= len(DISK_PROBLEMS) - 1


def test_an_unknown_error_keeps_the_words_of_the_system() -> None:
    assert disk_problem(OSError(errno.ELOOP, os.strerror(errno.ELOOP))) == "Too many levels of symbolic links"
    with pytest.raises(OSError, match="symbolic"), disk_errors("spool x"):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE])
def test_a_coordinator_waits_until_the_cause_is_corrected(number: int) -> None:
    with pytest.raises(StorageUnavailable), disk_errors("spool x"):
        raise OSError(number, os.strerror(number))


def test_the_cause_of_a_failed_write_is_found_by_another_write(tmp_path: Path) -> None:
    path = tmp_path / "fanin.db"
    path.write_bytes(bytes(10_000))
    assert failed_write(path) is None
    assert failed_write(tmp_path / "new") is None
    assert isinstance(failed_write(tmp_path / "none" / "fanin.db"), FileNotFoundError)

    def work() -> None:
        with full_disk(10_000):
            error = failed_write(path)
        assert error is not None and error.errno == errno.EFBIG
        # Standard input, output and error are open.
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        error = failed_write(path)
        assert error is not None and error.errno == errno.EMFILE

    in_child(work)
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_names_the_cause_too(tmp_path: Path) -> None:
    def work() -> None:
        with full_disk(10), pytest.raises(StorageFull, match="the limit on file sizes is reached"):
            replace(tmp_path / "state", bytes(100))

    in_child(work)
    with pytest.raises(StorageUnavailable, match="FN-0018"):
        replace(tmp_path / "none" / "state", b"")
