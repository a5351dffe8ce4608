"""The contract of Rounds: the writes of a driver, and the reads of any process."""

from dataclasses import replace
from typing import Final

from fanin.protos.chunks import artifact_of
from fanin.protos.errors import Conflict
from fanin.protos.messages import (
    MAX_WARNINGS,
    AcceptedDevices,
    RoundFailed,
    RoundOpened,
    RunRested,
    RunState,
    RunWarned,
    devices_gone,
    round_closed,
)
from fanin.server.storage.contracts.values import (
    COHORT,
    NEVER,
    RUN,
    committed,
    opened,
    published,
    refusal,
    start,
    version,
)
from fanin.server.storage.records import Contributors, MeasuredRanges, Roster, RoundMark, RoundMessage, Shortage
from fanin.server.storage.stores import DriverStores, Stores

LONGER: Final = "folded-longer"
"""A Run with the Versions 0 to 3, after ``check_last_folded``."""


async def check_first_round(stores: DriverStores) -> None:
    """Check a Round from its opening to its Version. ``stores`` has a new Run. Raises AssertionError."""
    rounds, writer = stores.rounds, stores.writer
    assert (await rounds.last(RUN), await rounds.unfinished(RUN)) == (None, None), "last: a new run has a round"
    for _ in range(2):
        assert await writer.open(opened()), "open: refused a round of a running run, or its repetition"
    assert await rounds.last(RUN) == await rounds.unfinished(RUN) == opened(), "last: got another round than was opened"
    await writer.set_deadline(1, 70.0, 10.0)
    assert (await rounds.last(RUN)) == replace(opened(), deadline_at_s=70.0), "set_deadline: did not record it"
    await _check_commits(stores)
    for cohort in (COHORT, NEVER):
        closed = await writer.close(1, cohort=cohort, now_s=20.0)
        assert closed.mark is RoundMark.CLOSED, f"close: got {closed.mark}, expected CLOSED, for ever"
        assert closed.accepted == ("b", "a"), f"close: got the set {closed.accepted}, expected the order of the commits"
    assert await writer.commit(committed("c"), buffer=9) is None, "commit: accepted an update of a closed round"
    assert await writer.commit(committed("a"), buffer=9) == committed("a"), "commit: forgot an accepted update"
    page = await rounds.accepted_devices(RUN, 1, 1)
    assert page == AcceptedDevices(num_accepted=2, device_ids=("a",)), f"accepted_devices: got {page}"
    assert await rounds.accepted_devices(RUN, 7, 0) is None, "accepted_devices: returned a page of no round"
    await _check_ranges(stores)
    await _check_publication(stores)


async def _check_ranges(stores: DriverStores) -> None:
    rounds, writer = stores.rounds, stores.writer
    first = MeasuredRanges(data="digits", data_sha256="ab", num_examples=3, runtime="contract 1", values=b"\0\x80")
    record = await writer.keep_ranges(1, first)
    for measured in (first, MeasuredRanges(data="digits", problem="late")):
        record = await writer.keep_ranges(1, measured)
        assert record.measured == first, f"keep_ranges: got {record.measured}, expected {first}, for ever"
    last = await rounds.last(RUN)
    assert last == record, f"keep_ranges: returned {record}, recorded {last}"


async def _check_commits(stores: DriverStores) -> None:
    rounds, writer = stores.rounds, stores.writer
    first = committed("b")
    assert await writer.commit(first, buffer=2) == first, "commit: refused an update with a free place"
    second = replace(first, header=committed("b", num_examples=99).header)
    assert await writer.commit(second, buffer=2) == first, "commit: a second update of a device replaced the first"
    assert await writer.commit(committed("a"), buffer=2) == committed("a"), "commit: refused the last place"
    assert await writer.commit(committed("c"), buffer=2) is None, "commit: accepted more updates than places"
    absent = committed("d", made_for=7, round_number=7)
    assert await writer.commit(absent, buffer=9) is None, "commit: accepted an update of a round that does not exist"
    expected = (first, committed("a"))
    assert await rounds.updates(RUN, 1) == expected, f"updates: got {await rounds.updates(RUN, 1)}, expected {expected}"
    assert await rounds.update(RUN, 1, "a") == committed("a"), "update: did not return an accepted update"
    assert await rounds.update(RUN, 1, "c") is None, "update: returned an update that was not accepted"


