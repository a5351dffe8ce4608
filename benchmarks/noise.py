"""Values of privacy noise a second, for a vector of four million parameters.

    python benchmarks/noise.py --values 4000000 --json FILE

Each distribution is drawn by ``fanin.edge.noise`` on one thread, the best of three times, after its tables were built.
For comparison: OpenDP's exact samplers of the same distributions, if it is installed (``pip install opendp``), and the
rounded normal variables of numpy, which are neither exact nor from a cryptographic generator.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from fanin.edge.noise.distributions import DiscreteGaussian, DiscreteLaplace, Distribution, Skellam, draw

SEED = bytes(32)
NUM_REPEATS = 3
OPENDP_VALUES = 20_000
LEAST_PER_SECOND = 1e6
DISTRIBUTIONS: dict[str, Distribution] = {
    "discrete Gaussian, sigma 1": DiscreteGaussian(Fraction(1)),
    "discrete Gaussian, sigma 1,000": DiscreteGaussian(Fraction(10**6)),
    "discrete Gaussian, sigma 1,000,000": DiscreteGaussian(Fraction(10**12)),
    "discrete Laplace, scale 1,000": DiscreteLaplace(Fraction(1000)),
    "Skellam, sigma 10": Skellam(Fraction(100)),
    "Skellam, sigma 1,000": Skellam(Fraction(10**6)),
    "Skellam, sigma 10,000": Skellam(Fraction(10**8)),
}


def seconds(action: Callable[[], object]) -> float:
    """Return the least time of an action."""
    times = []
    for _ in range(NUM_REPEATS):
        start = perf_counter()
        action()
        times.append(perf_counter() - start)
    return min(times)


def of_opendp() -> dict[str, float]:
    """Return the values a second of OpenDP; none if it is not installed."""
    try:
        import opendp.prelude as dp
    except ModuleNotFoundError:
        return {}
    dp.enable_features("contrib")
    domain = dp.vector_domain(dp.atom_domain(T=int))
    zeros = [0] * OPENDP_VALUES
    gaussian = dp.m.make_gaussian(domain, dp.l2_distance(T=int), scale=1000.0)
    laplace = dp.m.make_laplace(domain, dp.l1_distance(T=int), scale=1000.0)
    return {
        "OpenDP, discrete Gaussian, sigma 1,000": OPENDP_VALUES / seconds(lambda: gaussian(zeros)),
        "OpenDP, discrete Laplace, scale 1,000": OPENDP_VALUES / seconds(lambda: laplace(zeros)),
    }


def measure(num_values: int) -> dict[str, Any]:
    """Return all rates, and the seconds to build the tables."""
    rates, tables = {}, {}
    for name, distribution in DISTRIBUTIONS.items():
        start = perf_counter()
        draw(SEED, distribution, 0, 1)
        tables[name] = perf_counter() - start
        rates[name] = num_values / seconds(partial(draw, SEED, distribution, 0, num_values))
    rng = np.random.default_rng(0)
    rates["numpy, rounded normal variables"] = num_values / seconds(lambda: np.rint(rng.normal(0, 1000, num_values)))
    return {"num_values": num_values, "values_per_second": rates | of_opendp(), "seconds_of_tables": tables}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; status 1 below a million values a second."""
    parser = argparse.ArgumentParser(description="Measure the samplers of privacy noise.")
    parser.add_argument("--values", type=int, default=4_000_000, help="length of the vector")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(argv)
    report = measure(options.values)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    for name, rate in report["values_per_second"].items():
        sys.stdout.write(f"{name:45}{rate / 1e6:10.2f} million values/s\n")
    return int(min(report["values_per_second"][name] for name in DISTRIBUTIONS) < LEAST_PER_SECOND)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
