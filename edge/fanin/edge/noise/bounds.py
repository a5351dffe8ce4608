"""Integer bounds of exp(-q) for a rational q: no floating-point number, no library function.

``exp(-q)`` is enclosed by two integers over a power of two, as narrow as the caller wants. All roundings are
directed, so
the enclosure is a proof: a comparison that the enclosure decides is decided for the real number.
"""

from typing import Final

GUARD_BITS: Final = 24
"""Bits beyond the requested ones: each of at most 20 squarings doubles the width."""
MAX_TERMS: Final = 10_000


def exp_minus(numerator: int, denominator: int, bits: int) -> tuple[int, int]:
    """Return integers ``low <= 2**bits * exp(-numerator / denominator) <= high``, at most 2 apart.

    The argument is halved until it is at most 1/2. The alternating Taylor series of exp(-q) then brackets its limit
    between two partial sums. Each squaring takes one halving back.

    Args:
        numerator: At least 0.
        denominator: At least 1.
        bits: Bits after the point.
    """
    if numerator == 0:
        return 1 << bits, 1 << bits
    if numerator >= (bits + 1) * denominator:  # exp(-q) < 2**-q <= 2**-(bits + 1)
        return 0, 1
    num_halvings = max(0, (2 * numerator // denominator).bit_length())
    work = bits + GUARD_BITS + num_halvings
    one = 1 << work
    # The reduced argument r, rounded down and up: exp(-r) falls in r.
    low = _series(-(-(numerator << work) // (denominator << num_halvings)), work)[0]
    high = _series((numerator << work) // (denominator << num_halvings), work)[1]
    for _ in range(num_halvings):
        low = low * low >> work
        high = min(one, -(-high * high >> work))
    shift = work - bits
    return low >> shift, -(-high >> shift)


def _series(argument: int, work: int) -> tuple[int, int]:
    """Return bounds of ``2**work * exp(-argument / 2**work)`` for an argument of at most 1/2 and a bit."""
    low = high = 1 << work
    term_low = term_high = 1 << work
    for index in range(1, MAX_TERMS):
        term_low = term_low * argument // (index << work)
        term_high = -(-term_high * argument // (index << work))
        if index % 2:
            low, high = low - term_high, high - term_low
        else:
            low, high = low + term_low, high + term_high
        if term_high <= 1:
            # The terms fall, so what is left out is at most the next term, which is at most 1.
            return max(low - 1, 0), high + 1
    raise AssertionError("the series of exp(-q) for q <= 1/2 ends after a term a bit")
