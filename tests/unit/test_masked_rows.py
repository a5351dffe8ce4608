"""Rows with mask 0, as fleet.proto describes them: a copy of an example changes nothing, and NaN spoils the batch."""

import numpy as np
import pytest
from support.models import bundle_of, samples

from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import PaddedBatch, StepSettings


@pytest.mark.heavy
def test_a_masked_row_must_be_finite() -> None:
    bundle = bundle_of("mlp")
    size = bundle.manifest.batch_size
    x, y = samples(size, seed=1)
    train, evaluate = open_runtime("onnx").open_train(bundle), open_runtime("onnx").open_evaluate(bundle)
    mask = np.ones(size, np.float32)
    mask[-1] = 0.0
    parameters = bundle.initial_parameters()

    def results(row: np.ndarray, label: int) -> tuple[np.ndarray, float, float]:
        inputs, targets = x.copy(), y.copy()
        inputs[-1], targets[-1] = row, label
        batch = PaddedBatch(inputs={"x": inputs}, y=targets, mask=mask)
        state, loss = train(train.begin(parameters), batch, StepSettings(learning_rate=0.1))
        return state.parameters.copy(), float(loss), evaluate(parameters, batch).loss_sum

    trained, loss, loss_sum = results(x[0], int(y[0]))
    again, same_loss, same_sum = results(x[1], int(y[1]))
    assert np.array_equal(trained, again) and (loss, loss_sum) == (same_loss, same_sum)
    for value in (np.nan, np.inf):
        spoiled, loss, loss_sum = results(np.full_like(x[0], value), int(y[0]))
        assert np.isnan(loss) and np.isnan(loss_sum)
        assert np.isnan(spoiled).all()
