"""A tensor of an exported graph against eager torch's, by the norm of its error.

A tensor may differ by a share of its own norm, and by a multiple of torch's own rounding error. That error has three
estimates:

- The same computation in float64. It is the only bound for a gradient that is zero except for rounding, such as that
  of a bias before a norm.
- The same computation from neighbors, whose parameters differ by one or some units in the last place. They reveal a
  value at the kink of a ReLU or of a maximum, which float64 may not. Another order of additions moves such a value to
  the other side, so its gradient differs by complete terms. Neighbors cost passes of torch, so they run only for a
  tensor that differs.
- A floor, relative to the largest tensor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from fanin.edge.export.app.inputs.named import call_module
from fanin.edge.export.graph.examples import example_batch
from fanin.edge.export.module.prepare import Prepared
from fanin.edge.export.verification.eager import FLOOR, UNKNOWN_FLOOR
from fanin.edge.tensors import Array
from fanin.protos.errors import UnsupportedModel

TOLERANCE: Final = 1e-4
"""L2 norm of a tensor's error relative to its norm: above other orders of additions, below a wrong factor."""
ROUNDING_TOLERANCE: Final = 0.1
"""``TOLERANCE`` for quantization-aware training: an activation between two levels may round either way, and each
such activation changes a gradient by a full level."""
LOSS_TOLERANCE: Final = 1e-4
"""Relative error of a loss. It is a hundred times the effect of the order of additions."""
ROUNDED_LOSS_TOLERANCE: Final = 2e-2
"""The same for quantization-aware training."""
NOISE_FACTOR: Final = 20.0
"""A value may differ by this many times torch's own rounding error, in addition to the tolerance."""
MAX_KINK_SHARE: Final = 0.05
"""Largest error that neighbors allow, as a share of a tensor's norm. It is far below the error of a wrong factor or of
a lost term."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Triple:
    """A tensor of the graph, the same tensor of eager torch, and that of torch in float64, if it runs in it.

    The norms are computed one at a time in float64, and no copy is kept: a model may have 100 million parameters.

    Attributes:
        actual: The tensor of the graph.
        expected: That of eager torch in float32.
        exact: That of eager torch in float64; None for a module that does not run in it.
        before: Its values before the step, if its change is compared.
        kept: The values that are compared; None for all.
    """

    actual: Array
    expected: Array
    exact: Array | None
    before: Array | float = 0.0
    kept: npt.NDArray[np.bool_] | None = None

    @property
    def size(self) -> float:
        """Norm of torch's tensor, or of its change."""
        return _norm(self._part(np.subtract(self.expected, self.before, dtype=np.float64)))

    @property
    def error(self) -> float:
        """Norm of the difference between the graph and torch."""
        return _norm(self._part(np.subtract(self.actual, self.expected, dtype=np.float64)))

    @property
    def noise(self) -> float:
        """Norm of torch's own rounding error; 0.0 if it is unknown."""
        return 0.0 if self.exact is None else self.distance(np.subtract(self.exact, self.before, dtype=np.float64))

    def distance(self, change: npt.NDArray[np.float64]) -> float:
        """Return the norm of the difference between torch's tensor, or its change, and another one."""
        return _norm(self._part(np.subtract(self.expected, self.before, dtype=np.float64) - change))

    def _part(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return values if self.kept is None else values[self.kept]


Triples = Mapping[str, Triple]
Neighbors = Callable[[], Sequence[Mapping[str, npt.NDArray[np.float64]]]]
"""Returns the tensors of eager torch from parameters that differ by rounding, by name."""


def check_tensors(prepared: Prepared, what: str, triples: Triples, neighbors: Neighbors) -> None:
    """Compare each tensor of the graph with eager torch's by the norm of its error.

    Args:
        prepared: The App.
        what: Description of the compared tensors, with ``{}`` for the tensor's name.
        triples: The tensors by name, all of one unit.
        neighbors: Called if the float64 counterpart does not explain the difference of a tensor.

    Raises:
        UnsupportedModel: A tensor differs by more than rounding explains, or is not finite.
    """
    tolerance = ROUNDING_TOLERANCE if prepared.app.recipe.quantization_aware else TOLERANCE
    sizes = {name: row.size for name, row in triples.items()}
    largest = max(sizes.values(), default=0.0)
    for name, row in triples.items():
        floor = FLOOR if row.exact is not None else UNKNOWN_FLOOR
        error = row.error
        if not math.isfinite(sizes[name]):
            from fanin.edge.export.diagnosis.watched import KEEP_FINITE, first_not_finite

            call = partial(call_module, prepared.eager, example_batch(prepared)[0])
            where = first_not_finite(prepared.eager, call)
            raise UnsupportedModel(
                f"{prepared.what}: {what.format(name + _module_of(prepared, name))} is not finite in torch either"
                f"{f': {where}' if where else ''}, expected finite gradients; {KEEP_FINITE}",
                code="FN-0781",
            )
        allowed = tolerance * sizes[name] + NOISE_FACTOR * row.noise + floor * largest
        if not error <= allowed and math.isfinite(error):
            kinks = max((row.distance(near[name]) for near in neighbors()), default=0.0)
            allowed += min(NOISE_FACTOR * kinks, MAX_KINK_SHARE * sizes[name])
        if not error <= allowed:
            raise UnsupportedModel(
                f"{prepared.what}: {what.format(name + _module_of(prepared, name))} of the exported graph differs from "
                f"torch's by {error:.1e} (L2 norm), expected at most {allowed:.1e} (the norm of its own change or "
                f"value is {sizes[name]:.1e}); {advice(prepared)}",
                code="FN-0789",
            )


def advice(prepared: Prepared) -> str:
    """Return the remedy for a graph that differs from torch."""
    forms = ", ".join(str(operator) for operator in prepared.app.decompositions)
    if forms:
        return f"check the App's own decompositions, also of gradients: {forms}"
    return (
        "rounding may decide a gradient of few values, as of a ReLU after a BatchNorm of a small batch: try a larger "
        "batch_size; if the difference stays, its export is wrong, please report the module"
    )


def _module_of(prepared: Prepared, port: str) -> str:
    """Return the module of a parameter or of its state, in words; "" for another output."""
    names = [name for name in prepared.parameters if port == name or port.endswith(f".{name}")]
    if not names:
        return ""
    path = max(names, key=len).rpartition(".")[0]
    return f" of module {path or 'itself'} ({type(prepared.eager.get_submodule(path)).__name__})"


def check_loss(prepared: Prepared, what: str, actual: float, expected: tuple[float, float | None]) -> None:
    """Compare a loss with (torch's, torch's in float64), relative to itself.

    Raises:
        UnsupportedModel: It differs by more than rounding explains.
    """
    tolerance = ROUNDED_LOSS_TOLERANCE if prepared.app.recipe.quantization_aware else LOSS_TOLERANCE
    twin, exact = expected
    allowed = tolerance * abs(twin) + (UNKNOWN_FLOOR if exact is None else NOISE_FACTOR * abs(twin - exact))
    error = abs(actual - twin)
    if not error <= allowed:
        raise UnsupportedModel(
            f"{prepared.what}: {what} of the exported graph differs from torch's by {error:.1e}, expected at most "
            f"{allowed:.1e}; {advice(prepared)}",
            code="FN-0789",
        )


def float64s_of(values: Mapping[str, Array], before: Mapping[str, Array]) -> Mapping[str, npt.NDArray[np.float64]]:
    """Return tensors in float64, less their values before the step, if there are any."""
    return {name: np.subtract(value, before.get(name, 0.0), dtype=np.float64) for name, value in values.items()}


def _norm(values: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(values.reshape(-1)))
