from __future__ import annotations

from typing import Any

import pytest

from rackserve.api.dialects import body as bodies
from rackserve.api.dialects.chat import ChatBody
from rackserve.api.dialects.completions import CompletionBody
from rackserve.api.dialects.openai import UNSUPPORTED
from rackserve.base.errors import RequestError


def parse(raw: bytes, kind: Any) -> tuple[Any, tuple[str, ...]]:
    return bodies.parse(raw, kind, UNSUPPORTED)


def refusal(raw: bytes, kind: Any = CompletionBody) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(raw, kind)
    assert caught.value.status == 400
    return caught.value


def test_the_newer_name_of_the_token_limit_wins() -> None:
    body, _ = parse(b'{"max_tokens": 5, "max_completion_tokens": 7}', ChatBody)
    assert body.token_limit == 7
    assert parse(b'{"max_tokens": 5}', ChatBody)[0].token_limit == 5
