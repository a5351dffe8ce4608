"""The time of one step, by formula: a roofline for computing, a ring for each collective, the law of the bubble.

    step = pieces x (computing + tp + pp) + waiting in the pipeline + what of dp is not hidden + optimizer

Computing is as fast as the peak times ``efficiency`` (what large products reach of a data sheet's peak), or as the
weights can be read. Sums over dp run beside the backward pass and count as far as they outlast it, but for one layer's,
which nothing hides. Held to published runs within a stated ratio (tests/unit/test_planner_published.py), the numbers
rank layouts; they are no promise for a machine.
"""

from dataclasses import dataclass
from typing import Final

from fanin.datacenter.network.counters import Counts
from fanin.datacenter.parallel.mesh import PIPELINE, REPLICATE, SHARD, TENSOR
from fanin.datacenter.planner.bubble import bubble_units
from fanin.datacenter.planner.links import Topology
from fanin.datacenter.planner.spread import FULL_BYTES, HALF_BYTES, Job, Stage
from fanin.datacenter.planner.traffic import predict_traffic
from fanin.datacenter.watch.flops import PASSES, Hardware

SELECTIVE: Final = 0.05
"""Of a layer's forward pass, what selective recomputation computes again: no products, no attention."""
TOUCHED_VALUES: Final = {"adamw": 7, "sgd": 5}
"""Read and written by the optimizer for each parameter: it, its gradient, its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a job runs on; ``efficiency``: of the peak, what large products reach."""

    hardware: Hardware
    topology: Topology
    efficiency: float

    def flops_per_second(self, job: Job) -> float:
        """That products get in the job's precision."""
        hardware = self.hardware
        return (hardware.flops_per_second if job.half else hardware.float32_flops_per_second) * self.efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of a step, by what they go to; ``traffic``: what the slowest rank sends."""

    compute_s: float
    tensor_s: float
    pipeline_s: float
    waiting_s: float
    data_s: float
    optimizer_s: float
    traffic: Counts

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by what they go to."""
        return {
            "computing": self.compute_s,
            "tp": self.tensor_s,
            "pp": self.pipeline_s,
            "waiting in the pipeline": self.waiting_s,
            "dp": self.data_s,
            "optimizer": self.optimizer_s,
        }


def predict_timing(job: Job, machine: Machine) -> Timing:
    """The step's time, that of the slowest rank of the pipeline."""
    ranks = {0, job.parallel.mesh.pp // 2, job.parallel.mesh.pp - 1}
    return max((_of_rank(job, machine, rank) for rank in ranks), key=lambda found: found.seconds)


def _of_rank(job: Job, machine: Machine, rank: int) -> Timing:
    traffic = predict_traffic(job, rank)
    computing = job.turns * sum(_piece(job, machine, stage) for stage in job.stages(rank))
    tensor, pipeline = (_sending(job, machine, traffic, axis) for axis in (TENSOR, PIPELINE))
    data = sum(_sending(job, machine, traffic, axis) for axis in (SHARD, REPLICATE))
    units = sum(stage.num_layers + 1 for stage in job.stages(rank))
    hidden = computing * (PASSES - 1) / PASSES
    waiting = 0.0
    if job.parallel.pipelined:
        law = job.parallel.pipeline()
        share = bubble_units(law) / (law.microbatches * law.stages_per_rank)
        waiting = share * (computing + tensor + pipeline)
    mine, _ = job.stage_values(job.stages(rank))
    touched = mine * FULL_BYTES * TOUCHED_VALUES[job.training.optimizer]
    return Timing(
        compute_s=computing,
        tensor_s=tensor,
        pipeline_s=pipeline,
        waiting_s=waiting,
        data_s=max(data - hidden, data / units),
        optimizer_s=touched / machine.hardware.memory_bytes_per_second,
        traffic=traffic,
    )


def _piece(job: Job, machine: Machine, stage: Stage) -> float:
    """Seconds of computing for one piece in one stage."""
    width = HALF_BYTES if job.half else FULL_BYTES
    read = width * multiplied_values(job, stage, attended=0) / job.tp
    work = piece_flops(job, stage) / job.tp
    return max(work / machine.flops_per_second(job), read / machine.hardware.memory_bytes_per_second)


def piece_flops(job: Job, stage: Stage) -> float:
    """FLOPs of products and attention for one piece in one stage, over all ranks of tp: what torch really computes."""
    attended = job.facts.work.attention_width * job.sequence
    return 2 * job.piece_tokens * multiplied_values(job, stage, attended=attended)


def multiplied_values(job: Job, stage: Stage, *, attended: int) -> float:
    """Values that each token is multiplied with in one stage, in all passes; ``attended``: a layer's, of no matrix."""
    facts = job.facts
    matrices = [weight.num_values for weight in facts.layer if len(weight.shape) > 1]
    layer = sum(matrices) + attended
    # Nothing is kept of what a layer's last product gives, so that one is not computed again.
    again = job.again(stage) * (layer - matrices[-1])
    slight = SELECTIVE if job.parallel.recompute == "selective" else 0.0
    head = facts.vocabulary * facts.width if stage.last else 0
    return stage.num_layers * ((PASSES + slight) * layer + again) + head * PASSES


def _sending(job: Job, machine: Machine, traffic: Counts, axis: str) -> float:
    sizes = job.parallel.mesh.sizes
    link = machine.topology.link(axis, sizes)
    return sum(link.seconds(kind, amount, sizes[axis]) for (where, kind), amount in traffic.items() if where == axis)
