"""The page in a browser: it follows a live Run over a kill of the coordinator, and is accessible.

The browser is Debian's Chromium (``apt-get install chromium``), driven by the package ``playwright``
(the extra ``browser``). No browser is
downloaded. axe-core is no part of the repository: ``npm pack axe-core@4.14.1``, and its axe.min.js in ``build/``.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from house.tree import ROOT
from stories.test_page_rules import PageSite, serve
from stories.test_page_week import administrator, viewer
from support.federations import bundle_in
from support.long_record import write_record
from support.processes import Site
from support.virtual import PUBLISHER, plan

from fanin.protos.messages import VersionPublished

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

AXE = Path(os.environ.get("FANIN_AXE", ROOT / "build" / "axe.min.js"))
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
NUM_DEVICES = int(os.environ.get("FANIN_PAGE_DEVICES", "20"))
NUM_ROUNDS = 12
LIVE_MS = 240_000
MAX_VIEW_S = 0.3
RUN_VIEWS = ("", "/live", "/versions", "/plan", "/events", "/rounds/7")


@contextmanager
def chromium() -> Iterator["Browser"]:
    """Start the browser. Fails the test if it is not installed."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    assert program is not None, "chromium is not installed: apt-get install chromium"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def shown(page: "Page", name: str) -> list[str]:
    """Return the values of a column of the table of the charts, as the coordinator wrote them."""
    return page.eval_on_selector_all(f'#quality td[data-k="{name}"]', "cells => cells.map(cell => cell.dataset.v)")


def tile(page: "Page", name: str) -> str:
    """Return the first line of a tile."""
    return page.locator("#tiles .tile", has_text=name).first.locator("dd").inner_text().split()[0]


def until(page: "Page", is_true: Callable[[], bool]) -> None:
    """Wait. The content security policy does not let the driver wait in the page."""
    deadline = time.monotonic() + LIVE_MS / 1000
    while not is_true():
        assert time.monotonic() < deadline, page.content()
        page.wait_for_timeout(100)


