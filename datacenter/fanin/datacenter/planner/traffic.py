"""Predicts the calls and payload bytes that one rank sends in a step, exactly as ``network.counters`` counts them.

With m microbatches in each of a accumulation steps, t tokens in a chunk, L layers, width w, and N parameters after the
split over ``tp``::

    tp            all-reduces of t x w: 2 a layer forward (3 with full recomputation), 2 a layer backward, 1 for the
                  embedding, 1 for the head; for the loss all-reduces of t and of 2 x t float32 values
      sequence    each all-reduce becomes a reduce-scatter, and an all-gather in the other direction (2 a layer more
                  with full recomputation); all-reduce of the gradients of modules that every rank has whole
    dp_shard      all-gather of N for each chunk, twice if layers are resharded in between; reduce-scatter of N
    dp_replicate  all-reduce of N, or of a rank's shard of it
    pp            t x w for each microbatch and each direction between stages on different ranks; with a split sequence
                  a rank's part of it

and a few bytes for the loss with its finite flag, for the norm, and for parameters that several ranks or both ends of a
pipeline have.
"""

from fanin.datacenter.network.counters import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SEND, Amount, Counts
from fanin.datacenter.planner.spread import SUM_BYTES, Job, StageSizes
from fanin.datacenter.ranks.mesh import LOSS_AXES, PIPELINE, REPLICATE, SHARD, TENSOR

BUCKET_BYTES = 25 * 2**20
"""Bytes of a gradient bucket of DistributedDataParallel. Its actual number of calls may differ."""


def predict_traffic(job: Job, rank: int = 0) -> Counts:
    """Predict the traffic of a pipeline rank in a step whose count is known.

    All ranks of a stage send the same amount.

    Returns:
        (mesh axis, kind of collective) to the number of calls and payload bytes.
    """
    counts = Counts()
    for stage in job.stages(rank):
        if job.tp > 1:
            _tensor(counts, job, stage)
        if job.parallel.sharded:
            _shard(counts, job, stage)
        elif job.parallel.mesh.dp_replicate > 1:
            _replicate(counts, job, stage)
        if job.parallel.pipelined:
            _pipeline(counts, job, stage, rank)
    _small(counts, job, rank)
    return counts


def _add(counts: Counts, key: tuple[str, str], num_calls: int, size_bytes: int) -> None:
    """Add ``num_calls`` calls of ``size_bytes`` each."""
    if num_calls:
        amount = Amount(num_calls=num_calls, size_bytes=num_calls * size_bytes)
        counts[key] = counts.get(key, Amount()) + amount


def _tensor(counts: Counts, job: Job, stage: StageSizes) -> None:
    values, num_chunks, layers = job.chunk_tokens * job.facts.width, job.num_chunks, stage.num_layers
    split, recomputed = job.parallel.sequence_parallel, job.num_recomputations(stage)
    key = (TENSOR, REDUCE_SCATTER if split else ALL_REDUCE)
    _add(counts, key, num_chunks * layers * (2 + recomputed), values * job.product_bytes)
    # The gradients of the activations between layers have the dtype of the activations.
    _add(counts, key, num_chunks * (2 * layers + stage.first + stage.last), values * job.stream_bytes)
    if split:
        gather = (TENSOR, ALL_GATHER)
        _add(counts, gather, num_chunks * 2 * layers, values * job.product_bytes)
        times = layers * (2 + 2 * recomputed) + stage.first + stage.last
        _add(counts, gather, num_chunks * times, values * job.stream_bytes)
    # The loss of split logits: the largest one, then the sum of the exponentials with the target's logit.
    for num_values in (1, 2):
        _add(counts, (TENSOR, ALL_REDUCE), num_chunks * stage.last, num_values * job.chunk_tokens * job.full_bytes)
    # FSDP2 sums the gradients of several chunks in float32, and in a pipeline also those of one chunk.
    summed = job.stream_bytes if num_chunks == 1 and not job.parallel.pipelined else job.full_bytes
    for weights, number in ((job.facts.layer, layers), (job.ends(stage), 1)):
        for weight in weights:
            if weight.is_partial(job.tp, job.facts.sizes.num_kv_heads, split=split):
                _add(counts, (TENSOR, ALL_REDUCE), number * _syncs(job), weight.num_values * summed)


def _syncs(job: Job) -> int:
    """Return how often gradients are summed over dp in a step: in a pipeline under FSDP2 once per accumulation step."""
    return job.training.accumulate if job.parallel.pipelined and job.parallel.sharded else 1


def _shard(counts: Counts, job: Job, stage: StageSizes) -> None:
    mesh, parallel = job.parallel.mesh, job.parallel
    gathered = job.stream_bytes
    if parallel.pipelined:
        # The backward passes keep the gathered parameters until the last one; each forward pass frees them.
        times = job.training.accumulate * (parallel.microbatches + 1 if parallel.reshards else 1)
    else:
        times = job.num_chunks * (2 if parallel.reshards else 1)
    for stored, number in ((job.layer_values, stage.num_layers), (job.end_values(stage), 1)):
        values = job.num_shards * stored
        if not values:
            continue
        if mesh.dp_shard > 1:
            _add(counts, (SHARD, ALL_GATHER), number * times, values * gathered)
            _add(counts, (SHARD, REDUCE_SCATTER), number * _syncs(job), values * job.full_bytes)
        if mesh.dp_replicate > 1:
            _add(counts, (REPLICATE, ALL_REDUCE), number * _syncs(job), values // mesh.dp_shard * job.full_bytes)


def _replicate(counts: Counts, job: Job, stage: StageSizes) -> None:
    size = job.stage_values([stage])[1] * job.full_bytes
    syncs = job.training.accumulate if job.parallel.pipelined else 1
    calls = -(-size // BUCKET_BYTES)
    key = (REPLICATE, ALL_REDUCE)
    counts[key] = counts.get(key, Amount()) + Amount(num_calls=syncs * calls, size_bytes=syncs * size)


def _pipeline(counts: Counts, job: Job, stage: StageSizes, rank: int) -> None:
    pipeline = job.parallel.pipeline()
    size = job.stream_tokens * job.facts.width * job.stream_bytes
    for neighbour in (stage.index - 1, stage.index + 1):
        if 0 <= neighbour < pipeline.num_stages and pipeline.rank_of(neighbour) != rank:
            _add(counts, (PIPELINE, SEND), job.num_chunks, size)
    first, last = pipeline.rank_of(0), pipeline.rank_of(pipeline.num_stages - 1)
    if job.facts.tied and first != last and (stage.first or stage.last):
        _add(counts, (PIPELINE, SEND), 1, job.section_values("inputs") * job.full_bytes)


def _small(counts: Counts, job: Job, rank: int) -> None:
    sizes = job.parallel.mesh.sizes
    for axis in job.parallel.mesh.used(LOSS_AXES):
        _add(counts, (axis, ALL_REDUCE), 1, 2 * SUM_BYTES)
    stages = job.stages(rank)
    # One float32 a parameter tensor. Both ends of a tied weight have the summed gradient, which counts once.
    measured = sum(job.num_weights(stage) for stage in stages)
    if job.facts.tied and job.parallel.pipelined and any(stage.last for stage in stages):
        measured -= len(job.facts.inputs)
    for axis in (TENSOR, SHARD):
        if sizes[axis] > 1:
            _add(counts, (axis, ALL_REDUCE), 1, measured * job.full_bytes)
    if sizes[PIPELINE] > 1:
        _add(counts, (PIPELINE, ALL_REDUCE), 1, SUM_BYTES)
