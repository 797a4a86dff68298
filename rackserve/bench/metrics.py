"""From request records to the figures of a run. Every figure's rule is in `DEFINITIONS`, which goes into each result file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from rackserve.base.events import DraftsVerified, StepDone
from rackserve.base.units import NS_PER_MS, NS_PER_S, Time
from rackserve.bench.records import RecordedEvent, RequestRecord, RunInfo
from rackserve.bench.slices import Slices, slices_of

DEFINITIONS = {
    "percentile": "linear interpolation between order statistics: rank (n - 1) * q",
    "population": "latencies and rates over requests that succeeded; warm-up requests are left out; failures are counted apart",
    "ttft_ms": "first output minus actual sending, over requests",
    "ttft_from_due_ms": "first output minus planned sending, over requests: a late client cannot hide a stall",
    "tpot_ms": "one value per request: (last output - first output) / (output tokens - 1), output tokens by the server's usage",
    "chunk_gap_ms": "over all gaps between chunks of all requests; a chunk may hold several tokens, so it is no time per "
    "token; absent where a simulated rank decodes many steps at once, because its chunks are as long as its events",
    "e2e_ms": "last output minus actual sending, over requests",
    "e2e_from_due_ms": "last output minus planned sending, over requests",
    "send_delay_ms": "actual minus planned sending, over requests",
    "interactivity": "tokens/s/user: p50 is 1 / p50(tpot), p90 is 1 / p90(tpot), so p90 is the slow tail",
    "interactivity_e2e_normalised": "1 / p90(e2e / output tokens): another figure than interactivity, not comparable with it",
    "throughput": "tokens of successful requests / (last end - first sending); cached input, uncached input and output apart",
    "throughput_per_gpu": "the same, divided by all GPUs of the rack, prefill and decode",
    "steady_throughput": "only requests that ended before the first lane found no further session, over that time",
    "draft_acceptance": "by draft position: drafts accepted / drafts verified there; one is accepted only with all before it",
    "tokens_per_step_with_bonus": "1 + drafts accepted / turns of sequences in steps that might verify drafts: the token that "
    "no draft gave counts, and so does a turn in which nothing was verified",
    "hit_rate": "cached / prompt tokens by the server's usage",
    "ideal_hit_rate": "an infinite cache over served blocks, the same prompts in order of sending, last token always computed",
    "ideal_trace_hit_rate": "an infinite cache over the blocks of the trace: hits / blocks",
    "num_sessions_done": "session trees that ended after warming up, all their requests sent",
    "requests_per_session": "requests done / sessions done: what a completed session took; None without one",
    "slices": "tokens of successes, second by second: input where the first output came, output where its chunks came",
    "interrupted": "a person ended the run before its end; figures are of what was done till then",
    "unfinished": "in flight when the run ended; their tokens count nowhere",
    "client": "how late the event loop of a live run's client woke up, measured every 20 ms, and its CPU time per second",
    "bench_serve": "the same figures under the names `vllm bench serve` gives them; its itl is our chunk gap, its total "
    "throughput includes cached input",
}

FEW_TOKENS = 3
"""Output tokens that a server may well have together when it comes to send the first; more in one chunk are no stream."""

STAMPED_LATE = "chunks were stamped late"
"""What a warning says where times are in part the client's own."""


