"""What ``fanin serve`` prints at its start runs as it is."""

import shlex
import time
from pathlib import Path

import numpy as np
import pytest
from support.processes import Running, start

from fanin.edge.bundles.keys import SigningKey

WAIT_S = 60.0


def begin(folder: Path, *words: str) -> Running:
    """Start a command in a folder."""
    program = (
        f"import os, sys\nos.chdir({str(folder)!r})\nfrom fanin.commands.main import main\nsys.exit(main(sys.argv[1:]))"
    )
    return start(["-c", program, *words], folder / f"{words[0]}.log")


def await_text(running: Running, text: str) -> str:
    """Return the output of a process when it has a text."""
    until = time.monotonic() + WAIT_S
    while text not in running.text():
        assert running.process.poll() is None and time.monotonic() < until, running.text()
        time.sleep(0.05)
    return running.text()


@pytest.mark.nightly
def test_the_printed_line_joins_as_it_is_on_the_same_machine(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "publisher.pub").write_text(SigningKey.generate().public)
    rng = np.random.default_rng(0)
    np.savez(elsewhere / "FILE.npz", x=rng.random((20, 4), np.float32), y=rng.integers(0, 3, 20))
    serving = begin(tmp_path, "serve", "--state", "a state", "--listen", "127.0.0.1:0", "--no-web")
    try:
        text = await_text(serving, "a device here joins by fanin ")
        line = text.partition("a device here joins by fanin ")[2].splitlines()[0]
        device = begin(elsewhere, *shlex.split(line))
        try:
            await_text(device, "waiting for work")
        finally:
            device.kill()
    finally:
        serving.kill()
