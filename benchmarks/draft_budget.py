"""Tokens per second of a decode group by which drafts it verifies: none, all, or those that pay for themselves.

Computed from a model of the costs and a published profile of acceptance, not measured on hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate

from measure import Claim, Figure, Options, Result, figure, main

from rackserve.base.rng import Stream
from rackserve.sched.draft_budget import POLICIES, CostTable, DraftCosts, Drafted, fit_costs

SURVIVAL = (0.58, 0.45, 0.32, 0.24, 0.16)
"""Published for five drafts by a head of this kind: the share of steps in which draft i and all before it stood."""

BATCHES = (1, 4, 16, 64, 256)
STEPS = 40
NUM_DEVICES = 8
BANDWIDTH, FLOPS = 8e12 * 0.6, 2e15 * 0.4
"""What one device reads and computes a second: assumed peaks times assumed efficiencies."""

LAUNCH_SECONDS, DRAFT_LAUNCH_SECONDS = 3e-3, 0.6e-3
EXPERT_BYTES, NUM_EXPERTS, ACTIVE_EXPERTS, OTHER_BYTES, ACTIVE_PARAMETERS = 288.8e9, 384, 6, 8.2e9, 16.1e9
DRAFT_EXPERT_BYTES, DRAFT_EXPERTS, DRAFT_ACTIVE, DRAFT_OTHER_BYTES, DRAFT_PARAMETERS = 7.2e9, 128, 3, 1.4e9, 1.3e9


def pass_seconds(tokens: int) -> float:
    """A forward pass of the model: each device reads its own dense weights and its share of the experts that tokens reach."""
    reached = 1 - (1 - ACTIVE_EXPERTS / NUM_EXPERTS) ** tokens
    read = (OTHER_BYTES + EXPERT_BYTES * reached / NUM_DEVICES) / BANDWIDTH
    return LAUNCH_SECONDS + read + 2 * ACTIVE_PARAMETERS * tokens / (NUM_DEVICES * FLOPS)


def draft_seconds(requests: int) -> float:
    """A pass of the draft head: a block of rows for each request."""
    rows = requests * len(SURVIVAL)
    reached = 1 - (1 - DRAFT_ACTIVE / DRAFT_EXPERTS) ** rows
    read = (DRAFT_OTHER_BYTES + DRAFT_EXPERT_BYTES * reached / NUM_DEVICES) / BANDWIDTH
    return DRAFT_LAUNCH_SECONDS + read + 2 * DRAFT_PARAMETERS * rows / (NUM_DEVICES * FLOPS)


def profiled(seconds: Callable[[int], float]) -> CostTable:
    """The table that profiling powers of two gives: what a policy knows."""
    return fit_costs((1 << power, seconds(1 << power)) for power in range(12))


def chances(spread: bool, stream: Stream) -> tuple[float, ...]:
    """Acceptance of one sequence's drafts. Survival has the published mean, in each step or, if `spread`, over steps.

    With spread, survival of draft i is u^(1/s - 1), u even on [0, 1): its mean is s. The head is taken to know u.
    """
    even = max(stream.unit(), 1e-12)
    survival = [even ** (1 / mean - 1) if spread else mean for mean in SURVIVAL]
    return tuple(after / before for before, after in zip([1.0, *survival], survival, strict=False))


def expected_tokens(drafted: Drafted, counts: list[int]) -> float:
    """Tokens of a step in which `counts` drafts are verified."""
    total = float(len(counts))
    for of_sequence, count in zip(drafted.acceptance, counts, strict=True):
        survival = 1.0
        for chance in of_sequence[:count]:
            survival *= chance
            total += survival
    return total


def with_hindsight(drafted: Drafted) -> tuple[float, float]:
    """(tokens, seconds) of the best choice, true costs known: what looking at all chances before choosing would allow."""
    survivals = []
    for of_sequence in drafted.acceptance:
        survival = 1.0
        survivals += [survival := survival * chance for chance in of_sequence]
    tokens, drafting = len(drafted.acceptance), draft_seconds(len(drafted.acceptance))
    expected = accumulate(sorted(survivals, reverse=True), initial=float(tokens))
    steps = ((total, drafting + pass_seconds(tokens + taken)) for taken, total in enumerate(expected))
    return max(steps, key=lambda step: step[0] / step[1])


def tokens_per_second(name: str, batch: int, spread: bool, steps: int, costs: DraftCosts, seed: int) -> float:
    """Over `steps` steps that all take their own seconds: the mean weighs steps by time, as a clock does."""
    stream, tokens, seconds = Stream("acceptance", seed, batch), 0.0, 0.0
    for _ in range(steps):
        drafted = Drafted(tuple(chances(spread, stream) for _ in range(batch)), 0, len(SURVIVAL), batch * len(SURVIVAL))
        if name == "hindsight":
            made, took = with_hindsight(drafted)
        else:
            counts = POLICIES[name]().choose(drafted, costs)
            made, took = expected_tokens(drafted, counts), draft_seconds(batch) + pass_seconds(batch + sum(counts))
        tokens, seconds = tokens + made, seconds + took
    return tokens / seconds


def run(options: Options) -> Result:
    batches, steps = (BATCHES[:2], 5) if options.quick else (BATCHES, STEPS)
    costs = DraftCosts(profiled(draft_seconds), profiled(pass_seconds))
    seeds = range(options.seed, options.seed + options.rounds)
    figures: list[Figure] = []
    adaptive_to_all, adaptive_to_best = [], []
    for spread in (False, True):
        knows = "the head tells sequences apart" if spread else "all sequences alike"
        for batch in batches:
            rate = partial(tokens_per_second, batch=batch, spread=spread, steps=steps, costs=costs)
            none = batch / pass_seconds(batch)
            everything, adaptive, best = (
                [rate(name, seed=seed) for seed in seeds] for name in ("all", "adaptive", "hindsight")
            )
            where = f"batch {batch}, {knows}"
            figures.append(Figure(f"no drafts: {where}", "tokens/s", (none,)))
            figures.append(figure(f"all verified: {where}", "tokens/s", everything, "no drafts", none))
            figures.append(figure(f"adaptive: {where}", "tokens/s", adaptive, "no drafts", none))
            adaptive_to_all += [one / other for one, other in zip(adaptive, everything, strict=True)]
            adaptive_to_best += [one / other for one, other in zip(adaptive, best, strict=True)]
    claims = (
        Claim("adaptive is nowhere more than 1 % slower than verifying all", min(adaptive_to_all) >= 0.99),
        Claim(
            "choosing blind to later chances costs at most 1 % against hindsight and true costs", min(adaptive_to_best) >= 0.99
        ),
    )
    notes = (
        "Computed from a model, not measured on hardware: a mixture of experts of 552 B parameters on 8 devices, assumed "
        "bandwidth, arithmetic and launch times, no attention over long contexts. Policies see costs by powers of two.",
        f"Published survival of drafts by position: {', '.join(map(str, SURVIVAL))}. Where the head tells sequences apart, it "
        "is taken to be perfectly calibrated and sequences to differ widely, so that gain is an upper bound.",
    )
    question = "Which drafts should a decode group verify: none, all, or as many as pay for their place in the forward pass?"
    return Result("draft_budget", question, "none: computed; one value per seed", claims, tuple(figures), notes)


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
