from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import ConfigError
from rackserve.base.keys import CacheNamespace, count, extend_chain
from rackserve.bench.ideal import IdealCache
from rackserve.bench.plan import RequestKey, Send
from rackserve.bench.prompts import RequestMaker
from rackserve.bench.session import TraceRequest
from tests.bench.toys import ids

SPACE = CacheNamespace("m", "r", 8, "layout")


def send(
    blocks: list[int], turn: int = 0, *, session: str = "a", play: int = 0, stream: int = 0, spare: int = 0, last: bool = False
) -> Send:
    request = TraceRequest(0, 0, len(blocks) * 4 + spare, 5, ids(*blocks))
    return Send(RequestKey(session, play, stream, turn), 0, request, 4, last)


def test_equal_ids_give_equal_tokens_and_all_else_differs() -> None:
    maker = RequestMaker(SPACE, vocabulary=(100, 1_000_000_000))
    base = maker.make(send([1, 2, 3, 4])).tokens
    assert maker.make(send([1, 2, 3, 9], 1)).tokens[: 3 * 16] == base[: 3 * 16]
    assert maker.make(send([1, 2, 3, 4], stream=1)).tokens == base, "streams of one play share"
    others = [
        maker.make(send([1, 2, 3, 4], session="b")).tokens,
        maker.make(send([1, 2, 3, 4], play=1)).tokens,
        RequestMaker(SPACE, vocabulary=(100, 1_000_000_000), seed=1).make(send([1, 2, 3, 4])).tokens,
    ]
    for other in others:
        assert not set(memoryview(other).cast("i")) & set(memoryview(base).cast("i"))


def test_tokens_lie_in_the_vocabulary_and_the_request_says_what_was_recorded() -> None:
    request = RequestMaker(SPACE, vocabulary=(3, 7)).make(send([1, 2, 3], spare=2))
    assert set(memoryview(request.tokens).cast("i")) <= {3, 4, 5, 6}
    assert (request.num_tokens, len(request.tokens) // 4, request.max_tokens) == (14, 14, 5)
    assert (request.id, request.session, request.ignore_eos) == ("a/0/0/0", "a/0", True)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=8))
def test_chains_are_those_of_the_tokens_and_hit_like_chains_made_from_ids(turns: list[tuple[int, int, int]]) -> None:
    with_tokens, without = RequestMaker(SPACE, vocabulary=(0, 1 << 30)), RequestMaker(SPACE, with_tokens=False)
    hits, hits_without = IdealCache(8), IdealCache(8)
    history: dict[int, list[int]] = {0: [], 1: []}
    fresh = 0
    for number, (stream, keep, more) in enumerate(turns):
        kept = history[stream][:keep]
        blocks = kept + list(range(fresh, fresh + more + 1))
        fresh += more + 1
        history[stream] = blocks
        one = send(blocks, number, stream=stream, spare=more % 4)
        a, b = with_tokens.make(one), without.make(one)
        assert a.chain == extend_chain(b"", SPACE.root(), a.tokens, 8), "nothing stale is reused"
        assert b.tokens == b""
        assert count(a.chain) == count(b.chain) == a.num_tokens // 8
        assert hits.add_prompt(a.chain, a.num_tokens) == hits_without.add_prompt(b.chain, b.num_tokens)


def test_a_repeated_session_starts_cold_with_and_without_tokens() -> None:
    for with_tokens in (True, False):
        maker, ideal = RequestMaker(SPACE, with_tokens=with_tokens), IdealCache(8)
        for play in (0, 1):
            request = maker.make(send([1, 2, 3, 4], play=play))
            assert ideal.add_prompt(request.chain, request.num_tokens) == 0


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="vocabulary"):
        RequestMaker(SPACE, vocabulary=(5, 5))
    with pytest.raises(ConfigError, match="multiple of the trace's block of 4"):
        RequestMaker(CacheNamespace("m", "r", 6, "l"), with_tokens=False).make(send([1, 2]))


def test_runs_of_different_salts_share_no_session_name() -> None:
    names = {salt: RequestMaker(SPACE, salt=salt).make(send([1, 2])).session for salt in ("", "a", "b")}
    assert len(set(names.values())) == 3 and names["a"] == f"{names['']}/a"
