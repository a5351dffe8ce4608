"""Test vectors of the codec ``topk``, for a device in another language. The rule is at ``Codec`` in ``fleet.proto``.

    python tests/golden/sparse.py

writes ``sparse.json``: a list of cases with the fields of ``codecs.json``, and

    fraction, bits      the options of the codec
    draws               u of the rule for each sent value
    indices             the positions of the sent values in the vector

A change there changes the bytes of every Update.
"""

import json
import sys
from pathlib import Path
from typing import Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from fanin.edge.codecs.sparse import topk
from fanin.edge.tensors import Float32s, TensorTable

FILE: Final = Path(__file__).with_name("sparse.json")
TABLE: Final = TensorTable.of({"a": (3, 20), "b": (), "c": (0,), "d": (23,)})
GRID: Final = (-9, -4, 0, -12)
SEED: Final = 5
OPTIONS: Final = ((0.1, 8), (0.25, 4), (0.25, 2), (1.0, 8))


def plain_indices(change: list[float], num: int) -> list[int]:
    """Return the positions that are sent, by the rule alone."""
    return sorted(sorted(range(len(change)), key=lambda place: (-abs(change[place]), place))[:num])


def _changes() -> dict[str, tuple[int, Float32s]]:
    rng = np.random.default_rng(SEED)
    steps = np.concatenate([np.full(spec.num_values, 2.0**at) for spec, at in zip(TABLE.specs, GRID, strict=True)])
    return {
        "between steps": (12, steps * rng.standard_t(3, steps.size) * 40),
        "below a step": (2, steps * rng.uniform(-1.2, 1.2, steps.size)),
        "equal magnitudes": (0, steps * 0 + rng.choice((-0.25, 0.25), steps.size)),
        "beyond the range": (1, steps * 200 * rng.choice((-3.0, -1.9, 1.0, 2.5), steps.size)),
        "almost all zero": (12, np.where(np.arange(steps.size) == 70, steps * 3, 0.0)),
    }


def text() -> str:
    """Return the text of the file."""
    rows = []
    for fraction, bits in OPTIONS:
        codec = topk(fraction=fraction, bits=bits)
        for case, (max_shift, exact) in _changes().items():
            change = exact.astype(np.float32)
            encoded = codec.encode(TABLE, change, GRID, max_shift, np.random.default_rng(SEED))
            indices = plain_indices(change.tolist(), -int(-fraction * change.size // 1))
            values = codec.decode_slice(memoryview(encoded.payload), change.size)
            rows.append(
                {
                    "case": case,
                    "fraction": fraction,
                    "bits": bits,
                    "max_shift": max_shift,
                    "sizes": [spec.num_values for spec in TABLE.specs],
                    "grid": GRID,
                    "change": change.astype(np.float64).tolist(),
                    "draws": np.random.default_rng(SEED).random(len(indices)).tolist(),
                    "indices": indices,
                    "shifts": encoded.shifts,
                    "values": values[indices].tolist(),
                    "payload": encoded.payload.hex(),
                    "rounded": encoded.num_rounded,
                    "saturated": encoded.num_saturated,
                }
            )
    return json.dumps(rows, indent=None).replace("}, {", "},\n{") + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
