"""How log lines look: text or JSON, one line each whatever they contain."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import IO, Any, Literal

FIELDS = "fields"
"""Name of the record attribute that holds a line's fields."""

Kind = Literal["none", "text", "json"]
"""none: problems alone, as they come; text, json: requests too, every line in that form."""

_PLAIN = re.compile(r"[\w.:/+@-]+", re.ASCII)


class LineFormatter(logging.Formatter):
    """A record as one line: time, level, what happened, fields. All but printable ASCII is escaped."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self._kind = kind

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        fields: dict[str, Any] = getattr(record, FIELDS, {})
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        what = record.getMessage()
        if record.exc_info:
            fields = {**fields, "trace": self.formatException(record.exc_info)}
        if self._kind == "json":
            head = {"time": at, "level": record.levelname.lower(), "logger": record.name, "event": what}
            return json.dumps({**head, **fields}, allow_nan=False, default=str)
        told = "".join(f" {name}={_text(value)}" for name, value in fields.items())
        return f"{at} {record.levelname} {_escaped(what)}{told}"


def start_logging(kind: Kind, stream: IO[str] | None = None) -> None:
    """Send the lines of this process to `stream` (standard error) in that form. "none" leaves logging as it is."""
    if kind == "none":
        return
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(kind))
    for name, level in (("rackserve", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _escaped(text: str) -> str:
    return json.dumps(text)[1:-1].replace('\\"', '"') if not text.isascii() or not text.isprintable() else text
