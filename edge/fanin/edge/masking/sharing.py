"""Secrets as shares over a prime field: any ``threshold`` shares reveal the secret, fewer reveal nothing.

A secret of 32 bytes is f(0), the share of the point x is f(x), where f is a polynomial of degree ``threshold`` - 1 with
random coefficients. The prime is the first one above 2^256, so each secret is an element of the field, and each share
has 33 bytes. Points are 1, 2, ..; the point 0 would be the secret itself.

A field of bytes would be the other choice. It has 255 points, and the holders of a share may be more.

Reference:
    Shamir 1979, How to Share a Secret. For shares that contain errors: Gao 2003, A New Algorithm for Decoding
    Reed-Solomon Codes. RFC 9591, appendix E, has vectors of such shares over other primes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from fanin.protos.errors import InvalidInput

Entropy = Callable[[int], bytes]
"""Returns that many random bytes. Devices pass ``secrets.token_bytes``; only tests and simulations pass another one."""

PRIME: Final = (1 << 256) + 297
"""The first prime above 2^256."""
SECRET_BYTES: Final = 32
SHARE_BYTES: Final = 33
COEFFICIENT_BYTES: Final = 49
"""Random bytes of a coefficient, before the reduction: 2^-135 from uniform."""
KEPT_WEIGHTS: Final = 64
"""Sets of points whose Lagrange weights are kept. In a complete graph all secrets have the same points."""


def split(secret: bytes, threshold: int, points: Sequence[int], entropy: Entropy) -> tuple[bytes, ...]:
    """Return the share of each point.

    Args:
        secret: 32 bytes.
        threshold: Shares that reveal the secret.
        points: Different integers from 1 on, at least ``threshold`` of them.
        entropy: Source of the coefficients.

    Raises:
        InvalidInput: A point is 0 or occurs twice, or the points are fewer than the threshold.
    """
    if len(secret) != SECRET_BYTES:
        raise InvalidInput(f"secret: got {len(secret)} bytes, expected {SECRET_BYTES}", code="FN-1620")
    check_points(points, threshold)
    random = [int.from_bytes(entropy(COEFFICIENT_BYTES), "little") % PRIME for _ in range(threshold - 1)]
    coefficients = [int.from_bytes(secret, "little"), *random]
    return tuple(evaluate(coefficients, point, PRIME).to_bytes(SHARE_BYTES, "little") for point in points)


def combine(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Return the secret of the first ``threshold`` shares, in the order of their points.

    Raises:
        InvalidInput: Too few shares, a point that is 0, a share outside the field, or a result that is no secret: then
            a share is false.
    """
    check_points(tuple(shares), threshold)
    points = tuple(sorted(shares)[:threshold])
    values = [share_value(shares[point]) for point in points]
    return _secret_bytes(value_at_zero(points, values, PRIME))


def combine_with_errors(shares: Mapping[int, bytes], threshold: int) -> tuple[bytes, tuple[int, ...]]:
    """Return the secret and the points of false shares, if these are at most (shares - threshold) / 2.

    Raises:
        InvalidInput: The shares have more errors than that.
    """
    check_points(tuple(shares), threshold)
    points = sorted(shares)
    values = [share_value(shares[point]) for point in points]
    coefficients = _decode(points, values, threshold)
    if coefficients is None:
        raise InvalidInput(
            f"shares: got {len(points)} with more than {(len(points) - threshold) // 2} false ones, too many to find",
            code="FN-1621",
        )
    false = (
        point for point, value in zip(points, values, strict=True) if evaluate(coefficients, point, PRIME) != value
    )
    return _secret_bytes(coefficients[0]), tuple(false)


def check_points(points: Sequence[int], threshold: int) -> None:
    """Raise InvalidInput unless the points are different, positive, and at least ``threshold``."""
    if threshold < 1 or len(points) < threshold:
        raise InvalidInput(f"shares: got {len(points)}, expected at least the threshold {threshold}", code="FN-1620")
    if len(set(points)) != len(points) or min(points) < 1:
        raise InvalidInput("shares: got a point that is 0 or occurs twice, expected different ones", code="FN-1620")


def is_share(share: bytes) -> bool:
    """Return whether bytes have the form of a share: 33 bytes of a number in the field."""
    return len(share) == SHARE_BYTES and int.from_bytes(share, "little") < PRIME


