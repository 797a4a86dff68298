from __future__ import annotations

from rackserve.api.dialects.chat import Chat
from rackserve.api.dialects.completions import Completions
from rackserve.api.dialects.dialect import Dialect, Event


def test_every_dialect_provides_what_the_endpoint_calls() -> None:
    dialects: list[Dialect] = [Completions(), Chat()]  # the type checker sees to the rest
    assert all(callable(dialect.parse) and callable(dialect.reply) for dialect in dialects)
    assert Event(b"{}").name == ""
