"""The contract of the removal of what a Run no longer needs."""

from fanin.protos.errors import Conflict
from fanin.protos.messages import VersionPublished
from fanin.protos.plans import RetentionPlan
from fanin.server.storage.contracts.values import refusal, version
from fanin.server.storage.protocols.retention import PendingRound, PendingVersion, Removed
from fanin.server.storage.records import ForgottenSet, Newest, set_sha256
from fanin.server.storage.retention import GRACE_S, Removable, removable
from fanin.server.storage.stores import Stores

LATER_S = 1000.0 + GRACE_S
LIMITS = RetentionPlan(keep_versions=1, keep_updates=1)


async def check_retention(stores: Stores, run_id: str) -> None:
    """Check a store in which a Run has the Versions 0 to 3, of which 1 is the best evaluated. Raises AssertionError."""
    retention = stores.retention
    facts = await retention.facts(run_id)
    nothing = removable(facts, RetentionPlan(), LATER_S)
    assert nothing == Removable(), f"facts: got {nothing} without limits, expected nothing"
    early = removable(facts, LIMITS, 171.0)
    assert early.versions == (), f"facts: got {early.versions} a second after the publication, expected none"
    # Version 2 is the base of the kept Round, and Version 1 the best evaluated one.
    expected = Removable(versions=(0,), rounds=(1, 2))
    what = removable(facts, LIMITS, LATER_S)
    assert what == expected, f"facts: got {what}, expected {expected}"
    versions, rounds, num_events = await retention.contents(run_id, what)
    assert [each.number for each in versions] == [0], "contents: expected the version"
    assert [[device for _, device in each.updates] for each in rounds] == [["a"], ["a"]], "contents: expected updates"
    assert num_events == 0, "contents: counted events without keep_days"
    assert await retention.removed(run_id) == Removed(), "contents: removed something"
    size = await _num_artifacts(stores)
    assert await retention.remove(run_id, LIMITS, LATER_S) == expected, "remove: expected what was removable"
    assert await retention.remove(run_id, LIMITS, LATER_S) == Removable(), "remove: removed something twice"
    removed = Removed(versions={0: LATER_S}, rounds={1: LATER_S, 2: LATER_S})
    assert await retention.removed(run_id) == removed, f"removed: got {await retention.removed(run_id)}"
    assert await _num_artifacts(stores) == size - 1, "artifact_page: has the parameters that were removed"
    assert 0 not in await stores.evaluations.unevaluated(run_id, -1), "unevaluated: has a version without parameters"
    assert await stores.runs.version(run_id, 0) is not None, "remove: removed the record of a version"
    await _check_pending(stores, run_id)
    await _check_adoption(stores, run_id)


async def _num_artifacts(stores: Stores) -> int:
    count = 0
    sequence: int | None = 0
    while sequence is not None:
        page, sequence = await stores.runs.artifact_page(sequence)
        count += len(page)
    return count


async def _check_forgotten(stores: Stores, run_id: str) -> None:
    """Check that the rows of Updates go, and what they count for stays."""
    retention, rounds = stores.retention, stores.rounds

    async def counts() -> list[object]:
        return [
            await rounds.contributors(run_id),
            await rounds.last_folded(run_id, "a", lineage=0),
            [each.num_updates for each in await rounds.latest(run_id, 10)],
        ]

    before, digest = await counts(), set_sha256(await rounds.updates(run_id, 1))
    forgotten = 0
    while page := await retention.forget(run_id):
        forgotten += page
    assert forgotten == 2, f"forget: got {forgotten} rounds, expected those whose updates were removed"
    for number in (1, 2):
        assert await rounds.updates(run_id, number) == (), f"forget: left the updates of round {number}"
        assert await rounds.update(run_id, number, "a") is None, f"forget: left the update of round {number}"
    record = (await rounds.since(run_id, 0))[0]
    expected = ForgottenSet(num_updates=1, sha256=digest)
    assert record.forgotten == expected, f"forget: got {record.forgotten}, expected {expected}"
    assert (record.accepted, record.num_accepted) == ((), 1), "forget: left the list of the set"
    assert await counts() == before, f"forget: changed the counts from {before} to {await counts()}"
    while await retention.give_back():
        pass


async def _check_pending(stores: Stores, run_id: str) -> None:
    retention = stores.retention
    rounds, versions = await retention.pending_rounds(), await retention.pending_versions()
    assert sorted(each.round for each in rounds) == [1, 2], "pending_rounds: expected the rounds that were removed"
    assert [each.number for each in versions] == [0], "pending_versions: expected the version that was removed"
    pending: tuple[PendingRound | PendingVersion, ...] = (*rounds, *versions)
    for each in (*pending, *pending):
        await retention.finish(each, LATER_S)
    await _check_forgotten(stores, run_id)
    left = (await retention.pending_rounds(), await retention.pending_versions())
    assert left == ((), ()), f"finish: left {left}"


async def _check_adoption(stores: Stores, run_id: str) -> None:
    newest = version(await stores.runs.newest_version(run_id), run_id)

    def adopt(number: int) -> Newest:
        event = VersionPublished(
            number=newest.number,
            version_sha256=newest.sha256,
            parent=newest.parent,
            adopted_run_id=run_id,
            adopted_number=number,
        )
        return Newest(version=newest, event=event)

    publication = stores.control.publish(run_id, adopt(0), LATER_S)
    await refusal(Conflict, publication, "publish: adopted a version without parameters", "FN-1441")
