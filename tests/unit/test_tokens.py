"""Token files: a token is issued once, and a file whose token is not valid is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.errors import raises

from fanin.protos.errors import Corrupted
from fanin.protos.messages import Role
from fanin.server.access.registry import Registry
from fanin.server.administration.token_files import ensure_token
from fanin.server.storage.disk import Durability
from fanin.server.storage.sqlite.devices import SqliteDevices
from fanin.server.storage.sqlite.engine import open_engine


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    engine = open_engine(tmp_path / "fanin.db", Durability.PROCESS)
    yield Registry(SqliteDevices(engine), lambda: 1.0)
    engine.dispose()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens" / "device.token"


ADVICE = (
    "restore it from a backup, or remove this file: a new token is issued at the next start, and enrolled devices need "
    "none"
)


def test_a_token_is_issued_once(path: Path, registry: Registry) -> None:
    ensure_token(path, Role.DEVICE, registry)
    token = path.read_text().strip()
    assert registry.has_token(token, Role.DEVICE)
    assert not registry.has_token(token, Role.OPERATOR)
    ensure_token(path, Role.DEVICE, registry)
    assert path.read_text() == f"{token}\n"


@pytest.mark.parametrize("data", [b"", b"\n", b"two\nlines", "t\u00f6ken".encode(), b"\xff\xfe"])
def test_a_file_without_a_token_is_refused_and_kept(path: Path, registry: Registry, data: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(data)
    text = f"{path}: got {len(data.strip())} bytes that are no token, expected one line of text; {ADVICE}"
    with raises(Corrupted, text):
        ensure_token(path, Role.DEVICE, registry)
    assert path.read_bytes() == data


def test_a_token_that_the_database_does_not_have_is_refused(path: Path, registry: Registry) -> None:
    ensure_token(path, Role.DEVICE, registry)
    for token in ("another-coordinators", registry.new_token(Role.OPERATOR)):
        path.write_text(token)
        with raises(
            Corrupted,
            f"{path}: got a token that fanin.db does not have for devices; restore the fanin.db that this folder was "
            f"served with, or the token file: {ADVICE}",
        ):
            ensure_token(path, Role.DEVICE, registry)
    path.unlink()
    ensure_token(path, Role.DEVICE, registry)
    assert registry.has_token(path.read_text().strip(), Role.DEVICE)
