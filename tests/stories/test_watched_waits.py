"""A Round that waits for devices: who watches it sees how many work, wait and gave up, and the newest reason."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import federations as f
from support.hosted import Hosted

from fanin.commands.display.follow import Watched, WatchPauses, follow
from fanin.protos import messages as m
from fanin.protos.messages import Command, RunState, Stop

REASON = "training: got 7 labels, expected 3 [FN-0843]"
PAUSES = WatchPauses(first_s=0.05, next_s=0.05)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    """A coordinator with an open Round for three devices: one gave up, and one works."""
    host = Hosted(tmp_path / "host").start()
    bundle = f.bundle_in(host.folder, f.SMALL_SHAPES)
    host.start_run(f.plan(), bundle, f.PUBLISHER)
    first, second, _ = f.peers(host, bundle, host.folder)
    first.begin()
    with first.transport() as transport:
        transport.report(m.Report(assignment_id=first.work.assignment_id, failure=REASON))
    second.begin()
    yield host
    host.stop()


@pytest.mark.parametrize("target", ["", "-"])
def test_a_watched_round_that_waits_is_shown(host: Hosted, capsys: pytest.CaptureFixture[str], target: str) -> None:
    def stop() -> None:
        with host.operator() as operator:
            operator.command(Command(command_id="stop", run_id="run", what=Stop()))

    timer = threading.Timer(1.0, stop)
    timer.start()
    with host.operator() as operator:
        watched = Watched(json_target=target, pauses=PAUSES)
        outcome = follow(operator.watch_live("run"), watched)
        assert outcome is RunState.STOPPED
    timer.join()
    out = capsys.readouterr().out
    if target:
        rows = [json.loads(line) for line in out.splitlines()]
        (row,) = [row for row in rows if row["event"] == "RoundWaits"]
        counts = {"num_at_work": 1, "num_waiting": 0, "num_gave_up": 1, "num_refused": 0}
        assert row == {"event": "RoundWaits", "round": 1, **counts, "last_failure": REASON, "progress": {}}
    else:
        # The counts do not change, so there is one line.
        assert out.count("waits") == 1
        assert f"round 1 waits: 1 device at work, 0 waiting, 1 gave up, the last with: {REASON!r}\n" in out


def test_a_description_has_the_last_failure_and_the_waiting_devices(host: Hosted) -> None:
    with host.operator() as operator:
        description = operator.describe("run")
    assert (description.live.last_failure, description.live.num_waiting) == (REASON, 0)
