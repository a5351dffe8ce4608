"""The contract of Bundles, Runs, Versions and events."""

from dataclasses import replace

from fanin.protos.chunks import Artifact
from fanin.protos.errors import Conflict
from fanin.protos.messages import RunState
from fanin.server.storage.contracts.values import BUNDLE, OPERATOR, RUN, refusal, start, version
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
    record = RunRecord(start=start(), state=RunState.RUNNING, reason="", max_rounds=5, started_by=OPERATOR)
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
