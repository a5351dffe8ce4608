"""Laws of a closed set: the same Updates give the same Version, for any course of the Run and any way of folding.

The first kind of test runs the complete coordinator on a virtual clock. It varies the order of Updates, and adds broken
connections, dishonest devices, and devices and coordinators that stop and resume. The second kind tests the fold alone,
from payload bytes to parameter bytes. It uses any tree of partial sums, as in relays, and any number of folds of one
set, as in replicas.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.laws import tables
from support.scenarios import CALM, PATIENT_S, outcome_of
from support.virtual import plan

from fanin.edge.codecs.fixed import CODECS, decoded_pieces
from fanin.edge.codecs.vector import VectorLayout
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of
from fanin.protos.plans import DEFAULT_MAX_SHIFTS, Plan
from fanin.server.aggregation.checked import optimizer_of
from fanin.server.aggregation.fold import PartialSum, accept, begin, finish, merge
from fanin.server.aggregation.folding import Lag, OuterStep, contribution_of
from fanin.server.aggregation.outer import RoundStep
from fanin.server.aggregation.sets import Aggregate
from fanin.simulation import Habits, Lie

NUM_DEVICES = 3
HABITS = st.builds(
    Habits,
    work_s=st.sampled_from(((0.0, 0.0), (1.0, 100.0))),
    slow=st.sampled_from((0.0, 0.3)),
    piece_s=st.sampled_from((0.0, 5.0)),
    cut=st.sampled_from((0.0, 0.3)),
    lie=st.sampled_from((0.0, 0.5)),
    lies=st.lists(st.sampled_from(Lie), min_size=1, unique=True).map(tuple),
    stay_s=st.sampled_from((float("inf"), 60.0)),
)


def plan_for_all_devices(codec: str) -> Plan:
    """Return a Plan in which every Round waits for every device."""
    spec = m.CodecSpec(name=codec, max_shift=DEFAULT_MAX_SHIFTS[codec])
    return plan(
        concurrency=NUM_DEVICES,
        buffer=NUM_DEVICES,
        quorum=NUM_DEVICES,
        deadline_s=PATIENT_S,
        max_rounds=2,
        codec=spec,
    )


@cache
def versions_without_faults(codec: str) -> tuple[str, ...]:
    """Return the Versions of a Run without faults."""
    with TemporaryDirectory() as folder:
        return outcome_of(Path(folder), plan_for_all_devices(codec), [CALM] * NUM_DEVICES).digests


# An example is a complete federation. A failure is not shrunk, because that would take minutes.
@settings(max_examples=12, phases=(Phase.explicit, Phase.generate))
@given(
    st.integers(0, 1 << 32),
    st.lists(HABITS, min_size=NUM_DEVICES, max_size=NUM_DEVICES),
    st.lists(st.floats(0.0, 300.0), max_size=2).map(tuple),
    st.sampled_from(sorted(CODECS)),
)
def test_any_course_of_the_coordinator_publishes_the_same_versions(
    seed: int, habits: list[Habits], stops_s: tuple[float, ...], codec: str
) -> None:
    with TemporaryDirectory() as folder:
        outcome = outcome_of(Path(folder), plan_for_all_devices(codec), habits, seed, stops_s)
    assert outcome.digests == versions_without_faults(codec)
    assert [verdict.num_updates for verdict in outcome.verdicts] == [0, NUM_DEVICES, NUM_DEVICES]


@dataclass(frozen=True)
class CommittedUpdate:
    """A committed Update: its header, its payload, and its lag."""

    header: m.UpdateHeader
    payload: bytes
    lag: Lag


@dataclass(frozen=True)
class ClosedSet:
    """A closed set, and the inputs of its fold."""

    table: TensorTable
    plan: Plan
    grid: tuple[int, ...]
    parent: Float32s
    updates: tuple[CommittedUpdate, ...]

    @property
    def layout(self) -> VectorLayout:
        """The layout with a single group: the parameters."""
        return VectorLayout(table=self.table)

    def add(self, total: PartialSum, update: CommittedUpdate, rng: random.Random) -> PartialSum:
        """Add one Update to the sum. Its payload is cut at random places."""
        codec = CODECS[update.header.codec]
        cuts = sorted(rng.randint(0, len(update.payload)) for _ in range(rng.randint(0, 4)))
        ends = [*cuts, len(update.payload)]
        view = memoryview(update.payload)
        slices = [view[first:last] for first, last in zip([0, *cuts], ends, strict=True)]
        pieces = list(decoded_pieces(codec, slices, self.table.num_values))
        contribution = contribution_of(update.header, codec, self.plan, self.layout, update.lag)
        return accept(total, self.table, replace(contribution, pieces=pieces))

    def published(self, total: PartialSum, rng: random.Random) -> tuple[bytes, object]:
        """Return the bytes of the next parameters, all other results for the next Round, and the sum itself.

        The sum has more bits than any of the others.
        """
        aggregate = Aggregate(
            part=lambda first, last: finish(total, self.table, self.grid, (first, last)),
            reaches=total.reaches,
            counts=total.counts,
            shifts=(0,) * len(self.grid),
        )
        round_step = RoundStep(optimizer=optimizer_of(self.plan), number=1)
        step = OuterStep(aggregate, self.layout, self.grid, self.plan.codec, round_step)
        cuts = sorted(rng.randint(0, self.parent.size) for _ in range(rng.randint(0, 3)))
        after = b"".join(piece.tobytes() for piece in step.parameters(np.split(self.parent, cuts), {}))
        return after, (step.result(), total.values.tobytes(), total.total_weights.tobytes(), total.num_updates)


@st.composite
def closed_sets(draw: st.DrawFn) -> ClosedSet:
    """Draw any closed set: weights up to and above the Plan's cap, shifts, stale Updates of other grids, all codecs."""
    table, codec = draw(tables()), draw(st.sampled_from(sorted(CODECS)))
    num_updates = draw(st.integers(1, 6))
    run_plan = plan(
        concurrency=6,
        buffer=6,
        quorum=1,
        max_staleness=4,
        codec=m.CodecSpec(name=codec, max_shift=draw(st.sampled_from((4, 8)))),
    )
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    grid = tuple(int(exponent) for exponent in rng.integers(-24, -8, len(table.specs)))
    updates = []
    for index in range(num_updates):
        lag = Lag(staleness=int(rng.integers(0, 5)), shifts=tuple(int(x) for x in rng.integers(-6, 7, len(grid))))
        update_grid = [own + more for own, more in zip(grid, lag.shifts, strict=True)]
        change = (rng.normal(0.0, 10.0 ** rng.integers(-5, 2), table.num_values)).astype(np.float32)
        encoded = CODECS[codec].encode(table, change, update_grid, run_plan.codec.max_shift, rng)
        counts = {
            m.EXAMPLES: int(rng.choice((1, 17, 4096, 100_000))),
            m.ROUNDED: encoded.num_rounded,
            m.SATURATED: encoded.num_saturated,
        }
        header = m.UpdateHeader(
            format=m.UPDATE_FORMAT,
            assignment_id=f"run.1.{index}",
            run_id="run",
            round=1,
            version_sha256="00" * 32,
            codec=codec,
            shifts=encoded.shifts,
            payload=artifact_of(encoded.payload),
            statistics=m.Statistics(counts=MappingProxyType(counts)),
            telemetry=m.Telemetry(runtime="none"),
        )
        updates.append(CommittedUpdate(header, encoded.payload, lag))
    parent = rng.normal(0.0, 1.0, table.num_values).astype(np.float32)
    return ClosedSet(table, run_plan, grid, parent, tuple(updates))


