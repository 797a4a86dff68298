"""Prefixes pulled from another engine's host memory against computing them again, as llm-d published it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log

from rackserve.architectures import architecture_named
from rackserve.base.rng import Stream
from rackserve.base.units import NS_PER_S
from rackserve.bench.metrics import percentile
from rackserve.pool.planner import FetchRates
from rackserve.route.placement import POLICIES
from rackserve.validation.engine import Ask, Limits
from rackserve.validation.fleet import Fleet, Served
from rackserve.validation.mixed_time import MixedTime
from rackserve.validation.models import gpt_oss
from rackserve.validation.routed import BLOCK_TOKENS, CHUNK_TOKENS, MAX_SEQUENCES, SEED, block_ids, chain_of
from rackserve.validation.rows import Row, Trial

SOURCE = "llm-d, Move the KV, not the work, 2026-08"
LATENCY_NS = 200_000
LENGTHS = (2_048, 8_192, 16_384, 32_768, 49_152)
COMPUTED_MS = (78.0, 250.0, 510.0, 1_173.0, 1_988.0)
PULLED_MS = (35.0, 57.0, 86.0, 165.0, 235.0)

PREFIXES, PREFIX_TOKENS, POOL_ENGINES = 64, 16_384, 4
QUESTION_TOKENS, ANSWER_TOKENS = 128, 128
OFFERED = (4.0, 8.0, 12.0, 16.0)
ALONE_S, PULLED_S = (1.12, 2.49, 12.2, 21.3), (0.93, 1.41, 2.1, 7.8)
MOST = {"without": 10.3, "with": 12.6}
"""Requests a second served at the highest rate."""

WINDOW_S = 120.0

DOCUMENTS, DOCUMENT_TOKENS, DOCUMENT_ENGINES = 192, 49_152, 16
TURNS, ACTIVE = 6, 128


def pull_rates(time: MixedTime) -> FetchRates:
    """What pulling a block takes over the chip's network link, whole, against the modelled prefill rate."""
    return FetchRates(
        prefill_tokens_per_s=time.prompt_rate(CHUNK_TOKENS),
        fetch_bytes_per_s=time.setup.chip.number("nic_bytes_per_s"),
        block_bytes=int(time.architecture.kv_bytes * BLOCK_TOKENS),
        latency_ns=LATENCY_NS,
    )


