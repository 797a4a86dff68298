"""Two curves against each other: multiples at matched interactivity, at peak, what each keeps of its peak, and what it costs.

The rule of interpolation: between neighbours on the upper-left Pareto frontier, the logarithm of throughput is linear in the
logarithm of interactivity. Left of its slowest point a curve is flat at its peak (who serves faster serves slower too);
right of its fastest point it has no value.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from math import exp, inf, log

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.bench.frontier import MEASURES, Curve, Measure, OperatingPoint, frontier

RULE = (
    "interpolated on the upper-left Pareto frontier, log throughput linear in log interactivity; a curve is flat at its peak "
    "left of its slowest point and has no value right of its fastest"
)
TOLERANCE = 0.02
"""How well the interactivity of either curve is thought to be known, as a share."""
USELESS_ABOVE = 2.0
"""A multiple whose bounds lie further apart than this says nothing."""


class Line:
    """The frontier of a curve by one throughput, as a function of interactivity."""

    __slots__ = ("measure", "name", "points", "values", "xs")

    def __init__(self, curve: Curve, measure: Measure = "total") -> None:
        """ConfigError if the curve has no valid point with this throughput."""
        self.name, self.measure = curve.name, measure
        self.points = frontier(curve.points, measure)
        if not self.points:
            raise ConfigError(f"{curve.name}: has no valid point with a throughput of {MEASURES[measure]}; compare by total")
        self.xs = [point.interactivity for point in self.points]
        self.values = [point.throughput(measure) or 0.0 for point in self.points]

    @property
    def peak(self) -> float:
        """The highest throughput per GPU of any point."""
        return self.values[0]

    @property
    def end(self) -> float:
        """The interactivity of the fastest point."""
        return self.xs[-1]

    def at(self, interactivity: float) -> float | None:
        """Throughput per GPU at an interactivity of at least this; None beyond the fastest point."""
        return self._between(interactivity, self.values)

    def figure_at(self, interactivity: float, get: Callable[[OperatingPoint], float | None]) -> float | None:
        """Another figure of the points, interpolated alike; None where a neighbour lacks it."""
        values = [get(point) for point in self.points]
        return self._between(interactivity, values)

    def _between(self, interactivity: float, values: list[float] | list[float | None]) -> float | None:
        if interactivity > self.end:
            return None
        above = bisect_left(self.xs, interactivity)
        high = values[above]
        if above == 0 or self.xs[above] == interactivity:
            return high
        low = values[above - 1]
        if low is None or high is None:
            return None
        share = log(interactivity / self.xs[above - 1]) / log(self.xs[above] / self.xs[above - 1])
        if low > 0 and high > 0:
            return exp(log(low) + share * log(high / low))
        return low + share * (high - low)

    def slopes(self, interactivity: float) -> tuple[float, float]:
        """d ln throughput / d ln interactivity to the left and to the right: negative, -inf where the curve ends."""
        return self._slope(bisect_left(self.xs, interactivity)), self._slope(bisect_right(self.xs, interactivity))

    def _slope(self, above: int) -> float:
        """Of the stretch that ends at point `above`."""
        if above == 0:
            return 0.0
        if above == len(self.xs):
            return -inf
        rise = log(self.values[above] / self.values[above - 1])
        return rise / log(self.xs[above] / self.xs[above - 1])

    def label_at(self, interactivity: float) -> str:
        """The configuration of the point that is at least this fast."""
        above = min(bisect_left(self.xs, interactivity), len(self.points) - 1)
        return self.points[above].label


class Match(msgspec.Struct, frozen=True):
    """Both curves at one interactivity.

    above, below    throughput per GPU of the first and of the second curve; None beyond the curve's end
    ratio           above / below; None where one of them is None
    kept_*          share of its own peak
    elasticity      d ln ratio / d ln interactivity, the steeper side; infinite at the end of a curve
    low, high       the ratio's bounds if either curve's speed is off by the tolerance; 0 and infinite where a curve ends
    """

    interactivity: float
    above: float | None
    below: float | None
    ratio: float | None
    kept_above: float | None
    kept_below: float | None
    elasticity: float | None
    low: float | None
    high: float | None

    @property
    def useless(self) -> bool:
        """Whether the bounds lie so far apart that the ratio says nothing."""
        return self.low is not None and self.high is not None and self.high > USELESS_ABOVE * self.low

    @property
    def undecided(self) -> bool:
        """Whether either curve may be the higher one, by the bounds."""
        return self.low is not None and self.high is not None and self.low < 1 < self.high


class CurveComparison(msgspec.Struct, frozen=True):
    """The first curve over the second, by one throughput; `ends` are the fastest points' interactivities.

    trusts   how far to believe each curve, such as a simulated one's step-time error; empty for a measured one
    """

    names: tuple[str, str]
    trusts: tuple[str, str]
    measure: Measure
    peaks: tuple[float, float]
    peak_ratio: float
    ends: tuple[float, float]
    tolerance: float
    matches: tuple[Match, ...]
    text: str
    rule: str = RULE


def compare_curves(
    first: Curve, second: Curve, measure: Measure = "total", at: Iterable[float] = (), tolerance: float = TOLERANCE
) -> CurveComparison:
    """Multiples of `first` over `second` at every interactivity where either has a frontier point, and at those of `at`.

    The text explains the multiple at the first of `at`; without one, the largest.
    """
    above, below = Line(first, measure), Line(second, measure)
    asked = tuple(at)
    places = sorted({*above.xs, *below.xs, *asked})
    matches = tuple(_match(above, below, place, tolerance) for place in places)
    peaks = (above.peak, below.peak)
    known = [match for match in matches if match.ratio is not None]
    chosen = next((m for place in asked for m in matches if m.interactivity == place), None)
    chosen = chosen or max(known, key=lambda match: match.ratio or 0.0)
    return CurveComparison(
        names=(first.name, second.name),
        trusts=(first.trust, second.trust),
        measure=measure,
        peaks=peaks,
        peak_ratio=peaks[0] / peaks[1],
        ends=(above.end, below.end),
        tolerance=tolerance,
        matches=matches,
        text=explain(above, below, chosen, tolerance),
    )


def _match(above: Line, below: Line, place: float, tolerance: float) -> Match:
    a, b = above.at(place), below.at(place)
    kept_a = None if a is None else a / above.peak
    kept_b = None if b is None else b / below.peak
    if a is None or b is None:
        return Match(place, a, b, None, kept_a, kept_b, None, None, None)
    sides = zip(above.slopes(place), below.slopes(place), strict=True)
    steeper = max((inf if -inf in side else side[0] - side[1] for side in sides), key=abs)
    slower, faster = place * (1 - tolerance), place * (1 + tolerance)
    low = (above.at(faster) or 0.0) / (below.at(slower) or b)
    worst = below.at(faster)
    high = inf if worst is None else (above.at(slower) or a) / worst
    return Match(place, a, b, a / b, kept_a, kept_b, steeper, low, high)


def _times(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def explain(above: Line, below: Line, match: Match, tolerance: float = TOLERANCE) -> str:
    """Why the multiple at peak and the one at a matched speed differ, from the curves themselves."""
    peak, speed = above.peak / below.peak, f"{match.interactivity:,.4g} tok/s/user"
    start = f"At peak {above.name} gives {_times(peak)} times the throughput per GPU of {below.name}"
    start += f" ({above.peak:,.0f} against {below.peak:,.0f} tokens/s, {MEASURES[above.measure]})"
    if match.ratio is None or match.kept_above is None or match.kept_below is None:
        gone = " and ".join(line.name for line in (above, below) if line.at(match.interactivity) is None)
        return f"{start}. At {speed} there is no multiple: {gone} has no point that fast (the curve has ended)."
    grown = log(match.ratio / peak)
    parts = [f"{start}, at {speed} {_times(match.ratio)} times"]
    if abs(grown) > 0.01:
        parts.append(
            f"The two differ by what each keeps of its own peak there, {match.kept_above:.1%} against {match.kept_below:.1%}: "
            f"{_times(peak)} x {match.kept_above:.1%} / {match.kept_below:.1%} = {_times(match.ratio)}"
        )
    else:
        parts.append(f"That is the same, because each keeps as much of its own peak there, {match.kept_above:.1%}")
    if grown > 0.01:
        parts.append(
            f"Of its peak {below.name} has given up a factor of {_times(1 / match.kept_below)} there and {above.name} one of "
            f"{_times(1 / match.kept_above)}; their quotient, {_times(exp(grown))}, is all that the multiple has grown by. The "
            "multiple at peak says how much more work a GPU can do, the one at a matched speed where the other curve falls"
        )
    elif grown < -0.01:
        parts.append(f"{above.name} gives up more of its peak than {below.name}, so its lead shrinks with speed")
    parts.append(_steepness(above, below, match, tolerance))
    parts += [text for line in (above, below) if (text := _what_happened(line, match.interactivity))]
    labels = [(line.label_at(match.interactivity), line.name) for line in (above, below)]
    where = [f"{label} ({name})" for label, name in labels if label not in ("", name)]
    if where:
        parts.append(f"The configuration there is {' and '.join(where)}")
    return ". ".join(parts) + "."


def _what_happened(line: Line, interactivity: float) -> str:
    """What the points of a curve say of its load between a speed and its peak: hit rates, and what was full at peak."""
    peak = line.points[0]
    there = line.figure_at(interactivity, lambda point: point.hit_rate)
    said = []
    if peak.hit_rate is not None and there is not None:
        moved = "" if abs(there - peak.hit_rate) < 0.005 else f" and {peak.hit_rate:.1%} at its peak"
        said.append(f"hits {there:.1%} there{moved}")
    if peak.utilisation is not None:
        full = "full" if peak.saturation not in ("", "STABLE") else f"{peak.utilisation:.0%} busy"
        ends = ", so its peak is where its points end" if peak.saturation == "STABLE" else ""
        busy = line.figure_at(interactivity, lambda point: point.utilisation)
        now = f"{busy:.0%} busy there and " if busy is not None and line.at(interactivity) != line.peak else ""
        said.append(f"has its prefill ranks {now}{full} at its peak{ends}")
    return f"{line.name} {' and '.join(said)}" if said else ""


def _steepness(above: Line, below: Line, match: Match, tolerance: float) -> str:
    falls = []
    for line in (above, below):
        steep = min(line.slopes(match.interactivity))
        if steep == -inf:
            falls.append(f"{line.name}'s curve ends")
        elif steep == 0:
            falls.append(f"{line.name} is at its peak")
        else:
            falls.append(f"throughput of {line.name} falls {_times(-steep)} times as fast as speed rises")
    low, high = match.low or 0.0, match.high or inf
    bounds = f"between {_times(low)} and {'no bound' if high == inf else _times(high)}"
    verdict = " and means nothing as one number" if match.useless else ""
    known = f"with each curve's speed known to {tolerance:.0%}, the multiple is {bounds}{verdict}"
    return f"There {' and '.join(falls)}; {known}"


class Cost(msgspec.Struct, frozen=True):
    """What a curve costs at one interactivity; None where it is unknown.

    The three per million tokens are the WHOLE cost over the tokens of one kind: they stand beside each other and do not add up.
    per_session   cost of a completed request times the requests of a session
    """

    interactivity: float
    per_million_cached: float | None
    per_million_uncached: float | None
    per_million_output: float | None
    per_request: float | None
    per_session: float | None

    @property
    def known(self) -> bool:
        """Whether there is any figure."""
        return any(cost is not None for cost in msgspec.structs.astuple(self)[1:])


def cost_at(line: Line, interactivity: float, price: float, requests_per_session: float | None = None) -> Cost:
    """Costs at an interactivity, for a `price` per GPU-hour; `requests_per_session` replaces what the points say."""
    second = price / 3_600

    def per(rate: float | None, count: float) -> float | None:
        return second * count / rate if rate else None

    def rate_of(measure: Measure) -> float | None:
        return line.figure_at(interactivity, lambda point: point.throughput(measure))

    request = per(line.figure_at(interactivity, lambda point: point.requests_per_gpu), 1)
    number = requests_per_session or line.figure_at(interactivity, lambda point: point.requests_per_session)
    return Cost(
        interactivity,
        per(rate_of("cached"), 1e6),
        per(rate_of("uncached"), 1e6),
        per(rate_of("output"), 1e6),
        request,
        request * number if request is not None and number is not None else None,
    )
