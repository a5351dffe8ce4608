"""The work of one device in a Round, without its session."""

from types import MappingProxyType

import numpy as np

from fanin.clients.device.updates import Change, make_update
from fanin.edge.tensors import TensorTable
from fanin.protos import messages as m
from fanin.simulation import LoopbackTransport
from support.virtual import SHAPES

TABLE = TensorTable.of(SHAPES)
NO_RANGES = m.RangeCounts()


async def finish_round(
    line: LoopbackTransport, work: m.Assignment, change: float = 0.5, ranges: m.RangeCounts = NO_RANGES
) -> None:
    """Upload an Update that changes all parameters by the same value. It must be accepted."""
    values = np.full(TABLE.num_values, change, np.float32)
    result = Change(values=values, counts=MappingProxyType({m.EXAMPLES: 10}), ranges=ranges)
    header, payload = make_update(work, TABLE, result, m.Telemetry(runtime="synthetic 1"))
    reply = await line.upload(header, lambda offset, size_bytes: payload[offset : offset + size_bytes])
    assert reply.update_state is m.UpdateState.ACCEPTED, reply
