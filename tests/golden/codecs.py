"""Test vectors of the codecs, for a device in another language. The rule is at ``Codec`` in ``fleet.proto``.

    python tests/golden/codecs.py

writes ``codecs.json``: a list of cases, each with

    case                name of the case
    codec, max_shift    as in an Assignment
    sizes               number of values of each block
    grid                exponent of each block
    change              the change, float32 values
    draws               u of the rule for each value, for a codec that rounds by chance
    shifts              shift of each block
    values              the encoded integers
    payload             as hex
    rounded, saturated  the counts of the header

A change there changes the bytes of every Update.
"""

import json
import sys
from pathlib import Path
from typing import Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from fanin.edge.codecs.fixed import CODECS, Codec, decoded, largest_value
from fanin.edge.tensors import Float32s, TensorTable

FILE: Final = Path(__file__).with_name("codecs.json")
TABLE: Final = TensorTable.of({"a": (2, 3), "b": (), "c": (0,), "d": (4,)})
GRID: Final = (-9, -4, 0, -12)
SEED: Final = 5


def _changes(codec: Codec) -> dict[str, tuple[int, Float32s]]:
    """Return the largest shift and the change of each case."""
    rng = np.random.default_rng(SEED)
    steps = np.concatenate([np.full(spec.num_values, 2.0**at) for spec, at in zip(TABLE.specs, GRID, strict=True)])
    limit = largest_value(codec.bits)
    return {
        "on the grid": (0, steps * rng.integers(-min(limit, 1 << 20), min(limit, 1 << 20) + 1, steps.size)),
        "between steps": (0, steps * rng.uniform(-limit, limit, steps.size)),
        "below a step": (2, steps * rng.uniform(-1.0, 1.0, steps.size)),
        "coarser blocks": (12, steps * limit * rng.choice((0.5, 3.0, 900.0), steps.size) * rng.normal(size=steps.size)),
        "beyond the range": (1, steps * limit * rng.choice((-3.0, -1.9, 1.0, 2.5), steps.size)),
    }


def text() -> str:
    """Return the text of the file."""
    rows = []
    for name, codec in CODECS.items():
        for case, (max_shift, exact) in _changes(codec).items():
            change = exact.astype(np.float32)
            encoded = codec.encode(TABLE, change, GRID, max_shift, np.random.default_rng(SEED))
            draws = np.random.default_rng(SEED).random(change.size) if codec.is_stochastic else np.empty(0)
            rows.append(
                {
                    "case": case,
                    "codec": name,
                    "max_shift": max_shift,
                    "sizes": [spec.num_values for spec in TABLE.specs],
                    "grid": GRID,
                    "change": change.astype(np.float64).tolist(),
                    "draws": draws.tolist(),
                    "shifts": encoded.shifts,
                    "values": decoded(codec, encoded.payload, change.size).tolist(),
                    "payload": encoded.payload.hex(),
                    "rounded": encoded.num_rounded,
                    "saturated": encoded.num_saturated,
                }
            )
    return json.dumps(rows, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
