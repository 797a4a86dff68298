"""The demo's two set-ups in simulation over seeds and cache sizes: KV pool and least uncached work against session affinity.

Simulated, with assumed step costs unless a calibrated run's costs.json is given: the differences are a prediction of the model,
not a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import msgspec
from measure import Claim, Figure, Options, Result, main, number

from rackserve.base.costs import StepCost
from rackserve.base.kv_layout import KvGroup, KvLayout
from rackserve.base.rng import Stream
from rackserve.bench.demo import demo_trace
from rackserve.bench.metrics import Summary, summarize
from rackserve.commands import link_of, read_costs
from rackserve.config import load_settings
from rackserve.demo import ARMS, CONCURRENCY, DEMO_SETTINGS, TIME_SCALE
from rackserve.replay import ASSUMED_COSTS, ReplaySpec, replay_simulated

SEEDS = 12
BLOCKS = (80, 104, 224)
"""KV blocks of a prefill rank: little more than the longest prompt needs, the demo's number, and twice that."""
LAYOUT = KvLayout(16, (KvGroup("kv", "full", 368_640),))
RESAMPLES = 2_000
POOL_BLOCKS = DEMO_SETTINGS.topology.segment_blocks * DEMO_SETTINGS.topology.num_segments


class Pair(msgspec.Struct, frozen=True):
    """Both set-ups on one seed: hit rate and median TTFT of affinity, and of pool."""

    affinity_hits: float
    pool_hits: float
    affinity_ttft_ms: float
    pool_ttft_ms: float

    @property
    def hit_points(self) -> float:
        return 100 * (self.pool_hits - self.affinity_hits)

    @property
    def ttft_ratio(self) -> float:
        return self.pool_ttft_ms / self.affinity_ttft_ms


def simulate(arm: str, blocks: int, seed: int, costs: dict[str, StepCost]) -> Summary:
    changes = [f"{key}={msgspec.json.encode(value).decode()}" for key, value in ARMS[arm].items()]
    settings = load_settings(None, [*changes, f"topology.prefill_blocks={blocks}"], DEMO_SETTINGS)
    trace = demo_trace(time_scale=TIME_SCALE).shuffled(seed)
    spec = ReplaySpec(arm[:1], trace, CONCURRENCY, TIME_SCALE, seed)
    recording = replay_simulated(spec, settings.rack, LAYOUT, costs, link_of(settings))
    return summarize(recording.run, recording.requests)


def pair_of(blocks: int, seed: int, costs: dict[str, StepCost]) -> Pair:
    affinity, pool = (simulate(arm, blocks, seed, costs) for arm in ARMS)
    for summary in (affinity, pool):
        assert not summary.num_failed, f"seed {seed}, {blocks} blocks: {summary.failures}"
    if affinity.ttft_ms is None or pool.ttft_ms is None:
        raise AssertionError(f"seed {seed}, {blocks} blocks: no request finished")
    return Pair(affinity.hit_rate or 0.0, pool.hit_rate or 0.0, affinity.ttft_ms.p50, pool.ttft_ms.p50)


def interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """95 % bootstrap interval of the mean: percentiles over resamples of `values`."""
    stream = Stream("bootstrap", seed)
    means = sorted(mean(values[stream.below(len(values))] for _ in values) for _ in range(RESAMPLES))
    return means[round(0.025 * (RESAMPLES - 1))], means[round(0.975 * (RESAMPLES - 1))]


def run(options: Options) -> Result:
    costs = read_costs(options.costs) if options.costs else ASSUMED_COSTS
    seeds = range(options.seed, options.seed + (2 if options.quick else SEEDS))
    figures: list[Figure] = []
    claims: list[Claim] = []
    notes = [f"Simulated; step costs {'from ' + options.costs if options.costs else 'assumed, not calibrated'}. "
             f"{len(seeds)} orders of the demo's sessions, {CONCURRENCY} at a time, 2 prefill ranks and 1 decode rank; paired "
             "by order. Ratios are pool / affinity."]  # fmt: skip
    for blocks in BLOCKS[:1] if options.quick else BLOCKS:
        pairs = [pair_of(blocks, seed, costs) for seed in seeds]
        points, ratios = [pair.hit_points for pair in pairs], [pair.ttft_ratio for pair in pairs]
        (low, high), (fast, slow) = interval(points, options.seed), interval(ratios, options.seed)
        size = f"{blocks} blocks a prefill rank"
        figures += [
            Figure(f"{size}: hit rate with affinity", "%", tuple(100 * pair.affinity_hits for pair in pairs)),
            Figure(f"{size}: hit rate with pool", "%", tuple(100 * pair.pool_hits for pair in pairs), "affinity",
                   tuple(pair.pool_hits / pair.affinity_hits for pair in pairs)),
            Figure(f"{size}: hit rate, pool minus affinity", "points", tuple(points)),
            Figure(f"{size}: median TTFT with pool", "ms", tuple(pair.pool_ttft_ms for pair in pairs), "affinity",
                   tuple(ratios)),
        ]  # fmt: skip
        claims += [
            Claim(f"{size}: the pool hits more: {_of(points, low, high)} points", low > 0),
            Claim(f"{size}: the pool answers sooner: median TTFT {_of(ratios, fast, slow)} times that of affinity", slow < 1),
        ]
        ahead, sooner = sum(point > 0 for point in points), sum(ratio < 1 for ratio in ratios)
        notes.append(f"{size}: the pool is ahead in hit rate in {ahead} of {len(pairs)} orders, in median TTFT in {sooner}.")
    notes.append(
        f"The set-ups differ in two things at once, caches and placement, and the pool has {POOL_BLOCKS} blocks of tray memory "
        "that affinity leaves unused: what it gains is the worth of all that together."
    )
    question = "What do a KV pool and placement by least uncached work change against per-rank caches with session affinity?"
    clock = "simulated time; one value per order of the sessions; intervals are 95 % bootstrap intervals of the mean"
    return Result("pool_vs_affinity", question, clock, tuple(claims), tuple(figures), tuple(notes))


def _of(values: Sequence[float], low: float, high: float) -> str:
    return f"{number(mean(values))} [{number(low)}, {number(high)}]"


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