def share_value(share: bytes) -> int:
    """Return the field element of a share. Raises InvalidInput unless it has the form of one."""
    if not is_share(share):
        raise InvalidInput(
            f"share: got {len(share)} bytes, expected {SHARE_BYTES} of a number below 2^256 + 297", code="FN-1620"
        )
    return int.from_bytes(share, "little")


def evaluate(coefficients: Sequence[int], point: int, prime: int) -> int:
    """Return the value of a polynomial, whose constant term is first, by Horner's rule."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * point + coefficient) % prime
    return value


def value_at_zero(points: tuple[int, ...], values: Sequence[int], prime: int) -> int:
    """Return the value at 0 of the polynomial of least degree through these points."""
    weights = _weights_at_zero(points, prime)
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) % prime


@lru_cache(maxsize=KEPT_WEIGHTS)
def _weights_at_zero(points: tuple[int, ...], prime: int) -> tuple[int, ...]:
    """Return the Lagrange weights: of the point x, the product of y / (y - x) over all other points y."""
    product = 1
    for point in points:
        product = product * point % prime
    weights = []
    for point in points:
        divisor = point
        for other in points:
            if other != point:
                divisor = divisor * (other - point) % prime
        weights.append(product * pow(divisor, -1, prime) % prime)
    return tuple(weights)


def _secret_bytes(value: int) -> bytes:
    if value >> (8 * SECRET_BYTES):
        raise InvalidInput("shares: their polynomial has no secret of 32 bytes at 0; a share is false", code="FN-1621")
    return value.to_bytes(SECRET_BYTES, "little")


Polynomial = list[int]
"""Coefficients, the constant term first, without zeros at the end; zero is the empty list."""


def _decode(points: Sequence[int], values: Sequence[int], threshold: int) -> Polynomial | None:
    """Return the polynomial below degree ``threshold`` through all but (points - threshold) / 2 of the points.

    Gao's algorithm: Euclid's on the product of (x - point) and the interpolation of all points, until the degree of the
    remainder is below (points + threshold) / 2.
    """
    whole: Polynomial = [1]
    for point in points:
        whole = _times(whole, [-point % PRIME, 1])
    before, current = whole, _interpolation(points, values)
    factors: tuple[Polynomial, Polynomial] = ([], [1])
    while 2 * (len(current) - 1) >= len(points) + threshold:
        quotient, remainder = _divided(before, current)
        factors = factors[1], _minus(factors[0], _times(quotient, factors[1]))
        before, current = current, remainder
    result, remainder = _divided(current, factors[1])
    return None if remainder or len(result) > threshold else result or [0]


def _interpolation(points: Sequence[int], values: Sequence[int]) -> Polynomial:
    """Return the polynomial through all points, by Newton's divided differences."""
    result: Polynomial = []
    basis: Polynomial = [1]
    for point, value in zip(points, values, strict=True):
        gap = (value - evaluate(result, point, PRIME)) * pow(evaluate(basis, point, PRIME), -1, PRIME) % PRIME
        result = _minus(result, [-gap * each % PRIME for each in basis])
        basis = _times(basis, [-point % PRIME, 1])
    return result


def _times(left: Polynomial, right: Polynomial) -> Polynomial:
    result = [0] * (len(left) + len(right) - 1 if left and right else 0)
    for index, factor in enumerate(left):
        for other, each in enumerate(right):
            result[index + other] += factor * each
    return _trimmed(result)


def _minus(left: Polynomial, right: Polynomial) -> Polynomial:
    size = max(len(left), len(right))
    padded = (values + [0] * (size - len(values)) for values in (left, right))
    return _trimmed([one - other for one, other in zip(*padded, strict=True)])


def _divided(dividend: Polynomial, divisor: Polynomial) -> tuple[Polynomial, Polynomial]:
    rest, inverse = list(dividend), pow(divisor[-1], -1, PRIME)
    quotient = [0] * max(len(rest) - len(divisor) + 1, 0)
    for shift in range(len(quotient) - 1, -1, -1):
        factor = quotient[shift] = rest[shift + len(divisor) - 1] * inverse % PRIME
        for index, each in enumerate(divisor):
            rest[shift + index] = (rest[shift + index] - factor * each) % PRIME
    return _trimmed(quotient), _trimmed(rest)


def _trimmed(values: Polynomial) -> Polynomial:
    reduced = [value % PRIME for value in values]
    while reduced and not reduced[-1]:
        reduced.pop()
    return reduced
