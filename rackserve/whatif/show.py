"""Results for people: tables of points, of differences between configurations, and of what moves the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from rackserve.bench.frontier import Curve, frontier
from rackserve.bench.statistics import COVERAGE, Interval, Paired
from rackserve.report.curves import Line, cost_at
from rackserve.whatif.grid import Variant
from rackserve.whatif.points import FIGURES, Figure, PointResult, curves_of, title_of
from rackserve.whatif.sensitivity import Choice, Variation

NOT_CLAIMED = "not claimed"
MANY = 30
"""With fewer completed sessions their cost is rough."""
KINDS: tuple[tuple[str, str], ...] = (
    ("per_million_cached", "M cached"), ("per_million_uncached", "M uncached"), ("per_million_output", "M output"),
    ("per_request", "request"), ("per_session", "session"),
)  # fmt: skip


def amount(value: float | None) -> str:
    """Three significant digits, thousands with commas; a dash for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(name: Figure, result: PointResult) -> str:
    """A figure with the half of its interval's width, in per cent of it."""
    value, found = result.figures.get(name), result.intervals.get(name)
    if value is None:
        return "–"
    text = f"{value:.1%}" if name == "hit_rate" else amount(value)
    if found is None or not value:
        return text
    half = (found.high - found.low) / 2
    return f"{text} ±{100 * half:.1f}" if name == "hit_rate" else f"{text} ±{half / value:.0%}"


