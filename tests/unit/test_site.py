"""The state of a device for its owner: the file, what leaves, the page; and the addresses of a coordinator."""

import http.client
import json
import socket
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from support.values import assignment

from fanin.clients.device.session import events as e
from fanin.clients.device.session.machine import Session
from fanin.clients.device.site.journal import Journal
from fanin.clients.device.site.leaving import FIELDS, SUMS, UPDATE_FIELDS, fields_text, leaving
from fanin.clients.device.site.page import MAX_BROWSERS, serve_page
from fanin.clients.device.site.record import MAX_ERRORS, SitePlace, SiteRecord, from_json, read_record, to_json
from fanin.clients.device.site.view import SiteState, site_view
from fanin.protos import messages as m
from fanin.protos.addresses import Address, parse_page_address
from fanin.protos.errors import InvalidInput
from fanin.protos.plans import RoundPlan
from fanin.server.addresses import DeviceFiles, announcement, page_announcement, reachable

HOSTILE = "<script>alert(1)</script>\x1b[31m"


def journal(folder: Path) -> Journal:
    """Return a journal at a fixed time."""
    return Journal(folder, SitePlace(server="a.example:7443", data="data.npz"), "d" * 32, wall=lambda: 100.0)


def written(folder: Path) -> SiteRecord:
    """Return the record of a folder."""
    record = read_record(folder)
    assert record is not None
    return record


def test_the_journal_keeps_the_connection_the_work_and_the_totals(tmp_path: Path) -> None:
    first = journal(tmp_path)
    first.start(lambda _: m.TrainingProgress(step=3, num_steps=10))
    work = assignment()
    first.observe(e.Enroll(), e.Enrolled())
    first.observe(e.Poll(), e.Answered(answer=m.Assigned(assignment=work)))
    first.uploading(40, 40, 100)
    first.uploading(100, 60, 100)
    first.step(Session(phase=e.SessionPhase.SENDING, assignment=work), 0.0, None)
    record = first.record
    assert record.link.is_connected and record.work.run == work.run_id and record.work.sent_bytes == 100
    reply = m.UploadReply(update_state=m.UpdateState.ACCEPTED, round_state=m.RoundState.OPEN, received_bytes=100)
    first.observe(e.Send(assignment=work), e.Replied(reply=reply))
    first.observe(e.Poll(), e.Lost(reason="gone", code="FN-0811"))
    first.step(Session(phase=e.SessionPhase.IDLE), 7.0, ("run", 3))
    first.stop(None)
    record = written(tmp_path)
    assert (record.link.is_connected, record.link.code, record.ended) == (False, "FN-0811", "it ended as asked")
    assert (record.sent[work.run_id].num_bytes, record.sent[work.run_id].num_rounds) == (100, 1)
    assert record.served == "run/3" and not record.work.run
    # The next process continues the totals and the errors.
    second = journal(tmp_path).record
    assert second.sent == record.sent and second.errors == record.errors
    assert second.leaving == record.leaving and "Nothing about the examples" not in " ".join(second.leaving.leaves)


def test_a_full_disk_is_an_error_but_no_lost_connection(tmp_path: Path) -> None:
    one = journal(tmp_path)
    one.observe(e.Poll(), e.Answered(answer=m.Wait(retry_min_s=0.0, retry_max_s=1.0)))
    one.observe(e.Fetch(assignment=assignment()), e.Lost(reason="no space", code="FN-0008", is_local=True))
    assert one.record.link.is_connected and one.record.errors[-1].text == "no space"


