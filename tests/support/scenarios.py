"""Scenarios on a virtual clock for tests: devices that do not train, and follow their habits."""

from collections.abc import Sequence
from pathlib import Path

from fanin.edge.bundles.bundle import Bundle
from fanin.protos.plans import Plan
from fanin.simulation import Habits, Member, Outcome, Scenario, SyntheticTrainer, play, synthetic_bundle
from support.virtual import PUBLISHER

CALM = Habits()
WILD = Habits(slow=0.1, piece_s=1.0, cut=0.2, lie=0.3, stay_s=120.0, away_s=(5.0, 60.0))
"""With these habits, a device eventually completes its upload."""
SHAPES = {"a": (40, 100), "b": (7,)}
"""16 kB an Update: four pieces of a loopback, so that a connection can break between them."""
PATIENT_S = 1e6
"""A deadline that no device misses, even with many absences, so each Round closes with all devices."""


def bundle_in(folder: Path) -> Bundle:
    """Return a Bundle of SHAPES."""
    return synthetic_bundle(folder / "bundle", PUBLISHER, SHAPES)


def members(habits: Sequence[Habits]) -> tuple[Member, ...]:
    """Return a device for each entry. Its trainer depends on its index only, and not on its habits."""
    return tuple(
        Member(
            device=f"device-{index}", trainer=SyntheticTrainer(partition=index, num_examples=10 + index), habits=each
        )
        for index, each in enumerate(habits)
    )


def outcome_of(
    folder: Path, plan: Plan, habits: Sequence[Habits], seed: int = 0, stops_s: tuple[float, ...] = ()
) -> Outcome:
    """Play a Run, and recompute each of its Versions from the record. Return the outcome."""
    scenario = Scenario(
        plan=plan,
        bundle=bundle_in(folder),
        publisher=PUBLISHER,
        members=members(habits),
        seed=seed,
        stops_s=stops_s,
    )
    outcome = play(scenario, folder)
    assert [verdict.problem for verdict in outcome.verdicts if verdict.problem] == []
    return outcome
