"""Published figures and predictions side by side: the only place where the two meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from rackserve.reproduction.confidence import Load
from rackserve.reproduction.figures import Figure
from rackserve.reproduction.predictions import Prediction, missing
from rackserve.reproduction.setups import ASSUMPTIONS
from rackserve.simulated_rack import SimulatedFigures

NEAR = 0.15
"""Relative error up to which a prediction counts as near."""

Label = Literal["input", "fitted", "predicted"]


class Row(msgspec.Struct, frozen=True):
    """One figure. `error`: predicted / published - 1; None for inputs and for what was not simulated."""

    name: str
    figure: Figure
    label: Label
    prediction: Prediction
    error: float | None

    @property
    def near(self) -> bool:
        return self.error is not None and abs(self.error) <= NEAR and self.prediction.claimed

    @property
    def within_band(self) -> bool:
        """Whether the published figure lies between the ends of the prediction."""
        low, high = self.prediction.low, self.prediction.high
        return low is not None and low <= self.figure.value and (high is None or self.figure.value <= high)


class Score(msgspec.Struct, frozen=True):
    """Of the predicted rows: how many there are, have a value, are near, and of the others, lie within their band.

    num_unclaimed   of the others, those that are not claimed at their load
    """

    num_predicted: int
    num_simulated: int
    num_near: int
    num_within_band: int
    num_unclaimed: int


def rows_of(figures: Mapping[str, Figure], predictions: Mapping[str, Prediction]) -> list[Row]:
    """A row for each published figure."""
    rows = []
    for name, figure in figures.items():
        label: Label = "predicted" if figure.role == "held-out" else figure.role
        found = Prediction(figure.value, "arithmetic") if label == "input" else predictions.get(name, missing())
        error = None if label == "input" or found.value is None else found.value / figure.value - 1
        rows.append(Row(name, figure, label, found, error))
    return rows


def score_of(rows: Sequence[Row]) -> Score:
    """Inputs and fitted rows do not count."""
    predicted = [row for row in rows if row.label == "predicted"]
    return Score(
        len(predicted),
        sum(row.error is not None for row in predicted),
        sum(row.near for row in predicted),
        sum(row.within_band and row.prediction.claimed and not row.near for row in predicted),
        sum(not row.prediction.claimed for row in predicted),
    )


def amount(value: float | None) -> str:
    """A figure with three digits that count."""
    if value is None:
        return "-"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.2f}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.0f}K"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def markdown(
    rows: Sequence[Row], runs: Mapping[str, SimulatedFigures], head: str, loads: Mapping[str, Load] | None = None
) -> str:
    """The whole report."""
    score = score_of(rows)
    lines = [
        "# Published figures, and what the simulator makes of them",
        "",
        head,
        "",
        f"{score.num_predicted} figures are predicted; {score.num_simulated} have a value, {score.num_near} of them within "
        f"{NEAR:.0%}, {score.num_within_band} more within their band; {score.num_unclaimed} are waits of a rack without room, "
        "which are not claimed and do not count, however near. Nor do inputs and fitted figures. Nothing here was measured on "
        "the hardware it speaks of.",
        "",
        "| figure | unit | published | ours | error | label | way |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    for row in rows:
        error = "" if row.error is None else f"{row.error:+.0%}"
        lines.append(
            f"| {row.figure.what} | {row.figure.unit} | {amount(row.figure.value)} | {_ours(row)} | {error} | {row.label} | "
            f"{_way(row)} |"
        )
    lines += ["", "## Predicted, but not near", "", *_misses(rows)]
    lines += ["", "## Assumptions", "", *(f"- {text}" for text in ASSUMPTIONS)]
    lines += ["", "## Runs", "", *_run_table(runs, loads or {})]
    return "\n".join(lines) + "\n"


def _way(row: Row) -> str:
    if row.label == "input":
        return "as published"
    return row.prediction.way + ("" if row.prediction.claimed else ", not claimed")


def _ours(row: Row) -> str:
    found = row.prediction
    if found.value is None:
        ends = "" if found.low is None else f" ({amount(found.low)} to {'any' if found.high is None else amount(found.high)})"
        return f"none{ends}"
    if found.low is None:
        return amount(found.value)
    band = f"from {amount(found.low)}" if found.high is None else f"{amount(found.low)} to {amount(found.high)}"
    return f"{amount(found.value)} ({band})"


def _misses(rows: Sequence[Row]) -> list[str]:
    lines, num_not_run = [], 0
    for row in rows:
        if row.label != "predicted" or row.near:
            continue
        if row.prediction.way == "not simulated":  # the table says so of each
            num_not_run += 1
            continue
        reasons = [row.prediction.note, REASONS.get(row.name, "")]
        if row.prediction.elasticity is not None:
            moved = abs(row.prediction.elasticity)
            reasons.append(f"1 % of step time moves it by {moved:.1f} %")
        if row.within_band:
            reasons.append("the published figure lies within the band")
        given = "; ".join(reason for reason in reasons if reason) or "no reason is known"
        lines.append(f"- {row.figure.what}: {given}.")
    if num_not_run:
        lines.append(f"- Without a value, as their set-ups were not run: {num_not_run}.")
    return lines or ["None."]


REASONS = {
    "rubin-387": "hangs on the length of prompts in the window, like both peaks",
    "gb300-peak": "what a rack can take hangs on its misses: throughput is what prefill computes over the share that missed",
    "rubin-kept": "hangs on the split of chips between prefill and decode, which is not published",
    "gb300-387": "the published point lies at the edge of GB300's curve, where the spread of step times decides",
    "ratio-387": "its divisor is a point at the edge of a curve: a ratio there says little",
    "pool-requests": "the sessions just outgrow caches of 180 GB a rank: with caches a tenth larger the gain is gone",
    "pinned-hit": "the size of the caches is not published for this test",
    "pinned-ttft": "in a closed loop without room the wait is the sessions over the rate, less their pauses",
    "pool-ttft": "in a closed loop without room the wait is the sessions over the rate, less their pauses",
    "sticky-ttft": "load, trace and step model of the published simulation are not known",
    "least-ttft": "load, trace and step model of the published simulation are not known",
    "sticky-idle": "load, trace and step model of the published simulation are not known",
    "least-idle": "load, trace and step model of the published simulation are not known",
    "prefill-step": "most of the gain lies in kernels of which nothing was published",
    "decode-step": "most of the gain lies in kernels of which nothing was published",
}
"""What stands between a published figure and a set-up that could give it."""


def _run_table(runs: Mapping[str, SimulatedFigures], loads: Mapping[str, Load]) -> list[str]:
    if not runs:
        return ["None was run."]
    lines = [
        "| set-up | requests | failed | requests/s | hit rate | tokens a request | uncached | TTFT p50 s | p90 s | "
        "tok/s/user P90 | tok/s/GPU | idle | prefill busy | load | | decode line error |",
        "|---|" + "---:|" * 13 + "---|---:|",
    ]
    for name, run in runs.items():
        hit = "-" if run.hit_rate is None else f"{run.hit_rate:.1%}"
        lines.append(
            f"| {name} | {run.num_requests:,} | {run.num_failed} | {run.requests_per_s:.1f} | {hit} | "
            f"{amount(run.tokens_per_request)} | {amount(run.uncached_per_request)} | {amount(run.ttft_p50_s)} | "
            f"{amount(run.ttft_p90_s)} | {amount(run.interactivity_p90)} | {amount(run.total_per_gpu)} | "
            f"{run.idle_share:.1%} | {run.prefill_busy:.0%} | {_load(loads.get(name))} | {run.line_error:.1%} |"
        )
    return lines


def _load(load: Load | None) -> str:
    return "- | -" if load is None else f"{load.share:.0%} | {load.label}"


def document(
    rows: Sequence[Row], runs: Mapping[str, SimulatedFigures], head: str, loads: Mapping[str, Load] | None = None
) -> bytes:
    """The report as JSON."""
    content = {
        "rackserve_reproduction": 1,
        "head": head,
        "score": score_of(rows),
        "rows": rows,
        "assumptions": ASSUMPTIONS,
        "runs": runs,
        "loads": loads or {},
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2)
