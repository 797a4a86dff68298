"""The parts of a page that show curves: frontier by each throughput, TTFT and hit rate along it, multiples, tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import exp, inf, log

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.bench.frontier import MEASURES, Curve, Measure, OperatingPoint, frontier
from rackserve.bench.statistics import COVERAGE
from rackserve.report.charts import SHAPES, Mark, Series, curve_chart
from rackserve.report.compare import text_of
from rackserve.report.curves import RULE, Cost, CurveComparison, Line, Match
from rackserve.report.pieces import data_table, figure, legend

SPEED = "interactivity: tokens/s/user, 1 / p90(TPOT)"
NOT_CLAIMED = "not claimed"
GREY = 5
"""The colour of a line that joins configurations with colours of their own."""
STEPS = 12
"""Pieces in which a stretch of a curve is drawn: the rule of interpolation makes it bend."""


def name_of(curve: Curve, label: str) -> str:
    """A configuration among several curves; one named like its curve is not named twice."""
    return f"{curve.name}: {label}" if label not in ("", curve.name) else curve.name


def tip_of(curve: Curve, point: OperatingPoint) -> str:
    """All that is known of a point, a line each."""
    parts = point.parts
    lines = [
        name_of(curve, point.label) + (f", c = {point.concurrency}" if point.concurrency else ""),
        f"{text_of(point.interactivity, 'number')} tokens/s/user (p90)",
        f"{text_of(point.per_gpu, 'number')} tokens/s per GPU in all",
    ]
    if parts is not None:
        lines += [
            f"{text_of(parts.output, 'number')} output, {text_of(parts.uncached_input, 'number')} uncached, "
            f"{text_of(parts.cached_input, 'number')} cached input"
        ]
    if point.ttft_p50_ms is not None:
        p50, p90 = (text_of(value, "number") for value in (point.ttft_p50_ms, point.ttft_p90_ms))
        lines.append(f"TTFT p50 {p50} ms, p90 {p90} ms" if point.claims_ttft else f"TTFT {NOT_CLAIMED}")
    if point.hit_rate is not None:
        lines.append(f"hit rate {point.hit_rate:.1%}")
    if point.num_gpus:
        lines.append(f"{point.num_gpus} GPUs or ranks")
    if point.utilisation is not None:
        lines.append(f"prefill busy {point.utilisation:.0%}, {point.saturation or 'no label'}")
    if point.requests_per_session is not None:
        lines.append(f"{text_of(point.requests_per_session, 'number')} requests a completed session")
    lines += [text for text in (point.trust, "" if point.valid else "INVALID RUN: on no frontier") if text]
    return "\n".join(lines)


class _Look(msgspec.Struct, frozen=True):
    """A configuration of a curve and how it is drawn: a colour for each curve, a shape for each of its configurations.

    Of one curve alone every configuration has a colour too.
    """

    curve: Curve
    label: str
    name: str
    colour: int
    shape: int


def _looks(curves: Sequence[Curve]) -> list[_Look]:
    many, found = len(curves) > 1, []
    for number, curve in enumerate(curves):
        labels = dict.fromkeys(point.label for point in curve.points)
        for shape, label in enumerate(labels):
            name = name_of(curve, label) if many else label or curve.name
            found.append(_Look(curve, label, name, number if many else shape, shape))
    return found


def _legend(curves: Sequence[Curve]) -> str:
    looks = _looks(curves)
    shaped = any(look.shape for look in looks)
    names = [f"{SHAPES[look.shape % len(SHAPES)][0]} {look.name}" if shaped else look.name for look in looks]
    return legend(names, "s", [look.colour for look in looks])


def _marks(
    curves: Sequence[Curve],
    get: Callable[[OperatingPoint], float | None],
    hollow: Callable[[OperatingPoint], bool] = lambda point: not point.valid,
    whiskers: bool = False,
) -> list[Series]:
    """A series for each configuration; with `whiskers` marks show where they lie under other seeds."""
    made = []
    for look in _looks(curves):
        marks = []
        for point in look.curve.points:
            value = get(point)
            if point.label == look.label and value is not None:
                text, seeds = f"c {point.concurrency:,}" if point.concurrency else "", point.seeds if whiskers else None
                ranges = (seeds.interactivity, seeds.per_gpu) if seeds else (None, None)
                tip = tip_of(look.curve, point)
                marks.append(Mark(point.interactivity, value, tip, text, hollow(point), look.shape, *ranges))
        made.append(Series(look.name, look.colour, tuple(marks)))
    return made


def _band(curve: Curve) -> tuple[tuple[float, float, float], ...]:
    """(speed, lowest, highest throughput) along a curve whose coefficients may be off; empty if it does not say."""
    known = [(point, point.coefficients) for point in frontier(curve.points) if point.coefficients is not None]
    if len(known) < 2:
        return ()
    sides = [
        Line(Curve(curve.name, tuple(
            msgspec.structs.replace(p, interactivity=band.interactivity[side], per_gpu=band.per_gpu[side], parts=None)
            for p, band in known
        )))
        for side in (0, 1)
    ]  # fmt: skip
    speeds = sorted({0.0, *(x for line in sides for x in line.xs)})
    return tuple((x, sides[0].at(x) or 0.0, high) for x in speeds if (high := sides[1].at(x)) is not None)


def _lines(curves: Sequence[Curve], measure: Measure) -> list[Series]:
    """Each curve's frontier as the rule of interpolation has it; the stretch that no point bounds, from the axis, apart."""
    drawn = []
    for number, curve in enumerate(curves):
        try:
            line = Line(curve, measure)
        except ConfigError:
            continue
        path = [(line.xs[0], line.peak)]
        for low, high in zip(line.xs, line.xs[1:], strict=False):
            for step in range(1, STEPS + 1):
                x = high if step == STEPS else exp(log(low) + log(high / low) * step / STEPS)
                path.append((x, line.at(x) or 0.0))
        mixed = len(curves) == 1 and len({point.label for point in curve.points}) > 1
        colour = GREY if mixed else number
        band = _band(curve) if measure == "total" else ()
        drawn.append(Series(curve.name, colour, line=tuple(path), band=band, assumed=((0.0, line.peak), path[0])))
    return drawn


