"""The vectors of privacy noise: the committed file, the code, numpy 1, and an implementation of the docstrings' words.

``Words`` computes one value at a time with decimals of 60 digits, and takes its keystream from another library. It
shares no arithmetic with ``fanin.edge.noise``.
"""

import hashlib
import hmac
import json
import random
import subprocess
from bisect import bisect_right
from collections.abc import Iterator
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import accumulate, count, islice
from typing import Any, Final

import pytest
from Crypto.Cipher import ChaCha20
from golden import noise
from support.remote_runtime import PYTHON

from fanin.edge.noise.distributions import DiscreteGaussian, DiscreteLaplace, Skellam, draw

HINT = "if this is meant, run `python tests/golden/noise.py` and say in CHANGELOG.md that the noise of a seed changes"
CASES: Final = json.loads(noise.FILE.read_text())
TINY: Final = Decimal(10) ** -40
BLOCK_VALUES: Final = 1 << 15
ON_A_DEVICE: Final = """
import hashlib, json, sys
from fractions import Fraction
from fanin.edge.noise import distributions
kinds = {"discrete-gaussian": "DiscreteGaussian", "discrete-laplace": "DiscreteLaplace", "skellam": "Skellam"}
for case in json.load(open(sys.argv[1])):
    kind, number = case["distribution"].split()
    distribution = getattr(distributions, kinds[kind])(Fraction(number))
    values = distributions.draw(bytes.fromhex(case["seed"]), distribution, 0, 100_000)
    assert hashlib.sha256(values.astype("<i8").tobytes()).hexdigest() == case["sha256"], case["distribution"]
"""


def test_the_file_is_what_the_code_draws() -> None:
    assert noise.FILE.read_text() == noise.text(), HINT


@pytest.mark.heavy
def test_a_device_with_numpy_1_draws_the_same() -> None:
    command = [PYTHON, "-W", "ignore", "-c", ON_A_DEVICE, noise.FILE]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


class Words:
    """What the docstrings of ``streams``, ``strips`` and ``poisson`` say."""

    def __init__(self, name: str, seed: bytes) -> None:
        kind, number = name.split()
        self.parameter = Fraction(number)
        self.kind = kind
        first = hmac.digest(bytes(32), seed, "sha256")
        self.key = hmac.digest(first, b"fanin.noise.v1 " + name.encode() + b"\x01", "sha256")
        if kind == "skellam":
            self.first, self.cumulative = self._poisson(self.parameter / 2)
            return
        scale = int(self.parameter) if kind == "discrete-laplace" else _root(int(self.parameter))
        # The largest power of two that is at most a sixteenth of the scale.
        self.width = max(2**power for power in range(60) if 2**power <= max(scale // 16, 1))
        weights = [_exp(self.energy(0))]
        while weights[-1] > TINY:
            weights.append(_exp(self.energy(len(weights) * self.width)))
        self.first, self.cumulative = 0, _shares(weights)

    def energy(self, x: int) -> Fraction:
        """Return E(x)."""
        return Fraction(x) / self.parameter if self.kind == "discrete-laplace" else x * x / (2 * self.parameter)

    @staticmethod
    def _poisson(mean: Fraction) -> tuple[int, list[Decimal]]:
        mode = int(mean)
        mean_decimal = Decimal(mean.numerator) / mean.denominator
        weights = {mode: Decimal(1)}
        for k in count(mode):
            weights[k + 1] = weights[k] * mean_decimal / (k + 1)
            if weights[k + 1] < TINY:
                break
        for k in range(mode, 0, -1):
            weights[k - 1] = weights[k] * k / mean_decimal
            if weights[k - 1] < TINY:
                break
        return min(weights), _shares([weights[k] for k in sorted(weights)])

    def outcome(self, word: int) -> int:
        """Return the outcome of a word. The vectors have no word whose 64 bits do not decide."""
        low = bisect_right(self.cumulative, Decimal(word) / 2**64)
        assert low == bisect_right(self.cumulative, Decimal(word + 1) / 2**64)
        return self.first + low

    def block(self, block: int) -> Iterator[int]:
        """Yield the values of a block."""
        stream = ChaCha20.new(key=self.key, nonce=bytes(4) + block.to_bytes(8, "little"))
        while True:
            first = int.from_bytes(stream.encrypt(bytes(8)), "little")
            second = int.from_bytes(stream.encrypt(bytes(8)), "little")
            if self.kind == "skellam":
                yield self.outcome(first) - self.outcome(second)
                continue
            strip = self.outcome(first)
            level, rest = divmod(second, 2**32)
            sign, place = rest >> 31, rest % self.width
            x = strip * self.width + place
            acceptance = _exp(self.energy(x) - self.energy(strip * self.width))
            is_accepted = Decimal(level) / 2**32 < acceptance
            assert is_accepted == (Decimal(level + 1) / 2**32 <= acceptance)
            if is_accepted and not (sign and x == 0):
                yield -x if sign else x


def _root(number: int) -> int:
    return max(root for root in (int(number**0.5) + step for step in (-1, 0, 1)) if root * root <= number)


def _exp(exponent: Fraction) -> Decimal:
    return (-Decimal(exponent.numerator) / exponent.denominator).exp()


def _shares(weights: list[Decimal]) -> list[Decimal]:
    sums = list(accumulate(weights))
    return [each / sums[-1] for each in sums]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["distribution"])
def test_the_vectors_are_what_the_docstrings_say(case: Any) -> None:
    with localcontext() as context:
        context.prec = 60
        words = Words(case["distribution"], bytes.fromhex(case["seed"]))
        assert words.key.hex() == case["key"]
        assert list(islice(words.block(0), 16)) == case["first"]
        assert list(islice(words.block(1), 8)) == case["boundary"][8:]


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES[:-1], ids=lambda case: case["distribution"])
def test_whole_blocks_are_what_the_docstrings_say(case: Any) -> None:
    with localcontext() as context:
        context.prec = 60
        words = Words(case["distribution"], bytes.fromhex(case["seed"]))
        digest = hashlib.sha256()
        for block in range(4):
            size = min(BLOCK_VALUES, noise.NUM_VALUES - block * BLOCK_VALUES)
            for value in islice(words.block(block), size):
                digest.update(value.to_bytes(8, "little", signed=True))
    assert digest.hexdigest() == case["sha256"]


@pytest.mark.nightly
def test_any_distribution_is_what_the_docstrings_say() -> None:
    rng = random.Random(3)
    kinds = {"g": (DiscreteGaussian, 18.0), "l": (DiscreteLaplace, 9.0), "s": (Skellam, 5.0)}
    with localcontext() as context:
        context.prec = 60
        for _ in range(150):
            kind, largest = kinds[rng.choice("gls")]
            number = Fraction(int(10 ** rng.uniform(2, 9 + largest)), rng.choice([10**9, 10**9 + 7, 3 * 10**8]))
            distribution, seed = kind(number), rng.randbytes(32)
            words = Words(distribution.name, seed)
            assert draw(seed, distribution, 0, 40).tolist() == list(islice(words.block(0), 40)), distribution
