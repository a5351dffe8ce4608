"""``fanin privacy plan``: the noise of a budget, its table, its JSON, its plot and its refusals."""

import json
from pathlib import Path

import pytest

from fanin.commands.main import main
from fanin.server.privacy.accounting import epsilon
from fanin.server.privacy.planning import MECHANISMS, RELEASED, PrivacyBudget, plan_mechanism

POPULATION = ("--population", "100000", "--cohort", "1000")
BUDGET = ("--epsilon", "2", *POPULATION, "--rounds", "100")


def test_the_plan_of_each_mechanism_spends_the_budget_and_no_more() -> None:
    for sampling in ("coins", "none"):
        budget = PrivacyBudget(
            epsilon=2, delta=1e-6, num_rounds=100, cohort=1000, population=100_000, sampling=sampling
        )
        for name in RELEASED:
            row = plan_mechanism(name, budget)
            rounds, spent = row.epsilons[-1]
            assert (rounds, spent <= 2) == (100, True)
            less = MECHANISMS[name].release(budget, row.noise_multiplier - 0.001)
            assert epsilon([(less, 100)], 1e-6) > 2
            assert list(row.epsilons) == sorted(row.epsilons, key=lambda pair: pair[1])
            assert [rounds for rounds, _ in row.epsilons] == [1, 2, 5, 10, 20, 50, 100]


def test_coins_need_less_noise_than_no_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    multipliers = {}
    for sampling in ("coins", "none"):
        assert main(["privacy", "plan", *BUDGET, "--sampling", sampling, "--mechanism", "central", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["delta"], report["rounds"], report["sampling"]) == (1e-6, 100, sampling)
        (row,) = report["mechanisms"]
        multipliers[sampling] = row["noise_multiplier"]
    assert 0.5 < multipliers["coins"] < 1.0 < 20.0 < multipliers["none"]


def test_noise_on_devices_is_scaled_for_the_least_number_of_survivors(capsys: pytest.CaptureFixture[str]) -> None:
    sigmas = []
    for survivors in ("100", "400"):
        command = ["privacy", "plan", *BUDGET, "--mechanism", "skellam", "--survivors", survivors, "--json"]
        assert main(command) == 0
        sigmas.append(json.loads(capsys.readouterr().out)["mechanisms"][0]["sigma_steps"])
    assert sigmas[0] == pytest.approx(2 * sigmas[1])


def test_noise_that_cannot_be_drawn_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["privacy", "plan", *BUDGET, "--norm-bound", "65536"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "too large" in line] == ["skellam"]


def test_a_coarse_grid_costs_more_under_noise_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    multipliers = []
    for norm_bound in ("1", "4096"):
        command = ["privacy", "plan", *BUDGET, "--mechanism", "gaussian-shares", "--norm-bound", norm_bound, "--json"]
        assert main(command) == 0
        multipliers.append(json.loads(capsys.readouterr().out)["mechanisms"][0]["noise_multiplier"])
    assert multipliers[0] > multipliers[1]


def test_the_epsilon_of_a_noise_multiplier(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["privacy", "plan", "--noise-multiplier", "1.5", *POPULATION, "--rounds", "100", "--sampling", "coins"]
    assert main([*command, "--mechanism", "central", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = report["mechanisms"]
    assert (report["epsilon"], row["noise_multiplier"]) == (None, 1.5)
    assert row["epsilon_by_round"][-1]["epsilon"] < 1.0
    assert main([*command, "--mechanism", "central"]) == 0
    assert "noise multiplier 1.5 at delta 1e-06 over 100 Rounds" in capsys.readouterr().out


def test_the_text_has_a_table_and_the_plot_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plan.svg"
    assert main(["privacy", "plan", *BUDGET, "--plot", str(plot)]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in RELEASED)
    assert "epsilon 2 at delta 1e-06 over 100 Rounds" in text
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (["--epsilon", "0"], "FN-1651"),
        (["--epsilon", "-1"], "FN-1651"),
        (["--epsilon", "nan"], "FN-1651"),
        (["--epsilon", "inf"], "FN-1651"),
        (["--delta", "0"], "FN-1650"),
        (["--delta", "0.00002"], "FN-1650"),
        (["--cohort", "100001"], "FN-1655"),
        (["--cohort", "0"], "FN-1655"),
        (["--population", "0"], "FN-1655"),
        (["--rounds", "0"], "FN-1655"),
        (["--survivors", "1001"], "FN-1655"),
        (["--mechanism", "skelam"], "FN-1654"),
        (["--sampling", "poisson"], "FN-0023"),
        (["--noise-multiplier", "1"], "FN-1651"),
        (["--epsilon", "101"], "FN-1651"),
        (["--plot", "plan.exe"], "FN-1146"),
    ],
)
def test_what_cannot_be_planned_is_wrong_usage(wrong: list[str], code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["privacy", "plan", *BUDGET, *wrong]) == 2
    streams = capsys.readouterr()
    assert streams.err.rstrip().endswith(f"[{code}]")
    assert streams.out == ""
    if wrong[0] == "--mechanism":
        assert "did you mean skellam?" in streams.err


@pytest.mark.parametrize(
    "wrong", [[], *(["--noise-multiplier", each] for each in ("0", "nan", "0.01", "1e6", "-1"))], ids=str
)
def test_a_plan_without_a_question_is_wrong_usage(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["privacy", "plan", *POPULATION, "--rounds", "100", *wrong]) == 2
    assert capsys.readouterr().err.rstrip().endswith("[FN-1651]")


def test_a_budget_that_no_noise_satisfies_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["privacy", "plan", "--epsilon", "1e-7", *POPULATION, "--rounds", "100"]) == 1
    assert capsys.readouterr().err.rstrip().endswith("[FN-1653]")
