"""Makes agent sessions whose lengths, pauses and shared prefixes are distributed like those of a published corpus.

The published statistics stand in `trace_stats.PUBLISHED`; the numbers here were chosen so that a large sample meets them. What
a session is made of: a main conversation that grows turn by turn, sometimes has its context edited (a prefix break, likelier
after a long pause) or compacted, and bursts of subagents with contexts of their own that begin with what they all share.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from math import exp
from statistics import NormalDist

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.base.rng import Stream
from rackserve.base.units import to_ns
from rackserve.bench.session import Session, Subagent, TraceRequest

BLOCK_TOKENS = 64
_NORMAL = NormalDist()


class Spread(msgspec.Struct, frozen=True):
    """A log-normal distribution by its median and the deviation of its logarithm, cut at `most`."""

    median: float
    sigma: float
    most: float = 1e12

    def draw(self, stream: Stream) -> float:
        unit = min(max(stream.unit(), 1e-12), 1 - 1e-12)
        return min(self.most, self.median * exp(self.sigma * _NORMAL.inv_cdf(unit)))


class Recipe(msgspec.Struct, frozen=True):
    """The distributions sessions are drawn from. Tokens, seconds, shares."""

    turns: Spread = Spread(65, 1.27, 3_052)
    fresh_tokens: Spread = Spread(20_000, 0.25)
    resumed_share: float = 0.3
    resumed_tokens: Spread = Spread(165_000, 0.35, 600_000)
    new_tokens: Spread = Spread(1_150, 1.1, 100_000)
    break_tokens: Spread = Spread(55_000, 0.6)
    break_shares: tuple[tuple[float, float], ...] = ((300.0, 0.12), (60.0, 0.06), (0.0, 0.0025))
    compact_share: float = 0.003
    compact_tokens: Spread = Spread(25_000, 0.2)
    most_tokens: int = 990_000
    output: Spread = Spread(616, 1.27, 32_000)
    gap_s: Spread = Spread(4.8, 2.5, 50_000)
    long_gap_share: float = 0.005
    long_gap_s: Spread = Spread(30_000, 1.1, 500_000)
    subagent_share: float = 0.445
    groups: Spread = Spread(4, 1.25, 200)
    group_requests: Spread = Spread(16, 0.94, 789)
    children: Spread = Spread(3, 0.6, 10)
    child_shared_tokens: int = 38_000
    child_tokens: Spread = Spread(3_000, 1.0, 200_000)
    child_new_tokens: Spread = Spread(2_000, 1.25, 100_000)
    child_output: Spread = Spread(290, 1.3, 32_000)
    child_gap_s: Spread = Spread(1.5, 1.0, 60)
    join_share: float = 0.75


class _Context:
    """The block ids of one conversation's prompt."""

    __slots__ = ("_ids", "ids")

    def __init__(self, ids: _Ids, start: array[int]) -> None:
        self._ids = ids
        self.ids = array("i", start)

    @property
    def tokens(self) -> int:
        return len(self.ids) * BLOCK_TOKENS

    def grow(self, tokens: float) -> None:
        """Append whole blocks for about `tokens`."""
        self.ids.extend(self._ids.take(max(1, round(tokens / BLOCK_TOKENS))))

    def rewrite(self, kept_tokens: float, tokens: float) -> None:
        """Keep the first `kept_tokens` only and append others up to `tokens`."""
        del self.ids[max(0, round(kept_tokens / BLOCK_TOKENS)) :]
        self.grow(tokens - self.tokens)

    def request(self, at_s: float, api_s: float, output: int) -> TraceRequest:
        return TraceRequest(to_ns(at_s), to_ns(api_s), self.tokens, output, self.ids.tobytes())


