"""Predicts the seconds of one step: a roofline for computation, a ring for each collective, and the pipeline bubble.

    step = chunks x (compute + tp + pp) + pipeline bubble + dp that is not overlapped + optimizer

Computation runs at the peak of the data sheet times ``efficiency``, the share that large matrix products reach. Or the
reading of the weights from memory limits it. Gradient sums over dp overlap with the backward pass. Only the time beyond
it counts, and at least the time of one layer, which does not overlap.

The predictions rank layouts; they are not a promise for a machine. tests/unit/test_planner_published.py compares them
with published runs within a stated ratio.
"""

from dataclasses import dataclass
from typing import Final

from fanin.datacenter.network.counters import Counts
from fanin.datacenter.network.links import Topology
from fanin.datacenter.planner.bubble import bubble_units
from fanin.datacenter.planner.spread import Job, StageSizes
from fanin.datacenter.planner.traffic import predict_traffic
from fanin.datacenter.ranks.mesh import PIPELINE, REPLICATE, SHARD, TENSOR
from fanin.datacenter.watch.flops import PASSES, Hardware

SELECTIVE: Final = 0.05
"""Share of a layer's forward pass that selective recomputation repeats: neither matrix products nor attention."""
TOUCHED_VALUES: Final = {"adamw": 7, "sgd": 5}
"""Values that the optimizer reads and writes for each parameter: the parameter, its gradient and its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The hardware that a job runs on.

    Attributes:
        hardware: peak FLOPs and memory bandwidth of one rank.
        topology: links between ranks.
        efficiency: share of the peak that large matrix products reach, 0.0 to 1.0.
    """

    hardware: Hardware
    topology: Topology
    efficiency: float

    def flops_per_second(self, job: Job) -> float:
        """Return the FLOPs a second of matrix products in the precision of the job."""
        return self.hardware.peak_in(job.parallel.precision) * self.efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of a step by cause, on the slowest rank.

    Attributes:
        compute_s: computation.
        tensor_s: collectives of tensor parallelism.
        pipeline_s: messages between pipeline stages.
        waiting_s: pipeline bubble.
        data_s: gradient sums that computation does not overlap.
        optimizer_s: the optimizer's reads and writes.
        traffic: calls and bytes that the rank sends, by mesh axis and kind.
    """

    compute_s: float
    tensor_s: float
    pipeline_s: float
    waiting_s: float
    data_s: float
    optimizer_s: float
    traffic: Counts

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by cause; the keys appear in reports."""
        return {
            "computing": self.compute_s,
            "tp": self.tensor_s,
            "pp": self.pipeline_s,
            "waiting in the pipeline": self.waiting_s,
            "dp": self.data_s,
            "optimizer": self.optimizer_s,
        }


def predict_timing(job: Job, machine: Machine) -> Timing:
    """Predict the seconds of a step on the slowest rank of the pipeline."""
    ranks = {0, job.parallel.mesh.pp // 2, job.parallel.mesh.pp - 1}
    return max((_rank_timing(job, machine, rank) for rank in ranks), key=lambda timing: timing.seconds)


def _rank_timing(job: Job, machine: Machine, rank: int) -> Timing:
    traffic = predict_traffic(job, rank)
    compute_s = job.num_chunks * sum(_chunk_seconds(job, machine, stage) for stage in job.stages(rank))
    tensor_s, pipeline_s = (_sending_seconds(job, machine, traffic, axis) for axis in (TENSOR, PIPELINE))
    data_s = sum(_sending_seconds(job, machine, traffic, axis) for axis in (SHARD, REPLICATE))
    num_units = sum(stage.num_layers + 1 for stage in job.stages(rank))
    overlapped_s = compute_s * (PASSES - 1) / PASSES
    waiting_s = 0.0
    if job.parallel.pipelined:
        pipeline = job.parallel.pipeline()
        idle_share = bubble_units(pipeline) / (pipeline.microbatches * pipeline.stages_per_rank)
        waiting_s = idle_share * (compute_s + tensor_s + pipeline_s)
    stored, _ = job.stage_values(job.stages(rank))
    touched = stored * job.full_bytes * TOUCHED_VALUES[job.training.optimizer]
    return Timing(
        compute_s=compute_s,
        tensor_s=tensor_s,
        pipeline_s=pipeline_s,
        waiting_s=waiting_s,
        data_s=max(data_s - overlapped_s, data_s / num_units),
        optimizer_s=touched / machine.hardware.memory_bytes_per_second,
        traffic=traffic,
    )


def _chunk_seconds(job: Job, machine: Machine, stage: StageSizes) -> float:
    """Return the seconds of computation for one chunk in one stage."""
    width = job.product_bytes
    bytes_read = width * multiplied_values(job, stage, attended=0) / job.tp
    flops = chunk_flops(job, stage) / job.tp
    return max(flops / machine.flops_per_second(job), bytes_read / machine.hardware.memory_bytes_per_second)


def chunk_flops(job: Job, stage: StageSizes) -> float:
    """Return the FLOPs that torch computes for one chunk in one stage, over all ranks of tp: products and attention."""
    attended = job.facts.work.attention_width * job.sequence
    return 2 * job.chunk_tokens * multiplied_values(job, stage, attended=attended)


def multiplied_values(job: Job, stage: StageSizes, *, attended: int) -> float:
    """Return the number of values that each token is multiplied with in one stage, in all passes.

    Args:
        job: the model and its layout.
        stage: the stage.
        attended: values of a layer's attention, which belong to no matrix; 0 to count only the matrices.
    """
    facts = job.facts
    matrices = [weight.num_values for weight in facts.layer if len(weight.shape) > 1]
    layer = sum(matrices) + attended
    # No activation depends on the output of a layer's last product, so that product is not recomputed.
    recomputed = job.num_recomputations(stage) * (layer - matrices[-1])
    selective = SELECTIVE if job.parallel.recompute == "selective" else 0.0
    head = facts.vocabulary * facts.width if stage.last else 0
    return stage.num_layers * ((PASSES + selective) * layer + recomputed) + head * PASSES


def _sending_seconds(job: Job, machine: Machine, traffic: Counts, axis: str) -> float:
    sizes = job.parallel.mesh.sizes
    link = machine.topology.link(axis, sizes)
    return sum(link.seconds(kind, amount, sizes[axis]) for (key, kind), amount in traffic.items() if key == axis)
