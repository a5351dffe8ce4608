"""The pipeline stage of torch with all of fanin's changes; no other module replaces a method of torch's stages.

``ObservedStage`` overrides five methods of torch's ``PipelineStage``. Three of them compute a microbatch, and are
timed. The other two begin and end the inference of shapes, during which the buffers of the stage must not change. Two
of the five are private in torch, as are a schedule's stages. ``check_torch`` fails if the installed torch has no such
method.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from fanin.datacenter.observers.events import StageComputed, StageWork
from fanin.datacenter.observers.observer import Publish
from fanin.protos.errors import RuntimeMissing

TESTED_TORCH: Final = "2.13"
OVERRIDDEN: Final = (
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "_prepare_forward_infra",
    "_post_metadata_inference_cleanup",
)
"""The methods of torch's stage that ``ObservedStage`` overrides. torch must have and call each of them."""


class ObservedStage(PipelineStage):
    """A pipeline stage that publishes its computations, and that keeps its buffers while torch infers shapes.

    For the inference torch 2.13 runs the stage in train mode on uninitialized memory. Running statistics would count
    these values: those of a BatchNorm became NaN, or differed from the statistics of a single process.

    Attributes:
        publish: Receives a StageComputed for each microbatch; None without an observer.
        before: Receives the number of each microbatch before it is computed forward, also by the inference of
            shapes.
    """

    publish: Publish | None = None
    before: Callable[[int], None] | None = None
    _saved: tuple[Tensor, ...] = ()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: object, **kwargs: object) -> object:
        """Compute a microbatch forward."""
        started_s = time.perf_counter()
        if self.before is not None:
            self.before(fwd_chunk_id)
        try:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)  # type: ignore[arg-type]
        finally:
            self._publish("forward", started_s)

    def backward_one_chunk(self, *args: object, **kwargs: object) -> None:
        """Compute a microbatch backward."""
        started_s = time.perf_counter()
        try:
            super().backward_one_chunk(*args, **kwargs)  # type: ignore[arg-type]
        finally:
            self._publish("backward", started_s)

    def backward_weight_one_chunk(self, *args: object, **kwargs: object) -> None:
        """Compute the gradients of a microbatch's weights, in schedules that split the backward pass."""
        started_s = time.perf_counter()
        try:
            super().backward_weight_one_chunk(*args, **kwargs)  # type: ignore[arg-type]
        finally:
            self._publish("weights", started_s)

    def _prepare_forward_infra(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        self._saved = tuple(value.clone() for value in self.submod.buffers())
        if self.before is not None:
            # The inference computes a microbatch, too, and each stage of this rank begins its draws anew.
            self.before(0)
        return super()._prepare_forward_infra(*args, **kwargs)  # type: ignore[arg-type]

    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()
        with torch.no_grad():
            for value, old in zip(self.submod.buffers(), self._saved, strict=True):
                value.copy_(old)
        self._saved = ()

    def _publish(self, work: StageWork, started_s: float) -> None:
        if self.publish is not None:
            seconds = time.perf_counter() - started_s
            self.publish(StageComputed(stage=self.stage_index, work=work, started_s=started_s, seconds=seconds))


def observe_stages(schedule: PipelineScheduleSingle | PipelineScheduleMulti, publish: Publish) -> None:
    """Publish the computations of a schedule's stages on this rank."""
    # torch has no public access to a schedule's stages.
    stages = [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages
    for stage in stages:
        assert isinstance(stage, ObservedStage), "build_schedule creates these alone"
        stage.publish = publish


def check_torch(stage: type = PipelineStage, names: Sequence[str] = OVERRIDDEN) -> None:
    """Raise RuntimeMissing unless torch's stage has the methods that ``ObservedStage`` overrides."""
    missing = [name for name in names if not callable(getattr(stage, name, None))]
    if missing:
        raise RuntimeMissing(
            f"pipelines: got torch {torch.__version__}, whose {stage.__name__} has no {', '.join(missing)}, expected "
            f"torch {TESTED_TORCH}; install torch {TESTED_TORCH}, or train without pp",
            code="FN-1281",
        )
