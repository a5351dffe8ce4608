"""Strategies of the property tests. Their settings are the profiles in ``conftest``."""

import struct
from dataclasses import replace
from typing import Final

from hypothesis import strategies as st

from fanin.edge.tensors import TensorTable
from fanin.protos import messages as m
from fanin.protos import plans as p
from fanin.protos.chunks import MAX_CHUNK_BYTES, Artifact, ChunkRef
from fanin.protos.messages import MAX_NUMBER
from fanin.protos.roles import RoleKind, TensorRole

UINT32: Final = st.integers(0, (1 << 32) - 1)
UINT64: Final = st.integers(0, (1 << 64) - 1)
NAMES: Final = st.text("abcXYZ019._:+-", min_size=1, max_size=12).filter(lambda name: not name.startswith("."))
TEXTS: Final = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
PRINTABLES: Final = st.text(
    st.characters(exclude_categories=("C", "Z"), include_characters=" "), min_size=1, max_size=12
)
SECONDS: Final = st.floats(0, 1e12)
FLOATS: Final = st.floats(allow_nan=False)
POSITIVE: Final = st.floats(1e-300, 1e300)
RATES: Final = st.floats(p.MIN_RATE, p.MAX_RATE)
DIGESTS: Final = st.binary(min_size=32, max_size=32).map(bytes.hex)
SIGNATURES: Final = st.binary(min_size=64, max_size=64)
CHUNKS: Final = st.builds(ChunkRef, sha256=DIGESTS, size_bytes=st.integers(1, MAX_CHUNK_BYTES), url=TEXTS)


def _artifact(sha256: str, chunks: list[ChunkRef]) -> Artifact:
    return Artifact(sha256=sha256, size_bytes=sum(ref.size_bytes for ref in chunks), chunks=tuple(chunks))


ARTIFACTS: Final = st.builds(_artifact, DIGESTS, st.lists(CHUNKS, max_size=3))
KEYS: Final = DIGESTS.map(lambda digest: f"{digest[:2]}5a{digest[4:]}")
"""Public keys. None of them is a point of small order."""
EPOCHS: Final = st.integers(m.FIRST_EPOCH, MAX_NUMBER)


CODEC_SPECS: Final = st.builds(m.CodecSpec, name=NAMES, max_shift=st.integers(0, p.MAX_CODEC_SHIFT))
OPTIMIZERS: Final = st.dictionaries(NAMES, st.floats(allow_nan=False, allow_infinity=False), max_size=3).map(
    lambda settings: dict(sorted(settings.items()))
)
TRAININGS: Final = st.builds(
    m.Training,
    epochs=st.integers(1, p.MAX_EPOCHS),
    learning_rate=RATES,
    seed=UINT64,
    proximal_weight=st.just(0.0) | RATES,
    batch_size=UINT32,
    optimizer=OPTIMIZERS,
    warmup_steps=UINT32,
    step_decay=st.sampled_from(["", "linear", "cosine", "step"]),
    decay_steps=st.integers(1, p.MAX_TIMES),
    decay_factor=st.floats(2.0**-60, 1.0),
    schedule_rounds=UINT32,
    min_work=st.floats(0.0, 1.0),
    personal_epochs=st.integers(1, p.MAX_EPOCHS),
    ditto_weight=st.just(0.0) | RATES,
)
SCALARS: Final = (
    st.booleans(),
    st.integers(-(1 << 63) + 1, (1 << 63) - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=5),
    st.binary(max_size=5),
)
OPTIONS: Final = st.dictionaries(NAMES, st.one_of(*SCALARS[:-1]), max_size=3)
"""Options of a part that a Plan names: all scalars but bytes."""
STAGES: Final = st.builds(
    m.StageSpec,
    name=NAMES,
    options=OPTIONS,
)
ROUND_PLANS: Final = st.builds(m.RoundPlan, protocol=NAMES, options=OPTIONS)
DECLARED: Final = st.builds(m.Statistic, name=NAMES, unit=st.just("") | NAMES, bound=st.integers(1, m.MAX_COUNT))
SETTINGS: Final = st.one_of(*SCALARS, *(st.lists(each, max_size=3).map(tuple) for each in SCALARS))
"""Entries of Flower's ConfigRecord."""
BOUNDS: Final = st.lists(st.floats(-1e30, 1e30), min_size=2, max_size=2).map(sorted)
ROLES: Final = st.builds(
    lambda role, bounds, ends: TensorRole(
        role=role, lowest=bounds[0] if ends & 1 else None, highest=bounds[1] if ends & 2 else None
    ),
    st.sampled_from([kind for kind in RoleKind if kind is not RoleKind.SUM]),
    BOUNDS,
    st.integers(0, 3),
)
FLOWER_PLANS: Final = st.builds(
    p.FlowerPlan,
    config=st.dictionaries(NAMES, SETTINGS, max_size=3),
    roles=st.dictionaries(PRINTABLES, ROLES, max_size=3),
)


