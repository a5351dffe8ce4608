"""A page that stays open: what it follows, its session, and the streams that it leaves behind."""

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from stories.test_page_rules import Browser, PageSite, serve
from support.federations import SHAPES, bundle_in, plan
from support.peers import Peer
from support.processes import Site
from support.virtual import PUBLISHER

from fanin.clients.administrator import Administrator
from fanin.clients.transport import Connection
from fanin.protos import messages as m
from fanin.protos.messages import NewToken, Role, TokenRotation
from fanin.server.access.registry import token_sha256
from fanin.server.web.rendering import power
from fanin.server.web.sessions import SESSION_S, Sessions
from fanin.server.web.stream import CHECK_S, MAX_READERS

BEHIND = {"X-Forwarded-For": "203.0.113.7"}
"""A proxy, so that reading needs a session."""
DAY_S = 86_400.0
NUM_EVENTS = 10_000


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageSite]:
    """A coordinator whose disk fills up, with a Run that has no devices."""
    site = Site(tmp_path_factory.mktemp("week"))
    with ExitStack() as stack:
        stack.callback(site.close)
        site.state.mkdir()
        write_usage(site.state)
        page = serve(site, "--web", "127.0.0.1:0")
        site.start_run(plan(num_spare=3), bundle_in(site.folder), PUBLISHER)
        yield page


def write_usage(state: Path) -> None:
    """Write measurements of a folder that has grown to 1 TB in a week."""
    now_s = time.time()
    rows = [[now_s - day * DAY_S, {"blobs": int((7 - day) * 1e12 / 7)}, int(4e9), 7 - day] for day in range(7, 0, -1)]
    (state / "usage.json").write_text(json.dumps(rows))


@contextmanager
def administrator(site: Site) -> Iterator[Administrator]:
    """Yield the client of an administrator."""
    token = (site.state / "tokens" / "operator.token").read_text().strip()
    with closing(Connection(site.address, site.ca)) as connection:
        yield Administrator(connection, token)


def viewer(site: Site, name: str, lifetime_s: float | None = None) -> str:
    """Return a new token of a viewer."""
    secret = f"{name}-{time.time_ns()}"
    with administrator(site) as desk:
        desk.create_token(NewToken(name=name, role=Role.VIEWER, sha256=token_sha256(secret), lifetime_s=lifetime_s))
    return secret


@contextmanager
def stream(browser: Browser, **headers: str) -> Iterator[http.client.HTTPResponse]:
    """Yield an open stream."""
    with closing(browser._connection()) as connection:
        sent = {**BEHIND, **headers} | ({"Cookie": browser.cookie} if browser.cookie else {})
        connection.request("GET", "/stream", headers=sent)
        yield connection.getresponse()


def kinds(response: http.client.HTTPResponse) -> list[str]:
    """Return the kinds of all messages until the stream ends."""
    return [line.partition(": ")[2] for line in response.read().decode().splitlines() if line.startswith("event: ")]


SLOW = pytest.mark.nightly
REASONS = ("training: got 7 labels [FN-0843]", "<b>bold</b> [FN-0852]", "training: got 9 labels [FN-0843]")


def test_the_page_and_fanin_watch_follow_the_same_round(served: PageSite, tmp_path: Path) -> None:
    site, browser = served.site, served.browser()
    bundle = bundle_in(tmp_path)
    for index, reason in enumerate(REASONS):
        peer = Peer(site, bundle, index, tmp_path / f"peer-{index}")
        peer.begin()
        with peer.transport() as transport:
            transport.report(m.Report(assignment_id=peer.work.assignment_id, failure=reason))
    worker = Peer(site, bundle, 9, tmp_path / "worker")
    worker.begin()
    with site.operator() as operator:
        live = next(each for each in operator.watch_live("run") if isinstance(each, m.LiveRound))
        while not live.num_at_work:
            live = operator.describe("run", 1).live
    assert live.at_work == (worker.device_id,) and live.num_gave_up == len(REASONS)
    counts = [(each.code, each.num_times, each.newest) for each in live.failures]
    assert sorted(counts) == sorted((text[-8:-1], 1, text) for text in REASONS)
    browser.login(served.operator_token)
    with stream(browser) as response:
        lines = iter(response.readline, b"")
        while next(lines) != b"event: live\n":
            pass
        sent = json.loads(next(lines).partition(b": ")[2])
    assert (sent["run"], sent["at_work"], sent["num_gave_up"]) == ("run", list(live.at_work), live.num_gave_up)
    assert [(each["code"], each["num_times"], each["newest"]) for each in sent["failures"]] == counts
    text = browser.get("/runs/run/live").text
    assert text.index("FN-0843") < text.index("&lt;b&gt;bold&lt;/b&gt; [FN-0852]") and "<b>" not in text
    assert f"/devices/{worker.device_id}" in text


def test_the_plan_shows_the_step_and_the_range_of_each_tensor(served: PageSite) -> None:
    with served.site.operator() as operator:
        grid = operator.describe("run", 1).grid
    text = served.browser().get("/runs/run/plan").text
    rows = re.findall(
        r'<th scope="row" class="mono">(\w+)</th><td class="n">[^<]*</td><td class="n">([^<]*)</td>', text
    )
    assert rows == [(name, power(step)) for name, step in zip(sorted(SHAPES), grid, strict=True)]
    assert text.count("± ") == len(grid) and "Bits of a value" in text


