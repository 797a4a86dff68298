"""Block keys: golden vectors, and the chain computed by another road."""

from __future__ import annotations

import hashlib
import json
from array import array
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.keys import CacheNamespace, common_blocks, count, extend_chain, key_at, prefix

GOLDEN = Path(__file__).parent.parent / "golden" / "keys.json"
# Made once with `plain_root` and `plain_chain` below, which share no code with the package: each case with its root and keys in
# hexadecimal added to it.

TOKENS = st.lists(st.integers(0, 2), max_size=24)


def plain_root(model: str, revision: str, block_tokens: int, kv_layout: str, salt: str) -> bytes:
    raw = b"".join(len(part.encode()).to_bytes(8, "little") + part.encode() for part in (model, revision, str(block_tokens),
                                                                                         kv_layout, salt))  # fmt: skip
    return hashlib.blake2b(raw, digest_size=16, person=b"rackserve-ns-v1").digest()


def plain_chain(root: bytes, tokens: list[int], block_tokens: int) -> list[bytes]:
    keys = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + block_tokens])
        keys.append(hashlib.blake2b((keys[-1] if keys else root) + block, digest_size=16).digest())
    return keys


def raw(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def test_keys_equal_the_golden_vectors() -> None:
    cases = json.loads(GOLDEN.read_text())
    assert len(cases) >= 4
    for case in cases:
        namespace = CacheNamespace(case["model"], case["revision"], case["block_tokens"], case["kv_layout"], case["salt"])
        assert namespace.root().hex() == case["root"]
        chain = extend_chain(b"", namespace.root(), raw(case["tokens"]), case["block_tokens"])
        assert [key_at(chain, index).hex() for index in range(count(chain))] == case["keys"]


@settings(derandomize=True, max_examples=100, deadline=None)
@given(TOKENS, st.integers(1, 5), st.integers(0, 24))
def test_a_chain_may_be_extended_in_any_portions(tokens: list[int], block_tokens: int, first: int) -> None:
    root = plain_root("m", "r", block_tokens, "l", "")
    chain = extend_chain(b"", root, raw(tokens[:first]), block_tokens)
    chain = extend_chain(chain, root, memoryview(raw(tokens)), block_tokens)
    assert chain == b"".join(plain_chain(root, tokens, block_tokens))


@settings(derandomize=True, max_examples=100, deadline=None)
@given(TOKENS, TOKENS)
def test_a_key_names_its_block_and_all_before_it(a: list[int], b: list[int]) -> None:
    chains = [extend_chain(b"", b"r" * 16, raw(tokens), 2) for tokens in (a, b)]
    same = 0
    while same * 2 + 2 <= min(len(a), len(b)) and a[: same * 2 + 2] == b[: same * 2 + 2]:
        same += 1
    equal = [key_at(chains[0], at) == key_at(chains[1], at) for at in range(min(map(count, chains)))]
    assert equal == [at < same for at in range(len(equal))]
    assert common_blocks(chains[0], 0, chains[1], 0) == same


@settings(derandomize=True, max_examples=100, deadline=None)
@given(TOKENS, TOKENS, st.integers(0, 4))
def test_common_blocks_counts_from_any_shared_parent(a: list[int], b: list[int], start: int) -> None:
    shared = [1] * 2 * start
    long, short = (extend_chain(b"", b"r" * 16, raw(shared + tokens), 2) for tokens in (a, b))
    tail = short[start * 16 :]
    expected = 0
    while expected < min(count(long) - start, count(tail)) and key_at(long, start + expected) == key_at(tail, expected):
        expected += 1
    assert common_blocks(long, start, tail, 0) == expected


def test_namespaces_that_differ_anywhere_share_no_root() -> None:
    roots = {
        CacheNamespace(*parts).root()
        for parts in [
            ("m", "r", 4, "l", ""), ("m2", "r", 4, "l", ""), ("m", "r2", 4, "l", ""), ("m", "r", 8, "l", ""),
            ("m", "r", 4, "l2", ""), ("m", "r", 4, "l", "tenant"), ("mr", "", 4, "l", ""), ("m", "r", 4, "", "l"),
        ]
    }  # fmt: skip
    assert len(roots) == 8


def test_a_prefix_is_the_first_keys() -> None:
    chain = extend_chain(b"", b"r" * 16, raw(list(range(12))), 4)
    assert count(prefix(chain, 2)) == 2
    assert prefix(chain, 2) + key_at(chain, 2) == chain
