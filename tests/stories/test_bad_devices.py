"""One device among others that is refused, silent or dead: the Run ends well, and the others hardly wait for it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.bad_devices import Group
from support.processes import Site

from fanin.clients.planfile import parse_plan
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.messages import RoundFailed, RunRested, RunState, VersionPublished
from fanin.protos.plans import Plan
from fanin.simulation import synthetic_bundle

PUBLISHER = SigningKey(bytes(range(32)))
NUM_ROUNDS = 5
WORK_S = 0.4
"""Seconds that a healthy device trains."""


def plan_of(concurrency: int, *keys: str) -> Plan:
    """Return a Plan with default keys, except for the deadline, so that a failure is seen soon."""
    first = [f"cohort.concurrency={concurrency}", "cohort.deadline_s=12.0", f"stop.max_rounds={NUM_ROUNDS}"]
    return parse_plan("", "plan", ["bundle=b", "training.learning_rate=0.1", *first, *keys]).plan


@dataclass
class Course:
    """The course of a Run: how it ended, its failed Rounds, and the seconds of the others."""

    rested: RunRested
    failed: list[str]
    rounds_s: list[float]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[[Plan, Callable[[Group], None]], Course]]:
    """A function that plays a Run with devices, and returns its course."""
    site = Site(tmp_path)
    groups: list[Group] = []

    def play(plan: Plan, add: Callable[[Group], None]) -> Course:
        site.serve()
        group = Group(site, PUBLISHER.public, tmp_path)
        groups.append(group)
        add(group)
        site.start_run(plan, synthetic_bundle(tmp_path / "bundle", PUBLISHER, {"a": (20, 30), "b": (3,)}), PUBLISHER)
        events = [entry.event for entry in site.events()]
        rested = events[-1]
        assert isinstance(rested, RunRested)
        return Course(
            rested=rested,
            failed=[event.reason for event in events if isinstance(event, RoundFailed)],
            rounds_s=[round(event.round_s, 2) for event in events if isinstance(event, VersionPublished)],
        )

    yield play
    for group in groups:
        group.close()
    site.close()


def shown(name: str, course: Course) -> None:
    print(f"{name}: {course.rested.state.value} ({course.rested.reason}); failed {course.failed}; {course.rounds_s} s")


def add(healthy: int, *bad: str) -> Callable[[Group], None]:
    """Return a function that adds these devices. The bad ones come first, so that they wait for the first Round."""

    def to(group: Group) -> None:
        for name in bad:
            getattr(group, name)()
        for index in range(healthy):
            group.healthy(index, WORK_S)

    return to


@pytest.mark.parametrize(
    ("healthy", "bad"),
    [(7, ("refused",)), (7, ("silent",)), pytest.param(7, ("silent",) * 3, marks=pytest.mark.nightly)],
    ids=str,
)
def test_a_run_ends_well_with_bad_devices(
    play: Callable[[Plan, Callable[[Group], None]], Course], healthy: int, bad: Sequence[str]
) -> None:
    course = play(plan_of(4), add(healthy, *bad))
    shown(f"{healthy} healthy, {bad}", course)
    assert course.rested.state is RunState.FINISHED
    assert len(course.rounds_s) == NUM_ROUNDS


@pytest.mark.nightly
def test_a_device_that_repeats_a_refused_upload_is_slowed_and_no_other_one(
    play: Callable[[Plan, Callable[[Group], None]], Course],
) -> None:
    """It ignores every reply. Before, it called hundreds of times a second."""
    groups: list[Group] = []

    def to(group: Group) -> None:
        groups.append(group)
        group.stubborn()
        for index in range(3):
            group.healthy(index, WORK_S)

    course = play(plan_of(4, "stop.max_rounds=10"), to)
    (group,) = groups
    seconds = sum(course.rounds_s)
    print(f"{group.num_refused} refused calls in some {seconds:.1f} s")
    shown("a stubborn device beside 3", course)
    assert course.rested.state is RunState.FINISHED
    # Some 20 at once, then 2 a second.
    assert 10 <= group.num_refused <= 30 + 4 * seconds


@pytest.mark.nightly
def test_the_place_of_a_dead_device_goes_to_another_one(
    play: Callable[[Plan, Callable[[Group], None]], Course],
) -> None:
    """Every place must bring an Update. A dead device is silent for three intervals of 1 s, and then it is replaced."""

    def to(group: Group) -> None:
        group.healthy(0, WORK_S, dies_in=1)
        for index in range(1, 5):
            # Longer than an interval, so that each of them reports its progress.
            group.healthy(index, 1.5)

    course = play(plan_of(4, "cohort.quorum=4"), to)
    shown("one dead of 5, quorum 4 of 4", course)
    assert (course.rested.state, course.failed) == (RunState.FINISHED, [])


@pytest.mark.parametrize("num_devices", [4, 8])
def test_a_dead_device_costs_no_deadline(
    play: Callable[[Plan, Callable[[Group], None]], Course], num_devices: int
) -> None:
    """The cohort is as large as the fleet: no other device can take the place of the dead one."""

    def to(group: Group) -> None:
        group.healthy(0, WORK_S, dies_in=2)
        for index in range(1, num_devices):
            group.healthy(index, WORK_S)

    # The quorum is the default; it is written so that this test shows the cost of a deadline before that default.
    course = play(plan_of(num_devices, f"cohort.quorum={num_devices * 3 // 4}"), to)
    shown(f"one dead of {num_devices}", course)
    assert course.rested.state is RunState.FINISHED
    assert max(course.rounds_s) < 8.0
