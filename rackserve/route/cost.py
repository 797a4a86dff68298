"""The one cost of a placement, in tokens of prefill work: no thresholds, so no cliffs.

cost = tokens queued on the rank + own uncached tokens + pool tokens to fetch, at `fetch_cost` computed tokens each
"""

from __future__ import annotations

from math import ceil

import msgspec

from rackserve.base.ids import Rank


class Candidate(msgspec.Struct, frozen=True):
    """A prefill rank and what placing one attempt on it would mean.

    local_tokens    cached on the rank, or about to be: not computed again
    pool_tokens     to be fetched from the pool beyond those
    own_tokens      work the attempt adds: uncached tokens plus the fetch in token equivalents; this is what to book
    queued_tokens   work booked on the rank already
    num_queued      attempts booked on the rank already
    """

    rank: Rank
    local_tokens: int
    pool_tokens: int
    own_tokens: int
    queued_tokens: int
    num_queued: int

    @property
    def cost(self) -> int:
        """Tokens of work until the attempt's prompt is done on this rank."""
        return self.queued_tokens + self.own_tokens


def uncached_work(prompt_tokens: int, local_tokens: int, pool_tokens: int, fetch_cost: float) -> tuple[int, int, int]:
    """(local, pool, own) tokens of a `Candidate` for a prompt of which so many first tokens are on the rank, and in the pool.

    `fetch_cost`: time to fetch a token over time to compute it, a measured rate. The last prompt token is always computed,
    because its output is what decoding starts from.
    """
    reusable = max(prompt_tokens - 1, 0)
    local = min(local_tokens, reusable)
    fetched = max(min(pool_tokens, reusable) - local, 0)
    return local, fetched, prompt_tokens - local - fetched + ceil(fetched * fetch_cost)
