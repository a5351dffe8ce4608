"""The attacks of simulated devices against those of byzfl 0.0.11, on the same honest Updates.

A golden file has byzfl's results (tests/golden/make_byzfl.py).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fanin.simulation import Alie, Attack, InnerProduct
from fanin.simulation.devices.conduct import Collusion

CASES = json.loads((Path(__file__).parents[1] / "golden" / "byzfl.json").read_text("utf-8"))
IDS = [f"{len(case['vectors'])}-{case['f']}" for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize(
    ("attack", "name"),
    [(Alie(z=1.5), "alie"), (InnerProduct(epsilon=0.5), "inner_product"), (InnerProduct(epsilon=1.0), "sign_flip")],
)
def test_an_attack_that_colludes_is_that_of_byzfl(case: dict[str, Any], attack: Attack, name: str) -> None:
    """byzfl's sign flip is the opposite of the honest mean: an inner-product manipulation of size 1."""
    collusion = Collusion()
    vectors = np.array(case["vectors"], np.float32)
    for index, vector in enumerate(vectors[: len(vectors) - case["f"]]):
        collusion.add(str(index), 1, vector)
    honest = collusion.honest(1)
    assert honest is not None
    np.testing.assert_allclose(attack.collude(honest), case["attacks"][name], rtol=1e-9, atol=1e-6)
