"""The random inputs of a train graph: dropout masks and noise, drawn outside the graph and equal on every machine.

A graph draws nothing itself. A module that draws random numbers in training gives its train graph an input for each
draw. A device fills these inputs before each step:

1. ``random_key`` hashes (seed, partition, Round) to 64 bits: the key of Philox4x32-10.
2. Input k of step s takes the words of the counters (block, k, s, 0), block = 0, 1, 2, ...: four words a block.
3. A uniform value is ``(word >> 8) * 2**-24``, in [0, 1). A normal value is the inverse of the normal distribution at
   ``(word + 1/2) * 2**-32``, in float64, rounded to float32.

So the values of a step depend on nothing else, and a repeated training is bit-identical. Only + - * / and square roots
of float64 are used, which IEEE 754 defines to the last bit. No logarithm of a C library is called.

Reference:
    Philox: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", SC '11, section 4.
    Normal distribution: Wichura 1988, "Algorithm AS 241", Applied Statistics 37, routine PPND16.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from fanin.edge.runtimes.graphs import form_of
from fanin.edge.signatures import Port
from fanin.edge.tensors import Float32s
from fanin.protos.errors import InvalidBundle

RandomKind = Literal["uniform", "normal"]
Words = npt.NDArray[np.uint32]
Float64s = npt.NDArray[np.float64]

KINDS: Final[tuple[RandomKind, ...]] = ("uniform", "normal")
MAX_RANDOM_BYTES: Final = 16 << 20
"""Most bytes of all random inputs of a step: a device draws a million values in about 0.1 s."""
DOMAIN: Final = b"fanin.random.v1"
ROUNDS: Final = 10
MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL: Final = (0x9E3779B9, 0xBB67AE85)
LOW: Final = np.uint64(0xFFFFFFFF)
WORD_BITS: Final = np.uint64(32)
LN2: Final = 0.6931471805599453
SQRT_HALF: Final = 0.7071067811865476
LOG_TERMS: Final = 11
"""Terms of the series of a logarithm: the next one is below 2**-53."""
CENTRAL: Final = 0.425
"""Distance from 1/2 up to which the central quotient is used."""

# AS 241: numerators and denominators, the highest power first.
A: Final = (
    *(2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457),
    *(13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608),
)
B: Final = (
    *(5226.495278852854561, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867),
    *(5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0),
)
C: Final = (
    *(7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177, 1.27045825245236838258),
    *(3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734),
)
D: Final = (
    *(1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.14810397642748007459),
    *(0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187, 1.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPort:
    """A random input of a train graph.

    Attributes:
        name: Name of the input: its kind, a dot and its number.
        kind: ``uniform`` in [0, 1), or ``normal`` with mean 0 and variance 1.
        number: k, from 0 on.
        shape: Its shape, all dimensions fixed.
    """

    name: str
    kind: RandomKind
    number: int
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return 4 * math.prod(self.shape)


def random_port(kind: RandomKind, number: int, shape: Sequence[int]) -> RandomPort:
    """Return the port of draw ``number`` with this kind and shape."""
    return RandomPort(name=f"{kind}.{number}", kind=kind, number=number, shape=tuple(shape))


def random_ports(inputs: Iterable[Port]) -> tuple[RandomPort, ...]:
    """Return the random inputs of a train graph, in the order of their numbers.

    Args:
        inputs: All inputs of the graph. A parameter's own port never begins with a prefix of random inputs.

    Raises:
        InvalidBundle: An input is not float32 of a fixed shape, the numbers are not 0, 1, 2, ..., or a step would take
            more than 16 MB of random numbers.
    """
    ports = []
    for port in inputs:
        kind = next((each for each in KINDS if port.name.startswith(f"{each}.")), None)
        if kind is None:
            continue
        number = port.name.removeprefix(f"{kind}.")
        if not (number.isascii() and number.isdecimal()) or port.dtype != "float32" or -1 in port.shape:
            raise InvalidBundle(
                f"train graph: got the random input {port.name!r} as {form_of(port.dtype, port.shape)}, expected "
                "uniform.<number> or normal.<number> as float32 of a fixed shape",
                code="FN-0421",
            )
        ports.append(random_port(kind, int(number), port.shape))
    ports.sort(key=lambda port: port.number)
    names = [port.name for port in ports]
    if [port.number for port in ports] != list(range(len(ports))):
        raise InvalidBundle(
            f"train graph: got the random inputs {names}, expected the numbers 0 to {len(names) - 1}", code="FN-0421"
        )
    size_bytes = sum(port.size_bytes for port in ports)
    if size_bytes > MAX_RANDOM_BYTES:
        raise InvalidBundle(
            f"train graph: got {size_bytes} bytes of random inputs a step, expected at most {MAX_RANDOM_BYTES}",
            code="FN-0421",
        )
    return tuple(ports)


def random_key(seed: int, partition: int, round_number: int) -> int:
    """Return the key of a device's training in a Round, 64 bits.

    It is the first eight bytes, big-endian, of SHA-256 over the text ``fanin.random.v1:<seed>:<partition>:<Round>``, in
    ASCII decimals.
    """
    digest = hashlib.sha256(DOMAIN + f":{seed}:{partition}:{round_number}".encode("ascii")).digest()
    return int.from_bytes(digest[:8], "big")


def draw(port: RandomPort, key: int, step: int) -> Float32s:
    """Return the values of a random input for one step.

    Args:
        port: The input.
        key: From ``random_key``.
        step: Number of the step in the Round, from 0 on.

    Returns:
        float32 of the port's shape.
    """
    num = math.prod(port.shape)
    words = philox(key, (port.number, step), num)
    return (uniforms(words) if port.kind == "uniform" else normals(words)).reshape(port.shape)


def philox(key: int, counter: tuple[int, int], num_words: int) -> Words:
    """Return the first words of the Philox4x32-10 stream with the counters (block, counter[0], counter[1], 0).

    Args:
        key: 64 bits: the lower half is the generator's first key word.
        counter: Words 1 and 2 of the counters, each below 2**32.
        num_words: Number of words, at most 2**34.
    """
    blocks = np.arange(-(-num_words // 4), dtype=np.uint64)
    zeros = np.zeros_like(blocks)
    words = [blocks, zeros + np.uint64(counter[0]), zeros + np.uint64(counter[1]), zeros]
    return np.stack(philox_blocks(words, key), axis=-1).reshape(-1)[:num_words].astype(np.uint32)


def philox_blocks(counters: Sequence[npt.NDArray[np.uint64]], key: int) -> list[npt.NDArray[np.uint64]]:
    """Return the four words of each counter, as four arrays of values below 2**32.

    Args:
        counters: Four arrays (n,) of values below 2**32: the words of n counters.
        key: 64 bits.
    """
    first, second, third, fourth = counters
    keys = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(ROUNDS):
        products = first * MULTIPLIERS[0], third * MULTIPLIERS[1]
        first, second, third, fourth = (
            (products[1] >> WORD_BITS) ^ second ^ np.uint64(keys[0]),
            products[1] & LOW,
            (products[0] >> WORD_BITS) ^ fourth ^ np.uint64(keys[1]),
            products[0] & LOW,
        )
        keys = [(word + step) & 0xFFFFFFFF for word, step in zip(keys, WEYL, strict=True)]
    return [first, second, third, fourth]


def uniforms(words: Words) -> Float32s:
    """Return values in [0, 1) from words: multiples of 2**-24, exact in float32."""
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def normals(words: Words) -> Float32s:
    """Return normal values from words, at most 6.34 in size: the inverse of the distribution function (AS 241)."""
    share = (words.astype(np.float64) + 0.5) * 2.0**-32
    offset = share - 0.5
    square = CENTRAL * CENTRAL - offset * offset
    values = offset * _polynomial(A, square) / _polynomial(B, square)
    tails = np.abs(offset) > CENTRAL
    # The distance of the square root from 1.6 is the argument of the quotient for the tails up to 5.
    root = np.sqrt(-_log(np.minimum(share[tails], 1.0 - share[tails]))) - 1.6
    values[tails] = np.copysign(_polynomial(C, root) / _polynomial(D, root), offset[tails])
    return values.astype(np.float32)


def _polynomial(coefficients: Sequence[float], x: Float64s) -> Float64s:
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def _log(x: Float64s) -> Float64s:
    """Return the natural logarithm of positive values: exponent * ln 2 + 2 artanh((m - 1) / (m + 1))."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < SQRT_HALF
    mantissa = np.where(low, 2.0 * mantissa, mantissa)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial([1.0 / (2 * term + 1) for term in reversed(range(LOG_TERMS))], ratio * ratio)
    return (exponent - low) * LN2 + 2.0 * ratio * series
