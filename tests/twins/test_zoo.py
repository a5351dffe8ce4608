"""The zoo: models of public packages as they are, exported to each format and trained against eager torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ZOO = Path(__file__).parents[2] / "benchmarks" / "zoo.py"
MIN_MODELS, MIN_ONNX, MIN_TFLITE = 40, 36, 28
TOLERANCE = 1e-6
AMPLIFICATION = 10
"""Limit for models that amplify rounding, as a multiple of eager torch's own rounding error."""
BEYOND = {("convnext_tiny", "tflite"), ("efficientformer_l1", "tflite"), ("ghostnet_050", "tflite")}
"""Models and runtimes that differ by more than their limit; docs/explanation/zoo.md lists them."""
LIMIT_S = 7200
"""Seconds for all models. The first test waits for them."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the rows of all models."""
    return rows_of(tmp_path_factory.mktemp("zoo") / "zoo.jsonl")


def rows_of(file: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run the zoo, and return its rows."""
    subprocess.run([sys.executable, str(ZOO), "--json", str(file), *arguments], check=False)
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.nightly
@pytest.mark.timeout(LIMIT_S)
def test_most_models_of_packages_train_in_each_format(rows: list[dict[str, Any]]) -> None:
    assert len(rows) >= MIN_MODELS
    assert len({row["package"] for row in rows}) >= 6
    for graph_format, least in (("onnx", MIN_ONNX), ("tflite", MIN_TFLITE)):
        refused = [row["model"] for row in rows if "refusal" in row.get("formats", {}).get(graph_format, row)]
        failed = [row["model"] for row in rows if "failure" in row]
        assert len(rows) - len({*refused, *failed}) >= least, (refused, failed)


@pytest.mark.nightly
@pytest.mark.timeout(LIMIT_S)
def test_a_step_of_a_model_is_that_of_eager_torch(rows: list[dict[str, Any]]) -> None:
    too_far = {}
    for row in rows:
        for result in row.get("formats", {}).values():
            limit = max(TOLERANCE, AMPLIFICATION * max(result.get("float64", 0.0), result.get("shaken", 0.0)))
            too_far |= {
                (row["model"], runtime): (error, limit)
                for runtime, error in result.get("errors", {}).items()
                if not error <= limit
            }
    assert too_far.keys() == BEYOND, too_far


@pytest.mark.nightly
def test_a_model_that_fails_is_a_failure_of_its_row_alone(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "zoo.jsonl", "--models", "dense_gcn,dense_gin", "--limit", "0.1")
    assert {(row["model"], row["failure"]) for row in rows} == {
        (name, "took more than 0.1 s") for name in ("dense_gcn", "dense_gin")
    }
