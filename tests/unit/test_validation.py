"""An Update is held against its Assignment before a byte of it is stored: each check has an Update that it refuses."""

from dataclasses import replace
from types import MappingProxyType

import pytest
from support.errors import raises
from support.values import TABLE, assignment, update

from fanin.edge.tensors import TensorTable
from fanin.protos import messages as m
from fanin.protos.chunks import CHUNK_BYTES, Artifact, ChunkRef, artifact_of
from fanin.protos.errors import InvalidUpdate
from fanin.server.validation import Expected, check_header, weight_of

WORK = assignment()
HEADER, _ = update(WORK)
EXPECTED = Expected(run_id="run", round=1, version_sha256=WORK.version.sha256, codec=WORK.codec, table=TABLE)
SHA = WORK.version.sha256


def with_counts(**counts: int) -> m.UpdateHeader:
    statistics = m.Statistics(counts=MappingProxyType({m.EXAMPLES: 10} | counts))
    return replace(HEADER, statistics=statistics)


def test_a_good_update_passes() -> None:
    check_header(HEADER, EXPECTED)
    check_header(replace(HEADER, shifts=(2, 0, 1)), EXPECTED)
    check_header(with_counts(train_loss_q16=-5, eval_loss_q16=-5, saturated=0), EXPECTED)


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
    (with_counts(examples=0), "update: got 0 examples, expected at least 1"),
    (with_counts(examples=-1), "update: got -1 examples, expected at least 1"),
    (
        replace(HEADER, statistics=m.Statistics(counts={})),
        "update: got 0 examples, expected at least 1",
    ),
    (with_counts(saturated=-1), "update: got saturated = -1, expected at least 0"),
    (with_counts(eval_examples=-1), "update: got eval_examples = -1, expected at least 0"),
    (with_counts(others=-7), "update: got others = -7, expected at least 0"),
]


@pytest.mark.parametrize(("header", "text"), WRONG, ids=[text for _, text in WRONG])
def test_each_mismatch_has_its_sentence(header: m.UpdateHeader, text: str) -> None:
    with raises(InvalidUpdate, text):
        check_header(header, EXPECTED)


@pytest.mark.parametrize("sizes", [(CHUNK_BYTES - 4, 8), (4, CHUNK_BYTES), (CHUNK_BYTES + 4,)])
def test_chunks_are_cut_in_one_way_only(sizes: tuple[int, ...]) -> None:
    table = TensorTable.of({"a": (CHUNK_BYTES // 4 + 1,)})
    chunks = tuple(ChunkRef(sha256="0" * 64, size_bytes=size) for size in sizes)
    header = replace(HEADER, shifts=(0,), payload=Artifact(sha256="0" * 64, size_bytes=CHUNK_BYTES + 4, chunks=chunks))
    text = f"update: got chunks of {sorted(sizes)} bytes, expected all but the last {CHUNK_BYTES}"
    with raises(InvalidUpdate, text):
        check_header(header, replace(EXPECTED, table=table))


def test_a_model_without_values_has_an_update_without_chunks() -> None:
    empty = replace(HEADER, shifts=(), payload=artifact_of(b""))
    check_header(empty, replace(EXPECTED, table=TensorTable.of({})))


@pytest.mark.parametrize(("examples", "weight"), [(1, 256), (10, 2560), (100, 25600), (101, 25600), (1 << 40, 25600)])
def test_examples_weigh_256_each_up_to_the_cap(examples: int, weight: int) -> None:
    assert weight_of(with_counts(examples=examples), 100) == weight


@pytest.mark.parametrize(("staleness", "weight"), [(0, 256), (1, 181), (2, 148), (3, 128), (8, 85), (1000, 8)])
def test_a_stale_update_weighs_less_by_the_root_of_its_age(staleness: int, weight: int) -> None:
    assert weight_of(with_counts(examples=7), 100, staleness) == 7 * weight