async def _check_publication(stores: DriverStores) -> None:
    rounds, writer, runs = stores.rounds, stores.writer, stores.runs
    base, following = version(), version(version())
    assert await rounds.last_folded(RUN, "a", lineage=0) == 0, "last_folded: returned a round without a version"
    assert await rounds.recorded_grid(base) is None, "recorded_grid: version 0 has one"
    assert await rounds.recorded_state(base) == {}, "recorded_state: version 0 has one"
    assert await rounds.recorded_steps(base) == 0, "recorded_steps: version 0 has some"
    event, state = published(following, 1), {"momentum": artifact_of(b"momentum")}
    record = await writer.publish(following, event, next_grid=(1, -2), outer_state=state, now_s=30.0)
    again = await writer.publish(following, event, next_grid=(1, -2), outer_state=state, now_s=40.0)
    assert again == record, f"publish: a repetition returned {again}, expected {record}"
    assert (record.mark, record.next_grid) == (RoundMark.PUBLISHED, (1, -2)), f"publish: got {record}"
    assert await runs.newest_version(RUN) == following, "newest_version: is not the version that was published"
    assert await runs.publication(RUN, 1) == event, "publication: did not return the event"
    starts = [await runs.lineage_start(RUN), await runs.lineage_start(RUN, 1), await runs.lineage_start(RUN, 0)]
    assert starts == [0, 0, 0], f"lineage_start: got {starts}, but a round starts no lineage"
    assert await rounds.recorded_grid(following) == (1, -2), "recorded_grid: is not the one that was published"
    assert await rounds.recorded_state(following) == state, "recorded_state: is not the one that was published"
    assert await rounds.recorded_steps(following) == 1, "recorded_steps: is not that of the first version of a round"
    assert await rounds.unfinished(RUN) is None, "unfinished: returned a round that has ended"
    assert await rounds.num_published(RUN) == 1, "num_published: expected 1"
    last = [await rounds.last_folded(RUN, device, lineage=start) for device, start in (("a", 0), ("c", 0), ("a", 1))]
    assert last == [1, 0, 0], f"last_folded: got {last} for a device, one without updates, and a later lineage"
    (summary,) = await rounds.latest(RUN, 5)
    assert (summary.record, summary.num_updates, summary.version) == (record, 2, 1), f"latest: got {summary}"
    assert (await writer.fail(1, reason="late", now_s=50.0)).mark is RoundMark.PUBLISHED, "fail: undid a version"


