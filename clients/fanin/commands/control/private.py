"""What a Plan promises about privacy, as text: its claim and unit, notes on weak terms, and the options of masks."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from fanin.commands.console.show import privacy_text
from fanin.edge.masking.settings import MaskSettings
from fanin.protos.messages import PrivacyPopulation, SpentPrivacy, relation_of
from fanin.protos.plans import SECAGG_PROTOCOL, Plan
from fanin.protos.texts import listed

UNIT: Final = "one device with all its examples, over all runs of the population"
DELTA_POWER: Final = -1.1
"""A delta above ``population_size`` to this power is noted. A mechanism that publishes the data of a random device has
delta 1 / n, so delta must be well below it (Dwork and Roth 2014, "The algorithmic foundations of differential privacy",
section 2.3). n^-1.1 is a common choice (Ponomareva et al. 2023, "How to DP-fy ML")."""


def claim_notes(plan: Plan) -> tuple[str, ...]:
    """Return notes on the claim of a private Plan: its unit, and a delta that is weak for the population."""
    privacy = plan.privacy
    if not privacy:
        return ()
    unit = (
        f"privacy: the unit of the claim is {UNIT} ({relation_of(privacy)}). A hospital with one device is one unit as "
        "a whole, however many patients it has"
    )
    least = privacy.population_size**DELTA_POWER
    weak = (
        f"privacy.delta: {privacy.delta:g} is weak for a population of {privacy.population_size:,} devices; choose at "
        f"most {least:.2g}, which is population_size^{DELTA_POWER:g}: a mechanism with delta 1 / population_size may "
        "publish all data of a random device"
    )
    return (unit, weak) if privacy.delta > least else (unit,)


def population_notes(plan: Plan, known: Sequence[PrivacyPopulation]) -> tuple[str, ...]:
    """Return a note if a Plan begins a population at 0 where others have been charged.

    Args:
        plan: The Plan.
        known: The populations of the coordinator before its Run.
    """
    name = plan.privacy.population
    others = [f"{each.name} (epsilon {each.newest.epsilon:.4g})" for each in known if each.newest is not None]
    if not plan.privacy or not others or name in {each.name for each in known}:
        return ()
    note = (
        f"privacy.population: {name} is new here and begins at epsilon 0, but the devices of this coordinator may have "
        f"been charged in {listed(others)}. A device that belongs to both has lost both together: use the name that "
        "exists unless no device does"
    )
    return (note,)


def privacy_lines(spent: SpentPrivacy | None) -> list[str]:
    """Return what the population of a Run has spent, and of what unit, as lines; none without privacy."""
    if spent is None:
        return []
    return [f"  privacy   {privacy_text(spent)}, population {spent.population}", f"            unit: {UNIT}"]


def mask_options(plan: Plan | None) -> dict[str, object]:
    """Return all options of the masks of a Plan, also those with their defaults; empty without masks."""
    if plan is None or plan.round.protocol != SECAGG_PROTOCOL:
        return {}
    options = asdict(MaskSettings(**dict(plan.round.options)))  # type: ignore[arg-type]  # checked with the Plan
    return {name: value for name, value in options.items() if value != ""}


def mask_text(plan: Plan | None) -> str:
    """Return all options of the masks of a Plan on one line; empty without masks."""
    shown = {name: f"{value:g}" if isinstance(value, float) else value for name, value in mask_options(plan).items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items())
