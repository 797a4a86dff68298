"""The one author of usage: what a call used, told the same way by every dialect, streamed or not."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rackserve.api.answer import Ending


class CallUsage(msgspec.Struct, frozen=True):
    """What a call used: each prompt once (cached tokens of its first choice), output of all choices.

    attempts: most times a choice had to be placed.
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    attempts: int


def usage_of(endings: Sequence[Ending], n: int) -> CallUsage:
    """The usage of a call from the endings of its choices in order, `n` for each prompt."""
    prompts = endings[::n]
    return CallUsage(
        prompt_tokens=sum(ending.prompt_tokens for ending in prompts),
        cached_tokens=sum(ending.cached_tokens for ending in prompts),
        output_tokens=sum(ending.output_tokens for ending in endings),
        reasoning_tokens=sum(ending.reasoning_tokens for ending in endings),
        attempts=max(ending.attempts for ending in endings),
    )
