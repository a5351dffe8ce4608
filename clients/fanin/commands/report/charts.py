"""Curves as inline SVG: no script, no font and no image from elsewhere. The style sheet of the page has the colours."""

import math
from collections.abc import Sequence
from html import escape
from typing import Final

from fanin.commands.report.content import Chart, Point
from fanin.protos.texts import sized

WIDTH: Final = 520
HEIGHT: Final = 240
LEFT: Final = 70
RIGHT: Final = 14
TOP: Final = 12
BOTTOM: Final = 44
NUM_TICKS: Final = 5
MAX_MARKED: Final = 60
"""Points up to which each has a mark, whose value a pointer shows."""
FLAT: Final = 1e-9


def chart_html(chart: Chart) -> str:
    """Return a chart as a figure; empty without a point."""
    series = {name: points for name, points in chart.series.items() if points}
    if not series:
        return ""
    xs, ys = zip(*(point for points in series.values() for point in points), strict=True)
    y_ticks = _ticks(0.0 if chart.is_amount else min(ys), max(ys))
    first, last = min(xs), max(max(xs), min(xs) + 1)
    frame = _Frame((first, last), (y_ticks[0], y_ticks[-1]))
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_spoken(chart, series))}">']
    for tick in y_ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_label(tick, y_ticks, chart)}</text>')
    for tick in _numbers(first, last):
        text = f'<text x="{frame.x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:.0f}</text>'
        parts.append(text)
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="axis" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(chart.x_label)}</text>'
    )
    for index, (name, points) in enumerate(series.items()):
        parts.append(_curve(index, name, points, frame, chart))
    parts.append("</svg>")
    legend = "".join(
        f'<span class="key k{index}">{escape(name)} <b>{_value(points[-1][1], chart)}</b></span>'
        for index, (name, points) in enumerate(series.items())
    )
    note = f"<p class=note>{escape(chart.note)}</p>" if chart.note else ""
    return (
        f"<figure><figcaption><h3>{escape(chart.title)}</h3><div class=legend>{legend}</div></figcaption>"
        f"{''.join(parts)}{note}</figure>"
    )


class _Frame:
    """Maps values to places in the drawing."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self._x = x
        self._y = y

    def x(self, value: float) -> float:
        """Return the horizontal place."""
        share = (value - self._x[0]) / (self._x[1] - self._x[0])
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return the vertical place."""
        share = (value - self._y[0]) / (self._y[1] - self._y[0])
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _curve(index: int, name: str, points: Sequence[Point], frame: _Frame, chart: Chart) -> str:
    places = [(frame.x(x), frame.y(y)) for x, y in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline class="curve k{index}" points="{path}"/>']
    if len(points) <= MAX_MARKED:
        parts += [
            f'<circle class="mark k{index}" cx="{x:.1f}" cy="{y:.1f}" r="{3 - 0.8 * index:.1f}"><title>'
            f"{escape(name)}, {escape(chart.x_label)} {number:.0f}: {_value(value, chart)}</title></circle>"
            for (x, y), (number, value) in zip(places, points, strict=True)
        ]
    return "".join(parts)


def _step(span: float) -> float:
    """Return a round distance, of which about ``NUM_TICKS`` fit into the span."""
    rough = span / (NUM_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= rough * 0.999)


def _ticks(least: float, most: float) -> list[float]:
    """Return round values from at most ``least`` to at least ``most``; at least two, with the same distance."""
    span = most - least
    if span <= FLAT * max(abs(most), 1.0):
        span = max(abs(most), FLAT) * 0.1
        least, most = least - span / 2, most + span / 2
    step = _step(span)
    first, last = math.floor(least / step + FLAT), math.ceil(most / step - FLAT)
    return [step * each for each in range(first, max(last, first + 1) + 1)]


def _numbers(first: float, last: float) -> list[float]:
    """Return the labelled Rounds or Versions: the first, the last, and round numbers between them."""
    step = max(1.0, math.ceil(_step(last - first)))
    between = [step * each for each in range(math.ceil(first / step), math.floor(last / step) + 1)]
    room = 0.6 * step
    return [first, *(each for each in between if each - first >= room and last - each >= room), last]


def _label(tick: float, ticks: Sequence[float], chart: Chart) -> str:
    if chart.is_bytes:
        return sized(tick)
    step = ticks[1] - ticks[0]
    digits = max(0, -math.floor(math.log10(step) + FLAT))
    # 0.25 has one digit more than its power of ten.
    digits += round(step * 10**digits, 6) != round(step * 10**digits)
    return f"{tick:.{digits}f}" if digits < 8 else f"{tick:.3g}"


def _value(value: float, chart: Chart) -> str:
    return sized(value) if chart.is_bytes else f"{value:.4g}"


def _spoken(chart: Chart, series: dict[str, Sequence[Point]]) -> str:
    ends = (
        f"{name} from {_value(points[0][1], chart)} to {_value(points[-1][1], chart)}"
        for name, points in series.items()
    )
    return f"{chart.title} by {chart.x_label}: {', '.join(ends)}"
