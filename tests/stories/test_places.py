"""Where fanin runs: any locale, time zone and path, a home folder that cannot be written, and IPv6 alone."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

MAIN = [sys.executable, "-m", "fanin.commands.main"]
STATE = "état ⭐"
START_S = 60.0
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A locale in which Python can neither read nor print anything but ASCII."""
NO_HOME = {"HOME": "/proc/home", "XDG_CACHE_HOME": "/proc/cache", "XDG_CONFIG_HOME": "/proc/config"}
"""A home folder that cannot be created, not even by root."""
PLACES: dict[str, tuple[Mapping[str, str], str]] = {
    "C": ({"LC_ALL": "C"}, "127.0.0.1:0"),
    "POSIX": ({"LC_ALL": "POSIX"}, "127.0.0.1:0"),
    "ascii": (ASCII, "127.0.0.1:0"),
    "latin-1": ({**ASCII, "PYTHONIOENCODING": "latin-1"}, "127.0.0.1:0"),
    "no home, IPv6, a zone with summer time": ({**NO_HOME, "TZ": "Australia/Lord_Howe"}, "[::1]:0"),
}


def fanin(folder: Path, variables: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a folder to its end."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run([*MAIN, *words], cwd=folder, env=env, capture_output=True, check=False)


@contextmanager
def started(folder: Path, variables: Mapping[str, str], log: str, *words: str) -> Iterator[Path]:
    """Run a command while the context is entered; its output is in a file."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    path = folder / log
    with path.open("wb") as file:
        process = subprocess.Popen([*MAIN, *words], cwd=folder, env=env, stdout=file, stderr=file)
    try:
        yield path
    finally:
        process.terminate()
        process.wait()


@contextmanager
def coordinator(folder: Path, variables: Mapping[str, str], listen: str) -> Iterator[str]:
    """Serve, and yield the address."""
    with started(folder, variables, "serve.log", "serve", "--state", STATE, "--listen", listen) as log:
        until = time.monotonic() + START_S
        while b"token for operators" not in log.read_bytes():
            assert time.monotonic() < until, log.read_bytes()
            time.sleep(0.05)
        yield (folder / STATE / "address").read_text().strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a space, an accent and a star in its name."""
    folder = tmp_path / "⭐ modèle"
    folder.mkdir()
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("place", PLACES)
def test_the_whole_loop_runs(tmp_path: Path, place: str) -> None:
    variables, listen = PLACES[place]
    assert fanin(tmp_path, variables, "init", "⭐ modèle").returncode == 0
    folder = tmp_path / "⭐ modèle"

    def output(*words: str) -> str:
        completed = fanin(folder, variables, *words)
        assert completed.returncode == 0, (words, completed)
        return completed.stdout.decode("latin-1")

    subprocess.run([sys.executable, "split.py"], cwd=folder, env=os.environ | variables, check=True)
    plan = ("plan.toml", "--set", "stop.max_rounds=2", "--set", "cohort.concurrency=1", "--set", "cohort.quorum=1")
    with coordinator(folder, variables, listen) as address:
        here = ("--state", STATE)
        output("run", *plan, "--run-id", "r", *here)
        device = ("--server", address, "--ca", f"{STATE}/tls/ca.pem", "--token-file", f"{STATE}/tokens/device.token")
        data = ("--data", "data/device-0.npz", "--publisher", "publisher.pub", "--state", "appareil é")
        with started(folder, variables, "join.log", "join", *device, *data):
            assert "round   2  1 device" in output("watch", "r", *here)
        output("fetch", "r", *here, "--out", "modèle ⭐.npz", "--onnx", "modèle ⭐.onnx")
        assert "accuracy 0.9" in output("infer", "modèle ⭐.onnx", "--data", "data/device-0.npz")
        assert output("verify", "r", *here).count(": verified") == 3
        output("report", "r", *here, "--verify")
        output("export", "app.py:app", "--out", "paquet ⭐")
        assert "bundle" in output("inspect", "paquet ⭐")
    assert "Traceback" not in (folder / "serve.log").read_text(errors="replace")


def test_a_coordinator_serves_on_ipv6_with_a_home_that_cannot_be_written(folder: Path) -> None:
    variables = {**NO_HOME, **ASCII}
    with coordinator(folder, variables, "[::1]:0") as address:
        assert address.startswith("[::1]:")
        completed = fanin(folder, variables, "runs", "--state", STATE, "--json")
        assert (json.loads(completed.stdout), completed.stderr) == ({"runs": []}, b"")


def test_text_that_the_locale_lacks_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("# ⭐\nname = '⭐'\n", encoding="utf-8")
    latin = ASCII | {"PYTHONIOENCODING": "latin-1"}
    for words in (("simulate", "⭐.py:app"), ("run", "plan.toml")):
        completed = fanin(tmp_path, latin, *words)
        assert completed.returncode == 1 and completed.stderr.endswith(b"]\n"), completed
        assert b"Traceback" not in completed.stderr and b"\\u" in completed.stderr, completed


def test_a_path_that_the_locale_lacks_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "fanin.toml"
    path.write_text("[serve]\nstate = '⭐'\nlisten = '127.0.0.1:0'\n", encoding="utf-8")
    completed = fanin(tmp_path, ASCII, "serve", "--config", "fanin.toml")
    assert completed.returncode == 1 and completed.stderr.endswith(b"[FN-1467]\n"), completed
    assert completed.stderr.count(b"\n") <= 2 and b"LC_ALL=C.UTF-8" in completed.stderr


def test_the_times_of_the_log_have_their_offset_when_summer_time_ends(tmp_path: Path) -> None:
    # In Berlin the hour from 2:00 on 2025-10-26 exists twice.
    code = (
        "import logging; from fanin.commands.console.streams import FORMAT, OneLineFormatter\n"
        "for created in (1761438600, 1761442200):\n"
        "    record = logging.makeLogRecord({'created': created, 'msg': 'x'})\n"
        "    print(OneLineFormatter(FORMAT).format(record)[:29])\n"
    )
    env = os.environ | {"TZ": "Europe/Berlin"}
    completed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert completed.stdout.split("\n")[:2] == ["2025-10-26 02:30:00.000+02:00", "2025-10-26 02:30:00.000+01:00"]


def test_the_runtime_leaves_no_id_of_the_device_in_the_home_folder(tmp_path: Path) -> None:
    code = "from fanin.edge.runtimes.available import open_runtime; open_runtime('onnx')"
    env = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    env |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    assert list(tmp_path.rglob("*")) == []
