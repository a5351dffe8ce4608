"""Impossible settings are refused on numbers alone, and the error lists them all."""

import dataclasses
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanin.datacenter.families.decoders import decoder_layout
from fanin.datacenter.models.decoder import DecoderConfig
from fanin.datacenter.parallel.checks import check_job, check_sequence
from fanin.datacenter.parallel.pipelines.schedules import SCHEDULES, Pipeline
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.protos.errors import InvalidInput

LAYOUT = decoder_layout(
    DecoderConfig(vocabulary=99, width=32, num_layers=4, num_heads=8, num_kv_heads=4, feed_forward=24)
)
NUMBERS = r"\(world \d+, 4 layers, 8 heads, 4 kv heads, feed-forward 24, batch \d+, accumulate \d, \d microbatches, "


def training(batch_size: int = 16, accumulate: int = 1) -> TrainingSettings:
    return TrainingSettings(batch_size=batch_size, learning_rate=0.1, accumulate=accumulate)


@given(
    sizes=st.tuples(*(st.sampled_from([1, 2, 3, 4, 8]) for _ in range(4))),
    microbatches=st.integers(1, 4),
    accumulate=st.integers(1, 2),
)
def test_a_job_is_accepted_exactly_when_every_number_divides(
    sizes: tuple[int, ...], microbatches: int, accumulate: int
) -> None:
    pp, replicate, shard, tp = sizes
    shape = MeshShape(pp=pp, dp_replicate=replicate, dp_shard=shard, tp=tp)
    parallel = ParallelSettings(mesh=shape, schedule="GPipe", microbatches=microbatches)
    fits = pp <= 4 and 8 % tp == 0 and 24 % tp == 0 and 48 % (replicate * shard * microbatches * accumulate) == 0
    if fits:
        check_job(LAYOUT, parallel, training(48, accumulate), shape.num_ranks)
    else:
        with pytest.raises(InvalidInput, match=NUMBERS):
            check_job(LAYOUT, parallel, training(48, accumulate), shape.num_ranks)


@pytest.mark.parametrize(
    ("mesh", "settings", "expected"),
    [
        (
            "tp=3",
            {},
            "got heads 8 and tp 3, expected a multiple; got kv heads 4 and tp 3, expected a multiple or tp a mul",
        ),
        ("tp=16", {}, "got heads 8 and tp 16"),
        ("pp=8", {"schedule": "GPipe"}, "got 4 layers for 8 stages, expected at least one each"),
        ("pp=4", {"schedule": "ZBV"}, "got 4 layers for 8 stages"),
        (
            "dp_shard=4",
            {"microbatches": 8},
            "a multiple of 4 parts x 1 accumulation steps x 8 microbatches = 32",
        ),
        ("none", {"layer_times": (1.0,)}, "got 1 layer_times, expected 6"),
    ],
)
def test_an_error_names_the_cause_and_all_numbers(mesh: str, settings: dict[str, object], expected: str) -> None:
    parallel = ParallelSettings(mesh=MeshShape.parse(mesh), **settings)
    with pytest.raises(InvalidInput, match=f"^mesh {mesh}: .*{expected}.* {NUMBERS}"):
        check_job(LAYOUT, parallel, training(), parallel.mesh.num_ranks)


def test_kv_heads_are_shared_only_by_a_plan_that_supports_it() -> None:
    columns = {name: "column" if style == "kv" else style for name, style in LAYOUT.plan.items()}
    parallel = ParallelSettings(mesh=MeshShape(tp=8))
    check_job(LAYOUT, parallel, training(), 8)
    with pytest.raises(InvalidInput, match="FN-1267"):
        check_job(dataclasses.replace(LAYOUT, plan=columns), parallel, training(), 8)


def test_another_world_size_is_refused() -> None:
    with pytest.raises(InvalidInput, match="FN-1266"):
        check_job(LAYOUT, ParallelSettings(mesh=MeshShape(tp=2)), training(), 8)


def test_each_stage_has_one_rank_and_each_rank_the_same_number() -> None:
    for (name, schedule), num_ranks in product(SCHEDULES.items(), (1, 2, 4)):
        pipeline = Pipeline(
            schedule=name, num_ranks=num_ranks, stages_per_rank=schedule.default_stages, microbatches=2 * num_ranks
        )
        stages_by_rank = [pipeline.stages_of(rank) for rank in range(num_ranks)]
        assert sorted(stage for stages in stages_by_rank for stage in stages) == list(range(pipeline.num_stages))
        assert all(pipeline.rank_of(stage) == rank for rank, stages in enumerate(stages_by_rank) for stage in stages)


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "compiled", "expected"),
    [
        ("Chimera", 1, 4, False, "got schedule 'Chimera', expected one of GPipe, 1F1B, Interleaved1F1B, LoopedBFS"),
        ("GPipe", 0, 4, False, "got 0 stages a rank"),
        ("GPipe", 1, 0, False, "got 0 microbatches"),
        ("GPipe", 2, 4, False, "GPipe has 1 stage a rank, got 2"),
        ("1F1B", 2, 8, False, "1F1B has 1 stage a rank, got 2"),
        ("1F1B", 1, 3, False, "1F1B needs at least as many microbatches as the 4 stages, got 3"),
        ("ZBV", 1, 4, False, "ZBV has exactly 2 stages a rank, got 1"),
        ("ZBV", 4, 4, False, "ZBV has exactly 2 stages a rank, got 4"),
        ("Interleaved1F1B", 2, 9, False, "runs 2 rounds over 4 ranks, got 9 microbatches"),
        ("InterleavedZeroBubble", 2, 13, False, "runs 3 rounds over 4 ranks, got 13 microbatches"),
        ("InterleavedZeroBubble", 2, 8, True, "apart, which a compiled module cannot"),
        ("ZBV", 2, 8, True, "apart, which a compiled module cannot"),
    ],
)
def test_an_impossible_schedule_is_refused(
    schedule: str, stages: int, microbatches: int, compiled: bool, expected: str
) -> None:
    with pytest.raises(
        InvalidInput, match=f"^pipeline: .*{expected}.*pp 4, {stages} stages a rank, {microbatches} micro"
    ):
        Pipeline(
            schedule=schedule,
            num_ranks=4,
            stages_per_rank=stages,
            microbatches=microbatches,
            compiled=compiled,
        )