class Distribution(msgspec.Struct, frozen=True):
    """Order statistics of a figure over `count` values."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float
    std: float = 0.0


class Throughput(msgspec.Struct, frozen=True):
    """Tokens per second, always as three numbers."""

    cached_input: float
    uncached_input: float
    output: float

    @property
    def total_with_cached_input(self) -> float:
        """The sum that grows with the hit rate alone; never shown without its parts."""
        return self.cached_input + self.uncached_input + self.output

    def scaled(self, factor: float) -> Throughput:
        return Throughput(self.cached_input * factor, self.uncached_input * factor, self.output * factor)


class Limits(msgspec.Struct, frozen=True):
    """Beyond these a run is marked invalid. Shares of all requests that ended; `send_delay_ms` is a p99.

    `prompt_share` only warns: prompts are together that much longer or shorter by the server's count than was meant. So do the
    last three, that the client was the bottleneck: its p99 lag is above `lag_ms` and above `lag_share` of the median time per
    token, or it used more than `cpu_share` of a core.
    """

    failed_share: float = 0.10
    overflow_share: float = 0.01
    mismatch_share: float = 0.01
    coverage: float = 0.95
    send_delay_ms: float = 1_000.0
    prompt_share: float = 0.1
    lag_ms: float = 5.0
    lag_share: float = 0.25
    cpu_share: float = 0.9


class Summary(msgspec.Struct, frozen=True):
    """The figures of one run; see `DEFINITIONS`. Absent figures (nothing succeeded, no gaps) are None.

    num_sent = num_done + num_failed + num_unfinished. num_no_gap: successes with fewer than two output tokens or all of
    them at one moment, which give no time per token. num_output_mismatch: the server's output count is not the one asked for;
    num_received_mismatch: it is not the one the client counted. `coverage`: share of successes of two or more output tokens
    that have a time per token, those left out that came too fast to tell (`warnings` counts them).
    """

    run: RunInfo
    valid: bool
    invalid_reasons: tuple[str, ...]
    num_sent: int
    num_done: int
    num_failed: int
    num_unfinished: int
    failures: dict[str, int]
    num_warmup: int
    num_no_gap: int
    num_output_mismatch: int
    num_prompt_mismatch: int
    num_received_mismatch: int
    coverage: float
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    hit_rate: float | None
    ideal_hit_rate: float | None
    ideal_trace_hit_rate: float | None
    throughput: Throughput
    throughput_per_gpu: Throughput
    steady_throughput: Throughput | None
    steady_s: float
    requests_per_s: float
    interactivity_p50: float | None
    interactivity_p90: float | None
    interactivity_e2e_normalised: float | None
    ttft_ms: Distribution | None
    ttft_from_due_ms: Distribution | None
    tpot_ms: Distribution | None
    chunk_gap_ms: Distribution | None
    e2e_ms: Distribution | None
    e2e_from_due_ms: Distribution | None
    send_delay_ms: Distribution | None
    draft_acceptance: tuple[float, ...] | None = None
    tokens_per_step_with_bonus: float | None = None
    warnings: tuple[str, ...] = ()
    num_sessions_done: int | None = None
    slices: Slices | None = None

    @property
    def requests_per_session(self) -> float | None:
        """Requests done for each session done: what the price of a completed session is counted with."""
        return self.num_done / self.num_sessions_done if self.num_sessions_done else None

    @property
    def exit_code(self) -> int:
        """0 for a valid run, else 1."""
        return 0 if self.valid else 1


def percentile(ordered: Sequence[float], share: float) -> float:
    """The `share` quantile of values in ascending order, by linear interpolation at rank (n - 1) * share."""
    rank = (len(ordered) - 1) * share
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def distribution(values: Sequence[float]) -> Distribution | None:
    """Order statistics of `values`; None if there are none."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    mean = sum(ordered) / len(ordered)
    std = (sum((value - mean) ** 2 for value in ordered) / len(ordered)) ** 0.5
    return Distribution(len(ordered), mean, ordered[0], p50, p90, p99, ordered[-1], std)


def tpot_ms(record: RequestRecord) -> float | None:
    """Time per output token after the first, by the server's count; None where the answer gives no such time."""
    if record.output_tokens < 2 or record.num_chunks < 2 or _came_at_once(record):
        return None
    return (record.last_ns - record.first_ns) / (record.output_tokens - 1) / NS_PER_MS


def _came_at_once(record: RequestRecord) -> bool:
    """The server sent several chunks, but faster than the client could take them one by one; or a few tokens in one chunk."""
    return record.last_ns <= record.first_ns if record.num_chunks >= 2 else 2 <= record.output_tokens <= FEW_TOKENS


def _throughput(done: Sequence[RequestRecord], duration_ns: Time) -> Throughput:
    if duration_ns <= 0:
        return Throughput(0.0, 0.0, 0.0)
    cached = sum(record.cached_tokens for record in done)
    prompt = sum(record.prompt_tokens for record in done)
    output = sum(record.output_tokens for record in done)
    return Throughput(cached, prompt - cached, output).scaled(NS_PER_S / duration_ns)


def _ms(done: Sequence[RequestRecord], later: str, earlier: str) -> Distribution | None:
    values = [(getattr(r, later) - getattr(r, earlier)) / NS_PER_MS for r in done if getattr(r, later) >= 0]
    return distribution(values)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _inverse_s(ms: float | None) -> float | None:
    return 1_000.0 / ms if ms else None


def acceptance(events: Iterable[RecordedEvent]) -> tuple[tuple[float, ...], float] | None:
    """(`draft_acceptance`, `tokens_per_step_with_bonus`) of a run's events; None if no draft was verified."""
    verified: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    num_turns = 0
    for recorded in events:
        if isinstance(recorded.event, DraftsVerified):
            num_turns += recorded.event.num_sequences
            verified.update(dict(enumerate(recorded.event.verified)))
            accepted.update(dict(enumerate(recorded.event.accepted)))
    if not verified.total():
        return None
    shares = tuple(accepted[position] / verified[position] for position in sorted(verified) if verified[position])
    return shares, 1 + accepted.total() / num_turns


