"""A simulated Run with stages: devices that leave at any moment, and a coordinator that stops."""

import logging
from pathlib import Path

import pytest
from support.stage_runs import FEEDBACK, scaffold
from support.values import PUBLISHER
from support.virtual import SHAPES, plan

from fanin.protos.messages import CodecSpec, RoundClosed, StageSpec
from fanin.server.aggregation.verify import verify_run
from fanin.server.folder import open_archive
from fanin.simulation import Habits, Member, Scenario, SyntheticTrainer, play, synthetic_bundle

NUM_DEVICES, NUM_ROUNDS = 6, 6


@pytest.mark.parametrize(
    ("codec", "stages"),
    [
        (CodecSpec(name="int8", max_shift=0), (scaffold(NUM_DEVICES), FEEDBACK)),
        (CodecSpec(name="topk", max_shift=12, options={"fraction": 0.1, "bits": 4}), (FEEDBACK,)),
    ],
    ids=["int8", "topk"],
)
def test_devices_that_leave_at_any_moment_have_the_states_that_their_assignments_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, codec: CodecSpec, stages: tuple[StageSpec, ...]
) -> None:
    """A device without the state that its Assignment names would log a warning."""
    habits = Habits(work_s=(1.0, 20.0), cut=0.2, stay_s=60.0, away_s=(1.0, 20.0))
    members = tuple(
        Member(device=f"device-{index}", trainer=SyntheticTrainer(partition=index), habits=habits)
        for index in range(NUM_DEVICES)
    )
    run_plan = plan(
        stages=stages,
        codec=codec,
        concurrency=4,
        buffer=3,
        quorum=2,
        max_rounds=NUM_ROUNDS,
    )
    bundle = synthetic_bundle(tmp_path / "bundle", PUBLISHER, SHAPES, scaffold=len(stages) > 1)
    scenario = Scenario(
        plan=run_plan, bundle=bundle, publisher=PUBLISHER, members=members, seed=3, stops_s=(30.0, 90.0)
    )
    outcomes = [play(scenario, tmp_path / name) for name in ("first", "second")]
    assert outcomes[0].digests == outcomes[1].digests
    rounds = [entry.event for entry in outcomes[0].events if isinstance(entry.event, RoundClosed)]
    # Devices take part repeatedly, so they begin with states.
    assert len({device for event in rounds for device in event.accepted}) < sum(len(each.accepted) for each in rounds)
    verdicts = list(verify_run(open_archive(tmp_path / "first" / "state"), "run"))
    assert [(verdict.version, verdict.problem) for verdict in verdicts] == [(n, "") for n in range(NUM_ROUNDS + 1)]
    clients = [record for record in caplog.records if record.name == "fanin.clients"]
    assert [record.getMessage() for record in clients if record.levelno >= logging.WARNING] == []