class _Ids:
    """Hands out the session's block ids."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> range:
        self._next += count
        return range(self._next - count, self._next)


class _Writer:
    """Draws one session."""

    def __init__(self, recipe: Recipe, name: str, stream: Stream) -> None:
        self._recipe = recipe
        self._name = name
        self._stream = stream
        self._ids = _Ids()
        self._child_start = array("i")

    def write(self) -> Session:
        recipe, stream = self._recipe, self._stream
        num_turns = max(2, round(recipe.turns.draw(stream)))
        spawning = self._spawning_turns(num_turns)
        context = _Context(self._ids, array("i"))
        resumed = stream.chance(recipe.resumed_share)
        context.grow((recipe.resumed_tokens if resumed else recipe.fresh_tokens).draw(stream))
        fixed = min(context.tokens, 15_000)  # tools and system prompt, which no compaction touches
        entries: list[TraceRequest | Subagent] = []
        now, output = 0.0, 0
        for turn in range(num_turns):
            if turn:
                gap = self._gap_s()
                now += gap
                self._next_prompt(context, gap, output, fixed)
            output = max(1, round(recipe.output.draw(stream)))
            api_s = _api_s(output)
            entries.append(context.request(now, api_s, output))
            now += api_s
            for _ in range(spawning.count(turn)):
                group, over = self._group(now, len(entries))
                entries += group
                if stream.chance(recipe.join_share):
                    now = max(now, over)
        return Session(self._name, BLOCK_TOKENS, tuple(entries))

    def _spawning_turns(self, num_turns: int) -> list[int]:
        """The turns after which a group of subagents starts."""
        if not self._stream.chance(self._recipe.subagent_share):
            return []
        count = max(1, round(self._recipe.groups.draw(self._stream)))
        return sorted(self._stream.below(num_turns) for _ in range(count))

    def _gap_s(self) -> float:
        recipe = self._recipe
        return (recipe.long_gap_s if self._stream.chance(recipe.long_gap_share) else recipe.gap_s).draw(self._stream)

    def _next_prompt(self, context: _Context, gap_s: float, output: int, fixed: int) -> None:
        """What the next turn sends: the last answer and something new, sometimes with the context edited or compacted."""
        recipe, stream = self._recipe, self._stream
        if stream.chance(recipe.compact_share) or context.tokens > 0.96 * recipe.most_tokens:
            context.rewrite(fixed, recipe.compact_tokens.draw(stream))
            return
        new = max(recipe.new_tokens.draw(stream), float(output))
        share = next(share for least_s, share in recipe.break_shares if gap_s >= least_s)
        if stream.chance(share):
            length = context.tokens
            context.rewrite(max(fixed, length - recipe.break_tokens.draw(stream)), length)
        context.grow(min(new, recipe.most_tokens - context.tokens))

    def _group(self, start_s: float, number: int) -> tuple[list[Subagent], float]:
        """Subagents that run side by side from `start_s` on, and when the last of them is over."""
        recipe, stream = self._recipe, self._stream
        if not self._child_start:
            self._child_start.extend(self._ids.take(recipe.child_shared_tokens // BLOCK_TOKENS))
        num_requests = max(1, round(recipe.group_requests.draw(stream)))
        num_children = min(num_requests, max(1, round(recipe.children.draw(stream))))
        made: list[Subagent] = []
        last_s = start_s
        for child in range(num_children):
            share = num_requests // num_children + (child < num_requests % num_children)
            turns, over_s = self._child(share)
            at_s = start_s + 0.5 * child
            made.append(Subagent(f"agent{number}.{child}", to_ns(at_s), to_ns(at_s + over_s), turns))
            last_s = max(last_s, at_s + over_s)
        return made, last_s

    def _child(self, num_turns: int) -> tuple[tuple[TraceRequest, ...], float]:
        recipe, stream = self._recipe, self._stream
        context = _Context(self._ids, self._child_start)
        context.grow(recipe.child_tokens.draw(stream))
        turns: list[TraceRequest] = []
        now, output = 0.0, 0
        for turn in range(num_turns):
            if turn:
                now += recipe.child_gap_s.draw(stream)
                context.grow(min(max(recipe.child_new_tokens.draw(stream), output), recipe.most_tokens - context.tokens))
            output = max(1, round(recipe.child_output.draw(stream)))
            api_s = _api_s(output)
            turns.append(context.request(now, api_s, output))
            now += api_s
        return tuple(turns), now


def _api_s(output: int) -> float:
    """Seconds a recorded answer took."""
    return 2.0 + output / 80


def synthesize(count: int, seed: int = 42, recipe: Recipe | None = None) -> Iterator[Session]:
    """`count` sessions, one at a time: each is a function of seed and number alone."""
    if count < 1:
        raise ConfigError(f"count must be at least 1, got {count}")
    recipe = recipe or Recipe()
    for number in range(count):
        name = f"synthetic{number:05}"
        yield _Writer(recipe, name, Stream("session", seed, number)).write()
