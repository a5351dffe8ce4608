"""The distribution of loss and accuracy over the devices of a Round: its values, in a Run, and on the terminal."""

import json
import math
from pathlib import Path

from support.scenarios import CALM, PATIENT_S, SHAPES
from support.virtual import PUBLISHER, plan

from fanin.commands.console.show import event_row, event_text
from fanin.protos import messages as m
from fanin.protos.messages import DeviceSpread, LoggedEvent, VersionPublished
from fanin.server.aggregation.statistics import device_spreads_of
from fanin.simulation import Federation, Member, SyntheticTrainer, run_virtual, synthetic_bundle


def counts(loss: float, num_examples: int, num_correct: int) -> dict[str, int]:
    return {
        m.EXAMPLES: num_examples,
        m.TRAIN_LOSS: int(loss * num_examples * m.LOSS_UNIT),
        m.EVAL_EXAMPLES: 10,
        m.EVAL_LOSS: int(loss * 10 * m.LOSS_UNIT),
        m.EVAL_PREDICTIONS: 10,
        m.EVAL_CORRECT_FLOAT: num_correct,
    }


def test_each_device_counts_once() -> None:
    # The last device has most of the examples, and none in its validation part.
    updates = [counts(float(loss), 1, loss) for loss in range(10)]
    large = {m.EXAMPLES: 1000, m.TRAIN_LOSS: 10 * 1000 * m.LOSS_UNIT, m.EVAL_EXAMPLES: 0, m.EVAL_LOSS: 0}
    spreads = device_spreads_of([*updates, large])
    assert spreads["train_loss"] == DeviceSpread(
        num_devices=11, mean=5.0, min=0.0, p10=1.0, median=5.0, p90=9.0, max=10.0
    )
    accuracy = spreads["validation_accuracy"]
    assert (accuracy.num_devices, accuracy.min, accuracy.median, accuracy.max) == (10, 0.0, 0.45, 0.9)
    assert math.isclose(spreads["validation_loss"].p90, 8.1)


def test_a_metric_that_no_device_reports_has_no_distribution() -> None:
    assert device_spreads_of([{m.EXAMPLES: 5}]) == {}
    assert device_spreads_of([]) == {}


def test_a_version_has_the_distributions_of_its_round(tmp_path: Path) -> None:
    bundle = synthetic_bundle(tmp_path / "bundle", PUBLISHER, SHAPES)

    async def run() -> list[LoggedEvent]:
        async with Federation(seed=1) as federation:
            await federation.start_run("run", plan(deadline_s=PATIENT_S, max_rounds=1), bundle, PUBLISHER)
            for index in range(4):
                trainer = SyntheticTrainer(
                    partition=index, num_examples=10, counts={m.TRAIN_LOSS: (index + 1) * 10 * m.LOSS_UNIT}
                )
                federation.join(Member(device=f"device-{index}", trainer=trainer, habits=CALM), bundle)
            return [entry async for entry in federation.watch("run")]

    (published,) = (entry for entry in run_virtual(run()) if isinstance(entry.event, VersionPublished))
    assert isinstance(published.event, VersionPublished)
    spread = published.event.device_spreads["train_loss"]
    assert (spread.num_devices, spread.mean, spread.min, spread.median, spread.max) == (4, 2.5, 1.0, 2.5, 4.0)
    assert event_text(published.event).endswith("; devices (min/10 %/median/90 %/max): train_loss 1/1.3/2.5/3.7/4")
    row = json.loads(json.dumps(event_row(published)))
    assert row["device_spreads"]["train_loss"]["median"] == 2.5
