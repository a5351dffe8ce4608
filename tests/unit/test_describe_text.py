"""The output of ``fanin describe`` for the Plan of a Run."""

from dataclasses import replace

from support.stage_runs import FEEDBACK, scaffold
from support.virtual import plan

from fanin.commands.console.show import finite
from fanin.commands.control.describe import description_row, description_text
from fanin.commands.display.plans import plan_lines
from fanin.protos.messages import DiskReport, RoundInfo, RunDescription, RunInfo, RunState
from fanin.protos.plans import FlowerPlan, ScheduledChange, Statistic


def test_the_plan_is_described_with_every_part_that_changes_the_result() -> None:
    run_plan = plan(
        stages=(scaffold(3), FEEDBACK),
        rule="trimmed_mean",
        rule_options={"trim": 0.25},
        outer_optimizer="nesterov",
        outer_options={"learning_rate": 0.7},
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
            "            aggregation: rule trimmed_mean, rule_options {trim = 0.25}, outer_optimizer nesterov, "
            "outer_options {learning_rate = 0.7}"
        ),
        "            stop: max_rounds 3",
    ]


def test_options_that_a_plan_does_not_set_are_not_described() -> None:
    expected = "            aggregation: rule weighted_mean, outer_optimizer fedavg"
    assert expected in plan_lines(plan())


def test_a_key_that_differs_from_its_default_is_described() -> None:
    (cohort,) = (line for line in plan_lines(plan(min_report_s=30.0)) if "cohort:" in line)
    assert "min_report_s 30" in cohort
    assert not any("min_report_s" in line for line in plan_lines(plan()))


def test_settings_of_flower_apps_are_described() -> None:
    lines = plan_lines(replace(plan(), flower=FlowerPlan(config={"momentum": 0.9})))
    assert "            flower: config {momentum = 0.9}" in lines
    assert not any("flower" in line for line in plan_lines(plan()))


def test_the_settings_of_the_newest_round_are_described() -> None:
    flower = FlowerPlan(config={"local-epochs": 1, "key": b"\x00"})
    changes = (
        ScheduledChange(from_round=2, epochs=4, flower=FlowerPlan(config={"local-epochs": 8})),
        ScheduledChange(from_round=9, proximal_weight=0.5),
    )
    run = RunInfo(
        run_id="run-1",
        state=RunState.RUNNING,
        plan=replace(plan(), flower=flower, schedule=changes),
        bundle_sha256="b" * 64,
        version=1,
        version_sha256="a" * 64,
        num_rounds=1,
        reason="",
    )
    rounds = tuple(
        RoundInfo(round=number, base_version=0, phase="training", num_updates=0, opened_at=0.0, version=0)
        for number in (2, 1)
    )
    description = RunDescription(run=run, rounds=rounds, grid=(), num_devices=4)
    lines = description_text(description).splitlines()
    assert "            schedule: from_round 2, epochs 4, flower.config {local-epochs = 8}" in lines
    assert "            schedule: from_round 9, proximal_weight 0.5" in lines
    start = lines.index("  settings  round 2")
    assert lines[start + 1 : start + 3] == [
        "            training: epochs 4, learning_rate 0.1, seed 7",
        "            flower: config {local-epochs = 8, key = b'\\x00'}",
    ]
    row = finite(description_row(description))
    assert isinstance(row, dict)
    assert [(each["training"]["epochs"], each["flower"]["config"]["local-epochs"]) for each in row["last_rounds"]] == [
        (4, 8),
        (1, 1),
    ]
    assert row["plan"]["flower"]["config"]["key"] == {"base64": "AA=="}
    assert row["disk"] is None
    disk = DiskReport(free_bytes=8_000_000, used_bytes=2_000_000, bytes_per_day=500_000.0, days_left=16.0)
    line = "  disk      2 MB used, 8 MB free, +0.5 MB a day, full in 16 days"
    assert line in description_text(replace(description, disk=disk)).splitlines()
    without = replace(description, run=replace(run, plan=plan()))
    assert "settings" not in description_text(without)


def test_the_numbers_of_a_run_with_a_damaged_record_are_unknown() -> None:
    run = RunInfo(run_id="run-1", state=RunState.PAUSED, reason="the record is damaged")
    description = RunDescription(run=run, rounds=(), grid=(), num_devices=4)
    lines = description_text(description).splitlines()
    assert {"  version   unknown", "  rounds    unknown that ended in a version"} <= set(lines)
    row = description_row(description)
    assert [row[key] for key in ("version", "rounds", "max_rounds")] == [None, None, None]
