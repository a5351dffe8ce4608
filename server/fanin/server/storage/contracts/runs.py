"""The contract of Bundles, Runs, Versions, events and evaluations of Versions."""

from dataclasses import replace

from fanin.protos.chunks import Artifact
from fanin.protos.errors import Conflict
from fanin.protos.messages import RunState, VersionEvaluation
from fanin.server.storage.contracts.values import BUNDLE, OPERATOR, RUN, refusal, start, version
from fanin.server.storage.protocols.evaluations import EvaluationStore
from fanin.server.storage.protocols.runs import RunRecords
from fanin.server.storage.records import RunRecord


async def check_runs(runs: RunRecords) -> None:
    """Check an empty store of Runs. It has the Runs ``RUN`` and "other" afterwards. Raises AssertionError."""
    sha256 = BUNDLE.manifest.sha256
    assert await runs.bundle(sha256) is None, "bundle: returned one that is not recorded"
    await runs.add_bundle(BUNDLE)
    assert await runs.bundles() == (BUNDLE,), f"bundles: got {await runs.bundles()}, expected the recorded one"
    await runs.add_bundle(replace(BUNDLE, signature=bytes(64)))
    assert await runs.bundle(sha256) == BUNDLE, "add_bundle: changed a known bundle"
    assert await runs.run_key(RUN, 1, b"first", 10.0) == b"first", "run_key: did not record the first key"
    assert await runs.run_key(RUN, 1, b"second", 20.0) == b"first", "run_key: changed the key of a run"
    assert await runs.run_key("other", 1, b"third", 30.0) == b"third", "run_key: two runs share a key"
    await refusal(Conflict, runs.run_key(RUN, 2, b"early", 30.0), "run_key: for epoch 2 of a run that is not recorded")
    assert (await runs.run(RUN), await runs.run_ids()) == (None, ()), "run: returned one that is not recorded"
    assert await runs.version(RUN) is None, "version: returned one of a run that is not recorded"
    await runs.add_run(start(), 5.0, OPERATOR)
    await runs.add_run(start("other"), 6.0)
    await refusal(Conflict, runs.add_run(start(), 9.0), "add_run: with an id that is taken", "FN-0509")
    await _check_artifacts(runs)
    await _check_unused_keys(runs)
    record = RunRecord(
        start=start(), state=RunState.RUNNING, reason="", max_rounds=5, started_by=OPERATOR, started_at_s=5.0
    )
    assert await runs.run(RUN) == record, f"run: got {await runs.run(RUN)}, expected {record}"
    assert await runs.run_ids() == (RUN, "other"), "run_ids: expected the oldest first"
    states = (RunState.RUNNING, RunState.FAILED)
    assert await runs.run_ids(states) == (RUN, "other"), "run_ids: expected the runs in these states"
    assert await runs.run_ids((RunState.FAILED,)) == (), "run_ids: got a run in another state"
    assert await runs.run_state(RUN) is RunState.RUNNING, "run_state: a new run is running"
    for actual in (await runs.version(RUN), await runs.version(RUN, 0), await runs.newest_version(RUN)):
        assert actual == version(), f"version: got {actual}, expected version 0"
    assert await runs.version(RUN, 1) is None, "version: returned one that is not recorded"
    assert await runs.lineage_start(RUN) == 0, "lineage_start: of a new run is not 0"
    assert await runs.publication(RUN, 0) is None, "publication: returned an event of version 0"
    assert await runs.event_page(RUN, 0) == (), "event_page: a new run has events"
    assert await runs.newest_sequence(RUN) == 0, "newest_sequence: a new run has events"


