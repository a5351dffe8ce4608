"""The comments of fleet.proto agree with the code: test vectors, constants and names."""

import hashlib
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from golden import frames, slots
from support.manifests import manifest
from support.values import BUNDLE, DELEGATION, DEVICE_KEY, PUBLISHER, RUN_KEY

from fanin.clients.textfiles import read_public_key, read_token
from fanin.edge.batch_sizes import with_batch
from fanin.edge.bundles import keys
from fanin.edge.bundles.bundle import MAX_MANIFEST_BYTES
from fanin.edge.bundles.manifest_json import KEYS, OPTIONAL_KEYS, dump_manifest
from fanin.edge.bundles.quantize import BIAS_ROOM, MAX_BIAS_CODE, MAX_CODE, MIN_SCALE
from fanin.edge.bundles.slots import SlotKind
from fanin.edge.codecs.fixed import CODECS, decoded
from fanin.edge.codecs.statistics import range_counts_of
from fanin.edge.lengths import Lengths
from fanin.edge.ranges import EDGES, NUM_BINS, counts
from fanin.edge.runtimes import evaluations
from fanin.edge.runtimes.graphs import CONTROL, PARAMETER_PREFIX, SETTING_PREFIX
from fanin.edge.signatures import DEVICE_SIGNATURES, RANDOM_PREFIXES
from fanin.edge.tensors import TensorTable
from fanin.protos import calls, chunks
from fanin.protos import messages as m
from fanin.protos.errors import STATUS, InvalidInput, kind_name
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
        f'["run",1,1,0,"{BUNDLE.manifest.sha256}", "{frames.VERSION.sha256}"]',
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
    (row,) = re.findall(r"([^.]*)\. There are no others in fanin\.", PROSE)
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


def test_the_prose_lists_every_kind_of_error_by_its_status() -> None:
    section = TEXT.split("// The kinds, by status.", 1)[1].split("// CONSTANTS", 1)[0]
    lines = re.findall(r"^//     (\w*) +((?:\w+(?:, |,$|$))+)", section, re.MULTILINE)
    listed: dict[str, set[str]] = {}
    for status, kinds in lines:
        listed.setdefault(status or next(reversed(listed)), set()).update(re.findall(r"\w+", kinds))
    known: dict[str, set[str]] = {}
    for kind, row in STATUS.items():
        known.setdefault(row.grpc, set()).add(kind_name(kind("")))
    assert listed == known
    assert set(known) - {"PERMISSION_DENIED", "INTERNAL"} <= set(
        re.findall(r"^//     ([A-Z_]+) ", TEXT.split("status   ")[1], re.MULTILINE)
    )


def test_the_prose_names_only_golden_files_that_exist() -> None:
    folder = frames.FOLDER.parent
    for name in re.findall(r"\b((?:fleet|control)-[a-z-]+\.hex)", PROSE):
        assert (frames.FOLDER / name).is_file(), name
    for name in ("manifest", "parameters", "update-payload", "call-signed"):
        assert (frames.FOLDER / f"{name}.hex").is_file() and re.search(rf"\b{name}\b", PROSE), name
    assert (folder / "slots.json").is_file() and "tests/golden/slots.json" in PROSE
    assert max(len(line) for path in frames.FOLDER.iterdir() for line in path.read_text().splitlines()) == 96


def test_the_prose_describes_the_files_that_a_person_installs(tmp_path: Path) -> None:
    """A key and a token with white space around them are read, and nothing else."""
    (tmp_path / "publisher.pub").write_text(f" {PUBLISHER.public}\n\n")
    assert read_public_key(tmp_path / "publisher.pub") == PUBLISHER.public
    (tmp_path / "device.token").write_text(" token \r\n")
    assert read_token(tmp_path / "device.token", "") == "token"
    (tmp_path / "publisher.key").write_text(f"{PUBLISHER.private_bytes().hex()}\n")
    assert keys.load_or_create_key(tmp_path / "publisher.key").public == PUBLISHER.public
    for wrong in (PUBLISHER.public.upper(), PUBLISHER.public[:-1], f"{PUBLISHER.public} x"):
        (tmp_path / "publisher.pub").write_text(wrong)
        with pytest.raises(InvalidInput):
            read_public_key(tmp_path / "publisher.pub")


def test_the_prose_lists_every_key_of_a_slot_and_of_a_derived_tensor() -> None:
    section = TEXT.split("// SLOTS\n", 1)[1].split("message BundleRef", 1)[0]
    case = json.loads(slots.FILE.read_text())
    for key in case[0]["slots"][0]:
        assert re.search(rf'^//     "{key}" ', section, re.MULTILINE), key
    folded = next(row["derived"]["folded"] for row in case if row["derived"]["folded"])
    for key in ("constants", "folded", *next(iter(folded.values()))):
        assert f'"{key}"' in section, key
    for kind in SlotKind:
        assert f'"{kind}"' in section and re.search(rf"^//     {kind} +\w+\d+ ", section, re.MULTILINE), kind
    for constant in (
        f"2^{int(math.log2(MIN_SCALE))}",
        f"2^{int(math.log2(BIAS_ROOM))}",
        f"{MAX_CODE}",
        f"{MAX_BIAS_CODE}",
    ):
        assert constant in section, constant


VECTOR = re.compile(
    rf"^// +({'|'.join(CODECS)})"
    r" +(-?\d+) +(\d+) {2,}((?:-?[\d.]+ )+) +(\d+) {2,}((?:-?\d+ )+) +([0-9a-f]+) +(\d+) +(\d+)$",
    re.MULTILINE,
)


def test_the_codecs_encode_the_vectors_of_the_prose() -> None:
    vectors = VECTOR.findall(TEXT)
    assert len(vectors) == 6
    for name, exponent, max_shift, change, shift, integers, payload, rounded, saturated in vectors:
        values = np.array(change.split(), np.float32)
        table = TensorTable.of({"a": (values.size,)})
        encoded = CODECS[name].encode(table, values, [int(exponent)], int(max_shift), np.random.default_rng(0))
        assert encoded.payload.hex() == payload
        assert [int(number) for number in decoded(CODECS[name], encoded.payload, values.size)] == [
            int(number) for number in integers.split()
        ]
        assert (encoded.shifts, encoded.num_rounded, encoded.num_saturated) == (
            (int(shift),),
            int(rounded),
            int(saturated),
        )


def test_the_vector_of_ranges_is_what_a_device_counts() -> None:
    lows, highs = (np.array(values, np.float32)[:, None] for values in ((-1, -1, -3), (0, 0.5, 1e30)))
    result = range_counts_of(counts(lows, highs), np.array([1]))
    cells, sizes = (" ".join(map(str, row)) for row in (result.cells, result.counts))
    assert f"have the cells {cells} with the counts {sizes}." in PROSE
    assert f"add 1 to the largest remainders until the sum is {m.RANGE_WEIGHT}" in PROSE
    assert f"(2 a + s) * {NUM_BINS} + b" in PROSE
    roots = ", ".join(str(float(edge)) for edge in EDGES[:4] * np.float32(2.0**16))
    assert f"({roots})[b mod 4]".replace("(1.0,", "(1,") in PROSE
    assert f"In rising order, at most {m.MAX_RANGE_CELLS}." in PROSE
