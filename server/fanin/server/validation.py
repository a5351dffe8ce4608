"""Is an Update what its Assignment asked for? Everything that can be said before a byte of it is stored."""

import math
from dataclasses import dataclass
from typing import Final

from fanin.edge.codecs import codec_named
from fanin.edge.tensors import TensorTable
from fanin.protos.chunks import CHUNK_BYTES, short
from fanin.protos.errors import InvalidUpdate
from fanin.protos.messages import EVAL_LOSS, EXAMPLES, TRAIN_LOSS, UPDATE_FORMAT, CodecSpec, UpdateHeader
from fanin.protos.plans import WEIGHT_UNIT

_NO_MATCH: Final = "check in again"
_SIGNED: Final = frozenset({TRAIN_LOSS, EVAL_LOSS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What an Update of the open Round must say."""

    run_id: str
    round: int
    version_sha256: str
    codec: CodecSpec
    table: TensorTable


def check_header(header: UpdateHeader, expected: Expected) -> None:
    """Raise InvalidUpdate unless the header fits, in the order: format, Run, Round, Version, codec, shape, sizes."""
    if header.format != UPDATE_FORMAT:
        raise InvalidUpdate(f"update: got format {header.format}, expected {UPDATE_FORMAT}")
    if header.run_id != expected.run_id or header.round != expected.round:
        raise InvalidUpdate(
            f"update: got run {header.run_id!r} round {header.round}, expected run {expected.run_id!r} "
            f"round {expected.round}; {_NO_MATCH}"
        )
    if header.version_sha256 != expected.version_sha256:
        raise InvalidUpdate(
            f"update: trained from version {short(header.version_sha256)}, expected "
            f"{short(expected.version_sha256)}; {_NO_MATCH}"
        )
    if header.codec != expected.codec.name:
        raise InvalidUpdate(f"update: got codec {header.codec!r}, expected {expected.codec.name!r}")
    _check_shape(header, expected)
    examples = header.statistics.counts.get(EXAMPLES, 0)
    if examples < 1:
        raise InvalidUpdate(f"update: got {examples} examples, expected at least 1")
    for name, count in header.statistics.counts.items():
        # A negative one would be taken for another device's; only a loss may be below zero.
        if count < 0 and name not in _SIGNED:
            raise InvalidUpdate(f"update: got {name} = {count}, expected at least 0")


def weight_of(header: UpdateHeader, max_examples: int, staleness: int = 0) -> int:
    """The integer weight of an Update: its examples, capped, times round(256 / sqrt(1 + staleness)).

    The discount is FedBuff's (Nguyen et al. 2022, arXiv 2106.06639, section 5.2); a fresh Update weighs 256 an example
    and so exactly what FedAvg gives it. sqrt and division round as IEEE 754 says: the same integer everywhere.
    """
    examples = min(header.statistics.counts[EXAMPLES], max_examples)
    return examples * round(WEIGHT_UNIT / math.sqrt(1 + staleness))


def _check_shape(header: UpdateHeader, expected: Expected) -> None:
    num_blocks = len(expected.table.specs)
    if len(header.shifts) != num_blocks or any(shift > expected.codec.max_shift for shift in header.shifts):
        raise InvalidUpdate(
            f"update: got {len(header.shifts)} shifts up to {max(header.shifts, default=0)}, expected {num_blocks} "
            f"up to {expected.codec.max_shift}"
        )
    size = codec_named(expected.codec.name).payload_bytes(expected.table)
    if header.payload.size_bytes != size:
        raise InvalidUpdate(
            f"update: got {header.payload.size_bytes} bytes, expected {size} for {expected.table.num_values} values; "
            "the model has another shape"
        )
    sizes = [ref.size_bytes for ref in header.payload.chunks]
    if any(chunk != CHUNK_BYTES for chunk in sizes[:-1]) or any(chunk > CHUNK_BYTES for chunk in sizes[-1:]):
        raise InvalidUpdate(
            f"update: got chunks of {sorted(set(sizes))} bytes, expected all but the last {CHUNK_BYTES}"
        )
