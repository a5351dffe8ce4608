"""The contract of Bundles, Runs, Versions and events."""

from dataclasses import replace

from fanin.protos.control import RunState
from fanin.protos.errors import Conflict
from fanin.server.storage.contracts.values import BUNDLE, OPERATOR, RUN, refusal, start, version
from fanin.server.storage.protocols.runs import RunRecords
from fanin.server.storage.records import RunRecord


async def check_runs(runs: RunRecords) -> None:
    """Check an empty store of Runs. It has the Runs ``RUN`` and "other" afterwards. Raises AssertionError."""
    sha256 = BUNDLE.manifest.sha256
    assert await runs.bundle(sha256) is None, "bundle: returned one that is not recorded"
    await runs.add_bundle(BUNDLE)
    await runs.add_bundle(replace(BUNDLE, signature=bytes(64)))
    assert await runs.bundle(sha256) == BUNDLE, "add_bundle: changed a known bundle"
    assert await runs.run_key(RUN, b"first") == b"first", "run_key: did not record the first key"
    assert await runs.run_key(RUN, b"second") == b"first", "run_key: changed the key of a run"
    assert await runs.run_key("other", b"third") == b"third", "run_key: two runs share a key"
    assert (await runs.run(RUN), await runs.run_ids()) == (None, ()), "run: returned one that is not recorded"
    assert await runs.version(RUN) is None, "version: returned one of a run that is not recorded"
    await runs.add_run(start(), 5.0, OPERATOR)
    await runs.add_run(start("other"), 6.0)
    await refusal(Conflict, runs.add_run(start(), 9.0), "add_run: with an id that is taken")
    record = RunRecord(start=start(), state=RunState.RUNNING, reason="", max_rounds=5, started_by=OPERATOR)
    assert await runs.run(RUN) == record, f"run: got {await runs.run(RUN)}, expected {record}"
    assert await runs.run_ids() == (RUN, "other"), "run_ids: expected the oldest first"
    assert await runs.run_state(RUN) is RunState.RUNNING, "run_state: a new run is running"
    for actual in (await runs.version(RUN), await runs.version(RUN, 0), await runs.newest_version(RUN)):
        assert actual == version(), f"version: got {actual}, expected version 0"
    assert await runs.version(RUN, 1) is None, "version: returned one that is not recorded"
    assert await runs.lineage_start(RUN) == 0, "lineage_start: of a new run is not 0"
    assert await runs.publication(RUN, 0) is None, "publication: returned an event of version 0"
    assert await runs.event_page(RUN, 0) == (), "event_page: a new run has events"
