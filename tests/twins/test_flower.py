"""FedAvg against Flower's: the same Updates, from device to Version, in fanin and in Flower 1.41.

A golden file contains Flower's results, so every change is compared with it. ``make flower`` runs Flower again, in a
separate environment, and needs the package index.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from golden.make_flower import FLOWER, TARGET, flower_results
from support.flower import NUM_EXAMPLES, NUM_ROUNDS, FederationResult, run_federation

ORACLES = ("strategy", "function")
CLOSE = {"fixed32": 1e-5, "int8": 0.03}


@pytest.fixture(scope="module", params=["fixed32", "int8"])
def federation(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FederationResult:
    """The results of fanin's Rounds with each codec."""
    return run_federation(tmp_path_factory.mktemp("federated"), request.param)


def parameters(results: dict[str, list[str]], oracle: str) -> list[np.ndarray]:
    """Return Flower's parameters after each round."""
    return [np.frombuffer(bytes.fromhex(text), "<f4").astype(np.float64) for text in results[oracle]]


@pytest.mark.parametrize("oracle", ORACLES)
def test_versions_are_flowers_up_to_the_grid(federation: FederationResult, oracle: str) -> None:
    results = json.loads(TARGET.read_text())
    assert results["flwr"] == FLOWER.removeprefix("flwr==")
    versions = parameters(results, oracle)
    assert len(versions) == len(federation.parameters) == NUM_ROUNDS
    for actual, expected, bound in zip(federation.parameters, versions, federation.bounds, strict=True):
        assert (np.abs(actual - expected) <= bound).all(), float(np.max(np.abs(actual - expected) / bound))
        # The bound is meaningful: it is small compared with the change of the Round.
        assert bound.max() < CLOSE[federation.codec] * np.abs(expected).max()


def test_another_weighting_is_detected(federation: FederationResult) -> None:
    rounds = federation.request["rounds"]
    assert isinstance(rounds, list)
    changes = [np.frombuffer(bytes.fromhex(change), "<f4").astype(np.float64) for _, change in rounds[0]]
    mean = sum(count * change for count, change in zip(NUM_EXAMPLES, changes, strict=True)) / sum(NUM_EXAMPLES)
    assert (np.abs(federation.parameters[0] - mean) <= federation.bounds[0]).all()
    assert (np.abs(federation.parameters[0] - sum(changes) / len(changes)) > federation.bounds[0]).any()


@pytest.mark.nightly
def test_the_golden_file_has_the_results_of_flower(federation: FederationResult, tmp_path: Path) -> None:
    # The Updates do not depend on the codec.
    results = json.loads(flower_results(tmp_path / "venv", federation.request))
    assert results == json.loads(TARGET.read_text())