def schedules(flower: p.FlowerPlan) -> st.SearchStrategy[tuple[p.ScheduledChange, ...]]:
    """Return the schedules of a Plan with these settings of Flower apps."""
    some_names = st.sets(st.sampled_from(sorted(flower.config))) if flower.config else st.just(set())
    changes = st.builds(
        p.ScheduledChange,
        from_round=st.integers(1, p.MAX_TIMES),
        learning_rate=st.none() | RATES,
        decay=st.none() | st.floats(0, 1, exclude_min=True),
        epochs=st.none() | st.integers(1, p.MAX_EPOCHS),
        proximal_weight=st.none() | st.just(0.0) | RATES,
        batch_size=st.none() | UINT32,
        optimizer=OPTIMIZERS,
        warmup_steps=st.none() | UINT32,
        step_decay=st.sampled_from([None, "", "linear", "cosine"]),
        flower=some_names.map(lambda names: p.FlowerPlan(config={name: flower.config[name] for name in names})),
    )
    return st.lists(changes, max_size=3, unique_by=lambda change: change.from_round).map(
        lambda changes: tuple(sorted(changes, key=lambda change: change.from_round))
    )


@st.composite
def cohorts(draw: st.DrawFn) -> p.CohortPlan:
    """Draw any cohort that the headroom permits for a single example and no shift."""
    concurrency = draw(st.integers(1, p.MAX_COHORT))
    buffer = draw(st.integers(1, concurrency))
    quorum = draw(st.integers(1, buffer))
    times = {"deadline_s": draw(POSITIVE), "min_report_s": draw(POSITIVE | st.just(float("inf")))}
    return p.CohortPlan(
        concurrency=concurrency,
        buffer=buffer,
        quorum=quorum,
        selection=draw(NAMES),
        selection_options=draw(OPTIONS),
        **times,
    )


_METRICS: Final = st.lists(st.builds(p.MetricSpec, name=NAMES), max_size=3, unique_by=lambda one: one.name).map(tuple)
# The names of sets end with a letter that no name of a metric has.
_SETS: Final = st.lists(
    st.builds(p.EvaluationSet, name=NAMES.map(lambda name: name.replace(".", "") + "s"), data=NAMES),
    max_size=3,
    unique_by=lambda one: one.name,
).map(tuple)
_EVALUATION: Final = {"every": st.integers(1, p.MAX_TIMES), "best": NAMES, "metrics": _METRICS}
EVALUATION_PLANS: Final = st.builds(p.EvaluationPlan, data=st.just("") | NAMES, **_EVALUATION) | st.builds(
    p.EvaluationPlan, data=NAMES, sets=_SETS, **_EVALUATION
)


RETENTION_PLANS: Final = st.builds(
    p.RetentionPlan,
    keep_versions=st.none() | st.integers(100, p.MAX_TIMES),
    keep_updates=st.none() | st.integers(0, 90),
    keep_days=st.none() | st.floats(0.0, 1000.0),
)
PARTICIPANTS_PLANS: Final = st.builds(
    p.ParticipantsPlan,
    required=st.dictionaries(st.sampled_from(["tag:site=charit\u00e9", "tag:a=1"]), st.integers(1, 5))
    | st.dictionaries(st.sampled_from(["id:" + "ab" * 16, "id:" + "0" * 32]), st.just(1)),
    min_devices=st.integers(1, 9),
    min_examples=st.integers(0, p.MAX_COUNT),
    on_missing=st.sampled_from(["fail", "wait"]),
)
PRIVACY_PLANS: Final = st.builds(
    p.PrivacyPlan,
    mechanism=st.just("central"),
    clip_norm=st.floats(1e-6, 1e6),
    noise_multiplier=st.floats(0.1, 1000.0),
    epsilon=st.floats(0.01, 100.0),
    delta=st.floats(1e-12, 1e-6),
    population=NAMES,
    population_size=st.integers(1, p.MAX_COHORT),
    keep_seed_rounds=UINT32,
)
INT8_PLANS: Final = st.builds(p.Int8Plan, ranges=st.sampled_from(["export", "devices"]))


