"""The settings of a datacenter job: how a model is spread over ranks, and how it is trained.

Both records validate themselves, so an instance that exists is consistent. Whether the settings fit a model is checked
in ``parallel.checks``. This module needs no torch.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Final, Literal, get_args

from fanin.datacenter.parallel.pipelines.schedules import SCHEDULES, Pipeline
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.protos.errors import InvalidInput

Recompute = Literal["none", "full", "selective"]
Precision = Literal["full", "double", "bf16", "fp16"]
DeviceChoice = Literal["auto", "cpu", "cuda"]
OptimizerName = Literal["adamw", "sgd"]
DEFAULT_SCHEDULE: Final = "1F1B"
MEASURE: Final = "measure"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """The distribution of a model over ranks. Jobs that differ only in these settings train the same model.

    Attributes:
        mesh: number of ranks along each axis.
        schedule: order in which a pipeline runs its microbatches, a key of ``SCHEDULES``.
        microbatches: slices of a rank's part of a gradient accumulation step. A pipeline works on several at once. A
            rank without a pipeline computes one after the other.
        stages_per_rank: pipeline stages on each rank; 0 is the default of the schedule.
        layer_times: times of the inputs, each layer and the outputs, in seconds or any other unit. The pipeline is cut
            by them, or evenly if there are none. ``measure``: the job measures them before it starts
            (``layer_times``).
        recompute: which activations are recomputed in the backward pass.
        compile: whether each layer is compiled.
        reshard: whether the ranks of dp_shard free a layer's gathered parameters between forward and backward. None is
            True without a pipeline, and False with one, which would otherwise gather them for each microbatch.
        precision: dtype of the computation. ``full`` is the dtype of the model. ``double`` converts the model to
            float64. With ``bf16`` and ``fp16``, parameters and the sums of their gradients keep the dtype of the model.
        offload: whether parameters, gradients and optimizer state are stored in the CPU's memory.
        replicate: the method that synchronizes full copies of the model. With pp, tp or dp_shard it is always ``hsdp``.
        sequence_parallel: whether the ranks of tp also split the activations between the matrices of a layer, along the
            sequence.
        device: the device of the ranks. ``auto`` is one GPU for each rank if the machine has GPUs, otherwise the CPU.
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
    device: DeviceChoice = "auto"

    def __post_init__(self) -> None:
        _one_of("recompute", self.recompute, get_args(Recompute))
        _one_of("precision", self.precision, get_args(Precision))
        _one_of("replicate", self.replicate, ("ddp", "hsdp"))
        _one_of("device", self.device, get_args(DeviceChoice))
        _one_of("schedule", self.schedule, tuple(SCHEDULES))
        _check_times(self.layer_times, self.mesh)
        if self.microbatches < 1:
            raise InvalidInput(f"parallel: got {self.microbatches} microbatches, expected at least 1", code="FN-1255")
        if self.stages_per_rank < 0:
            raise InvalidInput(
                f"parallel: got stages_per_rank {self.stages_per_rank}, expected 0 or more", code="FN-1255"
            )
        if self.precision == "fp16" and self.mesh.pp > 1:
            raise InvalidInput(
                f"parallel: got precision fp16 and mesh {self.mesh}, expected pp 1: the loss scale depends on "
                "whether gradients overflow, which is known only after the pipeline has run; use bf16",
                code="FN-1273",
            )
        if self.offload and not self.sharded:
            raise InvalidInput(
                f"parallel: got offload and mesh {self.mesh} (replicate {self.replicate!r}), expected none, dp_shard "
                "above 1, or replicate 'hsdp': only FSDP2 keeps parameters on the CPU",
                code="FN-1271",
            )
        if self.sequence_parallel and self.mesh.tp == 1:
            raise InvalidInput(
                f"parallel: got sequence_parallel and mesh {self.mesh}, expected tp above 1: the ranks of tp split the "
                "sequence; use a mesh with tp, or omit sequence_parallel",
                code="FN-1271",
            )
        if self.pipelined:
            self.pipeline()
        if self.recompute == "selective" and self.pipelined and SCHEDULES[self.schedule].splits_backward:
            raise InvalidInput(
                f"parallel: got recompute selective and schedule {self.schedule}, expected full or none: the "
                "schedule runs the backward pass of a layer more than once, and the selected activations are kept only "
                "for the first one",
                code="FN-1273",
            )
        if self.compile and self.recompute == "full" and self.mesh.tp > 1:
            raise InvalidInput(
                f"parallel: got compile, recompute full and mesh {self.mesh}, expected tp 1: torch 2.13 cannot compile "
                "split layers under full recomputation; use recompute selective or none, or omit compile",
                code="FN-1273",
            )

    @property
    def pipelined(self) -> bool:
        """Whether the model is cut into pipeline stages."""
        return self.mesh.pp > 1

    @property
    def folded(self) -> bool:
        """Whether the second half of the pipeline returns over the same ranks.

        Such a schedule needs batches of one size, and torch cannot run it forward only.
        """
        return self.pipelined and SCHEDULES[self.schedule].folded

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 holds the parameters: sharded, replicated, or those of a single rank on the CPU.

        Otherwise DistributedDataParallel synchronizes the copies, if there is more than one.
        """
        mesh = self.mesh
        if mesh.num_ranks == 1:
            return self.offload
        return mesh.dp_shard > 1 or (mesh.dp_replicate > 1 and (mesh.pp * mesh.tp > 1 or self.replicate == "hsdp"))

    @property
    def reshards(self) -> bool:
        """``reshard``, with None replaced by its default."""
        return not self.pipelined if self.reshard is None else self.reshard

    @property
    def times(self) -> tuple[float, ...]:
        """``layer_times`` as numbers.

        Raises:
            ValueError: they are still to be measured.
        """
        if isinstance(self.layer_times, str):
            raise ValueError(f"got layer_times {self.layer_times!r}, expected numbers: call measure_layer_times first")
        return self.layer_times

    def pipeline(self) -> Pipeline:
        """Return the schedule and sizes of the pipeline.

        Raises:
            InvalidInput: the schedule cannot run these sizes.
        """
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
    """The settings of a training. Jobs that differ in these settings train different models.

    Attributes:
        batch_size: samples of one optimizer step over all ranks.
        learning_rate: the rate before any schedule.
        optimizer: ``adamw`` uses ``betas`` and ``epsilon``; ``sgd`` uses ``momentum``.
        betas: AdamW's decay rates of the gradients' mean and of their mean square, each 0.0 to below 1.0.
        epsilon: term added to AdamW's denominator, for numerical stability.
        momentum: SGD's factor of the earlier steps; 0.0 for none.
        weight_decay: the optimizer's weight decay.
        accumulate: gradient accumulation steps in one optimizer step.
        clip_norm: largest norm of all gradients together; None for no limit.
        freeze: patterns of the names of parameters that are not trained.
        max_skips: consecutive steps that may be skipped because their loss or gradients are not finite. With 0 the
            first such step ends the job.
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
                raise InvalidInput(f"training: got {name} {getattr(self, name)}, expected at least 1", code="FN-1240")
        if self.max_skips < 0:
            raise InvalidInput(f"training: got max_skips {self.max_skips}, expected 0 or more", code="FN-1240")
        if not 0.0 < self.learning_rate < inf:
            raise InvalidInput(
                f"training: got learning_rate {self.learning_rate}, expected a positive number", code="FN-1240"
            )
        if self.clip_norm is not None and not 0.0 < self.clip_norm < inf:
            raise InvalidInput(
                f"training: got clip_norm {self.clip_norm}, expected a positive number or none", code="FN-1240"
            )
        if not 0.0 < self.epsilon < inf:
            raise InvalidInput(f"training: got epsilon {self.epsilon}, expected a positive number", code="FN-1240")
        if any(pattern and not pattern.strip("*") for pattern in self.freeze):
            raise InvalidInput(
                f"training: got freeze {list(self.freeze)}, expected patterns that leave at least one to train",
                code="FN-1243",
            )
        if not 0.0 <= self.weight_decay < inf:
            raise InvalidInput(f"training: got weight_decay {self.weight_decay}, expected 0.0 or more", code="FN-1240")
        for name, value in (("momentum", self.momentum), ("betas", self.betas[0]), ("betas", self.betas[1])):
            if not 0.0 <= value < 1.0:
                raise InvalidInput(f"training: got {name} {value}, expected 0.0 to below 1.0", code="FN-1240")


def _check_times(times: tuple[float, ...] | str, mesh: MeshShape) -> None:
    if isinstance(times, str):
        _one_of("layer_times", times, (MEASURE,))
        if mesh.pp == 1:
            raise InvalidInput(
                f"parallel: got layer_times {times!r} and mesh {mesh}, expected pp above 1: only a pipeline uses them",
                code="FN-1276",
            )
        return
    for time in times:
        if not 0.0 <= time < inf:
            raise InvalidInput(f"parallel: got {time} in layer_times, expected 0.0 or more each", code="FN-1276")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidInput(f"{name}: got {value!r}, expected one of {', '.join(known)}", code="FN-1206")
