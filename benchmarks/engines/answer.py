"""The engine's end of a comparison: commands come as JSON lines, answers go as JSON lines. Runs in any environment.

{"op": "prefill", "ids": [...]}                          seconds until the first token after that prompt
{"op": "decode", "batch": B, "context": C, "steps": N}   seconds for N more tokens of each of B sequences of C tokens
{"op": "score", "ids": [...]}                            mean nats a token of that text, or null where an engine cannot tell

The first answer says what is loaded. What a library prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Protocol


class Engine(Protocol):
    """What is compared. Every token is the likeliest: a pass, its logits and their maximum."""

    about: dict[str, object]
    """version; weights: their form, and that of what they are multiplied by; read_bytes: weights read for a token, if known."""

    def prefill(self, ids: list[int]) -> float: ...

    def decode(self, batch: int, context: int, steps: int) -> float: ...

    def score(self, ids: list[int]) -> float | None: ...


def prompt(length: int, number: int) -> list[int]:
    """Ids of ordinary tokens, other ones for each number from the first on, so that no cache knows a prompt of another."""
    return [1_000 + (at * 7_919 + number * 104_729) % 30_000 for at in range(length)]


def answer(load: Callable[[], Engine]) -> None:
    """Serve until the input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(what: object) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    engine = load()
    say(engine.about)
    for command in _commands():
        match command:
            case {"op": "prefill", "ids": ids}:
                say(engine.prefill(ids))
            case {"op": "decode", "batch": batch, "context": context, "steps": steps}:
                say(engine.decode(batch, context, steps))
            case {"op": "score", "ids": ids}:
                say(engine.score(ids))


def _commands() -> Iterator[dict[str, object]]:
    for line in sys.stdin:
        yield json.loads(line)
