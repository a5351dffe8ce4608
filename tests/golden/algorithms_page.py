"""Generates docs/reference/algorithms.md: the algorithms that a Plan names, and which of them combine.

    python tests/golden/algorithms_page.py

``test_algorithms_page`` compares the page in the repository with ``page()``. ``stories/test_combinations`` runs each
pair that no Run refuses.
"""

import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.combinations import NUM_DEVICES, NUM_ROUNDS, PARTS, Part, bundles_in, pairs, refusals

from fanin.protos.codes import explained
from fanin.protos.errors import FaninError

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "algorithms.md"
Refused = Mapping[tuple[str, str], FaninError]
HEAD: Final = """\
# Algorithms

A row is an algorithm that a Plan names. Its link has the options, the limits and the comparison with other
implementations. All of them work in the coordinator, in simulations and in `fanin verify`, with the same code.

In the equations, n devices send the Updates d_1 to d_n of a Round: their parameters after training minus the received
parameters x. w_k is the number of examples of device k, and eta a learning rate.
"""


@dataclass(frozen=True)
class Algorithm:
    """What the page says of a part.

    Attributes:
        paper: Where it is from.
        computes: Its equation, or what it does, on devices and on the coordinator.
        see: The page that describes it.
    """

    paper: str
    computes: str
    see: str


_RULES, _OUTER, _STAGES, _CODECS = "rules.md", "outer.md", "stages.md", "codecs.md"
ALGORITHMS: Final[Mapping[str, Algorithm]] = {
    "weighted_mean": Algorithm("McMahan et al. 2017, arXiv 1602.05629", "sum w_k d_k / sum w_k", _RULES),
    "trimmed_mean": Algorithm(
        "Yin et al. 2018, arXiv 1803.01498",
        "of each value, the mean without the floor(`trim` n) smallest and largest ones",
        _RULES,
    ),
    "median": Algorithm("Yin et al. 2018, arXiv 1803.01498", "of each value, the median", _RULES),
    "meamed": Algorithm(
        "Xie et al. 2018, arXiv 1802.10116",
        "of each value, the mean of the n - `f` that are nearest to the median",
        _RULES,
    ),
    "krum": Algorithm(
        "Blanchard et al. 2017, arXiv 1703.02757",
        "the d_k with the least sum of squared distances to its n - `f` - 2 nearest others",
        _RULES,
    ),
    "multi_krum": Algorithm(
        "Blanchard et al. 2017, arXiv 1703.02757", "the mean of the `m` Updates with the least sums", _RULES
    ),
    "bulyan": Algorithm(
        "El Mhamdi et al. 2018, arXiv 1802.07927",
        "Krum chooses n - 2`f` Updates; of each value, the mean of the n - 4`f` nearest to their median",
        _RULES,
    ),
    "geometric_median": Algorithm(
        "Pillutla et al. 2022, arXiv 1912.13445", "argmin_z sum norm(z - d_k), by smoothed Weiszfeld steps", _RULES
    ),
    "centred_clipping": Algorithm(
        "Karimireddy et al. 2021, arXiv 2012.10333",
        "v + sum (d_k - v) min(1, `radius` / norm(d_k - v)) / n, repeated; v begins at 0",
        _RULES,
    ),
    "norm_bounding": Algorithm("Sun et al. 2019, arXiv 1911.07963", "sum d_k min(1, `radius` / norm(d_k)) / n", _RULES),
    "fedavg": Algorithm("McMahan et al. 2017, arXiv 1602.05629", "x + eta d, where d is what the rule made", _OUTER),
    "fedavgm": Algorithm("Hsu et al. 2019, arXiv 1909.06335", "m = beta m + d; x + eta m", _OUTER),
    "nesterov": Algorithm("Douillard et al. 2023, arXiv 2311.08105", "m = beta m + d; x + eta (d + beta m)", _OUTER),
    "fedadagrad": Algorithm("Reddi et al. 2021, arXiv 2003.00295", "v = v + d^2; x + eta m / (sqrt(v) + tau)", _OUTER),
    "fedadam": Algorithm(
        "Reddi et al. 2021, arXiv 2003.00295", "v = beta2 v + (1 - beta2) d^2; x + eta m / (sqrt(v) + tau)", _OUTER
    ),
    "fedyogi": Algorithm(
        "Reddi et al. 2021, arXiv 2003.00295",
        "v = v - (1 - beta2) d^2 sign(v - d^2); x + eta m / (sqrt(v) + tau)",
        _OUTER,
    ),
    "fedprox": Algorithm(
        "Li et al. 2020, arXiv 1812.06127",
        "each step of a device adds mu (y - x) to the gradient at its parameters y",
        "recipe.md",
    ),
    "scaffold": Algorithm(
        "Karimireddy et al. 2020, arXiv 1910.06378",
        "each step adds c - c_k to the gradient; a device keeps c_k, the coordinator c",
        _STAGES,
    ),
    "fednova": Algorithm(
        "Wang et al. 2020, arXiv 2007.07481",
        "x + tau sum p_k d_k / norm1(a_k), with p_k = w_k / sum w and tau = sum p_k norm1(a_k); a_k are the factors of "
        "the steps",
        "methods.md",
    ),
    "qfedavg": Algorithm(
        "Li et al. 2020, arXiv 1905.10497",
        "x + sum F_k^q d_k / sum h_k, with h_k = q F_k^(q-1) norm(d_k)^2 / eta + F_k^q; F_k is the loss at x",
        "methods.md",
    ),
    "feddyn": Algorithm(
        "Acar et al. 2021, arXiv 2111.04263",
        "each step adds mu (y - x) - g_k; a device keeps g_k, the coordinator their sum",
        "methods.md",
    ),
    "fedrep": Algorithm(
        "Collins et al. 2021, arXiv 2102.07078",
        "a device trains its personal parameters with the shared ones fixed, then the shared ones",
        "personal.md",
    ),
    "ditto": Algorithm(
        "Li et al. 2021, arXiv 2012.04221",
        "a device also trains a copy v_k of its own on F_k(v) + `ditto_weight` / 2 norm(v - x)^2",
        "personal.md",
    ),
    "stale Updates": Algorithm(
        "Nguyen et al. 2022, arXiv 2106.06639", "an Update that is t Versions late has the weight w_k s(t)", "cohort.md"
    ),
    "error_feedback": Algorithm(
        "Karimireddy et al. 2019, arXiv 1901.09847", "a device adds what the codec left out to its next Update", _STAGES
    ),
    "fixed32": Algorithm("", "32 bits a value on the Round's grid", _CODECS),
    "int16": Algorithm("", "16 bits a value", _CODECS),
    "int8": Algorithm("", "8 bits a value", _CODECS),
    "int4": Algorithm("", "4 bits a value", _CODECS),
    "topk": Algorithm(
        "Sarfi et al. 2025, arXiv 2508.15706", "the values of the largest magnitude in 8, 4 or 2 bits", _CODECS
    ),
    "uniform weights": Algorithm("", "w_k = 1 for each device", _RULES),
    "secagg": Algorithm(
        "Bonawitz et al. 2017; Bell et al. 2020", "masks that cancel in the sum of the Updates", "secure-aggregation.md"
    ),
    "central": Algorithm(
        "Kairouz et al. 2021, arXiv 2102.06387",
        "devices clip; the coordinator adds discrete Gaussian noise to the sum",
        "differential-privacy.md",
    ),
    "adaptive clipping": Algorithm(
        "Andrew et al. 2021, arXiv 1905.03871",
        "the clip norm C of `central` becomes C exp(-eta (b - gamma)), b the noised share of devices within C",
        "differential-privacy.md",
    ),
    "skellam": Algorithm(
        "Agarwal et al. 2021, arXiv 2110.04995", "each device adds Skellam noise under masks", "differential-privacy.md"
    ),
    "gaussian-shares": Algorithm(
        "Kairouz et al. 2021, arXiv 2102.06387",
        "each device adds discrete Gaussian noise under masks",
        "differential-privacy.md",
    ),
}


