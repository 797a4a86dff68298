"""Bodies of the OpenAI dialects, parsed or refused."""

from __future__ import annotations

from typing import Any

import pytest

from rackserve.api.dialects import body as bodies
from rackserve.api.dialects.completions import CompletionBody
from rackserve.api.dialects.openai import UNSUPPORTED
from rackserve.base.errors import RequestError


def parse(raw: bytes, kind: Any) -> tuple[Any, tuple[str, ...]]:
    """The body and the fields that it does not have."""
    return bodies.parse(raw, kind, UNSUPPORTED)


def refusal(raw: bytes, kind: Any = CompletionBody) -> RequestError:
    """The error with which it is refused, which must be a 400."""
    with pytest.raises(RequestError) as caught:
        parse(raw, kind)
    assert caught.value.status == 400
    return caught.value
