"""FedAvg against Flower's: the same Updates, from device to Version, in fanin and in Flower 1.41.

A golden file contains Flower's results, so every change is compared with it. ``make flower`` runs Flower again, in a
separate environment, and needs the package index.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from golden.make_flower import FLOWER, TARGET, told_by_flower
from support.flower import NUM_EXAMPLES, NUM_ROUNDS, Federated, federated

ORACLES = ("strategy", "function")
CLOSE = {"fixed32": 1e-5, "int8": 0.03}


@pytest.fixture(scope="module", params=["fixed32", "int8"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Federated:
    """The results of fanin's Rounds with each codec."""
    return federated(tmp_path_factory.mktemp("federated"), request.param)


def parameters(told: dict[str, list[str]], oracle: str) -> list[np.ndarray]:
    """Return Flower's parameters after each round."""
    return [np.frombuffer(bytes.fromhex(text), "<f4").astype(np.float64) for text in told[oracle]]


@pytest.mark.parametrize("oracle", ORACLES)
def test_versions_are_flowers_up_to_the_grid(found: Federated, oracle: str) -> None:
    told = json.loads(TARGET.read_text())
    assert told["flwr"] == FLOWER.removeprefix("flwr==")
    theirs = parameters(told, oracle)
    assert len(theirs) == len(found.parameters) == NUM_ROUNDS
    for mine, other, bound in zip(found.parameters, theirs, found.bounds, strict=True):
        assert (np.abs(mine - other) <= bound).all(), float(np.max(np.abs(mine - other) / bound))
        # The bound is meaningful: it is small compared with the change of the Round.
        assert bound.max() < CLOSE[found.codec] * np.abs(other).max()


def test_another_weighting_is_seen(found: Federated) -> None:
    rounds = found.asked["rounds"]
    assert isinstance(rounds, list)
    changes = [np.frombuffer(bytes.fromhex(change), "<f4").astype(np.float64) for _, change in rounds[0]]
    weighted = sum(count * change for count, change in zip(NUM_EXAMPLES, changes, strict=True)) / sum(NUM_EXAMPLES)
    assert (np.abs(found.parameters[0] - weighted) <= found.bounds[0]).all()
    assert (np.abs(found.parameters[0] - sum(changes) / len(changes)) > found.bounds[0]).any()


@pytest.mark.nightly
def test_the_golden_file_is_what_flower_says(found: Federated, tmp_path: Path) -> None:
    # The Updates do not depend on the codec.
    told = json.loads(told_by_flower(tmp_path / "venv", found.asked))
    assert told == json.loads(TARGET.read_text())
