"""The comments of fleet.proto agree with the code: test vectors, constants and names."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from golden import frames
from support.manifests import manifest
from support.values import BUNDLE, DELEGATION, DEVICE_KEY, PUBLISHER, RUN_KEY

from fanin.edge.batch_sizes import with_batch
from fanin.edge.bundles import keys
from fanin.edge.bundles.bundle import MAX_MANIFEST_BYTES
from fanin.edge.bundles.manifest_json import KEYS, OPTIONAL_KEYS, dump_manifest
from fanin.edge.codecs.fixed import CODECS
from fanin.edge.lengths import Lengths
from fanin.edge.runtimes import evaluations
from fanin.edge.runtimes.graphs import CONTROL, PARAMETER_PREFIX, SETTING_PREFIX
from fanin.edge.signatures import DEVICE_SIGNATURES, RANDOM_PREFIXES
from fanin.edge.tensors import TensorTable
from fanin.protos import calls, chunks
from fanin.protos import messages as m
from fanin.server.access.replays import NUM_TIMES

TEXT = (Path(__file__).parents[2] / "protos" / "fanin" / "v1" / "fleet.proto").read_text()
PROSE = re.sub(r"\s+", " ", re.sub(r"^\s*//", " ", TEXT, flags=re.MULTILINE))
"""All comments as one line."""
RAW = frames.raw()


def lines(data: bytes, chars: int) -> str:
    """Return the data in hexadecimal, with one line break after ``chars`` characters."""
    return f"{data.hex()[:chars]} {data.hex()[chars:]}"


def test_the_keys_of_the_vectors_are_those_of_the_golden_frames() -> None:
    for key, first in ((PUBLISHER, 0x00), (RUN_KEY, 0x20), (DEVICE_KEY, 0x40)):
        assert key.private_bytes() == bytes(range(first, first + 32))


@pytest.mark.parametrize(
    "vector",
    [
        f"fanin device call v1 {RAW['call-signed'].decode()}".replace("\n", " "),
        lines(RAW["call-signature"], 64),
        lines(RAW["delegation-signature"], 64),
        lines(RAW["version-signature"], 64),
        lines(RAW["parameters"], 108),
        f'["run",1,0,"{BUNDLE.manifest.sha256}", "{frames.VERSION.sha256}"]',
        f"BUNDLE is {BUNDLE.manifest.sha256}.",
        f"whose digest is {hashlib.sha256(RAW['parameters']).hexdigest()}.",
    ],
    ids=["call", "call signature", "delegation", "version signature", "parameters", "version", "bundle", "digest"],
)
def test_the_prose_has_the_golden_vectors(vector: str) -> None:
    assert vector in PROSE
    assert DELEGATION.signature == RAW["delegation-signature"]


@pytest.mark.parametrize(
    "text",
    [
        *(
            f'"{context}"'
            for context in (
                keys.BUNDLE_CONTEXT,
                keys.VERSION_CONTEXT,
                keys.DELEGATION_CONTEXT,
                keys.CALL_CONTEXT,
            )
        ),
        *(calls.DEVICE, calls.TIME, calls.SIGNATURE, calls.ERROR, calls.SERVER_TIME),
        f"protocol number {m.PROTOCOL} ",
        f"format of an Update {m.UPDATE_FORMAT} ",
        f"1 MiB = {chunks.CHUNK_BYTES} bytes",
        f"accepts up to {chunks.MAX_CHUNK_BYTES >> 20} MiB",
        f"manifest at most {MAX_MANIFEST_BYTES >> 20} MiB",
        f"at most {calls.MAX_LATE_S / 60:.0f} minutes behind its own clock and at most {calls.MAX_EARLY_S:.0f} seconds",
        f"behind the last {NUM_TIMES} ones",
        f"at most {chunks.MAX_MORE_CHUNKS}.",
        f"at most {m.MAX_CAPABILITIES} entries, an entry at most 128 printable",
        f"The list of stages has at most {m.MAX_KNOWN_STAGES} entries.",
        f"There are at most {m.MAX_COUNTS}.",
    ],
)
def test_the_prose_has_the_constants(text: str) -> None:
    assert text in PROSE


def test_the_prose_lists_every_key_of_the_manifest_and_every_kind_of_input() -> None:
    form = TEXT.split("The manifest is one JSON object", 1)[1].split("A graph is a file", 1)[0]
    own = re.findall(r'^//     "(\w+)"(?:, "(\w+)")? ', form, re.MULTILINE)
    assert sorted(name for pair in own for name in pair if name) == sorted(f"{KEYS} {OPTIONAL_KEYS}".split())
    row = json.loads(dump_manifest(manifest()))
    assert set(row) <= set(KEYS.split())
    for key in (*row["lengths"], *next(iter(row["signatures"].values()))):
        assert f'"{key}"' in form, key
    lengths = Lengths(sizes=(16, 32), axes={"x": 1})
    for name in (*(lengths.signature(kind, 16) for kind in DEVICE_SIGNATURES), with_batch("train@16", 8)):
        assert f'"{name}"' in form, name
    for prefix in (*RANDOM_PREFIXES, f"{CONTROL}.", SETTING_PREFIX, PARAMETER_PREFIX):
        assert f"{prefix}<" in PROSE, prefix


def test_the_prose_lists_every_codec_and_every_statistic() -> None:
    (row,) = re.findall(r"([^.]*)\. There are no others\.", PROSE)
    assert set(re.findall(r'"(\w+)" \(', row)) == set(CODECS)
    squares = (evaluations.SQUARES_FLOAT, evaluations.SQUARES_INT8, evaluations.SQUARES_WANTED)
    names = [
        m.EXAMPLES,
        m.TRAINED,
        m.TRAIN_LOSS,
        m.ROUNDED,
        m.SATURATED,
        m.EVAL_EXAMPLES,
        m.EVAL_LOSS,
        m.EVAL_PREDICTIONS,
    ]
    names += [m.EVAL_CORRECT_FLOAT, m.EVAL_CORRECT_INT8, m.EVAL_AGREE, *squares]
    names += [name + evaluations.REST for name in squares]
    section = PROSE.split("Facts about the data.", 1)[1].split("message Statistics", 1)[0]
    assert set(re.findall(r"\b(?:examples|rounded|saturated|\w+_\w+)\b", section)) == set(names)


VECTOR = re.compile(
    r"^// +(fixed32|int8) +(-?\d+) +(\d+) {2,}((?:-?[\d.]+ )+) +(\d+) {2,}((?:-?\d+ )+) +([0-9a-f]+) +(\d+) +(\d+)$",
    re.MULTILINE,
)


def test_the_codecs_encode_the_vectors_of_the_prose() -> None:
    vectors = VECTOR.findall(TEXT)
    assert len(vectors) == 3
    for name, exponent, max_shift, change, shift, integers, payload, rounded, saturated in vectors:
        values = np.array(change.split(), np.float32)
        table = TensorTable.of({"a": (values.size,)})
        encoded = CODECS[name].encode(table, values, [int(exponent)], int(max_shift), np.random.default_rng(0))
        assert encoded.payload.hex() == payload
        assert [int(number) for number in CODECS[name].decode(memoryview(encoded.payload))] == [
            int(number) for number in integers.split()
        ]
        assert (encoded.shifts, encoded.num_rounded, encoded.num_saturated) == (
            (int(shift),),
            int(rounded),
            int(saturated),
        )
