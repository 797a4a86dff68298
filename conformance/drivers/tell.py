"""How a driver says how a case went: a JSON line each. Drivers run in environments without this project."""

from __future__ import annotations

import json
from collections.abc import Callable


def tried(name: str, body: Callable[[], None]) -> None:
    """Run `body` and print how it went."""
    error = ""
    try:
        body()
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    print(json.dumps({"case": name, "error": error}), flush=True)
