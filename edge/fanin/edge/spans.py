"""Spans of traces: what a coordinator and its devices say of the time that a Round takes.

A span has a name, a begin and an end, and a parent, maybe in another process. Its context travels in the metadata of
calls as ``traceparent`` (W3C Trace Context). Ids that several processes need are derived from names: a coordinator that
starts again in the middle of a Round continues its trace, and stores nothing for that.

Spans name Runs, Rounds, devices, outcomes and codes. They carry no number of examples, no loss and no other result of a
training: traces leave the machine to whoever collects them.

OpenTelemetry is imported by ``open_spans`` alone. Without the extra ``telemetry``, or without a destination, nothing of
it is loaded and no span is created.

Reference:
    https://www.w3.org/TR/trace-context/
    https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

import hashlib
import logging
import os
import re
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urlsplit

from fanin.protos.errors import InvalidInput, RuntimeMissing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

LOG: Final = logging.getLogger("fanin.edge.spans")
ATTRIBUTES: Final = frozenset(
    {
        "fanin.run",
        "fanin.round",
        "fanin.device",
        "fanin.outcome",
        "fanin.base_version",
        "rpc.system",
        "rpc.service",
        "rpc.method",
        "rpc.grpc.status_code",
    }
)
"""The only attributes that a span may have."""
_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
CLOSE_S: Final = 3.0
"""Seconds that the end of a process waits for the last spans."""
LOG_S: Final = 60.0
_DISABLED: Final = "OTEL_SDK_DISABLED"
_EXPORTER: Final = "OTEL_TRACES_EXPORTER"
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_GRPC: Final = "grpc"
_HTTP: Final = "http/protobuf"
_HTTP_PATH: Final = "/v1/traces"
_HTTP_PORT: Final = 4318
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanContext:
    """The name of a span in its trace. Both ids are lower-case hexadecimal, of 16 and of 8 bytes."""

    trace_id: str
    span_id: str

    @property
    def traceparent(self) -> str:
        """The context in the metadata of a call."""
        return f"00-{self.trace_id}-{self.span_id}-01"

    def child(self, name: str = "") -> "SpanContext":
        """Return the context of a child: derived from a name that no other child has, or a random one."""
        span_id = _digest(self.trace_id, self.span_id, name)[:16] if name else secrets.token_hex(8)
        return SpanContext(trace_id=self.trace_id, span_id=span_id)


def context_of(traceparent: str) -> SpanContext | None:
    """Return the context in the metadata of a call, None without a valid one."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or not int(match[1], 16) or not int(match[2], 16):
        return None
    return SpanContext(trace_id=match[1], span_id=match[2])


def root_of(*names: str) -> SpanContext:
    """Return the context of the first span of the trace with these names."""
    digest = _digest(*names)
    return SpanContext(trace_id=digest[:32], span_id=digest[32:48])


