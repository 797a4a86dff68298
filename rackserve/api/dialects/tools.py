"""Which of the tools that a client offers are for the model. Agents offer tools that only other servers carry out, too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rackserve.base.errors import RequestError

Tool = dict[str, Any]


def sort_out(tools: Iterable[Tool], kinds: Iterable[Any], wanted: str) -> tuple[list[tuple[int, Tool]], list[str]]:
    """The tools whose kind is `wanted`, with their numbers, and how the others, which are left out, are named to the client.

    Raises RequestError for a kind that is no string.
    """
    own, left_out = [], []
    for number, (tool, kind) in enumerate(zip(tools, kinds, strict=True)):
        if not isinstance(kind, str):
            raise RequestError(f"tools[{number}].type must be a string", param=f"tools[{number}].type")
        if kind == wanted:
            own.append((number, tool))
        else:
            left_out.append(f"tools[{number}]:{kind[:40]}")
    return own, left_out
