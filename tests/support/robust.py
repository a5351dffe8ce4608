"""The robust rules again, as their papers write them: plain Python over the complete Updates, in one line a step."""

import math
from collections.abc import Sequence
from fractions import Fraction

Row = Sequence[float]
"""The values of one Update, or of an aggregate."""


def median_of(column: Sequence[Fraction]) -> Fraction:
    """Return the median of exact numbers."""
    ordered, half = sorted(column), len(column) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def median(rows: Sequence[Row]) -> list[float]:
    """Return the median of each value."""
    return [float(median_of([Fraction(value) for value in column])) for column in zip(*rows, strict=True)]


def squared(left: Row, right: Row) -> Fraction:
    """Return the squared distance between two Updates, exactly."""
    return sum(((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(left, right, strict=True)), Fraction(0))


def mean(rows: Sequence[Row]) -> list[float]:
    """Return the mean of each value."""
    return [float(sum(map(Fraction, column)) / len(rows)) for column in zip(*rows, strict=True)]


def krum(rows: Sequence[Row], f: int, m: int) -> list[float]:
    """Return the mean of the m Updates with the lowest scores."""

    def score(index: int) -> Fraction:
        others = sorted(squared(rows[index], row) for other, row in enumerate(rows) if other != index)
        return sum(others[: len(rows) - f - 2], Fraction(0))

    return mean([rows[index] for index in sorted(range(len(rows)), key=score)[:m]])


def meamed(rows: Sequence[Row], nearest: int) -> list[float]:
    """Return the mean of the values of each column that are nearest to the median."""
    outcome = []
    for values in zip(*rows, strict=True):
        column = [Fraction(value) for value in values]
        middle = median_of(column)
        chosen = sorted((abs(value - middle), value) for value in column)[:nearest]
        outcome.append(float(sum(value for _, value in chosen) / nearest))
    return outcome


def bulyan(rows: Sequence[Row], f: int) -> list[float]:
    """Return the mean around the median of the Updates that Krum chooses one after another."""
    rest, chosen = list(range(len(rows))), list[int]()
    while len(chosen) < len(rows) - 2 * f:
        scores = {}
        for index in rest:
            others = sorted(squared(rows[index], rows[other]) for other in rest if other != index)
            scores[index] = sum(others[: max(len(rest) - f - 2, 1)], Fraction(0))
        best = min(rest, key=scores.__getitem__)
        rest.remove(best)
        chosen.append(best)
    return meamed([rows[index] for index in chosen], len(rows) - 4 * f)


def geometric_median(rows: Sequence[Row], iterations: int, smoothing: float) -> list[float]:
    """Return the point after some smoothed Weiszfeld steps from the mean."""
    centre = mean(rows)
    for _ in range(iterations):
        inverse = [1.0 / max(math.dist(row, centre), smoothing) for row in rows]
        columns = list(zip(*rows, strict=True))
        centre = [math.fsum(b * x for b, x in zip(inverse, each, strict=True)) / math.fsum(inverse) for each in columns]
    return centre


def centred_clipping(rows: Sequence[Row], iterations: int, radius: float) -> list[float]:
    """Return the centre after some steps from zero."""
    centre = [0.0] * len(rows[0])
    for _ in range(iterations):
        factors = [radius / max(math.dist(row, centre), radius) for row in rows]
        moves = [
            [(x - v) * factor for x, v in zip(row, centre, strict=True)]
            for row, factor in zip(rows, factors, strict=True)
        ]
        centre = [v + math.fsum(each) / len(rows) for v, each in zip(centre, zip(*moves, strict=True), strict=True)]
    return centre


def norm_bounding(rows: Sequence[Row], radius: float) -> list[float]:
    """Return the mean of Updates with at most a norm."""
    bounded = [[x / max(1.0, math.hypot(*row) / radius) for x in row] for row in rows]
    return [math.fsum(column) / len(rows) for column in zip(*bounded, strict=True)]
