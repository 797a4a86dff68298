"""Small drawings as inline SVG text. Colours come from the page's CSS classes `s0`..`s5` (series) and `p0`..`p2` (parts)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10

import msgspec

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 14, 44
MAX_STEPS = 1_000
"""Steps of a distribution that are drawn; of more values, every n-th."""
LETTER = 7
"""Width of a letter of a label, rather too wide than too narrow."""


class Bar(msgspec.Struct, frozen=True):
    """One stretch of a timeline, in seconds; `part` selects the colour (0 waiting for the first token, 1 decoding)."""

    start: float
    end: float
    part: int
    title: str


class Dot(msgspec.Struct, frozen=True):
    """A figure marked on a distribution: its `value`, drawn at the height of `share` per cent."""

    value: float
    share: float
    label: str


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`, some `count` of them."""
    span = (high - low) or abs(high) or 1.0
    raw = span / count
    unit = 10.0 ** floor(log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    return [index * step for index in range(floor(low / step), ceil(high / step - 1e-9) + 1)]


def number_text(value: float) -> str:
    """A tick's number, with a letter for large ones."""
    if value and abs(value) < 0.01:
        return f"{value:.0e}"
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            size = {"G": 1e9, "M": 1e6, "k": 1e3}[letter]
            return f"{value / size:g}{letter}"
    return f"{value:g}"


class Frame:
    """A plot area whose axes reach from the first to the last of their ticks, linear or logarithmic."""

    def __init__(
        self, xs: list[float], ys: list[float], x_label: str, y_label: str, log_x: bool = False, log_y: bool = False
    ) -> None:
        self.log_x, self.log_y = log_x, log_y
        self.x0, self.x1, self.y0, self.y1 = xs[0], xs[-1], ys[0], ys[-1]
        self.parts = [f'<g class="grid">{"".join(map(self._x_tick, xs))}{"".join(map(self._y_tick, ys))}</g>']
        middle = (LEFT + WIDTH - RIGHT) / 2
        self.parts.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
        self.parts.append(
            f'<text class="axis" transform="rotate(-90)" x="{-(TOP + HEIGHT - BOTTOM) / 2}" y="12" '
            f'text-anchor="middle">{escape(y_label)}</text>'
        )

    def x(self, value: float) -> float:
        """Where a value lies, from the left."""
        return round(LEFT + _share(value, self.x0, self.x1, self.log_x) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        """Where a value lies, from the top."""
        return round(HEIGHT - BOTTOM - _share(value, self.y0, self.y1, self.log_y) * (HEIGHT - TOP - BOTTOM), 1)

    def _x_tick(self, value: float) -> str:
        x = self.x(value)
        return (
            f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{number_text(value)}</text>'
        )

    def _y_tick(self, value: float) -> str:
        y = self.y(value)
        return (
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{number_text(value)}</text>'
        )

    def svg(self, title: str, height: int = HEIGHT) -> str:
        """The finished drawing."""
        return svg_of("".join(self.parts), title, height)


def _share(value: float, low: float, high: float, logarithmic: bool) -> float:
    """Where a value lies between the ends of an axis, 0 to 1."""
    if logarithmic:
        low, high, value = log10(low), log10(high), log10(max(value, low))
    return (value - low) / ((high - low) or 1.0)


def svg_of(inside: str, title: str, height: int) -> str:
    """A drawing of the usual width."""
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{inside}</svg>'


def empty(title: str) -> str:
    """The drawing of nothing."""
    return svg_of(f'<text x="{WIDTH / 2}" y="40" text-anchor="middle">no data</text>', title, 80)


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers for a logarithmic axis, from at most `low` to at least `high`."""
    first, last = floor(log10(low)), ceil(log10(high))
    every = [10.0**power * factor for power in range(first, last + 1) for factor in (1, 2, 5)]
    start = max(index for index, tick in enumerate(every) if tick <= low * 1.0001)
    end = min(index for index, tick in enumerate(every) if tick >= high * 0.9999)
    kept = every[start : max(end, start + 1) + 1]
    return kept if len(kept) <= 8 else [t for t in kept if log10(t) % 1 < 1e-9 or t in (kept[0], kept[-1])]


def cdf(series: Mapping[str, Sequence[float]], dots: Mapping[str, Sequence[Dot]], title: str, x_label: str) -> str:
    """Cumulative distribution of each series of positive values, on a logarithmic axis, with the `dots` of each series."""
    series = {name: sorted(value for value in values if value > 0) for name, values in series.items()}
    every = [value for values in series.values() for value in values]
    if not every:
        return empty(title)
    frame = Frame(log_ticks(min(every), max(every)), [0, 25, 50, 75, 100], x_label, "% of requests", log_x=True)
    for number, (name, values) in enumerate(series.items()):
        if not values:
            continue
        path = [f"M{frame.x(values[0])} {frame.y(0)}"]
        count = min(len(values), MAX_STEPS)
        places = (len(values) * (step + 1) // count - 1 for step in range(count))
        path += [f"H{frame.x(values[place])}V{frame.y(100 * (place + 1) / len(values))}" for place in places]
        frame.parts.append(f'<path class="line s{number % 6}" d="{"".join(path)}"><title>{escape(name)}</title></path>')
        for dot in dots.get(name, ()):
            frame.parts.append(
                f'<circle class="dot s{number % 6}" cx="{frame.x(dot.value)}" cy="{frame.y(dot.share)}" r="3.5">'
                f"<title>{escape(name)}: {escape(dot.label)} = {dot.value:.3g}</title></circle>"
            )
    return frame.svg(title)


def part_bars(rows: Sequence[tuple[str, Sequence[float]]], part_names: Sequence[str], title: str) -> str:
    """Per row one horizontal bar for each part on a common scale, with its number: parts stay apart, never summed."""
    if not rows:
        return empty(title)
    top = max((value for _, values in rows for value in values), default=0.0) or 1.0
    left, bar, gap = 190, 13, 14
    height = len(rows) * (bar * len(part_names) + gap) + gap
    out: list[str] = []
    y = gap
    for name, values in rows:
        middle = y + bar * len(values) / 2 + 4
        out.append(f'<text x="{left - 10}" y="{middle}" text-anchor="end">{escape(name)}</text>')
        for part, value in enumerate(values):
            width = round(value / top * (WIDTH - left - 70), 1)
            out.append(
                f'<rect class="p{part}" x="{left}" y="{y}" width="{max(width, 0.5)}" height="{bar - 2}">'
                f"<title>{escape(part_names[part])}: {value:.4g}</title></rect>"
                f'<text class="value" x="{left + width + 5}" y="{y + bar - 3}">{value:,.1f}</text>'
            )
            y += bar
        y += gap
    return svg_of("".join(out), title, height)


def timeline(rows: Sequence[tuple[str, Sequence[Bar]]], title: str, until: float = 0.0) -> str:
    """One band per row; bars that overlap in a band are drawn below each other. The axis reaches at least `until` seconds."""
    ends = [bar.end for _, bars in rows for bar in bars]
    if not ends:
        return empty(title)
    marks = ticks(0, max(*ends, until), 6)
    left, lane_height, width = 90, 9, WIDTH - 90 - 12
    out: list[str] = []
    y = 8.0
    for name, bars in rows:
        free: list[float] = []
        body: list[str] = []
        for bar in sorted(bars, key=lambda b: (b.start, b.end)):
            lane = next((i for i, until in enumerate(free) if until <= bar.start + 1e-9), len(free))
            free[lane : lane + 1] = [bar.end]
            x = left + bar.start / marks[-1] * width
            size = max(0.8, (bar.end - bar.start) / marks[-1] * width)
            body.append(
                f'<rect class="t{bar.part}" x="{x:.1f}" y="{y + lane * lane_height:.1f}" width="{size:.1f}" '
                f'height="{lane_height - 2}"><title>{escape(bar.title)}</title></rect>'
            )
        depth = max(1, len(free)) * lane_height
        out.append(f'<text x="{left - 8}" y="{y + depth / 2 + 3:.1f}" text-anchor="end">{escape(name)}</text>')
        out += body
        y += depth + 6
        out.append(f'<line class="rule" x1="{left}" x2="{left + width}" y1="{y - 3:.1f}" y2="{y - 3:.1f}"/>')
    for mark in marks:
        x = left + mark / marks[-1] * width
        out.append(f'<text x="{x:.1f}" y="{y + 12:.1f}" text-anchor="middle">{number_text(round(mark, 6))}</text>')
    out.append(f'<text class="axis" x="{left + width / 2}" y="{y + 28:.1f}" text-anchor="middle">seconds</text>')
    return svg_of("".join(out), title, round(y + 36))
