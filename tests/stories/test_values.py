"""A model of values in a federation: devices report how much int8 adds to its squared error, and the Run acts on it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.hosted import Hosted
from support.scalar import TOO_MUCH, examples, scalar_graphs
from support.values import PUBLISHER, plan

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import memory_store
from fanin.clients.device.embed import DeviceSettings, join
from fanin.commands.console.show import event_row, event_text
from fanin.edge.assembly.assemble import assemble
from fanin.protos.messages import LoggedEvent, RunRested, RunState, VersionPublished
from fanin.protos.plans import StopPlan

NOISE = 0.5


@pytest.mark.parametrize("limit", [0.0, 10.0])
def test_devices_report_the_error_of_int8_and_the_run_pauses(tmp_path: Path, limit: float) -> None:
    x, y = examples(200, NOISE)
    store = memory_store(Examples(inputs={"x": x}, y=y), 0, 0.5)
    bundle = assemble(scalar_graphs(), tmp_path / "bundle", PUBLISHER)
    host = Hosted(tmp_path).start()
    stop = StopPlan(max_rounds=2, max_int8_drop=limit)
    settings = DeviceSettings(
        server=host.address,
        ca=host.ca,
        token=host.device_token,
        publisher=PUBLISHER.public,
        folder=tmp_path / "device",
        runtime="onnx",
    )
    try:
        host.start_run(replace(plan(buffer=1), stop=stop), bundle, PUBLISHER)
        with join(settings, store), host.operator() as operator:
            entries: list[LoggedEvent] = []
            for entry in operator.watch("run"):
                entries.append(entry)
                if isinstance(entry.event, RunRested):
                    break
    finally:
        host.stop()
    versions = [item for item in entries if isinstance(item.event, VersionPublished) and item.event.round]
    (rest_event,) = (item.event for item in entries if isinstance(item.event, RunRested))
    # Version 0 has the true weights. Float is wrong by the noise, and int8 also by the excess of its predictions.
    validation_x, validation_y = store.validation.inputs["x"].astype(np.float64), store.validation.y.astype(np.float64)
    predictions = validation_x @ np.array([[1.0], [-2.0], [0.5]])
    squares_float, squares_int8 = ((values - validation_y) ** 2 for values in (predictions, TOO_MUCH * predictions))
    expected = 100 * (squares_int8.sum() / squares_float.sum() - 1)
    first = versions[0].event
    assert isinstance(first, VersionPublished) and first.evaluation is not None
    assert first.evaluation.num_examples == len(store.validation)
    assert first.evaluation.int8_rise_percent == pytest.approx(expected, rel=1e-4)
    assert f"cost of int8 +{first.evaluation.int8_rise_percent:.2f} % (int8 lags far behind" in event_text(first)
    row = event_row(versions[0])["evaluation"]
    assert isinstance(row, dict) and row["int8_rise_percent"] == first.evaluation.int8_rise_percent
    assert row["accuracy_float"] is row["accuracy_int8"] is row["int8_agreement"] is None
    if limit:
        assert len(versions) == 1 and rest_event.state is RunState.PAUSED
        assert rest_event.reason.startswith(f"the cost of int8 is {expected:.2f} % on 100 examples")
    else:
        assert len(versions) == 2 and rest_event.state is RunState.FINISHED
