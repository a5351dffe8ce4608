"""The facts of a committed Update: for the event of its Version, and for warnings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fanin.protos import messages as m
from fanin.server.aggregation.weights import claim_of, examples_of
from fanin.server.rounds.setup import RunSetup
from fanin.server.storage.records import CommittedUpdate

LOSSES: Final = (m.TRAIN_LOSS, m.EVAL_LOSS)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFacts:
    """The facts of an Update for the event of its Version, and for warnings.

    Attributes:
        telemetry: The device's facts about its work.
        wire_bytes: Bytes of the Update on the wire.
        is_stale: Whether it was made for an earlier Version.
        examples: The number of examples that it counts as.
        weight: Its weight before the scale of the Round.
        trained: The number of examples that the device trained on.
        at_bound: The bounds of the losses and of the Plan's statistics whose count is the largest one, by name.
    """

    telemetry: m.Telemetry
    wire_bytes: int
    is_stale: bool
    examples: int
    weight: int
    trained: int
    at_bound: Mapping[str, int]


def reported(update: CommittedUpdate, setup: RunSetup, *, is_stale: bool) -> UpdateFacts:
    """Return the facts of an Update. ``is_stale``: it was made for an earlier Version."""
    plan, header, counts = setup.plan, update.header, update.header.statistics.counts
    names = {*LOSSES, *(each.name for each in plan.statistics)}
    bounds = {each.name: each.bound for each in setup.statistics if each.name in names}
    return UpdateFacts(
        telemetry=header.telemetry,
        wire_bytes=header.payload.size_bytes + len(update.header_proto),
        is_stale=is_stale,
        examples=(examples := examples_of(header, plan)),
        weight=claim_of(header, plan, update.device_id),
        trained=counts.get(m.TRAINED, examples),
        at_bound={name: bound for name, bound in bounds.items() if abs(counts.get(name, 0)) >= bound},
    )
