"""What operators read about the claim of a Plan: its unit, a weak delta, other populations, all options of masks."""

from dataclasses import replace

import pytest
from support.private import private
from support.secagg import plan_of

from fanin.commands.control.private import UNIT, claim_notes, mask_options, mask_text, population_notes
from fanin.commands.privacy import population_row, population_text
from fanin.protos.messages import ADD_OR_REMOVE, ZERO_OUT, LedgerRow, PrivacyPopulation

ROW = LedgerRow(
    number=1,
    run_id="run",
    epoch=1,
    lineage=0,
    round=1,
    release="{}",
    count=1,
    epsilon=1.25,
    delta=1e-6,
    committed_at=1.0,
)
CHARGED = PrivacyPopulation(
    name="clinics", epsilon=2.0, delta=1e-6, size=100, run_id="run", begun_at=1.0, relation=ADD_OR_REMOVE, newest=ROW
)


@pytest.mark.parametrize(("delta", "is_weak"), [(1e-3, True), (6e-4, True), (5e-4, False), (1e-6, False)])
def test_a_delta_above_a_power_of_the_population_is_weak(delta: float, is_weak: bool) -> None:
    """1000 ** -1.1 is 5.01e-4. A Plan with more than 1 / 1000 is refused."""
    unit, *weak = claim_notes(private(delta=delta))
    assert UNIT in unit
    assert f"({ZERO_OUT})" in unit
    assert "hospital" in unit
    assert bool(weak) is is_weak
    if weak:
        assert "choose at most 0.0005" in weak[0]


def test_a_new_population_beside_a_charged_one_is_noted() -> None:
    (note,) = population_notes(private(), [CHARGED, replace(CHARGED, name="empty", newest=None)])
    assert "phones is new here and begins at epsilon 0" in note
    assert "clinics (epsilon 1.25)" in note
    assert "empty" not in note
    # Its own population, no charge yet, and no privacy at all.
    assert population_notes(private(population="clinics"), [CHARGED]) == ()
    assert population_notes(private(), [replace(CHARGED, newest=None)]) == ()
    plain = plan_of("plain", 5, 4)
    assert population_notes(plain, [CHARGED]) == claim_notes(plain) == ()


def test_the_ledger_names_the_claim_and_its_unit() -> None:
    assert f"claim   add-or-remove; unit: {UNIT}" in population_text(CHARGED)
    assert population_row(CHARGED)["relation"] == ADD_OR_REMOVE


def test_masks_are_shown_with_all_their_options() -> None:
    masked = plan_of("secagg", 5, 4, dropout_fraction=0.2)
    assert mask_options(masked)["threat"] == "curious"
    assert mask_text(masked) == (
        "threat curious, min_survivors 3, adversarial_fraction 0.1, dropout_fraction 0.2, security_bits 40, "
        "correctness_bits 20, deadline_s 0"
    )
    assert mask_text(plan_of("plain", 5, 4)) == mask_text(None) == ""
