"""The rack as one worker: whoever rebuilds an index from its KV events has what its ranks and pool hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.ids import POOL_RANK, Rank
from rackserve.base.keys import CacheNamespace, Chain, count, extend_chain
from rackserve.base.messages import BlocksRemoved, BlocksStored, Message, Output, PresenceSnapshot, RankDown, Submit
from rackserve.base.request import Request, SamplingParams
from rackserve.live.kv_announcer import KvAnnouncer
from rackserve.live.kv_events import GPU, HOST, BlockRemoved, BlockStored, KvEvent, decode_batch
from rackserve.nodes.presence import Announcer
from rackserve.runs.cache import Removed, RunCache, Stored
from rackserve.text.tokenizer import pack

BLOCK = 2
NAMESPACE = CacheNamespace("m", "0", BLOCK, "bf16")
RANKS = [Rank("prefill0"), Rank("prefill1")]
DECODE = Rank("decode0")


def chain_of(tokens: list[int], salt: str = "") -> Chain:
    root = CacheNamespace("m", "0", BLOCK, "bf16", salt).root()
    return extend_chain(b"", root, pack(tokens), BLOCK)


def submit(name: str, tokens: list[int], salt: str = "") -> Submit:
    request = Request(name, "s", pack(tokens), chain_of(tokens, salt), len(tokens), max_tokens=8, sampling=SamplingParams())
    return Submit(request, "api")


class Reader:
    """What another router makes of the events: per medium and name, the tokens from the start of the history."""

    def __init__(self) -> None:
        self.held: dict[str, dict[bytes, tuple[int, ...]]] = {GPU: {}, HOST: {}}
        self.events: list[KvEvent] = []

    def take(self, payload: bytes) -> None:
        for event in decode_batch(payload).events:
            self.events.append(event)
            if isinstance(event, BlockStored):
                assert event.block_size == BLOCK
                assert event.medium is not None
                before: tuple[int, ...] = ()
                if event.parent_block_hash is not None:  # known, in some medium: told before
                    before = next(held[event.parent_block_hash] for held in self.held.values()  # type: ignore[index]
                                  if event.parent_block_hash in held)  # fmt: skip
                for at, name in enumerate(event.block_hashes):
                    before += tuple(event.token_ids[at * BLOCK : (at + 1) * BLOCK])
                    assert name not in self.held[event.medium]
                    self.held[event.medium][name] = before  # type: ignore[index]
            elif isinstance(event, BlockRemoved):
                assert event.medium is not None
                for name in event.block_hashes:
                    del self.held[event.medium][name]  # type: ignore[arg-type]

    def prefixes(self, medium: str) -> set[tuple[int, ...]]:
        return set(self.held[medium].values())


class Rack:
    """Caches of two prefill ranks and the pool, whose presence events the announcer hears."""

    def __init__(self) -> None:
        self.reader = Reader()
        self.announcer = KvAnnouncer(RANKS, self.reader.take, now=lambda: 0.0)
        self.announcer.speak_of(NAMESPACE)
        self.caches = {holder: RunCache() for holder in (*RANKS, POOL_RANK)}
        self.speakers = {holder: Announcer(holder, self, cache.chains) for holder, cache in self.caches.items()}
        self.num_slots = 0

    def send(self, to: str, message: Message) -> None:
        self.announcer.heard(message)

    def store(self, holder: Rank, tokens: list[int]) -> None:
        cache, chain = self.caches[holder], chain_of(tokens)
        start = cache.present(chain)
        if start < count(chain):
            self.num_slots += count(chain)
            cache.insert(chain, list(range(self.num_slots, self.num_slots + count(chain) - start)), start)
            self.speakers[holder].announce([Stored(chain, start)])

    def evict(self, holder: Rank, blocks: int) -> None:
        gone = self.caches[holder].evict(blocks)
        self.speakers[holder].announce([Removed(chain, keep) for chain, keep in gone.removed])

    def truth(self, medium: str, known: list[list[int]]) -> set[tuple[int, ...]]:
        """Prefixes of whole blocks that are held there and whose tokens have passed."""
        holders = RANKS if medium == GPU else [POOL_RANK]
        found = set()
        for tokens in known:
            most = max(self.caches[holder].present(chain_of(tokens)) for holder in holders)
            found |= {tuple(tokens[: BLOCK * blocks]) for blocks in range(1, most + 1)}
        return found


PROMPTS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 7, 7, 7], [9, 9, 9, 9], [1, 2, 8, 8], [5, 5, 5, 5, 5, 5, 5, 5, 5, 5]]
STEPS = st.tuples(
    st.sampled_from(["store", "store", "evict", "submit", "snapshot", "down"]),
    st.sampled_from([*RANKS, POOL_RANK]),
    st.integers(0, len(PROMPTS) - 1),
    st.integers(1, 4),
)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=16))
def test_what_can_be_rebuilt_is_what_is_held(steps: list[tuple[str, Rank, int, int]]) -> None:
    rack, known = Rack(), []
    for number, (kind, holder, prompt, blocks) in enumerate(steps):
        if kind == "store":
            rack.store(holder, PROMPTS[prompt])
        elif kind == "evict":
            rack.evict(holder, blocks)
        elif kind == "submit":
            rack.announcer.submitted(submit(f"r{number}", PROMPTS[prompt]))
            known.append(PROMPTS[prompt])
        elif kind == "snapshot":
            rack.speakers[holder].snapshot()
        elif holder != POOL_RANK:
            rack.caches[holder] = RunCache()
            rack.speakers[holder] = Announcer(holder, rack, rack.caches[holder].chains)
            rack.announcer.heard(RankDown(holder, 1))
        for medium in (GPU, HOST):
            assert rack.reader.prefixes(medium) == rack.truth(medium, known)


def test_blocks_of_the_output_are_told_once_their_tokens_have_passed() -> None:
    rack = Rack()
    rack.announcer.submitted(submit("r", [1, 2, 3]))
    rack.store(POOL_RANK, [1, 2, 3, 4, 5, 6])
    assert rack.reader.prefixes(HOST) == {(1, 2)}
    rack.announcer.answered(Output("r", 0, (4,)))
    rack.announcer.answered(Output("r", 0, (4, 5)))  # told twice in part
    assert rack.reader.prefixes(HOST) == {(1, 2), (1, 2, 3, 4)}
    rack.announcer.answered(Output("r", 2, (6,), finish="length"))
    assert (1, 2, 3, 4, 5, 6) in rack.reader.prefixes(HOST)
    assert not rack.announcer._open


def test_an_answer_with_a_gap_is_followed_no_further() -> None:
    rack = Rack()
    rack.announcer.submitted(submit("r", [1, 2]))
    rack.store(POOL_RANK, [1, 2, 3, 4, 5, 6])
    rack.announcer.answered(Output("r", 1, (4, 5, 6)))
    assert rack.reader.prefixes(HOST) == {(1, 2)}


def test_nothing_under_a_salt_is_told() -> None:
    rack = Rack()
    rack.announcer.submitted(submit("r", [1, 2, 3, 4], salt="tenant"))
    rack.announcer.heard(BlocksStored(RANKS[0], 1, chain_of([1, 2, 3, 4], "tenant"), 0))
    assert rack.reader.events == []
    assert not rack.announcer._open


def test_what_decode_ranks_hold_is_not_told() -> None:
    rack = Rack()
    rack.announcer.submitted(submit("r", [1, 2, 3, 4]))
    chain = chain_of([1, 2, 3, 4])
    for message in (
        BlocksStored(DECODE, 1, chain, 0),
        PresenceSnapshot(DECODE, 2, (chain,)),
        BlocksRemoved(DECODE, 3, chain, 0),
    ):
        rack.announcer.heard(message)
    assert rack.reader.events == []


def test_one_event_tells_of_a_whole_run() -> None:
    rack, tokens = Rack(), list(range(200))
    rack.announcer.submitted(submit("r", tokens))
    rack.store(RANKS[0], tokens)
    (event,) = rack.reader.events
    assert isinstance(event, BlockStored)
    assert event.token_ids == tokens
    assert len(set(event.block_hashes)) == 100
