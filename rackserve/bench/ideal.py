"""What an infinite prefix cache would have hit: the upper bound beside every measured hit rate."""

from __future__ import annotations

from rackserve.base.keys import Chain, count, key_at


class IdealCache:
    """Remembers every block of every prompt it has seen, in the order in which they were sent.

    Two rates come out of it: over served blocks (what a cache of that block size could reach) and over the blocks of the trace
    (the rate benchmarks publish as theoretical).
    """

    __slots__ = ("_block_tokens", "_ids", "_keys")

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._keys: set[bytes] = set()
        self._ids: dict[str, set[int]] = {}

    def add_prompt(self, chain: Chain, num_tokens: int) -> int:
        """Prompt tokens that were present before, then add the prompt.

        Whole blocks only, and never the last token: it must be computed to give the first output.
        """
        total = count(chain)
        known, high = 0, total
        while known < high:  # presence is prefix-closed
            probe = (known + high + 1) // 2
            if key_at(chain, probe - 1) in self._keys:
                known = probe
            else:
                high = probe - 1
        self._keys.update(key_at(chain, index) for index in range(known, total))
        return min(known, (num_tokens - 1) // self._block_tokens) * self._block_tokens

    def add_trace_blocks(self, tree: str, hash_ids: bytes) -> int:
        """Leading trace blocks of the prompt that `tree` had seen before, then add them."""
        ids = memoryview(hash_ids).cast("i")
        seen = self._ids.setdefault(tree, set())
        known, high = 0, len(ids)
        while known < high:
            probe = (known + high + 1) // 2
            if ids[probe - 1] in seen:
                known = probe
            else:
                high = probe - 1
        seen.update(ids[known:])
        return known
