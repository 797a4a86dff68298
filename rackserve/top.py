"""The command `top`: a running server in the terminal, from its /metrics and /health."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rackserve.api.keys import KEY_VARIABLE
from rackserve.arguments import number_within
from rackserve.base.errors import ConfigError

TIMEOUT_S = 10.0
PREFIX = "rackserve_"
QUANTILES = (0.5, 0.99)

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Sight:
    """One look: series by name (without prefix) and labels, what /health said, and when (seconds on a monotonic clock)."""

    at_s: float
    series: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)
    health: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_router(self) -> bool:
        """Whether this is a router before servers, and no server."""
        return "workers" in self.health

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series of a metric that have these labels."""
        wanted = set(labels.items())
        return sum(value for own, value in self.series.get(name, {}).items() if wanted <= set(own))


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default http://127.0.0.1:8000)")
    command.add_argument(
        "--interval", type=number_within(0.2, 3600), default=1.0, metavar="S", help="seconds between looks (default 1)"
    )
    command.add_argument("--once", action="store_true", help="look twice, print what is seen, and end")
    command.epilog = f"The key, if the server asks for one, is read from {KEY_VARIABLE}."


def top(options: argparse.Namespace) -> int:
    """Show until q or Ctrl-C, or once. Raises ConfigError if the server cannot be asked."""
    server = Server(options.url, os.environ.get(KEY_VARIABLE, ""))
    first = server.look()
    if options.once:
        time.sleep(options.interval)
        print("\n".join(lines(first, server.look())))
        return 0
    try:
        from rackserve.top_screen import TopScreen
    except ImportError as error:
        raise ConfigError(
            f"the live view needs the extra top ({error}): pip install -e '.[top]' in the checkout, or use --once"
        ) from error
    TopScreen(server, options.interval).run()
    return 0


class Server:
    """Where to look."""

    def __init__(self, url: str, key: str = "", transport: httpx.BaseTransport | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=TIMEOUT_S, trust_env=False, transport=transport)

    def look(self) -> Sight:
        """What is to be seen now. Raises ConfigError with the remedy."""
        try:
            metrics = self._client.get(f"{self.url}/metrics")
            health = self._client.get(f"{self.url}/health")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(f"--url {self.url}: {error}; is the server running?") from error
        if metrics.status_code == 401:
            raise ConfigError(f"{self.url} asks for a key; put it into {KEY_VARIABLE}")
        try:
            told = health.json()
            if metrics.status_code == 503:  # it is loading
                return Sight(time.monotonic(), {}, told)
            return Sight(time.monotonic(), read_series(metrics.text), told)
        except ValueError as error:
            raise ConfigError(f"--url {self.url}: this is no rackserve ({error})") from error


