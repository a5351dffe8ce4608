"""FedNova, q-FedAvg and FedDyn against FedLab 1.3.0, on the same changes.

A golden file has FedLab's results (tests/golden/make_fedlab.py). FedLab gives each device of FedNova the same share,
and takes the loss of q-FedAvg from the training instead of the received Version. The cases have equal shares and one
loss. In a Round of FedDyn with several devices, it adds their parameters and subtracts those of the Version once. The
paper (algorithm 1) has the sum of the differences. Each Round of the case has one device, for which both agree.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from fanin.edge.codecs.codec import codec_of
from fanin.edge.codecs.fixed import RunCodec, decoded
from fanin.edge.codecs.pipeline import UpdatePipeline, first_states
from fanin.edge.codecs.stage import LocalSteps
from fanin.edge.codecs.stages import layout_of, stages_of
from fanin.edge.codecs.vector import Weighting
from fanin.edge.runtimes.evaluations import VERSION_LOSS, metric_count
from fanin.edge.tensors import Float64s, TensorTable
from fanin.protos import messages as m
from fanin.server.aggregation import fold
from fanin.server.aggregation.methods.feddyn import FedDynStep
from fanin.server.aggregation.methods.means import ScaledMean, effective_steps, inverse_scale
from fanin.server.aggregation.statistics import with_examples

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "fedlab.json").read_text())
NUM, STEP, NUM_EXAMPLES = 5, -20, 1 << 10
TABLE = TensorTable.of({"w": (NUM,)})


def aggregate_of(
    rule: ScaledMean, spec: m.StageSpec, changes: list[list[float]], steps: list[int], losses: list[float]
) -> Float64s:
    """Take each change through the stage and the codec, and the Updates through the rule."""
    stages, codec, training = stages_of((spec,)), codec_of(m.CodecSpec(name="fixed32", max_shift=12)), m.Training
    layout, total = layout_of(TABLE, stages), rule.begin(TABLE)
    for change, num_steps, loss in zip(changes, steps, losses, strict=True):
        counts = {m.EXAMPLES: NUM_EXAMPLES, VERSION_LOSS: metric_count(loss, NUM_EXAMPLES)}
        pipeline = UpdatePipeline(
            codec=RunCodec(codec=codec.codec, max_shift=12),
            grid=(STEP,),
            learning_rate=GOLDEN["rate"],
            stages=stages,
            layout=layout,
            downlink={},
            rng_of=lambda purpose, values: np.random.default_rng(1),
            counts=counts,
            steps=LocalSteps(
                training=training(learning_rate=GOLDEN["rate"]), num_steps=num_steps, planned_steps=num_steps, round=1
            ),
        )
        staged = pipeline.apply(np.array(change, np.float32), num_steps, first_states(stages, NUM))
        weights = layout.per_block({Weighting.EXAMPLES: NUM_EXAMPLES, Weighting.ONE: 1})
        update = fold.Contribution(
            weights=weights,
            fresh_weights=weights,
            shifts=staged.encoded.shifts,
            bits=32,
            max_shift=12,
            counts=with_examples({**counts, **staged.counts}),
            pieces=[decoded(codec.codec, staged.encoded.payload, NUM)],
        )
        total = rule.accept(total, TABLE, update)
    return rule.finish(total, TABLE, (STEP,), (0, NUM))


def test_fednova_is_fedlabs() -> None:
    case = GOLDEN["fednova"]
    losses = [1.0] * len(case["steps"])
    spec = m.StageSpec(name="fednova")
    aggregate = aggregate_of(ScaledMean(effective_steps), spec, case["changes"], case["steps"], losses)
    np.testing.assert_allclose(np.array(case["start"]) + aggregate, case["after"], atol=1e-5)


@pytest.mark.parametrize("case", GOLDEN["qfedavg"], ids=lambda case: str(case["q"]))
def test_qfedavg_is_fedlabs(case: dict[str, list[float]]) -> None:
    spec = m.StageSpec(name="qfedavg", options={"q": float(case["q"])})  # type: ignore[arg-type]
    changes: list[list[float]] = case["changes"]  # type: ignore[assignment]
    aggregate = aggregate_of(ScaledMean(inverse_scale), spec, changes, [1] * len(changes), case["losses"])
    np.testing.assert_allclose(np.array(case["start"]) + aggregate, case["after"], rtol=1e-4, atol=1e-4)


def test_feddyn_is_fedlabs_for_one_device_a_round() -> None:
    case = GOLDEN["feddyn"]
    parameters, optimizer = np.array(case["start"]), FedDynStep(case["num_devices"]).of_round(1)
    state = optimizer.begin(parameters)
    for number, (change, after) in enumerate(zip(case["changes"], case["after"], strict=True), 1):
        state, parameters = optimizer.step(state, parameters, np.array(change), number)
        np.testing.assert_allclose(parameters, after, rtol=1e-12)
