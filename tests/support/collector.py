"""A collector of OpenTelemetry on this machine: it receives spans by OTLP over real gRPC, and keeps them."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

WAIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Received:
    """A span as the collector received it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent: str
    began_ns: int
    ended_ns: int
    attributes: Mapping[str, str | int]
    has_failed: bool


class Collector(services.TraceServiceServicer):
    """Receives spans. ``url`` is where."""

    def __init__(self) -> None:
        self.url = ""
        self._spans: list[Received] = []
        self._lock = threading.Lock()

    def Export(self, request: pb.ExportTraceServiceRequest, context: object) -> pb.ExportTraceServiceResponse:
        """Keep the spans of a request."""
        with self._lock:
            for group in request.resource_spans:
                names = {each.key: each.value.string_value for each in group.resource.attributes}
                for scope in group.scope_spans:
                    self._spans += [
                        Received(
                            service=names["service.name"],
                            name=span.name,
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent=span.parent_span_id.hex(),
                            began_ns=span.start_time_unix_nano,
                            ended_ns=span.end_time_unix_nano,
                            attributes={
                                each.key: each.value.string_value or each.value.int_value for each in span.attributes
                            },
                            has_failed=bool(span.status.code == span.status.STATUS_CODE_ERROR),
                        )
                        for span in scope.spans
                    ]
        return pb.ExportTraceServiceResponse()

    @property
    def spans(self) -> Sequence[Received]:
        """All spans so far."""
        with self._lock:
            return tuple(self._spans)

    def wait(self, is_done: Callable[[Sequence[Received]], bool]) -> Sequence[Received]:
        """Return the spans once a condition holds."""
        until = time.monotonic() + WAIT_S
        while not is_done(spans := self.spans):
            assert time.monotonic() < until, Counter(f"{one.service} {one.name}" for one in spans)
            time.sleep(0.1)
        return spans


def by_parent(spans: Sequence[Received]) -> Mapping[str, Sequence[Received]]:
    """Return the spans by the id of their parent."""
    children = defaultdict(list)
    for span in spans:
        children[span.parent].append(span)
    return children


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    services.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    collector.url = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0)