def summarize(
    run: RunInfo, records: Sequence[RequestRecord], limits: Limits | None = None, events: Iterable[RecordedEvent] = ()
) -> Summary:
    """The figures of a run from its request records and the rack's events; a summary comes out whatever failed."""
    limits = limits or Limits()
    measured = [record for record in records if not record.warmup]
    done = [record for record in measured if not record.error]
    failures = Counter(record.error for record in measured if record.error and record.error != "unfinished")
    num_unfinished = sum(record.error == "unfinished" for record in measured)
    tpots = [value for record in done if (value := tpot_ms(record)) is not None]
    tpot = distribution(tpots)
    events = tuple(events)
    in_one_go = run.host != "live" and any(isinstance(e := item.event, StepDone) and e.num_passes > 1 for item in events)
    gaps = [] if in_one_go else [(b - a) / NS_PER_MS for r in done for a, b in zip(r.chunk_ns, r.chunk_ns[1:], strict=False)]
    normalised = distribution([(r.last_ns - r.sent_ns) / r.output_tokens / NS_PER_MS for r in done if r.output_tokens])
    first_ns = min((record.sent_ns for record in done), default=0)
    duration_ns = max((record.ended_ns for record in done), default=0) - first_ns
    steady_ns = max(0, run.steady_end_ns - first_ns) if run.steady_end_ns is not None and done else 0
    steady = [record for record in done if record.ended_ns <= first_ns + steady_ns]
    whole = _throughput(done, duration_ns)
    expected = sum(record.output_tokens >= 2 and not _came_at_once(record) for record in done)
    prompt, cached = sum(record.prompt_tokens for record in done), sum(record.cached_tokens for record in done)
    planned = sum(record.planned_prompt_tokens for record in done)
    drafts = acceptance(events) or (None, None)
    summary = Summary(
        run=run,
        valid=True,
        invalid_reasons=(),
        num_sent=len(measured),
        num_done=len(done),
        num_failed=failures.total(),
        num_unfinished=num_unfinished,
        failures=dict(sorted(failures.items())),
        num_warmup=len(records) - len(measured),
        num_no_gap=len(done) - len(tpots),
        num_output_mismatch=sum(record.output_tokens != record.planned_output_tokens for record in done),
        num_prompt_mismatch=sum(record.prompt_tokens != record.planned_prompt_tokens for record in done),
        num_received_mismatch=sum(record.received_tokens not in (-1, record.output_tokens) for record in done),
        coverage=len(tpots) / expected if expected else 1.0,
        duration_s=duration_ns / NS_PER_S,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=sum(record.output_tokens for record in done),
        hit_rate=_share(cached, prompt),
        ideal_hit_rate=_share(sum(record.ideal_cached_tokens for record in done), planned),
        ideal_trace_hit_rate=_share(sum(r.trace_block_hits for r in done), sum(r.trace_blocks for r in done)),
        throughput=whole,
        throughput_per_gpu=whole.scaled(1 / run.num_gpus),
        steady_throughput=_throughput(steady, steady_ns) if steady_ns else None,
        steady_s=steady_ns / NS_PER_S,
        requests_per_s=len(done) * NS_PER_S / duration_ns if duration_ns > 0 else 0.0,
        interactivity_p50=_inverse_s(tpot.p50 if tpot else None),
        interactivity_p90=_inverse_s(tpot.p90 if tpot else None),
        interactivity_e2e_normalised=_inverse_s(normalised.p90 if normalised else None),
        ttft_ms=_ms(done, "first_ns", "sent_ns"),
        ttft_from_due_ms=_ms(done, "first_ns", "due_ns"),
        tpot_ms=tpot,
        chunk_gap_ms=distribution(gaps),
        e2e_ms=_ms(done, "last_ns", "sent_ns"),
        e2e_from_due_ms=_ms(done, "last_ns", "due_ns"),
        send_delay_ms=_ms(measured, "sent_ns", "due_ns"),
        draft_acceptance=drafts[0],
        tokens_per_step_with_bonus=drafts[1],
        num_sessions_done=run.num_sessions,
        slices=slices_of(done),
    )
    reasons = _invalid_reasons(summary, done, limits)
    return msgspec.structs.replace(
        summary, valid=not reasons, invalid_reasons=reasons, warnings=_warnings(summary, done, limits)
    )


