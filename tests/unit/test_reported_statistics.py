"""The declared statistics of a Plan in the event of a Version."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from support.staleness import TABLE, assignment, settle, watched
from support.virtual import bundle_in, open_place, plan, start

from fanin.clients.device.updates import Change, make_update
from fanin.clients.testing import LoopbackTransport, run_virtual
from fanin.protos import messages as m
from fanin.protos.plans import Statistic


def test_a_statistic_that_no_device_reported_is_left_out(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        names = ("words", "zeros", "silent")
        run_plan = replace(
            plan(concurrency=1, buffer=1, quorum=1, max_rounds=1),
            statistics=tuple(Statistic(name=name, bound=1000) for name in names),
        )
        await start(place.runs, bundle_in(tmp_path), run_plan)
        await settle()
        counts = {m.EXAMPLES: 10, "words": 7, "zeros": 0}
        change = Change(values=np.zeros(TABLE.num_values, np.float32), counts=counts)
        header, payload = make_update(await assignment(place, "a"), TABLE, change, m.Telemetry(runtime="synthetic 1"))
        transport = LoopbackTransport(fleet=place.coordinator, device="a", latency_s=0.01)
        await transport.upload(header, lambda first, size: payload[first : first + size])
        await settle()
        (version,) = await watched(place)
        assert version.statistics == {"words": 7, "zeros": 0}
        await place.runs.stop()

    run_virtual(main())