def pareto(results: Sequence[PointResult]) -> set[int]:
    """Which results no other beats in both speed and throughput per GPU."""
    points = [result.point for result in results]
    best = frontier(point for point in points if point is not None)
    return {number for number, point in enumerate(points) if point is not None and point in best}


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 1) -> list[str]:
    """Lines of a table, the first `num_left` columns flush left; as wide as it takes."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    lines = []
    for row in (heads, *rows):
        cells = (
            cell.ljust(width) if n < num_left else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines


def points_table(results: Sequence[PointResult]) -> list[str]:
    """Every point with its label; a star marks those on the frontier. Waiting times of a full rack are not shown."""
    heads = (
        "", "configuration", "c", "tok/s/user", "tok/s/GPU", "requests/s", "hit rate", "TTFT p50 s", "TTFT p90 s", "busy",
        "batch", "sessions", "rack",
    )  # fmt: skip
    best, rows = pareto(results), list[tuple[str, ...]]()
    for number, result in enumerate(results):
        variant = result.variant
        head = ("*" if number in best else "", variant.label or variant.setup.chip, str(variant.setup.concurrency))
        if result.errors:
            rows.append((*head, *("–",) * 9, "no result"))
            continue
        claims = result.saturation == "STABLE"
        ttft: tuple[Figure, Figure] = ("ttft_p50_s", "ttft_p90_s")
        figures: tuple[Figure, ...] = ("interactivity", "per_gpu", "requests_per_s", "hit_rate")
        rows.append((
            *head,
            *(spread(name, result) for name in figures),
            *(spread(name, result) if claims else NOT_CLAIMED for name in ttft),
            f"{result.utilisation:.0%}",
            amount(result.decode_batch),
            str(result.num_sessions),
            result.saturation,
        ))  # fmt: skip
    lines = table(heads, rows, 2)
    for result in results:
        name = f"{result.variant.label} c={result.variant.setup.concurrency}".strip()
        lines += [f"no result for {name}: {error}" for error in result.errors]
    return lines


def notes(results: Sequence[PointResult]) -> list[str]:
    """What the columns of `points_table` mean, as far as they are there."""
    lines = [
        f"±: half the width of the interval with {COVERAGE:.0%} of the draws (seeds, then their sessions); *: on the frontier",
        "busy: time in which prefill groups computed; batch: sequences of a decode rank",
        "sessions: those that drained, to their last answer, in the window; rack STABLE: prefill was busy for less than 95 %",
    ]
    labels = dict.fromkeys(result.variant.label for result in results if result.figures)
    open_ended = [
        label or "this set-up"
        for label in labels
        if all(result.saturation == "STABLE" for result in results if result.variant.label == label)
    ]
    if open_ended:
        lines.append(f"never full, so its peak is where the concurrencies end: {'; '.join(open_ended)}")
    if any(result.saturation != "STABLE" for result in results):
        lines.append(
            f"TTFT is {NOT_CLAIMED} where prefill was busy for 95 % of the time: there it grows with the length of the run "
            "(OVERLOADED: and more and more requests waited)"
        )
    return lines


def _interval(found: Interval, scale: float = 1.0) -> str:
    low, high = f"{scale * found.low:+.3g}", f"{scale * found.high:+.3g}"
    return f"{scale * found.estimate:+.3g} [{low}, {high}]"


def pairs_table(base: str, pairs: Sequence[tuple[Variant, Mapping[Figure, Paired]]], num_seeds: int) -> list[str]:
    """Every configuration against the first at the same concurrency, seed by seed, as changes in per cent."""
    shown: tuple[Figure, ...] = ("per_gpu", "interactivity", "hit_rate", "ttft_p50_s", "ttft_p90_s")
    heads = ["configuration", "c", *(FIGURES[name] + (" (points)" if name == "hit_rate" else "") for name in shown)]
    rows = []
    for variant, found in pairs:
        cells = []
        for name in shown:
            each = found.get(name)
            if each is None or (name != "hit_rate" and each.ratio is None):
                cells.append("–")
                continue
            ratio = each.ratio
            change = each.difference if name == "hit_rate" or ratio is None else _less_one(ratio)
            cells.append(f"{_interval(change, 100)} {each.num_agreeing}/{num_seeds}")
        rows.append([variant.label, str(variant.setup.concurrency), *cells])
    return [
        f"change against {base}, in %, seed by seed",
        *table(heads, rows),
        f"[low, high]: {COVERAGE:.0%} of the draws; n/{num_seeds}: seeds that agree on the sign; –: no such figure, or not "
        "claimed in one of the two",
    ]


def _less_one(found: Interval) -> Interval:
    return Interval(found.estimate - 1, found.low - 1, found.high - 1)


def costs_table(results: Sequence[PointResult], price: float) -> list[str]:
    """Costs at every point, for a price per GPU-hour."""
    rows, curves = [], curves_of(results)
    drained = {(title_of(each.variant.label), each.variant.setup.concurrency): each.num_sessions for each in results}
    for curve in curves:
        for point in curve.points:
            cost = cost_at(Line(Curve(curve.name, (point,))), point.interactivity, price)
            values = (getattr(cost, name) for name, _ in KINDS)
            cells = ["–" if value is None else f"{value:,.4g}" for value in values]
            cells[-1] += "" if drained.get((curve.name, point.concurrency), MANY) >= MANY else " ~"
            rows.append((curve.name, str(point.concurrency), amount(point.interactivity), *cells))
    heads = ("configuration", "c", "tok/s/user", *(text for _, text in KINDS))
    return [
        f"cost at {price:g} per GPU-hour; for each kind of token the whole cost",
        *table(heads, rows),
        f"session: requests that ended over sessions that drained in the windows; –: none did; ~: fewer than {MANY}, so rough",
    ]


def choice_text(choice: Choice | None, floor: float, by_cost: bool) -> str:
    """The recommendation in a sentence."""
    speed = f"at {floor:g} tok/s/user" if floor else "at peak"
    if choice is None:
        return f"recommended {speed}: none, no configuration is so fast"
    what = "cost of a completed request" if by_cost else "throughput per GPU"
    if choice.lead is None:
        return f"recommended {speed} by {what}: {choice.label}, the only one that is so fast"
    close = ", which is as good" if choice.is_close else ""
    return f"recommended {speed} by {what}: {choice.label}, {choice.lead - 1:.1%} before {choice.runner_up}{close}"


def sensitivity_table(chosen: Choice | None, found: Sequence[Variation]) -> list[str]:
    """The choice under every variation, and whether it flips."""
    rows = []
    for each in found:
        choice = each.choice
        score = f"{choice.score / chosen.score - 1:+.1%}" if choice and chosen and chosen.score else "–"
        lead = "–" if choice is None or choice.lead is None else f"{choice.lead - 1:.1%}"
        best = choice.label if choice else "none"
        verdict = "FLIPS" if each.flips else "as good" if choice and chosen and choice.label != chosen.label else ""
        rows.append((each.group, f"{each.factor - 1:+.0%}", best, score, lead, verdict))
    flips = [f"{each.group} {each.factor - 1:+.0%}" for each in found if each.flips]
    said = f"the recommendation flips with: {', '.join(flips)}" if flips else "the recommendation holds under every variation"
    return ["if coefficients are off (one seed)", *table(("group", "by", "best", "score", "lead", ""), rows, 3), said]


def document(
    results: Sequence[PointResult], chosen: Choice | None, found: Sequence[Variation], floor: float
) -> dict[str, object]:
    """All of it as plain values, for a JSON file."""
    best = pareto(results)
    return {
        "points": [msgspec.to_builtins(result) | {"pareto": number in best} for number, result in enumerate(results)],
        "floor": floor,
        "recommendation": msgspec.to_builtins(chosen),
        "sensitivity": msgspec.to_builtins(tuple(found)),
    }
