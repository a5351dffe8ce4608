"""Ctrl-C ends a command with status 130 and without a traceback, also while it waits for a coordinator."""

import os
import signal
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fanin.server.access.authority import local_identity

ACCEPT_S = 60.0
MAIN = [sys.executable, "-m", "fanin.commands.main"]


def interrupted(words: list[str], folder: Path, server: socket.socket) -> subprocess.CompletedProcess[str]:
    """Run a command until it connects, then send SIGINT to its process group, as a terminal does."""
    env = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    command = subprocess.Popen(
        [*MAIN, *words],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        connection, _ = server.accept()
        with connection:
            os.killpg(command.pid, signal.SIGINT)
            out, err = command.communicate(timeout=30)
    finally:
        command.kill()
    return subprocess.CompletedProcess(words, command.returncode, out, err)


@pytest.fixture
def server(tmp_path: Path) -> socket.socket:
    """A server that accepts connections and never answers."""
    local_identity(tmp_path / "tls", ["localhost"], datetime.now(UTC))
    (tmp_path / "token").write_text("ab" * 32)
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(ACCEPT_S)
    return server


@pytest.mark.parametrize("words", [["runs"], ["watch", "run"], ["fetch", "run", "--out", "x.npz"]], ids=" ".join)
def test_a_command_that_waits_for_a_coordinator_ends(tmp_path: Path, server: socket.socket, words: list[str]) -> None:
    with server:
        address = f"localhost:{server.getsockname()[1]}"
        options = ["--server", address, "--ca", "tls/ca.pem", "--token-file", "token"]
        completed = interrupted([*words, *options], tmp_path, server)
    assert completed.returncode == 130, completed
    assert (completed.stdout, completed.stderr) == ("", "")
