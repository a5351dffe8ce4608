"""Errors that Rules and optimizers of other distributions raise: one sentence names the part."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.errors import raises
from support.values import plan

from fanin.edge.tensors import Float64s, Int64s
from fanin.protos.errors import InvalidPlan, foreign_text
from fanin.protos.plans import AggregationPlan
from fanin.protos.plans.named import Choice, created
from fanin.server.aggregation.checked import (
    CheckedColumnRule,
    CheckedOptimizer,
    CheckedRule,
    optimizer_of,
    rule_of,
)
from fanin.server.aggregation.contract import check_optimizer, check_rule
from fanin.server.aggregation.outer import FedAvg, State
from fanin.server.aggregation.rules import TrimmedMean


class SixthColumn(TrimmedMean):
    """A rule that reads a column that a small Round does not have."""

    def reduce(self, state: Mapping[str, np.ndarray], columns: Int64s) -> Float64s:
        return columns[:, 6].astype(np.float64)


def test_a_rule_that_raises_is_named() -> None:
    text = "rule SixthColumn: reduce raised IndexError: index 6 is out of bounds for axis 1 with size 3; "
    with raises(AssertionError, text + "correct the rule"):
        check_rule(SixthColumn(0.4), num_updates=3)


class Raising(FedAvg):
    """An optimizer whose step raises."""

    def step(self, state: State, parameters: Float64s, aggregate: Float64s, number: int) -> tuple[State, Float64s]:
        raise ZeroDivisionError("beta")


def test_an_optimizer_that_raises_is_named() -> None:
    with raises(AssertionError, "outer optimizer Raising: step raised ZeroDivisionError: beta; correct it"):
        check_optimizer(Raising(1.0))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "cannot import name 'gone' from 'numpy' (/srv/venv/numpy/__init__.py)",
            "cannot import name 'gone' from 'numpy' (...)",
        ),
        ("bad magic in '/srv/my rules/a.pyc': b'x'", "bad magic in '...': b'x'"),
        ("got 3 B/s and /srv/a:5, expected 1/2", "got 3 B/s and ...:5, expected 1/2"),
    ],
)
def test_a_text_of_another_package_names_no_path(text: str, shown: str) -> None:
    assert foreign_text(ImportError(text)) == f"ImportError: {shown}"


def install(folder: Path, name: str, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution with an entry point ``own`` in a group."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\nown = {name}_parts:own\n")
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize("key", ["rule", "outer_optimizer"])
def test_two_packages_with_one_name_are_both_named(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        install(tmp_path / name, name, f"fanin.{key}s", monkeypatch)
    run_plan = replace(plan(), aggregation=AggregationPlan(**{key: "own"}))
    factory = {"rule": rule_of, "outer_optimizer": optimizer_of}[key]
    text = "'own' is in each of the packages ['first', 'second'], expected one of them; uninstall the others"
    with raises(InvalidPlan, f"plan: aggregation.{key}: {text}"):
        factory(run_plan)


RULE = "an object with the members of Rule or ColumnRule; correct it"
OPTIMIZER = "an object with the members of OuterOptimizer; correct it"


@pytest.mark.parametrize(
    ("key", "body", "text"),
    [
        ("rule", "raise KeyError('beta')", " raised KeyError: 'beta'; correct it"),
        # No file of the coordinator is named.
        (
            "rule",
            "return open('/srv/secret/weights')",
            " raised FileNotFoundError: No such file or directory; correct it",
        ),
        (
            "rule",
            "return plan\ndef own(plan, alpha): return alpha",
            (
                " raised TypeError: option alpha: got no annotation, expected the annotation int, float, str, bool; "
                "correct it"
            ),
        ),
        ("rule", "raise Mine('got 1')", " raised Mine: got 1; correct it"),
        ("rule", "raise InvalidInput('got 2', code='FN-0002')", " raised InvalidInput: got 2; correct it"),
        ("rule", "return plan\nown = 'no function'", " is no function; correct it"),
        ("rule", "return TrimmedMean", f": got the class TrimmedMean, expected {RULE}"),
        ("rule", "return None", f": got NoneType, expected {RULE}"),
        ("rule", "return Empty()", ": num_passes: got 0, expected an integer of at least 1; correct it"),
        ("outer_optimizer", "raise KeyError('beta')", " raised KeyError: 'beta'; correct it"),
        ("outer_optimizer", "return FedAvg", f": got the class FedAvg, expected {OPTIMIZER}"),
        ("outer_optimizer", "return plan", f": got Plan, expected {OPTIMIZER}"),
        (
            "outer_optimizer",
            "return Odd(1.0)",
            ": tensors: got 'm', expected a tuple of different names; correct it",
        ),
    ],
)
def test_a_factory_of_another_distribution_is_named(
    key: str, body: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "own", f"fanin.{key}s", monkeypatch)
    (tmp_path / "own_parts.py").write_text(
        "from fanin.server.aggregation.outer import FedAvg\nfrom fanin.server.aggregation.rules import TrimmedMean\n"
        "class Odd(FedAvg): tensors = 'm'\n"
        "class Empty(TrimmedMean):\n    num_passes = 0\n    def __init__(self): pass\n"
        "from fanin.protos.errors import InvalidInput, InvalidPlan\nclass Mine(InvalidPlan): pass\n"
        f"def own(plan): {body}\n"
    )
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)
    run_plan = replace(plan(), aggregation=AggregationPlan(**{key: "own"}))
    factory = {"rule": rule_of, "outer_optimizer": optimizer_of}[key]
    with raises(InvalidPlan, f"plan: aggregation.{key}: 'own'{text}"):
        factory(run_plan)


@pytest.mark.parametrize("rule", ["WeightedMean()", "TrimmedMean(0.1)"])
def test_results_of_another_distribution_are_checked_and_those_of_fanin_are_not(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group in ("rules", "outer_optimizers"):
        install(tmp_path / group, group, f"fanin.{group}", monkeypatch)
        (tmp_path / group / f"{group}_parts.py").write_text(
            "from fanin.server.aggregation.outer import FedAvg\n"
            "from fanin.server.aggregation.rules import TrimmedMean, WeightedMean\n"
            f"def own(plan): return {rule if group == 'rules' else 'FedAvg(1.0)'}\n"
        )
        monkeypatch.delitem(sys.modules, f"{group}_parts", raising=False)
    ours = AggregationPlan(rule="trimmed_mean", rule_options={"trim": 0.4}) if "Trimmed" in rule else AggregationPlan()
    our_plan = replace(plan(), aggregation=ours, cohort=replace(plan().cohort, concurrency=3, buffer=3, quorum=3))
    their_plan = replace(our_plan, aggregation=AggregationPlan(rule="own", outer_optimizer="own"))
    assert type(rule_of(our_plan)).__name__ == rule.partition("(")[0]
    assert type(optimizer_of(our_plan)) is FedAvg
    assert isinstance(rule_of(their_plan), CheckedColumnRule | CheckedRule)
    assert isinstance(optimizer_of(their_plan), CheckedOptimizer)


def test_an_error_of_a_factory_of_fanin_stays_as_it_is() -> None:
    def failing(_plan: object) -> object:
        raise KeyError("beta")

    with pytest.raises(KeyError, match="beta"):
        created(Choice(key="aggregation.rule", name="own"), {"own": failing}, "fanin.rules", plan())


def test_a_package_that_cannot_be_imported_names_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "odd", "fanin.rules", monkeypatch)
    (tmp_path / "odd_parts.py").write_text("from numpy import gone\n")
    text = "plan: aggregation.rule: 'own' cannot be imported from odd_parts:own (ImportError: cannot import name 'gone'"
    with raises(InvalidPlan, f"{text} from 'numpy' (...)); repair that package"):
        rule_of(replace(plan(), aggregation=AggregationPlan(rule="own")))
