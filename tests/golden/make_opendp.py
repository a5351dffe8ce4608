"""Writes tests/golden/opendp.json: histograms of OpenDP's samples, for comparison with those of ``fanin.edge.noise``.

    python -m venv build/opendp
    build/opendp/bin/pip install opendp==0.16.0
    build/opendp/bin/python tests/golden/make_opendp.py

OpenDP takes 265 MB, so no environment of this repository has it. It draws from the operating system: each run writes
other counts. A row has

    kind        gaussian or laplace
    scale       sigma, or the scale of the Laplace distribution
    width       number of values in a bin; bin i begins at i * width
    first       the first bin
    counts      number of samples in each bin from there
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import opendp.prelude as dp

TARGET = Path(__file__).parent / "opendp.json"
NUM_SAMPLES = 200_000
SCALES = (0.7, 3.0, 400.0)
BINS_PER_SCALE = 10


def samples(kind: str, scale: float) -> list[int]:
    """Return samples of a distribution."""
    domain, zeros = dp.vector_domain(dp.atom_domain(T=int)), [0] * NUM_SAMPLES
    if kind == "gaussian":
        drawn: list[int] = dp.m.make_gaussian(domain, dp.l2_distance(T=int), scale=scale)(zeros)
    else:
        drawn = dp.m.make_laplace(domain, dp.l1_distance(T=int), scale=scale)(zeros)
    return drawn


def row(kind: str, scale: float) -> dict[str, Any]:
    """Return the histogram of a distribution."""
    width = max(1, round(scale / BINS_PER_SCALE))
    counts = Counter(value // width for value in samples(kind, scale))
    bins = range(min(counts), max(counts) + 1)
    return {"kind": kind, "scale": scale, "width": width, "first": bins[0], "counts": [counts[each] for each in bins]}


def main() -> None:
    """Write the file."""
    dp.enable_features("contrib")
    rows = [row(kind, scale) for kind in ("gaussian", "laplace") for scale in SCALES]
    TARGET.write_text("[\n" + ",\n".join(f"  {json.dumps(each)}" for each in rows) + "\n]\n")


if __name__ == "__main__":
    main()
