"""Times to first token of a closed loop: as many requests at once as the batch is large, each followed by the next like it."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from rackserve.base.errors import ResourceError
from rackserve.base.units import blocks_for
from rackserve.route.placement import POLICIES
from rackserve.validation.engine import Ask, Limits
from rackserve.validation.fleet import Fleet, Served
from rackserve.validation.mixed_time import MixedTime

ROUNDS = 10
"""Requests of a measurement over its concurrency, as usual with these engines' benchmarks; all of the first come at once."""

SIMULATED_ROUNDS = 3
"""So many of them are simulated: the later ones are taken to be like the last of these."""

CHUNK_TOKENS = 8_192
"""Tokens of a pass: an assumption, as the table does not say."""

BLOCK_TOKENS = 64


def closed_loop_ttft(time: MixedTime, concurrency: int, prompt_tokens: int, output_tokens: int) -> float:
    """Mean seconds to the first token over all rounds, without any cached prefix."""
    needed = blocks_for(prompt_tokens + output_tokens, BLOCK_TOKENS)
    try:
        room = max(needed, time.num_blocks(BLOCK_TOKENS))
    except ResourceError:  # the cost model's memory says less than the engine had
        room = needed * concurrency
    fleet = Fleet(1, Limits(room, concurrency, CHUNK_TOKENS, BLOCK_TOKENS), time, POLICIES["round_robin"]())

    def ask(number: int) -> Ask:
        return Ask(number, "", b"", prompt_tokens, output_tokens)

    def follow(done: Served) -> Iterator[tuple[float, Ask]]:
        after = done.ask.number + concurrency
        if after < SIMULATED_ROUNDS * concurrency:
            yield done.last_s, ask(after)

    served = fleet.run([(0.0, ask(number)) for number in range(concurrency)], follow)
    by_round: list[list[float]] = [[] for _ in range(SIMULATED_ROUNDS)]
    for each in served:
        by_round[each.ask.number // concurrency].append(each.ttft_s)
    rounds = [mean(ttfts) for ttfts in by_round]
    return (sum(rounds) + (ROUNDS - SIMULATED_ROUNDS) * rounds[-1]) / ROUNDS
