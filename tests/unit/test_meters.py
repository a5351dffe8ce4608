"""Rows of steps: what they say, where they go, and the trace of a rank."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanin.datacenter.watch.meters import DATA, STEP, Meter, Scale, StepRecord, peak_resident_bytes
from fanin.datacenter.watch.sinks import (
    JsonLines,
    StatusLine,
    TensorBoard,
    format_number,
    format_record,
    open_tensorboard,
)
from fanin.datacenter.watch.timeline import Timeline, trace, waiting_share, watch_stage
from fanin.protos.errors import InvalidInput, RuntimeMissing


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Kept:
    """A sink that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[StepRecord] = []
        self.closed = False

    def write(self, row: StepRecord) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.closed = True


def step(timeline: Timeline, clock: Clock, data_s: float = 0.5, step_s: float = 1.5) -> None:
    with timeline.span(DATA):
        clock.now_s += data_s
    with timeline.span(STEP):
        clock.now_s += step_s


def row(**changes: object) -> StepRecord:
    known: dict[str, object] = {"step": 4, "loss": 2.5, "seconds": 2.0, "tokens_per_second": 12_345.0}
    return StepRecord(**{**known, "data_seconds": 0.5, "peak_memory_bytes": 3_210_000_000, **changes})


def test_a_row_has_the_rates_of_its_step() -> None:
    clock, kept = Clock(), Kept()
    timeline = Timeline(0, clock)
    scale = Scale(num_ranks=4, flops_per_token=1e6, peak_flops_per_second=1e9)
    meter = Meter(timeline, scale, [kept], lambda: 77)
    meter.bytes_by_axis = {"tp": 9}
    step(timeline, clock)
    told = meter.record(3.25, 1000, norm=0.5, learning_rate=0.1)
    assert kept.rows == [told]
    assert (told.step, told.loss, told.seconds, told.data_seconds) == (0, 3.25, 2.0, 0.5)
    assert told.tokens_per_second == 500.0
    assert told.mfu == pytest.approx(1e6 * 500.0 / 4e9)
    assert (told.peak_memory_bytes, told.gradient_norm, told.learning_rate) == (77, 0.5, 0.1)
    assert told.bytes_by_axis == {"tp": 9}
    assert told.waiting_share is None
    step(timeline, clock, data_s=0.0)
    assert meter.record(3.0, 1000).step == 1
    meter.close()
    assert kept.closed


def test_without_a_peak_there_is_no_mfu() -> None:
    clock = Clock()
    timeline = Timeline(0, clock)
    step(timeline, clock)
    assert Meter(timeline, Scale(flops_per_token=1e6), []).record(1.0, 10).mfu is None


def test_a_step_without_time_is_refused() -> None:
    with pytest.raises(InvalidInput, match="got no time under 'step' in step 0"):
        Meter(Timeline(0, Clock()), Scale(), []).record(1.0, 10)


class FakeStage:
    """A stage whose work takes time of a clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def forward_one_chunk(self, number: int, *, scale: int) -> int:
        self.clock.now_s += 1.0
        return number * scale

    def backward_one_chunk(self) -> None:
        self.clock.now_s += 2.0

    def backward_weight_one_chunk(self) -> None:
        self.clock.now_s += 0.5


def test_a_pipeline_waits_when_its_stage_does_nothing() -> None:
    clock = Clock()
    timeline, stage = Timeline(1, clock), FakeStage(clock)
    watch_stage(stage, timeline)
    with timeline.span(STEP):
        assert stage.forward_one_chunk(3, scale=2) == 6
        clock.now_s += 3.5
        stage.backward_one_chunk()
        stage.backward_weight_one_chunk()
    told = Meter(timeline, Scale(pipelined=True), []).record(1.0, 10)
    assert told.waiting_share == pytest.approx(0.5)
    assert [phase.name for phase in timeline.spans] == ["forward", "backward", "weights", STEP]


@given(busy=st.floats(0.0, 10.0), whole=st.floats(0.0, 10.0))
def test_a_share_is_a_share(busy: float, whole: float) -> None:
    assert 0.0 <= waiting_share({"forward": busy}, whole) <= 1.0


def test_a_trace_is_what_browsers_open(tmp_path: Path) -> None:
    clock = Clock()
    timeline = Timeline(3, clock)
    step(timeline, clock)
    timeline.next_step()
    step(timeline, clock)
    path = tmp_path / "rank-3.json"
    timeline.write(path)
    read = json.loads(path.read_text())
    assert read == json.loads(json.dumps(trace(timeline)))
    name, *events = read["traceEvents"]
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


def test_a_timeline_keeps_the_last_phases_and_those_that_fail() -> None:
    timeline = Timeline(0, Clock(), limit=2)
    for name in ("a", "b"):
        with timeline.span(name):
            pass
    with pytest.raises(ArithmeticError), timeline.span("c"):
        raise ArithmeticError
    assert [phase.name for phase in timeline.spans] == ["b", "c"]
    with pytest.raises(InvalidInput, match="got a limit of 0 spans"):
        Timeline(0, limit=0)


def test_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    sink = JsonLines(path)
    sink.write(row(bytes_by_axis={"pp": 8}))
    # It is there before anything is closed.
    assert json.loads(path.read_text())["bytes_by_axis"] == {"pp": 8}
    sink.write(row(step=5))
    sink.close()
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == [4, 5]


def test_a_line_says_what_is_known() -> None:
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
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_writes_over_its_line() -> None:
    out = Terminal()
    progress = StatusLine(out)
    progress.write(row(loss=10.0))
    progress.write(row(loss=9.0))
    progress.close()
    first, second, ended = out.getvalue().replace("\n", "\r").split("\r")[1:]
    assert ended == ""
    assert len(second) == len(first)


class FakeWriter:
    """A TensorBoard writer."""

    def __init__(self) -> None:
        self.noted: dict[str, tuple[float, int]] = {}
        self.closed = False

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.noted[tag] = (scalar_value, global_step)

    def close(self) -> None:
        self.closed = True


def test_tensorboard_gets_each_number_under_its_tag() -> None:
    writer = FakeWriter()
    sink = TensorBoard(writer)
    sink.write(row(bytes_by_axis={"tp": 5}))
    sink.close()
    assert writer.noted["loss"] == (2.5, 4)
    assert writer.noted["bytes_by_axis/tp"] == (5.0, 4)
    assert "mfu" not in writer.noted
    assert writer.closed


def test_tensorboard_without_its_library_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(RuntimeMissing, match="no_such_library is not installed here; pip install tensorboardX"):
        open_tensorboard(tmp_path, "no_such_library")


def test_resident_memory_is_counted_in_bytes() -> None:
    # A Python process with its libraries: more than ten megabytes, less than a hundred gigabytes.
    assert 10**7 < peak_resident_bytes() < 10**11
