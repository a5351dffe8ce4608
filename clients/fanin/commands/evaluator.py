"""The process that evaluates Versions for a coordinator (``fanin.server.evaluation``), started by ``fanin serve``.

    python -m fanin.commands.evaluator

It reads jobs from standard input and writes replies to standard output, one line each. It ends with its input.
"""

import base64
import hashlib
import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.examples import Examples, calibration_part, model_examples
from fanin.clients.data.npz import read_npz
from fanin.commands.console.streams import configure_logging, inherited_format
from fanin.edge.metrics.metric import metrics_of
from fanin.edge.runtimes.available import open_format
from fanin.edge.runtimes.base import VersionValues
from fanin.edge.runtimes.measure import measure_data
from fanin.protos.errors import FaninError, InvalidInput, RuntimeMissing
from fanin.server.aggregation.parameters import load_version
from fanin.server.evaluation.jobs import EvaluationJob, EvaluationReply
from fanin.server.evaluation.metrics import evaluate_version, score_of
from fanin.server.runs.admission import open_bundle
from fanin.server.storage.blobs import FolderBlobs
from fanin.server.storage.disk import Durability
from fanin.server.storage.protocols.files import BlobReader

LOG = logging.getLogger("fanin.commands.evaluator")
LOWEST_PRIORITY: Final = 19
OOM_SCORE: Final = Path("/proc/self/oom_score_adj")
FIRST_TO_END: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutData:
    """A data set in memory, with the state and the digest of its file."""

    path: Path
    state: tuple[int, int, int]
    sha256: str
    examples: Examples


def open_chunks(folder: Path) -> BlobReader:
    """Open the folder with a coordinator's Chunks."""
    return FolderBlobs(folder, Durability.PROCESS)


def main(open_blobs: Callable[[Path], BlobReader] = open_chunks) -> None:
    """Carry out jobs until the input ends.

    Args:
        open_blobs: Opens the blobs of the coordinator. The argument is the folder ``blobs`` in that of its state.
    """
    configure_logging(logging.WARNING, inherited_format())
    _end_first()
    # The output of a library must not mix with the replies.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    evaluator = JobEvaluator(open_blobs)
    for line in _lines(sys.stdin.buffer):
        job = EvaluationJob.from_line(line)
        if not job.measures:
            _give_way()
        replies.write(evaluator.reply(job).to_line())


def _give_way() -> None:
    """Let the coordinator have the processors first. A Round waits for a measurement, but never for an evaluation."""
    with suppress(OSError):
        os.nice(LOWEST_PRIORITY)


def _end_first() -> None:
    """Let others have the memory: the kernel ends this process before them."""
    # Linux has this file. Elsewhere the processes are equal.
    with suppress(OSError):
        OOM_SCORE.write_text(f"{FIRST_TO_END}\n", encoding="utf-8")


