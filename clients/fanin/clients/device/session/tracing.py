"""The spans of a device: download, train and upload, as children of its Assignment at the coordinator.

The coordinator sends the context of an Assignment in the metadata of its reply, and the transport returns it in the
metadata of the calls for this Assignment. While a span is under way, these calls are its children.

The time of a training depends on the data, as the steps do that a masked or private Update does not report. Such a
training has no span, and neither has its upload, which begins when the training ends.
"""

from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from fanin.clients.device.session import events as e
from fanin.clients.device.session.known import is_hidden
from fanin.edge.spans import SpanSink, TraceSpan, context_of

_NAMES: Final = {e.Fetch: "download", e.Train: "train", e.Send: "upload"}


class TracedLink(Protocol):
    """A transport that returns the context of a trace: ``traceparent`` of the last Assignment, "" without one."""

    traceparent: str


class DeviceTraces:
    """Sends a span for each download and, unless it is hidden, training and upload. One thread, the session's, uses it.

    Args:
        spans: Receives the spans.
        link: The transport.
        device: The id of the device.
        wall: Wall time, in seconds.
    """

    def __init__(self, spans: SpanSink, link: TracedLink, device: str, wall: Callable[[], float]) -> None:
        self._spans = spans
        self._link = link
        self._device = device
        self._wall = wall

    async def traced(self, action: e.SessionAction, work: Awaitable[e.SessionEvent]) -> e.SessionEvent:
        """Await the work on an action within a span, if it has one."""
        parent = context_of(self._link.traceparent)
        if parent is None or not isinstance(action, e.Fetch | e.Train | e.Send):
            return await work
        if not isinstance(action, e.Fetch) and is_hidden(action.assignment):
            return await work
        context, began_s, failure = parent.child(), self._wall(), "unexpected"
        self._link.traceparent = context.traceparent
        try:
            event = await work
            is_failure = isinstance(event, e.Lost | e.Moot | e.Unable | e.Denied)
            failure = type(event).__name__.lower() if is_failure else ""
        finally:
            self._link.traceparent = parent.traceparent
            self._spans.add(
                TraceSpan(
                    name=_NAMES[type(action)],
                    context=context,
                    parent=parent.span_id,
                    began_s=began_s,
                    ended_s=self._wall(),
                    attributes={
                        "fanin.run": action.assignment.run_id,
                        "fanin.round": action.assignment.round,
                        "fanin.device": self._device,
                    },
                    error=failure,
                )
            )
        return event
