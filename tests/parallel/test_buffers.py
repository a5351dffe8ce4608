"""Buffers of a module: where they are after parameters are allocated, and their mean over data-parallel ranks."""

import math
from pathlib import Path

import numpy as np
import torch
from parallel.programs import Programs
from torch import nn

from fanin.datacenter.parallel.transforms.meta import drop_values, materialize


class Masked(nn.Module):
    """A linear layer with a buffer that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.twin = nn.Linear(3, 2), nn.Module()
        self.register_buffer("mask", torch.tensor([1.0, -math.inf]))
        self.twin.register_buffer("mask", self.mask, persistent=False)


def test_buffers_stay_where_they_are_when_parameters_are_allocated() -> None:
    module = Masked()
    drop_values(module)
    mask = module.mask
    materialize(module, torch.device("cpu"))
    assert not module.head.weight.is_meta
    assert module.mask is mask and module.twin.mask is mask
    assert list(module.state_dict()) == ["mask", "head.weight", "head.bias"]


def test_a_mean_over_ranks_keeps_the_bits_of_constants(programs: Programs, tmp_path: Path) -> None:
    programs.check("buffers", tmp_path / "means.npz")
    with np.load(tmp_path / "means.npz") as means:
        lowest = float(np.finfo(np.float32).min)
        assert means["mask"].tolist() == [1.0, -math.inf, math.inf, lowest]
        assert np.array_equal(means["table"], np.linspace(0.0, 1.0, 1001, dtype=np.float32))
        assert np.allclose(means["running"], [1.0, 11.0])
