"""Updates are validated against their Assignment before any byte is stored: each check refuses one of the Updates."""

from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import raises
from support.manifests import manifest
from support.values import TABLE, assignment, plan, update

from fanin.edge.codecs.statistics import declared, fitted, labels_of
from fanin.edge.codecs.vector import Weighting
from fanin.edge.runtimes.evaluations import counts_of, quality_of
from fanin.edge.runtimes.quality import Quality
from fanin.edge.signatures import Port
from fanin.edge.tensors import TensorTable
from fanin.protos import messages as m
from fanin.protos.chunks import CHUNK_BYTES, Artifact, ChunkRef, artifact_of
from fanin.protos.errors import InvalidUpdate
from fanin.protos.plans import AggregationPlan
from fanin.server.aggregation.weights import weights_of
from fanin.server.runs.validation import Expected, check_header

WORK = assignment()
HEADER, _ = update(WORK)
STATISTIC = m.Statistic(name="words", unit="words", bound=50)
MAX_EXAMPLES = 4096
EXPECTED = Expected(
    run_id="run",
    round=1,
    version_sha256=WORK.version.sha256,
    codec=WORK.codec,
    payload_bytes=4 * TABLE.num_values,
    table=TABLE,
    num_labels=2,
    statistics=declared([STATISTIC], max_examples=MAX_EXAMPLES, num_labels=2, num_values=TABLE.num_values),
)
OF_VALUES = replace(
    EXPECTED,
    num_labels=0,
    statistics=declared([STATISTIC], max_examples=MAX_EXAMPLES, num_labels=0, num_values=TABLE.num_values),
)
EVALUATED = {m.EVAL_EXAMPLES: 5, m.EVAL_PREDICTIONS: 10, m.EVAL_LOSS: -3}
NAMES = [STATISTIC.name, m.EXAMPLES, m.TRAINED, m.TRAIN_LOSS, m.ROUNDED, m.SATURATED, m.EVAL_EXAMPLES, m.EVAL_LOSS]
NAMES_OF_CLASSES = sorted([*NAMES, m.EVAL_PREDICTIONS, m.EVAL_CORRECT_FLOAT, m.EVAL_CORRECT_INT8, m.EVAL_AGREE])
NO_LABELS = {m.EVAL_CORRECT_FLOAT: 0, m.EVAL_CORRECT_INT8: 0, m.EVAL_AGREE: 0}
SHA = WORK.version.sha256


def with_counts(**counts: int) -> m.UpdateHeader:
    statistics = m.Statistics(counts=MappingProxyType({m.EXAMPLES: 10} | counts))
    return replace(HEADER, statistics=statistics)


def test_a_good_update_passes() -> None:
    check_header(HEADER, EXPECTED)
    check_header(replace(HEADER, shifts=(2, 0, 1)), EXPECTED)
    check_header(with_counts(train_loss_q16=-5, eval_loss_q16=0, saturated=0, rounded=11), EXPECTED)
    check_header(replace(with_counts(saturated=6), shifts=(2, 0, 1)), EXPECTED)
    check_header(replace(with_counts(saturated=11), shifts=(2, 2, 2)), EXPECTED)
    check_header(with_counts(examples=MAX_EXAMPLES, words=-50), EXPECTED)
    check_header(with_counts(examples=MAX_EXAMPLES, trained_examples=1 << 40), EXPECTED)
    check_header(with_counts(eval_examples=5, eval_loss_q16=-3), EXPECTED)


@pytest.mark.parametrize(
    ("in_float", "in_int8", "agree"), [(0, 0, 10), (10, 10, 10), (7, 7, 4), (10, 0, 0), (6, 8, 8), (0, 0, 0)]
)
def test_every_evaluation_that_some_data_has_passes(in_float: int, in_int8: int, agree: int) -> None:
    counts = {m.EVAL_CORRECT_FLOAT: in_float, m.EVAL_CORRECT_INT8: in_int8, m.EVAL_AGREE: agree}
    check_header(with_counts(**EVALUATED, **counts), EXPECTED)


@pytest.mark.parametrize("num_classes", [0, 3])
def test_a_measured_quality_passes(num_classes: int) -> None:
    quality = Quality(
        num_examples=4,
        loss_sum=1.5,
        num_predictions=8 if num_classes else 0,
        num_correct_float=5 if num_classes else 0,
        num_agreeing=3 if num_classes else 0,
        squares_float=1e-9,
        squares_int8=float("nan"),
        squares_wanted=1e30,
    )
    for counts in (counts_of(quality, num_classes), counts_of(Quality(num_examples=0, loss_sum=0.0), num_classes)):
        check_header(with_counts(**counts), EXPECTED if num_classes else OF_VALUES)


