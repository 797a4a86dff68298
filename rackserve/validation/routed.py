"""Routing of one system prompt per customer to engines that keep it, as llm-d published it, on a simulated fleet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log

from rackserve.architectures import architecture_named
from rackserve.base.keys import CacheNamespace, Chain, extend_chain
from rackserve.base.rng import Stream
from rackserve.bench.metrics import percentile
from rackserve.bench.session import HASH_ID_BYTES
from rackserve.route.placement import POLICIES
from rackserve.validation.engine import Ask, Limits
from rackserve.validation.fleet import Fleet, Served, total_hits
from rackserve.validation.mixed_time import MixedTime
from rackserve.validation.models import gpt_oss
from rackserve.validation.rows import Row, Trial, largest_at

SOURCE = "llm-d, Sticky until saturated, 2026-08"
EARLIER = "llm-d, KV-cache wins you can see, 2025-09"
ENGINES = 8
CUSTOMERS, QUESTIONS = 150, 5
PROMPT_TOKENS, QUESTION_TOKENS, OUTPUT_TOKENS = 6_000, 1_200, 1_000
CHUNK_TOKENS = 8_192
MAX_SEQUENCES = 256
BLOCK_TOKENS = 16
RATES = (3.0, 6.0, 10.0, 14.0, 18.0, 22.0, 26.0, 30.0, 34.0, 38.0, 42.0, 46.0, 50.0, 60.0)
STAGE_S = 40.0
TOLERANCE_S = 14.0
"""Time to first token (P90) up to which a rate counts as below the knee: the tolerance that the source takes."""

MEASURED_RATE = 20_480.0
SEED = 42
ARMS = {"round robin": "round_robin", "least uncached work": "least_uncached_work"}


def block_ids(name: int, tokens: int) -> bytes:
    """Ids of the blocks of a text of its own."""
    first, count = name * 10_000, tokens // BLOCK_TOKENS
    return b"".join(number.to_bytes(HASH_ID_BYTES, "little") for number in range(first, first + count))


def chain_of(*texts: bytes) -> Chain:
    """Keys of the blocks of texts one after the other."""
    return extend_chain(b"", CacheNamespace("published", "0", BLOCK_TOKENS, "ids").root(), b"".join(texts), 1)


def customer_chains() -> list[Chain]:
    """Prompts of every customer's every question."""
    return [
        chain_of(block_ids(customer, PROMPT_TOKENS), block_ids(CUSTOMERS + QUESTIONS * customer + question, QUESTION_TOKENS))
        for customer in range(CUSTOMERS)
        for question in range(QUESTIONS)
    ]


def stage(rate: float, begin: float, first: int, chains: Sequence[Chain], stage_s: float) -> Iterator[tuple[float, Ask]]:
    """Requests in a Poisson stream of `rate` a second for `stage_s`, each of a drawn customer and question."""
    stream, at, number = Stream("arrivals", SEED, first), begin, first
    while True:
        at -= log(1 - stream.unit()) / rate
        if at >= begin + stage_s:
            return
        yield at, Ask(number, "", chains[stream.below(len(chains))], PROMPT_TOKENS + QUESTION_TOKENS, OUTPUT_TOKENS)
        number += 1


def ramp(policy: str, time: MixedTime, rates: Sequence[float] = RATES, stage_s: float = STAGE_S) -> list[list[Served]]:
    """Requests of each stage. A stage begins when the one before it has been served; caches stay."""
    chains = customer_chains()
    fleet = Fleet(ENGINES, Limits(time.num_blocks(BLOCK_TOKENS), MAX_SEQUENCES, CHUNK_TOKENS), time, POLICIES[policy]())
    stages: list[list[Served]] = []
    for rate in rates:
        stages.append(fleet.run(stage(rate, fleet.now, sum(map(len, stages)), chains, stage_s)))
    return stages


def ttft_p90(served: Sequence[Served]) -> float:
    """Seconds."""
    return percentile(sorted(each.ttft_s for each in served), 0.9)


def rate_trial() -> Trial:
    """Prefill rates that were measured for that router."""
    dense = architecture_named("qwen3-32b")
    paths = (
        ("gpt-oss-120b, H100", 39_065.0, MixedTime(gpt_oss(), "h100")),
        ("Qwen3-32B, 2 H100, vLLM", MEASURED_RATE, MixedTime(dense, "h100", tp=2)),
        ("Qwen3-32B, 2 H100, SGLang", 15_360.0, MixedTime(dense, "h100", tp=2)),
        ("Qwen3-VL-32B, 2 H200 (as Qwen3-32B)", 15_751.0, MixedTime(dense, "h200", tp=2)),
    )
    rows = [Row(what, "tok/s", published, time.prompt_rate(CHUNK_TOKENS)) for what, published, time in paths]
    return Trial("prefill rate of one engine", SOURCE, f"one prompt of {CHUNK_TOKENS:,} tokens, no cache", tuple(rows))


def routed_trials(rates: Sequence[float] = RATES, stage_s: float = STAGE_S) -> list[Trial]:
    """Where time to first token runs away under each arm, with the modelled and with the measured prefill rate."""
    dense = architecture_named("qwen3-32b")
    modelled = MixedTime(dense, "h100", tp=2)
    scale = modelled.prompt_rate(CHUNK_TOKENS) / MEASURED_RATE
    given = MixedTime(dense, "h100", tp=2, prompt_scale=scale)
    setup = (
        f"{ENGINES} engines of 2 H100, Qwen3-32B, {CHUNK_TOKENS:,} tokens a pass; {CUSTOMERS} prompts of {PROMPT_TOKENS:,} "
        f"tokens, {QUESTIONS} questions of {QUESTION_TOKENS:,} each, {OUTPUT_TOKENS:,} tokens answered; stages of {stage_s:g} "
        f"s, each served to its end (length assumed); knee: highest rate with P90 time to first token within {TOLERANCE_S:g} s"
    )
    trials = [rate_trial()]
    for name, time in (("step times of the cost model", modelled), ("prefill rate as measured by them (input)", given)):
        arms = {arm: ramp(policy, time, rates, stage_s) for arm, policy in ARMS.items()}
        trials.append(Trial(f"knee of routing, {name}", SOURCE, setup, _knees(arms, rates)))
    memory = Row("KV cache of an engine", "tokens", 307_328.0, float(modelled.num_blocks(BLOCK_TOKENS) * BLOCK_TOKENS))
    return [*trials, Trial("memory for KV", EARLIER, "Qwen3-32B on 2 H100", (memory,))]


def _knees(arms: dict[str, list[list[Served]]], rates: Sequence[float]) -> tuple[Row, ...]:
    knees = {arm: largest_at(rates, [ttft_p90(served) for served in stages], TOLERANCE_S) for arm, stages in arms.items()}
    published = dict(zip(ARMS, (18.0, 38.0), strict=True))
    rows = [Row(f"knee, {arm}", "req/s", published[arm], knees[arm]) for arm in ARMS]
    first, second = ARMS
    rows.append(Row("knee, second over first", "x", 38 / 18, knees[second] / knees[first] if knees[first] else 0.0))
    busy = [served for at, stages in enumerate(arms[second]) if 20 < rates[at] <= 46 for served in stages]
    if busy:
        rows.append(Row("hit rate by least uncached work, 22-46 req/s", "share", 0.92, total_hits(busy)))
    return tuple(rows)
