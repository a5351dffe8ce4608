"""What one step of a job sends, by formula: calls and payload bytes, in the words and to the byte of ``counters``.

With m microbatches in a accumulated turns, of tokens t each, L layers, width w, N parameters after ``tp``::

    tp            all-reduce, each t x w: 2 a layer forward (3 with full recomputation) and 2 backward, 1 for the table
                  of tokens, 1 for the head; all-gather of the logits, t x vocabulary
      sequence    of each of these a reduce-scatter, and an all-gather on the way back (2 a layer more with full
                  recomputation); all-reduce of the gradients of what every rank has whole
    dp_shard      all-gather of N for each piece, twice where layers are given back in between; reduce-scatter of N
    dp_replicate  all-reduce of N, or of a rank's share of it
    pp            t x w for each microbatch and each way, where stages are on different ranks; of a split sequence a
                  rank's part

and a few bytes for the loss and whether all is finite, for the norm, and for what both ends of a pipeline or several
ranks have of one parameter.
"""

from fanin.datacenter.network.counters import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SEND, Amount, Counts
from fanin.datacenter.parallel.mesh import PIPELINE, REPLICATE, SHARD, TENSOR
from fanin.datacenter.planner.spread import FULL_BYTES, SUM_BYTES, Job, Stage

BUCKET_BYTES = 25 * 2**20
"""Of DistributedDataParallel: gradients are reduced by so many at once. Its own calls are fewer or more."""


def predict_traffic(job: Job, rank: int = 0) -> Counts:
    """What a rank of the pipeline sends in a step whose count is known; all ranks of a stage send the same."""
    found = Counts()
    for stage in job.stages(rank):
        if job.tp > 1:
            _tensor(found, job, stage)
        if job.parallel.sharded:
            _shard(found, job, stage)
        elif job.parallel.mesh.dp_replicate > 1:
            _replicate(found, job, stage)
        if job.parallel.pipelined:
            _pipeline(found, job, stage, rank)
    _small(found, job, rank)
    return found


def _add(found: Counts, key: tuple[str, str], num_calls: int, size_bytes: int) -> None:
    """``num_calls`` of ``size_bytes`` each."""
    if num_calls:
        more = Amount(num_calls=num_calls, size_bytes=num_calls * size_bytes)
        found[key] = found.get(key, Amount()) + more


def _tensor(found: Counts, job: Job, stage: Stage) -> None:
    values, turns, layers = job.piece_tokens * job.facts.width, job.turns, stage.num_layers
    split, again = job.parallel.sequence_parallel, job.again(stage)
    key = (TENSOR, REDUCE_SCATTER if split else ALL_REDUCE)
    _add(found, key, turns * layers * (2 + again), values * job.product_bytes)
    # Gradients of what layers hand on are of its dtype.
    _add(found, key, turns * (2 * layers + stage.first + stage.last), values * job.stream_bytes)
    if split:
        gather = (TENSOR, ALL_GATHER)
        _add(found, gather, turns * 2 * layers, values * job.product_bytes)
        times = layers * (2 + 2 * again) + stage.first + stage.last
        _add(found, gather, turns * times, values * job.stream_bytes)
    _add(found, (TENSOR, ALL_GATHER), turns * stage.last, job.piece_tokens * job.facts.vocabulary * job.product_bytes)
    # FSDP2 adds up gradients of several pieces in float32, and in a pipeline also those of one.
    summed = job.stream_bytes if turns == 1 and not job.parallel.pipelined else FULL_BYTES
    for weights, number in ((job.facts.layer, layers), (job.ends(stage), 1)):
        for weight in weights:
            if weight.is_partial(job.tp, job.facts.sizes.num_kv_heads, split=split):
                _add(found, (TENSOR, ALL_REDUCE), number * _syncs(job), weight.num_values * summed)


def _syncs(job: Job) -> int:
    """How often in a step gradients meet: a pipeline's once in each turn, where FSDP2 does it."""
    return job.training.accumulate if job.parallel.pipelined and job.parallel.sharded else 1


def _shard(found: Counts, job: Job, stage: Stage) -> None:
    mesh, parallel = job.parallel.mesh, job.parallel
    gathered = job.stream_bytes
    if parallel.pipelined:
        # The first backward keeps what it fetched, up to the last; a forward that follows gives it back.
        times = job.training.accumulate * (parallel.microbatches + 1 if parallel.reshards else 1)
    else:
        times = job.turns * (2 if parallel.reshards else 1)
    for kept, number in ((job.layer_values, stage.num_layers), (job.end_values(stage), 1)):
        values = job.num_shards * kept
        if not values:
            continue
        if mesh.dp_shard > 1:
            _add(found, (SHARD, ALL_GATHER), number * times, values * gathered)
            _add(found, (SHARD, REDUCE_SCATTER), number * _syncs(job), values * FULL_BYTES)
        if mesh.dp_replicate > 1:
            _add(found, (REPLICATE, ALL_REDUCE), number * _syncs(job), values // mesh.dp_shard * FULL_BYTES)


def _replicate(found: Counts, job: Job, stage: Stage) -> None:
    size = job.stage_values([stage])[1] * FULL_BYTES
    syncs = job.training.accumulate if job.parallel.pipelined else 1
    calls = -(-size // BUCKET_BYTES)
    key = (REPLICATE, ALL_REDUCE)
    found[key] = found.get(key, Amount()) + Amount(num_calls=syncs * calls, size_bytes=syncs * size)


def _pipeline(found: Counts, job: Job, stage: Stage, rank: int) -> None:
    pipeline = job.parallel.pipeline()
    size = job.stream_tokens * job.facts.width * job.stream_bytes
    for neighbour in (stage.index - 1, stage.index + 1):
        if 0 <= neighbour < pipeline.num_stages and pipeline.rank_of(neighbour) != rank:
            _add(found, (PIPELINE, SEND), job.turns, size)
    first, last = pipeline.rank_of(0), pipeline.rank_of(pipeline.num_stages - 1)
    if job.facts.tied and first != last and (stage.first or stage.last):
        _add(found, (PIPELINE, SEND), 1, job.part_values("inputs") * FULL_BYTES)


def _small(found: Counts, job: Job, rank: int) -> None:
    sizes = job.parallel.mesh.sizes
    for axis in (SHARD, REPLICATE, PIPELINE):
        if sizes[axis] > 1:
            _add(found, (axis, ALL_REDUCE), 1, 2 * SUM_BYTES)
    stages = job.stages(rank)
    # One float32 a parameter; both ends of a tie have the sum, and it counts once.
    measured = sum(job.num_weights(stage) for stage in stages)
    if job.facts.tied and job.parallel.pipelined and any(stage.last for stage in stages):
        measured -= len(job.facts.inputs)
    for axis in (TENSOR, SHARD):
        if sizes[axis] > 1:
            _add(found, (axis, ALL_REDUCE), 1, measured * FULL_BYTES)
    if sizes[PIPELINE] > 1:
        _add(found, (PIPELINE, ALL_REDUCE), 1, SUM_BYTES)
