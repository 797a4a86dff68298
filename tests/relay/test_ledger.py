"""A worker's block names become key chains: what the index then claims is what a request could reuse there, and no more."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.ids import Rank
from rackserve.base.keys import Chain, count, extend_chain
from rackserve.live.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from rackserve.relay.ledger import BlockLedger, root_key
from rackserve.route.index import PrefixIndex
from rackserve.text.tokenizer import pack

BLOCK = 2
RANK = Rank("w", 0)


def names(tokens: tuple[int, ...]) -> list[bytes]:
    """A worker's own names of the full blocks of `tokens`."""
    return [hashlib.sha256(repr(tokens[: end + BLOCK]).encode()).digest() for end in range(0, len(tokens) - BLOCK + 1, BLOCK)]


def chain_of(tokens: tuple[int, ...], salt: str = "", adapter: str = "") -> Chain:
    return extend_chain(b"", root_key(BLOCK, salt, adapter), pack(tokens), BLOCK)


def stored(tokens: tuple[int, ...], start: int, end: int, medium: str | None = "GPU") -> BlockStored:
    """Blocks [start, end) of `tokens`."""
    own = names(tokens)
    parent = own[start - 1] if start else None
    return BlockStored(list(own[start:end]), parent, list(tokens[start * BLOCK : end * BLOCK]), BLOCK, medium=medium)


class Rig:
    """A ledger and the index it feeds."""

    def __init__(self) -> None:
        self.adapters: set[str] = set()
        self.ledger = BlockLedger(RANK, BLOCK, self.adapters)
        self.index = PrefixIndex(max_runs=1000)

    def tell(self, event: KvEvent) -> None:
        for change in self.ledger.apply(event):
            assert self.index.apply(change)
        self.ledger.check()
        self.index.check()

    def held(self, tokens: tuple[int, ...], **root: str) -> int:
        return self.index.match(chain_of(tokens, **root)).get(RANK, 0)


class Model:
    """Block by block: which of a worker's blocks are there."""

    def __init__(self) -> None:
        self.there: dict[bytes, set[str]] = {}

    def reusable(self, tokens: tuple[int, ...]) -> int:
        own = names(tokens)
        return next((at for at, name in enumerate(own) if not self.there.get(name)), len(own))


HISTORIES = [(1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 9, 9, 7, 8), (1, 2, 5, 5), (8, 8, 8, 8, 8, 8)]
STEPS = st.tuples(
    st.sampled_from(["store", "store", "remove", "clear"]),
    st.sampled_from(HISTORIES),
    st.integers(0, 3),
    st.integers(1, 4),
    st.sampled_from(["GPU", "GPU", "CPU"]),
)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=14))
def test_the_index_claims_what_a_request_could_reuse(steps: list[tuple[str, tuple[int, ...], int, int, str]]) -> None:
    rig, model = Rig(), Model()
    for kind, tokens, start, length, medium in steps:
        own = names(tokens)
        start = min(start, len(own) - 1)
        end = min(start + length, len(own))
        if kind == "store":
            if start and not model.there.get(own[start - 1]):
                continue  # a worker computes no block without the one before it
            rig.tell(stored(tokens, start, end, medium))
            for name in own[start:end]:
                model.there.setdefault(name, set()).add(medium)
        elif kind == "remove":
            rig.tell(BlockRemoved(list(own[start:end]), medium))
            for name in own[start:end]:
                model.there.get(name, set()).discard(medium)
        elif kind == "clear" and length == 4:
            rig.tell(AllBlocksCleared())
            model.there.clear()
        for history in HISTORIES:
            assert rig.held(history) == model.reusable(history)


def test_a_block_that_comes_back_makes_what_follows_it_reusable_again() -> None:
    rig, tokens = Rig(), HISTORIES[0]
    rig.tell(stored(tokens, 0, 4))
    rig.tell(BlockRemoved([names(tokens)[1]], "GPU"))
    assert rig.held(tokens) == 1
    rig.tell(stored(tokens, 1, 2))
    assert rig.held(tokens) == 4


def test_after_everything_is_removed_nothing_is_remembered() -> None:
    rig = Rig()
    for tokens in HISTORIES:
        rig.tell(stored(tokens, 0, len(tokens) // BLOCK))
    rig.tell(BlockRemoved([name for tokens in HISTORIES for name in names(tokens)], "GPU"))
    assert rig.ledger.num_blocks == 0
    assert rig.index.num_runs == 0


def test_a_copy_in_host_memory_keeps_a_block_reusable() -> None:
    rig, tokens = Rig(), HISTORIES[0]
    rig.tell(stored(tokens, 0, 4))
    rig.tell(BlockStored(list(names(tokens)), None, [], BLOCK, medium="CPU"))  # told without tokens
    rig.tell(BlockRemoved(list(names(tokens)), "GPU"))
    assert rig.held(tokens) == 4
    rig.tell(BlockRemoved(list(names(tokens)), "CPU"))
    assert rig.held(tokens) == 0


def test_blocks_of_unknown_history_or_another_size_are_counted_and_claimed_by_nobody() -> None:
    rig, tokens = Rig(), HISTORIES[0]
    rig.tell(stored(tokens, 2, 4))
    rig.tell(BlockStored([b"x"], None, [1, 2, 3], 3))
    rig.tell(BlockStored([b"y", b"z"], None, [1, 2], BLOCK))
    assert rig.ledger.num_unplaced == 5
    assert rig.index.num_runs == 0


def test_a_salt_keeps_prefixes_apart() -> None:
    rig, tokens = Rig(), HISTORIES[0]
    rig.tell(BlockStored(list(names(tokens)), None, list(tokens), BLOCK, extra_keys=[["salt"], None, None, None]))
    assert rig.held(tokens, salt="salt") == 4
    assert rig.held(tokens) == rig.held(tokens, salt="other") == 0


def test_an_adapter_shares_nothing_with_its_model_and_its_name_becomes_known() -> None:
    rig, tokens = Rig(), HISTORIES[0]
    extras: list[list[object] | None] = [["tuned"]] * 4
    rig.tell(BlockStored(list(names(tokens)), None, list(tokens), BLOCK, lora_name="tuned", extra_keys=extras))
    assert rig.held(tokens, adapter="tuned") == 4
    assert rig.held(tokens) == 0
    assert rig.adapters == {"tuned"}


def test_an_image_ends_what_text_alone_can_match() -> None:
    rig, tokens = Rig(), HISTORIES[0]
    extras: list[list[object] | None] = [None, None, ["image-hash"], None]
    rig.tell(BlockStored(list(names(tokens)), None, list(tokens), BLOCK, extra_keys=extras))
    assert rig.held(tokens) == 2


@pytest.mark.parametrize("kind", ["sliding_window", "mamba"])
def test_layers_that_keep_only_a_window_say_nothing(kind: str) -> None:
    rig, tokens = Rig(), HISTORIES[0]
    rig.tell(BlockStored(list(names(tokens)), None, list(tokens), BLOCK, group_idx=1, kv_cache_spec_kind=kind))
    assert rig.index.num_runs == 0
    rig.tell(BlockStored(list(names(tokens)), None, list(tokens), BLOCK, group_idx=0, kv_cache_spec_kind="full_attention"))
    rig.tell(BlockRemoved(list(names(tokens)), "GPU", group_idx=1))
    assert rig.held(tokens) == 4


def test_a_growing_session_stays_one_run() -> None:
    rig, tokens = Rig(), tuple(range(100))
    for block in range(50):
        rig.tell(stored(tokens, block, block + 1))
    assert rig.held(tokens) == 50 == count(chain_of(tokens))
    assert rig.index.num_runs == 1
