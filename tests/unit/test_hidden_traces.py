"""The spans of a device in a masked or private Round do not show how long it trained."""

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from support.values import assignment

from fanin.clients.device.session import events as e
from fanin.clients.device.session.tracing import DeviceTraces
from fanin.edge.spans import TraceSpan, root_of
from fanin.protos import messages as m
from fanin.protos.plans import CENTRAL, RoundPlan

WORK = assignment()
MASKED = replace(WORK, round_protocol=RoundPlan(protocol="secagg"))
TERMS = m.PrivacyTerms(
    mechanism=CENTRAL,
    clip_norm=1.0,
    noise_multiplier=1.0,
    squared_sensitivity=1 << 24,
    epsilon=1.0,
    delta=1e-6,
    population="phones",
    population_size=1000,
)
PRIVATE = replace(WORK, privacy=TERMS, statistics=WORK.statistics[:1])


@dataclass
class Sink:
    """Keeps spans."""

    spans: list[TraceSpan] = field(default_factory=list)

    def add(self, span: TraceSpan) -> None:
        """See SpanSink."""
        self.spans.append(span)

    def close(self) -> None:
        """See SpanSink."""


@dataclass
class Link:
    """A transport that got the context of an Assignment."""

    traceparent: str = root_of("run", "1", "5.0").traceparent


@pytest.mark.parametrize(
    ("work", "names"),
    [(WORK, ["download", "train", "upload"]), (MASKED, ["download"]), (PRIVATE, ["download"])],
    ids=["plain", "masked", "private"],
)
def test_a_hidden_training_has_no_span_and_its_upload_has_none(work: m.Assignment, names: list[str]) -> None:
    sink, link, clock = Sink(), Link(), iter(range(100))
    traces = DeviceTraces(sink, link, "device", lambda: float(next(clock)))

    async def step() -> e.SessionEvent:
        return e.Refreshed()

    async def main() -> None:
        for action in (e.Fetch(assignment=work), e.Train(assignment=work), e.Send(assignment=work)):
            assert isinstance(await traces.traced(action, step()), e.Refreshed)

    asyncio.run(main())
    assert [span.name for span in sink.spans] == names
    # The calls of a hidden training are children of the Assignment.
    assert link.traceparent == Link().traceparent
