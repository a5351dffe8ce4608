"""The ledger of a device: what it counts, what it shows, and what a crash or a damaged file does to it."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from support.values import assignment

from fanin.clients.device.policy.ledger import (
    LEDGER_FILE,
    MAX_RUNS,
    PrivacyLedger,
    PrivacyRecord,
    RunPrivacy,
    loss_of,
    read_ledger,
)
from fanin.clients.device.policy.owner import POLICY_FILE, write_policy
from fanin.clients.device.site.privacy import site_privacy
from fanin.edge.floors.floor import PrivacyFloor
from fanin.edge.floors.rows import floor_row
from fanin.edge.noise.loss import Loss
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import StorageUnavailable
from fanin.protos.plans import RoundPlan

TERMS = m.PrivacyTerms(
    mechanism="central",
    clip_norm=1.0,
    noise_multiplier=2.0,
    squared_sensitivity=1 << 24,
    epsilon=4.0,
    delta=1e-5,
    population="phones",
    population_size=1000,
)


def work_of(run: str, round_number: int, terms: m.PrivacyTerms | None = TERMS) -> m.Assignment:
    """Return the Assignment of a Round."""
    own = assignment(round_number)
    return replace(own, assignment_id=f"{run}.{round_number}", run_id=run, privacy=terms)


def header_of(work: m.Assignment, **counts: int) -> m.UpdateHeader:
    """Return the header of an Update."""
    return m.UpdateHeader(
        format=m.UPDATE_FORMAT,
        assignment_id=work.assignment_id,
        run_id=work.run_id,
        round=work.round,
        version_sha256="0" * 64,
        codec="fixed32",
        shifts=(),
        payload=artifact_of(b"x"),
        statistics=m.Statistics(counts=counts),
        telemetry=m.Telemetry(runtime="none"),
    )


def charge(folder: Path, *works: m.Assignment) -> PrivacyRecord:
    """Charge Updates, each by a process of its own, and return the file."""
    for work in works:
        PrivacyLedger(folder, wall=lambda work=work: float(work.round)).charge(work, header_of(work, examples=1))
    return read_ledger(folder)


def test_losses_of_all_runs_add_up(tmp_path: Path) -> None:
    works = [work_of("a", 1), work_of("a", 2), work_of("b", 3, replace(TERMS, noise_multiplier=1.0, delta=1e-6))]
    record = charge(tmp_path, *works)
    assert record.runs["a"].loss == Loss(rho=Fraction(2, 8)) and record.runs["b"].loss == Loss(rho=Fraction(1, 2))
    total = record.total
    assert (total.num_rounds, total.loss, total.delta) == (3, Loss(rho=Fraction(3, 4)), 1e-6)
    assert total.epsilon == Loss(rho=Fraction(3, 4)).epsilon(1e-6) > record.runs["b"].epsilon > 0  # type: ignore[operator]


def test_epsilon_is_an_upper_bound_of_the_published_conversion() -> None:
    """Proposition 1.3 of Bun and Steinke: rho + 2 sqrt(rho log(1 / delta)) holds, too, and is larger."""
    run = RunPrivacy(num_rounds=1, rho="1/2", delta=1e-5)
    assert run.epsilon is not None
    # The Gaussian of sigma 1 has epsilon 4.377 at this delta (Balle and Wang 2018), below each bound by zCDP.
    assert 4.377 < run.epsilon <= 0.5 + 2 * math.sqrt(0.5 * math.log(1e5))


def test_a_repeated_upload_is_counted_once_also_after_a_restart(tmp_path: Path) -> None:
    assert charge(tmp_path, work_of("a", 1), work_of("a", 1), work_of("a", 1)).total.num_rounds == 1
    assert charge(tmp_path, work_of("a", 2)).total.num_rounds == 2


@pytest.mark.parametrize(
    ("terms", "counts"),
    [
        (None, (1, 0)),
        (replace(TERMS, mechanism="gaussian-shares"), (0, 1)),
        (replace(TERMS, mechanism="later"), (0, 1)),
    ],
)
def test_one_round_without_a_bound_leaves_no_epsilon(
    tmp_path: Path, terms: m.PrivacyTerms | None, counts: tuple[int, int]
) -> None:
    run = charge(tmp_path, work_of("a", 1), work_of("a", 2, terms)).runs["a"]
    assert (run.num_bare, run.num_unbounded) == counts
    assert run.epsilon is None and run.num_rounds == 2 and run.loss == Loss(rho=Fraction(1, 8))


@pytest.mark.parametrize("mechanism", ["skellam", "gaussian-shares"])
def test_noise_on_devices_costs_a_little_more_than_the_gaussian(mechanism: str) -> None:
    protocol = RoundPlan(protocol="secagg", options={"min_survivors": 8, "adversarial_fraction": 0.2})
    masked = replace(work_of("a", 1), round_protocol=protocol, max_devices=10)
    gaussian = loss_of(work_of("a", 1), TERMS, 4000)
    shared = loss_of(masked, replace(TERMS, mechanism=mechanism), 4000)
    assert gaussian is not None and shared is not None
    assert gaussian.epsilon(1e-5) <= shared.epsilon(1e-5) < 1.001 * gaussian.epsilon(1e-5)


def test_the_runs_are_bounded_and_no_loss_is_forgotten(tmp_path: Path) -> None:
    ledger = PrivacyLedger(tmp_path, wall=lambda: 1.0)
    for number in range(MAX_RUNS + 10):
        work = work_of(f"run-{number}", 1)
        ledger.charge(work, header_of(work))
    record = read_ledger(tmp_path)
    assert len(record.runs) == MAX_RUNS and record.earlier.num_rounds == 10
    assert record.total.loss == Loss(rho=Fraction(MAX_RUNS + 10, 8))


def test_the_names_of_what_was_sent_are_kept(tmp_path: Path) -> None:
    work = replace(work_of("a", 1), statistics=work_of("a", 1).statistics[:1])
    ledger = PrivacyLedger(tmp_path)
    ledger.charge(work, header_of(work, examples=3, correct=2))
    assert read_ledger(tmp_path).runs["a"].sent == ("correct", "examples")
    ledger.charge(masked := replace(work, assignment_id="a.2"), header_of(masked))
    assert read_ledger(tmp_path).runs["a"].sent == ("examples (masked)",)


def test_a_full_disk_keeps_the_update_on_the_device(tmp_path: Path) -> None:
    ledger = PrivacyLedger(tmp_path / "missing")
    with pytest.raises(StorageUnavailable):
        ledger.charge(work_of("a", 1), header_of(work_of("a", 1)))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 2}', '{"format":1,"last_assignment":"","runs":{"a":3},"earlier":{},"damaged_at":0}'],
)
def test_a_damaged_ledger_is_kept_aside_and_no_epsilon_is_shown(tmp_path: Path, text: str) -> None:
    (tmp_path / LEDGER_FILE).write_text(text)
    assert "damaged" in next(site_privacy(tmp_path).ledger_texts())
    record = charge(tmp_path, work_of("a", 1))
    assert record.damaged_at == 1.0 and (tmp_path / "privacy.damaged").read_text() == text
    privacy = site_privacy(tmp_path)
    assert privacy.document()["total"]["epsilon"] is None  # type: ignore[index]
    assert "no bound of epsilon" in next(privacy.ledger_texts())


@pytest.mark.parametrize("change", [{"rho": "x"}, {"rho": "-1"}, {"rho": "1/0"}, {"num_rounds": "1"}, {"more": 1}])
def test_an_entry_with_a_wrong_value_is_damage(tmp_path: Path, change: dict[str, object]) -> None:
    charge(tmp_path, work_of("a", 1))
    row = json.loads((tmp_path / LEDGER_FILE).read_text())
    row["runs"]["a"] |= change
    (tmp_path / LEDGER_FILE).write_text(json.dumps(row))
    with pytest.raises(ValueError):
        read_ledger(tmp_path)


# What the owner sees.


def test_the_owner_sees_the_floor_in_force_with_the_origin_of_each_value(tmp_path: Path) -> None:
    assert next(site_privacy(tmp_path).floor_texts()).startswith("none: ")
    own = PrivacyFloor(protocol="secagg", min_survivors=5, clip_norm=2.0)
    signed = PrivacyFloor(protocol="secagg", min_survivors=20, mechanism="central", clip_norm=2.0)
    write_policy(tmp_path, own)
    PrivacyLedger(tmp_path).note_manifest(work_of("a", 1), floor_row(signed), ())
    first, second = site_privacy(tmp_path).floor_texts()
    assert first == "protocol secagg (owner), min_survivors 5 (owner), clip_norm 2 (owner)"
    assert second == (
        "run a: protocol secagg (owner and manifest), min_survivors 20 (manifest), mechanism central (manifest), "
        "clip_norm 2 (owner and manifest)"
    )


def test_the_owner_sees_what_each_run_cost(tmp_path: Path) -> None:
    charge(tmp_path, work_of("a", 1), work_of("b", 2, None))
    PrivacyLedger(tmp_path, wall=lambda: 3.0).refuse(work_of("c", 3), "privacy floor of the device's owner: got less")
    texts = list(site_privacy(tmp_path).ledger_texts())
    assert texts[0].startswith("run c: refused 1 assignment, last ") and texts[0].endswith("got less")
    assert texts[1] == "run b: 1 round without differential privacy"
    assert texts[2] == (
        "run a of population phones: 1 round, the last with central noise, clip norm 1, noise multiplier 2: "
        f"epsilon at most {Loss(rho=Fraction(1, 8)).epsilon(1e-5):.3g} at delta 1e-05"
    )
    assert texts[3] == "all runs: 2 rounds: no bound of epsilon, 1 round without differential privacy"


def test_the_owner_sees_what_masks_give_and_what_they_do_not_give(tmp_path: Path) -> None:
    charge(tmp_path, replace(work_of("a", 1, None), round_protocol=RoundPlan(protocol="secagg")))
    (text,) = site_privacy(tmp_path).ledger_texts()
    assert text.startswith("run a: 1 round, the last under masks: the coordinator has sums of the updates of several")
    assert "nothing bounds what the sums show" in text


def test_runs_of_one_population_have_a_total(tmp_path: Path) -> None:
    record = charge(tmp_path, work_of("a", 1), work_of("b", 2), work_of("c", 3, replace(TERMS, population="cars")))
    assert list(record.populations) == ["phones"]
    assert record.populations["phones"].loss == Loss(rho=Fraction(2, 8))
    texts = list(site_privacy(tmp_path).ledger_texts())
    assert texts[3].startswith("population phones, all its runs: 2 rounds: epsilon at most ")
    assert texts[4].startswith("all runs: 3 rounds: epsilon at most ")


def test_a_wrong_policy_is_shown_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / POLICY_FILE).write_text("[privacy_floor]\nthreat = 'x'")
    privacy = site_privacy(tmp_path)
    (text,) = privacy.floor_texts()
    assert text.startswith("this device takes part in nothing: policy.toml: ") and text.endswith("[FN-1701]")
