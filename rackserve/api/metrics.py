"""Prometheus metrics: a recorder of events, plus what only the front end sees. All series exist from the first scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from rackserve.api.engine_info import EngineInfo
from rackserve.api.errors import STATUSES
from rackserve.api.holdings import Holdings
from rackserve.api.step_parts import StepParts
from rackserve.api.vllm_names import VllmNames
from rackserve.base.events import (
    AttemptRetried,
    BlocksEvicted,
    DraftsVerified,
    Event,
    FirstTokenSent,
    MessageDropped,
    Preempted,
    PrefillAdmitted,
    QueueChanged,
    RankChanged,
    RequestArrived,
    RequestEnded,
    StepDone,
    TransferDone,
)
from rackserve.base.ids import POOL_RANK, Rank
from rackserve.base.units import to_seconds

disable_created_metrics()  # type: ignore[no-untyped-call]  # only the series in the stored list; process-wide

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ITL_S = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.0)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_MOVE_S = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_POSITIONS = (0, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144)
_STEP_S = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.0, 5.0)

REASONS = ("stop", "length", "cancelled", "other")
"""Why answers ended; refusals are told by their status."""

OUTCOMES = ("finished", "aborted", "refused")
ERRORS = (*map(str, STATUSES), "stream")
TRANSFER_KINDS = ("fetch", "push", "spill")
TRANSFER_OUTCOMES = ("finished", "failed")
DRAFT_POSITIONS = ("1", "2", "3", "4", "5")
"""Positions whose series exist from the start; deeper drafts add theirs when they are first verified."""

_MAX_UNKNOWN_NAMES = 100


class Metrics:
    """A `Recorder` (see ports) that keeps counts. `ranks` are those of the rack, so that their series start at zero.

    aliases     give the same numbers under vLLM's names, too
    vllm_names  those; whoever knows the model's name tells it to them
    """

    def __init__(self, ranks: Iterable[Rank] = (), *, aliases: bool = False) -> None:
        self.registry = CollectorRegistry()
        ranks = list(ranks)
        self.holdings = Holdings(ranks)
        self.registry.register(self.holdings)
        self.step_parts = StepParts(ranks)
        self.registry.register(self.step_parts)
        self.engine_info = EngineInfo(ranks)
        self.registry.register(self.engine_info)
        self._ranks = [str(rank) for rank in ranks]
        self._unknown_names: set[str] = set()
        self._incarnations: dict[Rank, int] = {}
        self._down: set[Rank] = set()
        self._define_requests()
        self._define_ranks()
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            RequestArrived: lambda event: self._arrived.inc(),
            PrefillAdmitted: self._on_admitted,
            FirstTokenSent: lambda event: self._ttft.observe(to_seconds(event.ttft_ns)),
            RequestEnded: self._on_ended,
            StepDone: self._on_step,
            DraftsVerified: self._on_drafts,
            QueueChanged: self._on_queue,
            TransferDone: self._on_transfer,
            BlocksEvicted: lambda event: self._evicted.labels(str(event.holder)).inc(event.num_blocks),
            Preempted: lambda event: self._preempted.labels(str(event.rank)).inc(),
            AttemptRetried: lambda event: self._retried.inc(),
            MessageDropped: lambda event: self._dropped.inc(),
            RankChanged: self._on_rank,
        }
        self._aliases = CollectorRegistry()
        self.vllm_names = VllmNames(self.registry)
        if aliases:
            self._aliases.register(self.vllm_names)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"rackserve_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"rackserve_{name}_seconds", text, labels, buckets=buckets, registry=self.registry)

    def _define_requests(self) -> None:
        self._arrived = self._counter("requests_received", "Requests that reached the frontend (n counts n times)")
        self._ended = self._counter("requests", "Requests that ended, by outcome", "outcome")
        _start(self._ended, OUTCOMES)
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of requests that ended")
        self._cached = self._counter("cached_prompt_tokens", "Prompt tokens that were not computed, of requests that ended")
        self._output = self._counter("output_tokens", "Output tokens of requests that ended")
        self._reasons = self._counter("answers_ended", "Answers that ended, by reason (other: lost, or too late)", "reason")
        _start(self._reasons, REASONS)
        self._waited = self._histogram("queue_time", "From arrival at a prefill rank to admission there", _TTFT_S)
        self._decoded = self._histogram("decode_time", "From the first token to the end of finished requests", _E2E_S)
        self._admitted = self._counter(
            "prefill_tokens", "Prompt tokens of admitted attempts, by where their KV is from", "source"
        )
        _start(self._admitted, ("local", "fetched", "computed"))
        self._ttft = self._histogram("time_to_first_token", "From arrival at the frontend to the first token", _TTFT_S)
        self._itl = self._histogram("inter_token_latency", "Gap between output tokens as the front end sees them", _ITL_S)
        self._e2e = self._histogram("request_duration", "From arrival to end of finished requests", _E2E_S)
        self._retried = self._counter("attempts_retried", "Attempts that were lost and placed again")
        self._dropped = self._counter("messages_dropped", "Messages that came late, twice or unasked, or were lost")
        self._clamped = self._counter("max_tokens_clamped", "Choices whose max_tokens was cut to the room in the context")
        self._left = Histogram(
            "rackserve_prompt_left_at_tokens",
            "Position at which a prompt left the last one of its session (low: a client changed what it had begun with)",
            buckets=_POSITIONS,
            registry=self.registry,
        )
        self._unknown = self._counter("unknown_fields", "Request fields nobody knows, let through without effect")
        self._gone = self._counter("clients_gone", "Exchanges that the client left before their end")
        self._errors = self._counter("error_responses", "Errors told to clients: HTTP status, or inside a stream", "status")
        _start(self._errors, ERRORS)

    def _define_ranks(self) -> None:
        holders = [*self._ranks, str(POOL_RANK)]
        self._running = Gauge("rackserve_requests_running", "Running on a rank", ["rank"], registry=self.registry)
        self._queued = Gauge("rackserve_requests_queued", "Queued on a rank", ["rank"], registry=self.registry)
        self._up = Gauge("rackserve_rank_up", "1 while the rank is up", ["rank"], registry=self.registry)
        self._restarts = self._counter("rank_restarts", "Times a rank came up again", "rank")
        self._steps = self._histogram(
            "step_duration", "Engine time of a step (its count is the number of steps)", _STEP_S, "rank"
        )
        self._new_tokens = self._counter("step_tokens", "Positions computed", "rank")
        self._preempted = self._counter("preemptions", "Sequences that gave way to others", "rank")
        for metric in (self._running, self._queued, self._up, self._restarts, self._steps, self._new_tokens, self._preempted):
            _start(metric, self._ranks)
        self._drafting = self._counter("draft_turns", "Turns of a sequence in a step that might verify drafts; each yields "
                                       "one token that no draft gave: tokens per turn are 1 + accepted / turns")  # fmt: skip
        self._verified = self._counter("drafts_verified", "Drafts verified, by position after the known token", "position")
        self._accepted = self._counter("drafts_accepted", "Drafts accepted, by position after the known token", "position")
        _start(self._verified, DRAFT_POSITIONS)
        _start(self._accepted, DRAFT_POSITIONS)
        self._evicted = self._counter("blocks_evicted", "KV blocks evicted", "holder")
        _start(self._evicted, holders)
        self._transfers = self._counter("transfers", "KV transfers that ended", "kind", "outcome")
        self._moving = self._histogram("transfer_duration", "Duration of finished KV transfers", _MOVE_S, "kind")
        _start(self._moving, TRANSFER_KINDS)
        self._moved = self._counter("transfer_bytes", "Bytes of finished KV transfers", "kind")
        _start(self._moved, TRANSFER_KINDS)
        for kind in TRANSFER_KINDS:
            for outcome in TRANSFER_OUTCOMES:
                self._transfers.labels(kind, outcome)

    def record(self, event: Event) -> None:
        """Count `event`; types without a metric are ignored."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def _on_admitted(self, event: PrefillAdmitted) -> None:
        self._admitted.labels("local").inc(event.local_tokens)
        self._admitted.labels("fetched").inc(event.fetched_tokens)
        self._admitted.labels("computed").inc(event.prompt_tokens - event.local_tokens - event.fetched_tokens)
        self._waited.observe(to_seconds(event.waited_ns))

    def _on_ended(self, event: RequestEnded) -> None:
        self._ended.labels(event.outcome).inc()
        if event.outcome == "refused":
            return
        self._prompt.inc(event.prompt_tokens)
        self._cached.inc(event.cached_tokens)
        self._output.inc(event.output_tokens)
        self._reasons.labels(event.reason if event.reason in REASONS else "other").inc()
        if event.outcome == "finished":
            self._e2e.observe(to_seconds(event.total_ns))
            if event.ttft_ns >= 0:
                self._decoded.observe(to_seconds(event.total_ns - event.ttft_ns))

    def _on_step(self, event: StepDone) -> None:
        self._steps.labels(str(event.rank)).observe(to_seconds(event.duration_ns))
        self._new_tokens.labels(str(event.rank)).inc(event.new_tokens)

    def _on_drafts(self, event: DraftsVerified) -> None:
        self._drafting.inc(event.num_sequences)
        for metric, numbers in ((self._verified, event.verified), (self._accepted, event.accepted)):
            for position, number in enumerate(numbers, 1):
                metric.labels(str(position)).inc(number)

    def _on_queue(self, event: QueueChanged) -> None:
        if event.rank in self._down:
            return  # the last batch of a dead rank came after the news of its death
        self._running.labels(str(event.rank)).set(event.running)
        self._queued.labels(str(event.rank)).set(event.queued)

    def _on_transfer(self, event: TransferDone) -> None:
        self._transfers.labels(event.kind, event.outcome).inc()
        if event.outcome == "finished":
            self._moved.labels(event.kind).inc(event.num_bytes)
            self._moving.labels(event.kind).observe(to_seconds(event.duration_ns))

    def _on_rank(self, event: RankChanged) -> None:
        """A restart shows as a higher incarnation; a rank that is not up runs and queues nothing."""
        name, known = str(event.rank), self._incarnations.get(event.rank)
        if known is not None and event.incarnation > known:
            self._restarts.labels(name).inc(event.incarnation - known)
        self._incarnations[event.rank] = max(event.incarnation, known or 0)
        self._up.labels(name).set(event.state == "up")
        self._down.discard(event.rank)
        if event.state != "up":
            self._down.add(event.rank)
            self._running.labels(name).set(0)
            self._queued.labels(name).set(0)

    def tokens_arrived(self, gap_s: float, num_tokens: int) -> None:
        """`num_tokens` output tokens came together, `gap_s` seconds after those before."""
        for _ in range(num_tokens):
            self._itl.observe(gap_s / num_tokens)

    def output_clamped(self, choices: int) -> None:
        """The max_tokens of `choices` choices was cut to the room left."""
        self._clamped.inc(choices)

    def prompt_left(self, position: int) -> None:
        """A prompt is not its session's last one gone on with: they differ from token `position` on."""
        self._left.observe(position)

    def unknown_field(self, name: str) -> bool:
        """A field nobody knows was let through. True if `name` is new, so that a log line is due (of a bounded number)."""
        self._unknown.inc()
        if name in self._unknown_names or len(self._unknown_names) >= _MAX_UNKNOWN_NAMES:
            return False
        self._unknown_names.add(name)
        return True

    def client_gone(self) -> None:
        """A client left before the end of its exchange."""
        self._gone.inc()

    def error_sent(self, status: str) -> None:
        """A client was told of an error: its HTTP status, or "stream" for one inside a stream."""
        self._errors.labels(status).inc()

    def exposition(self) -> bytes:
        """All metrics in the Prometheus text format. Asks the holdings, so not for another thread than the control plane's."""
        return generate_latest(self.registry) + generate_latest(self._aliases)


def _start(metric: Counter | Gauge | Histogram, values: Iterable[str]) -> None:
    """Let the series of a metric with one label exist from the start."""
    for value in values:
        metric.labels(value)
