"""The output of ``fanin describe`` for the Plan of a Run."""

from dataclasses import replace

from support.stage_runs import FEEDBACK, scaffold
from support.virtual import plan

from fanin.commands.control.describe import plan_lines
from fanin.protos.plans import FlowerPlan, Statistic


def test_the_plan_is_described_with_every_part_that_changes_the_result() -> None:
    run_plan = plan(
        stages=(scaffold(3), FEEDBACK),
        rule="trimmed_mean",
        trim=0.25,
        outer_optimizer="nesterov",
        outer_learning_rate=0.7,
    )
    lines = plan_lines(replace(run_plan, statistics=(Statistic(name="words", unit="words", bound=1000),)))
    assert lines == [
        "  plan      virtual",
        "            cohort: concurrency 4, buffer 4, quorum 4, deadline_s 600, selection uniform",
        "            training: epochs 1, learning_rate 0.1, seed 7",
        "            codec: name fixed32, max_shift 0",
        "            stages: name scaffold, options {num_devices = 3}",
        "            stages: name error_feedback",
        "            statistics: name words, unit words, bound 1000",
        (
            "            aggregation: rule trimmed_mean, trim 0.25, outer_optimizer nesterov, outer_learning_rate 0.7, "
            "outer_momentum 0.9"
        ),
        "            stop: max_rounds 3",
    ]


def test_keys_that_the_rule_and_the_optimizer_do_not_read_are_not_described() -> None:
    expected = "            aggregation: rule weighted_mean, outer_optimizer fedavg, outer_learning_rate 1"
    assert expected in plan_lines(plan())


def test_a_key_that_differs_from_its_default_is_described() -> None:
    (cohort,) = (line for line in plan_lines(plan(min_report_s=30.0)) if "cohort:" in line)
    assert "min_report_s 30" in cohort
    assert not any("min_report_s" in line for line in plan_lines(plan()))


def test_settings_of_flower_apps_are_described() -> None:
    lines = plan_lines(replace(plan(), flower=FlowerPlan(config={"momentum": 0.9})))
    assert "            flower: config {momentum = 0.9}" in lines
    assert not any("flower" in line for line in plan_lines(plan()))
