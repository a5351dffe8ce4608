"""Values of another type than a number in the records of a simulation: each error names the field and the value."""

from collections.abc import Callable
from typing import cast

import pytest

from fanin.protos.errors import InvalidInput
from fanin.simulation import (
    Battery,
    DailyWindow,
    DeviceModel,
    Dirichlet,
    FeatureSkew,
    Fixed,
    Habits,
    Lognormal,
    OnOff,
    Pareto,
    Shards,
    Uniform,
)

TEXT = cast("float", "0.5")
CASES: dict[str, tuple[Callable[[], object], str]] = {
    "fixed": (lambda: Fixed(value=TEXT), r"Fixed\(value='0.5'\), expected finite positive numbers"),
    "uniform": (lambda: Uniform(low=1.0, high=TEXT), r"high='0.5'\), expected finite positive numbers"),
    "lognormal": (lambda: Lognormal(median=TEXT, sigma=1.0), "median='0.5', .*expected finite positive numbers"),
    "pareto": (lambda: Pareto(least=1.0, alpha=True), r"alpha=True\), expected finite positive numbers"),
    "dropout": (lambda: DeviceModel(dropout=TEXT), "got dropout '0.5', expected a share from 0 to below 1"),
    "skew": (lambda: FeatureSkew(mixed=TEXT), "got mixed '0.5', expected 0.0 to 1.0"),
    "dirichlet": (lambda: Dirichlet(alpha=True), "got alpha True, expected a positive number"),
    "shards": (lambda: Shards(per_client=True), "got per_client True, expected an integer of at least 1"),
    "window": (lambda: DailyWindow(from_hour=TEXT, hours=8.0), "got from_hour '0.5', hours .*, expected 0 to below 24"),
    "on": (lambda: OnOff(on_s=TEXT, off_s=1.0), "got on_s '0.5', off_s 1.0, expected positive seconds"),
    "battery": (lambda: Battery(work_s=TEXT, charge_s=1.0), "got work_s '0.5', charge_s 1.0, expected positive"),
    "habits": (lambda: Habits(quit=TEXT), "got quit '0.5', expected a share from 0 to 1"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_value_that_is_no_number_is_named(case: str) -> None:
    create, text = CASES[case]
    with pytest.raises((InvalidInput, ValueError), match=text):
        create()
