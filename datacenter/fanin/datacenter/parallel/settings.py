"""How a model is spread over ranks and how it is trained: two frozen records, and whether a job fits them.

Everything that can be refused is refused here, on numbers alone, before a process is spent. Needs no torch.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Final, Literal, get_args

from fanin.datacenter.parallel.layout import Layout
from fanin.datacenter.parallel.mesh import MeshShape
from fanin.datacenter.parallel.pipelines.schedules import SCHEDULES, Pipeline
from fanin.protos.errors import InvalidInput, UnsupportedModel

Recompute = Literal["none", "full", "selective"]
Precision = Literal["full", "bf16", "fp16"]
Device = Literal["auto", "cpu", "cuda"]
OptimizerName = Literal["adamw", "sgd"]
DEFAULT_SCHEDULE: Final = "1F1B"
MEASURE: Final = "measure"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """Where what is computed; two jobs that differ in these alone train the same model.

    ``microbatches``: pieces of what a rank is given for a step, which a pipeline works on at once and a rank without
    a pipeline one after the other. ``stages_per_rank`` 0: as the schedule has it. ``layer_times``: seconds, or any
    unit, of the inputs, each layer and the outputs; a pipeline is cut by them, and evenly without them; ``measure``: a
    job finds them out first (``parallel.measure``). ``recompute``: which activations are computed again in the
    backward pass. ``reshard``: whether the ranks of dp_shard give a layer's parameters back between forward and
    backward; None: yes, but not in a pipeline, which would fetch them for each microbatch. ``precision``: of the
    computation; parameters and their gradients' sums keep the model's own.
    ``offload``: parameters, gradients and optimizer state live in the CPU's memory. ``replicate``: how whole copies
    are kept alike, ``ddp`` or ``hsdp``; with pp, tp or dp_shard it is always ``hsdp``. ``sequence_parallel``: whether
    the ranks of tp share out what stands between the matrices that they split, by places of the sequence. ``device``:
    what ranks compute on; ``auto`` is a GPU each where the machine has GPUs, and else the CPU.
    """

    mesh: MeshShape = field(default_factory=MeshShape)
    schedule: str = DEFAULT_SCHEDULE
    microbatches: int = 1
    stages_per_rank: int = 0
    layer_times: tuple[float, ...] | Literal["measure"] = ()
    recompute: Recompute = "none"
    compile: bool = False
    reshard: bool | None = None
    precision: Precision = "full"
    offload: bool = False
    replicate: Literal["ddp", "hsdp"] = "ddp"
    sequence_parallel: bool = False
    device: Device = "auto"

    def __post_init__(self) -> None:
        _one_of("recompute", self.recompute, get_args(Recompute))
        _one_of("precision", self.precision, get_args(Precision))
        _one_of("replicate", self.replicate, ("ddp", "hsdp"))
        _one_of("device", self.device, get_args(Device))
        _one_of("schedule", self.schedule, tuple(SCHEDULES))
        _check_times(self.layer_times, self.mesh)
        if self.microbatches < 1:
            raise InvalidInput(f"parallel: got {self.microbatches} microbatches, expected at least 1")
        if self.stages_per_rank < 0:
            raise InvalidInput(f"parallel: got stages_per_rank {self.stages_per_rank}, expected 0 or more")
        if self.precision == "fp16" and self.mesh.pp > 1:
            raise InvalidInput(
                f"parallel: got precision fp16 and mesh {self.mesh}, expected pp 1: the loss is scaled by whether "
                "gradients overflow, which is known only after the pipeline; take bf16"
            )
        if self.offload and not self.sharded:
            raise InvalidInput(
                f"parallel: got offload and mesh {self.mesh} (replicate {self.replicate!r}), expected none, dp_shard "
                "above 1, or copies kept alike by hsdp: FSDP2 is what keeps parameters on the CPU"
            )
        if self.sequence_parallel and self.mesh.tp == 1:
            raise InvalidInput(
                f"parallel: got sequence_parallel and mesh {self.mesh}, expected tp above 1: the ranks of tp share out "
                "the sequence; take a mesh with tp, or leave sequence_parallel out"
            )
        if self.pipelined:
            self.pipeline()
        if self.recompute == "selective" and self.pipelined and SCHEDULES[self.schedule].splits_backward:
            raise InvalidInput(
                f"parallel: got recompute selective and schedule {self.schedule}, expected full or none: it goes back "
                "over a layer more than once, and what was selected is kept for the first time alone"
            )

        if self.compile and self.recompute == "full" and self.mesh.tp > 1:
            raise InvalidInput(
                f"parallel: got compile, recompute full and mesh {self.mesh}, expected tp 1: torch 2.13 cannot compile "
                "split layers that keep nothing; take recompute selective or none, or leave compile out"
            )

    @property
    def pipelined(self) -> bool:
        """Whether there is more than one stage of ranks."""
        return self.mesh.pp > 1

    @property
    def folded(self) -> bool:
        """Whether the pipeline goes back over its ranks; it takes batches of one size, and never goes forward alone."""
        return self.pipelined and SCHEDULES[self.schedule].folded

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 keeps the ranks' gradients alike, sharded or replicated, or one rank's parameters on the CPU;
        else DDP does, or nobody has to."""
        mesh = self.mesh
        if mesh.num_ranks == 1:
            return self.offload
        return mesh.dp_shard > 1 or (mesh.dp_replicate > 1 and (mesh.pp * mesh.tp > 1 or self.replicate == "hsdp"))

    @property
    def reshards(self) -> bool:
        """``reshard``, decided."""
        return not self.pipelined if self.reshard is None else self.reshard

    @property
    def times(self) -> tuple[float, ...]:
        """``layer_times``, once they are known. Raises ValueError before."""
        if isinstance(self.layer_times, str):
            raise ValueError(f"got layer_times {self.layer_times!r}, expected numbers: measure_layer_times gives them")
        return self.layer_times

    def pipeline(self) -> Pipeline:
        """The pipeline's numbers. Raises InvalidInput."""
        known = SCHEDULES.get(self.schedule)
        return Pipeline(
            schedule=self.schedule,
            num_ranks=self.mesh.pp,
            stages_per_rank=self.stages_per_rank or (known.default_stages if known else 1),
            microbatches=self.microbatches,
            compiled=self.compile,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """What is computed.

    ``batch_size``: samples of a step over all ranks, taken in ``accumulate`` turns. ``clip_norm``: the largest norm
    of all gradients together, None for no limit. ``freeze``: patterns over parameter names that do not train.
    ``max_skips``: how many steps in succession may be left out because their loss or gradients are not finite; with 0
    the first one ends the job.
    """

    batch_size: int
    learning_rate: float
    optimizer: OptimizerName = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.0
    accumulate: int = 1
    clip_norm: float | None = None
    freeze: tuple[str, ...] = ()
    max_skips: int = 0

    def __post_init__(self) -> None:
        _one_of("optimizer", self.optimizer, get_args(OptimizerName))
        for name in ("batch_size", "accumulate"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"training: got {name} {getattr(self, name)}, expected at least 1")
        if self.max_skips < 0:
            raise InvalidInput(f"training: got max_skips {self.max_skips}, expected 0 or more")
        if not 0.0 < self.learning_rate < inf:
            raise InvalidInput(f"training: got learning_rate {self.learning_rate}, expected a positive number")
        if self.clip_norm is not None and not 0.0 < self.clip_norm < inf:
            raise InvalidInput(f"training: got clip_norm {self.clip_norm}, expected a positive number or none")
        if not 0.0 < self.epsilon < inf:
            raise InvalidInput(f"training: got epsilon {self.epsilon}, expected a positive number")
        if any(pattern and not pattern.strip("*") for pattern in self.freeze):
            raise InvalidInput(f"training: got freeze {list(self.freeze)}, expected patterns that leave some to train")
        if not 0.0 <= self.weight_decay < inf:
            raise InvalidInput(f"training: got weight_decay {self.weight_decay}, expected 0.0 or more")
        for name, value in (("momentum", self.momentum), ("betas", self.betas[0]), ("betas", self.betas[1])):
            if not 0.0 <= value < 1.0:
                raise InvalidInput(f"training: got {name} {value}, expected 0.0 to below 1.0")


def check_job(layout: Layout, parallel: ParallelSettings, training: TrainingSettings, world_size: int) -> None:
    """Raise InvalidInput, with all the numbers, unless the job can be carried out on so many processes.

    Raises UnsupportedModel if one can be, on another mesh alone, by what the model is.
    """
    parallel.mesh.check(world_size)
    sizes_of_axes = {"pp": parallel.mesh.pp, "tp": parallel.mesh.tp}
    for axis, fault in layout.unfit.items():
        if sizes_of_axes[axis] > 1:
            raise UnsupportedModel(f"mesh {parallel.mesh}: got {axis} {sizes_of_axes[axis]} for {fault}")
    faults = [
        *_width_faults(layout, parallel.mesh),
        *_depth_faults(layout, parallel),
        *_sequence_faults(layout, parallel),
        *_batch_faults(parallel, training),
    ]
    if faults:
        sizes = layout.sizes
        raise InvalidInput(
            f"mesh {parallel.mesh}: {'; '.join(faults)} (world {world_size}, {sizes.num_layers} layers, "
            f"{sizes.num_heads} heads, {sizes.num_kv_heads} kv heads, feed-forward {sizes.feed_forward}, batch "
            f"{training.batch_size}, accumulate {training.accumulate}, {parallel.microbatches} microbatches, schedule "
            f"{parallel.schedule})"
        )


def check_sequence(parallel: ParallelSettings, length: int) -> None:
    """Raise InvalidInput unless the ranks can share out sequences of so many tokens as they are to."""
    tp = parallel.mesh.tp
    if parallel.sequence_parallel and length % tp:
        raise InvalidInput(
            f"parallel: got sequence_parallel, tp {tp} and sequences of {length} tokens, expected a multiple of tp: "
            "each rank has as many places; take another length, or leave sequence_parallel out"
        )


def _width_faults(layout: Layout, mesh: MeshShape) -> list[str]:
    sizes, faults = layout.sizes, []
    for name, number in (("heads", sizes.num_heads), ("feed-forward", sizes.feed_forward)):
        if number % mesh.tp:
            faults.append(f"got {name} {number} and tp {mesh.tp}, expected a multiple")
    kv, shared = sizes.num_kv_heads, "kv" in layout.plan.values()
    if kv % mesh.tp and not (shared and mesh.tp % kv == 0):
        more = f" or tp a multiple of {kv}" if shared else ""
        faults.append(f"got kv heads {kv} and tp {mesh.tp}, expected a multiple{more}")
    return faults


def _depth_faults(layout: Layout, parallel: ParallelSettings) -> list[str]:
    faults = []
    if parallel.pipelined:
        stages, layers = parallel.pipeline().num_stages, layout.sizes.num_layers
        if layers < stages:
            faults.append(f"got {layers} layers for {stages} stages, expected at least one each")
    expected = layout.sizes.num_layers + 2
    if parallel.layer_times and parallel.layer_times != MEASURE and len(parallel.layer_times) != expected:
        faults.append(f"got {len(parallel.layer_times)} layer_times, expected {expected}: inputs, each layer, outputs")
    return faults


def _sequence_faults(layout: Layout, parallel: ParallelSettings) -> list[str]:
    if layout.sequence or not parallel.sequence_parallel:
        return []
    fault = (
        "got sequence_parallel for a layout of which nobody says that its layers hand on a sequence and work on each "
        "place of it alone, expected that of a decoder or an encoder"
    )
    return [fault]


def _batch_faults(parallel: ParallelSettings, training: TrainingSettings) -> list[str]:
    pieces = parallel.mesh.num_parts * training.accumulate * parallel.microbatches
    if training.batch_size % pieces == 0:
        return []
    parts = parallel.mesh.num_parts
    fault = (
        f"got batch {training.batch_size}, expected a multiple of {parts} parts x {training.accumulate} turns x "
        f"{parallel.microbatches} microbatches = {pieces}"
    )
    return [fault]


def _check_times(times: tuple[float, ...] | str, mesh: MeshShape) -> None:
    if isinstance(times, str):
        _one_of("layer_times", times, (MEASURE,))
        if mesh.pp == 1:
            raise InvalidInput(
                f"parallel: got layer_times {times!r} and mesh {mesh}, expected pp above 1: nothing is cut by them"
            )
        return
    for time in times:
        if not 0.0 <= time < inf:
            raise InvalidInput(f"parallel: got {time} in layer_times, expected 0.0 or more each")


def _one_of(name: str, got: str, known: tuple[str, ...]) -> None:
    if got not in known:
        raise InvalidInput(f"{name}: got {got!r}, expected one of {', '.join(known)}")
