"""The report of runs: headline, table, distributions, the curve, ranks, requests, and whether to trust it all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from rackserve.base.costs import StepCost
from rackserve.base.events import RequestEnded, RequestPlaced
from rackserve.base.units import NS_PER_MS, to_seconds
from rackserve.bench.frontier import Curve, operating_point
from rackserve.bench.metrics import DEFINITIONS, tpot_ms
from rackserve.report.compare import NOT_CALIBRATED, SCATTERED, Arm, Comparison, compare, is_rough, step_error_text, text_of
from rackserve.report.curve_sections import curves_section
from rackserve.report.page import page
from rackserve.report.pieces import figure, legend, table_frame
from rackserve.report.plots import Bar, Dot, cdf, part_bars, timeline
from rackserve.report.rank_sections import balance_section, rank_order, waterfall_section

PARTS = ("output", "uncached input", "cached input")
MAX_BARS = 2_000
"""Of a run with more requests no timeline is drawn: nobody could read it."""


def _verdict(arm: Arm) -> str:
    summary = arm.summary
    run = summary.run
    state = "valid" if summary.valid else "invalid"
    facts = [
        f"{summary.num_done} of {summary.num_sent} requests done",
        f"{summary.num_failed} failed",
        f"{run.loop} loop, concurrency {run.concurrency}",
        f"{run.num_gpus} GPUs or CPU ranks",
    ]
    if summary.num_unfinished:
        facts.append(f"{summary.num_unfinished} unfinished")
    error = step_error_text(arm)
    if error:
        facts.append(f"step-time model error: {error}")
    look = "rough" if summary.valid and (is_rough(arm) or error == NOT_CALIBRATED) else state
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in summary.invalid_reasons)
    kinds = ", ".join(f"{kind} {count}" for kind, count in summary.failures.items())
    extra = f"<p>Failures by kind: {escape(kinds)}</p>" if kinds else ""
    if is_rough(arm):
        extra += f'<p class="warn">{SCATTERED}</p>'
    return (
        f'<div class="card {look}"><h3>{escape(arm.name)} <span class="tag">{state}</span></h3>'
        f"<p>{escape(' · '.join(facts))}</p>{extra}{f'<ul>{reasons}</ul>' if reasons else ''}</div>"
    )


def _headline(arms: Sequence[Arm]) -> str:
    """The three figures people look for first, per arm."""
    cells: list[str] = []
    for number, arm in enumerate(arms):
        summary = arm.summary
        ttft = f"{summary.ttft_ms.p50:,.0f} ms" if summary.ttft_ms else "–"
        hit = f"{summary.hit_rate:.1%}" if summary.hit_rate is not None else "–"
        ideal = f"of {summary.ideal_hit_rate:.1%} with an unbounded cache" if summary.ideal_hit_rate is not None else ""
        error = step_error_text(arm)
        warns = error == NOT_CALIBRATED or is_rough(arm)
        model = error if error in ("", NOT_CALIBRATED) else f"step-time error {error}"
        look = ' class="warn"' if warns else ""
        trust = f" <small{look}>{model}</small>" if model else ""
        slow = f"{summary.interactivity_p90:,.1f}" if summary.interactivity_p90 else "–"
        cells.append(
            f'<div class="big"><h3><i class="s{number % 6}"></i>{escape(arm.name)}{trust}</h3>'
            f"<p><b>{hit}</b> hit rate <small>{ideal}</small></p><p><b>{ttft}</b> median time to first token</p>"
            f"<p><b>{slow}</b> tokens/s/user at p90 <small>(slow tail)</small></p></div>"
        )
    return f'<section class="bigs">{"".join(cells)}</section>'


def _table(table: Comparison) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in table.arm_names)
    heads += "".join(f'<th class="ratio">{escape(name)}</th>' for name in table.ratio_names)
    width = 1 + len(table.arm_names) + len(table.ratio_names)
    body: list[str] = []
    section = ""
    for row in table.rows:
        if row.section != section:
            section = row.section
            body.append(f'<tr class="section"><th colspan="{width}">{escape(section)}</th></tr>')
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row.cells)
        cells += "".join(f'<td class="ratio">{escape(cell)}</td>' for cell in row.ratios)
        body.append(f"<tr><th>{escape(row.name)}</th>{cells}</tr>")
    shape = "scroll" if table.ratio_names else "scroll fit"
    return table_frame("figures", f"<thead><tr><th></th>{heads}</tr></thead><tbody>{''.join(body)}</tbody>", shape)


def timeline_rows(arm: Arm) -> list[tuple[str, list[Bar]]]:
    """Requests by rank, from the rack's own events: until the first token on the prefill rank, after it on the decode rank.

    A request that was placed again counts where it was placed last.
    """
    placed = {event.request: event for item in arm.events if isinstance(event := item.event, RequestPlaced)}
    ended = [(item.at_ns, event) for item in arm.events if isinstance(event := item.event, RequestEnded)]
    zero = min((at - event.total_ns for at, event in ended), default=0)
    rows: dict[str, list[Bar]] = {}
    for at, event in ended:
        place = placed.get(event.request)
        if place is None:
            continue
        began = at - event.total_ns
        first = began + event.ttft_ns if event.ttft_ns >= 0 else at
        title = f"{event.request}: {event.prompt_tokens} in ({event.cached_tokens} cached), {event.output_tokens} out"
        waiting = Bar(to_seconds(began - zero), to_seconds(first - zero), 0, title)
        rows.setdefault(str(place.prefill), []).append(waiting)
        if at > first:
            rows.setdefault(str(place.decode), []).append(Bar(to_seconds(first - zero), to_seconds(at - zero), 1, title))
    return sorted(rows.items(), key=lambda row: rank_order(row[0]))


def curves_of(arms: Sequence[Arm]) -> list[Curve]:
    """The operating points of the runs: live and simulated ones are curves apart."""
    curves = []
    for host in dict.fromkeys(arm.summary.run.host for arm in arms):
        found = [operating_point(arm.summary) for arm in arms if arm.summary.run.host == host]
        points = tuple(point for point in found if point is not None)
        if points:
            curves.append(Curve(host, points))
    return curves


def _plots(arms: Sequence[Arm]) -> str:
    names = legend([arm.name for arm in arms], "s")
    done = {arm.name: [record for record in arm.records if not record.error and not record.warmup] for arm in arms}
    ttft = {name: [(r.first_ns - r.sent_ns) / NS_PER_MS for r in records if r.first_ns >= 0] for name, records in done.items()}
    speed = {name: [1_000 / ms for r in records if (ms := tpot_ms(r))] for name, records in done.items()}
    bars = []
    slow_dots: dict[str, list[Dot]] = {}
    ttft_dots: dict[str, list[Dot]] = {}
    for arm in arms:
        if (waits := arm.summary.ttft_ms) is not None:
            ttft_dots[arm.name] = [Dot(waits.p50, 50, "p50"), Dot(waits.p90, 90, "p90")]
        p50, p90 = arm.summary.interactivity_p50, arm.summary.interactivity_p90
        if p50 is not None and p90 is not None:
            slow_dots[arm.name] = [Dot(p50, 50, "p50"), Dot(p90, 10, "p90 (slow tail)")]
        part = arm.summary.throughput_per_gpu
        bars.append((arm.name, (part.output, part.uncached_input, part.cached_input)))
    figures = [
        figure("Time to first token", cdf(ttft, ttft_dots, "time to first token", "ms (log)"), "dots: p50 and p90", names),
        figure(
            "Tokens/s/user",
            cdf(speed, slow_dots, "tokens/s/user", "tokens/s (log)"),
            "per request, 1 / TPOT; dots: interactivity p50 and, low on the curve, p90 (slow tail)",
            names,
        ),
        figure(
            "Throughput per GPU or rank",
            part_bars(bars, PARTS, "throughput per GPU or rank"),
            "tokens/s; three numbers, because cached input costs almost nothing",
            legend(PARTS, "p"),
        ),
    ]
    return f'<section class="plots">{"".join(figures)}</section>'


def _timelines(arms: Sequence[Arm]) -> str:
    names = legend(("waiting for the first token, on the prefill rank", "decoding, on the decode rank"), "t")
    drawn = [(arm.name, rows) for arm in arms if len(arm.records) <= MAX_BARS and (rows := timeline_rows(arm))]
    until = max((bar.end for _, rows in drawn for _, bars in rows for bar in bars), default=0.0)
    figures = [figure(name, timeline(rows, f"timeline of {name}", until), "requests by rank") for name, rows in drawn]
    return f'<h2>Where requests ran</h2>{names}<section class="plots">{"".join(figures)}</section>' if figures else ""


def _price(ns: float) -> str:
    """A time with its unit; a dash for 0."""
    if not ns:
        return "–"
    size, unit = (1e6, "ms") if ns >= 1e6 else (1e3, "µs") if ns >= 1e3 else (1, "ns")
    return f"{text_of(ns / size, 'number')} {unit}"


def _calibration(costs: Mapping[str, StepCost]) -> str:
    if not costs:
        return ""
    rows: list[str] = []
    for role, cost in costs.items():
        errors = [f"{e:.1%}" if e is not None else NOT_CALIBRATED for e in (cost.held_out_error, cost.held_out_error_p90)]
        prices = (cost.base_ns, cost.per_token_ns, cost.per_attended_ns, cost.per_sequence_ns, cost.per_context_token_ns)
        cells = [*(_price(price) for price in prices), str(cost.num_steps), *errors]
        rows.append(f"<tr><th>{escape(role)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    names = ("base", "per token", "per attended pair", "per sequence", "per context token", "steps fitted")
    heads = "".join(f"<th>{name}</th>" for name in (*names, "error p50", "error p90"))
    return (
        "<h2>Step-time model</h2><p>Fitted to half of the recorded live steps, which “steps fitted” counts; "
        "the errors are on the other half. A dash: not separable from the other prices.</p>"
        + table_frame("step costs", f"<thead><tr><th>role</th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>")
    )


def _definitions(arms: Sequence[Arm]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in DEFINITIONS.items())
    configs: list[str] = []
    for arm in arms:
        run = arm.summary.run
        pairs = {"seed": str(run.seed), **run.config}
        text = "; ".join(f"{name} = {value}" for name, value in pairs.items())
        configs.append(f"<dt>{escape(arm.name)}</dt><dd>{escape(text)}</dd>")
    return (
        f"<details><summary>How each figure is defined</summary><dl>{items}</dl></details>"
        f"<details><summary>Configuration of each run</summary><dl>{''.join(configs)}</dl></details>"
    )


def render_report(
    arms: Sequence[Arm],
    *,
    title: str = "rackserve report",
    subtitle: str = "",
    costs: Mapping[str, StepCost] | None = None,
    curves: Sequence[Curve] = (),
) -> str:
    """The page as text. `curves` are drawn beside the runs' own points; `costs` shows the step-time model."""
    figures = "Side by side" if len(arms) > 1 else "Figures"
    body = (
        f"{_headline(arms)}<h2>{figures}</h2>{_table(compare(arms))}{curves_section([*curves_of(arms), *curves])}"
        f"<h2>Distributions and throughput</h2>{_plots(arms)}{balance_section(arms)}{_timelines(arms)}{waterfall_section(arms)}"
        f"{_calibration(costs or {})}"
        f'<h2>Can these runs be trusted?</h2><section class="cards">{"".join(map(_verdict, arms))}</section>'
        f"{_definitions(arms)}"
    )
    return page(title, subtitle, body)


def write_report(
    path: Path | str,
    arms: Sequence[Arm],
    *,
    title: str = "rackserve report",
    subtitle: str = "",
    costs: Mapping[str, StepCost] | None = None,
    curves: Sequence[Curve] = (),
) -> None:
    """Write the page of `render_report` to `path`."""
    Path(path).write_text(render_report(arms, title=title, subtitle=subtitle, costs=costs, curves=curves), encoding="utf-8")
