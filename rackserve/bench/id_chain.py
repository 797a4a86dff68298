"""Reads the block ids of prompts, listed or packed, and checks that they are chained: one id, one history."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from rackserve.bench.session import HASH_ID_BYTES, MAX_TOKENS, shared_ids


class IdChain:
    """Turns the id lists of one session (or of a trace whose ids are shared) into checked bytes, in file order.

    Packed lists name what they share with the list before them, so the order matters. Errors are ValueErrors.
    """

    __slots__ = ("_parent", "_previous", "block_tokens")

    def __init__(self, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ValueError(f"the block size must be at least 1, got {block_tokens}")
        self.block_tokens = block_tokens
        self._previous = b""
        self._parent: dict[int, int] = {}

    def listed(self, ids: Iterable[int], input_tokens: int) -> bytes:
        """Ids of full blocks of a prompt of `input_tokens`, which `ids` names one by one (a part block at the end included)."""
        try:
            return self._checked(array("i", ids), input_tokens)
        except OverflowError:
            raise ValueError("a hash id does not fit 31 bits; renumber the ids of the session from 0") from None

    def packed(self, kept: int, runs: Sequence[tuple[int, int]], input_tokens: int) -> bytes:
        """The same from `kept` leading ids of the list before and then (first id, count) runs."""
        if not 0 <= kept <= self.num_previous:
            raise ValueError(f"{kept} ids cannot be kept of the {self.num_previous} before")
        ids = array("i")
        ids.frombytes(self._previous[: kept * HASH_ID_BYTES])
        try:
            for first, length in runs:
                if not 0 <= length <= MAX_TOKENS // self.block_tokens:
                    raise ValueError(f"a run of {length} ids; a prompt has at most {MAX_TOKENS} tokens")
                ids.extend(range(first, first + length))
        except OverflowError:
            raise ValueError("a hash id does not fit 31 bits; renumber the ids of the session from 0") from None
        return self._checked(ids, input_tokens)

    @property
    def num_previous(self) -> int:
        """Ids in the list before."""
        return len(self._previous) // HASH_ID_BYTES

    def pack(self, hash_ids: bytes) -> tuple[int, list[tuple[int, int]]]:
        """(kept, runs) from which `packed` makes `hash_ids` again; the next list is packed against this one."""
        kept = shared_ids(hash_ids, self._previous)
        runs: list[tuple[int, int]] = []
        for number in memoryview(hash_ids).cast("i")[kept:]:
            if runs and sum(runs[-1]) == number:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((number, 1))
        self._previous = hash_ids
        return kept, runs

    def _checked(self, ids: array[int], input_tokens: int) -> bytes:
        spare = input_tokens - len(ids) * self.block_tokens
        if not -self.block_tokens < spare < self.block_tokens:
            raise ValueError(
                f"{len(ids)} hash ids of {self.block_tokens} tokens do not match a prompt of {input_tokens}; "
                "give one id per block of the prompt"
            )
        raw = ids.tobytes()
        shared = shared_ids(raw, self._previous)
        parent = ids[shared - 1] if shared else -1
        for index in range(shared, len(ids)):
            if self._parent.setdefault(ids[index], parent) != parent:
                raise ValueError(f"hash id {ids[index]} follows two different blocks; ids must name a block and all before it")
            parent = ids[index]
        self._previous = raw
        return raw if spare >= 0 else raw[:-HASH_ID_BYTES]  # the id of a part block names no reusable block
