"""The table of published figures."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Literal

import msgspec

from rackserve.base.errors import FileFormatError

FigureRole = Literal["input", "fitted", "held-out"]


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One published figure.

    role    input: used as it is; fitted: a coefficient of the cost model was fitted to it; held-out: used nowhere
    spread  relative uncertainty of a figure that was worked out from rounded ones
    """

    what: str
    value: float
    unit: str
    source: str
    role: FigureRole
    spread: float = 0.0


def published(content: bytes | None = None) -> Mapping[str, Figure]:
    """All figures by name, each source spelled out; `content`: another table. FileFormatError if it is wrong."""
    try:
        content = content or files("rackserve.reproduction").joinpath("published.toml").read_bytes()
        document = msgspec.toml.decode(content)
        sources: dict[str, str] = document["sources"]
        tables: dict[str, dict[str, Any]] = document["figures"]
        spelled = {name: table | {"source": sources[table["source"]]} for name, table in tables.items()}
        return msgspec.convert(spelled, dict[str, Figure])
    except (msgspec.MsgspecError, KeyError) as error:
        raise FileFormatError(f"published.toml: {error}; correct the table or install the package again") from error
