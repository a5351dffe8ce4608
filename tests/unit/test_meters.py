"""Records of training steps: their values, their sinks, and the trace of a rank."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.boards import values_in

from fanin.datacenter.observers.events import (
    DataRead,
    Event,
    StageComputed,
    StageWork,
    StepComputed,
    StepEnded,
    StepStarted,
)
from fanin.datacenter.observers.observer import Observers
from fanin.datacenter.watch.meters import Meter, Scale, StepRecord, peak_resident_bytes, waiting_share
from fanin.datacenter.watch.sinks import JsonLines, StatusLine, format_number, format_record, open_tensorboard
from fanin.datacenter.watch.timeline import DATA, STEP, Span, Timeline, trace
from fanin.protos.errors import InvalidInput, RuntimeMissing


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class RowSink:
    """A sink that stores its rows."""

    def __init__(self) -> None:
        self.rows: list[StepRecord] = []
        self.closed = False

    def write(self, row: StepRecord) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.closed = True


def stage_event(work: StageWork, started_s: float, seconds: float) -> StageComputed:
    return StageComputed(stage=0, work=work, started_s=started_s, seconds=seconds)


def step(number: int, started_s: float, data_s: float = 0.5, *stages: StageComputed) -> list[Event]:
    """Return the events of a step that computes for 1.5 s."""
    return [
        StepStarted(step=number),
        DataRead(step=number, started_s=started_s, seconds=data_s),
        *stages,
        StepComputed(step=number, started_s=started_s + data_s, seconds=1.5),
        StepEnded(step=number, loss=3.25, rate=0.1, norm=0.5, units=1000),
    ]


def row(**changes: object) -> StepRecord:
    defaults: dict[str, object] = {"step": 4, "loss": 2.5, "seconds": 2.0, "tokens_per_second": 12_345.0}
    return StepRecord(**{**defaults, "data_seconds": 0.5, "peak_memory_bytes": 3_210_000_000, **changes})


def test_a_row_has_the_rates_of_its_step() -> None:
    sink, scale = RowSink(), Scale(num_ranks=4, flops_per_token=1e6, peak_flops_per_second=1e9)
    meter = Meter(scale, [sink], lambda: 77, lambda: {"tp": 9})
    for event in (*step(0, 100.0), *step(1, 102.0, 0.0)):
        meter.on(event)
    first, second = sink.rows
    assert (first.step, first.loss, first.seconds, first.data_seconds) == (0, 3.25, 2.0, 0.5)
    assert first.tokens_per_second == 500.0
    assert first.mfu == pytest.approx(1e6 * 500.0 / 4e9)
    assert (first.peak_memory_bytes, first.gradient_norm, first.learning_rate) == (77, 0.5, 0.1)
    assert first.bytes_by_axis == {"tp": 9}
    assert first.waiting_share is None
    assert (second.step, second.seconds) == (1, 1.5)
    meter.close()
    assert sink.closed


def test_without_a_peak_there_is_no_mfu() -> None:
    sink = RowSink()
    publish = Observers([Meter(Scale(flops_per_token=1e6), [sink])]).publish
    for event in step(0, 100.0):
        publish(event)
    assert sink.rows[0].mfu is None


def test_a_step_without_time_is_refused() -> None:
    with pytest.raises(InvalidInput, match="FN-1390"):
        Meter(Scale(), []).on(step(0, 100.0)[-1])


def test_a_pipeline_waits_when_its_stage_does_nothing() -> None:
    sink, timeline = RowSink(), Timeline(1)
    publish = Observers([timeline, Meter(Scale(pipelined=True), [sink])]).publish
    stages = [
        stage_event("forward", 100.5, 0.25),
        stage_event("backward", 100.9, 0.25),
        stage_event("weights", 101.2, 0.25),
    ]
    for event in step(0, 100.0, 0.5, *stages):
        publish(event)
    assert sink.rows[0].waiting_share == pytest.approx(0.5)
    assert [phase.name for phase in timeline.spans] == [DATA, "forward", "backward", "weights", STEP]


def test_a_stage_of_an_evaluation_is_no_part_of_a_step() -> None:
    sink = RowSink()
    meter = Meter(Scale(pipelined=True), [sink])
    evaluation = stage_event("forward", 102.0, 9.0)
    for event in (*step(0, 100.0), evaluation, *step(1, 120.0, 0.5, stage_event("forward", 120.5, 0.75))):
        meter.on(event)
    assert [row.waiting_share for row in sink.rows] == pytest.approx([1.0, 0.5])


@given(busy=st.floats(0.0, 10.0), total=st.floats(0.0, 10.0))
def test_a_share_is_a_share(busy: float, total: float) -> None:
    assert 0.0 <= waiting_share(busy, total) <= 1.0


def test_a_trace_has_the_format_of_browsers(tmp_path: Path) -> None:
    timeline = Timeline(3)
    for event in (*step(0, 100.0), *step(1, 102.0)):
        timeline.on(event)
    path = tmp_path / "rank-3.json"
    timeline.write(path)
    document = json.loads(path.read_text())
    assert document == json.loads(json.dumps(trace(timeline)))
    name, *events = document["traceEvents"]
    assert name["args"] == {"name": "rank 3"}
    assert [(each["name"], each["ph"], each["pid"], each["args"]["step"]) for each in events] == [
        (DATA, "X", 3, 0),
        (STEP, "X", 3, 0),
        (DATA, "X", 3, 1),
        (STEP, "X", 3, 1),
    ]
    assert [each["ts"] for each in events] == pytest.approx([100.0e6, 100.5e6, 102.0e6, 102.5e6])
    assert [each["dur"] for each in events] == pytest.approx([0.5e6, 1.5e6] * 2)
    assert [each.name for each in tmp_path.iterdir()] == ["rank-3.json"]


def test_a_timeline_keeps_the_last_phases() -> None:
    timeline = Timeline(0, limit=2)
    for event in step(4, 100.0, 0.5, stage_event("forward", 100.5, 1.0)):
        timeline.on(event)
    assert list(timeline.spans) == [
        Span(name="forward", started_s=100.5, seconds=1.0, step=4),
        Span(name=STEP, started_s=100.5, seconds=1.5, step=4),
    ]
    with pytest.raises(InvalidInput, match="FN-1390"):
        Timeline(0, limit=0)


def test_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    sink = JsonLines(path)
    sink.write(row(bytes_by_axis={"pp": 8}))
    # The file is written before any sink is closed.
    assert json.loads(path.read_text())["bytes_by_axis"] == {"pp": 8}
    sink.write(row(step=5))
    sink.close()
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == [4, 5]


def test_a_line_has_the_known_values() -> None:
    assert format_record(row()) == "step 5  loss 2.5000  12.3k tokens/s  3.21GB  data 25%"
    full = row(mfu=0.456, waiting_share=0.125, bytes_by_axis={"tp": 2_500_000, "pp": 0})
    assert format_record(full, 20) == (
        "step 5/20  loss 2.5000  12.3k tokens/s  MFU 45.6%  3.21GB  data 25%  waiting 12%  tp 2.5MB"
    )


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1000, "1k"), (1234567, "1.23M"), (5e18, "5000P"), (0.25, "0.25")]
)
def test_short_numbers(number: float, text: str) -> None:
    assert format_number(number) == text


def test_progress_in_a_file_is_a_line_now_and_then_and_the_last() -> None:
    clock, out = Clock(), io.StringIO()
    progress = StatusLine(out, num_steps=4, every_s=10.0, clock=clock)
    for number in range(4):
        progress.write(row(step=number))
        clock.now_s += 6.0
    progress.close()
    assert [text[:8] for text in out.getvalue().splitlines()] == ["step 1/4", "step 3/4", "step 4/4"]


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_writes_over_its_line() -> None:
    out = Terminal()
    progress = StatusLine(out)
    progress.write(row(loss=10.0))
    progress.write(row(loss=9.0))
    progress.close()
    first, second, rest = out.getvalue().replace("\n", "\r").split("\r")[1:]
    assert rest == ""
    assert len(second) == len(first)


@pytest.mark.heavy
def test_tensorboard_receives_each_number_under_its_tag(tmp_path: Path) -> None:
    sink = open_tensorboard(tmp_path)
    sink.write(row(bytes_by_axis={"tp": 5}))
    sink.write(row(step=5, loss=None))
    sink.close()
    values = values_in(tmp_path)
    assert (values["loss", 4], values["seconds", 5], values["bytes_by_axis/tp", 4]) == (2.5, 2.0, 5.0)
    assert not {"step", "mfu"} & {tag for tag, _ in values}
    assert ("loss", 5) not in values


def test_tensorboard_without_its_library_names_the_package_to_install(tmp_path: Path) -> None:
    with pytest.raises(RuntimeMissing, match="FN-1105"):
        open_tensorboard(tmp_path, "no_such_library")


def test_resident_memory_is_counted_in_bytes() -> None:
    # A Python process with its libraries: more than ten megabytes, less than a hundred gigabytes.
    assert 10**7 < peak_resident_bytes() < 10**11