WRONG = [
    (replace(HEADER, format=2), "update: got format 2, expected 1"),
    (
        replace(HEADER, run_id="other"),
        "update: got run 'other' round 1, expected run 'run' round 1; check in again",
    ),
    (replace(HEADER, round=2), "update: got run 'run' round 2, expected run 'run' round 1; check in again"),
    (
        replace(HEADER, version_sha256="0" * 64),
        f"update: trained from version 00000000.., expected {SHA[:8]}..; check in again",
    ),
    (replace(HEADER, codec="int4"), "update: got codec 'int4', expected 'fixed32'"),
    (replace(HEADER, shifts=(0, 0)), "update: got 2 shifts up to 0, expected 3 up to 2"),
    (replace(HEADER, shifts=()), "update: got 0 shifts up to 0, expected 3 up to 2"),
    (replace(HEADER, shifts=(0, 3, 0)), "update: got 3 shifts up to 3, expected 3 up to 2"),
    (
        replace(HEADER, payload=artifact_of(bytes(40))),
        "update: got 40 bytes, expected 44 for 11 values; the model has another shape",
    ),
    (
        with_counts(examples=-1),
        "update: got examples = -1, expected at least 1; check in again when this device has examples",
    ),
    (
        replace(HEADER, statistics=m.Statistics(counts={})),
        "update: got examples = none, expected at least 1; check in again when this device has examples",
    ),
    (
        with_counts(examples=0, trained_examples=0),
        "update: got examples = 0, expected at least 1; check in again when this device has examples",
    ),
    (
        with_counts(trained_examples=11),
        (
            "update: got examples = 10 and trained_examples = 11, expected examples = 11: the smaller one of "
            "trained_examples and the bound 4096"
        ),
    ),
    (
        with_counts(examples=MAX_EXAMPLES, trained_examples=MAX_EXAMPLES - 1),
        (
            "update: got examples = 4096 and trained_examples = 4095, expected examples = 4095: the smaller one of "
            "trained_examples and the bound 4096"
        ),
    ),
    (with_counts(saturated=-1), "update: got saturated = -1, expected at least 0"),
    (with_counts(eval_examples=-1), "update: got eval_examples = -1, expected at least 0"),
    (with_counts(others=7), f"update: got statistics ['others'], expected only {NAMES_OF_CLASSES}"),
    (
        with_counts(eval_squares_int8=7),
        f"update: got statistics ['eval_squares_int8'], expected only {NAMES_OF_CLASSES}",
    ),
    (
        with_counts(examples=MAX_EXAMPLES + 1),
        f"update: got examples = {MAX_EXAMPLES + 1}, expected at most {MAX_EXAMPLES}",
    ),
    (
        with_counts(eval_examples=MAX_EXAMPLES + 1),
        f"update: got eval_examples = {MAX_EXAMPLES + 1}, expected at most {MAX_EXAMPLES}",
    ),
    (
        replace(HEADER, payload=replace(HEADER.payload, sha256="0" * 64)),
        f"update: got the digest {'0' * 64}, expected {HEADER.payload.sha256} of its only chunk",
    ),
    (with_counts(words=51), "update: got words = 51, expected -50 to 50"),
    (with_counts(words=-51), "update: got words = -51, expected -50 to 50"),
    (with_counts(rounded=12), "update: got rounded = 12, expected at most 11"),
    (with_counts(saturated=12), "update: got saturated = 12, expected at most 11"),
    (
        replace(with_counts(saturated=7), shifts=(2, 0, 1)),
        "update: got saturated = 7, expected at most 6: the values of the blocks with the largest shift, 2",
    ),
    (
        replace(with_counts(saturated=1), shifts=(0, 1, 0)),
        "update: got saturated = 1, expected at most 0: the values of the blocks with the largest shift, 2",
    ),
    (with_counts(eval_loss_q16=-1), "update: got eval_loss_q16 = -1 and eval_examples = 0, expected 0"),
    (with_counts(eval_correct_int8=1), "update: got eval_correct_int8 = 1 and eval_examples = 0, expected 0"),
    (
        with_counts(eval_examples=5, eval_predictions=11, **NO_LABELS),
        "update: got eval_predictions = 11 and eval_examples = 5, expected at most 2 an example",
    ),
    (
        with_counts(**EVALUATED | NO_LABELS | {"eval_correct_float": 11}),
        "update: got eval_correct_float = 11, expected at most eval_predictions = 10",
    ),
    (
        with_counts(**EVALUATED | NO_LABELS | {"eval_correct_int8": 11}),
        "update: got eval_correct_int8 = 11, expected at most eval_predictions = 10",
    ),
    (
        with_counts(**EVALUATED | NO_LABELS | {"eval_agree": 11}),
        "update: got eval_agree = 11, expected at most eval_predictions = 10",
    ),
    (
        with_counts(**EVALUATED, eval_correct_float=9),
        (
            "update: got eval_predictions, eval_correct_float without eval_correct_int8, eval_agree, expected all of "
            "them or none: without an int8 model, report eval_loss_q16 alone"
        ),
    ),
    (
        with_counts(**EVALUATED, eval_correct_float=9, eval_correct_int8=0, eval_agree=2),
        "update: got eval_agree = 2, expected 0 to 1 with eval_correct_float = 9 and eval_correct_int8 = 0 of 10",
    ),
    (
        with_counts(**EVALUATED, eval_correct_float=9, eval_correct_int8=8, eval_agree=6),
        "update: got eval_agree = 6, expected 7 to 9 with eval_correct_float = 9 and eval_correct_int8 = 8 of 10",
    ),
]


