"""The memory of one rank at its peak, by formula, in bytes.

What is kept throughout: parameters, the optimizer's state, and gradients that wait for the last piece of a batch. On
top of it the largest of three moments, each with what FSDP2 has fetched then: the end of the forward pass, the backward
pass of the loss, and that of each layer, in which activations go and gradients come. The bytes of activations are those
of tensors that autograd saves for ``models.decoder`` with flash attention; Korthikanti et al. 2022 (arXiv 2205.05198,
section 4) count likewise. The allocator's own rounding and fragments, NCCL's buffers and CUDA's context are not in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fanin.datacenter.planner.bubble import live_pieces
from fanin.datacenter.planner.spread import FULL_BYTES, HALF_BYTES, Job, Stage

STATE_VALUES = {"adamw": 2, "sgd": 1}
"""Of each parameter, in the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of a rank at its peak, by what they are for; ``working`` are whole layers, sums under way and the like."""

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.optimizer + self.gradients + self.activations + self.working


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes that one piece of a batch keeps on a rank.

    ``layer``: of a layer that keeps all; ``kept``: of one as its recomputation has it; ``again``: what comes back while
    such a layer's gradients are made. ``stream``: what layers hand on. ``logits`` in the model's precision, and
    ``scores`` the same in float32.
    """

    layer: int
    kept: int
    again: int
    stream: int
    norm: int
    logits: int
    scores: int


def activations_of(job: Job, *, fused_norms: bool = False) -> Activations:
    """Of one piece. ``fused_norms``: as CUDA has them; on a CPU a norm keeps its input twice, in float32."""
    facts, tp, product, handed = job.facts, job.tp, job.product_bytes, job.stream_bytes
    width, heads = facts.width, facts.sizes.num_heads / tp
    attended = heads * facts.head_width
    keys = max(facts.kv_width / tp, facts.head_width)
    forward = facts.sizes.feed_forward / tp
    split = tp if job.parallel.sequence_parallel else 1
    # What it gives is there whole in any case, for the matrices that it is multiplied with.
    norm = ((handed * width if fused_norms else 2 * FULL_BYTES * width) + FULL_BYTES) / split + product * width
    # Keys and queries as rotated, values, what attention gives (twice: turned for the next product), and its sums.
    attention = product * (2 * keys + 3 * attended) + FULL_BYTES * heads
    # Both projections, the one after its sigmoid, and their product.
    layer = 2 * norm + attention + product * 4 * forward
    # Of both sums over tp: what was brought, what came of it, and what is gathered of a split sequence.
    sums = 2 * product * width * (1 + (1 / split if tp > 1 else 0)) + (2 * handed * width if split > 1 else 0)
    given = handed * width / split
    selected = given + product * (2 * attended + 2 * keys + 2 * forward) + sums
    kept = {"none": layer, "full": given, "selective": selected + FULL_BYTES * heads}[job.parallel.recompute]
    again = {
        "none": 0.0,
        "full": layer,
        "selective": layer - product * (keys + attended + 2 * forward),
    }[job.parallel.recompute]
    tokens = job.piece_tokens
    # Sines and cosines are the same for each sample.
    turns = FULL_BYTES * facts.head_width * job.sequence
    return Activations(
        layer=round(layer * tokens) + turns,
        kept=round(kept * tokens) + (turns if job.parallel.recompute == "none" else 0),
        again=round(again * tokens),
        stream=job.stream_tokens * width * handed,
        norm=round(tokens * norm),
        logits=tokens * facts.vocabulary * product,
        scores=tokens * facts.vocabulary * FULL_BYTES,
    )


def predict_memory(job: Job, rank: int = 0, *, fused_norms: bool = False) -> Memory:
    """The peak of a rank of the pipeline; on a GPU of what is there, where parameters are offloaded."""
    stages = job.stages(rank)
    found = activations_of(job, fused_norms=fused_norms)
    static = _static(job, stages)
    whole = (job.stage_values(stages)[1] + sum(_others_rows(job, stage) for stage in stages)) * FULL_BYTES
    peaks = []
    for live, waiting, last in _flights(job, rank):
        moments = [moment for stage in stages for moment in _moments(job, stage, found, waiting=waiting, last=last)]
        activations, gradients, working = max(moments, key=sum)
        peaks.append(
            Memory(
                parameters=static.parameters,
                optimizer=static.optimizer,
                gradients=static.gradients + gradients + (whole if waiting else 0),
                activations=activations + _others(live - 1, stages, found),
                working=static.working + working,
            )
        )
    return max(peaks, key=lambda each: each.total)


def worst_memory(job: Job, *, fused_norms: bool = False) -> Memory:
    """The peak of the rank that has the highest: the first or the last, which have the ends of the model."""
    ranks = {0, job.parallel.mesh.pp - 1}
    return max((predict_memory(job, rank, fused_norms=fused_norms) for rank in ranks), key=lambda each: each.total)