WEIGHTS_OF_PLANS = st.sampled_from([{}, {"weights": "uniform"}])
SITES = st.dictionaries(NAMES, st.integers(1, 1 << 20), min_size=1, max_size=3)
WEIGHTS = WEIGHTS_OF_PLANS | SITES.map(lambda sites: {"weights": "sites", "site_weights": sites})
"""The keys of the weights of an AggregationPlan; the first ones also with ``max_examples``."""
AGGREGATION_PLANS = st.builds(
    lambda weights, **keys: p.AggregationPlan(**keys, **weights),
    WEIGHTS,
    rule=NAMES,
    rule_options=OPTIONS,
    outer_optimizer=NAMES,
    outer_options=OPTIONS,
    max_staleness=st.integers(0, 1000),
    staleness_exponent=st.floats(0.0, 8.0),
) | st.builds(p.AggregationPlan, max_examples=st.integers(0, p.MAX_TIMES), weights=st.just("uniform"))


@st.composite
def plans(draw: st.DrawFn) -> p.Plan:
    """Draw any Plan, up to the limit of the headroom."""
    cohort = draw(cohorts())
    name = draw(st.sampled_from(sorted(p.CODEC_BITS)))
    room = p.HEADROOM_BITS - (p.CODEC_BITS[name] - 1)
    examples, staleness = draw(st.just(0) | UINT32), draw(st.sampled_from((0, 5)))
    least_steps = min(examples or p.LEAST_STEPS, p.LEAST_STEPS)
    if cohort.buffer * least_steps * p.STALE_UNIT > 1 << room:
        staleness = 0
    least_weight = cohort.buffer * least_steps * (p.STALE_UNIT if staleness else 1)
    shift = draw(st.integers(0, room - (least_weight - 1).bit_length()))
    flower = draw(FLOWER_PLANS)
    if draw(st.booleans()) and draw(st.booleans()):
        return p.Plan(
            name=draw(NAMES),
            cohort=cohort,
            training=draw(TRAININGS),
            codec=m.CodecSpec(name=name, max_shift=0),
            aggregation=p.AggregationPlan(max_examples=1),
            stop=p.StopPlan(),
            privacy=replace(draw(PRIVACY_PLANS), population_size=p.MAX_COHORT),
        )
    return p.Plan(
        name=draw(NAMES),
        cohort=cohort,
        training=draw(TRAININGS),
        schedule=draw(schedules(flower)),
        codec=m.CodecSpec(name=name, max_shift=shift),
        stages=() if staleness else tuple(draw(st.lists(STAGES, max_size=3, unique_by=lambda stage: stage.name))),
        statistics=tuple(draw(st.lists(DECLARED, max_size=3, unique_by=lambda each: each.name))),
        round=draw(st.just(p.RoundPlan()) | ROUND_PLANS),
        aggregation=p.AggregationPlan(
            max_examples=examples,
            rule_options=draw(OPTIONS),
            outer_options=draw(OPTIONS),
            max_staleness=staleness,
            **draw(WEIGHTS if examples == 0 else WEIGHTS_OF_PLANS),
        ),
        stop=p.StopPlan(
            max_rounds=draw(st.integers(1, 1 << 20)),
            patience=draw(st.integers(0, 100)),
            min_delta=draw(SECONDS),
            max_int8_drop=draw(st.floats(0.0, 100.0)),
        ),
        evaluation=draw(EVALUATION_PLANS),
        int8=draw(INT8_PLANS),
        retention=draw(RETENTION_PLANS),
        flower=flower,
    )


@st.composite
def tables(draw: st.DrawFn) -> TensorTable:
    """Draw small layouts of several blocks, including empty ones and scalars."""
    shapes = st.lists(st.integers(0, 3), max_size=3)
    return TensorTable.of(draw(st.dictionaries(TEXTS.filter(bool), shapes, max_size=4)))


def bits(value: float) -> bytes:
    """Return a float's bits: NaN equals itself, and -0.0 differs from 0.0."""
    return struct.pack("<d", value)
