"""Drawings of curves and of ranks over time, as inline SVG text. Colours come from the page's classes, as in `plots`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from math import isfinite

import msgspec

from rackserve.report.plots import (
    BOTTOM,
    HEIGHT,
    LETTER,
    RIGHT,
    TOP,
    WIDTH,
    Frame,
    empty,
    log_ticks,
    number_text,
    svg_of,
    ticks,
)

SHAPES = (
    ("●", ""), ("■", "m-4.5 -4.5h9v9h-9"), ("◆", "m0 -6l6 6l-6 6l-6 -6"), ("▲", "m0 -6l5.5 9.5h-11"),
    ("▼", "m0 6l5.5 -9.5h-11"),
)  # fmt: skip
"""Marks as a letter for legends and as a path around the point; the first is a circle."""
LEVELS = 8
"""Shades of a heat map, besides none."""
MAX_NUMBERED = 24
"""Marks that may each have a label; with more of them only the series have."""


class Mark(msgspec.Struct, frozen=True):
    """One point of a series: `tip` is what a reader sees who points at it, `label` what stands beside it.

    shape    index into `SHAPES`, so that configurations differ without colour too
    x_range, y_range   where it may lie, drawn as whiskers
    """

    x: float
    y: float
    tip: str
    label: str = ""
    hollow: bool = False
    shape: int = 0
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None


class Series(msgspec.Struct, frozen=True):
    """Marks of one colour, lines through (x, y) pairs, and a band of (x, low, high); a high of infinity reaches the top.

    assumed   a stretch that no point bounds, drawn thin and dotted
    """

    name: str
    colour: int
    marks: tuple[Mark, ...] = ()
    line: tuple[tuple[float, float], ...] = ()
    band: tuple[tuple[float, float, float], ...] = ()
    assumed: tuple[tuple[float, float], ...] = ()


def curve_chart(
    series: Sequence[Series],
    title: str,
    x_label: str,
    y_label: str,
    *,
    log_y: bool = False,
    from_zero: bool = True,
    top: float | None = None,
) -> str:
    """Series on common axes; x begins at 0, y too if `from_zero` and linear. `top`: where y ends, if not by the data."""
    xs = [mark.x for one in series for mark in one.marks] + [x for one in series for x, _ in one.line + one.assumed]
    xs += [mark.x_range[1] for one in series for mark in one.marks if mark.x_range]
    ys = [mark.y for one in series for mark in one.marks] + [y for one in series for _, y in one.line]
    ys += [value for one in series for mark in one.marks if mark.y_range for value in mark.y_range]
    ys += [value for one in series for _, low, high in one.band for value in (low, high) if isfinite(value)]
    ys = [y for y in ys if y > 0] if log_y else ys
    if not xs or not ys:
        return empty(title)
    high = top or max(ys) * (1.1 if from_zero and not log_y else 1.0)
    y_ticks = log_ticks(min(ys), max(ys)) if log_y else ticks(0 if from_zero else min(ys), high)
    frame = Frame(ticks(0, max(xs) * 1.08), y_ticks, x_label, y_label, log_y=log_y)
    for one in series:
        _draw_band(frame, one)
    for one in series:
        for stretch, look in ((one.assumed, " assumed"), (one.line, "")):
            if len(stretch) > 1:
                path = "L".join(f"{frame.x(x)} {frame.y(y)}" for x, y in stretch)
                frame.parts.append(f'<path class="curve s{one.colour % 6}{look}" d="M{path}"/>')
    for one in series:
        for mark in one.marks:
            frame.parts += _whiskers(frame, mark, one.colour)
    for one in series:
        frame.parts += [_draw_mark(frame, mark, one.colour) for mark in one.marks]
    _draw_labels(frame, series)
    return frame.svg(title)


def _whiskers(frame: Frame, mark: Mark, colour: int) -> list[str]:
    look, drawn, x, y = f'class="whisker s{colour % 6}"', [], frame.x(mark.x), frame.y(mark.y)
    if mark.x_range is not None:
        low, high = (frame.x(value) for value in mark.x_range)
        drawn.append(f'<path {look} d="M{low} {y}H{high}"/>')
    if mark.y_range is not None:
        low, high = (frame.y(min(frame.y1, max(frame.y0, value))) for value in mark.y_range)
        drawn.append(f'<path {look} d="M{x} {low}V{high}"/>')
    return drawn


def _draw_mark(frame: Frame, mark: Mark, colour: int) -> str:
    x, y, look = frame.x(mark.x), frame.y(mark.y), f"dot s{colour % 6}" + (" hollow" if mark.hollow else "")
    shape, tip = SHAPES[mark.shape % len(SHAPES)][1], f"<title>{escape(mark.tip)}</title>"
    if not shape:
        return f'<circle class="{look}" cx="{x}" cy="{y}" r="5">{tip}</circle>'
    return f'<path class="{look}" d="M{x} {y}{shape}Z">{tip}</path>'


def _draw_band(frame: Frame, one: Series) -> None:
    if len(one.band) < 2:
        return
    top, floor = frame.y1, frame.y0
    upper = [f"{frame.x(x)} {frame.y(min(high, top))}" for x, _, high in one.band]
    lower = [f"{frame.x(x)} {frame.y(max(low, floor))}" for x, low, _ in reversed(one.band)]
    frame.parts.append(f'<path class="band s{one.colour % 6}" d="M{"L".join(upper + lower)}Z"/>')


def _draw_labels(frame: Frame, series: Sequence[Series]) -> None:
    """Names of series at their highest marks, then labels of marks, where no other label, mark or line is; else not at all.

    So a label stands beside nothing but what it names.
    """
    marks = [(frame.x(mark.x), frame.y(mark.y)) for one in series for mark in one.marks]
    taken = [(x - 6, x + 6, y - 6, y + 6) for x, y in marks]
    for one in series:
        for (x1, y1), (x2, y2) in pairwise((frame.x(x), frame.y(y)) for x, y in one.line):
            steps = 1 + int(max(abs(x2 - x1), abs(y2 - y1)) // 4)
            for n in range(steps + 1):
                x, y = x1 + (x2 - x1) * n / steps, y1 + (y2 - y1) * n / steps
                taken.append((x - 2, x + 2, y - 2, y + 2))
    wanted = []
    for one in series:
        if one.marks:
            top = max(one.marks, key=lambda mark: mark.y)
            wanted.append((0, top, one.name, one.colour))
    if len(marks) <= MAX_NUMBERED:
        wanted += [(1, mark, mark.label, one.colour) for one in series for mark in one.marks if mark.label]
    for rank, mark, text, colour in wanted:
        size, x, y = LETTER * len(text) * (0.9 if rank else 1), frame.x(mark.x), frame.y(mark.y)
        for anchor, left, base in (
            ("start", x + 9, y - 5), ("start", x + 9, y + 14), ("end", x - 9 - size, y + 14), ("end", x - 9 - size, y - 5),
            ("start", x - size / 2, y - 10), ("start", x - size / 2, y + 18),
        ):  # fmt: skip
            box = (left, left + size, base - 10, base + 2)
            inside = box[0] > 66 and box[1] < WIDTH - RIGHT and box[2] > TOP - 6 and box[3] < HEIGHT - BOTTOM
            if inside and not any(box[0] < b[1] and b[0] < box[1] and box[2] < b[3] and b[2] < box[3] for b in taken):
                taken.append(box)
                at = left if anchor == "start" else left + size
                look = f'class="name s{colour % 6}"' if rank == 0 else 'class="value"'
                frame.parts.append(f'<text {look} x="{at:.1f}" y="{base:.1f}" text-anchor="{anchor}">{escape(text)}</text>')
                break


class HeatRow(msgspec.Struct, frozen=True):
    """One rank: a value for each stretch of time."""

    name: str
    values: tuple[float, ...]


def heat_map(rows: Sequence[HeatRow], title: str, unit: str, until_s: float, top: float) -> str:
    """Ranks below each other, time from 0 to `until_s` to the right; the shade is the value's share of `top`.

    Neighbours of one shade are one rectangle, whose tip gives their mean.
    """
    if not rows or top <= 0:
        return empty(title)
    left, width = 90, WIDTH - 90 - 12
    height = min(20.0, max(7.0, 260 / len(rows)))
    out: list[str] = []
    for number, row in enumerate(rows):
        y = 6 + number * height
        if height >= 11 or number % 2 == 0:
            out.append(f'<text x="{left - 8}" y="{y + height / 2 + 4:.1f}" text-anchor="end">{escape(row.name)}</text>')
        cell, step = width / len(row.values), until_s / len(row.values)
        levels = [min(LEVELS, round(value / top * LEVELS + 0.499)) for value in row.values]
        start = 0
        for end in range(1, len(levels) + 1):
            if end < len(levels) and levels[end] == levels[start]:
                continue
            mean = sum(row.values[start:end]) / (end - start)
            tip = f"{row.name}, {start * step:.3g} to {end * step:.3g} s: {mean:,.3g} {unit}"
            out.append(
                f'<rect class="h{levels[start]}" x="{left + start * cell:.1f}" y="{y:.1f}" width="{(end - start) * cell:.1f}" '
                f'height="{height - 1:.1f}"><title>{escape(tip)}</title></rect>'
            )
            start = end
    y = 6 + len(rows) * height
    for mark in ticks(0, until_s, 6):
        if mark <= until_s * 1.001:
            x = left + mark / until_s * width
            out.append(f'<text x="{x:.1f}" y="{y + 14:.1f}" text-anchor="middle">{number_text(round(mark, 6))}</text>')
    out.append(f'<text class="axis" x="{left + width / 2}" y="{y + 30:.1f}" text-anchor="middle">seconds</text>')
    return svg_of("".join(out), title, round(y + 38))


def shades(top: float, unit: str) -> str:
    """The legend of a heat map whose largest value is `top`."""
    boxes = "".join(f'<i class="h{level}"></i>' for level in range(LEVELS + 1))
    return f'<p class="shades">0 {boxes} {top:,.3g} {escape(unit)}</p>'
