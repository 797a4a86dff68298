"""Arms side by side: the same figures for each run, and ratios between runs that differ in one thing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from rackserve.bench.metrics import STAMPED_LATE, Summary
from rackserve.bench.rack import RackSummary
from rackserve.bench.records import RecordedEvent, RequestRecord

NOT_CALIBRATED = "not calibrated"
PER_GPU = "Tokens/s per GPU or rank"
UNBOUNDED = "hit rate of an unbounded cache"
TOKENS_PER_STEP = "tokens per step, the bonus included"
MAX_DRAFTS = 8
"""Draft positions that have a figure."""
ROUGH_ABOVE = 0.25
"""A step-time model whose held-out error is above this makes simulated latencies rough."""
SCATTERED = "step times scattered (machine busy?): simulated latencies are rough"


class Arm(msgspec.Struct, frozen=True):
    """One run in a report: its figures, and what drawings need."""

    summary: Summary
    records: tuple[RequestRecord, ...] = ()
    rack: RackSummary | None = None
    events: tuple[RecordedEvent, ...] = ()

    @property
    def name(self) -> str:
        """Host and label, unique in a report."""
        return f"{self.summary.run.host} {self.summary.run.label}"


class Row(msgspec.Struct, frozen=True):
    """One figure: its value in each arm, then the ratios; None where a run has no such figure."""

    section: str
    name: str
    cells: tuple[str, ...]
    ratios: tuple[str, ...]


class Comparison(msgspec.Struct, frozen=True):
    """A table of figures over arms. `ratio_names` head the ratio columns."""

    arm_names: tuple[str, ...]
    ratio_names: tuple[str, ...]
    rows: tuple[Row, ...]


_Getter = Callable[[Arm], float | None]
_Figure = tuple[str, str, str, _Getter]


def _of(path: str) -> _Getter:
    """Reads a dotted path of the summary; a missing part gives None."""

    def get(arm: Arm) -> float | None:
        value: object = arm.summary
        for name in path.split("."):
            value = getattr(value, name, None)
        return float(value) if isinstance(value, int | float) else None

    return get


def _rack(name: str) -> _Getter:
    def get(arm: Arm) -> float | None:
        value = getattr(arm.rack, name, None)
        return None if value is None else float(value)

    return get


def _draft(position: int) -> _Getter:
    """The acceptance of the draft at a position, counted from 0."""

    def get(arm: Arm) -> float | None:
        shares = arm.summary.draft_acceptance or ()
        return shares[position] if position < len(shares) else None

    return get


FIGURES: tuple[_Figure, ...] = (
    ("Requests", "done", "count", _of("num_done")),
    ("Requests", "failed", "count", _of("num_failed")),
    ("Requests", "unfinished", "count", _of("num_unfinished")),
    ("Requests", "duration (s)", "number", _of("duration_s")),
    ("Requests", "requests/s", "number", _of("requests_per_s")),
    (PER_GPU, "output", "number", _of("throughput_per_gpu.output")),
    (PER_GPU, "uncached input", "number", _of("throughput_per_gpu.uncached_input")),
    (PER_GPU, "cached input", "number", _of("throughput_per_gpu.cached_input")),
    (PER_GPU, "all three, cached input included", "number", _of("throughput_per_gpu.total_with_cached_input")),
    ("Cache", "hit rate", "share", _of("hit_rate")),
    ("Cache", UNBOUNDED, "share", _of("ideal_hit_rate")),
    ("Cache", f"{UNBOUNDED} at trace blocks", "share", _of("ideal_trace_hit_rate")),
    ("Cache", "prompt tokens computed", "count", _rack("uncached_tokens")),
    ("Cache", "from the rank's own cache", "count", _rack("local_tokens")),
    ("Cache", "fetched from the pool", "count", _rack("fetched_tokens")),
    ("Time to first token (ms)", "p50", "number", _of("ttft_ms.p50")),
    ("Time to first token (ms)", "p90", "number", _of("ttft_ms.p90")),
    ("Time to first token (ms)", "p99", "number", _of("ttft_ms.p99")),
    ("Time to first token (ms)", "p90 from planned sending", "number", _of("ttft_from_due_ms.p90")),
    ("Tokens/s/user", "interactivity p50", "number", _of("interactivity_p50")),
    ("Tokens/s/user", "interactivity p90 (slow tail)", "number", _of("interactivity_p90")),
    ("Tokens/s/user", "E2E-normalised p90", "number", _of("interactivity_e2e_normalised")),
    ("Drafts", TOKENS_PER_STEP, "number", _of("tokens_per_step_with_bonus")),
    *(("Drafts", f"draft {n + 1} accepted, of those verified", "share", _draft(n)) for n in range(MAX_DRAFTS)),
    ("Rack", "largest / mean uncached work", "number", _rack("balance")),
    ("Rack", "idle while another rank queues", "share", _rack("lockstep_idle_share")),
    ("Rack", "attempts retried", "count", _rack("num_retries")),
    ("Client", "p99 send delay (ms)", "number", _of("send_delay_ms.p99")),
)


def text_of(value: float | None, kind: str) -> str:
    """A figure for people: `kind` is count, share or number; three significant digits, a dash where there is none."""
    if value is None:
        return "–"
    if kind == "count":
        return f"{value:,.0f}"
    if kind == "share":
        return f"{value:.1%}"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def step_error_text(arm: Arm) -> str:
    """The step-time model's held-out error of a simulated arm; empty for a live one."""
    run = arm.summary.run
    if run.host == "live":
        return ""
    return NOT_CALIBRATED if run.step_error is None else f"{run.step_error:.1%}"


