"""The vectors of ``topk``: the committed file, numpy 1, and an implementation of the words of ``fleet.proto``.

``encode`` uses integers, floats and strings of Python alone.
"""

import json
import math
import subprocess
from typing import Any, Final

import pytest
from golden import sparse
from support.remote_runtime import PYTHON

HINT = "if this is meant, run `python tests/golden/sparse.py` and say in CHANGELOG.md that the bytes of Updates change"
CASES: Final = json.loads(sparse.FILE.read_text())
ON_A_DEVICE: Final = """
import json, sys
import numpy as np
from fanin.edge.codecs.sparse import topk
from fanin.edge.tensors import TensorTable
for case in json.load(open(sys.argv[1])):
    table = TensorTable.of({f"block{number}": (size,) for number, size in enumerate(case["sizes"])})
    rng, change = np.random.default_rng(int(sys.argv[2])), np.array(case["change"], np.float32)
    codec = topk(fraction=case["fraction"], bits=case["bits"])
    encoded = codec.encode(table, change, case["grid"], case["max_shift"], rng)
    assert encoded.payload.hex() == case["payload"], case
    values = codec.decode_slice(memoryview(encoded.payload), change.size)
    assert values[case["indices"]].tolist() == case["values"], case
"""


def test_the_file_is_what_the_code_encodes() -> None:
    assert sparse.FILE.read_text() == sparse.text(), HINT
    assert {case["bits"] for case in CASES} == {2, 4, 8}


@pytest.mark.heavy
def test_a_device_with_numpy_1_encodes_the_same() -> None:
    command = [PYTHON, "-W", "ignore", "-c", ON_A_DEVICE, sparse.FILE, str(sparse.SEED)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


def encode(case: dict[str, Any]) -> tuple[list[int], list[int], str]:
    """Return the shifts, the sent values and the payload of a case, whose values are one slice."""
    change, bits, largest = case["change"], case["bits"], (1 << (case["bits"] - 1)) - 1
    num = math.ceil(case["fraction"] * len(change))
    indices, draws = sparse.plain_indices(change, num), iter(case["draws"])
    shifts, values, first = [], [], 0
    for size, exponent in zip(case["sizes"], case["grid"], strict=True):
        block = [change[index] for index in indices if first <= index < first + size]
        nonzero, shift = sorted(abs(x) for x in block if x), 0
        if bits == 8:
            while shift < case["max_shift"] and any(x > largest * 2.0 ** (exponent + shift) for x in nonzero):
                shift += 1
        elif nonzero:
            median, steps = nonzero[len(nonzero) // 2], {4: 2, 2: 1}[bits]
            while shift < case["max_shift"] and steps * 2.0 ** (exponent + shift + 1) <= median:
                shift += 1
        for x in block:
            m, u = abs(x) / 2.0 ** (exponent + shift), next(draws)
            q = min(math.floor(m) + (u < m - math.floor(m)) if m >= 1 else int(m > 0.5), largest)
            values.append(q if x > 0 else -q)
        shifts.append(shift)
        first += size
    low = int(math.log2(len(change) // num))
    text, before = "", 0
    for index in indices:
        text, before = text + "0" * ((index >> low) - before) + "1", index >> low
    text = text.ljust(num + (len(change) - 1 >> low), "0")
    for numbers, width in ((indices, low), (values, bits)):
        text += "".join(str(number >> place & 1) for number in numbers for place in range(width))
    text = text.ljust(-(-len(text) // 8) * 8, "0")
    return shifts, values, bytes(int(text[at : at + 8][::-1], 2) for at in range(0, len(text), 8)).hex()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['fraction']} {case['bits']} {case['case']}")
def test_the_vectors_follow_the_words_of_the_protocol(case: dict[str, Any]) -> None:
    assert encode(case) == (case["shifts"], case["values"], case["payload"])