async def check_later_rounds(stores: DriverStores) -> None:
    """Check stale Updates, failures, events and rest, after ``check_first_round``. Raises AssertionError."""
    rounds, writer = stores.rounds, stores.writer
    assert await writer.open(opened(2, base_version=1)), "open: refused the second round"
    record = await writer.keep_ranges(2, MeasuredRanges(data="digits"))
    assert record.measured is None, "keep_ranges: changed an open round"
    event = published(version(version()), 2)
    publication = writer.publish(version(version()), event, next_grid=(), outer_state={}, now_s=55.0)
    await refusal(Conflict, publication, "publish: with the number of a version that is recorded", "FN-0509")
    assert (await rounds.last(RUN)) == opened(2, base_version=1), "publish: a refused version changed the round"
    late = committed("late", made_for=1, round_number=2)
    assert await writer.commit(late, buffer=3) == late, "commit: refused an update that was made for an earlier round"
    assert await rounds.update(RUN, 1, "late") == late, "update: expected the round that it was made for as the key"
    second = committed("late", made_for=2, round_number=2)
    assert await writer.commit(second, buffer=3) is None, "commit: a device has two updates in a round"
    again = committed("a", made_for=1, round_number=2)
    assert await writer.commit(again, buffer=3) == committed("a"), "commit: an assignment has two updates"
    made_for = await rounds.headers_made_for(RUN, 1)
    assert sorted(made_for) == ["a", "b", "late"], f"headers_made_for: got {sorted(made_for)}"
    some = await rounds.updates_of(RUN, 1, ["b", "late", "other"])
    assert some == (committed("b"),), f"updates_of: got {some}, expected that of the one device in the round"
    await writer.note(devices_gone(2, ("a", "c")), 58.0)
    failed = await writer.close(2, cohort=NEVER, now_s=60.0, shortage=Shortage(cause="no data", others_wait=True))
    assert failed.mark is RoundMark.FAILED, "close: a round without a quorum did not fail"
    assert sorted(await rounds.headers_made_for(RUN, 1)) == ["a", "b"], "headers_made_for: has a failed round's update"
    assert await rounds.last_folded(RUN, "late", lineage=0) == 0, "last_folded: returned a round that failed"
    assert await writer.open(opened(2, base_version=1)) is False, "open: a round that has ended is open again"
    since = [record.round for record in await rounds.since(RUN, 1)]
    assert since == [2], f"since: got rounds {since}, expected those on version 1 or a later one"
    assert [one.record.round for one in await rounds.latest(RUN, 1)] == [2], "latest: expected the newest round first"
    await _check_events(stores)
    rested = RunRested(state=RunState.FAILED, reason="no devices")
    newest = (await stores.runs.event_page(RUN, 0))[-1].sequence
    assert not await writer.rest(rested, 70.0, next_sequence=newest), "rest: ignored an event after the decision"
    assert await writer.rest(rested, 70.0, next_sequence=newest + 1), "rest: refused a running run"
    assert not await writer.rest(rested, 80.0, next_sequence=newest + 9), "rest: a run rested twice"
    assert not await writer.open(opened(3, base_version=1)), "open: opened a round of a run that rests"
    contributors = await rounds.contributors(RUN)
    assert contributors == Contributors(num_updates=2, num_devices=2), f"contributors: got {contributors}"
    await _check_warnings(stores)


async def _check_warnings(stores: DriverStores) -> None:
    first, second, third = (RunWarned(code=code, subject=about, text="look") for code, about in ("ax", "ay", "bx"))
    assert await stores.runs.warnings(RUN) == (), "warnings: a run without warnings has some"
    await stores.writer.warn((first, second), 90.0)
    await stores.writer.warn((replace(first, text="again"), third), 91.0)
    found = await stores.runs.warnings(RUN)
    assert found == (first, second, third), f"warnings: got {found}, expected each code and subject once, oldest first"
    last = (await stores.runs.event_page(RUN, 0))[-1]
    assert (last.event, last.time) == (third, 91.0), f"warn: got {last} as the last event"
    await stores.writer.warn([replace(first, subject=str(number)) for number in range(MAX_WARNINGS)], 92.0)
    assert len(await stores.runs.warnings(RUN)) == MAX_WARNINGS, "warn: recorded more warnings than a run may have"
    await stores.writer.warn([replace(first, is_over=True), replace(first, code="unknown", is_over=True)], 93.0)
    assert first not in await stores.runs.warnings(RUN), "warn: a warning that is over is still listed"
    await stores.writer.warn([replace(first, text="anew")], 94.0)
    newest = (await stores.runs.warnings(RUN))[-1]
    assert newest == replace(first, text="anew"), f"warn: got {newest} last, expected the warning recorded anew"
    assert await stores.runs.warnings("other") == (), "warnings: returned those of another run"


async def check_last_folded(stores: Stores) -> None:
    """Check the last Round of a device among several, in two Runs of their own. Raises AssertionError."""
    expected = {"folded": 2, LONGER: 3}
    for run_id, num_rounds in expected.items():
        await stores.runs.add_run(start(run_id), 150.0)
        await _publish_rounds(await stores.take(run_id), run_id, num_rounds)
    last = {run_id: await stores.rounds.last_folded(run_id, "a", lineage=0) for run_id in expected}
    assert last == expected, f"last_folded: got {last}, expected the newest round of each run: {expected}"
    await stores.runs.add_run(start("stale"), 150.0)
    await _publish_rounds(await stores.take("stale"), "stale", 2, made_for=1)
    stale = await stores.rounds.last_folded("stale", "a", lineage=0)
    assert stale == 1, f"last_folded: got {stale}, expected 1, the round that the stale update was made for"


