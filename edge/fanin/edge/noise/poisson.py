"""Exact samples of a Poisson distribution, by inversion of its weights ``mean**k / k!``.

The weights are bounded by integers, from the mode outwards: w(k + 1) = w(k) * mean / (k + 1), rounded down and up.
Their sums outside the window are bounded by geometric series. A table has about 20 entries for each unit of the
standard deviation.
"""

from fractions import Fraction

from fanin.edge.noise.inversion import Window


def poisson_window(mean: Fraction, bits: int) -> Window:
    """Return bounds of the weights of a Poisson distribution of this mean, above 0, for ``Inversion``."""
    num, den = mean.numerator, mean.denominator
    mode = num // den
    # A step loses less than a unit, and later steps shrink it: the bounds of a weight differ by at most the number of
    # steps from the mode, below 2**20. The smallest weights of the window are far above that.
    work = bits + 48
    least = 1 << 32
    up_low, up_high = [1 << work], [1 << work]
    k = mode
    while up_high[-1] >= least:
        k += 1
        up_low.append(up_low[-1] * num // (den * k))
        up_high.append(-(-up_high[-1] * num // (den * k)))
    # w(k + 1) / w(k) = mean / (k + 1) falls with k.
    tail = -(-up_high[-1] * num // (den * (k + 1) - num))
    down_low: list[int] = []
    down_high: list[int] = []
    low = high = 1 << work
    first = mode
    while first > 0 and high >= least:
        low, high = low * den * first // num, -(-high * den * first // num)
        first -= 1
        down_low.append(low)
        down_high.append(high)
    # w(k - 1) / w(k) = k / mean falls with falling k.
    head = -(-high * den * first // (num - den * first)) if first > 0 else 0
    return Window(
        first=first,
        lows=down_low[::-1] + up_low,
        highs=down_high[::-1] + up_high,
        head=head,
        tail=tail,
    )
