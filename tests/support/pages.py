"""Runs the blocks of a page in their order, as a reader pastes them: Python in one process, shell in one bash.

A fence of a page is one of these:

- Python or shell code. It must succeed. The Python blocks of a page share their names, the shell blocks their
  variables, and both the working directory.
- A file, if the fence has a title: ```python title="app.py". The text is written to this file.
- The standard output of the block before it, if the title is ``Output``. The block must print exactly this text.
- Text that nobody runs, such as a part of a Plan.

A comment in front of a shell block changes how it runs:

- ``<!-- in its own terminal, until TEXT -->``: the block starts in the background, and the page continues when it has
  printed the text.
- ``<!-- not run: REASON -->``: the block, of shell or Python, is skipped.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from house.tree import ROOT

LANGUAGES: Final = {"python", "sh"}
"""The languages of blocks that run."""
BLOCK: Final = re.compile(
    r'^(?:<!-- ([^\n]*) -->\n\n?)?```(\w*)(?: title="([^"\n]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL
)
OWN_TERMINAL: Final = "in its own terminal, until "
NOT_RUN: Final = "not run: "
OUTPUT: Final = "Output"
START_S: Final = 300.0
"""How long a program in its own terminal may take to print its text."""
STOP: Final = "kill $(jobs -p)"
"""The line that ends the devices of a page."""
END_S: Final = 60.0
"""How long they may take."""
END: Final = "--- end of block"
"""A session prints this line and the status after each block."""
START: Final = """set -eo pipefail
make() { command make --old-file .venv/.installed --old-file .venv-device/.installed "$@"; }
"""
"""The environments are those of the checkout that runs the tests: no page installs into them."""
PYTHON: Final = f"""
import json, linecache, sys, traceback
sys.path.insert(0, "")
for line in sys.stdin:
    name, code = json.loads(line)
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    try:
        exec(compile(code, name, "exec"), globals())
        status = 0
    except SystemExit as exc:
        status = exc.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    print("{END}", status, flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fence of a page.

    Attributes:
        page: The path of the page from the root of the repository.
        line: The line of its first line of code, from 1.
        language: The word after the back-ticks, or "".
        title: The title of the fence, or "".
        marker: The text of the comment in front of it, or "".
        code: Its lines.
    """

    page: str
    line: int
    language: str
    title: str
    marker: str
    code: str

    @property
    def runs(self) -> bool:
        """Whether the code of this block must succeed."""
        return self.language in LANGUAGES and not self.title and not self.marker.startswith(NOT_RUN)


def blocks_of(page: str, root: Path = ROOT) -> list[Block]:
    """Return the fences of a page, by its path from ``root``, in their order."""
    text = (root / page).read_text()
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start(4)) + 1,
            language=match[2],
            title=match[3] or "",
            marker=match[1] or "",
            code=match[4],
        )
        for match in BLOCK.finditer(text)
    ]


class _Session:
    """A process that runs one block after the other, and prints the status of each."""

    def __init__(self, command: list[str], folder: Path, env: dict[str, str]) -> None:
        self._errors = folder / f".errors-{Path(command[0]).name}"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=env,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    def send(self, text: str) -> None:
        """Write lines to the process; if it has ended, ``run`` reports that."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(text)
            self._process.stdin.flush()

    def run(self, block: Block, text: str) -> str:
        """Run a block, and return its standard output; a failure is an AssertionError with all that it printed."""
        assert self._process.stdout is not None
        self.send(text)
        output = ""
        for line in self._process.stdout:
            head, end, status = line.partition(END)
            output += head
            if end:
                assert status.strip() == "0", self._failure(block, f"status {status.strip()}", output)
                return output
        raise AssertionError(self._failure(block, "the session ended", output))

    def programs(self) -> list[str]:
        """Return the command lines of the processes that the blocks have started and that still run."""
        command = ["ps", "-o", "args=", "-s", str(self._process.pid)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()

    def _failure(self, block: Block, what: str, output: str) -> str:
        return f"{block.page}:{block.line}: {what}\n{output}{self._errors.read_text()}"

    def stop(self) -> None:
        """End the process and all that it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(timeout=10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        streams: tuple[IO[str] | None, ...] = (self._process.stdin, self._process.stdout)
        for stream in streams:
            if stream is not None:
                stream.close()


def _shell(block: Block) -> str:
    if not block.marker.startswith(OWN_TERMINAL):
        return f"{{\n{block.code}\n}} < /dev/null\necho '{END}' $?\n"
    text = block.marker.removeprefix(OWN_TERMINAL)
    log = f".terminal-{block.line}"
    return f"""{{
{block.code}
}} < /dev/null > {log} 2>&1 &
for _ in $(seq {int(START_S * 10)}); do
    grep -qF -- {shlex.quote(text)} {log} 2> /dev/null && break
    sleep 0.1
done
grep -qF -- {shlex.quote(text)} {log} || {{ cat {log}; false; }}
echo '{END}' $?
"""


@contextmanager
def _sessions(folder: Path) -> Iterator[tuple[_Session, _Session]]:
    programs = Path(sys.executable).parent
    # A page that calls `make` must not get the arguments of the `make` that runs the tests.
    inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "VIRTUAL_ENV")}
    env = inherited | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
    shell = _Session(["bash", "--noprofile", "--norc"], folder, env)
    python = _Session([sys.executable, "-c", PYTHON], folder, env)
    try:
        shell.send(START)
        yield shell, python
    finally:
        python.stop()
        shell.stop()


def run_page(page: str, folder: Path, root: Path = ROOT) -> dict[int, str]:
    """Run the blocks of a page in a folder.

    Args:
        page: The path of the page from ``root``.
        folder: A copy of a checkout, which is the working directory of each block.
        root: The root of the repository.

    Returns:
        The output of each block that ran, by its line.

    Raises:
        AssertionError: If a block fails or prints another text than the page; with its line and its output.
    """
    outputs: dict[int, str] = {}
    last = ""
    with _sessions(folder) as (shell, python):
        for block in blocks_of(page, root):
            if block.title == OUTPUT:
                assert last == block.code, f"{page}:{block.line}: got\n{last}expected\n{block.code}"
            elif block.title:
                path = folder / block.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.code)
            elif block.runs:
                if block.language == "sh":
                    last = shell.run(block, _shell(block))
                else:
                    last = python.run(block, json.dumps([f"{page}:{block.line}", block.code]) + "\n")
                outputs[block.line] = last
                if STOP in block.code:
                    _wait_for_end(shell, block)
    return outputs


def _wait_for_end(shell: _Session, block: Block) -> None:
    """Wait until the devices of a page have ended. The coordinator runs in what the page calls another terminal."""
    deadline = time.monotonic() + END_S
    while devices := [line for line in shell.programs() if " join " in line]:
        assert time.monotonic() < deadline, f"{block.page}:{block.line}: still runs: {devices}"
        time.sleep(0.1)
