"""Limits of the float64 parity of ``transformers`` families: their norms, where these use float32."""

import pytest
import torch
from parallel.cells import BATCH, Cell
from parallel.families import batches, pretrained_row
from torch import Tensor, nn

from fanin.datacenter.models.pretrained import module_of
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.engine import Engine, build_engine
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.parallel.transformers_layout import pretrained_model
from fanin.edge.runtimes.graphs import NO_TOKEN

BOUNDS = {"llama": 1e-10, "gemma": 1e-5}
"""Family to the largest difference of losses and parameters in float64, between any two ways to divide a batch.

Gemma's norm multiplies with ``weight.float()``. So the gradient of the weight is a sum over tokens in float32, which
depends on the pieces of a batch. Llama's norm casts its input, token by token, but not its weight.
"""
TRAINING = TrainingSettings(batch_size=BATCH, learning_rate=0.1, optimizer="sgd", clip_norm=0.5)


def module(family: str) -> nn.Module:
    """Return a small model of the family, in float64."""
    row = {**pretrained_row(Cell(mesh="none", family="llama", tied=True)), "model_type": family, "head_dim": 4}
    return module_of(row, "float64", 1, family)


def gradient(norm: nn.Module, inputs: Tensor, num_pieces: int) -> Tensor:
    """Return the gradient of the norm's weight, summed over pieces of the inputs."""
    norm.zero_grad()
    for piece in inputs.chunk(num_pieces):
        norm(piece).square().sum().backward()
    assert isinstance(norm.weight, nn.Parameter)
    assert norm.weight.grad is not None
    return norm.weight.grad.clone()


@pytest.mark.parametrize("family", BOUNDS)
def test_a_norms_gradient_is_summed_in_its_own_precision(family: str) -> None:
    norm = next(each for each in module(family).modules() if type(each).__name__.endswith("RMSNorm"))
    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    reference, total = gradient(norm, inputs, 1), gradient(norm, inputs, 8)
    difference = float((reference - total).abs().max() / reference.abs().max())
    assert difference < BOUNDS[family]
    assert (difference > 1e-9) == (family == "gemma"), difference


@pytest.mark.parametrize("family", BOUNDS)
def test_microbatches_of_a_family_agree_to_its_bound(family: str) -> None:
    def engine(microbatches: int) -> Engine:
        parallel = ParallelSettings(microbatches=microbatches)
        return build_engine(pretrained_model(module(family)), parallel, TRAINING, None)

    reference, split_engine = engine(1), engine(4)
    for inputs, targets in batches(2):
        batch = Batch(inputs=inputs, targets=targets, extra={"attention_mask": (targets != NO_TOKEN).long()})
        assert abs(float(reference.step(batch).loss) - float(split_engine.step(batch).loss)) <= BOUNDS[family]
    expected, actual = reference.full_parameters(), split_engine.full_parameters()
    difference = max(float((expected[name] - actual[name]).abs().max()) for name in expected)
    assert difference <= BOUNDS[family]
    assert (difference > 1e-13) == (family == "gemma"), difference