def test_a_pipeline_is_refused_with_its_settings() -> None:
    with pytest.raises(InvalidInput, match="FN-1278"):
        ParallelSettings(mesh=MeshShape(pp=2))
    with pytest.raises(InvalidInput, match="FN-1278"):
        ParallelSettings(mesh=MeshShape(pp=2), schedule="ZBV", microbatches=4, compile=True)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"mesh": MeshShape(pp=2), "microbatches": 2, "precision": "fp16"}, "got precision fp16 and mesh pp=2"),
        (
            {"mesh": MeshShape(pp=2), "microbatches": 2, "schedule": "ZBV", "recompute": "selective"},
            "got recompute selective and schedule ZBV, expected full or none",
        ),
        (
            {"mesh": MeshShape(pp=2), "microbatches": 2, "schedule": "InterleavedZeroBubble", "recompute": "selective"},
            "got recompute selective and schedule InterleavedZeroBubble, expected full or none",
        ),
        (
            {"mesh": MeshShape(tp=2), "compile": True, "recompute": "full"},
            "got compile, recompute full and mesh tp=2, expected tp 1",
        ),
        (
            {"mesh": MeshShape(dp_shard=2, tp=2), "compile": True, "recompute": "full"},
            "got compile, recompute full and mesh dp_shard=2,tp=2, expected tp 1",
        ),
        ({"offload": True, "mesh": MeshShape(tp=2)}, "got offload and mesh tp=2 .* expected none, dp_shard above 1"),
        (
            {"mesh": MeshShape(dp_shard=2), "sequence_parallel": True},
            "got sequence_parallel and mesh dp_shard=2, expected tp above 1: the ranks of tp split the sequence",
        ),
        ({"recompute": "some"}, "recompute: got 'some', expected one of none, full, selective"),
        ({"precision": "int8"}, "precision: got 'int8', expected one of full, double, bf16, fp16"),
        ({"replicate": "copy"}, "replicate: got 'copy', expected one of ddp, hsdp"),
        ({"microbatches": 0}, "got 0 microbatches"),
        ({"stages_per_rank": -1}, "got stages_per_rank -1"),
        ({"schedule": "foo"}, "schedule: got 'foo', expected one of GPipe, 1F1B"),
        ({"layer_times": (1.0, -1.0)}, "got -1.0 in layer_times, expected 0.0 or more"),
        ({"layer_times": (float("nan"),)}, "got nan in layer_times"),
        ({"layer_times": (float("inf"),)}, "got inf in layer_times"),
        ({"layer_times": "guess"}, "layer_times: got 'guess', expected one of measure"),
        (
            {"layer_times": "measure"},
            "got layer_times 'measure' and mesh none, expected pp above 1: only a pipe",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings: dict[str, object], expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected):
        ParallelSettings(**settings)


@given(tp=st.sampled_from([2, 4, 8]), length=st.integers(1, 64))
def test_a_sequence_is_split_into_equal_parts(tp: int, length: int) -> None:
    parallel = ParallelSettings(mesh=MeshShape(tp=tp), sequence_parallel=True)
    check_sequence(dataclasses.replace(parallel, sequence_parallel=False), length)
    if length % tp == 0:
        check_sequence(parallel, length)
        return
    with pytest.raises(InvalidInput, match=f"tp {tp} and sequences of {length} tokens, expected a multiple of tp"):
        check_sequence(parallel, length)


def test_only_layers_that_declare_a_sequence_split_it() -> None:
    parallel = ParallelSettings(mesh=MeshShape(tp=4), sequence_parallel=True)
    check_job(LAYOUT, parallel, training(), 4)
    with pytest.raises(InvalidInput, match="FN-1267"):
        check_job(dataclasses.replace(LAYOUT, sequence=""), parallel, training(), 4)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"batch_size": 0}, "got batch_size 0"),
        ({"accumulate": 0}, "got accumulate 0"),
        ({"learning_rate": 0.0}, "got learning_rate 0.0"),
        ({"learning_rate": float("nan")}, "got learning_rate nan"),
        ({"clip_norm": 0.0}, "got clip_norm 0.0"),
        ({"weight_decay": -1.0}, "got weight_decay -1.0"),
        ({"momentum": 1.0}, "got momentum 1.0"),
        ({"betas": (0.9, 1.0)}, "got betas 1.0"),
        ({"epsilon": -1.0}, "got epsilon -1.0, expected a positive number"),
        ({"epsilon": float("nan")}, "got epsilon nan"),
        ({"freeze": ("head.*", "*")}, "got freeze .*, expected patterns that leave at least one"),
        ({"optimizer": "lion"}, "optimizer: got 'lion', expected one of adamw, sgd"),
    ],
)
def test_training_settings_are_checked(settings: dict[str, object], expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected):
        dataclasses.replace(training(), **settings)