@pytest.mark.parametrize(("header", "text"), WRONG, ids=[text for _, text in WRONG])
def test_each_mismatch_has_its_error(header: m.UpdateHeader, text: str) -> None:
    with raises(InvalidUpdate, text):
        check_header(header, EXPECTED)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("name", "of"), [(m.TRAIN_LOSS, m.EXAMPLES), (m.EVAL_LOSS, m.EVAL_EXAMPLES)])
def test_the_loss_of_a_classifier_is_bounded_by_its_examples(name: str, of: str, sign: int) -> None:
    largest = 3 * m.MAX_LOSS * m.LOSS_UNIT
    check_header(with_counts(**{of: 3, name: sign * largest}), EXPECTED)
    wrong = sign * (largest + 1)
    with raises(InvalidUpdate, f"update: got {name} = {wrong} and {of} = 3, expected {-largest} to {largest}"):
        check_header(with_counts(**{of: 3, name: wrong}), EXPECTED)
    with pytest.raises(InvalidUpdate, match=f"update: got {name} = {sign << 40}"):
        check_header(with_counts(**{of: 1, name: sign << 40}), EXPECTED)
    # The squared error of one example may be as large as a count.
    check_header(with_counts(**{of: 1, name: sign << 40}), OF_VALUES)


def test_a_model_of_values_has_no_labels() -> None:
    squares = [f"eval_squares_{form}{part}" for form in ("float", "int8", "wanted") for part in ("", "_q40")]
    names = sorted([*NAMES, *squares])
    with raises(InvalidUpdate, f"update: got statistics ['eval_agree'], expected only {names}"):
        check_header(with_counts(eval_agree=0), OF_VALUES)
    with raises(InvalidUpdate, "update: got eval_squares_int8_q40 = 1 and eval_examples = 0, expected 0"):
        check_header(with_counts(eval_squares_int8_q40=1), OF_VALUES)
    # The error of int8 alone would be a fall of the error by 100 %, that of float alone a rise.
    text = "got eval_squares_float, eval_squares_wanted without eval_squares_int8, expected all of them or none"
    with pytest.raises(InvalidUpdate, match=text):
        check_header(with_counts(eval_examples=1, eval_squares_float=1, eval_squares_wanted=1), OF_VALUES)
    with raises(InvalidUpdate, "update: got eval_squares_int8_q40 without eval_squares_int8, expected both or none"):
        check_header(with_counts(eval_examples=1, eval_squares_int8_q40=1), OF_VALUES)


@pytest.mark.parametrize(
    ("num_classes", "shape", "num_labels"), [(0, (4, 3), 0), (3, (4,), 1), (3, (4, 7), 7), (3, None, 1)]
)
def test_an_example_has_as_many_labels_as_the_bundles_targets(
    num_classes: int, shape: tuple[int, ...] | None, num_labels: int
) -> None:
    ports = () if shape is None else (Port(name="y", dtype="int32", shape=shape),)
    model = manifest()
    evaluate = replace(model.signatures["evaluate"], inputs=ports)
    signatures = MappingProxyType(dict(model.signatures) | {"evaluate": evaluate})
    assert labels_of(replace(model, num_classes=num_classes, signatures=signatures)) == num_labels


