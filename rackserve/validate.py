"""`rackserve validate`: measurements and curves of others beside what the cost model and the production caches give."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from rackserve import __version__
from rackserve.base.errors import ConfigError, FileFormatError
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


class Validation(msgspec.Struct, frozen=True):
    """One line of the history."""

    version: str
    date: str
    silicon: Silicon | None
    hits: tuple[HitRow, ...] | None
    requests: TimingAgreement | None


def validate(options: argparse.Namespace) -> int:
    """Compare what was given. ConfigError if nothing was, FileFormatError for a file that is not what it should be."""
    if not (options.silicon or options.mooncake or options.requests):
        raise ConfigError("nothing to compare with; give --silicon FILE, --mooncake FILE or --requests FILE")
    silicon = compare_silicon(Path(options.silicon)) if options.silicon else None
    hits = tuple(compare_hits(Path(options.mooncake))) if options.mooncake else None
    requests = compare_timings(Path(options.requests)) if options.requests else None
    if silicon is not None:
        _print_silicon(silicon)
    if hits is not None:
        _print_hits(hits)
    if requests is not None:
        _print_requests(requests)
    print("not compared:")
    for text in NOT_SET_UP:
        print(f"  {text}")
    if options.history:
        _append(Path(options.history), Validation(__version__, datetime.now(UTC).date().isoformat(), silicon, hits, requests))
    return 0


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


def _append(path: Path, result: Validation) -> None:
    try:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be written ({error}); give another file to --history") from None
