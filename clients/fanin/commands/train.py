"""``fanin train``: a training job on as many processes as its mesh has ranks.

The processes run on this machine. With ``--nodes`` they run on several machines, and the same command starts on each.
"""

import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from json import loads
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fanin import datacenter
from fanin.commands.console.terminal import JsonOption, prints_text, run_command, write_json
from fanin.commands.console.usage import wrong_usage
from fanin.datacenter.config.records import record_of
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.watch.meters import StepRecord
from fanin.datacenter.watch.sinks import StatusLine
from fanin.protos.errors import Conflict, InvalidInput
from fanin.protos.texts import counted

if TYPE_CHECKING:
    from fanin.datacenter import Elastic, TrainConfig
    from fanin.datacenter.files.jobfiles import HeldOutEvaluation, Metrics

SHOWN_EVERY_S: Final = 0.5
TOGETHER_S: Final = 1.0
"""Seconds within which two signals count as one; a user who repeats the signal on purpose takes longer."""
NODES: Final = re.compile(r"(\d{1,6})(?::(\d{1,6}))?\Z", re.ASCII)


def main(argv: Sequence[str]) -> int:
    """Run ``fanin train``."""
    return run_command(train, argv)


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="Model, data and training settings.")],
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh", help="Ranks along each axis, such as pp=2,dp_shard=2,tp=2, or none; default: the config."
        ),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", help="Processes on each machine; default: the ranks of the mesh.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Maximum number of steps; default: the config.")] = None,
    schedule: Annotated[str | None, typer.Option("--schedule", help="The pipeline's schedule.")] = None,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", help="Number of microbatches a step in the pipeline.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="auto (one GPU a process, if there are GPUs), cpu or cuda.")
    ] = None,
    checkpoints: Annotated[Path | None, typer.Option("--checkpoints", help="Folder of the job's checkpoints.")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option("--checkpoint-every", help="Steps between two checkpoints; default: only at the end.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Resume from the newest checkpoint in this folder, on any mesh.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE.safetensors",
            help="Write the final parameters to this file. Its folder is checked before the training starts.",
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option("--restarts", help="How often the job restarts from its checkpoint after it lost a rank.")
    ] = 0,
    nodes: Annotated[
        str,
        typer.Option(
            "--nodes", metavar="MIN:MAX", help="Minimum and maximum number of machines, such as 1:4; the mesh adapts."
        ),
    ] = "1",
    endpoint: Annotated[
        str,
        typer.Option("--endpoint", metavar="HOST:PORT", help="Rendezvous address, on a machine that stays in the job."),
    ] = "",
    state: Annotated[
        Path | None,
        typer.Option(
            "--state", help="Folder for the job's files and logs, shared by all machines; default: a temporary one."
        ),
    ] = None,
    json: JsonOption = "",
) -> None:
    """Train a model with any mix of data, tensor and pipeline parallelism; the numbers equal those of one process."""
    # Importing torch takes seconds: it is loaded once the options are known to be good.
    with wrong_usage():
        bounds = _bounds(nodes)
        if mesh:
            MeshShape.parse(mesh)
    from fanin.datacenter.config.train_config import read_train_config

    with wrong_usage():
        elastic = datacenter.Elastic(max_restarts=restarts, endpoint=endpoint, **bounds)
    job = read_train_config(
        config,
        {
            "parallel": _set_options(mesh=mesh, schedule=schedule, microbatches=microbatches, device=device),
            "stop": _set_options(steps=steps),
            "checkpoints": {
                **{
                    name: str(path)
                    for name, path in _set_options(folder=checkpoints, resume=resume, weights=out).items()
                },
                **_set_options(every=checkpoint_every),
            },
        },
    )
    metrics = _metrics_of(job, nproc, state, elastic)
    if json:
        write_json(json, metrics_row(metrics, job))
    if prints_text(json):
        sys.stdout.write(_text(metrics, job))


