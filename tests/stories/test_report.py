"""``fanin report``: a Run or a simulation as one HTML file that needs nothing else."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import federations as f
from support.commands import Fanin, fanin_in_process, one_line
from support.hosted import Hosted

from fanin.commands.report.charts import chart_html
from fanin.commands.report.content import Chart, Content, Grid
from fanin.commands.report.page import page_html
from fanin.protos import messages as m

ROW = {
    "seed": 0,
    "round": 0,
    "version": 0,
    "time_s": 0.0,
    "num_clients": 0,
    "num_examples": 0,
    "bytes_down": 0,
    "train_loss": None,
    "test_loss": 0.5,
    "test_accuracy": 0.8,
    "test_accuracy_int8": 0.79,
    "bytes_up": 0,
    "validation_loss": None,
    "metrics": {"f1": 0.7, "f1_int8": 0.69},
}
RESULT = {
    "seed": 0,
    "engine": "graph",
    "selection": "uniform",
    "is_complete": True,
    "versions": ["ab" * 32, "cd" * 32],
    "failures": [],
    "rounds": [ROW, ROW | {"round": 1, "version": 1, "train_loss": 0.4, "num_clients": 3}],
}
OPEN = {"meta", "br"}
"""Elements without an end."""


class Page(HTMLParser):
    """A page whose elements are closed in their order; its texts and the names of its elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.names: set[str] = set()
        self.texts: list[str] = []
        self.feed(text)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See HTMLParser."""
        self.names.add(tag)
        assert not any(name in ("src", "href", "onload") for name, _ in attrs)
        if tag not in OPEN and not (self.get_starttag_text() or "").endswith("/>"):
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """See HTMLParser."""
        if not (self.stack and self.stack[-1] == tag):
            assert tag in ("line", "polyline"), (tag, self.stack)
            return
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        """See HTMLParser."""
        self.texts.append(data)


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fanin:
    """The command line, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A coordinator with a Run that has ended after one Round, and one that waits for devices."""
    host = Hosted(tmp_path_factory.mktemp("report")).start()
    bundle = f.bundle_in(host.folder, f.SMALL_SHAPES)
    host.start_run(f.plan(), bundle, f.PUBLISHER)
    for peer in f.peers(host, bundle, host.folder):
        peer.take_part()
    host.published_versions()
    host.start_run(f.plan(), bundle, f.PUBLISHER, run_id="open")
    (host.state / "tokens").mkdir()
    (host.state / "tokens" / "operator.token").write_text(host.operator_token)
    (host.state / "address").write_text(host.address)
    yield host
    host.stop()


def test_a_run_is_one_file_with_its_rounds_plan_and_verification(fanin: Fanin, host: Hosted) -> None:
    (version,) = host.published_versions()
    outcome = fanin("report", "run", "--state", host.state, "--verify", "--json")
    assert outcome.status == 0, outcome.err
    row = json.loads(outcome.out)
    assert (row["report"], row["state"], row["figures"]["Verified"]) == ("run.html", "finished", "yes")
    text = Path("run.html").read_text("utf-8")
    page = Page(text)
    assert not page.names & {"script", "img", "link", "iframe"} and "http" not in re.sub("<!doctype.*", "", text)
    assert version.version_sha256 in page.texts and "prefers-color-scheme: dark" in text
    assert "Every Version was recomputed from its parent and the closed set of its Updates." in page.texts
    assert f"took part, of {f.NUM_DEVICES} enrolled" in page.texts
    assert fanin("report", "run", "--state", host.state).status == 0, "a report replaces a report"


def test_a_run_without_a_round_has_a_report(fanin: Fanin, host: Hosted) -> None:
    assert fanin("report", "open", "--state", host.state, "--out", "⭐ rapport.html").out == "⭐ rapport.html\n"
    assert "running" in Page(Path("⭐ rapport.html").read_text("utf-8")).texts


def test_a_file_of_others_is_not_replaced(fanin: Fanin, host: Hosted) -> None:
    Path("run.html").write_text("<html>mine")
    assert "something else is there" in one_line(fanin("report", "run", "--state", host.state), "report")
    assert Path("run.html").read_text() == "<html>mine"


def test_a_simulation_is_found_in_its_file_and_in_its_folder(fanin: Fanin) -> None:
    Path("results").mkdir()
    Path("results", "mine.json").write_text(json.dumps(RESULT))
    Path("results", "other.json").write_text("[1]")
    for what in ("results", "results/mine.json"):
        assert fanin("report", what).out == "mine.html\n"
        page = Page(Path("mine.html").read_text("utf-8"))
        assert {"Accuracy on the test data", "f1 on the test data", "complete", "0.7900"} <= set(page.texts)
        Path("mine.html").unlink()


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps(RESULT | {"rounds": [{"round": 1}]}), '{"rounds": 1'])
def test_a_file_that_is_no_simulation_is_one_error(fanin: Fanin, text: str) -> None:
    Path("x.json").write_text(text)
    outcome = fanin("report", "x.json")
    assert "simulation" in one_line(outcome, "report") and "FN-1466" in outcome.err
    assert not Path("x.html").exists()


def test_the_texts_of_peers_are_escaped() -> None:
    bad = "</style><script>alert(1)</script>"
    chart = Chart(title=bad, x_label=bad, series={bad: [(0, 1.0), (1, 2.0)]}, note=bad)
    table = Grid(title=bad, head=(), rows=[(bad, bad)], note=bad)
    content = Content(
        name=bad,
        kind="run",
        state=bad,
        is_good=True,
        reason=bad,
        figures=[(bad, bad, bad)],
        warnings=[bad],
        charts=[chart],
        tables=[table],
    )
    assert "script" not in Page(page_html(content, 0.0)).names


NUMBERS = st.floats(-1e12, 1e12)


@given(points=st.lists(st.tuples(st.integers(0, 2**40), NUMBERS), max_size=5), is_amount=st.booleans())
def test_each_point_of_a_curve_is_within_the_drawing(points: list[tuple[float, float]], is_amount: bool) -> None:
    values = [(number, abs(value) if is_amount else value) for number, value in points]
    text = chart_html(Chart(title="t", x_label="x", series={"a": values}, is_amount=is_amount))
    assert (text == "") == (points == [])
    for x, y in re.findall(r'cx="([\d.-]+)" cy="([\d.-]+)"', text):
        assert 0 <= float(x) <= 520 and 0 <= float(y) <= 240
    assert text.count("<text") <= 20


def test_events_are_read_until_the_state_that_is_described() -> None:
    from fanin.commands.report.of_run import events_so_far

    def endless() -> Iterator[m.LoggedEvent]:
        version = m.VersionPublished(number=1, version_sha256="ab" * 32, parent=0, round=1)
        for number, event in enumerate((m.RoundOpened(round=1, base_version=0), version)):
            yield m.LoggedEvent(sequence=number + 1, time=1.0, event=event)
        raise AssertionError("waits for ever")

    info = m.RunInfo(run_id="run", state=m.RunState.RUNNING, version=1)
    assert len(events_so_far(info, endless())) == 2
    assert events_so_far(m.RunInfo(run_id="run", state=m.RunState.RUNNING), endless()) == []