def is_rough(arm: Arm) -> bool:
    """Whether the recorded steps were too scattered for the latencies of a simulated arm to mean much."""
    run = arm.summary.run
    return run.host != "live" and run.step_error is not None and run.step_error > ROUGH_ABOVE


def _pairs(arms: Sequence[Arm]) -> list[tuple[str, int, int]]:
    """(heading, numerator, denominator): each later arm of a host over its first, and simulated over live of one label."""
    pairs: list[tuple[str, int, int]] = []
    for host in dict.fromkeys(arm.summary.run.host for arm in arms):
        first, *others = (i for i, arm in enumerate(arms) if arm.summary.run.host == host)
        for other in others:
            labels = (arms[other].summary.run.label, arms[first].summary.run.label)
            pairs.append((f"{host}: {labels[0]} / {labels[1]}", other, first))
    for i, arm in enumerate(arms):
        for j, other_arm in enumerate(arms):
            hosts = (arm.summary.run.host, other_arm.summary.run.host)
            if hosts == ("simulated", "live") and arm.summary.run.label == other_arm.summary.run.label:
                pairs.append((f"{arm.summary.run.label}: simulated / live", i, j))
    return pairs


def compare(arms: Sequence[Arm]) -> Comparison:
    """The table of all figures that at least one arm has."""
    pairs = _pairs(arms)
    rows: list[Row] = []
    for section, name, kind, get in FIGURES:
        values = [get(arm) for arm in arms]
        if all(value is None for value in values):
            continue
        ratios: list[str] = []
        for _, above, below in pairs:
            a, b = values[above], values[below]
            ratios.append(f"{a / b:.2f}×" if a is not None and b else "–")
        rows.append(Row(section, name, tuple(text_of(value, kind) for value in values), tuple(ratios)))
    valid = tuple(_validity(arm.summary) for arm in arms)
    blank = tuple("" for _ in pairs)
    rows.append(Row("Trust", "valid run", valid, blank))
    if any(step_error_text(arm) for arm in arms):
        rows.append(Row("Trust", "step-time model, held-out error", tuple(step_error_text(arm) or "–" for arm in arms), blank))
    return Comparison(tuple(arm.name for arm in arms), tuple(name for name, _, _ in pairs), tuple(rows))


