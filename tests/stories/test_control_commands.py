"""``fanin pause``, ``resume``, ``stop``, ``rollback`` and ``promote``, with a coordinator behind real gRPC and TLS."""

import json
from collections.abc import Iterator

import pytest
from support import federations as f
from support.commands import Fanin, fanin_in_process, one_line
from support.hosted import Hosted

from fanin.protos import messages as m


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A coordinator with a Run that has ended after one Round."""
    host = Hosted(tmp_path_factory.mktemp("control")).start()
    bundle = f.bundle_in(host.folder, f.SMALL_SHAPES)
    host.start_run(f.plan(), bundle, f.PUBLISHER)
    for peer in f.peers(host, bundle, host.folder):
        peer.take_part()
    (digest,) = [event.version_sha256 for event in host.published_versions()]
    assert digest
    host.start_run(f.plan(), bundle, f.PUBLISHER, run_id="other")
    (host.state / "tokens").mkdir()
    (host.state / "tokens" / "operator.token").write_text(host.operator_token)
    (host.state / "address").write_text(host.address)
    yield host
    host.stop()


def test_a_run_is_paused_resumed_stopped_and_continued(fanin: Fanin, host: Hosted) -> None:
    def output(*words: object) -> str:
        outcome = fanin(*words, "--state", host.state)
        assert outcome.status == 0, outcome
        return outcome.out

    newest, author = "its newest version is", "by admin admin"
    host.await_round("other", 1)
    assert output("pause", "other") == f"run other is paused ({author}), {newest} 0\n"
    assert output("pause", "other") == f"run other is paused ({author}), {newest} 0\n"
    assert json.loads(output("runs", "--json"))["runs"][1]["state"] == "paused"
    assert output("resume", "other") == f"run other is running, {newest} 0\n"
    assert one_line(fanin("rollback", "other", "0", "--state", host.state), "rollback") == (
        "run other: a round is open; publish when the run rests, or pause it"
    )
    assert output("stop", "other") == f"run other is stopped ({author}), {newest} 0\n"
    assert one_line(fanin("resume", "other", "--state", host.state), "resume") == (
        "run other: is stopped; pass --rounds N to continue it"
    )
    row = json.loads(output("promote", "run", "1", "other", "--json"))
    assert (row["state"], row["version"]) == ("stopped", 1)
    assert row["version_sha256"] == json.loads(output("runs", "--json"))["runs"][0]["version_sha256"]
    rollback = ("rollback", "other", "0", "--rounds", "2")
    assert output(*rollback) == f"run other is running, {newest} 2\n"
    assert "  rounds    0 that ended in a version, of 2 planned\n" in output("describe", "other")
    host.await_round("other", 2)
    assert output("stop", "other") == f"run other is stopped ({author}), {newest} 2\n"

    watch = fanin("watch", "other", "--state", host.state)
    assert watch.status == 1
    lines = watch.out.splitlines()
    assert lines[:5] == [
        f"run paused: {author}",
        f"run resumed {author}",
        f"round 1 failed: stopped {author}",
        f"run stopped: {author}",
        f"version 1 {row['version_sha256'][:8]}.. adopted from version 1 of run run {author}",
    ]
    assert lines[5].endswith(f" adopted from version 0 of run other {author}")
    assert lines[6:] == [
        f"round 2 failed: stopped {author}",
        f"run stopped: {author}",
    ]
    rows = [json.loads(line) for line in fanin("watch", "other", "--state", host.state, "--json").out.splitlines()]
    authors = [(row["event"], row["by"]) for row in rows if row.get("by")]
    kinds = ["RunRested", "RunResumed", "RunRested", "VersionPublished", "VersionPublished", "RunRested"]
    assert authors == [(kind, author.removeprefix("by ")) for kind in kinds]
    description = output("describe", "other")
    assert f"  started   {author}\n" in description
    assert f"  state     stopped ({author})\n" in description
    assert json.loads(output("describe", "other", "--json"))["started_by"] == author.removeprefix("by ")
    assert host.operator_token not in watch.out + description
    assert all(line.endswith(": verified") for line in output("verify", "other").splitlines())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("pause", "none"), "run 'none': not found on this coordinator; fanin runs lists its runs"),
        (("pause", "run"), "run run: it is finished, there is nothing to pause"),
        (("stop", "run"), "run run: it is finished, there is nothing to stop"),
        (("resume", "run"), "run run: is finished; pass --rounds N to continue it"),
        (("rollback", "run", "7"), "run run: has no version 7"),
        (("promote", "nowhere", "0", "run"), "run nowhere: has no version 0"),
    ],
)
def test_commands_that_cannot_be_executed(fanin: Fanin, host: Hosted, words: tuple[str, ...], message: str) -> None:
    assert one_line(fanin(*words, "--state", host.state), words[0]) == message


@pytest.mark.parametrize("number", ["-1", "x"])
def test_a_version_that_is_no_number_is_wrong_usage(fanin: Fanin, host: Hosted, number: str) -> None:
    assert fanin("rollback", "run", "--state", host.state, "--", number).status == 2


def test_the_text_of_a_device_is_shown_as_it_is_and_not_cut_in_a_pipe(fanin: Fanin, host: Hosted) -> None:
    failure = "training: no data in [/red] or [bold]/sdcard/images/of/this/device"
    bundle = f.bundle_in(host.folder, f.SMALL_SHAPES)
    host.start_run(f.plan(), bundle, f.PUBLISHER, run_id="waiting")
    (peer,) = f.peers(host, bundle, host.folder / "failing", 1)
    peer.begin()
    with peer.transport() as transport:
        transport.report(m.Report(assignment_id=peer.work.assignment_id, failure=failure))
    outcome = fanin("runs", "--state", host.state)
    assert outcome.status == 0, outcome.err
    assert failure in outcome.out
