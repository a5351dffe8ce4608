"""The contract of model families, as a check for the tests of an implementation.

``check_family`` builds a model from a config, and compares its names, tokens and FLOPs with the family's record. If the
layout has a plan, two ranks of ``tp`` take a training step. A family that passes computes the same numbers on a mesh as
in one process.
"""

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from fanin.datacenter.families.family import AnyFamily, FamilyModel
from fanin.datacenter.families.two_ranks import check_two_ranks
from fanin.datacenter.parallel.layout import Layout, check_layout
from fanin.datacenter.parallel.pipelines.stages import chain_error, stage_of_parameters

NUM_SAMPLES = 2


def check_family(family: AnyFamily, config: object, *, length: int = 8, tolerance: float = 0.05) -> None:
    """Check that a family keeps the contract that training, planning and measuring rely on.

    Args:
        family: the family.
        config: a small config with at least two layers. If the layout has a plan, its sizes must be multiples of 2.
        length: tokens in a sample, an even number.
        tolerance: relative error that the FLOPs may have, against the counted matrix products and convolutions.

    Raises:
        AssertionError: the family breaks the contract. The text says how.
        InvalidInput: the layout does not describe the module, or lacks parameters.
    """
    assert dataclasses.is_dataclass(family.config), f"config: got {family.config!r}, expected a dataclass"
    assert isinstance(config, family.config), f"config: got {config!r}, expected a {family.config.__name__}"
    model = FamilyModel(name="checked", family=family, config=config)
    module, tokens = model.build(3), model.tokens
    length = min(length, tokens.positions or length)
    inputs = torch.arange(NUM_SAMPLES * length).reshape(NUM_SAMPLES, length) % tokens.vocabulary
    _check_seed(model, module)
    check_layout(model.layout, module)
    _check_passes(module, inputs, tokens.vocabulary)
    if not tokens.masked:
        _check_causal(module, inputs, tokens.vocabulary)
    _check_stages(model.layout, module, inputs)
    if model.work is not None:
        counted, expected = _count_flops(module, inputs), inputs.numel() * model.work.flops_per_token(length)
        assert abs(expected - counted) <= tolerance * counted, (
            f"work: got {expected} FLOPs for {inputs.numel()} tokens, expected {counted}, which torch counts"
        )
    _check_double(module, inputs)
    if model.layout.plan and "tp" not in model.layout.unfit:
        check_two_ranks(model, inputs)


def _check_seed(model: FamilyModel, module: nn.Module) -> None:
    """Check that the seed alone determines the parameters."""
    before = torch.random.get_rng_state()
    again, other = (dict(model.build(seed).named_parameters()) for seed in (3, 4))
    assert torch.equal(torch.random.get_rng_state(), before), "build: changed torch's generator; use ``seeded``"
    values = dict(module.named_parameters())
    assert list(again) == list(values), "build: the same seed gave other names"
    assert all(torch.equal(again[name], values[name]) for name in values), "build: the same seed gave other parameters"
    differs = any(not torch.equal(other[name], values[name]) for name in values)
    assert differs, "build: seeds 3 and 4 gave the same parameters; use ``seeded(seed)`` around all that draws"


def _check_passes(module: nn.Module, inputs: Tensor, vocabulary: int) -> None:
    logits = module(inputs)
    shape = (*inputs.shape, vocabulary)
    assert tuple(logits.shape) == shape, f"forward: got logits {tuple(logits.shape)}, expected {shape}"
    assert logits.isfinite().all(), "forward: got logits that are not finite"
    torch.autograd.backward(cross_entropy(logits.flatten(0, -2), inputs.flatten()))
    missing = [name for name, value in module.named_parameters() if value.requires_grad and value.grad is None]
    assert not missing, f"backward: {', '.join(missing)} got no gradient; every parameter must be used"


def _check_causal(module: nn.Module, inputs: Tensor, vocabulary: int) -> None:
    """Check that no position depends on a later token: its logits would contain the target."""
    changed = inputs.clone()
    changed[:, -1] = (changed[:, -1] + 1) % vocabulary
    with torch.no_grad():
        error = (module(inputs) - module(changed))[:, :-1].abs().max()
    assert error < 1e-5, f"forward: the last token changed earlier logits by {error:g}; expected a causal model"


def _check_stages(layout: Layout, module: nn.Module, inputs: Tensor) -> None:
    """Check that two stages of a pipeline, one after the other, compute the same as the complete module."""
    if layout.sizes.num_layers < 2 or not layout.layers or "pp" in layout.unfit:
        return
    stage_of_parameters(module, layout, 2)
    error = chain_error(module, layout, inputs)
    assert error < 1e-5, (
        f"layout: two stages changed the logits by {error:g}; forward must pass one tensor through the inputs, each "
        "layer and the outputs"
    )


def _count_flops(module: nn.Module, inputs: Tensor) -> int:
    """Return the FLOPs of a forward and a backward pass. Without fused kernels, which torch does not count on a CPU."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        torch.autograd.backward(module(inputs).sum())
    return int(counter.get_total_flops())


def _check_double(module: nn.Module, inputs: Tensor) -> None:
    with torch.no_grad():
        single = module(inputs)
        double = module.double()(inputs)
    assert double.dtype == torch.float64, f"forward: got {double.dtype} from float64 parameters, expected float64"
    error = (double - single).abs().max() / double.abs().max()
    assert error < 1e-3, f"forward: float64 and float32 differ by {error:g} of the largest logit"