def _warnings(summary: Summary, done: Sequence[RequestRecord], limits: Limits) -> tuple[str, ...]:
    client, tpot = summary.run.client, summary.tpot_ms
    at_once = sum(_came_at_once(record) for record in done)
    found: list[str] = []
    if at_once:
        found.append(
            f"{at_once} answers came faster than the client could tell their chunks apart; they have no time per token"
        )
    planned = sum(record.planned_prompt_tokens for record in done)
    if planned and abs(summary.prompt_tokens - planned) > limits.prompt_share * planned:
        found.append(
            f"prompts are {summary.prompt_tokens / planned:.2g} times as long as meant (by the server's count "
            f"{summary.prompt_tokens:,} tokens for {planned:,}): its chat template, or words that it splits; "
            "--endpoint completions-tokens is exact"
        )
    if client is None:
        return tuple(found)
    if client.lag_p99_ms > max(limits.lag_ms, limits.lag_share * tpot.p50 if tpot else 0.0):
        found.append(
            f"the client was the bottleneck: it woke up to {client.lag_p99_ms:.0f} ms late (p99), so {STAMPED_LATE}; "
            "spread the load over several clients or give it a core of its own"
        )
    if client.cpu_share > limits.cpu_share:
        found.append(f"the client was the bottleneck: it used {client.cpu_share:.0%} of a core; use several clients")
    return tuple(found)


def _invalid_reasons(summary: Summary, done: Sequence[RequestRecord], limits: Limits) -> tuple[str, ...]:
    reasons: list[str] = [summary.run.aborted] if summary.run.aborted else []
    if summary.run.interrupted:
        reasons.append("the run was interrupted")
    ended = summary.num_done + summary.num_failed
    if not summary.num_done:
        reasons.append("no request succeeded")
    if summary.num_failed > limits.failed_share * ended:
        reasons.append(f"{summary.num_failed} of {ended} requests failed, above {limits.failed_share:.0%}")
    overflows = summary.failures.get("context_overflow", 0)
    if overflows > limits.overflow_share * ended:
        reasons.append(f"{overflows} of {ended} requests overflowed the context, above {limits.overflow_share:.0%}")
    if summary.coverage < limits.coverage:
        reasons.append(f"only {summary.coverage:.0%} of answers give a time per token, below {limits.coverage:.0%}")
    if summary.num_output_mismatch > limits.mismatch_share * summary.num_done:
        reasons.append(f"{summary.num_output_mismatch} answers have another length than asked for")
    if any(record.cached_tokens > record.prompt_tokens for record in done):
        reasons.append("the server reports more cached than prompt tokens")
    delay = summary.send_delay_ms
    if delay is not None and delay.p99 > limits.send_delay_ms:
        reasons.append(
            f"p99 send delay {delay.p99:.0f} ms is above {limits.send_delay_ms:.0f} ms: the client could not keep up"
        )
    return tuple(reasons)


def failures_of(records: Sequence[RequestRecord]) -> list[str]:
    """One line for each kind of failure, with what the first of them said."""
    failed = [record for record in records if record.error and record.error != "unfinished"]
    first = {record.error: record for record in reversed(failed)}
    counts = Counter(record.error for record in failed)
    return [
        f"{count} requests failed ({kind}), such as {first[kind].id}: {first[kind].detail}" for kind, count in counts.items()
    ]


def bench_serve_keys(summary: Summary) -> dict[str, float]:
    """The figures as `vllm bench serve` names them: its itl is a gap between chunks, its total includes cached input."""
    keys = {
        "duration": summary.duration_s,
        "num_prompts": float(summary.num_sent),
        "max_concurrency": float(summary.run.concurrency),
        "completed": float(summary.num_done),
        "failed": float(summary.num_failed),
        "total_input_tokens": float(summary.prompt_tokens),
        "total_output_tokens": float(summary.output_tokens),
        "request_throughput": summary.requests_per_s,
        "output_throughput": summary.throughput.output,
        "total_token_throughput": summary.throughput.total_with_cached_input,
    }
    named = {"ttft": summary.ttft_ms, "tpot": summary.tpot_ms, "itl": summary.chunk_gap_ms, "e2el": summary.e2e_ms}
    for name, values in named.items():
        if values is not None:
            keys |= {f"mean_{name}_ms": values.mean, f"median_{name}_ms": values.p50, f"std_{name}_ms": values.std}
            keys |= {f"p90_{name}_ms": values.p90, f"p99_{name}_ms": values.p99}
    return keys


def result_json(summary: Summary) -> bytes:
    """The result file of a run: the summary, the rules behind its figures, and the same under conventional names."""
    document = msgspec.to_builtins(summary)
    for name in ("throughput", "throughput_per_gpu", "steady_throughput"):
        part = getattr(summary, name)
        if part is not None:
            document[name]["total_with_cached_input"] = part.total_with_cached_input
    document["requests_per_session"] = summary.requests_per_session
    document["interrupted"] = summary.run.interrupted
    document |= {"definitions": DEFINITIONS, "bench_serve": bench_serve_keys(summary)}
    return msgspec.json.format(msgspec.json.encode(document), indent=2)
