"""What a peer or a careless person can do to the page, and what the page must not show or log."""

import hashlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from stories.test_page_rules import Browser, PageSite, serve
from support.federations import bundle_in, plan
from support.processes import Site
from support.virtual import PUBLISHER

from fanin.clients.administrator import Administrator
from fanin.commands.care.backup import main
from fanin.protos.messages import NewToken, Role
from fanin.server.access.rates import WRONG_BURST

BACKUP = "fanin_backup_last_success_timestamp_seconds"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageSite]:
    """A coordinator with a Run without devices, and a page that only this machine reaches."""
    site = Site(tmp_path_factory.mktemp("page"))
    with ExitStack() as stack:
        stack.callback(site.close)
        page = serve(site, "--web", "127.0.0.1:0")
        site.start_run(plan(2), bundle_in(site.folder), PUBLISHER)
        yield page


def signed_in(served: PageSite) -> Browser:
    browser = served.browser()
    assert browser.login(served.operator_token).status == 303
    return browser


def test_signing_out_ends_a_copy_of_the_cookie(served: PageSite) -> None:
    browser, copy = signed_in(served), served.browser()
    copy.cookie = browser.cookie
    assert "Sign out" in copy.get("/runs").text
    assert browser.post("/logout", {"form_token": browser.form_token("/runs")}).status == 303
    assert "Sign out" not in copy.get("/runs").text
    assert copy.get("/runs", X_Forwarded_For="203.0.113.7").status == 303
    assert "Sign out" in signed_in(served).get("/runs").text


def test_an_address_with_many_wrong_tokens_signs_in_only_with_a_valid_one(served: PageSite) -> None:
    browser = served.browser()
    answers = [browser.login("wrong") for _ in range(WRONG_BURST + 20)]
    assert answers[-1].status == 429
    assert "[FN-1476]" in answers[-1].text
    assert int(answers[-1].headers["retry-after"]) >= 1
    assert browser.login(served.operator_token).status == 303
    text = browser.get("/activity").text
    assert "127.0.0.1</th>" in text
    assert "FN-0670" in text


