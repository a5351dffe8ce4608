"""The exporter's check refuses an export with one result that is zeroed, doubled or negated."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from house.tree import ROOT
from support.mutant_forms import MODELS, form_mutants, verify_forms
from support.mutants import EQUIVALENT, Mutant, loss_mutants, optimizer_mutants, outcome_of
from support.nightly import in_ci

from fanin.edge.export.formats.graphs import FORMATS

PLAIN = {str(mutant): mutant for mutant in (*optimizer_mutants(), *loss_mutants())}
MUTANTS = PLAIN | {str(mutant): mutant for mutant in form_mutants()}
CI_MUTANTS = [
    "optimizer sgd: value twice",
    "optimizer momentum: momentum negative",
    "optimizer adam: value zero",
    "optimizer adam: square twice",
    "optimizer lion: value negative",
    "optimizer lion-decay: mean twice",
    "loss cross_entropy negative",
    "loss squared_error zero",
    "decomposition onnx _softmax_backward_data[0] twice",
    "decomposition tflite infer pad[0] negative",
]
APPS = {mutant.part: mutant for mutant in PLAIN.values()}


@pytest.mark.parametrize("name", in_ci(MUTANTS, CI_MUTANTS))
def test_a_mutant_is_refused(name: str) -> None:
    error = outcome_of(MUTANTS[name]).error
    assert "torch's" in error if name not in EQUIVALENT else not error


def test_equivalent_mutants_are_mutants() -> None:
    assert set(EQUIVALENT) <= set(MUTANTS)


@pytest.mark.parametrize("part", in_ci(APPS, ["adam: value", "cross_entropy"]))
def test_the_true_part_of_a_mutant_passes(part: str) -> None:
    mutant: Mutant = APPS[part]
    mutant.verify_true()


@pytest.mark.nightly
@pytest.mark.parametrize("is_infer", [False, True], ids=["train", "infer"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("graph_format", FORMATS)
def test_the_true_forms_pass(graph_format: str, model: str, is_infer: bool) -> None:
    verify_forms(model, FORMATS[graph_format].forms, is_infer=is_infer)


@pytest.mark.nightly
def test_the_table_of_mutants_is_printed_and_written(tmp_path: Path) -> None:
    file = tmp_path / "mutants.json"
    command = [sys.executable, ROOT / "benchmarks/mutants.py", "--only", "loss squared_error", "--json", file]
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "| loss | `squared_error` | refused | refused | refused |" in process.stdout.splitlines()
    assert json.loads(file.read_text())["counts"] == {"refused": 3}
