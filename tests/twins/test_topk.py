"""Oracle of ``topk``: ``torch.topk`` chooses the same values of each slice, in each Round of error feedback."""

import numpy as np
import pytest
import torch

from fanin.edge.codecs.fixed import SLICE_VALUES, decoded
from fanin.edge.codecs.sparse import topk
from fanin.edge.tensors import TensorTable

NUM, NUM_ROUNDS, EXPONENT = 2 * SLICE_VALUES + 1000, 5, -30
TABLE = TensorTable.of({"a": (SLICE_VALUES - 7,), "b": (SLICE_VALUES + 1007,)})


@pytest.mark.heavy
@pytest.mark.parametrize("fraction", [0.01, 0.02, 0.5])
def test_error_feedback_over_rounds_sends_what_torch_topk_chooses(fraction: float) -> None:
    codec, rng = topk(fraction=fraction, bits=8), np.random.default_rng(3)
    ours = np.zeros(NUM, np.float32)
    for number in range(NUM_ROUNDS):
        change = rng.standard_t(4, NUM).astype(np.float32)
        ours += change
        encoded = codec.encode(TABLE, ours, (EXPONENT, EXPONENT), 62, np.random.default_rng(number))
        steps = np.repeat(
            [2.0 ** (EXPONENT + shift) for shift in encoded.shifts], [spec.num_values for spec in TABLE.specs]
        )
        sent = decoded(codec, encoded.payload, NUM) * steps
        theirs = torch.from_numpy(ours.copy())
        chosen = [
            first + torch.topk(part.abs(), int(np.ceil(fraction * len(part)))).indices
            for first, part in zip(range(0, NUM, SLICE_VALUES), theirs.split(SLICE_VALUES), strict=True)
        ]
        mask = torch.zeros(NUM, dtype=torch.bool)
        mask[torch.cat(chosen)] = True
        assert set(np.flatnonzero(sent)) <= set(np.flatnonzero(mask.numpy()))
        left = np.abs(ours.astype(np.float64) - sent)
        assert (left[mask.numpy()] < steps[mask.numpy()]).all()
        ours = (ours - sent).astype(np.float32)
        assert np.array_equal(ours[~mask.numpy()], theirs[~mask].numpy())
