"""A job of the evaluating process and its reply: one line of JSON each.

The job names files and Chunks, so that the coordinator sends no parameters and needs no memory for them.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from fanin.protos.messages import BundleRef, Version
from fanin.protos.wire import from_proto, to_proto
from fanin.v1 import fleet_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationJob:
    """A job.

    Attributes:
        blobs: The folder with the coordinator's Chunks.
        data: The file of the data set.
        bundle: The Bundle.
        best: The metric that ranks Versions.
        metrics: The names of further metrics.
        sets: The files of further data sets by their names in the Plan.
        version: The Version to evaluate. None to check the data set: all examples, and one batch with Version 0.
        measures: Whether ranges of activations are measured: for a Version instead of the evaluation, else after it.
    """

    blobs: Path
    data: Path
    bundle: BundleRef
    best: str
    metrics: tuple[str, ...] = ()
    sets: Mapping[str, Path] = field(default_factory=dict)
    version: Version | None = None
    measures: bool = False

    def to_line(self) -> bytes:
        """Return the job as a line."""
        version = None if self.version is None else _text(to_proto(self.version, fleet_pb2.Version).SerializeToString())
        bundle = _text(to_proto(self.bundle, fleet_pb2.BundleRef).SerializeToString())
        row = {
            "blobs": str(self.blobs),
            "data": str(self.data),
            "bundle": bundle,
            "best": self.best,
            "metrics": self.metrics,
            "sets": {name: str(path) for name, path in self.sets.items()},
            "version": version,
            "measures": self.measures,
        }
        return json.dumps(row).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Return the job of a line."""
        row = json.loads(line)
        version = row["version"]
        return cls(
            blobs=Path(row["blobs"]),
            data=Path(row["data"]),
            bundle=from_proto(BundleRef, fleet_pb2.BundleRef.FromString(base64.b64decode(row["bundle"]))),
            best=row["best"],
            metrics=tuple(row["metrics"]),
            sets={name: Path(path) for name, path in row["sets"].items()},
            measures=row["measures"],
            version=None
            if version is None
            else from_proto(Version, fleet_pb2.Version.FromString(base64.b64decode(version))),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReply:
    """The reply to a job.

    Attributes:
        values: The metrics by name, finite.
        score: The value that ranks Versions, larger is better.
        num_examples: Examples of the data set.
        data_sha256: The digest of the file. With sets, the digest of the digests of all files.
        runtime: The inference library and its version.
        seconds: Duration of the evaluation.
        ranges: The ranges of the activations, float32 in base64; "" if they are not measured.
        problem: Why there are no metrics; "" if there are.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    score: float = 0.0
    num_examples: int = 0
    data_sha256: str = ""
    runtime: str = ""
    seconds: float = 0.0
    ranges: str = ""
    problem: str = ""

    def to_line(self) -> bytes:
        """Return the reply as a line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Return the reply of a line. Raises ValueError or TypeError if it is none."""
        return cls(**json.loads(line))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