def _static(job: Job, stages: list[Stage]) -> Memory:
    mine, whole = (values * FULL_BYTES for values in job.stage_values(stages))
    parallel = job.parallel
    replicated = not parallel.sharded and parallel.mesh.dp_replicate > 1
    # DistributedDataParallel sums in buffers of its own.
    gradients = whole if replicated else 0
    working = 0
    if parallel.sharded and not parallel.reshards:
        working += whole * job.stream_bytes // FULL_BYTES
    if job.half and not parallel.sharded:
        # Autocast keeps its copies of the weights until their gradients are made.
        working += whole * HALF_BYTES // FULL_BYTES
    there = 0 if parallel.offload else 1
    return Memory(
        parameters=mine * there,
        optimizer=mine * STATE_VALUES[job.training.optimizer] * there,
        gradients=gradients,
        activations=0,
        working=working,
    )


def _moments(
    job: Job, stage: Stage, found: Activations, *, waiting: bool, last: bool
) -> Iterator[tuple[int, int, int]]:
    """(activations, gradients, working) of a stage at each moment that may be its highest."""
    num_layers, sharded = stage.num_layers, job.parallel.sharded
    layers = num_layers * found.kept
    held = found.logits if stage.last else found.stream
    fetched = sharded and job.parallel.reshards
    shards = job.num_shards
    unit, root = (shards * values * job.stream_bytes for values in (job.layer_values, job.end_values(stage)))
    fetch = unit if sharded else 0
    # The end of the forward pass: the ends of the model are there, and the last layer's buffer.
    yield layers + (found.norm if stage.last else 0) + held, 0, fetch + (root if fetched else 0)
    if stage.last:
        # The loss in float32: its scores, their gradients before and after the logarithm.
        yield layers + found.norm + held + found.scores, 0, 2 * found.scores
        # The head, fetched anew: its buffer, itself, and the gradient of the logits.
        yield layers + found.norm + 2 * held, 0, 2 * root if fetched else fetch
    inside = max(found.again + _arriving(job), unit + found.layer // 4)
    whole = shards * job.layer_values * FULL_BYTES
    # Before the last piece FSDP2 sums nothing, and a layer's gradients stay whole.
    mine = job.layer_values * FULL_BYTES if sharded and last else whole
    summed = whole if sharded and last else 0
    # In between the sum is linear in ``done``: its highest is at an end.
    for done in sorted({0, 1, num_layers - 2, num_layers - 1} & set(range(num_layers))):
        # Where pieces before have left gradients, a layer's are in place already, and go as they are summed.
        gradients = (0 if waiting else done * mine) + (summed if done else 0)
        next_one = unit if fetched and done < num_layers - 1 else 0
        yield (num_layers - done) * found.kept + held + inside, gradients, next_one + (unit + root if fetched else 0)
    # The table of tokens: the gradients of the ends come last, and the sums of the first layer are still under way.
    done_all = 0 if waiting else num_layers * mine
    table = _others_rows(job, stage) * job.stream_bytes
    if table and sharded and job.half and not last:
        # As it came, and in float32 for the pieces to come.
        table += job.facts.vocabulary * job.facts.width * FULL_BYTES
    yield held, done_all + summed + root + table, root if fetched else 0


def _others_rows(job: Job, stage: Stage) -> int:
    """Values of the table of tokens that other ranks of tp have: torch makes gradients of those rows as well."""
    table = job.facts.vocabulary * job.facts.width
    return table - -(-table // job.tp) if stage.first and job.tp > 1 else 0


def _arriving(job: Job) -> int:
    """What the feed-forward's backward pass has at once, beyond what was saved."""
    facts = job.facts
    forward = -(-facts.sizes.feed_forward // job.tp) * job.product_bytes
    return 2 * forward * job.piece_tokens + forward * facts.width


def _flights(job: Job, rank: int) -> Iterator[tuple[int, bool, bool]]:
    """(pieces whose activations are there, whether gradients of earlier pieces are too, whether it may be the last
    before they are summed) in the first and the second backward pass: of those that follow none has more."""
    parallel = job.parallel
    live, pieces = 1, job.turns
    if parallel.pipelined:
        pipeline = parallel.pipeline()
        live = live_pieces(pipeline, rank)
        # FSDP2 sums after each run of the pipeline; otherwise gradients wait through all turns.
        pieces = (parallel.microbatches if parallel.sharded else job.turns) * pipeline.stages_per_rank
    yield live, False, pieces == 1
    if pieces > 1:
        yield (live if pieces > live else live - 1), True, True


def _others(num: int, stages: list[Stage], found: Activations) -> int:
    """Activations of so many other pieces that a pipeline works on."""
    sizes = [
        stage.num_layers * found.kept + found.stream + (found.norm + found.logits + found.scores if stage.last else 0)
        for stage in stages
    ]
    return round(max(num, 0) * sum(sizes) / len(sizes))
