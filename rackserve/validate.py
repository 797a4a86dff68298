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
from rackserve.validation.history import Drift, append, drift, last_line, revision
from rackserve.validation.hit_curve import SOURCE, HitRow, compare_hits
from rackserve.validation.mixed_engine import SETUP, TimingAgreement, compare_timings
from rackserve.validation.silicon import Silicon, compare_silicon

NOT_SET_UP = (
    "times to first token of the silicon table: they are of queues, and arrivals are not part of it",
    "pool against round robin on GB200 (vLLM and Mooncake, May 2026): no cost model of Kimi",
    "token-aware routing on H100 (llm-d, August 2026): no router over engines that mix prompts and decode",
    "pull from a peer against computing again (llm-d, August 2026): no cost model of gpt-oss",
)
"""Known measurements that nothing here is compared with, and why."""


GIVEN = ("silicon", "mooncake", "requests", "sessions")
"""Options that say what to compare with."""

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


def validate(options: argparse.Namespace) -> int:
    """Compare what was given. ConfigError if nothing was, FileFormatError for a file that is not what it should be."""
    if not any(getattr(options, name) for name in GIVEN):
        raise ConfigError(f"nothing to compare with; give {', '.join(f'--{name} FILE' for name in GIVEN)} or several of them")
    before = last_line(Path(options.history)) if options.history else None
    result = Validation(
        __version__,
        datetime.now(UTC).date().isoformat(),
        revision(),
        silicon=compare_silicon(Path(options.silicon)) if options.silicon else None,
        hits=tuple(compare_hits(Path(options.mooncake))) if options.mooncake else None,
        requests=compare_timings(Path(options.requests)) if options.requests else None,
        caches=cache_table(Path(options.sessions)) if options.sessions else None,
    )
    _print(result)
    if options.history:
        if before is not None:
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
    print("not compared:")
    for text in NOT_SET_UP:
        print(f"  {text}")


def _print_drift(found: Drift) -> None:
    print(f"since the last run ({found.since}): {found.num_same:,} figures the same, {len(found.changes):,} moved")
    for change in found.changes[:MOST_CHANGES]:
        print(f"  {change.name}: {change.before:.4g} -> {change.now:.4g}")


def _print_silicon(silicon: Silicon) -> None:
    print("time per output token, cost model against measured: median |error|, median error, share too low, rank correlation")
    print(f"  {'model':14} {'chip':6} {'engine':8} {'rows':>4}  {'decode steps alone':^28}  {'with prompts mixed in':^28}")
    for group in silicon.groups:
        columns = "  ".join(
            f"{part.median_error:6.0%} {part.median_signed:+6.0%} {part.share_low:6.0%} {_tau(part.tau)}"
            for part in (group.decode, group.mixed)
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