def _bounds(nodes: str) -> dict[str, int]:
    """Parse the minimum and maximum number of machines. Raises InvalidInput."""
    match = NODES.match(nodes)
    if match is None:
        raise InvalidInput(
            f"--nodes: got {nodes!r}, expected the fewest and the most machines, such as 1:4", code="FN-1008"
        )
    return {"min_nodes": int(match[1]), "max_nodes": int(match[2] or match[1])}


class Terminated(Exception):
    """This process received SIGTERM."""


def terminator(now: Callable[[], float] = monotonic) -> Callable[[int, FrameType | None], None]:
    """Return a handler of SIGTERM that raises Terminated.

    A second signal within a second of the first is ignored: coreutils' ``timeout`` signals a child and its group.
    """
    first_s: list[float] = []

    def terminated(number: int, frame: FrameType | None) -> None:
        first_s.append(now())
        if len(first_s) == 1 or first_s[-1] - first_s[0] >= TOGETHER_S:
            raise Terminated

    return terminated


def _metrics_of(job: "TrainConfig", num_processes: int | None, state: Path | None, elastic: "Elastic") -> "Metrics":
    """Run a job and return its metrics; after SIGTERM those of the steps until then. The ranks save first."""
    from fanin.datacenter.files.jobfiles import is_complete, outcome_files, read_error, read_result

    with tempfile.TemporaryDirectory(prefix="fanin-train-") as scratch:
        # Several machines without a folder to share are an error of ``datacenter.train``.
        folder = Path(scratch) if state is None and not elastic.multi_machine else state
        # Files that exist already belong to an earlier job.
        before = set() if folder is None else outcome_files(folder)
        place = datacenter.Placement(num_processes=num_processes, folder=folder, elastic=elastic)
        handler = signal.signal(signal.SIGTERM, terminator())
        try:
            with _shown(folder, job, num_processes, elastic):
                return datacenter.train(job, placement=place).metrics
        except Terminated:
            new = set() if folder is None else outcome_files(folder) - before
            if folder is not None and is_complete(new):
                return read_result(folder).metrics
            error = read_error(folder) if folder is not None and new else None
            raise error or Conflict(
                "stopped before the first result; if the job writes checkpoints, run the same command to resume",
                code="FN-1055",
            ) from None
        finally:
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _shown(folder: Path | None, job: "TrainConfig", num_processes: int | None, elastic: "Elastic") -> Iterator[None]:
    """Show the device, and the latest row that the first rank has written, on a terminal."""
    from fanin.datacenter.files.jobfiles import ROWS_FILE
    from fanin.datacenter.jobs.launch import ranks_per_machine
    from fanin.datacenter.ranks.devices import describe_device, device_type

    if folder is None or not sys.stderr.isatty():
        yield
        return
    path = folder / ROWS_FILE
    num_processes = ranks_per_machine(job, elastic) if num_processes is None else num_processes
    device = describe_device(device_type(job.parallel.device, num_processes))
    sys.stderr.write(f"processes on this machine: {num_processes}, on {device}\n")
    end, progress = threading.Event(), StatusLine(sys.stderr, job.stop.steps)

    def follow() -> None:
        place = 0
        while not end.wait(SHOWN_EVERY_S):
            if path.exists():
                with path.open("rb") as file:
                    file.seek(place)
                    complete = file.read().rpartition(b"\n")[0]
                if complete:
                    place += len(complete) + 1
                    progress.write(record_of(StepRecord, loads(complete.rpartition(b"\n")[2]), str(path)))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        progress.close()


