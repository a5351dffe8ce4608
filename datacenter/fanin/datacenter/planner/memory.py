"""Predicts the peak memory of one rank in bytes.

Parameters, optimizer state, and gradients that wait for the last chunk of a batch are in memory all the time. The
prediction adds the largest of three moments: the end of the forward pass, the backward pass of the loss, or the
backward pass of a layer. A layer frees activations and creates gradients. Each moment includes the parameters that
FSDP2 has gathered at that time.

The bytes of activations are those of the tensors that autograd saves for ``models.decoder`` with flash attention. The
prediction does not include the rounding and fragmentation of the allocator, NCCL's buffers and CUDA's context.

Reference:
    Korthikanti et al. 2022, arXiv 2205.05198, section 4, count activations in the same way.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fanin.datacenter.planner.bubble import max_in_flight
from fanin.datacenter.planner.spread import HALF_BYTES, Job, StageSizes

STATE_VALUES = {"adamw": 2, "sgd": 1}
"""State values that the optimizer stores for each parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of a rank at its peak, by use.

    Attributes:
        parameters: the rank's shards of the parameters.
        optimizer: the optimizer's state.
        gradients: gradients of the parameters.
        activations: tensors that autograd saves for the backward pass.
        working: gathered layers, running gradient sums, half-precision copies and other temporary tensors.
    """

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        """Bytes of all uses together."""
        return self.parameters + self.optimizer + self.gradients + self.activations + self.working


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes of activations that one chunk of a batch needs on a rank.

    Attributes:
        layer: a layer without recomputation.
        kept: a layer under the recomputation of the job.
        recomputed: tensors that a layer recomputes in its backward pass.
        stream: the output of a layer.
        norm: a norm.
        logits: the logits in the precision of the matrix products.
        scores: the logits in the precision of the loss: float32 or wider.
    """

    layer: int
    kept: int
    recomputed: int
    stream: int
    norm: int
    logits: int
    scores: int


