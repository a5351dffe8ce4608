"""Child processes of ``edge.py`` in the devices' environments, which run one command at a time, in turn."""

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
"""Makes children run the sources of this tree instead of the installed wheel, on one thread."""
INSTALLERS: Final = ("pip", "setuptools", "wheel", "_distutils_hack", "pkg_resources", "distutils-precedence.pth")
WARM_UP: Final = 5
NUM_ROUNDS: Final = 6
KINDS: Final = ("train", "evaluate", "predict_one", "predict_batch")
Row = dict[str, object]


def python_of(runtime: str) -> Path:
    """Return the Python of the device environment of a runtime."""
    return ROOT / ENVIRONMENTS[runtime] / "bin" / "python"


def make_environments(runtimes: Sequence[str]) -> None:
    """Create the devices' environments if one is missing."""
    if not all(python_of(runtime).exists() for runtime in runtimes):
        subprocess.run(["make", "--silent", "devices"], cwd=ROOT, check=True, stdout=sys.stderr)


def installed_mb(runtime: str) -> Row:
    """Return the size of the environment's packages in MB: all, and without installers and bytecode."""
    (packages,) = python_of(runtime).parents[1].glob("lib/python*/site-packages")
    everything = sum(path.lstat().st_size for path in packages.rglob("*") if path.is_file())
    needed = 0
    for entry in packages.iterdir():
        if not entry.name.startswith(INSTALLERS):
            paths = [entry] if entry.is_file() else entry.rglob("*")
            needed += sum(path.lstat().st_size for path in paths if path.is_file() and path.suffix != ".pyc")
    return {"installed_mb": everything / 1e6, "installed_without_installer_and_bytecode_mb": needed / 1e6}


def run_in(python: Path, code: str) -> str:
    """Run a line of Python in an environment. Return its output."""
    completed = subprocess.run([str(python), "-c", code], env=os.environ | WORKING_TREE, capture_output=True, text=True)
    completed.check_returncode()
    return completed.stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A process that has run its first train step, ``start_up_ms`` after its start."""

    process: subprocess.Popen[str]
    start_up_ms: float
    runtime: str

    def ask(self, what: str, num: int = 0) -> Row:
        """Send one request. Return the answer."""
        assert self.process.stdin is not None, "opened with a pipe"
        self.process.stdin.write(json.dumps({"do": what, "num": num}) + "\n")
        self.process.stdin.flush()
        return _answer(self.process)

    def timed_ms(self, what: str, num: int) -> list[float]:
        """Return the milliseconds of each of ``num`` calls."""
        times_ms = self.ask(what, num)["ms"]
        assert isinstance(times_ms, list)
        return times_ms


@contextmanager
def child(command: Sequence[str]) -> Iterator[Child]:
    """Start a child. Closing its input ends it."""
    started_s = time.monotonic()
    process = subprocess.Popen(
        list(command), env=os.environ | WORKING_TREE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        first = _answer(process)
        # Linux's monotonic clock counts from the start of the machine, so all processes share it.
        start_up_ms = 1000 * (float(str(first["first_step_s"])) - started_s)
        yield Child(process=process, start_up_ms=start_up_ms, runtime=str(first["runtime"]))


def device_command(runtime: str, bundle: Path, publisher: str, examples: Path) -> list[str]:
    """Return the command of ``edge_device.py`` in the environment of a runtime."""
    return [str(python_of(runtime)), str(BENCHMARKS / "edge_device.py"), runtime, str(bundle), publisher, str(examples)]


def eager_command(model: str) -> list[str]:
    """Return the command of ``edge_eager.py`` in this environment."""
    return [sys.executable, str(BENCHMARKS / "edge_eager.py"), model]


def measure_in_turn(commands: dict[str, list[str]], num_steps: int, num_starts: int) -> dict[str, Row]:
    """Time every operation in each child, by name. The first child is the reference of the others.

    All children are alive at once, and one works at a time. In each of NUM_ROUNDS rounds each child runs its share of
    the steps, in alternating order, so that other load on the machine affects all children equally.
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
            start_ups_ms = [*starts[name], each.start_up_ms]
            rows[name] = {
                "runtime": each.runtime,
                "start_up_ms": median(start_ups_ms),
                "start_up_samples_ms": start_ups_ms,
            }
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
        raise RuntimeError(f"{process.args} ended with status {process.wait()}; its error output is above")
    message = json.loads(line)
    assert isinstance(message, dict)
    return message