def test_repeated_errors_count_and_do_not_push_others_out(tmp_path: Path) -> None:
    one = journal(tmp_path)
    for number in range(2 * MAX_ERRORS):
        one.observe(e.Poll(), e.Lost(reason=f"error {number}"))
    for _ in range(1_000):
        one.observe(e.Poll(), e.Lost(reason="the same"))
    assert len(one.record.errors) == MAX_ERRORS
    assert one.record.errors[-1].times == 1_000 and one.record.errors[-2].text == "error 39"


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"format": 2}', '{"format": 1, "link": 3, "sent": {"a": []}, "errors": 1}']
)
def test_a_damaged_record_reads_as_an_empty_one(text: str) -> None:
    record = from_json(text)
    assert replace(record, sent={}) == SiteRecord()


def test_a_record_reads_as_it_was_written(tmp_path: Path) -> None:
    one = journal(tmp_path)
    one.observe(e.Poll(), e.Answered(answer=m.Assigned(assignment=assignment())))
    one.observe(e.Poll(), e.Lost(reason=HOSTILE))
    assert from_json(to_json(one.record)) == one.record


def test_every_field_that_leaves_is_described() -> None:
    assert set(UPDATE_FIELDS) == {each.name for each in fields(m.UpdateHeader)}
    for kind, meanings in FIELDS.items():
        assert set(meanings) == {each.name for each in fields(kind)}


def test_what_leaves_follows_from_the_assignment() -> None:
    before, work = leaving("data.npz", None), replace(assignment(), range_examples=8, progress_s=2.0)
    assert any("Nothing about the examples" in text for text in before.leaves)
    after = " ".join(leaving("data.npz", work).leaves)
    for text in (*(SUMS.get(each.name, each.name) for each in work.statistics), "8 examples"):
        assert text in after
    for kind in FIELDS:
        assert fields_text(kind) in after
    assert "read from data.npz" in leaving("data.npz", work).stays[0]


def test_a_device_with_masks_shows_that_its_update_is_hidden() -> None:
    work = replace(assignment(), progress_s=2.0, round_protocol=RoundPlan(protocol="secagg"))
    text = " ".join(leaving("data.npz", work).leaves)
    assert "under masks: the coordinator learns the sum" in text
    assert all(each not in text for each in ("the number of steps", "seconds of the training", "text of the error"))


def test_what_leaves_a_private_run_is_the_clipped_change_alone() -> None:
    terms = m.PrivacyTerms(
        mechanism="central",
        clip_norm=0.5,
        noise_multiplier=1.0,
        squared_sensitivity=9,
        epsilon=1.0,
        delta=1e-6,
        population="phones",
        population_size=9,
    )
    text = " ".join(leaving("data.npz", replace(assignment(), privacy=terms, progress_s=2.0)).leaves)
    assert "clipped to the norm 0.5" in text
    assert all(each not in text for each in (*SUMS.values(), "the number of its steps", "the seconds of the training"))


