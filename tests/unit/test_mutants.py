"""The exporter's own check refuses an export of which one part is zero, twice or minus itself."""

import pytest
from support.mutants import Mutant, loss_mutants, optimizer_mutants, outcome_of, verify_traced
from support.nightly import nightly_but

from fanin.edge.export.prepare import prepare

MUTANTS = {str(mutant): mutant for mutant in (*optimizer_mutants(), *loss_mutants())}
KEPT = [
    "optimizer sgd: value twice",
    "optimizer momentum: momentum negative",
    "optimizer adam: value zero",
    "optimizer adam: square twice",
    "loss cross_entropy negative",
    "loss squared_error zero",
]
APPS = {mutant.part: mutant for mutant in MUTANTS.values()}


@pytest.mark.parametrize("name", nightly_but(MUTANTS, KEPT))
def test_a_mutant_is_refused(name: str) -> None:
    assert "differs from torch's" in outcome_of(MUTANTS[name]).error


@pytest.mark.parametrize("part", nightly_but(APPS, ["adam: value", "cross_entropy"]))
def test_the_true_part_of_a_mutant_passes(part: str) -> None:
    mutant: Mutant = APPS[part]
    verify_traced(prepare(mutant.app), mutant.app, mutant.graph_format)
