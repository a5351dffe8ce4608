"""The vectors of the codecs: the committed file, numpy 1, and an implementation of the words of ``fleet.proto``.

``encode`` uses integers and floats of Python alone.
"""

import json
import math
import subprocess
from typing import Any, Final

import pytest
from golden import codecs
from support.remote_runtime import PYTHON

from fanin.protos.plans import CODEC_BITS

HINT = "if this is meant, run `python tests/golden/codecs.py` and say in CHANGELOG.md that the bytes of Updates change"
CASES: Final = json.loads(codecs.FILE.read_text())
ON_A_DEVICE: Final = """
import json, sys
import numpy as np
from fanin.edge.codecs.fixed import CODECS
from fanin.edge.tensors import TensorTable
for case in json.load(open(sys.argv[1])):
    table = TensorTable.of({f"block{number}": (size,) for number, size in enumerate(case["sizes"])})
    rng, change = np.random.default_rng(int(sys.argv[2])), np.array(case["change"], np.float32)
    encoded = CODECS[case["codec"]].encode(table, change, case["grid"], case["max_shift"], rng)
    assert encoded.payload.hex() == case["payload"], case
    counts = [encoded.shifts, encoded.num_rounded, encoded.num_saturated]
    assert counts == [tuple(case["shifts"]), case["rounded"], case["saturated"]], case
"""


def test_the_file_is_what_the_code_encodes() -> None:
    assert codecs.FILE.read_text() == codecs.text(), HINT
    assert {case["codec"] for case in CASES} == set(CODEC_BITS)


@pytest.mark.heavy
def test_a_device_with_numpy_1_encodes_the_same() -> None:
    command = [PYTHON, "-W", "ignore", "-c", ON_A_DEVICE, codecs.FILE, str(codecs.SEED)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


def encode(case: dict[str, Any]) -> dict[str, Any]:
    bits = CODEC_BITS[case["codec"]]
    largest, first = (1 << (bits - 1)) - 1, 0
    shifts, values, num_rounded, num_saturated = [], [], 0, 0
    for size, exponent in zip(case["sizes"], case["grid"], strict=True):
        block = case["change"][first : first + size]
        draws = case["draws"][first : first + size] or [None] * size
        first += size
        shift = 0
        while shift < case["max_shift"] and any(abs(x) / 2.0 ** (exponent + shift) > largest for x in block):
            shift += 1
        shifts.append(shift)
        for value, draw in zip(block, draws, strict=True):
            scaled = value / 2.0 ** (exponent + shift)
            q = round(scaled)
            if draw is not None:
                below = math.floor(abs(scaled))
                q = int(math.copysign(below + (draw < abs(scaled) - below), scaled))
            num_rounded += q != scaled
            num_saturated += abs(q) > largest
            values.append(max(-largest, min(largest, q)))
    number = sum((q % (1 << bits)) << (bits * place) for place, q in enumerate(values))
    payload = number.to_bytes(-(-bits * len(values) // 8), "little").hex()
    return {"shifts": shifts, "values": values, "payload": payload, "rounded": num_rounded, "saturated": num_saturated}


@pytest.mark.parametrize("case", CASES, ids=[f"{case['codec']}, {case['case']}" for case in CASES])
def test_the_words_of_the_proto_file_give_the_vectors(case: dict[str, Any]) -> None:
    assert case | encode(case) == case
