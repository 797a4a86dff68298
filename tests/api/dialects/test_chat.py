from __future__ import annotations

import msgspec
import pytest

from rackserve.api.dialects.chat import Chat
from rackserve.base.errors import RequestError


def test_both_names_of_the_token_limit_are_taken_and_may_not_differ() -> None:
    messages = {"messages": [{"role": "user", "content": "a"}]}
    for limits in ({"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 5}):
        assert Chat().parse(msgspec.json.encode({**messages, **limits}), {}).max_tokens == 5
    with pytest.raises(RequestError, match=r"max_tokens \(4\) and max_completion_tokens \(5\) differ") as caught:
        Chat().parse(msgspec.json.encode({**messages, "max_tokens": 4, "max_completion_tokens": 5}), {})
    assert caught.value.param == "max_completion_tokens"
