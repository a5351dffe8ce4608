"""Scenarios on a virtual clock for tests: devices that train nothing, and behave as they are told."""

from collections.abc import Sequence
from pathlib import Path

from fanin.clients.testing import Habits, Member, SyntheticTrainer, synthetic_bundle
from fanin.edge.bundles.bundle import Bundle
from fanin.protos.plans import Plan
from fanin.simulation import Outcome, Scenario, play
from support.virtual import PUBLISHER

CALM = Habits()
WILD = Habits(slow=0.1, piece_s=1.0, cut=0.2, lie=0.3, stay_s=120.0, away_s=(5.0, 60.0))
"""Whoever has these gets its Update through in the end."""
SHAPES = {"a": (40, 100), "b": (7,)}
"""16 kB an Update: four pieces of a loopback, so that there is a middle to be cut in."""
PATIENT_S = 1e6
"""A deadline that no device misses, however often it is away: each Round then closes with all of them."""


def bundle_in(folder: Path) -> Bundle:
    """A Bundle of SHAPES."""
    return synthetic_bundle(folder / "bundle", PUBLISHER, SHAPES)


def members(habits: Sequence[Habits]) -> tuple[Member, ...]:
    """A device for each entry: the same trainer for the same place, whatever its habits."""
    return tuple(
        Member(
            device=f"device-{index}", trainer=SyntheticTrainer(partition=index, num_examples=10 + index), habits=each
        )
        for index, each in enumerate(habits)
    )


def told(folder: Path, plan: Plan, habits: Sequence[Habits], seed: int = 0, stops_s: tuple[float, ...] = ()) -> Outcome:
    """What a Run ends in, after each of its Versions was computed again from the record."""
    scenario = Scenario(
        plan=plan,
        bundle=bundle_in(folder),
        publisher=PUBLISHER,
        members=members(habits),
        seed=seed,
        stops_s=stops_s,
    )
    found = play(scenario, folder)
    assert [verdict.problem for verdict in found.verdicts if verdict.problem] == []
    return found
