from __future__ import annotations

from rackserve.base.units import to_ns
from rackserve.bench.plan import IdleCaps, RequestKey, Send
from tests.bench.toys import request


def test_equal_ids_mean_equal_tokens_within_a_play_of_a_session_or_of_the_whole_trace() -> None:
    key = RequestKey("a", 3, 0, 7)
    assert (str(key), key.tree) == ("a/3/0/7", "a/3")
    own, shared = (Send(key, 0, request(0), 4, False, shared=shared) for shared in (False, True))
    assert (own.scope, shared.scope) == ("a/3", "*/3")


def test_caps_shrink_with_time() -> None:
    assert IdleCaps().scaled(100) == IdleCaps(to_ns(3), to_ns(0.1))
