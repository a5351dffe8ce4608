"""Random words of a datacenter job, computed by torch, equal those of a device, computed by numpy."""

import numpy as np
import pytest

from fanin.edge.runtimes.randomness import philox_blocks, uniforms

pytestmark = pytest.mark.heavy
KEYS = (0, 1, 2**64 - 1, 0x0123456789ABCDEF)


@pytest.mark.parametrize("key", KEYS)
def test_words_and_values_equal_those_of_numpy(key: int) -> None:
    import torch

    from fanin.datacenter.parallel.draws.words import draw_rows, philox_rows

    cpu, examples, num = torch.device("cpu"), range(5, 8), 10
    for row, example in zip(philox_rows(key, examples, num, cpu).numpy(), examples, strict=True):
        blocks = np.arange(3, dtype=np.uint64)
        zeros = np.zeros_like(blocks)
        words = np.stack(philox_blocks([blocks, zeros + np.uint64(example), zeros, zeros], key), axis=-1)
        assert (row == words.reshape(-1)[:num]).all()
    expected = uniforms(philox_rows(key, examples, num, cpu).numpy().astype(np.uint32))
    assert (draw_rows("uniform", key, examples, num, cpu).numpy() == expected).all()


def test_uniform_and_normal_values_have_their_distributions() -> None:
    import torch

    from fanin.datacenter.parallel.draws.words import draw_rows

    uniform, normal = (draw_rows(kind, 1, range(8), 50_000, torch.device("cpu")) for kind in ("uniform", "normal"))
    assert 0.0 <= float(uniform.min()) < 1e-4 < 1 - 1e-4 < float(uniform.max()) < 1.0
    assert (float(uniform.mean()), float(uniform.var())) == pytest.approx((0.5, 1 / 12), abs=2e-3)
    assert (float(normal.mean()), float(normal.var())) == pytest.approx((0.0, 1.0), abs=6e-3)
    correlation = torch.corrcoef(normal)
    assert float((correlation - torch.eye(8)).abs().max()) < 0.02
