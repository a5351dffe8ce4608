"""The children of ``edge.py``: the devices' environments, and processes there that do what they are told, in turn."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Final

ROOT: Final = Path(__file__).parents[1]
BENCHMARKS: Final = ROOT / "benchmarks"
SOURCE_ROOTS: Final = ("server", "clients", "edge", "datacenter", "protos")
ENVIRONMENTS: Final = MappingProxyType(
    {"onnx": ".venv-device", "litert": ".venv-device-litert", "tflite": ".venv-device-tflite"}
)
EAGER: Final = "eager"
WORKING_TREE: Final = MappingProxyType(
    {"PYTHONPATH": os.pathsep.join(str(ROOT / root) for root in SOURCE_ROOTS), "OMP_NUM_THREADS": "1"}
)
"""So that children run what stands here, and not the wheel that their environment has; on one thread."""
INSTALLERS: Final = ("pip", "setuptools", "wheel", "_distutils_hack", "pkg_resources", "distutils-precedence.pth")
WARM_UP: Final = 5
NUM_ROUNDS: Final = 6
KINDS: Final = ("train", "evaluate", "predict_one", "predict_batch")
Row = dict[str, object]


def python_of(runtime: str) -> Path:
    """The Python of the environment that has this runtime and little else."""
    return ROOT / ENVIRONMENTS[runtime] / "bin" / "python"


def make_environments(runtimes: Sequence[str]) -> None:
    """Make the devices' environments, if one is missing."""
    if not all(python_of(runtime).exists() for runtime in runtimes):
        subprocess.run(["make", "--silent", "devices"], cwd=ROOT, check=True, stdout=sys.stderr)


def installed_mb(runtime: str) -> Row:
    """What the environment's packages take: all of them, and without what only installed them and bytecode."""
    (packages,) = python_of(runtime).parents[1].glob("lib/python*/site-packages")
    everything = sum(path.lstat().st_size for path in packages.rglob("*") if path.is_file())
    needed = 0
    for entry in packages.iterdir():
        if not entry.name.startswith(INSTALLERS):
            paths = [entry] if entry.is_file() else entry.rglob("*")
            needed += sum(path.lstat().st_size for path in paths if path.is_file() and path.suffix != ".pyc")
    return {"installed_mb": everything / 1e6, "installed_without_installer_and_bytecode_mb": needed / 1e6}


def run_in(python: Path, code: str) -> str:
    """What a line of Python writes there."""
    done = subprocess.run([str(python), "-c", code], env=os.environ | WORKING_TREE, capture_output=True, text=True)
    done.check_returncode()
    return done.stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A process that took its first train step; ``start_up_ms`` after it was started."""

    process: subprocess.Popen[str]
    start_up_ms: float
    runtime: str

    def ask(self, what: str, num: int = 0) -> Row:
        """What it says to one question."""
        assert self.process.stdin is not None, "opened with a pipe"
        self.process.stdin.write(json.dumps({"do": what, "num": num}) + "\n")
        self.process.stdin.flush()
        return _answer(self.process)

    def timed_ms(self, what: str, num: int) -> list[float]:
        """What each of ``num`` calls took."""
        found = self.ask(what, num)["ms"]
        assert isinstance(found, list)
        return found


@contextmanager
def child(command: Sequence[str]) -> Iterator[Child]:
    """A child that has started; the end of its input ends it."""
    started_s = time.monotonic()
    process = subprocess.Popen(
        list(command), env=os.environ | WORKING_TREE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        first = _answer(process)
        # One clock for all processes of a machine: Linux's monotonic one counts from its start.
        start_up_ms = 1000 * (float(str(first["first_step_s"])) - started_s)
        yield Child(process=process, start_up_ms=start_up_ms, runtime=str(first["runtime"]))


def device_command(runtime: str, bundle: Path, publisher: str, examples: Path) -> list[str]:
    """``edge_device.py`` in the runtime's environment."""
    return [str(python_of(runtime)), str(BENCHMARKS / "edge_device.py"), runtime, str(bundle), publisher, str(examples)]


def eager_command(model: str) -> list[str]:
    """``edge_eager.py`` here."""
    return [sys.executable, str(BENCHMARKS / "edge_eager.py"), model]


def measure_in_turn(commands: dict[str, list[str]], num_steps: int, num_starts: int) -> dict[str, Row]:
    """Everything that is timed, for each command by name, the first of which is what others are compared with.

    All children live at once, and one works at a time: in each of NUM_ROUNDS rounds each takes its share of the
    steps, the first of the last round first, so that whatever else the machine does is as bad for all of them.
    """
    starts = {name: [] for name in commands}
    for _ in range(num_starts - 1):
        for name, command in commands.items():
            with child(command) as started:
                starts[name].append(started.start_up_ms)
    with ExitStack() as stack:
        children = {name: stack.enter_context(child(command)) for name, command in commands.items()}
        rows: dict[str, Row] = {}
        for name, each in children.items():
            taken = [*starts[name], each.start_up_ms]
            rows[name] = {"runtime": each.runtime, "start_up_ms": median(taken), "start_up_samples_ms": taken}
        for kind in KINDS:
            for name, samples in _timed(children, kind, num_steps).items():
                rows[name][kind] = {"median_ms": median(samples), "min_ms": min(samples), "samples_ms": samples}
            if kind == "train":
                for name, each in children.items():
                    rows[name]["peak_rss_training_mb"] = each.ask("memory")["peak_rss_mb"]
        for name, each in children.items():
            rows[name]["peak_rss_mb"] = each.ask("memory")["peak_rss_mb"]
    return rows


def _timed(children: dict[str, Child], kind: str, num_steps: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in children}
    for each in children.values():
        each.timed_ms(kind, WARM_UP)
    names = list(children)
    for number in range(NUM_ROUNDS):
        share = num_steps * (number + 1) // NUM_ROUNDS - num_steps * number // NUM_ROUNDS
        at = number % len(names)
        for name in names[at:] + names[:at]:
            samples[name] += children[name].timed_ms(kind, share)
    return samples


def _answer(process: "subprocess.Popen[str]") -> Row:
    assert process.stdout is not None, "opened with a pipe"
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} ended with status {process.wait()}; what it said stands above")
    found = json.loads(line)
    assert isinstance(found, dict)
    return found
