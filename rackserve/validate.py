"""`rackserve validate`: measurements and curves of others beside what the cost model and the production caches give."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from rackserve import __version__
from rackserve.base.errors import ConfigError
from rackserve.validation.cache_policies import CacheRow
from rackserve.validation.cache_table import cache_table, table_lines
from rackserve.validation.history import Drift, append, drift, entries, revision
from rackserve.validation.hit_curve import SOURCE, HitRow, compare_hits
from rackserve.validation.mixed_engine import SETUP, TimingAgreement, compare_timings
from rackserve.validation.rows import Trial, lines_of
from rackserve.validation.set_ups import run_set_ups
from rackserve.validation.silicon import Silicon, compare_silicon

NOT_SET_UP = (
    "disaggregated rows of the silicon table: their rows give no link between prefill and decode",
    "Mooncake's prefill and decode on A800: no such chip here, and its simulator's step times are not published",
    "token-aware routing of code generation and reasoning (llm-d, August 2026): their workloads are drawn from a catalogue",
    "GLM-5.2 on H200 (llm-d, July 2026): no sizes of its sparse attention",
)
"""Known measurements that nothing here is compared with, and why."""


FILES = ("silicon", "mooncake", "requests", "sessions")
"""Options that name a file to compare with."""

MOST_CHANGES = 20
"""Figures that moved since the last run are printed up to this many."""


class Validation(msgspec.Struct, frozen=True):
    """One line of the history; what was not asked for is None. `revision` is the commit of the code, if known."""

    version: str
    date: str
    revision: str
    silicon: Silicon | None = None
    hits: tuple[HitRow, ...] | None = None
    requests: TimingAgreement | None = None
    caches: tuple[CacheRow, ...] | None = None
    set_ups: tuple[Trial, ...] | None = None


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument(
        "--silicon", metavar="FILE", help="table of measured points in AIConfigurator's form, CSV, plain or gzip"
    )
    command.add_argument("--mooncake", metavar="FILE", help="Mooncake's conversation trace, JSONL, plain or gzip")
    command.add_argument("--requests", metavar="FILE", help="LLMServingSim's measured requests on RTX PRO 6000, JSONL")
    command.add_argument(
        "--sessions", metavar="FILE", help="agent sessions: pool against caches of ranks by cache size; minutes"
    )
    command.add_argument("--set-ups", action="store_true", help="published set-ups that need no file, simulated; minutes")
    command.add_argument("--history", metavar="FILE", help="say what moved since its last line; append a line")


def validate(options: argparse.Namespace) -> int:
    """Compare what was given. ConfigError if nothing was, FileFormatError for a file that is not what it should be."""
    if not (options.set_ups or any(getattr(options, name) for name in FILES)):
        raise ConfigError(
            f"nothing to compare with; give --set-ups, {', '.join(f'--{name} FILE' for name in FILES)} "
            "(docs/validation.md says where to get the files)"
        )
    before = entries(Path(options.history)) if options.history else []
    result = Validation(
        __version__,
        datetime.now(UTC).date().isoformat(),
        revision(),
        silicon=compare_silicon(Path(options.silicon)) if options.silicon else None,
        hits=tuple(compare_hits(Path(options.mooncake))) if options.mooncake else None,
        requests=compare_timings(Path(options.requests)) if options.requests else None,
        caches=cache_table(Path(options.sessions)) if options.sessions else None,
        set_ups=run_set_ups() if options.set_ups else None,
    )
    _print(result)
    if options.history:
        if before:
            _print_drift(drift(before, msgspec.to_builtins(result)))
        append(Path(options.history), result)
    return 0


def _print(result: Validation) -> None:
    if result.silicon is not None:
        _print_silicon(result.silicon)
    if result.hits is not None:
        _print_hits(result.hits)
    if result.requests is not None:
        _print_requests(result.requests)
    if result.caches is not None:
        print("\n".join(table_lines(result.caches)))
    for trial in result.set_ups or ():
        print("\n".join(lines_of(trial)))
    print("not compared:")
    for text in NOT_SET_UP:
        print(f"  {text}")


def _print_drift(found: Drift) -> None:
    print(f"since the last run ({found.since}): {found.num_same:,} figures the same, {len(found.changes):,} moved")
    for change in found.changes[:MOST_CHANGES]:
        print(f"  {change.name}: {change.before:.4g} -> {change.now:.4g}")


def _print_silicon(silicon: Silicon) -> None:
    print("cost model against measured, not calibrated: median |error|, median error, share too low, rank correlation")
    heads = ("time per token, decode alone", "the same, prompts mixed in", "time to first token")
    print(f"  {'model':14} {'chip':6} {'engine':8} {'rows':>4}  " + "  ".join(f"{head:^28}" for head in heads))
    for group in silicon.groups:
        columns = "  ".join(
            f"{part.median_error:6.0%} {part.median_signed:+6.0%} {part.share_low:6.0%} {_tau(part.tau)}"
            for part in (group.decode, group.mixed, group.ttft)
        )
        print(f"  {group.model:14} {group.chip:6} {group.engine:8} {group.decode.count:4}  {columns}  not calibrated")
    print("rows: " + ", ".join(f"{number:,} {outcome}" for outcome, number in silicon.outcomes.items()))


def _tau(value: float | None) -> str:
    return f"{'-':>6}" if value is None else f"{value:+6.2f}"


def _print_hits(hits: Sequence[HitRow]) -> None:
    print(f"hit rates of the production cache, exact: nothing to calibrate ({SOURCE})")
    for row in hits:
        print(f"  {row.what:54} published {row.published:5.2f}  ours {row.ours:5.3f}  {row.error:+5.0%}")


def _print_requests(found: TimingAgreement) -> None:
    print(f"requests of one engine, simulated against measured ({SETUP}): not calibrated")
    for name, part in (("time to first token", found.ttft), ("time per output token", found.tpot), ("whole", found.e2e)):
        print(
            f"  {name:22} {part.count} requests: median |error| {part.median_error:.0%}, "
            f"median error {part.median_signed:+.0%}, too low {part.share_low:.0%}, rank correlation{_tau(part.tau)}"
        )
    print(f"  {'until the last token':22} {found.duration_error:+.0%}")
