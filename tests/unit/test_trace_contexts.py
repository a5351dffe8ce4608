"""The contexts of traces: what a coordinator believes of a caller, and where spans go."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fanin.edge.spans import CLOSE_S, SpanContext, TraceSpan, context_of, open_spans, protocol_of, root_of, wants_spans
from fanin.protos.errors import InvalidInput
from fanin.server.fleet.observer import AssignedWork, WorkOutcome
from fanin.server.telemetry.rounds import RoundName, RoundPart
from fanin.server.telemetry.traces import MAX_TRACES, RoundTraces

NAME = RoundName(run_id="run", round=1, opened_at_s=5.0)
ROOT = root_of("run", "1", "5.0")


@dataclass
class Sink:
    """Keeps spans."""

    spans: list[TraceSpan] = field(default_factory=list)

    def add(self, span: TraceSpan) -> None:
        """See SpanSink."""
        self.spans.append(span)

    def close(self) -> None:
        """See SpanSink."""


def traces() -> tuple[RoundTraces, Sink]:
    """Return the traces of an open Round."""
    sink = Sink()
    result = RoundTraces(sink, lambda: 10.0)
    result.opened(NAME)
    return result, sink


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "00-" + "0" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "0" * 16 + "-01",
        "01-" + "1" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "A" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "1" * 16 + "-01\n",
    ],
)
def test_another_form_of_a_context_is_none(text: str) -> None:
    assert context_of(text) is None


def test_a_context_passes_through_metadata() -> None:
    assert context_of(ROOT.traceparent) == ROOT


def test_a_caller_adds_no_span_to_a_trace_of_another_or_without_authentication() -> None:
    observed, sink = traces()
    foreign = SpanContext(trace_id="1" * 32, span_id="2" * 16)
    for traceparent, status in ((foreign.traceparent, "OK"), (ROOT.traceparent, "UNAUTHENTICATED"), ("x", "OK")):
        observed.begin("Upload", traceparent).ended(status, "", 1.0)
    observed.begin("Report", ROOT.traceparent).ended("OK", "", 1.0)
    assert sink.spans == []
    observed.begin("Upload", ROOT.traceparent).ended("INVALID_ARGUMENT", "FN-0203", 1.0)
    (span,) = sink.spans
    assert (span.name, span.parent, span.error, span.began_s) == ("Fleet/Upload", ROOT.span_id, "FN-0203", 9.0)


def test_a_round_that_fails_ends_its_spans() -> None:
    observed, sink = traces()
    observed.passed(NAME, RoundPart.WAITING, 5.0, 6.0)
    observed.ended(NAME, 9.0, is_published=False)
    assert [(one.name, one.error) for one in sink.spans] == [("select", ""), ("round", "failed")]
    # A verdict on a device that was never assigned in this process is no span.
    observed.concluded(AssignedWork(run_id="run", round=1, device="d"), WorkOutcome.REFUSED, "FN-0203")
    assert len(sink.spans) == 2


def test_only_the_last_rounds_are_traced() -> None:
    observed, sink = traces()
    for number in range(2, MAX_TRACES + 2):
        observed.opened(RoundName(run_id="run", round=number, opened_at_s=5.0))
    observed.begin("Upload", ROOT.traceparent).ended("OK", "", 1.0)
    assert sink.spans == []


@pytest.mark.parametrize(
    ("environment", "endpoint", "wanted"),
    [
        ({}, "", False),
        ({}, "http://h:4317", True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4317"}, "", True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:4317"}, "", True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "", True),
        ({"OTEL_TRACES_EXPORTER": "none"}, "http://h:4317", False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4317", "OTEL_SDK_DISABLED": "true"}, "", False),
        ({"OTEL_SERVICE_NAME": "other"}, "", False),
    ],
)
def test_the_variables_of_opentelemetry_decide(environment: dict[str, str], endpoint: str, wanted: bool) -> None:
    assert wants_spans(environment, endpoint) is wanted


@pytest.mark.parametrize(
    ("environment", "endpoint", "protocol"),
    [
        ({}, "http://h:4317", "grpc"),
        ({}, "https://h:4318", "http/protobuf"),
        ({}, "https://h/v1/traces", "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, "", "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http://h:4318", "grpc"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, "http://h:4317", "http/protobuf"),
    ],
)
def test_the_variables_or_the_url_choose_the_protocol(
    environment: dict[str, str], endpoint: str, protocol: str
) -> None:
    assert protocol_of(environment, endpoint) == protocol


def test_another_protocol_is_refused() -> None:
    with pytest.raises(InvalidInput) as refused:
        protocol_of({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "http://h:4317")
    assert refused.value.code == "FN-1431"


@pytest.mark.heavy
@pytest.mark.parametrize("path", ["", "/v1/traces"])
def test_spans_arrive_by_otlp_over_http(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    bodies: list[tuple[str, bytes]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        spans = open_spans("fanin of a test", f"http://127.0.0.1:{server.server_port}{path}")
        assert spans is not None
        root = root_of("run", "1")
        spans.add(TraceSpan(name="round", context=root, parent="", began_s=1.0, ended_s=2.0))
        spans.close()
        server.shutdown()
    (where, body) = bodies[0]
    assert where == "/v1/traces" and bytes.fromhex(root.trace_id) in body and b"fanin of a test" in body


@pytest.mark.parametrize("endpoint", ["h:4317", "http://", "ftp://h:4317", "http://h:4317/v1/spans"])
def test_a_destination_that_is_no_collector_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        open_spans("x", endpoint)
    assert refused.value.code == "FN-1431"


@pytest.mark.heavy
def test_without_the_extra_an_option_is_an_error_and_a_variable_a_warning() -> None:
    code = (
        "import logging, sys; sys.modules['opentelemetry'] = None; logging.basicConfig(); "
        "from fanin.edge.spans import open_spans; from fanin.protos.errors import RuntimeMissing\n"
        "print(open_spans('x'))\n"
        "try:\n    open_spans('x', 'http://127.0.0.1:4317')\nexcept RuntimeMissing as exc:\n    print(exc.code, exc)\n"
    )
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    first, second = done.stdout.splitlines()
    assert first == "None"
    assert second.startswith("FN-1430") and "pip install 'fanin[telemetry]'" in second
    assert "no traces are sent" in done.stderr


@pytest.mark.heavy
def test_a_collector_that_does_not_answer_costs_little_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    spans = open_spans("x", "http://127.0.0.1:1")
    assert spans is not None
    span = TraceSpan(name="n", context=ROOT, parent="", began_s=1.0, ended_s=2.0)
    began_s = time.monotonic()
    for _ in range(1000):
        spans.add(span)
    assert time.monotonic() - began_s < 1.0
    spans.close()
    assert time.monotonic() - began_s < CLOSE_S + 1.0
    assert len([one for one in caplog.records if "exporter" in one.name]) <= 1
