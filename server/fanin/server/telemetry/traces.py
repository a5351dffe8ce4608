"""Traces of Rounds: one trace for each Round, with a span for each of its parts and for each device.

    round
      select, collect, close, fold, outer step, publish    the parts of the Round (``rounds``)
      assignment                                           one device, from its Assignment to its verdict
        download, train, upload                            by the device, if it sends spans itself
          Fleet/Download, Fleet/Upload                     the calls, as the coordinator serves them
            commit                                         the complete Update becomes durable

The context of an assignment travels in the trailing metadata of the check-in's reply, and back in the metadata of the
calls for it. A device that sends no spans returns it as it is: then the calls are children of the assignment.

The ids of a Round and of its assignments are derived from their names (``edge.spans``), so a coordinator that starts
again continues the trace. A device can name only traces of Rounds of this coordinator.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from google.protobuf.message import Message

from fanin.edge.spans import SpanContext, SpanSink, TraceSpan, context_of, root_of
from fanin.protos import calls
from fanin.protos.messages import Assigned, CheckInAnswer
from fanin.server.fleet.observer import AssignedWork, WorkOutcome
from fanin.server.telemetry.calls import Metadata
from fanin.server.telemetry.rounds import RoundName, RoundPart

MAX_TRACES: Final = 256
"""Rounds whose calls are still traced: those under way, and the last ones."""
MAX_ASSIGNMENTS: Final = 10_000
"""Devices of a Round with spans. Larger cohorts are sampled: the first ones."""
TRACED_CALLS: Final = ("Download", "Upload")
UNFINISHED: Final = "unfinished"
_NAMES: Final = MappingProxyType(
    {
        RoundPart.WAITING: "select",
        RoundPart.TRAINING: "collect",
        RoundPart.CLOSING: "close",
        RoundPart.FOLDING: "fold",
        RoundPart.STEPPING: "outer step",
        RoundPart.PUBLISHING: "publish",
    }
)


@dataclass(slots=True)
class _Trace:
    """The trace of one Round. ``began_s`` has the devices at work, ``num_begun`` how often each one began."""

    name: RoundName
    root: SpanContext
    began_s: dict[str, float] = field(default_factory=dict)
    num_begun: dict[str, int] = field(default_factory=dict)

    def assignment(self, device: str) -> SpanContext:
        """Return the context of the last Assignment of a device."""
        return self.root.child(f"assignment {device} {self.num_begun.get(device, 1)}")


@dataclass(slots=True)
class TracedCall:
    """A ServedCall of a trace, or of none.

    Attributes:
        method: The name of its method.
        parent: The context that the caller sent, None without one.
        context: The context of this call.
        assigned: The context of the Assignment that the call returns.
    """

    traces: "RoundTraces"
    method: str
    parent: SpanContext | None
    context: SpanContext | None
    assigned: SpanContext | None = None

    def replied(self, reply: Message) -> Metadata:
        """See ServedCall."""
        return () if self.assigned is None else ((calls.TRACEPARENT, self.assigned.traceparent),)

    def ended(self, status: str, code: str, seconds: float) -> None:
        """See ServedCall."""
        # A peer that is not authenticated must not add to a trace.
        if self.parent is not None and self.context is not None and status != "UNAUTHENTICATED":
            self.traces.add_call(self, status, code, seconds)


_CALL: Final[ContextVar[TracedCall | None]] = ContextVar("fanin traced call", default=None)
"""The call that the current task serves."""


class RoundTraces:
    """Sends the spans of Rounds. It is a RoundListener, a FleetObserver and a CallObserver.

    Args:
        spans: Receives the spans.
        wall: Wall time, in seconds.
    """

    def __init__(self, spans: SpanSink, wall: Callable[[], float]) -> None:
        self._spans = spans
        self._wall = wall
        self._traces: OrderedDict[tuple[str, int], _Trace] = OrderedDict()
        self._known: set[str] = set()

    # RoundListener.

    def opened(self, name: RoundName) -> None:
        """See RoundListener."""
        root = root_of(name.run_id, str(name.round), repr(name.opened_at_s))
        self._traces[name.run_id, name.round] = _Trace(name, root)
        self._known.add(root.trace_id)
        while len(self._traces) > MAX_TRACES:
            _, oldest = self._traces.popitem(last=False)
            self._known.discard(oldest.root.trace_id)

    def passed(self, name: RoundName, part: RoundPart, began_s: float, ended_s: float) -> None:
        """See RoundListener."""
        trace = self._traces.get((name.run_id, name.round))
        if trace is not None:
            self._add(trace, _NAMES[part], trace.root.child(part.value), trace.root, (began_s, ended_s))

    def ended(self, name: RoundName, ended_s: float, *, is_published: bool) -> None:
        """See RoundListener."""
        trace = self._traces.get((name.run_id, name.round))
        if trace is None:
            return
        for device in tuple(trace.began_s):
            self._end_assignment(trace, device, UNFINISHED)
        outcome = "published" if is_published else "failed"
        self._spans.add(
            TraceSpan(
                name="round",
                context=trace.root,
                parent="",
                began_s=name.opened_at_s,
                ended_s=ended_s,
                attributes={"fanin.run": name.run_id, "fanin.round": name.round, "fanin.outcome": outcome},
                error="" if is_published else outcome,
            )
        )

    # FleetObserver.

    def answered(self, device: str, answer: CheckInAnswer) -> None:
        """See FleetObserver."""
        if not isinstance(answer, Assigned):
            return
        trace = self._traces.get((answer.assignment.run_id, answer.assignment.round))
        if trace is None:
            return
        if device not in trace.began_s:
            if len(trace.num_begun) >= MAX_ASSIGNMENTS and device not in trace.num_begun:
                return
            trace.began_s[device] = self._wall()
            trace.num_begun[device] = trace.num_begun.get(device, 0) + 1
        if (call := _CALL.get()) is not None:
            call.assigned = trace.assignment(device)

    def sent(self, num_bytes: int) -> None:
        """See FleetObserver."""

    def received(self, num_bytes: int) -> None:
        """See FleetObserver."""

    @contextmanager
    def committing(self, work: AssignedWork) -> Iterator[None]:
        """See FleetObserver."""
        began_s = self._wall()
        try:
            yield
        finally:
            trace, call = self._traces.get((work.run_id, work.round)), _CALL.get()
            if trace is not None and call is not None and call.context is not None:
                self._add(trace, "commit", call.context.child(), call.context, (began_s, self._wall()))

    def concluded(self, work: AssignedWork, outcome: WorkOutcome, code: str = "") -> None:
        """See FleetObserver."""
        trace = self._traces.get((work.run_id, work.round))
        if trace is not None and work.device in trace.began_s:
            self._end_assignment(trace, work.device, outcome.value, code)

    # CallObserver.

    def begin(self, method: str, traceparent: str) -> TracedCall:
        """See CallObserver."""
        parent = context_of(traceparent) if method in TRACED_CALLS else None
        if parent is not None and parent.trace_id not in self._known:
            parent = None
        call = TracedCall(self, method, parent, None if parent is None else parent.child())
        _CALL.set(call)
        return call

    def add_call(self, call: TracedCall, status: str, code: str, seconds: float) -> None:
        """Add the span of a call that has ended."""
        assert call.parent is not None and call.context is not None, "only calls of a trace have spans"
        now_s = self._wall()
        is_failure = status not in ("OK", "CANCELLED")
        self._spans.add(
            TraceSpan(
                name=f"Fleet/{call.method}",
                context=call.context,
                parent=call.parent.span_id,
                began_s=now_s - seconds,
                ended_s=now_s,
                attributes={
                    "rpc.system": "grpc",
                    "rpc.service": "fanin.v1.Fleet",
                    "rpc.method": call.method,
                    "rpc.grpc.status_code": status,
                },
                is_served=True,
                error=(code or status) if is_failure else "",
            )
        )

    def _end_assignment(self, trace: _Trace, device: str, outcome: str, code: str = "") -> None:
        began_s = trace.began_s.pop(device)
        self._spans.add(
            TraceSpan(
                name="assignment",
                context=trace.assignment(device),
                parent=trace.root.span_id,
                began_s=began_s,
                ended_s=self._wall(),
                attributes={
                    "fanin.run": trace.name.run_id,
                    "fanin.round": trace.name.round,
                    "fanin.device": device,
                    "fanin.outcome": outcome,
                },
                error=code,
            )
        )

    def _add(
        self, trace: _Trace, name: str, context: SpanContext, parent: SpanContext, times_s: tuple[float, float]
    ) -> None:
        self._spans.add(
            TraceSpan(
                name=name,
                context=context,
                parent=parent.span_id,
                began_s=times_s[0],
                ended_s=times_s[1],
                attributes={"fanin.run": trace.name.run_id, "fanin.round": trace.name.round},
            )
        )
