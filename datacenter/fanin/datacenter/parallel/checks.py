"""Checks that a model, a mesh and a batch fit each other, before a process starts.

The checks use numbers only. Without them torch reports the same faults after minutes, by a hang or with an error that
names no setting. This module needs no torch.
"""

from fanin.datacenter.parallel.layout import Layout
from fanin.datacenter.parallel.settings import MEASURE, ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.protos.errors import InvalidInput, UnsupportedModel


def check_job(layout: Layout, parallel: ParallelSettings, training: TrainingSettings, world_size: int) -> None:
    """Check that a model can be trained with these settings on ``world_size`` processes.

    Raises:
        UnsupportedModel: the model does not support an axis of the mesh, for any size.
        InvalidInput: the sizes do not fit each other. The message lists every fault and all sizes.
    """
    parallel.mesh.check(world_size)
    sizes_of_axes = {"pp": parallel.mesh.pp, "tp": parallel.mesh.tp}
    for axis, fault in layout.unfit.items():
        if sizes_of_axes[axis] > 1:
            raise UnsupportedModel(
                f"mesh {parallel.mesh}: got {axis} {sizes_of_axes[axis]} for {fault}", code="FN-1269"
            )
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
            f"{parallel.schedule})",
            code="FN-1267",
        )


def check_sequence(parallel: ParallelSettings, length: int) -> None:
    """Raise InvalidInput if sequence parallelism cannot split sequences of ``length`` tokens evenly over ``tp``."""
    tp = parallel.mesh.tp
    if parallel.sequence_parallel and length % tp:
        raise InvalidInput(
            f"parallel: got sequence_parallel, tp {tp} and sequences of {length} tokens, expected a multiple of tp: "
            "every rank needs the same number of positions; use another length, or omit sequence_parallel",
            code="FN-1271",
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
        "got sequence_parallel for a layout that does not declare a sequence (Layout.sequence), expected one whose "
        "layers compute each position by itself outside of attention, such as a decoder or an encoder"
    )
    return [fault]


def _batch_faults(parallel: ParallelSettings, training: TrainingSettings) -> list[str]:
    num_chunks = parallel.mesh.batch_multiple(training.accumulate, parallel.microbatches)
    if training.batch_size % num_chunks == 0:
        return []
    parts = parallel.mesh.num_parts
    fault = (
        f"got batch {training.batch_size}, expected a multiple of {parts} parts x {training.accumulate} accumulation "
        f"steps x {parallel.microbatches} microbatches = {num_chunks}"
    )
    return [fault]