def _lines(source: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of the input. Its end ends the process at once, also in the middle of a job."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in source:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield lines.get()


class JobEvaluator:
    """Carries out jobs. It keeps the last data set in memory."""

    def __init__(self, open_blobs: Callable[[Path], BlobReader] = open_chunks) -> None:
        self._open_blobs = open_blobs
        self._data: HeldOutData | None = None

    def reply(self, job: EvaluationJob) -> EvaluationReply:
        """Return the reply to a job. An error of any kind is the reply's problem, without the path of a file."""
        try:
            reply = self._evaluate(job) if job.version is None or not job.measures else EvaluationReply()
            return self._with_ranges(job, reply) if job.measures else reply
        except (FaninError, ValueError) as exc:
            problem = str(exc)
        except Exception as exc:  # Any error: the next job may succeed.
            LOG.exception("evaluation failed")
            # Its text may name files of this machine, and the problem reaches operators elsewhere.
            problem = f"{type(exc).__name__}; the coordinator's log has its text"
        for path in (job.data, *job.sets.values()):
            problem = problem.replace(str(path), path.name)
        return EvaluationReply(problem=problem)

    def _evaluate(self, job: EvaluationJob) -> EvaluationReply:
        began_s = time.monotonic()
        blobs = self._open_blobs(job.blobs)
        bundle = open_bundle(job.bundle, blobs)
        # onnxruntime if it is installed and the Bundle has graphs for it.
        runtime = open_format(bundle.manifest.signatures["infer"].graphs)
        metrics = metrics_of(job.metrics)
        if job.version is None:
            version = VersionValues(parameters=bundle.initial_parameters())
        else:
            version = load_version(blobs, job.version, bundle.manifest)
        values, digests, num_examples = dict[str, float](), list[str](), 0
        for name, path in {"": job.data, **job.sets}.items():
            try:
                data = self._open(path)
                examples = model_examples(data.examples, bundle, runtime)
                if job.version is None:
                    examples = examples.take(np.arange(min(len(examples), bundle.manifest.batch_size)))
                batches = batches_in_order(examples, bundle.manifest.batch_size, bundle.manifest.lengths)
                evaluation = evaluate_version(runtime, bundle, version, batches, metrics)
            except (FaninError, ValueError) as exc:
                if not name:
                    raise
                raise InvalidInput(f"evaluation.sets: {name}: {exc}", code="FN-1847") from exc
            num_examples = num_examples or evaluation.num_examples
            digests.append(data.sha256)
            values |= {f"{name}.{key}" if name else key: value for key, value in evaluation.values.items()}
        score = score_of(job.best, values, metrics)
        if job.version is not None and math.isnan(score):
            raise InvalidInput(
                f"metric {job.best!r}: has no value on this data set, expected one for evaluation.best; use data with "
                "targets of several classes, or another metric",
                code="FN-1892",
            )
        return EvaluationReply(
            values={name: value for name, value in values.items() if not math.isnan(value)},
            score=0.0 if math.isnan(score) else score,
            num_examples=num_examples,
            # Another file of any set makes other results, which are not compared for the best Version.
            data_sha256=digests[0] if not job.sets else hashlib.sha256("".join(digests).encode()).hexdigest(),
            runtime=runtime.name,
            seconds=time.monotonic() - began_s,
        )

    def _with_ranges(self, job: EvaluationJob, reply: EvaluationReply) -> EvaluationReply:
        """Return a reply with the ranges of the activations of all formats, for the Version or the initial parameters.

        Raises:
            RuntimeMissing: A format has no runtime here.
        """
        blobs = self._open_blobs(job.blobs)
        bundle, data = open_bundle(job.bundle, blobs), self._open(job.data)
        manifest = bundle.manifest
        version = None if job.version is None else load_version(blobs, job.version, manifest).parameters
        parameters = bundle.completed(bundle.initial_parameters() if version is None else version)
        some, runtimes = calibration_part(data.examples), []
        ranges = np.full((len(manifest.activations), 2), np.nan, np.float32)
        for graph_format in sorted({row.graph_format for row in manifest.activations}):
            try:
                runtime = open_format([graph_format])
            except RuntimeMissing as exc:
                raise RuntimeMissing(
                    f"int8.ranges = 'data' measures the activations of every graph format of the bundle: {exc}. Or "
                    "export the App without this format, or set int8.ranges to 'devices'",
                    code=exc.code,
                ) from exc
            examples = model_examples(some, bundle, runtime)
            measured = measure_data(
                runtime, bundle, parameters, batches_in_order(examples, manifest.batch_size, manifest.lengths)
            )
            ranges = np.where(np.isnan(measured), ranges, measured)
            runtimes.append(runtime)
        return replace(
            reply,
            num_examples=len(some),
            data_sha256=data.sha256,
            runtime=", ".join(runtime.name for runtime in runtimes),
            ranges=base64.b64encode(ranges.astype("<f4").tobytes()).decode(),
        )

    def _open(self, path: Path) -> HeldOutData:
        """Return a data set, read again if its file has changed. Raises InvalidInput."""
        state = _state(path)
        if self._data is None or state is None or (self._data.path, self._data.state) != (path, state):
            # Two large data sets are not in memory at a time.
            self._data = None
            examples = read_npz(path)
            assert state is not None, "only an existing file can be read"
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if _state(path) != state:
                raise InvalidInput(
                    f"{path}: was changed while it was read; write another file and rename it", code="FN-1053"
                )
            self._data = HeldOutData(path=path, state=state, sha256=sha256, examples=examples)
        return self._data


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


if __name__ == "__main__":
    main()