def test_wrong_bearers_of_the_metrics_are_counted_and_slowed_as_other_wrong_tokens_are(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with ExitStack() as stack:
        stack.callback(site.close)
        fresh = serve(site, "--web", "127.0.0.1:0")
        browser = fresh.browser()
        answers = [browser.get("/metrics", Authorization="Bearer wrong", Accept="*/*") for _ in range(WRONG_BURST + 20)]
        assert answers[0].status == 401
        assert answers[-1].status == 429
        assert "[FN-1476]" in answers[-1].text
        assert int(answers[-1].headers["retry-after"]) >= 1
        assert browser.login("wrong").status == 429
        valid = browser.get("/metrics", Authorization=f"Bearer {fresh.operator_token}", Accept="*/*")
        assert valid.status == 200
        text = browser.get("/activity").text
        assert "127.0.0.1</th>" in text
        assert f'<td class="n">{WRONG_BURST + 21}</td>' in text


def test_settings_and_metrics_have_the_last_backup_retention_and_renewal(served: PageSite, tmp_path: Path) -> None:
    text = served.browser().get("/settings").text
    assert "none of this folder is known" in text
    assert "by the coordinator, 30 days before the end" in text
    assert "Retention of Runs whose Plan has no limits" in text
    assert f"\n{BACKUP} " not in served.browser().get("/metrics").text
    assert main([str(tmp_path / "backup"), "--state", str(served.site.state), "--quiet"]) == 0
    text = served.browser().get("/settings").text
    assert "none of this folder is known" not in text
    assert "Files missing or damaged then" in text
    written_s = float(served.browser().get("/metrics").text.partition(f"\n{BACKUP} ")[2].split()[0])
    assert 0.0 <= time.time() - written_s < 60.0


def test_a_page_says_after_an_action_only_what_is_so(served: PageSite) -> None:
    browser = signed_in(served)
    fields = {"what": "pause", "command_id": "so", "form_token": browser.form_token("/runs/run"), "next": "/runs/run"}
    assert browser.post("/runs/run/commands", fields).status == 303
    assert "The Run is paused." in browser.get("/runs/run?done=pause").text
    for link in ("/runs/run?done=stop", "/runs/run?done=resume", "/runs/run?done=adopt"):
        assert 'class="note good"' not in browser.get(link).text, link
    assert 'class="note good"' not in browser.get("/devices?done=remove").text
    resume = {**fields, "what": "resume", "command_id": "so-2"}
    assert browser.post("/runs/run/commands", resume).status == 303


def test_the_folder_of_the_state_is_shown_to_operators_alone(served: PageSite) -> None:
    folder = str(served.site.state)
    assert folder not in served.browser().get("/settings").text
    assert folder in signed_in(served).get("/settings").text


def test_a_refused_sign_in_is_in_the_log_and_a_form_that_breaks_off_is_no_error(served: PageSite) -> None:
    browser = served.browser()
    token = browser.form_token("/login")
    for _ in range(30):
        assert browser.post("/login", {"token": "wrong", "form_token": token}).status in (401, 429)
    origin = f"{browser.host}:{browser.port}"
    head = f"POST /login HTTP/1.1\r\nHost: {origin}\r\nOrigin: http://{origin}\r\nContent-Length: 900\r\n\r\na"
    with socket.create_connection((browser.host, browser.port)) as peer:
        peer.sendall(head.encode())
        time.sleep(0.2)
    time.sleep(0.3)
    text = served.running.text()
    assert 1 <= text.count("page: sign-in refused from 127.0.0.1") <= 20
    assert "wrong" not in text.partition("sign-in refused")[2].partition("\n")[0]
    assert "Traceback" not in text and "unexpected error" not in text


def test_no_more_pages_than_the_limit_follow_the_stream(served: PageSite) -> None:
    browser, statuses, opened = served.browser(), Counter[int](), list[socket.socket]()
    barrier = threading.Barrier(150)

    def follow() -> None:
        peer = socket.create_connection((browser.host, browser.port))
        opened.append(peer)
        barrier.wait()
        peer.sendall(f"GET /stream HTTP/1.1\r\nHost: {browser.host}\r\n\r\n".encode())
        statuses[int(peer.recv(4096).split()[1])] += 1

    threads = [threading.Thread(target=follow) for _ in range(150)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for peer in opened:
        peer.close()
    assert statuses == {200: 64, 503: 86}


def test_a_revocation_ends_an_open_page_at_once(served: PageSite) -> None:
    browser, secret, behind = served.browser(), "a-secret-of-one-page", {"X-Forwarded-For": "203.0.113.7"}
    with Administrator.connect(served.site.address, served.site.ca, served.operator_token) as administrator:
        sha256 = hashlib.sha256(secret.encode()).hexdigest()
        administrator.create_token(NewToken(name="page", role=Role.VIEWER, sha256=sha256))
        assert browser.login(secret).status == 303
        with closing(browser._connection()) as connection:
            connection.request("GET", "/stream", headers={"Cookie": browser.cookie, **behind})
            response = connection.getresponse()
            assert response.readline() and response.readline() == b"event: hello\n"
            begin = time.monotonic()
            administrator.revoke_token("page")
            assert response.read().decode().endswith("event: over\ndata: {}\n\n")
            assert time.monotonic() - begin < 1.0


def test_a_flood_of_page_reads_leaves_the_sign_in_open(served: PageSite) -> None:
    browser, peers = served.browser(), list[socket.socket]()
    for _ in range(200):
        peer = socket.create_connection((browser.host, browser.port))
        peer.sendall(f"GET /runs/run HTTP/1.1\r\nHost: {browser.host}\r\n\r\n".encode())
        peers.append(peer)
    during = [browser.get("/login") for _ in range(3)]
    for peer in peers:
        peer.close()
    forms = [*during, browser.get("/login")]
    assert [(each.status, 'name="form_token"' in each.text) for each in forms] == [(200, True)] * 4


@pytest.mark.nightly
def test_a_flood_of_page_reads_leaves_time_for_the_calls_of_devices(served: PageSite) -> None:
    with served.site.operator() as operator:
        begin = time.monotonic()
        operator.runs()
        alone = time.monotonic() - begin
    browser, peers = served.browser(), list[socket.socket]()
    for _ in range(200):
        peer = socket.create_connection((browser.host, browser.port))
        peer.sendall(f"GET /runs/run HTTP/1.1\r\nHost: {browser.host}\r\n\r\n".encode() * 5)
        peers.append(peer)
    worst = 0.0
    with served.site.operator() as operator:
        for _ in range(20):
            begin = time.monotonic()
            operator.runs()
            worst = max(worst, time.monotonic() - begin)
            time.sleep(0.05)
    assert worst < 1.0 + 10 * alone
    for peer in peers:
        peer.close()
    with closing(browser._connection()) as connection:
        connection.request("GET", "/readyz")
        assert connection.getresponse().status == 200


def test_a_devices_folder_and_state_are_private(tmp_path: Path) -> None:
    from fanin.clients.device.site.journal import Journal
    from fanin.clients.device.site.record import SitePlace
    from fanin.clients.device.storage.cache import Cache

    folder = tmp_path / "device"
    Cache(folder)
    journal = Journal(folder, SitePlace(), "a")
    journal.stop(None)
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "status.json").stat().st_mode & 0o077 == 0