def get(port: int, path: str, host: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """Return the reply of the page."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host)
    connection.endheaders()
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply.status, dict(reply.getheaders()), body


def test_the_page_reads_only_and_for_this_machine_only(tmp_path: Path) -> None:
    one = journal(tmp_path)
    one.observe(e.Poll(), e.Lost(reason=HOSTILE, code="FN-0811"))
    one.stop(None)
    before = threading.active_count()
    with serve_page(tmp_path, parse_page_address("--web", "0")) as url:
        port = int(url.rstrip("/").rpartition(":")[2])
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"):
            assert get(port, "/status.json", host)[0] == 200
        for host in (
            f"evil.example:{port}",
            "127.0.0.1",
            f"127.0.0.1:{port + 1}",
            "",
            f"127.0.0.1.evil.example:{port}",
        ):
            assert get(port, "/status.json", host)[0] == 421
        own = f"127.0.0.1:{port}"
        assert get(port, "/../device.key", own)[0] == 404
        assert get(port, "/", own, "POST")[0] == 501
        status, headers, page = get(port, "/", own)
        assert status == 200 and b"innerHTML" not in page and b"http://" not in page.replace(b"http://www.w3.org", b"")
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        document = json.loads(get(port, "/status.json", own)[2])
        assert document["errors"][0]["text"] == HOSTILE and document["state"] == "stopped"
    assert threading.active_count() <= before


@pytest.mark.parametrize("text", ["0.0.0.0:80", "[::]:80", "192.0.2.1:80", "a.example:80"])
def test_the_page_listens_on_loopback_only(text: str) -> None:
    with pytest.raises(InvalidInput) as excinfo:
        parse_page_address("--web", text)
    assert excinfo.value.code == "FN-1485"


def test_the_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as excinfo:
        site_view(tmp_path, 0.0)
    assert excinfo.value.code == "FN-1484"
    (tmp_path / "fanin.db").touch()
    with pytest.raises(InvalidInput, match="is that of a coordinator"):
        site_view(tmp_path, 0.0)


def test_the_text_of_a_stopped_device(tmp_path: Path) -> None:
    one = journal(tmp_path)
    one.observe(e.Enroll(), e.Denied(reason="unknown token", code="FN-0009"))
    one.stop(None)
    view = site_view(tmp_path, 200.0)
    assert view.state is SiteState.STOPPED
    text = view.text()
    assert "unknown token [FN-0009]" in text and f"fanin doctor --state {tmp_path}" in text and "never leaves" in text
    row = {"state": "stopped", "folder": str(tmp_path), "now": 200.0, **asdict(view.record)}
    assert view.document() == {**row, "privacy": view.privacy.document()}


LISTEN = Address(host="0.0.0.0", port=7443)
MACHINE = ("192.0.2.2", "192.0.2.3", "fd00::2")


def test_the_addresses_of_a_coordinator() -> None:
    places = reachable(LISTEN, ("localhost", "127.0.0.1", "::1", "192.0.2.2", "a.example"), MACHINE)
    assert list(map(str, places.covered)) == ["a.example:7443", "192.0.2.2:7443"]
    assert [each.host for each in places.uncovered] == ["192.0.2.3"]
    local = reachable(Address(host="127.0.0.1", port=1), ("localhost", "a.example"), MACHINE)
    assert local.is_local and not local.covered and not local.uncovered


def test_a_coordinator_never_announces_the_address_to_listen_on() -> None:
    files = DeviceFiles(token=Path("a state/tokens/device.token"), authority=Path("tls/ca.pem"), fingerprint="ab" * 32)
    text = announcement(LISTEN, ("localhost", "a.example"), files)
    assert "0.0.0.0" not in text and f"fanin join --server a.example:7443 --ca-fingerprint {'ab' * 32}" in text
    assert "--token-file device.token" in text and "copy to it first       a state/tokens/device.token, and" in text
    local = announcement(Address(host="127.0.0.1", port=1), ("localhost",), files)
    assert f"--token-file '{Path.cwd()}/a state/tokens/device.token'" in local and "copy" not in local


def test_a_page_on_all_addresses_is_announced_by_those_that_browsers_reach() -> None:
    text = page_announcement("https://127.0.0.1:80/", replace(LISTEN, port=80), ("localhost", "a.example"))
    assert [line.split()[-1] for line in text.splitlines()[:2]] == ["https://127.0.0.1:80/", "https://a.example:80/"]
    assert page_announcement("http://127.0.0.1:80/", None, ("a.example",)) == (
        "  page for browsers      http://127.0.0.1:80/\n"
    )


def test_silent_connections_take_few_threads_of_a_device(tmp_path: Path) -> None:
    before = threading.active_count()
    with serve_page(tmp_path, parse_page_address("--web", "0")) as url, ExitStack() as stack:
        host, _, port = url.rstrip("/").rpartition("//")[2].partition(":")
        for _ in range(MAX_BROWSERS + 8):
            time.sleep(0.01)
            stack.enter_context(closing(socket.create_connection((host, int(port)), timeout=5)))
        time.sleep(0.3)
        assert threading.active_count() <= before + MAX_BROWSERS + 1