async def _check_unused_keys(runs: RunRecords) -> None:
    """Check the removal of keys. Both Runs are recorded and use the key of epoch 1."""
    assert await runs.run_key(RUN, 2, b"next", 40.0) == b"next", "run_key: did not record the key of the next epoch"
    await refusal(Conflict, runs.run_key(RUN, 3, b"later", 40.0), "run_key: for an epoch after the next one")
    assert await runs.run_key("unused", 1, b"unused", 50.0) == b"unused", "run_key: did not record the first key"
    assert await runs.remove_unused_keys(40.0) == 0, "remove_unused_keys: removed a key that was created later"
    assert await runs.remove_unused_keys(50.0) == 1, "remove_unused_keys: expected the key of the next epoch"
    assert await runs.run_key("unused", 1, b"new", 60.0) == b"unused", "remove_unused_keys: removed a key too early"
    assert await runs.remove_unused_keys(51.0) == 1, "remove_unused_keys: expected the key of a run that never started"
    assert await runs.run_key(RUN, 1, b"new", 60.0) == b"first", "remove_unused_keys: removed the key of a run"
    assert await runs.run_key(RUN, 2, b"new", 60.0) == b"new", "remove_unused_keys: kept an unused key"


async def _check_artifacts(runs: RunRecords) -> None:
    """Check the pages of Artifacts. Each of the two Runs has its Version 0."""
    artifacts: list[Artifact] = []
    number: int | None = 0
    while number is not None:
        page, number = await runs.artifact_page(number)
        artifacts += page
    expected = [version().parameters, version(run_id="other").parameters]
    assert artifacts == expected, f"artifact_page: got {artifacts}, expected {expected}"


async def check_evaluations(evaluations: EvaluationStore, run_id: str) -> None:
    """Check a store in which a Run has the Versions 0 to 3 and no evaluation. Raises AssertionError."""
    assert await evaluations.unevaluated(run_id, -1) == frozenset({0, 1, 2, 3}), "unevaluated: lost Versions"
    assert await evaluations.unevaluated(run_id, 1) == frozenset({2, 3}), (
        "unevaluated: returned Versions up to ``above``"
    )
    assert await evaluations.evaluation_page(run_id, 0) == (), "evaluation_page: returned one that is not recorded"
    none = (await evaluations.newest_evaluation(run_id), await evaluations.best_evaluation(run_id))
    assert none == (None, None), "newest_evaluation, best_evaluation: returned one that is not recorded"
    failed, zero, one, two = _problem(1), _evaluation(0, 0.5), _evaluation(1, 0.25), _evaluation(2, 0.25)
    await evaluations.add_evaluation(run_id, failed, None)
    assert 1 in await evaluations.unevaluated(run_id, 0), "unevaluated: lost a Version that has only a problem"
    assert await evaluations.newest_evaluation(run_id) == failed, "newest_evaluation: ignored one with a problem"
    assert await evaluations.best_evaluation(run_id) is None, "best_evaluation: returned one with a problem"
    for each in (two, zero, one):
        await evaluations.add_evaluation(run_id, each, -each.values["loss"])
    assert await evaluations.evaluation_page(run_id, 0) == (zero, one, two), (
        "add_evaluation: kept a problem, or lost order"
    )
    await evaluations.add_evaluation(run_id, _problem(2), None)
    await evaluations.add_evaluation(run_id, _evaluation(2, 9.0), -9.0)
    assert await evaluations.evaluation_page(run_id, 2) == (two,), "add_evaluation: changed one that is final"
    assert await evaluations.unevaluated(run_id, -1) == frozenset({3}), "unevaluated: returned an evaluated Version"
    assert await evaluations.newest_evaluation(run_id) == two, "newest_evaluation: expected the newest Version's"
    assert await evaluations.best_evaluation(run_id) == one, "best_evaluation: expected the oldest of the best"
    assert await evaluations.best_evaluation("other") is None, "best_evaluation: returned one of another Run"


def _evaluation(version: int, loss: float) -> VersionEvaluation:
    return VersionEvaluation(
        version=version,
        data="contract",
        data_sha256="ab" * 32,
        num_examples=7,
        values={"loss": loss},
        runtime="contract 1",
        seconds=1.0,
        time=30.0 + version,
    )


def _problem(version: int) -> VersionEvaluation:
    return VersionEvaluation(version=version, data="contract", time=30.0, problem="the process ended")
