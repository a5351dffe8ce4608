"""Evaluations of Versions by the coordinator, on held-out data that its operator registered."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from fanin.protos.errors import InvalidInput

MAX_PAGE_EVALUATIONS: Final = 500
"""Evaluations on one page. Each has some 500 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionEvaluation:
    """Evaluation of one Version.

    Attributes:
        version: The Version's number.
        data: The name of the data set.
        data_sha256: The digest of its file; "" if the file could not be read.
        num_examples: Examples of the data set.
        values: The metrics by name. Names that end in ``_int8`` are of the int8 model, the others of the float model.
        runtime: The inference library and its version.
        seconds: Duration of the evaluation.
        time: Its end, in seconds since the Unix epoch.
        problem: Reason why the Version could not be evaluated; "" if it was evaluated.
    """

    version: int
    data: str
    data_sha256: str = ""
    num_examples: int = 0
    values: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    runtime: str = ""
    seconds: float = 0.0
    time: float
    problem: str = ""

    def __post_init__(self) -> None:
        for name, value in self.values.items():
            if not math.isfinite(value):
                raise InvalidInput(
                    f"evaluation of version {self.version}: got {name} {value}, expected a finite number",
                    code="FN-0157",
                )
