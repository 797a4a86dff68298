"""Fetch a prefix from the pool, or compute it again? A sum over measured rates."""

from __future__ import annotations

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.base.units import NS_PER_S, Time


class FetchRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured on this rack: one rank's prefill rate and one fetch's bandwidth and fixed latency."""

    prefill_tokens_per_s: float
    fetch_bytes_per_s: float
    block_bytes: int
    latency_ns: Time

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "fetch_bytes_per_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"rates.{name} must be positive, got {getattr(self, name)}")

    def compute_ns(self, num_tokens: int) -> Time:
        """Time to compute `num_tokens` of prompt."""
        return round(num_tokens / self.prefill_tokens_per_s * NS_PER_S)

    def fetch_ns(self, num_blocks: int) -> Time:
        """Time to fetch `num_blocks` in one transfer."""
        return self.latency_ns + round(num_blocks * self.block_bytes / self.fetch_bytes_per_s * NS_PER_S)


def plan_fetch(local_blocks: int, pool_blocks: int, block_tokens: int, rates: FetchRates, replay_tokens: int = 0) -> int:
    """Blocks to fetch of the pool's first `pool_blocks` when the first `local_blocks` are at hand: all the rest or none.

    A fetch costs its latency once and then less per block than computing, or never pays, so a part of it is never best.
    Of a cached prefix the last `replay_tokens` positions are computed again, so they are not what a fetch saves.
    """
    num_blocks = max(pool_blocks - local_blocks, 0)
    after, before = (max(0, blocks * block_tokens - replay_tokens) for blocks in (local_blocks + num_blocks, local_blocks))
    pays = rates.fetch_ns(num_blocks) < rates.compute_ns(after - before)
    return num_blocks if pays else 0