@pytest.mark.parametrize("how", ["revoked", pytest.param("expired", marks=SLOW), pytest.param("rotated", marks=SLOW)])
def test_an_open_stream_ends_with_its_token(served: PageSite, how: str) -> None:
    browser = served.browser()
    token = viewer(served.site, f"viewer-{how}", 2.0 if how == "expired" else None)
    assert browser.login(token).status == 303
    with stream(browser) as response:
        assert response.status == 200 and response.readline().startswith(b"retry")
        begin = time.monotonic()
        with administrator(served.site) as desk:
            if how == "revoked":
                desk.revoke_token(f"viewer-{how}")
            elif how == "rotated":
                other = TokenRotation(name=f"viewer-{how}", sha256=token_sha256("another secret of a viewer"))
                desk.rotate_token(other)
        assert kinds(response)[-1] == "over"
        assert time.monotonic() - begin < 2.0 * CHECK_S + 2.0
    # The page then asks whether it needs a session: this is the answer.
    assert browser.send("HEAD", "/runs", X_Forwarded_For="203.0.113.7").status == 401
    with stream(browser) as response:
        assert response.status == 401


@SLOW
def test_a_session_of_a_week_ends_the_stream_and_a_visit_in_its_second_half_renews_it(served: PageSite) -> None:
    browser = served.browser()
    digest = token_sha256(served.operator_token)

    def cookie(age_s: float) -> str:
        return f"fanin_session={Sessions(served.site.state / 'tokens', lambda: time.time() - age_s).open(digest)}"

    browser.cookie = cookie(SESSION_S - 3.0)
    with stream(browser) as response:
        assert response.status == 200
        assert kinds(response)[-1] == "over"
    browser.cookie = cookie(SESSION_S / 2 + 60.0)
    renewed = browser.get("/runs", X_Forwarded_For="203.0.113.7").headers["set-cookie"]
    assert renewed.startswith("fanin_session=") and renewed.partition(";")[0] != browser.cookie
    browser.cookie = cookie(60.0)
    assert "set-cookie" not in browser.get("/runs").headers


def test_streams_that_browsers_left_hold_no_place(served: PageSite) -> None:
    browser = served.browser()
    browser.login(served.operator_token)
    for _ in range(3 * MAX_READERS):
        with stream(browser) as response:
            assert response.status == 200, response.read()
            response.readline()
    with ExitStack() as stack:
        deadline = time.monotonic() + 10.0
        opened = [stack.enter_context(stream(browser)) for _ in range(MAX_READERS)]
        assert {each.status for each in opened} == {200}
        for each in opened:
            each.readline()
        extra = stack.enter_context(stream(browser))
        text = extra.read().decode()
        assert extra.status == 503 and "[FN-1428]" in text
        assert time.monotonic() < deadline


@SLOW
def test_a_stream_ends_with_the_coordinator_and_the_next_life_says_that_it_is_another(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with ExitStack() as stack:
        stack.callback(site.close)
        page = serve(site, "--web", "127.0.0.1:0")
        browser = page.browser()
        with stream(browser, **{"X-Forwarded-For": ""}) as response:
            # Without a session the proxy's header is enough to be refused.
            assert response.status == 401
        browser.login(page.operator_token)
        with stream(browser) as response:
            response.readline()
            assert response.readline() == b"event: hello\n"
            first = json.loads(response.readline().partition(b": ")[2])["boot"]
            begin = time.monotonic()
            page.running.process.terminate()
            response.read()
        assert page.running.wait(20) == 0 and time.monotonic() - begin < 5.0
        serve(site, "--web", f"127.0.0.1:{browser.port}")
        with stream(browser, **{"Last-Event-ID": f"{first}-7"}) as response:
            assert response.status == 200
            lines = [response.readline() for _ in range(7)]
        second = json.loads(lines[2].partition(b": ")[2])["boot"]
        assert second != first and b"event: reset\n" in lines


def test_a_disk_that_fills_up_is_an_alarm_on_the_page_and_in_the_health(served: PageSite) -> None:
    browser = served.browser()
    for path in ("/settings", "/activity"):
        assert "The disk is full in " in browser.get(path).text, path
    assert "Growth of a Round" in browser.get("/settings").text
    ready = browser.get("/readyz")
    first, alarm = ready.text.splitlines()
    assert (ready.status, first) == (200, "ready") and alarm.startswith("The disk is full in ")


@SLOW
def test_memory_is_flat_over_ten_thousand_events_with_a_reader_and_one_that_does_not_read(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with ExitStack() as stack:
        stack.callback(site.close)
        page = serve(site, "--web", "127.0.0.1:0")
        site.start_run(plan(), bundle_in(site.folder), PUBLISHER)
        browser = page.browser()
        browser.login(page.operator_token)
        reading, silent = (stack.enter_context(stream(browser)) for _ in range(2))
        silent.readline()
        positions: list[int] = []
        reader = threading.Thread(target=collect, args=(reading, positions), daemon=True)
        reader.start()
        with site.operator() as operator:
            sizes = []
            for number in range(1, NUM_EVENTS + 1):
                what = m.Pause() if number % 2 else m.Resume()
                operator.command(m.Command(command_id=f"command-{number}", run_id="run", what=what))
                if number in (NUM_EVENTS // 2, NUM_EVENTS):
                    sizes.append(resident_bytes(page.running.process.pid))
        reader.join(10.0)
        assert positions == list(range(positions[0], positions[0] + NUM_EVENTS))
        print(f"resident: {sizes[0] / 1e6:.1f} and {sizes[1] / 1e6:.1f} MB")
        assert sizes[1] - sizes[0] < 4e6


def collect(response: http.client.HTTPResponse, positions: list[int]) -> None:
    """Append the positions of the first ``NUM_EVENTS`` events of a stream."""
    while len(positions) < NUM_EVENTS:
        line = response.readline()
        if line.startswith(b"id: "):
            positions.append(int(line.rpartition(b"-")[2]))


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(text.partition("VmRSS:")[2].split()[0])
