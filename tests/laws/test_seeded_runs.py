"""Laws of complete Runs: with any faults of devices, network and coordinator, no Update is lost or counted twice.

Each seed draws a Plan, the habits of its devices and the stops of its coordinator, and plays the Run on the virtual
clock. ``run_of(SEED)`` replays a seed that failed.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.virtual import PUBLISHER, plan

from fanin.edge.bundles.bundle import Bundle
from fanin.protos import messages as m
from fanin.protos.messages import LoggedEvent, RoundClosed, RoundFailed, RunRested, RunState, VersionPublished
from fanin.protos.plans import Plan
from fanin.server.aggregation.outer import OPTIMIZERS
from fanin.server.aggregation.verify import Verdict, verify_run
from fanin.server.storage.records import CommittedUpdate
from fanin.simulation import Federation, Habits, Member, SyntheticTrainer, run_virtual, synthetic_bundle

RUN = "run"
NUM_NIGHTLY = 5_000
NUM_PARTS = 10
CI_SEEDS = range(60)
LONGEST_S = 30 * 86400.0


class Witness(Federation):
    """A Federation that records each Update that the coordinator has acknowledged as accepted."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self.accepted: set[tuple[str, str]] = set()

    async def upload(
        self, device: str, header: m.UpdateHeader, pieces: AsyncIterator[m.Piece]
    ) -> AsyncIterator[m.UploadReply]:
        async for reply in super().upload(device, header, pieces):
            if reply.update_state is m.UpdateState.ACCEPTED:
                self.accepted.add((device, header.assignment_id))
            yield reply


@dataclass(kw_only=True)
class Course:
    """The course of a Run.

    Attributes:
        plan: The Plan of the Run.
        events: The record of the Run.
        verdicts: The verdict of ``verify`` on each Version.
        committed: The Updates of each Round.
        accepted: (device, Assignment) of each acknowledged Update.
        end_s: The virtual time of the end.
    """

    plan: Plan
    events: list[LoggedEvent]
    verdicts: tuple[Verdict, ...]
    committed: dict[int, tuple[CommittedUpdate, ...]] = field(default_factory=dict)
    accepted: set[tuple[str, str]] = field(default_factory=set)
    end_s: float = 0.0


def plan_of(rng: random.Random) -> Plan:
    concurrency = rng.randint(2, 5)
    buffer = rng.randint(1, concurrency)
    is_robust = buffer == concurrency and concurrency >= 4 and rng.random() < 0.3
    robust: dict[str, object] = {"rule": "trimmed_mean", "rule_options": {"trim": 0.25}} if is_robust else {}
    return plan(
        concurrency=concurrency,
        buffer=buffer,
        quorum=buffer if is_robust else rng.randint(1, buffer),
        deadline_s=rng.choice([60.0, 600.0, 6000.0]),
        max_rounds=rng.randint(1, 3),
        max_staleness=0 if is_robust else rng.choice([0, 0, 1, 3]),
        outer_optimizer=rng.choice(sorted(set(OPTIMIZERS) - {"feddyn"})),
        codec=rng.choice([m.CodecSpec(name="fixed32", max_shift=0), m.CodecSpec(name="int8", max_shift=4)]),
        **robust,
    )


def habits_of(rng: random.Random, *, may_go: bool) -> Habits:
    """Draw the habits of a device. With ``may_go`` it may leave for good: a Run with too few devices waits for more."""
    lost = rng.choice([0.0, 0.0, 0.1])
    return Habits(
        work_s=(1.0, rng.choice([5.0, 100.0])),
        slow=rng.choice([0.0, 0.1]),
        piece_s=rng.choice([0.0, 1.0]),
        cut=rng.choice([0.0, 0.1, 0.3]),
        lie=rng.choice([0.0, 0.0, 0.3]),
        stay_s=rng.choice([float("inf"), 120.0, 20.0]),
        away_s=(5.0, rng.choice([60.0, 1000.0])),
        lost=lost if may_go else 0.0,
    )


