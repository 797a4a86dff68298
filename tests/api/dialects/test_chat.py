from __future__ import annotations

from rackserve.api.dialects.chat import ChatBody
from tests.api.dialects.parsing import parse


def test_the_newer_name_of_the_token_limit_wins() -> None:
    body, _ = parse(b'{"max_tokens": 5, "max_completion_tokens": 7}', ChatBody)
    assert body.token_limit == 7
    assert parse(b'{"max_tokens": 5}', ChatBody)[0].token_limit == 5