KEY_ROWS = frozenset({
    ("Requests", "done"), ("Requests", "failed"), ("Requests", "duration (s)"),
    (PER_GPU, "output"), (PER_GPU, "uncached input"), (PER_GPU, "cached input"),
    ("Cache", "hit rate"), ("Cache", UNBOUNDED), ("Time to first token (ms)", "p50"),
    ("Time to first token (ms)", "p90"), ("Tokens/s/user", "interactivity p50"),
    ("Tokens/s/user", "interactivity p90 (slow tail)"), ("Drafts", TOKENS_PER_STEP),
    ("Drafts", "draft 1 accepted, of those verified"), ("Rack", "largest / mean uncached work"),
    ("Rack", "idle while another rank queues"), ("Trust", "valid run"), ("Trust", "step-time model, held-out error"),
})  # fmt: skip
"""What a terminal shows; the report has every figure and all ratios."""


def print_comparison(arms: Sequence[Arm], console: Console | None = None) -> None:
    """Print the key figures side by side, what they say in words, and why an arm is invalid."""
    console = console or Console()
    table = compare(arms)
    rows = [(row, row.cells) for row in table.rows if (row.section, row.name) in KEY_ROWS]
    heads = [f"{arm.name}\n{NOT_CALIBRATED}" if step_error_text(arm) == NOT_CALIBRATED else arm.name for arm in arms]
    console.print(_printable(heads, rows))
    for line in verdicts(arms):
        console.print(line, soft_wrap=True, highlight=False)
    rough = ", ".join(f"{arm.name} {step_error_text(arm)}" for arm in arms if is_rough(arm))
    if rough:
        console.print(f"[yellow]{SCATTERED}[/yellow] (error: {rough})", soft_wrap=True, highlight=False)
    for arm in arms:
        for reason in arm.summary.invalid_reasons:
            console.print(f"[red]invalid[/red] {arm.name}: {reason}")


def _validity(summary: Summary) -> str:
    if not summary.valid:
        return "NO"
    return "yes, but late stamps" if any(STAMPED_LATE in text for text in summary.warnings) else "yes"


def verdicts(arms: Sequence[Arm]) -> list[str]:
    """The comparisons that arms of one host, and one arm live and simulated, allow: as sentences."""
    lines = []
    for heading, above, below in _pairs(arms):
        new, old = arms[above].summary, arms[below].summary
        parts = []
        if new.hit_rate is not None and old.hit_rate is not None:
            parts.append(f"hit rate {100 * (new.hit_rate - old.hit_rate):+.1f} points")
        if new.ttft_ms and old.ttft_ms and min(new.ttft_ms.p50, old.ttft_ms.p50) > 0:
            ratio = new.ttft_ms.p50 / old.ttft_ms.p50
            change = f"{1 / ratio:.2f}x lower" if ratio < 1 else f"{ratio:.2f}x higher"
            parts.append(f"median time to first token {change}")
        speeds = (
            ("p50", new.interactivity_p50, old.interactivity_p50),
            ("p90", new.interactivity_p90, old.interactivity_p90),
        )
        changes = [f"{a / b:.2f}x at {at}" for at, a, b in speeds if a is not None and b]
        if changes:
            parts.append(f"interactivity {' and '.join(changes)}")
        if old.run.host != new.run.host and old.prompt_tokens > old.cached_tokens:
            computed = (new.prompt_tokens - new.cached_tokens) / (old.prompt_tokens - old.cached_tokens)
            parts.append(f"cached tokens {new.cached_tokens / max(1, old.cached_tokens):.2f}x, uncached {computed:.2f}x")
        if old.duration_s > 0:
            parts.append(f"duration {new.duration_s / old.duration_s:.2f}x")
        lines.append(f"{heading}: {', '.join(parts)}")
    return lines


def _printable(names: Sequence[str], rows: Sequence[tuple[Row, Sequence[str]]]) -> Table:
    out = Table(show_edge=False, pad_edge=False)
    out.add_column("", no_wrap=True)
    for name in names:
        out.add_column(name, justify="right")
    section = ""
    for row, cells in rows:
        if row.section != section:
            section = row.section
            out.add_row(f"[bold]{section}[/bold]", *([""] * len(cells)))
        out.add_row(f"  {row.name}", *cells)
    return out
