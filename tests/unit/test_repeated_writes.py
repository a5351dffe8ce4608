"""Writes that are repeated because their success is unknown, and Rounds that have ended, which do not change."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine
from support.stored import FIRST, OPEN, START, Driven, close, commit, committed_update, events, published_event
from support.values import RUN, version

from fanin.protos import messages as m
from fanin.server.storage.disk import Durability
from fanin.server.storage.records import RoundMark
from fanin.server.storage.sqlite.commands import SqliteCommands
from fanin.server.storage.sqlite.engine import open_engine
from fanin.server.storage.sqlite.runs import SqliteRuns


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    db_engine = open_engine(tmp_path / "fanin.db", Durability.PROCESS)
    yield db_engine
    db_engine.dispose()


@pytest.fixture
def rounds(engine: Engine) -> Driven:
    """The store of a started Run with an open Round."""
    SqliteRuns(engine).add_run(START, 5.0)
    store = Driven(engine)
    store.open(OPEN)
    return store


def test_a_committed_write_can_be_repeated_after_an_error_in_between(engine: Engine, rounds: Driven) -> None:
    """A commit may succeed and still report an error. The driver then repeats the write later."""

    def write_twice(write: Callable[[float], object]) -> None:
        first = write(30.0)
        before = (rounds.rounds(RUN), events(engine), SqliteRuns(engine).version(RUN))
        assert write(40.0) == first
        assert (rounds.rounds(RUN), events(engine), SqliteRuns(engine).version(RUN)) == before

    second = replace(OPEN, round=2, base_version=1)
    write_twice(lambda now_s: commit(rounds, committed_update("a"), 2))
    write_twice(lambda now_s: close(rounds, quorum=1))
    write_twice(
        lambda now_s: rounds.publish(
            version(parent=FIRST), published_event(1), next_grid=(1, 2), outer_state={}, now_s=now_s
        )
    )
    write_twice(lambda now_s: rounds.open(second))
    write_twice(lambda now_s: rounds.fail(2, reason="damaged", now_s=now_s))
    assert rounds.open(second) is False


def test_a_round_that_has_ended_does_not_change(engine: Engine, rounds: Driven) -> None:
    commit(rounds, committed_update("a"), 2)
    close(rounds, quorum=1)
    assert rounds.fail(1, reason="damaged", now_s=20.0).mark is RoundMark.FAILED
    assert (
        rounds.publish(version(parent=FIRST), published_event(1), next_grid=(), outer_state={}, now_s=30.0).mark
        is RoundMark.FAILED
    )
    assert SqliteRuns(engine).version(RUN) == FIRST
    assert [event for _, event in events(engine)][-1] == m.RoundFailed(round=1, reason="damaged")
    rounds.open(replace(OPEN, round=2))
    commit(rounds, replace(committed_update("b"), round=2), 2)
    close(rounds, quorum=1, round_number=2)
    rounds.publish(version(parent=FIRST), published_event(2), next_grid=(), outer_state={}, now_s=30.0)
    assert rounds.fail(2, reason="too late", now_s=40.0).mark is RoundMark.PUBLISHED


def test_a_stuck_run_is_stopped_with_its_closed_round(engine: Engine, rounds: Driven) -> None:
    commit(rounds, committed_update("a"), 2)
    close(rounds, quorum=1)
    control = SqliteCommands(engine)
    control.stop(m.Command(command_id="1", run_id=RUN, what=m.Stop()), 20.0)
    # A Run that is not stuck still publishes the Version of its closed Round.
    assert rounds.rounds(RUN)[0].mark is RoundMark.CLOSED
    control.stop(m.Command(command_id="2", run_id=RUN, what=m.Stop()), 30.0, is_stuck=True)
    assert rounds.rounds(RUN)[0].mark is RoundMark.FAILED
    assert [event for _, event in events(engine)][-2:] == [
        m.RunRested(state=m.RunState.STOPPED, reason="by an operator"),
        m.RoundFailed(round=1, reason="stopped by an operator"),
    ]