def test_a_device_scales_sums_over_more_examples_than_count() -> None:
    counts = {m.EXAMPLES: 30, m.TRAIN_LOSS: -31, m.ROUNDED: 11, **EVALUATED, m.EVAL_CORRECT_FLOAT: 9}
    statistics = declared([], max_examples=30, num_labels=2, num_values=11)
    assert fitted(counts, statistics) == counts | {m.TRAINED: 30}
    assert fitted(counts, declared([], max_examples=4, num_labels=2, num_values=11)) == {
        m.EXAMPLES: 4,
        m.TRAINED: 30,
        m.TRAIN_LOSS: -5,
        m.ROUNDED: 11,
        m.EVAL_EXAMPLES: 4,
        m.EVAL_PREDICTIONS: 8,
        m.EVAL_LOSS: -3,
        m.EVAL_CORRECT_FLOAT: 7,
    }


def test_a_device_scales_squared_errors_with_their_fractions() -> None:
    counts = counts_of(Quality(num_examples=8, loss_sum=0.0, squares_float=4.0, squares_int8=1e-9), 0)
    quality = quality_of(fitted(counts, declared([], max_examples=2, num_labels=0, num_values=11)))
    assert (quality.num_examples, quality.squares_float) == (2, 1.0)
    assert quality.squares_int8 == pytest.approx(2.5e-10, abs=2.0**-40)


SIGNED = st.sampled_from([m.TRAIN_LOSS, m.EVAL_LOSS, STATISTIC.name])
COUNTS = st.builds(
    lambda counts, signed: counts | signed | {m.EXAMPLES: max(counts.get(m.EXAMPLES, 1), 1)},
    st.dictionaries(st.sampled_from([*NAMES_OF_CLASSES, "unknown"]), st.integers(0, 1 << 45), max_size=12),
    st.dictionaries(SIGNED, st.integers(-(1 << 45), 1 << 45)),
)


@given(COUNTS, st.integers(1, 5000), st.integers(0, 3))
def test_fitted_statistics_are_within_all_bounds(counts: dict[str, int], max_examples: int, num_labels: int) -> None:
    statistics = declared([STATISTIC], max_examples=max_examples, num_labels=num_labels, num_values=11)
    bounds = {each.name: each.bound for each in statistics}
    fitted_counts = fitted(counts, statistics)
    assert set(fitted_counts) == {*counts, m.TRAINED} & set(bounds)
    assert fitted_counts[m.EXAMPLES] == min(fitted_counts[m.TRAINED], max_examples)
    assert all(abs(count) <= bounds[name] for name, count in fitted_counts.items())


@pytest.mark.parametrize("sizes", [(CHUNK_BYTES - 4, 8), (4, CHUNK_BYTES), (CHUNK_BYTES + 4,)])
def test_chunks_are_cut_in_one_way_only(sizes: tuple[int, ...]) -> None:
    table = TensorTable.of({"a": (CHUNK_BYTES // 4 + 1,)})
    chunks = tuple(ChunkRef(sha256="0" * 64, size_bytes=size) for size in sizes)
    header = replace(HEADER, shifts=(0,), payload=Artifact(sha256="0" * 64, size_bytes=CHUNK_BYTES + 4, chunks=chunks))
    text = f"update: got chunks of {sorted(sizes)} bytes, expected all but the last {CHUNK_BYTES}"
    with raises(InvalidUpdate, text):
        check_header(header, replace(EXPECTED, table=table, payload_bytes=4 * table.num_values))


def test_a_model_without_values_has_an_update_without_chunks() -> None:
    empty = replace(HEADER, shifts=(), payload=artifact_of(b""))
    check_header(empty, replace(EXPECTED, table=TensorTable.of({}), payload_bytes=0))


@pytest.mark.parametrize(("examples", "weight"), [(1, 1), (10, 10), (100, 100), (101, 100), (1 << 40, 100)])
def test_an_example_weighs_one_up_to_the_cap(examples: int, weight: int) -> None:
    weights = weights_of(with_counts(examples=examples), plan(max_examples=100))
    assert weights == {Weighting.EXAMPLES: weight, Weighting.ONE: 1}


@pytest.mark.parametrize(("staleness", "weight"), [(0, 256), (1, 181), (2, 148), (3, 128), (8, 85), (1000, 8)])
def test_a_stale_update_weighs_less_by_the_root_of_its_age(staleness: int, weight: int) -> None:
    stale = replace(plan(), aggregation=AggregationPlan(max_staleness=1000))
    weights = weights_of(with_counts(examples=7), stale, staleness=staleness)
    assert weights == {Weighting.EXAMPLES: 7 * weight, Weighting.ONE: weight}
