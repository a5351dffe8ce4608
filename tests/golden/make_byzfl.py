"""Writes tests/golden/byzfl.json: aggregates and attacks of byzfl, for comparison with the rules of
``fanin.server.aggregation`` and the attacks of ``fanin.simulation``.

    python -m venv build/byzfl
    build/byzfl/bin/pip install byzfl==0.0.11
    build/byzfl/bin/python tests/golden/make_byzfl.py

byzfl needs torch, torchvision and seaborn, so no environment of this repository has it. Each case has ``vectors``,
whole numbers of one Update a row, ``results`` by rule, and ``attacks``, which follow from the honest Updates. The last
``f`` Updates of a case are lies.
"""

import json
from pathlib import Path
from typing import Any

import byzfl
import numpy as np

TARGET = Path(__file__).parent / "byzfl.json"
NUM_VALUES = 12
SIZES = ((5, 1), (7, 1), (11, 2), (16, 3), (24, 5))
"""Numbers of Updates and of attackers."""


def vectors_of(num_updates: int, num_attackers: int) -> np.ndarray:
    """Return Updates around one mean, and lies that are far away or close to each other."""
    rng = np.random.default_rng(num_updates)
    honest = rng.normal(rng.normal(0, 300, NUM_VALUES), 100, (num_updates - num_attackers, NUM_VALUES))
    lies = rng.normal(honest.mean(axis=0) - 400, 5, (num_attackers, NUM_VALUES))
    # Among values this large there are no ties, which each library breaks in its own way.
    return np.rint(np.concatenate([honest, lies]) * 1000)


def results_of(vectors: np.ndarray, num_attackers: int) -> dict[str, list[float]]:
    """Return byzfl's aggregates by our names of the rules."""
    rules = {
        "median": byzfl.Median(),
        "trimmed_mean": byzfl.TrMean(num_attackers),
        "meamed": byzfl.Meamed(num_attackers),
        "krum": byzfl.Krum(num_attackers),
        "centred_clipping": byzfl.CenteredClipping(L=3, tau=2e5),
        "norm_bounding": byzfl.CenteredClipping(L=1, tau=2e5),
        "multi_krum": byzfl.MultiKrum(num_attackers),
    }
    # byzfl begins at zero: around the mean, this is fanin's beginning. 200 steps forget where they began.
    centre = vectors.mean(axis=0)
    results = {"geometric_median_3": byzfl.GeometricMedian(1e-3, 3)(vectors - centre) + centre}
    results["geometric_median_200"] = byzfl.GeometricMedian(1e-3, 200)(vectors)
    return {name: value.tolist() for name, value in results.items()} | {
        name: np.asarray(rule(vectors)).tolist() for name, rule in rules.items()
    }


def attacks_of(honest: np.ndarray) -> dict[str, list[float]]:
    """Return byzfl's malicious Updates by our names of the attacks."""
    attacks = {
        "sign_flip": byzfl.SignFlipping(),
        "alie": byzfl.ALittleIsEnough(tau=1.5),
        "inner_product": byzfl.InnerProductManipulation(tau=0.5),
    }
    return {name: attack(honest).tolist() for name, attack in attacks.items()}


def case(num_updates: int, num_attackers: int) -> dict[str, Any]:
    """Return one case."""
    vectors = vectors_of(num_updates, num_attackers)
    rows = vectors.astype(int).tolist()
    attacks = attacks_of(vectors[: num_updates - num_attackers])
    return {"f": num_attackers, "vectors": rows, "results": results_of(vectors, num_attackers), "attacks": attacks}


def main() -> None:
    """Write the file."""
    TARGET.write_text("[\n" + ",\n".join(f"  {json.dumps(case(*size))}" for size in SIZES) + "\n]\n")


if __name__ == "__main__":
    main()
