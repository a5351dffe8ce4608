"""The planner counts torch's computations: forward, backward, and recomputed activations."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode

from fanin.datacenter.models.decoder import Decoder, DecoderConfig
from fanin.datacenter.parallel.objective import token_loss_sum
from fanin.datacenter.parallel.pipelines import stages as pipeline_stages
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.parallel.transforms.recompute import apply_recompute
from fanin.datacenter.planner.facts import decoder_facts
from fanin.datacenter.planner.spread import Job, StageSizes
from fanin.datacenter.planner.timing import SELECTIVE, chunk_flops
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.watch.flops import PASSES

CONFIG = DecoderConfig(vocabulary=24, width=16, num_layers=8, num_heads=2, num_kv_heads=1, feed_forward=40)
BATCH, LENGTH, NUM_RANKS = 2, 8, 2


class Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Count a matrix product, and run every operation unchanged."""
        if func is torch.ops.aten.mm.default:
            left, right = args
            assert isinstance(left, Tensor)
            assert isinstance(right, Tensor)
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


def job_of(schedule: str, recompute: str) -> Job:
    mesh = MeshShape(pp=NUM_RANKS if schedule else 1)
    return Job(
        facts=decoder_facts("cell", CONFIG),
        parallel=ParallelSettings(mesh=mesh, schedule=schedule or "1F1B", microbatches=2, recompute=recompute),
        training=TrainingSettings(batch_size=2 * BATCH, learning_rate=0.1),
        sequence=LENGTH,
    )


def parts_of(job: Job, model: Decoder) -> list[tuple[StageSizes, nn.Module]]:
    """Return each stage as the planner and as the engine describes it, in order."""
    if not job.parallel.pipelined:
        return [(job.stages(0)[0], model)]
    pipeline, modules = job.parallel.pipeline(), {}
    for rank in range(NUM_RANKS):
        for stage in pipeline_stages.split(model, job.facts.layout, pipeline, rank, ()):
            modules[stage.index] = stage.part
            stage.part.register_forward_hook(pipeline_stages.sendable_output)
    stages = [stage for rank in range(NUM_RANKS) for stage in job.stages(rank)]
    return [(stage, modules[stage.index]) for stage in sorted(stages, key=lambda stage: stage.index)]


def run_backward(job: Job, stage: StageSizes, part: nn.Module, inputs: Tensor, output: Tensor) -> None:
    """Run a backward pass as torch's stages do: at once, or for inputs and then for weights."""
    seeds = None if stage.last else [torch.ones_like(output)]
    splits = job.parallel.pipelined and job.parallel.pipeline().rules.splits_backward
    if not splits or stage.first:
        stage_backward(output if stage.last else (output,), seeds, (inputs,))
        return
    _, groups = stage_backward_input([output], seeds, [inputs], iter(part.parameters()))
    stage_backward_weight(iter(part.parameters()), groups)


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        ("", "none"),
        ("", "full"),
        ("", "selective"),
        ("Interleaved1F1B", "full"),
        ("InterleavedZeroBubble", "none"),
        ("InterleavedZeroBubble", "full"),
        ("ZBV", "full"),
    ],
)
def test_a_chunk_computes_the_predicted_products(schedule: str, recompute: str) -> None:
    job, model = job_of(schedule, recompute), Decoder(CONFIG)
    apply_recompute(list(model.layers), recompute)
    forwards = Counter[int]()
    for number, layer in enumerate(model.layers):
        layer.attention_norm.register_forward_pre_hook(lambda *_, number=number: forwards.update([number]))
    stream = tokens = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH)
    num_layers = 0
    for stage, part in parts_of(job, model):
        inputs = stream if stage.first else stream.detach().requires_grad_()
        with Products() as products:
            output = part(inputs)
            stream = output.detach()
            run_backward(job, stage, part, inputs, token_loss_sum(output, tokens) if stage.last else output)
        layers = range(num_layers, num_layers + stage.num_layers)
        num_layers += stage.num_layers
        # A selective layer is also run again, but its products are kept.
        num_repeats = 1 if recompute == "selective" else job.num_recomputations(stage)
        assert [forwards[layer] for layer in layers] == [1 + num_repeats] * stage.num_layers
        tolerance = SELECTIVE if recompute == "selective" else 0.0
        attention_flops = 2 * job.chunk_tokens * stage.num_layers * job.facts.work.attention_width * LENGTH
        expected = chunk_flops(job, stage) - attention_flops * (PASSES + job.num_recomputations(stage))
        if tolerance:
            # This share of the FLOPs does not come from products.
            assert products.flops == pytest.approx(expected, rel=tolerance)
        else:
            assert products.flops == expected
    assert num_layers == CONFIG.num_layers
