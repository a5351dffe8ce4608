"""Test vectors of privacy noise, for a device in another language. The arithmetic is in ``fanin.edge.noise``.

    python tests/golden/noise.py

writes ``noise.json``: a list of cases, each with

    distribution    kind and parameter, as the key of the random words contains them
    seed            32 bytes as hex
    key             the key of ChaCha20 as hex
    first           the first 16 values
    boundary        the values 32760 to 32775: the last of block 0 and the first of block 1
    sha256          of the first 100,000 values as little-endian int64

A change there changes the noise of every Round that is repeated after a crash.
"""

import hashlib
import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from fanin.edge.noise.distributions import (
    BLOCK_VALUES,
    DiscreteGaussian,
    DiscreteLaplace,
    Distribution,
    Skellam,
    draw,
)
from fanin.edge.noise.streams import key_of

FILE: Final = Path(__file__).with_name("noise.json")
NUM_VALUES: Final = 100_000
CASES: Final[tuple[Distribution, ...]] = (
    DiscreteGaussian(Fraction(1, 3)),
    DiscreteGaussian(Fraction(1)),
    DiscreteGaussian(Fraction(10**6, 7)),
    DiscreteGaussian(Fraction(123_456_789_012)),
    DiscreteGaussian(Fraction(1 << 60)),
    DiscreteLaplace(Fraction(5, 2)),
    DiscreteLaplace(Fraction(100_000)),
    Skellam(Fraction(1, 2)),
    Skellam(Fraction(1001, 7)),
    Skellam(Fraction(250_000)),
)


def text() -> str:
    """Return the text of the file."""
    rows = []
    for number, distribution in enumerate(CASES):
        seed = hashlib.sha256(b"noise %d" % number).digest()
        values = draw(seed, distribution, 0, NUM_VALUES)
        rows.append(
            {
                "distribution": distribution.name,
                "seed": seed.hex(),
                "key": key_of(seed, distribution.name).hex(),
                "first": values[:16].tolist(),
                "boundary": values[BLOCK_VALUES - 8 : BLOCK_VALUES + 8].tolist(),
                "sha256": hashlib.sha256(values.astype("<i8").tobytes()).hexdigest(),
            }
        )
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(text())