def _throughput(measure: Measure) -> Callable[[OperatingPoint], float | None]:
    return lambda point: point.throughput(measure)


def frontier_figure(curves: Sequence[Curve]) -> str:
    """The frontier in the conventional axes by a chosen throughput; the sum comes last, so that no one starts there."""
    order: tuple[Measure, ...] = ("output", "uncached", "cached", "total")
    drawn = {
        measure: _lines(curves, measure) + _marks(curves, _throughput(measure), whiskers=measure == "total")
        for measure in order
    }
    known = [measure for measure in order if any(one.marks for one in drawn[measure])]
    chosen = known[0]
    inputs, panels = [], []
    for measure in order:
        name = MEASURES[measure]
        state = " checked" if measure == chosen else "" if measure in known else " disabled"
        inputs.append(f'<label><input type="radio" name="measure" value="{measure}"{state}/> {escape(name)}</label>')
        chart = curve_chart(drawn[measure], f"frontier, {name}", SPEED, f"tokens/s per GPU: {name.split(',')[0]}")
        panels.append(f'<div class="panel{"" if measure == chosen else " other"}" data-measure="{measure}">{chart}</div>')
    choice = f'<div class="choice">{"".join(inputs)}</div>'
    rule = f"Lines are {RULE}: dotted, as nothing was measured there."
    if any(point.seeds for curve in curves for point in curve.points):
        rule += f" Whiskers: {COVERAGE:.0%} of draws of seeds and their sessions."
    if any(_band(curve) for curve in curves):
        rule += " Bands: coefficients of the cost model off by up to 20 %, one group at a time."
    note = f"<p><small>{escape(rule)}</small></p>"
    return figure("Frontier", choice + "".join(panels) + note, "by throughput per GPU", _legend(curves), "main")


def waiting_figure(curves: Sequence[Curve]) -> str:
    """TTFT along the curve: p90 filled, p50 hollow; empty if no point has one. Full racks have none that could be claimed."""
    series = _marks(curves, lambda point: point.ttft_p90_ms if point.claims_ttft else None) + [
        Series("", one.colour, tuple(msgspec.structs.replace(mark, label="") for mark in one.marks))
        for one in _marks(curves, lambda point: point.ttft_p50_ms if point.claims_ttft else None, lambda point: True)
    ]
    if not any(one.marks for one in series):
        return ""
    chart = curve_chart(series, "time to first token along the curve", SPEED, "TTFT, ms (log)", log_y=True)
    full = sum(not point.claims_ttft and point.ttft_p90_ms is not None for curve in curves for point in curve.points)
    note = "p90 filled, p50 hollow" + (f"; {NOT_CLAIMED} at {full} points of full racks" if full else "")
    return figure("Time to first token along the curve", chart, note, _legend(curves))


def hit_figure(curves: Sequence[Curve]) -> str:
    """Hit rates along the curve; empty if no point has one."""
    series = _marks(curves, lambda point: None if point.hit_rate is None else 100 * point.hit_rate)
    if not any(one.marks for one in series):
        return ""
    chart = curve_chart(series, "hit rate along the curve", SPEED, "hit rate, %", from_zero=False)
    return figure("Hit rate along the curve", chart, "cached / prompt tokens by the server's usage", _legend(curves))


