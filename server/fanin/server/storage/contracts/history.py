"""The contract of the record in pages."""

from fanin.protos.messages import VersionPublished
from fanin.server.storage.protocols.history import HistoryStore
from fanin.server.storage.stores import Stores


async def check_history(history: HistoryStore, stores: Stores) -> None:
    """Check the pages of a record that has Runs with Rounds, Versions and events. Raises AssertionError."""
    every = await history.feed(None, 1000)
    positions = [each.position for each in every]
    assert positions == sorted(positions, reverse=True), "feed: expected the newest event first"
    assert await history.feed(None, 2) == every[:2], "feed: ignored the limit"
    assert await history.feed(positions[1], 1000) == every[2:], "feed: a page has entries of the one before, or a gap"
    assert await history.feed_after(0, 1000) == every[::-1], "feed_after: expected all events, the oldest first"
    assert await history.feed_after(positions[1], 5) == every[:1], "feed_after: expected the events after a position"
    for run_id in await stores.runs.run_ids():
        await _check_run(history, stores, run_id)


async def _check_run(history: HistoryStore, stores: Stores, run_id: str) -> None:
    own = [each.logged for each in await history.feed(None, 1000, run_id)]
    recorded = await stores.runs.event_page(run_id, 0)
    assert tuple(own[::-1]) == recorded, f"feed: run {run_id}: expected its events"
    rounds = await stores.rounds.latest(run_id, 1000)
    assert await history.rounds_before(run_id, None, 1000) == rounds, f"rounds_before: run {run_id}: expected latest"
    if len(rounds) > 1:
        second = await history.rounds_before(run_id, rounds[0].record.round, 1)
        assert second == rounds[1:2], f"rounds_before: run {run_id}: expected the Round before the newest one"
    rows = await history.versions_before(run_id, None, 1000)
    newest = await stores.runs.newest_version(run_id)
    order = [row.version.number for row in rows]
    assert order == sorted(set(order), reverse=True), (
        f"versions_before: run {run_id}: got {order}, expected newest first"
    )
    assert rows[0].version == newest, "versions_before: expected the newest Version first"
    for row in rows:
        event = await stores.runs.publication(run_id, row.version.number)
        assert row.version == await stores.runs.version(run_id, row.version.number), "versions_before: another Version"
        assert row.published == event, f"versions_before: version {row.version.number} has not its event"
        assert event is None or row.round == event.round, "versions_before: expected the Round of the event"
    assert await history.versions_before(run_id, newest.number, 1) == rows[1:2], "versions_before: ignored ``before``"
    published = tuple(each for each in recorded if isinstance(each.event, VersionPublished))
    assert await history.publications(run_id, 1000) == published, "publications: expected all of them"
    if published:
        some = await history.publications(run_id, 1)
        assert some == published[-1:], "publications: expected the newest one in each answer"
    numbers = range(newest.number + 1)
    evaluations = await stores.evaluations.evaluation_page(run_id, 0)
    assert await history.evaluations_of(run_id, numbers) == evaluations, "evaluations_of: expected those recorded"
    assert await history.evaluations_of(run_id, ()) == (), "evaluations_of: returned one of another Version"
