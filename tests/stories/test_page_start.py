"""The page of a coordinator: its addresses, its health, and its end."""

import http.client
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.processes import Running, start

START_S = 30.0


class Served:
    """A coordinator of ``fanin serve`` with a page."""

    def __init__(self, running: Running) -> None:
        self.running = running
        until = time.monotonic() + START_S
        while "page for browsers" not in running.text():
            assert running.process.poll() is None, running.text()
            assert time.monotonic() < until, running.text()
            time.sleep(0.05)
        self.url = running.text().partition("page for browsers")[2].split()[0]
        self.host, _, port = self.url.rstrip("/").rpartition("//")[2].rpartition(":")
        self.port = int(port)

    def get(self, path: str) -> tuple[int, str]:
        """Return the status and the text of a page."""
        connection = http.client.HTTPConnection(self.host.strip("[]"), self.port, timeout=10)
        connection.request("GET", path)
        response = connection.getresponse()
        status, text = response.status, response.read().decode()
        connection.close()
        return status, text


@pytest.fixture
def serve(tmp_path: Path) -> Iterator["Serve"]:
    """Starts coordinators, which end with the test."""
    with ExitStack() as stack:
        yield Serve(tmp_path, stack)


class Serve:
    """Starts coordinators in folders of their own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._num = 0

    def __call__(self, *words: str) -> Running:
        """Start ``fanin serve`` with these options."""
        self._num += 1
        name = f"serve-{self._num}"
        serve_words = ["serve", "--state", str(self._folder / name), "--listen", "127.0.0.1:0", *words]
        running = start(["-m", "fanin.commands.main", *serve_words], self._folder / f"{name}.log")
        self._stack.callback(running.kill)
        return running


def one_line(words: Sequence[str]) -> tuple[int, str]:
    """Return the exit status and the last line of a command that fails."""
    command = [sys.executable, "-m", "fanin.commands.main", *words]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return completed.returncode, completed.stderr.strip().splitlines()[-1]


def test_a_coordinator_serves_its_page_and_its_health(serve: Serve) -> None:
    served = Served(serve("--web", "127.0.0.1:0"))
    assert served.get("/healthz") == (200, "alive\n")
    assert served.get("/readyz") == (200, "ready\n")
    served.running.process.terminate()
    assert served.running.wait(10) == 0
    assert "Traceback" not in served.running.text()


def test_a_port_in_use_is_an_error_and_the_default_port_moves(serve: Serve, tmp_path: Path) -> None:
    first = Served(serve("--web", "127.0.0.1:0"))
    words = ("serve", "--state", str(tmp_path / "other"), "--listen", "127.0.0.1:0", "--web", f"127.0.0.1:{first.port}")
    status, line = one_line(words)
    assert status == 1
    assert "FN-1420" in line
    # Whichever gets the default port, the other one moves.
    second, third = Served(serve()), Served(serve())
    assert second.port != third.port
    assert {one.get("/healthz")[0] for one in (second, third)} == {200}


def test_no_page_is_served_when_it_is_refused(serve: Serve, tmp_path: Path) -> None:
    running = serve("--no-web")
    until = time.monotonic() + START_S
    while "serving on" not in running.text():
        assert time.monotonic() < until, running.text()
        time.sleep(0.05)
    assert "page for browsers" not in running.text()
    status, line = one_line(("serve", "--state", str(tmp_path / "other"), "--no-web", "--web", "127.0.0.1:0"))
    assert status == 2
    assert "FN-1421" in line