def read_series(text: str) -> dict[str, dict[Labels, float]]:
    """Our series in a Prometheus exposition."""
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                own = found.setdefault(sample.name.removeprefix(PREFIX), {})
                own[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def rate(before: Sight, now: Sight, name: str, **labels: str) -> float:
    """Growth of a counter per second; 0 where the server started anew between."""
    seconds = now.at_s - before.at_s
    return max(0.0, now.total(name, **labels) - before.total(name, **labels)) / seconds if seconds > 0 else 0.0


def quantile(before: Sight, now: Sight, name: str, share: float) -> float | None:
    """A quantile of what a histogram took in between two looks, interpolated in its bucket; None if there was nothing."""
    counts = []
    for labels, value in now.series.get(f"{name}_bucket", {}).items():
        counts.append((float(dict(labels)["le"]), value - before.series.get(f"{name}_bucket", {}).get(labels, 0.0)))
    counts.sort()
    if not counts or counts[-1][1] <= 0:
        return None
    wanted, below, start = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            if bound == float("inf"):
                return start
            return start + (bound - start) * (wanted - below) / (count - below) if count > below else bound
        below, start = count, bound
    return start


def lines(before: Sight, now: Sight) -> list[str]:
    """What there is to see, for a terminal of 100 columns."""
    if now.is_router:
        return router_lines(before, now)
    return [headline(now), *flow(before, now), "", *rank_lines(before, now), *pool_lines(before, now)]


def headline(now: Sight) -> str:
    """The server's state in a line."""
    phase = str(now.health.get("phase") or ("ready" if now.health.get("ready") else "not ready"))
    stuck = now.health.get("stuck")
    where = f" ({stuck['where']} for {stuck['seconds']:.0f} s)" if stuck else ""
    return f"{phase}{where}   open requests {now.health.get('open_requests', 0)}"


def flow(before: Sight, now: Sight) -> list[str]:
    """Requests, tokens and waiting times between two looks."""
    prompt, cached, output = (
        rate(before, now, f"{name}_total") for name in ("prompt_tokens", "cached_prompt_tokens", "output_tokens")
    )
    part = f"{cached / prompt:.0%}" if prompt else "-"
    ended, errors = rate(before, now, "requests_total"), rate(before, now, "error_responses_total")
    times = []
    for title, name, unit in (("TTFT", "time_to_first_token_seconds", 1.0), ("ITL", "inter_token_latency_seconds", 1e3)):
        values = [quantile(before, now, name, share) for share in QUANTILES]
        told = " / ".join("-" if value is None else f"{value * unit:.3g}" for value in values)
        times.append(f"{title} p50/p99 {told} {'s' if unit == 1.0 else 'ms'}")
    return [
        f"requests {ended:.1f}/s, errors {errors:.1f}/s   {'   '.join(times)}",
        f"tokens/s: input {prompt:,.0f} ({part} cached), output {output:,.0f} (of requests that ended)",
    ]


WORKERS = ("up", "circuit", "holdings", "in_flight")
"""What a router's /health tells of each of its workers, and is shown."""

HEAD = ("rank", "state", "pid", "running", "queued", "steps/s", "tokens/s", "KV used", "cached", "restarts")


def rank_rows(before: Sight, now: Sight) -> list[tuple[str, ...]]:
    """A row under `HEAD` for each rank."""
    workers = {str(each.get("worker")): each for each in now.health.get("ranks", [])}
    rows = []
    for labels in now.series.get("rank_up", {}):
        rank = dict(labels)["rank"]
        worker = workers.get(rank.rpartition(".")[0], {})
        total = now.total("kv_blocks", holder=rank, state="total")
        used, cached = (now.total("kv_blocks", holder=rank, state=state) for state in ("used", "cached"))
        rows.append(
            (
                rank,
                str(worker.get("state", "up" if now.total("rank_up", rank=rank) else "down")),
                str(worker.get("pid", "-")),
                f"{now.total('requests_running', rank=rank):.0f}",
                f"{now.total('requests_queued', rank=rank):.0f}",
                f"{rate(before, now, 'step_duration_seconds_count', rank=rank):.1f}",
                f"{rate(before, now, 'step_tokens_total', rank=rank):,.0f}",
                f"{used / total:.0%}" if total else "-",
                f"{cached / total:.0%}" if total else "-",
                f"{now.total('rank_restarts_total', rank=rank):.0f}",
            )
        )
    return sorted(rows, key=lambda row: (row[0].startswith("decode"), row[0]))


def router_lines(before: Sight, now: Sight) -> list[str]:
    """All there is to see of a router: what it forwards, and its workers."""
    prompt, cached = (rate(before, now, f"route_{name}_tokens_total") for name in ("prompt", "cached"))
    part = f"{cached / prompt:.0%}" if prompt else "-"
    rows: list[tuple[str, ...]] = [("worker", "up", "circuit", "holdings", "in flight", "tries/s", "failures")]
    for worker in now.health["workers"]:
        name = str(worker["worker"])
        told = [_said(worker.get(key, "-")) for key in WORKERS]
        sent = rate(before, now, "route_worker_requests_total", worker=name)
        failures = now.total("route_worker_failures_total", worker=name)
        rows.append((name, *told, f"{sent:.1f}", f"{failures:.0f}"))
    ended = rate(before, now, "route_requests_total")
    return [
        f"{headline(now)}   waiting for a worker {now.total('route_waiting_requests'):.0f}",
        f"requests {ended:.1f}/s, input tokens/s {prompt:,.0f} ({part} cached), as workers tell",
        "",
        *_table(rows),
    ]


def _said(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def rank_lines(before: Sight, now: Sight) -> list[str]:
    """The ranks as a table of text."""
    return _table([HEAD, *rank_rows(before, now)])


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def pool_lines(before: Sight, now: Sight) -> list[str]:
    """What the pool holds and gives, and KV on the move."""
    total, cached = (now.total("kv_blocks", holder="pool.0", state=state) for state in ("total", "cached"))
    hits, misses = (rate(before, now, f"pool_{name}_blocks_total") for name in ("hit", "missed"))
    moved = {kind: rate(before, now, "transfer_bytes_total", kind=kind) / 1e6 for kind in ("fetch", "push", "spill")}
    share = f"{cached / total:.0%} full" if total else "none"
    return [
        "",
        f"pool {share}, blocks/s found {hits:.0f}, not found {misses:.0f}   "
        f"MB/s: {', '.join(f'{kind} {value:.1f}' for kind, value in moved.items())}",
    ]