def _digest(*names: str) -> str:
    return hashlib.sha256("\n".join(("fanin trace", *names)).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """One span that has ended.

    Attributes:
        name: What was done.
        context: Its context.
        parent: The id of its parent in the same trace, "" for the first span.
        began_s: Its begin, in seconds since the Unix epoch.
        ended_s: Its end.
        attributes: Some of ``ATTRIBUTES``.
        is_served: Whether it is the answer to a call.
        error: The code or the kind of a failure, "" without one.
    """

    name: str
    context: SpanContext
    parent: str
    began_s: float
    ended_s: float
    attributes: Mapping[str, str | int] = field(default_factory=lambda: MappingProxyType({}))
    is_served: bool = False
    error: str = ""

    def __post_init__(self) -> None:
        assert self.attributes.keys() <= ATTRIBUTES, f"span {self.name}: {set(self.attributes) - ATTRIBUTES}"


class SpanSink(Protocol):
    """Receives spans."""

    def add(self, span: TraceSpan) -> None:
        """Send a span, at once or later. Never raises, and never waits for the network."""
        ...

    def close(self) -> None:
        """Send what is left, for some seconds at most."""
        ...


def wants_spans(environment: Mapping[str, str], endpoint: str = "") -> bool:
    """Return whether traces have a destination: an endpoint of an option, or one by OpenTelemetry's own variables."""
    if environment.get(_DISABLED, "").lower() == "true" or environment.get(_EXPORTER, "otlp") == "none":
        return False
    return bool(endpoint or environment.get(_EXPORTER) or any(environment.get(name) for name in _ENDPOINTS))


def protocol_of(environment: Mapping[str, str], endpoint: str = "") -> str:
    """Return the protocol for spans: ``grpc`` or ``http/protobuf``.

    The variables of OpenTelemetry decide. Without them it is OTLP over HTTP for an endpoint with the path or the port
    of that protocol, otherwise over gRPC.

    Raises:
        InvalidInput: A variable names another protocol.
    """
    name = next((name for name in _PROTOCOLS if environment.get(name)), "")
    if not name:
        url = urlsplit(endpoint or next((environment[each] for each in _ENDPOINTS if environment.get(each)), ""))
        return _HTTP if url.path.rstrip("/") == _HTTP_PATH or url.port == _HTTP_PORT else _GRPC
    if environment[name] not in (_GRPC, _HTTP):
        raise InvalidInput(
            f"traces: got {name}={environment[name][:64]!r}, expected {_GRPC} or {_HTTP}; correct the variable",
            code="FN-1431",
        )
    return environment[name]


def open_spans(service: str, endpoint: str = "") -> SpanSink | None:
    """Return where the spans of this process go, None if traces have no destination.

    Args:
        service: The name of this program; ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` replace and extend it.
        endpoint: The URL of a collector that receives OTLP over gRPC or HTTP (``protocol_of``), "" for that of
            OpenTelemetry's variables.

    Raises:
        RuntimeMissing: An endpoint is given, and the extra ``telemetry`` is not installed.
        InvalidInput: The endpoint is not a URL, or another protocol is configured.
    """
    if not wants_spans(os.environ, endpoint):
        return None
    if endpoint and not re.fullmatch(r"https?://[^\s/]+(/|/v1/traces/?)?", endpoint):
        raise InvalidInput(
            f"traces: got {endpoint!r}, expected http://HOST:PORT or https://HOST:PORT of a collector", code="FN-1431"
        )
    protocol = protocol_of(os.environ, endpoint)
    try:
        return _OtlpSpans(service, endpoint, protocol)
    except ModuleNotFoundError as exc:
        text = f"traces: {exc.name} is not installed; run: pip install 'fanin[telemetry]'"
        if endpoint:
            raise RuntimeMissing(text, code="FN-1430") from exc
        # The variables may be those of another program on this machine.
        LOG.warning("%s; no traces are sent", text)
        return None


class _OncePerMinute(logging.Filter):
    """Lets one record a minute pass: a collector may be down for a day, and each batch would log that."""

    def __init__(self) -> None:
        super().__init__()
        self._until_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter."""
        is_due = record.created >= self._until_s
        if is_due:
            self._until_s = record.created + LOG_S
        return is_due


def _exporter(endpoint: str, protocol: str) -> "SpanExporter":
    """Return the exporter of OpenTelemetry. It sends to the endpoint, "" for that of the variables."""
    if protocol == _HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        _limit_log("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        _limit_log("opentelemetry.exporter.otlp.proto.http._common")
        base = endpoint.rstrip("/").removesuffix(_HTTP_PATH)
        return HttpExporter(endpoint=base + _HTTP_PATH) if base else HttpExporter()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    _limit_log("opentelemetry.exporter.otlp.proto.grpc.exporter")
    return GrpcExporter(endpoint=endpoint, insecure=endpoint.startswith("http:")) if endpoint else GrpcExporter()


def _limit_log(name: str) -> None:
    log = logging.getLogger(name)
    if not any(isinstance(each, _OncePerMinute) for each in log.filters):
        log.addFilter(_OncePerMinute())


class _OtlpSpans:
    """Sends spans by OTLP, in batches from a thread of OpenTelemetry's."""

    def __init__(self, service: str, endpoint: str, protocol: str) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        class ChosenIds(RandomIdGenerator):
            """Returns the ids of the span that is being created."""

            chosen = SpanContext(trace_id="", span_id="")

            def generate_trace_id(self) -> int:
                return int(self.chosen.trace_id, 16)

            def generate_span_id(self) -> int:
                return int(self.chosen.span_id, 16)

        self._trace = trace
        self._ids = ChosenIds()
        names = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": service}
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=Resource.create(names), id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint, protocol)))
        self._tracer = self._provider.get_tracer("fanin")

    def add(self, span: TraceSpan) -> None:
        """See SpanSink. Spans are added by one thread."""
        trace = self._trace
        parent = None
        if span.parent:
            remote = trace.SpanContext(
                trace_id=int(span.context.trace_id, 16),
                span_id=int(span.parent, 16),
                is_remote=True,
                trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
            )
            parent = trace.set_span_in_context(trace.NonRecordingSpan(remote))
        self._ids.chosen = span.context
        record = self._tracer.start_span(
            span.name,
            context=parent or trace.set_span_in_context(trace.INVALID_SPAN),
            kind=trace.SpanKind.SERVER if span.is_served else trace.SpanKind.INTERNAL,
            attributes=dict(span.attributes),
            start_time=round(span.began_s * 1e9),
        )
        if span.error:
            record.set_status(trace.StatusCode.ERROR, span.error)
        record.end(round(max(span.ended_s, span.began_s) * 1e9))

    def close(self) -> None:
        """See SpanSink."""
        # OpenTelemetry waits for up to 30 s for a collector that does not answer.
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