def points_table(curves: Sequence[Curve]) -> str:
    """Every operating point with all its figures."""
    heads = (
        "curve", "configuration", "concurrency", "P90 tok/s/user", "output", "uncached input", "cached input", "all three",
        "TTFT p50 ms", "TTFT p90 ms", "hit rate", "GPUs", "prefill busy", "rack", "valid", "trust",
    )  # fmt: skip
    rows = []
    for curve in curves:
        for point in curve.points:
            parts = point.parts
            numbers = (parts.output, parts.uncached_input, parts.cached_input) if parts else (None, None, None)
            texts = [text_of(value, "number") for value in (point.interactivity, *numbers, point.per_gpu)]
            waits = (point.ttft_p50_ms, point.ttft_p90_ms)
            texts += [text_of(value, "number") if point.claims_ttft or value is None else NOT_CLAIMED for value in waits]
            rows.append((
                curve.name, point.label, str(point.concurrency or "–"), *texts, text_of(point.hit_rate, "share"),
                str(point.num_gpus or "–"), text_of(point.utilisation, "share"),
                point.saturation or "–", "yes" if point.valid else "NO", point.trust or "measured",
            ))  # fmt: skip
    return data_table("operating points", heads, rows, texts=2)


def curves_section(curves: Sequence[Curve]) -> str:
    """The figures and the table of all curves; empty if no curve has a point."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return ""
    figures = frontier_figure(curves) + waiting_figure(curves) + hit_figure(curves)
    return f'<h2>The curve</h2><section class="plots">{figures}</section><h3>Operating points</h3>{points_table(curves)}'


def multiples_section(result: CurveComparison, costs: Mapping[str, Sequence[Cost]]) -> str:
    """Multiples along the curve with their bounds, what each curve keeps of its peak, the paragraph, and costs."""
    above, below = result.names
    known = [match for match in result.matches if match.ratio is not None]
    band = tuple((m.interactivity, m.low or 0.0, m.high or 0.0) for m in known)
    line = tuple((m.interactivity, m.ratio or 0.0) for m in known)
    marks = tuple(
        Mark(
            m.interactivity,
            m.ratio or 0.0,
            f"{m.ratio:,.3g}× at {m.interactivity:,.4g} tok/s/user\n{m.low:.3g} to {m.high:.3g}",
        )
        for m in known
    )
    multiples = curve_chart(
        [Series(f"{above} / {below}", 0, marks, line, band)], "multiples", SPEED, "multiple (log)", log_y=True
    )
    kept = []
    for number, (name, shares) in enumerate((
        (above, [(m.interactivity, m.kept_above) for m in result.matches]),
        (below, [(m.interactivity, m.kept_below) for m in result.matches]),
    )):  # fmt: skip
        points = tuple((x, 100 * share) for x, share in shares if share is not None)
        dots = tuple(Mark(x, y, f"{name}\nkeeps {y:.1f}% of its peak at {x:,.4g} tok/s/user") for x, y in points)
        kept.append(Series(name, number, dots, points))
    figures = figure(
        "Multiple at matched interactivity", multiples, f"the band: either curve's speed off by {result.tolerance:.0%}"
    ) + figure(
        "Share of its own peak kept",
        curve_chart(kept, "share of peak kept", SPEED, "% of the curve's peak", top=100.0),
        names=legend(result.names, "s"),
    )
    measure = MEASURES[result.measure]
    notes = "".join(
        f'<p class="warn">{escape(name)} is simulated: {escape(trust)}</p>'
        for name, trust in zip(result.names, result.trusts, strict=True)
        if trust
    )
    return (
        f'<h2>{escape(above)} over {escape(below)}</h2>{notes}<p class="why">{escape(result.text)}</p>'
        f'<section class="plots">{figures}</section><h3>Multiples ({escape(measure)})</h3>{_matches_table(result)}'
        f"<p><small>Rule: {escape(result.rule)}.</small></p>{_costs(costs)}"
    )


def _verdict(match: Match) -> str:
    if match.ratio is None:
        return "–"
    if match.useless:
        return "no number: bounds too far apart"
    return "either may lead" if match.undecided else "holds"


def _matches_table(result: CurveComparison) -> str:
    above, below = result.names
    heads = (
        "P90 tok/s/user",
        above,
        below,
        "multiple",
        "from",
        "to",
        "elasticity",
        f"{above} keeps",
        f"{below} keeps",
        "verdict",
    )
    rows = []
    for m in result.matches:
        figures = (m.interactivity, m.above, m.below, m.ratio, m.low, m.high, m.elasticity)
        shares = (text_of(share, "share") for share in (m.kept_above, m.kept_below))
        rows.append((*("∞" if value == inf else text_of(value, "number") for value in figures), *shares, _verdict(m)))
    rows.append(("peak", *(text_of(v, "number") for v in (*result.peaks, result.peak_ratio)), *("–",) * 3, "100%", "100%", ""))
    return data_table("multiples", heads, rows, texts=0)


def _costs(costs: Mapping[str, Sequence[Cost]]) -> str:
    if not any(costs.values()):
        return ""
    heads = (
        "curve",
        "P90 tok/s/user",
        "per M cached input",
        "per M uncached input",
        "per M output",
        "per request",
        "per session",
    )
    rows = [
        (name, *("–" if value is None else f"{value:,.4g}" for value in msgspec.structs.astuple(cost)))
        for name, each in costs.items()
        for cost in each
    ]
    note = "Each of the three per million tokens is the whole cost over the tokens of one kind: they do not add up."
    return f"<h3>Cost</h3>{data_table('cost', heads, rows, texts=1)}<p><small>{note}</small></p>"