def metrics_row(metrics: "Metrics", config: "TrainConfig") -> dict[str, object]:
    """Return the JSON row of a job; the keys are part of the command's contract."""
    trained = metrics.trained
    return {
        "loss": list(trained.losses),
        "mesh": str(metrics.mesh),
        "axes": metrics.mesh.sizes,
        "nproc": metrics.num_ranks,
        "device": metrics.device,
        f"{_unit(config)}_per_second": metrics.units_per_second,
        "peak_memory_bytes": metrics.peak_memory_bytes,
        "evaluations": [
            {
                "step": each.step,
                "train_loss": each.train_loss,
                "validation_loss": each.validation_loss,
                "validation_accuracy": each.validation_accuracy,
            }
            for each in trained.evaluated
        ],
        "best_evaluation": trained.best,
        "flat": trained.flat,
        "skipped": trained.skipped,
        "stopped": metrics.stopped,
        "skipped_checkpoints": list(metrics.skipped_checkpoints),
        "lost_history": metrics.lost_history,
        "seconds": metrics.train_s,
        "layer_times": list(metrics.layer_times),
        "stage_times": list(metrics.stage_times),
        "traffic": _traffic(metrics),
    }


def _traffic(metrics: "Metrics") -> dict[str, dict[str, int | None]] | None:
    """Return the bytes that the first rank sends in a step, by axis: counted, and predicted by the planner."""
    counted, predicted = metrics.bytes_by_axis, metrics.predicted_bytes_by_axis
    if counted is None:
        return None
    axes = dict.fromkeys((*counted, *(predicted or ())))
    return {
        axis: {
            "bytes": counted.get(axis, 0),
            "predicted_bytes": None if predicted is None else predicted.get(axis, 0),
        }
        for axis in axes
    }


def _balance(metrics: "Metrics") -> str:
    """Return a line about the balance of the pipeline's stages; empty unless it was cut by layer times."""
    times = metrics.stage_times
    if not sum(times):
        return ""
    shares = ", ".join(f"{time:.3g}" for time in times)
    return (
        f"stages by layer_times: {shares}; the slowest takes {max(times) * len(times) / sum(times):.2f} of the mean\n"
    )


def _skipped(metrics: "Metrics") -> str:
    """Return a line about the skipped steps; empty if there are none."""
    num = metrics.trained.skipped
    return f"{num} of them skipped: their loss or gradients were not finite\n" if num else ""


def _traffic_text(metrics: "Metrics") -> str:
    """Return a line with the counted and the predicted traffic; empty if none was counted."""
    traffic = _traffic(metrics)
    if not traffic:
        return ""
    parts = []
    for axis, each in traffic.items():
        expected = each["predicted_bytes"]
        parts.append(f"{axis} {each['bytes']} (predicted: {'no formula' if expected is None else expected})")
    return f"bytes that a step of the first rank sends: {', '.join(parts)}\n"


def _train_loss(evaluation: "HeldOutEvaluation") -> str:
    return "all steps skipped" if evaluation.train_loss is None else f"loss {evaluation.train_loss:.4f}"


def _text(metrics: "Metrics", config: "TrainConfig") -> str:
    from fanin.datacenter.ranks.devices import describe_device

    trained = metrics.trained
    lines = [
        f"step {each.step}: {_train_loss(each)}, held out {each.validation_loss:.4f} "
        f"(right: {each.validation_accuracy:.4f})\n"
        for each in trained.evaluated
    ]
    lines += [f"skipped a damaged checkpoint: {fault}\n" for fault in metrics.skipped_checkpoints]
    if metrics.lost_history:
        lines.append(f"lost the losses and evaluations before the resume: {metrics.lost_history}\n")
    return "".join(lines) + (
        f"{counted(len(trained.losses), 'step')} on mesh {metrics.mesh} in {metrics.train_s:.1f} s on "
        f"{describe_device(metrics.device)}, "
        f"{metrics.units_per_second:.0f} {_unit(config)} a second, {metrics.peak_memory_bytes / 1e6:.0f} MB at most\n"
        + _skipped(metrics)
        + _balance(metrics)
        + _traffic_text(metrics)
    )


def _unit(config: "TrainConfig") -> str:
    return "tokens" if not config.model.app or config.data.windows else "samples"


def _set_options(**options: object) -> dict[str, object]:
    """Return the options that the user set."""
    return {name: value for name, value in options.items() if value is not None}
