"""Masks have the golden bytes on a device with numpy 1, whose arithmetic of scalars differs from that of numpy 2."""

import os
import subprocess
from pathlib import Path

import pytest
from support.remote_runtime import PYTHON, ROOT, SOURCES

CODE = """
import json, sys
from pathlib import Path
import numpy as np
from fanin.edge.masking.keystream import MaskKey, masked_payload
from fanin.edge.masking.graph import graph_of
from fanin.edge.masking.parameters import Assumptions, Threat, parameters
from fanin.edge.rings import Ring, RingVector
folder = Path(sys.argv[1])
rows = json.loads((folder / "masks.json").read_text())
keys = [MaskKey(bytes.fromhex(rows["added"])), MaskKey(bytes.fromhex(rows["subtracted"]), is_negative=True)]
for ring in rows["rings"]:
    layout = RingVector(ring=Ring(bits=ring["ring_bits"]), num_values=11, num_tail=2)
    payload = b"".join(masked_payload(layout, keys, [np.array(rows["values"], np.int8)], rows["weight"], rows["tail"]))
    assert payload.hex() == ring["payload"], ring
    assert layout.ring.signed(layout.ring.words_of(np.array([-5, 5]), 1)).tolist() == [-5, 5]
sparse = json.loads((folder / "sparse.json").read_text())
graph = graph_of(8, sparse["degree"], bytes.fromhex(sparse["roster_digest"]))
assert [list(graph.neighbors(index)) for index in range(8)] == sparse["neighbors"]
chosen = parameters(1000, Assumptions(threat=Threat.SEMI_MALICIOUS, adversarial_ppm=330_000, dropout_ppm=50_000))
print(np.__version__, chosen.degree, chosen.threshold)
"""


@pytest.mark.nightly
def test_masks_have_the_golden_bytes_on_numpy_1() -> None:
    assert PYTHON.exists(), f"{PYTHON.parents[1].name} is missing: run `make devices`"
    path = os.pathsep.join(str(ROOT / name) for name in SOURCES)
    command = [str(PYTHON), "-W", "error", "-c", CODE, str(Path(__file__).parents[1] / "golden" / "masking")]
    completed = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith("1.") and completed.stdout.endswith(" 132 109\n")