@pytest.mark.nightly
def test_a_page_follows_a_run_over_a_kill_of_the_coordinator(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with ExitStack() as stack:
        stack.callback(site.close)
        served = serve(site, "--web", "127.0.0.1:0")
        run_plan = plan(
            concurrency=NUM_DEVICES, buffer=NUM_DEVICES, quorum=NUM_DEVICES, deadline_s=300.0, max_rounds=NUM_ROUNDS
        )
        site.start_run(run_plan, bundle_in(site.folder), PUBLISHER)
        browser = stack.enter_context(chromium())
        page = browser.new_page()
        page.goto(f"{served.url}runs/run")
        assert page.locator("#link[data-state=on]").text_content(timeout=LIVE_MS) == "live"
        for index in range(NUM_DEVICES):
            site.device(index)
        until(page, lambda: int(tile(page, "Rounds")) >= 3)
        served.running.kill()
        page.wait_for_selector("#link[data-state=lost]", timeout=LIVE_MS)
        again = serve(site, "--web", served.url.removeprefix("http://").rstrip("/"))
        assert again.url == served.url
        page.wait_for_selector("#link[data-state=on]", timeout=LIVE_MS)
        page.wait_for_selector("#state .state[data-state=finished]", timeout=LIVE_MS)
        with site.operator() as operator:
            info, events = operator.run("run"), list(operator.watch("run"))
        published = [each.event for each in events if isinstance(each.event, VersionPublished)]
        until(page, lambda: tile(page, "Rounds") == str(NUM_ROUNDS))
        assert (tile(page, "Rounds"), tile(page, "Version")) == (str(info.num_rounds), str(info.version))
        assert shown(page, "number") == [str(each.number) for each in published]
        assert [float(each) for each in shown(page, "round_s")] == [each.round_s for each in published]
        assert shown(page, "down") == [str(each.bytes_down) for each in published]
        assert shown(page, "up") == [str(each.bytes_up) for each in published]
        assert [each.times is not None for each in published].count(True) >= NUM_ROUNDS - 1
        page.goto(f"{served.url}runs/run/events")
        assert page.locator("#feed tbody tr").count() == min(len(events), 50)


@pytest.mark.nightly
def test_an_open_page_asks_to_sign_in_again_once_its_token_is_revoked(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with ExitStack() as stack:
        stack.callback(site.close)
        served = serve(site, "--web", "127.0.0.1:0")
        browser = stack.enter_context(chromium())
        # Behind a proxy reading needs a session.
        page = browser.new_context(extra_http_headers={"X-Forwarded-For": "203.0.113.7"}).new_page()
        for name in ("first", "second"):
            page.goto(f"{served.url}login?next=/activity") if name == "first" else page.click("#link a")
            page.fill("#token", viewer(site, name))
            page.click("main button")
            page.wait_for_url("**/activity")
            assert page.locator("#link[data-state=on]").text_content(timeout=LIVE_MS) == "live"
            with administrator(site) as desk:
                desk.revoke_token(name)
            assert page.locator("#link[data-state=out]").inner_text(timeout=LIVE_MS) == "sign in again"
            assert page.locator("#link a").get_attribute("href") == "/login?next=%2Factivity"


@pytest.mark.nightly
def test_no_view_has_serious_findings_of_axe(tmp_path: Path) -> None:
    assert AXE.is_file(), (
        f"{AXE}: missing; run npm pack axe-core@4.14.1, and put its package/axe.min.js there, or name it in FANIN_AXE"
    )
    write_record(tmp_path, 30, 30)
    site = Site(tmp_path)
    findings: list[str] = []
    with ExitStack() as stack:
        stack.callback(site.close)
        served = serve(site, "--web", "127.0.0.1:0")
        browser = stack.enter_context(chromium())
        for scheme, width in (("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)):
            page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
            page.goto(f"{served.url}login")
            findings += found_by_axe(page, f"login, {scheme}, {width}")
            page.fill("#token", served.operator_token)
            page.click("main button")
            page.wait_for_url("**/runs")
            paths = ["runs", "devices", "activity", "settings", *(f"runs/long{each}" for each in RUN_VIEWS), "nothing"]
            page.goto(f"{served.url}devices")
            paths.append(str(page.locator("#devices a").first.get_attribute("href")).lstrip("/"))
            for path in paths:
                page.goto(f"{served.url}{path}")
                assert page.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
                findings += found_by_axe(page, f"{path}, {scheme}, {width}")
            page.goto(f"{served.url}runs/long")
            assert page.locator("input[name=rounds][required]").get_attribute("placeholder") == "more"
            page.close()
    assert findings == []


def found_by_axe(page: "Page", where: str) -> list[str]:
    """Return the serious and critical findings of axe-core on a page."""
    page.wait_for_timeout(300)
    page.evaluate(AXE.read_text())
    results = page.evaluate("axe.run()")
    return [
        f"{where}: {each['id']}: {each['nodes'][0]['html'][:200]}: {each['nodes'][0]['failureSummary'][:300]}"
        for each in results["violations"]
        if each["impact"] in ("serious", "critical")
    ]


@pytest.mark.nightly
def test_no_view_of_a_long_record_takes_long(tmp_path: Path) -> None:
    write_record(tmp_path, 100_000, 100_000)
    site = Site(tmp_path)
    with ExitStack() as stack:
        stack.callback(site.close)
        served = serve(site, "--web", "127.0.0.1:0")
        browser = served.browser()
        device = browser.get("/devices").text.partition('href="/devices/')[2].partition('"')[0]
        paths = ["/runs", "/devices", f"/devices/{device}", "/activity", "/activity?before=150000", "/settings"]
        paths += [f"/runs/long{each}" for each in (*RUN_VIEWS, "?before=50000", "/versions?before=50000")]
        seconds = {path: min(view_s(served, path) for _ in range(3)) for path in paths}
    assert {path: each for path, each in seconds.items() if each > MAX_VIEW_S} == {}


def view_s(served: PageSite, path: str) -> float:
    """Return the seconds of a view."""
    browser, begin = served.browser(), time.perf_counter()
    assert browser.get(path).status == 200, path
    return time.perf_counter() - begin
