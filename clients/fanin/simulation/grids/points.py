"""A point of a study: a method with values of the grid and a seed. Each has a file of its own, named by its digest.

The digest is that of everything that the result depends on: the Plan, the seed, the App with its code, the examples of
the clients, the test sets and the other settings. So a file is never taken for another point. It is written when the
point has ended, and replaced as a whole.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from fanin.edge.files import replace_file
from fanin.protos.plans import Plan
from fanin.protos.wire import to_proto
from fanin.v1 import plan_pb2

FORMAT: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPoint:
    """One simulation of a study.

    Attributes:
        data: The name of its data set; "" if the study has one without a name.
        method: The name of the method.
        values: The values of the grid, by key of the Plan.
        seed: The seed.
        plan_sha256: The digest of its Plan.
        seconds: Its duration on this machine.
        error: Why it failed; "" if it is complete. It then has the Rounds before the failure.
        table: The Rounds as columns by name, as ``Result.columns`` returns them.
    """

    data: str = ""
    method: str
    values: Mapping[str, object]
    seed: int
    plan_sha256: str
    seconds: float = 0.0
    error: str = ""
    table: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def columns(self) -> Mapping[str, Sequence[float]]:
        """Return the Rounds as columns by name."""
        return self.table

    def last(self, column: str) -> float:
        """Return the last finite value of a column; NaN without one."""
        return next((value for value in reversed(self.table.get(column, ())) if math.isfinite(value)), math.nan)

    def first_round(self, column: str, target: float, higher_is_better: bool) -> float:
        """Return the first Round whose value of a column reaches a target; infinity if none does."""
        pairs = zip(self.table.get("round", ()), self.table.get(column, ()), strict=False)
        reached = (number for number, value in pairs if (value >= target if higher_is_better else value <= target))
        return next(reached, math.inf)

    def write(self, path: Path) -> None:
        """Write the point."""
        replace_file(path, json.dumps({"format": FORMAT, **asdict(self)}).encode())

    @classmethod
    def read(cls, path: Path) -> "StudyPoint | None":
        """Return the point of a file; None if there is none, it is damaged, or of another format."""
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            return cls(**row) if row.pop("format") == FORMAT else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


def plan_digest(plan: Plan) -> str:
    """Return the SHA-256 of a Plan."""
    return hashlib.sha256(to_proto(plan, plan_pb2.Plan).SerializeToString(deterministic=True)).hexdigest()