def run_of(seed: int, bundle: Bundle) -> Course:
    """Play the Run of a seed."""

    async def main() -> Course:
        rng = random.Random(seed)
        plan = plan_of(rng)
        async with Witness(seed) as federation:
            await federation.start_run(RUN, plan, bundle, PUBLISHER)
            for index in range(plan.cohort.concurrency + rng.randint(0, 2)):
                trainer = SyntheticTrainer(partition=index, num_examples=rng.randint(1, 50))
                habits = habits_of(rng, may_go=index >= plan.cohort.concurrency)
                federation.join(Member(device=f"d{index}", trainer=trainer, habits=habits), bundle)
            stops_s = [rng.uniform(0.0, 300.0) for _ in range(rng.randint(0, 3))]
            federation.interrupt(stops_s, rng.choice([0.1, 5.0, 100.0]))
            async with asyncio.timeout(LONGEST_S):
                events = [entry async for entry in federation.watch(RUN)]
            course = Course(plan=plan, events=events, verdicts=tuple(verify_run(federation.state, RUN)))
            last = await federation.state.stores.rounds.last(RUN)
            for number in range(1, 1 + (last.round if last is not None else 0)):
                course.committed[number] = await federation.state.stores.rounds.updates(RUN, number)
            course.accepted = federation.accepted
            course.end_s = asyncio.get_running_loop().time()
            return course

    return run_virtual(main())


def check(course: Course) -> None:
    events = [entry.event for entry in course.events]
    # The Run ends, with a reason.
    rest = events[-1]
    assert isinstance(rest, RunRested)
    assert rest.state in (RunState.FINISHED, RunState.FAILED) and rest.reason
    versions = [event for event in events if isinstance(event, VersionPublished)]
    assert rest.state is RunState.FAILED or len(versions) == course.plan.stop.max_rounds
    # Each Version is the result of its Updates.
    assert [verdict.problem for verdict in course.verdicts] == [""] * (len(versions) + 1)
    # No Update is counted twice: neither an Assignment, nor a device in a Round.
    closed = {event.round: event.accepted for event in events if isinstance(event, RoundClosed)}
    folded = Counter(
        (update.device_id, update.header.assignment_id)
        for number, devices in closed.items()
        for update in course.committed[number]
        if update.device_id in devices
    )
    assert [key for key, times in folded.items() if times > 1] == []
    for number, devices in closed.items():
        assert len(set(devices)) == len(devices)
        # The number of Updates is between the quorum and the buffer.
        assert course.plan.cohort.quorum <= len(devices) <= course.plan.cohort.buffer
        assert {update.device_id for update in course.committed[number]} >= set(devices)
    # No acknowledged Update is lost: it is in a Version, or its Round failed or was open when the Run ended.
    failed = {event.round for event in events if isinstance(event, RoundFailed)}
    published = {event.round for event in versions}
    assert published <= set(closed)
    assert not published & failed
    rounds_of = {
        (update.device_id, update.header.assignment_id): number
        for number, updates in course.committed.items()
        for update in updates
    }
    for key in course.accepted:
        number = rounds_of[key]
        assert key in folded or number in failed or number not in published, (key, number)


@pytest.fixture(scope="module")
def bundle() -> Iterator[Bundle]:
    with TemporaryDirectory() as folder:
        yield synthetic_bundle(Path(folder) / "bundle", PUBLISHER, {"a": (5, 7), "b": (3,)})


def check_seeds(seeds: range, bundle: Bundle) -> None:
    finished = Counter[RunState]()
    for seed in seeds:
        course = run_of(seed, bundle)
        try:
            check(course)
        except AssertionError as exc:
            raise AssertionError(f"seed {seed}: {exc}") from exc
        rest = course.events[-1].event
        assert isinstance(rest, RunRested)
        finished[rest.state] += 1
    # The drawn Runs are neither all easy nor all hopeless.
    assert min(finished[RunState.FINISHED], finished[RunState.FAILED]) >= len(seeds) // 50, finished


def test_no_update_is_lost_or_counted_twice(bundle: Bundle) -> None:
    check_seeds(CI_SEEDS, bundle)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_no_update_of_a_nights_runs_is_lost_or_counted_twice(part: int, bundle: Bundle) -> None:
    # Each day has seeds of its own.
    size, first = NUM_NIGHTLY // NUM_PARTS, datetime.now(UTC).date().toordinal() * NUM_NIGHTLY
    check_seeds(range(first + part * size, first + (part + 1) * size), bundle)
