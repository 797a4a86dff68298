"""How far a simulated figure can be believed: its interval over seeds and sessions, and how much of the rack was in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from rackserve.bench.statistics import Interval, Saturation, bootstrap, paired, saturation
from rackserve.reproduction.setups import STEP_TIMES
from rackserve.simulated_rack import SimulatedFigures, SimulatedSetup, prefill_rate
from rackserve.whatif.points import Figure, statistic_of
from rackserve.whatif.runs import ResultRow

Rows = Mapping[str, Sequence[ResultRow]]
"""Runs by the set-up's name, one per seed in the same order everywhere; only those that gave figures."""

OF_PAIRS: Mapping[str, tuple[str, Figure, float]] = {
    "pinned-ttft": ("three-pinned", "ttft_p50_s", 1.0),
    "pool-ttft": ("three-pool", "ttft_p50_s", 1.0),
    "pinned-hit": ("three-pinned", "hit_rate", 100.0),
    "pool-hit": ("three-pool", "hit_rate", 100.0),
    "sticky-ttft": ("twelve-sticky", "ttft_p90_s", 1.0),
    "least-ttft": ("twelve-least", "ttft_p90_s", 1.0),
}
"""Published figure -> the set-up it is read from, what is read, and its factor."""


class Load(msgspec.Struct, frozen=True):
    """What a rack's prefill was asked for. `share`: uncached tokens over what full steps compute, 1 is all there is."""

    share: float
    label: Saturation


def intervals(rows: Rows) -> dict[str, Interval]:
    """Figures of the pairs by name: the mean over seeds, with where 90 % of draws of seeds and sessions lie.

    Where the pairs were also run with other step times, the interval of a time to first token reaches to those.
    """
    found: dict[str, Interval] = {}
    for name, (setup, figure, factor) in OF_PAIRS.items():
        interval = _interval(rows.get(setup, ()), figure)
        if interval is None:
            continue
        if figure != "hit_rate":
            others = [_interval(rows.get(f"{setup}-{kind}", ()), figure) for kind in STEP_TIMES]
            ends = [other.estimate for other in others if other is not None]
            interval = Interval(
                interval.estimate, min(interval.low, *ends, interval.low), max(interval.high, *ends, interval.high)
            )
        found[name] = Interval(*(factor * end for end in (interval.estimate, interval.low, interval.high)))
    pool, pinned = rows.get("three-pool", ()), rows.get("three-pinned", ())
    if pool and pinned:
        statistic = statistic_of("requests_per_s", pool[0].setup)
        pair = paired([row.sessions for row in pool], [row.sessions for row in pinned], statistic)
        if pair is not None and pair.ratio is not None:
            found["pool-requests"] = pair.ratio
    return found


def _interval(rows: Sequence[ResultRow], figure: Figure) -> Interval | None:
    return bootstrap([row.sessions for row in rows], statistic_of(figure, rows[0].setup)) if rows else None


def loads(rows: Rows) -> dict[str, Load]:
    """The load of each set-up, mean over its seeds, with the worst label of them."""
    found: dict[str, Load] = {}
    for name, runs in rows.items():
        shares = [_share(row.setup, row.figures) for row in runs if row.figures is not None]
        labels = [saturation(share, row.waiting) for share, row in zip(shares, runs, strict=True)]
        worst = max(labels, key=("STABLE", "SATURATED", "OVERLOADED").index)
        found[name] = Load(sum(shares) / len(shares), worst)
    return found


def _share(setup: SimulatedSetup, figures: SimulatedFigures) -> float:
    ranks = setup.prefill_groups * setup.prefill_ranks
    return figures.requests_per_s * figures.uncached_per_request / (ranks * prefill_rate(setup))


def mean_figures(rows: Rows) -> dict[str, SimulatedFigures]:
    """Each set-up's figures, mean over its seeds; what one of them has not is None."""
    return {name: _mean([row.figures for row in runs if row.figures is not None]) for name, runs in rows.items()}


def _mean(runs: Sequence[SimulatedFigures]) -> SimulatedFigures:
    """Counts add up, all else is averaged."""
    fields: dict[str, float | None] = {}
    for name in SimulatedFigures.__struct_fields__:
        values: list[float | None] = [getattr(run, name) for run in runs]
        known = [value for value in values if value is not None]
        total: Callable[[float], float] = (lambda x: x) if name.startswith("num_") else (lambda x: x / len(runs))
        fields[name] = total(sum(known)) if len(known) == len(values) else None
    return msgspec.convert(fields, SimulatedFigures)