Fold = Callable[[ClosedSet, Sequence[CommittedUpdate], random.Random], PartialSum]


def fold_in_order(closed: ClosedSet, updates: Sequence[CommittedUpdate], rng: random.Random) -> PartialSum:
    """Fold the Updates in one process, in the given order."""
    total = begin(closed.table)
    for update in updates:
        total = closed.add(total, update, rng)
    return total


def fold_by_relays(closed: ClosedSet, updates: Sequence[CommittedUpdate], rng: random.Random) -> PartialSum:
    """Fold the Updates by a tree of relays.

    Each relay folds its own devices and merges the partial sums of the relays below it, in order of arrival. Some
    relays have no Update to send.
    """
    if len(updates) <= 1 or rng.random() < 0.3:
        return fold_in_order(closed, rng.sample(updates, len(updates)), rng)
    num_below = rng.randint(1, 3)
    places: list[list[CommittedUpdate]] = [[] for _ in range(num_below + 1)]
    for update in updates:
        places[rng.randint(0, num_below)].append(update)
    own, *below = places
    if len(own) == len(updates) or any(len(place) == len(updates) for place in below):
        return fold_in_order(closed, rng.sample(updates, len(updates)), rng)
    partials = [fold_by_relays(closed, place, rng) for place in below]
    total = fold_in_order(closed, rng.sample(own, len(own)), rng)
    for partial in rng.sample(partials, len(partials)):
        total = merge(total, partial)
    return total


def fold_after_a_restart(closed: ClosedSet, updates: Sequence[CommittedUpdate], rng: random.Random) -> PartialSum:
    """Fold by a replica that restarts in the middle: the sum is only a cache of the set."""
    order = rng.sample(updates, len(updates))
    fold_in_order(closed, order[: rng.randint(0, len(order))], rng)
    return fold_in_order(closed, rng.sample(updates, len(updates)), rng)


@given(closed_sets(), st.randoms(use_true_random=False))
def test_any_tree_of_relays_publishes_the_same_bits(closed: ClosedSet, rng: random.Random) -> None:
    expected = closed.published(fold_in_order(closed, closed.updates, rng), rng)
    for _ in range(3):
        assert closed.published(fold_by_relays(closed, closed.updates, rng), rng) == expected


@given(closed_sets(), st.randoms(use_true_random=False))
def test_any_folders_of_one_set_publish_the_same_bits(closed: ClosedSet, rng: random.Random) -> None:
    folders: tuple[Fold, ...] = (fold_in_order, fold_by_relays, fold_after_a_restart, fold_after_a_restart)
    assert len({repr(closed.published(fold(closed, closed.updates, rng), rng)) for fold in folders}) == 1


@given(closed_sets(), st.randoms(use_true_random=False))
def test_another_set_is_another_sum(closed: ClosedSet, rng: random.Random) -> None:
    complete = fold_in_order(closed, closed.updates, rng)
    partial = fold_in_order(closed, closed.updates[1:], rng)
    assert partial.num_updates < complete.num_updates
    assert (partial.total_weights <= complete.total_weights).all()