def length_trials() -> list[Trial]:
    """One prompt on gpt-oss-120b: computed, and pulled, by length."""
    time = MixedTime(gpt_oss(), "h200")
    rates = pull_rates(time)
    computed = [1e3 * time.prompt_in_chunks(tokens, CHUNK_TOKENS) for tokens in LENGTHS]
    pulled = [1e3 * rates.fetch_ns(tokens // BLOCK_TOKENS) / NS_PER_S for tokens in LENGTHS]
    compared = [
        Row(f"{tokens:,} tokens: computing over pulling", "x", a / b, c / d)
        for tokens, a, b, c, d in zip(LENGTHS, COMPUTED_MS, PULLED_MS, computed, pulled, strict=True)
    ]
    return [
        Trial(
            "computing a prefix again",
            SOURCE,
            f"gpt-oss-120b on one H200, passes of {CHUNK_TOKENS:,}",
            _rows(COMPUTED_MS, computed),
        ),
        Trial("pulling it", SOURCE, "the same, all layers' rows over a whole network link", _rows(PULLED_MS, pulled)),
        Trial("which of both is shorter (above 1: pulling)", SOURCE, "the same", tuple(compared)),
    ]


def _rows(published: Sequence[float], ours: Sequence[float]) -> tuple[Row, ...]:
    return tuple(Row(f"{tokens:,} tokens", "ms", a, b) for tokens, a, b in zip(LENGTHS, published, ours, strict=True))


def offered(rate: float, window_s: float) -> Iterator[tuple[float, Ask]]:
    """A Poisson stream of questions, each on a drawn prefix."""
    stream, at, number = Stream("prefixes", SEED), 0.0, 0
    texts = [block_ids(name, PREFIX_TOKENS) for name in range(PREFIXES)]
    while True:
        at -= log(1 - stream.unit()) / rate
        if at >= window_s:
            return
        chain = chain_of(texts[stream.below(PREFIXES)], block_ids(PREFIXES + number, QUESTION_TOKENS))
        yield at, Ask(number, "", chain, PREFIX_TOKENS + QUESTION_TOKENS, ANSWER_TOKENS)
        number += 1


def prefix_trials(rates: Sequence[float] = OFFERED, window_s: float = WINDOW_S) -> list[Trial]:
    """Shared prefixes under placement by load alone: how long requests take, with and without pulling."""
    time = MixedTime(architecture_named("llama-3.1-8b"), "h200")
    setup = (
        f"Llama-3.1-8B, {POOL_ENGINES} H200, {PREFIXES} prefixes of {PREFIX_TOKENS:,} tokens, placed by queued tokens; "
        f"questions and answers of {QUESTION_TOKENS} tokens, {window_s:g} s a rate (assumed: not published)"
    )
    found = {}
    for name, pull in (("without", None), ("with", pull_rates(time))):
        for rate in rates:
            limits = Limits(time.num_blocks(BLOCK_TOKENS), MAX_SEQUENCES, CHUNK_TOKENS)
            fleet = Fleet(POOL_ENGINES, limits, time, POLICIES["least_load"](), pull=pull)
            found[name, rate] = fleet.run(offered(rate, window_s))
    took = {key: percentile(sorted(each.last_s - each.arrived_s for each in served), 0.5) for key, served in found.items()}
    most = {name: len(found[name, rates[-1]]) / max(each.last_s for each in found[name, rates[-1]]) for name in MOST}
    published = dict(zip(OFFERED, zip(ALONE_S, PULLED_S, strict=True), strict=True))
    waits = [
        Row(f"{rate:g} req/s, {name} pulling", "s", published[rate][at], took[name, rate])
        for at, name in enumerate(MOST)
        for rate in rates
    ]
    served = [Row(f"{rates[-1]:g} req/s offered, {name} pulling", "req/s", MOST[name], most[name]) for name in MOST]
    gain = Row("with over without", "x", MOST["with"] / MOST["without"], most["with"] / most["without"])
    return [
        Trial("shared prefixes: median request", SOURCE, setup, tuple(waits)),
        Trial("shared prefixes: most served", SOURCE, setup, (*served, gain)),
    ]


def conversations(
    num_documents: int, active: int, policy: str, blind: bool, pull: FetchRates | None, time: MixedTime
) -> list[Served]:
    """Every document asked about in turns, so many at once, after each was read once."""
    limits = Limits(time.num_blocks(BLOCK_TOKENS), MAX_SEQUENCES, CHUNK_TOKENS)
    fleet = Fleet(DOCUMENT_ENGINES, limits, time, POLICIES[policy](), pull=pull, blind=blind)
    texts = [block_ids(name, DOCUMENT_TOKENS) for name in range(num_documents)]
    fleet.run([(0.0, Ask(number, "", chain_of(text), DOCUMENT_TOKENS + 1, 1)) for number, text in enumerate(texts)])
    begin, waiting = fleet.now, list(range(active, num_documents))

    def ask(document: int, turn: int) -> Ask:
        number = (document + 1) * 1_000 + turn
        said = block_ids(num_documents + document, (turn + 1) * (QUESTION_TOKENS + ANSWER_TOKENS) - ANSWER_TOKENS)
        tokens = DOCUMENT_TOKENS + (turn + 1) * (QUESTION_TOKENS + ANSWER_TOKENS) - ANSWER_TOKENS
        return Ask(number, str(document), chain_of(texts[document], said), tokens, ANSWER_TOKENS)

    def follow(done: Served) -> Iterator[tuple[float, Ask]]:
        document, turn = divmod(done.ask.number, 1_000)
        if turn + 1 < TURNS:
            yield done.last_s, ask(document - 1, turn + 1)
        elif waiting:
            yield done.last_s, ask(waiting.pop(0), 0)

    return fleet.run([(begin, ask(document, 0)) for document in range(min(active, num_documents))], follow)


def document_trial(num_documents: int = DOCUMENTS, active: int = ACTIVE) -> Trial:
    """Documents asked about: affinity alone against least uncached work with pulling. Ratios, as turns are not published."""
    time = MixedTime(gpt_oss(), "h200")
    kept = conversations(num_documents, active, "least_uncached_work", True, None, time)
    moved = conversations(num_documents, active, "least_uncached_work", False, pull_rates(time), time)
    rows = []
    for share, a, b in ((0.5, 0.3, 0.6), (0.99, 25.2, 16.6)):
        ours = [percentile(sorted(each.ttft_s for each in served), share) for served in (kept, moved)]
        rows.append(Row(f"time to first token P{100 * share:g}, pulling over affinity", "x", b / a, ours[1] / ours[0]))
    spans = [max(each.last_s for each in served) - min(each.arrived_s for each in served) for served in (kept, moved)]
    rows.append(Row("throughput, pulling over affinity", "x", 1.35, spans[0] / spans[1]))
    setup = (
        f"gpt-oss-120b, {DOCUMENT_ENGINES} H200, {num_documents} documents of {DOCUMENT_TOKENS:,} tokens, read once before; "
        f"{TURNS} turns of {QUESTION_TOKENS} tokens each way, {active} conversations at once without pauses (assumed)"
    )
    return Trial("documents asked about", SOURCE, setup, tuple(rows))
