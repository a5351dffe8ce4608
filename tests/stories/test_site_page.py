"""The page of a device's owner in a browser: what it says in each state, in both themes, on a phone, and to axe-core.

``test_page_live`` says how the browser and axe-core are installed.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from stories.test_page_live import AXE, chromium, found_by_axe
from support.values import assignment

from fanin.clients.device.session import events as e
from fanin.clients.device.session.machine import Session
from fanin.clients.device.site.journal import Journal
from fanin.clients.device.site.page import serve_page
from fanin.clients.device.site.record import SitePlace
from fanin.clients.device.storage.cache import hold_folder
from fanin.protos import messages as m
from fanin.protos.addresses import Address

SHOTS: Final = os.environ.get("FANIN_SHOTS", "")
"""A folder for screenshots; empty for none."""
PLACE: Final = SitePlace(
    server="coordinator.example.org:7443",
    publishers=("ab" * 32,),
    data="/data/ward-3/images.npz, 1,204 examples",
    runtime="onnxruntime 1.22",
)
NO_ROUTE: Final = (
    "coordinator.example.org:7443: cannot be reached: no route to host; check the address, the network and a proxy"
)


def train(one: Journal) -> None:
    """Note the first half of a training, after a Round that was accepted."""
    work = replace(assignment(), range_examples=8)
    one.observe(e.Enroll(), e.Enrolled())
    one.observe(e.Poll(), e.Answered(answer=m.Assigned(assignment=work)))
    one.uploading(1_200_000, 1_200_000, 1_200_000)
    reply = m.UploadReply(update_state=m.UpdateState.ACCEPTED, round_state=m.RoundState.OPEN, received_bytes=1_200_000)
    one.observe(e.Send(assignment=work), e.Replied(reply=reply))
    one.start(lambda _: m.TrainingProgress(step=42, num_steps=100, epoch=2, num_epochs=5))
    one.step(Session(phase=e.SessionPhase.TRAINING, assignment=work), 0.0, ("run", 3))


def lose(one: Journal) -> None:
    """Note a connection that is lost after a training."""
    train(one)
    one.observe(e.Poll(), e.Lost(reason=NO_ROUTE, code="FN-0811"))
    one.step(Session(phase=e.SessionPhase.IDLE), 42.0, ("run", 3))


def begin(one: Journal) -> None:
    """Note the start of a device that was never connected."""
    one.start(lambda _: m.TrainingProgress())


STATES: Final[dict[str, tuple[Callable[[Journal], None], str, str]]] = {
    "new": (begin, "Connecting", "Enrolls with the coordinator"),
    "training": (train, "Connected", "step 42 of 100, epoch 2 of 5"),
    "lost": (lose, "Not connected", "no route to host"),
}
"""By name: what the device notes, the state that the page shows, and a text on it."""


@contextmanager
def shown(folder: Path, note: Callable[[Journal], None]) -> Iterator[str]:
    """Serve the page of a device in a state. Yields its URL."""
    folder.mkdir()
    one = Journal(folder, PLACE, "d4" * 16)
    with hold_folder(folder), serve_page(folder, Address(host="127.0.0.1", port=0)) as url:
        note(one)
        yield url
        one.stop(None)


@pytest.mark.nightly
def test_the_page_of_an_owner_has_no_serious_findings_in_any_state(tmp_path: Path) -> None:
    assert AXE.is_file(), f"{AXE}: missing; see test_page_live.py"
    findings: list[str] = []
    with chromium() as browser:
        for name, (note, state, text) in STATES.items():
            with shown(tmp_path / name, note) as url:
                for scheme, width in (("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)):
                    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
                    problems: list[str] = []
                    page.on("pageerror", lambda error, seen=problems: seen.append(str(error)))
                    page.goto(url)
                    page.locator("#state", has_text=state).wait_for(timeout=10_000)
                    page.get_by_text(text).first.wait_for(timeout=10_000)
                    assert page.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
                    findings += [*problems, *found_by_axe(page, f"{name}, {scheme}, {width}")]
                    if SHOTS:
                        page.screenshot(path=Path(SHOTS) / f"site-{name}-{scheme}-{width}.png", full_page=True)
                    page.close()
    assert findings == []


@pytest.mark.nightly
def test_the_page_of_an_owner_says_when_its_device_is_gone(tmp_path: Path) -> None:
    with chromium() as browser:
        page = browser.new_page()
        with shown(tmp_path / "device", train) as url:
            page.goto(url)
            page.locator("#state", has_text="Connected").wait_for(timeout=10_000)
        page.locator("#state", has_text="Stopped").wait_for(timeout=10_000)
        assert "does not answer" in page.locator("#now").inner_text()
