"""Chains spelled as words: a block's key is made of the letters up to it, so words share keys as they share prefixes."""

from __future__ import annotations

from hashlib import blake2b

from rackserve.base.keys import KEY_BYTES, Chain, count, key_at


def chain(word: str) -> Chain:
    return b"".join(blake2b(word[: end + 1].encode(), digest_size=KEY_BYTES).digest() for end in range(len(word)))


def prefixes(word: str) -> list[str]:
    return [word[: end + 1] for end in range(len(word))]


class Words:
    """Reads chains back, and replays presence events on a plain set of words."""

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}

    def chain(self, word: str) -> Chain:
        keys = chain(word)
        self._names.update((key_at(keys, at), name) for at, name in enumerate(prefixes(word)))
        return keys

    def word(self, keys: Chain) -> str:
        return self._names[key_at(keys, count(keys) - 1)] if keys else ""

    def remove(self, present: set[str], keys: Chain, keep: int) -> set[str]:
        """What is left of `present`: nothing at or below block number `keep` of `keys`."""
        top = self.word(keys)[: keep + 1]
        return {name for name in present if not name.startswith(top)}


def leaves(present: set[str]) -> set[str]:
    return {name for name in present if not any(other != name and other.startswith(name) for other in present)}
