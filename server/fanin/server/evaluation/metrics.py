"""The metrics of a Version on a data set, from its ``evaluate`` graph in float and its ``infer`` graph in int8."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.runtimes.base import PaddedBatch, Runtime
from fanin.edge.runtimes.measure import measure
from fanin.edge.runtimes.quality import Quality
from fanin.edge.tensors import Float32s

LOWER_IS_BETTER: Final = frozenset({"loss", "squared_error", "squared_error_int8"})
"""The metrics of which the smallest value is the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionMetrics:
    """The metrics of one Version.

    Attributes:
        num_examples: Examples of the data set.
        values: The metrics by name.
    """

    num_examples: int
    values: Mapping[str, float]


def evaluate_version(
    runtime: Runtime, bundle: Bundle, parameters: Float32s, batches: Iterable[PaddedBatch]
) -> VersionMetrics:
    """Evaluate a Version on a data set.

    Args:
        runtime: Runs the graphs.
        bundle: Has the graphs.
        parameters: The parameters of the Version (num_values,).
        batches: The data set.

    Returns:
        ``loss``, and for a model with labels ``accuracy``, ``accuracy_int8`` and ``int8_agreement``, or for a model of
        values ``squared_error`` and ``squared_error_int8``, each a mean.

    Raises:
        ValueError: The loss is not finite, or the data does not fit the graphs.
        InvalidBundle: The runtime cannot open or run a graph.
        InvalidVersion: The parameters are not finite.
    """
    quality = measure(runtime, bundle, parameters, batches)
    return VersionMetrics(num_examples=quality.num_examples, values=_values(quality))


def score_of(best: str, values: Mapping[str, float]) -> float:
    """Return the value that ranks Versions by the metric ``best``: larger is better."""
    return -values[best] if best in LOWER_IS_BETTER else values[best]


def _values(quality: Quality) -> dict[str, float]:
    num_examples = max(1, quality.num_examples)
    values = {"loss": quality.loss_sum / num_examples}
    if quality.num_predictions:
        return values | {
            "accuracy": quality.accuracy_float,
            "accuracy_int8": quality.accuracy_int8,
            "int8_agreement": quality.agreement,
        }
    return values | {
        "squared_error": quality.squares_float / num_examples,
        "squared_error_int8": quality.squares_int8 / num_examples,
    }