async def _publish_rounds(stores: DriverStores, run_id: str, num_rounds: int, made_for: int = 0) -> None:
    """Publish Rounds with an Update of the device a each. With ``made_for`` only the last has one, for that Round."""
    writer, base = stores.writer, version(run_id=run_id)
    for number in range(1, num_rounds + 1):
        await writer.open(opened(number, number - 1, run_id))
        if not made_for or number == num_rounds:
            update = committed("a", made_for=made_for or number, round_number=number)
            await writer.commit(replace(update, header=replace(update.header, run_id=run_id)), buffer=1)
        await writer.close(number, cohort=COHORT, now_s=160.0)
        base = version(base, run_id)
        await writer.publish(base, published(base, number), next_grid=(1, -2), outer_state={}, now_s=170.0)


async def _check_events(stores: DriverStores) -> None:
    page = await stores.runs.event_page(RUN, 0)
    expected = [
        RoundOpened(round=1, base_version=0),
        round_closed(1, ("b", "a")),
        published(version(version()), 1),
        RoundOpened(round=2, base_version=1),
        devices_gone(2, ("a", "c")),
        RoundFailed(
            round=2,
            reason="1 update within 60 s, expected at least 9 (cohort.quorum); no data",
            others_wait=True,
        ),
    ]
    assert [one.event for one in page] == expected, f"event_page: got {[one.event for one in page]}"
    assert [one.sequence for one in page] == [1, 2, 3, 4, 5, 6], "event_page: expected numbers from 1 without gaps"
    assert [one.time for one in page] == [10.0, 20.0, 30.0, 10.0, 58.0, 60.0], "event_page: got other times"
    assert await stores.runs.newest_sequence(RUN) == 6, "newest_sequence: expected the number of the last event"
    assert await stores.runs.event_page(RUN, 3) == page[2:], "event_page: expected the events from a number on"
    assert await stores.runs.event_page("other", 0) == (), "event_page: returned the events of another run"


async def check_messages(stores: Stores) -> None:
    """Check the messages and rosters of a Round, in a Run of its own. Raises AssertionError."""
    await stores.runs.add_run(start("messages"), 150.0)
    driver, store = await stores.take("messages"), stores.messages
    writer = driver.writer
    assert await writer.open(opened(1, run_id="messages")), "open: refused the first round"
    b, a, late = (RoundMessage(round=1, phase="first", device_id=name, payload=name.encode()) for name in "bac")
    assert [await writer.add_message(each) for each in (b, a)] == [b, a], "add_message: refused the first message"
    for again in (a, replace(a, payload=b"other")):
        assert await writer.add_message(again) == a, "add_message: replaced the message of a device"
    assert await store.senders("messages", 1, "first") == ("b", "a"), "senders: expected the order of the commits"
    rosters = [await writer.freeze(1, "first", quorum=quorum, now_s=10.0) for quorum in (2, 9)]
    assert rosters == [Roster(phase="first", devices=("b", "a"))] * 2, f"freeze: got {rosters}, expected one, for ever"
    assert await writer.add_message(late) is None, "add_message: recorded a message after its roster"
    assert await writer.add_message(a) == a, "add_message: forgot a message after its roster"
    await writer.set_deadline(1, 99.0, 10.0, num_rosters=1)
    last = await stores.rounds.last("messages")
    assert last is not None, "last: forgot the round"
    assert last.deadline_rosters == 1, "set_deadline: did not record the number of rosters"
    second = replace(b, phase="second")
    assert await writer.add_message(second) == second, "add_message: refused the message of the next phase"
    assert await store.message("messages", 1, "second", "b") == b"b", "message: did not return the message"
    assert await store.message("messages", 1, "second", "a") is None, "message: returned one that was not sent"
    assert await store.messages("messages", 1) == (b, a, second), "messages: expected all, in the order of the commits"
    assert await writer.freeze(1, "second", quorum=2, now_s=11.0) is None, "freeze: a roster without its quorum"
    last = await stores.rounds.last("messages")
    assert last is not None, "last: forgot the round"
    assert last.mark is RoundMark.FAILED, "freeze: a round without a quorum of messages did not fail"
    assert await store.messages("messages", 1) == (), "freeze: the messages of a failed round are left"
    assert await store.rosters("messages", 1) == (rosters[0],), "rosters: expected those of a failed round"
    assert await writer.add_message(second) is None, "add_message: recorded a message of a round that has ended"
