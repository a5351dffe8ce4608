"""Runs with a mechanism of privacy on a virtual clock, and what they have spent."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from fanin.protos.messages import RunInfo
from fanin.protos.plans import Plan, PrivacyPlan
from fanin.simulation import run_virtual
from support.staleness import devices, hang_up
from support.virtual import Place, bundle_in, open_place, plan, start

PRIVACY: Final = PrivacyPlan(
    mechanism="central",
    clip_norm=0.5,
    noise_multiplier=5.0,
    epsilon=1.8,
    delta=1e-6,
    population="phones",
    population_size=1000,
)
"""Three Rounds are within the budget: epsilon is 0.90, 1.31, 1.62 and 1.90."""
NUM_ROUNDS: Final = 3


def private(max_rounds: int = 9, **changes: object) -> Plan:
    """Return a Plan of four devices with these changes of its section of privacy."""
    base = plan(max_rounds=max_rounds)
    privacy = replace(PRIVACY, **changes)
    return replace(base, aggregation=replace(base.aggregation, max_examples=1), privacy=privacy)


def story(folder: Path, tell: Callable[[Place], Awaitable[None]]) -> None:
    """Tell a story of a coordinator with four devices."""

    async def main() -> None:
        place = open_place(folder)
        await place.runs.start()
        tasks = devices(folder, place)
        await tell(place)
        await hang_up(place, tasks)

    run_virtual(main())


async def begin(place: Place, folder: Path, run_plan: Plan, run_id: str = "run") -> None:
    """Start a Run."""
    await start(place.runs, bundle_in(folder), run_plan, run_id)


async def rested(place: Place, run_id: str = "run") -> RunInfo:
    """Wait until a Run rests."""
    async for _ in place.runs.watch(run_id, 0):
        pass
    return await place.runs.info(run_id)


async def num_rows(place: Place) -> int:
    """Return the number of rows of the ledger of the population of ``PRIVACY``."""
    return (await place.state.stores.ledger.counts(PRIVACY.population)).newest