def page(refused: Refused) -> str:
    """Return the text of docs/reference/algorithms.md."""
    return "".join((HEAD, *_tables(), *_combinations(refused)))


def refusals_in(folder: Path) -> Refused:
    """Return the error of each pair whose Run does not start."""
    (folder / "bundles").mkdir()
    return refusals(folder, bundles_in(folder / "bundles"))


def _tables() -> Iterator[str]:
    for kind, parts in groupby(PARTS, lambda part: part.kind):
        yield f"\n## {kind[0].upper()}{kind[1:]}\n\n| name | keys | what it computes | source |\n|---|---|---|---|\n"
        for part in parts:
            row = ALGORITHMS[part.name]
            yield f"| [`{part.name}`](../howto/{row.see}) | {_names(_keys(part))} | {row.computes} | {row.paper} |\n"


def _keys(part: Part) -> list[str]:
    names = [f"stages: {stage['name']}" for stage in part.stages]
    return names + [key for key in part.keys if not key.startswith("privacy.") or key == "privacy.mechanism"]


def _combinations(refused: Refused) -> Iterator[str]:
    tried = [pair for pair in pairs() if (pair[0].name, pair[1].name) not in refused]
    yield (
        f"\n## Combinations\n\nOf the {len(tried) + len(refused)} pairs of different kinds, {len(refused)} are refused "
        f"before a Run starts. The others were tried: {NUM_ROUNDS} Rounds of {NUM_DEVICES} devices over gRPC, whose\n"
        "coordinator was killed while a Round was open, and whose Versions `fanin verify` recomputed\n"
        "(`tests/stories/test_combinations.py`).\n\n| each of these | is refused with | reason |\n|---|---|---|\n"
    )
    partners: dict[tuple[str, str], list[str]] = {}
    for (first, second), error in refused.items():
        partners.setdefault((error.code, second), []).append(first)
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (code, second), firsts in partners.items():
        rows.setdefault((code, tuple(firsts)), []).append(second)
    for (code, firsts), seconds in sorted(rows.items()):
        reason = f"[{code}](errors.md): {explained(code).meaning}"
        yield f"| {_names(firsts)} | {_names(seconds)} | {reason} |\n"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        PAGE.write_text(page(refusals_in(Path(scratch))))