def activations_of(job: Job, *, fused_norms: bool = False) -> Activations:
    """Return the activations of one chunk.

    Args:
        job: the model and its layout.
        fused_norms: whether norms are fused, as on CUDA. On a CPU a norm keeps its input twice.
    """
    facts, tp, product, stream = job.facts, job.tp, job.product_bytes, job.stream_bytes
    width, heads = facts.width, facts.sizes.num_heads / tp
    attended = heads * facts.head_width
    keys = max(facts.kv_width / tp, facts.head_width)
    forward = facts.sizes.feed_forward / tp
    split = tp if job.parallel.sequence_parallel else 1
    # The output of a norm is always full, because the matrices after it need it.
    norm = ((stream * width if fused_norms else 2 * job.full_bytes * width) + job.full_bytes) / split + product * width
    # Rotated keys and queries, values, the output of attention (twice: transposed for the next product), and its sums.
    attention = product * (2 * keys + 3 * attended) + job.full_bytes * heads
    # Both projections, the sigmoid of one, and their product.
    layer = 2 * norm + attention + product * 4 * forward
    if product != stream:
        # autocast casts the output of a norm again for each of the five products that read it. `norm` has one copy.
        layer += product * width * 3
    # For both sums over tp: the summand, the sum, and the gathered sequence if it is split.
    sums = 2 * product * width * (1 + (1 / split if tp > 1 else 0)) + (2 * stream * width if split > 1 else 0)
    layer_input = stream * width / split
    selected = layer_input + product * (2 * attended + 2 * keys + 2 * forward) + sums
    kept = {"none": layer, "full": layer_input, "selective": selected + job.full_bytes * heads}[job.parallel.recompute]
    recomputed = {
        "none": 0.0,
        "full": layer,
        "selective": layer - product * (keys + attended + 2 * forward),
    }[job.parallel.recompute]
    # The loss keeps the logits split over tp.
    tokens, columns = job.chunk_tokens, -(-facts.vocabulary // tp)
    # Sines and cosines are shared by all samples.
    rotations = job.full_bytes * facts.head_width * job.sequence
    return Activations(
        layer=round(layer * tokens) + rotations,
        kept=round(kept * tokens) + (rotations if job.parallel.recompute == "none" else 0),
        recomputed=round(recomputed * tokens),
        stream=job.stream_tokens * width * stream,
        norm=round(tokens * norm),
        logits=tokens * columns * product,
        scores=tokens * columns * job.full_bytes,
    )


def predict_memory(job: Job, rank: int = 0, *, fused_norms: bool = False) -> Memory:
    """Predict the peak memory of one pipeline rank.

    With offloaded parameters this is the memory of the GPU; parameters and optimizer state are then zero.

    Args:
        job: the model and its layout.
        rank: index of the rank along pp.
        fused_norms: whether norms are fused, as on CUDA.
    """
    stages = job.stages(rank)
    sizes = activations_of(job, fused_norms=fused_norms)
    static = _static(job, stages)
    full_gradients = (
        job.stage_values(stages)[1] + sum(_other_ranks_rows(job, stage) for stage in stages)
    ) * job.full_bytes
    peaks = []
    for in_flight, waiting, last in _backward_passes(job, rank):
        moments = [moment for stage in stages for moment in _moments(job, stage, sizes, waiting=waiting, last=last)]
        activations, gradients, working = max(moments, key=sum)
        peaks.append(
            Memory(
                parameters=static.parameters,
                optimizer=static.optimizer,
                gradients=static.gradients + gradients + (full_gradients if waiting else 0),
                activations=activations + _other_chunks(in_flight - 1, stages, sizes),
                working=static.working + working,
            )
        )
    return max(peaks, key=lambda each: each.total)


def worst_memory(job: Job, *, fused_norms: bool = False) -> Memory:
    """Predict the peak of the rank that needs most: the first or the last, which have the ends of the model."""
    ranks = {0, job.parallel.mesh.pp - 1}
    return max((predict_memory(job, rank, fused_norms=fused_norms) for rank in ranks), key=lambda each: each.total)


def _static(job: Job, stages: list[StageSizes]) -> Memory:
    stored, total = (values * job.full_bytes for values in job.stage_values(stages))
    parallel = job.parallel
    replicated = not parallel.sharded and parallel.mesh.dp_replicate > 1
    # DistributedDataParallel sums gradients in its own buffers.
    gradients = total if replicated else 0
    working = 0
    if parallel.sharded and not parallel.reshards:
        working += total * job.stream_bytes // job.full_bytes
    if job.half and not parallel.sharded:
        # Autocast keeps its copies of the weights until their gradients are computed.
        working += total * HALF_BYTES // job.full_bytes
    on_device = 0 if parallel.offload else 1
    return Memory(
        parameters=stored * on_device,
        optimizer=stored * STATE_VALUES[job.training.optimizer] * on_device,
        gradients=gradients,
        activations=0,
        working=working,
    )


def _moments(
    job: Job, stage: StageSizes, sizes: Activations, *, waiting: bool, last: bool
) -> Iterator[tuple[int, int, int]]:
    """Yield (activations, gradients, working) of a stage in bytes, at each moment that may be its peak.

    ``waiting``: gradients of earlier chunks are in memory. ``last``: the gradients are summed in this backward pass.
    """
    num_layers, sharded = stage.num_layers, job.parallel.sharded
    layers = num_layers * sizes.kept
    output_bytes = sizes.logits if stage.last else sizes.stream
    fetched = sharded and job.parallel.reshards
    shards = job.num_shards
    unit, root = (shards * values * job.stream_bytes for values in (job.layer_values, job.end_values(stage)))
    fetch = unit if sharded else 0
    # The end of the forward pass: the ends of the model and the buffer of the last layer are gathered.
    yield layers + (sizes.norm if stage.last else 0) + output_bytes, 0, fetch + (root if fetched else 0)
    if stage.last:
        # The loss in float32: the scores, and their gradients before and after the logarithm. The loss of split logits
        # has one gradient, in float32 and then in the precision of the logits.
        gradients = sizes.scores + (sizes.logits if job.half else 0) if job.tp > 1 else 2 * sizes.scores
        yield layers + sizes.norm + output_bytes + sizes.scores, 0, gradients
        # The head, gathered again: its buffer, its parameters, and the gradient of the logits.
        yield layers + sizes.norm + 2 * output_bytes, 0, 2 * root if fetched else fetch
    inside = max(sizes.recomputed + _feed_forward_gradients(job), unit + sizes.layer // 4)
    unsharded = shards * job.layer_values * job.full_bytes
    # FSDP2 sums gradients only in the last chunk. Before it the gradients of a layer are not sharded.
    layer_gradients = job.layer_values * job.full_bytes if sharded and last else unsharded
    summed = unsharded if sharded and last else 0
    # In between the total is linear in ``num_done_layers``, so its maximum is at an end.
    for num_done_layers in sorted({0, 1, num_layers - 2, num_layers - 1} & set(range(num_layers))):
        # If gradients of earlier chunks exist, they include those of the layer. They are freed when they are summed.
        gradients = (0 if waiting else num_done_layers * layer_gradients) + (summed if num_done_layers else 0)
        next_one = unit if fetched and num_done_layers < num_layers - 1 else 0
        yield (
            (num_layers - num_done_layers) * sizes.kept + output_bytes + inside,
            gradients,
            next_one + (unit + root if fetched else 0),
        )
    # The embedding: the gradients of the ends come last, and the sums of the first layer are still running.
    all_gradients = 0 if waiting else num_layers * layer_gradients
    table = _other_ranks_rows(job, stage) * job.stream_bytes
    if table and sharded and job.half and not last:
        # Its gradient in half precision, and in float32 for the following chunks.
        table += job.facts.vocabulary * job.facts.width * job.full_bytes
    yield output_bytes, all_gradients + summed + root + table, root if fetched else 0


def _other_ranks_rows(job: Job, stage: StageSizes) -> int:
    """Return the embedding values of other ranks of tp. torch computes gradients of those rows, too."""
    table = job.facts.vocabulary * job.facts.width
    return table - -(-table // job.tp) if stage.first and job.tp > 1 else 0


def _feed_forward_gradients(job: Job) -> int:
    """Return the bytes of temporary tensors in the backward pass of a feed-forward block."""
    facts = job.facts
    forward = -(-facts.sizes.feed_forward // job.tp) * job.product_bytes
    return 2 * forward * job.chunk_tokens + forward * facts.width


def _backward_passes(job: Job, rank: int) -> Iterator[tuple[int, bool, bool]]:
    """Yield the state of the first and the second backward pass. No later pass needs more memory.

    Yields:
        (chunks whose activations are in memory, whether gradients of earlier chunks are in memory, whether gradients
        may be summed in this pass).
    """
    parallel = job.parallel
    in_flight, num_passes = 1, job.num_chunks
    if parallel.pipelined:
        pipeline = parallel.pipeline()
        in_flight = max_in_flight(pipeline, rank)
        # FSDP2 sums after each run of the pipeline. Otherwise gradients wait through all accumulation steps.
        num_passes = (parallel.microbatches if parallel.sharded else job.num_chunks) * pipeline.stages_per_rank
    yield in_flight, False, num_passes == 1
    if num_passes > 1:
        yield (in_flight if num_passes > in_flight else in_flight - 1), True, True


def _other_chunks(num: int, stages: list[StageSizes], sizes: Activations) -> int:
    """Return the bytes of activations of ``num`` further chunks in flight."""
    chunk_bytes = [
        stage.num_layers * sizes.kept + sizes.stream + (sizes.norm + sizes.logits + sizes.scores if stage.last else 0)
        for stage in stages
    ]
    return round(max(num, 0) * sum(chunk_bytes) / len(chunk_bytes))
