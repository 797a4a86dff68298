"""Block keys: the one function that names a block of KV, used by engine, pool, router, trace and simulator.

`key[i] = H(key[i-1], tokens of block i)` and `key[-1] = namespace.root()`. A key therefore names its block *and all before
it*: two chains that agree at position i agree everywhere before i, which turns prefix matching into a binary search.
H is BLAKE2b with a 16-byte digest: strong, unseeded, the same in every process.

A chain is a `bytes` of 16 * n; `count(chain)` is n.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

KEY_BYTES = 16
TOKEN_BYTES = 4

Chain = bytes
"""n block keys, concatenated: 16 * n bytes."""


class CacheNamespace(msgspec.Struct, frozen=True):
    """Everything besides the tokens that decides the bytes of a KV block. Different namespaces share no key."""

    model: str
    revision: str
    block_tokens: int
    kv_layout: str
    tenant_salt: str = ""

    def root(self) -> bytes:
        """The key before the first block: 16 bytes."""
        digest = blake2b(digest_size=KEY_BYTES, person=b"rackserve-ns-v1")
        for part in (self.model, self.revision, str(self.block_tokens), self.kv_layout, self.tenant_salt):
            raw = part.encode()
            digest.update(len(raw).to_bytes(8, "little") + raw)
        return digest.digest()


def count(chain: Chain) -> int:
    """Number of keys in `chain`."""
    return len(chain) // KEY_BYTES


def key_at(chain: Chain, index: int) -> bytes:
    """Key number `index` (0-based) of `chain`."""
    return chain[index * KEY_BYTES : (index + 1) * KEY_BYTES]


def prefix(chain: Chain, num_blocks: int) -> Chain:
    """The first `num_blocks` keys of `chain`."""
    return chain[: num_blocks * KEY_BYTES]


def extend_chain(chain: Chain, root: bytes, tokens: bytes | memoryview, block_tokens: int) -> Chain:
    """Keys of all full blocks of `tokens`, given the `chain` of those already named.

    `tokens`: the whole sequence from position 0 as int32 little-endian ids; a trailing part of a block gets no key.
    `root`: `CacheNamespace.root()`. Only blocks beyond `chain` are hashed.
    """
    step = block_tokens * TOKEN_BYTES
    done = count(chain)
    parent = chain[-KEY_BYTES:] if done else root
    view = memoryview(tokens)
    keys = []
    for start in range(done * step, len(view) - step + 1, step):
        digest = blake2b(parent, digest_size=KEY_BYTES)
        digest.update(view[start : start + step])
        parent = digest.digest()
        keys.append(parent)
    return chain + b"".join(keys)


def common_blocks(a: Chain, a_start: int, b: Chain, b_start: int) -> int:
    """How many keys agree from `a[a_start]` and `b[b_start]` on.

    Both must follow the same parent key; then one comparison of the last pair usually settles it, else a binary search does.
    """
    limit = min(count(a) - a_start, count(b) - b_start)
    low, high = 0, limit  # invariant: the first `low` agree, key number `high` (if any) does not
    probe = limit
    while low < high:
        at = probe - 1
        if key_at(a, a_start + at) == key_at(b, b_start + at):
            low = probe
        else:
            high = at
        probe = (low + high + 1) // 2
    return low
