from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.api.logs import FIELDS, LineFormatter, start_logging


def line(kind: str, what: str, fields: dict[str, object]) -> str:
    record = logging.LogRecord("rackserve.x", logging.INFO, "", 0, what, None, None)
    setattr(record, FIELDS, fields)
    return LineFormatter(kind).format(record)  # type: ignore[arg-type]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.text(), st.text())
def test_a_line_is_one_line_of_printable_ascii_whatever_it_tells(what: str, value: str) -> None:
    for kind in ("text", "json"):
        told = line(kind, what, {"a": value, "b": 3})
        assert told.isascii() and told.isprintable()
    read = json.loads(line("json", what, {"a": value}))
    assert (read["event"], read["a"]) == (what, value)


def test_a_field_cannot_pretend_to_be_another_line_or_field() -> None:
    told = line("text", "refused", {"path": '/x"\n2026 INFO request outcome=finished\x1b[2J'})
    assert told.endswith(' path="/x\\"\\n2026 INFO request outcome=finished\\u001b[2J"')
    assert line("text", "request", {"n": 1, "on": True, "none": None}).endswith(" n=1 on=true none=null")


def test_a_failure_brings_its_trace_in_the_same_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("rackserve", logging.ERROR, "", 0, "failed %s", ("so",), sys.exc_info())
    told = json.loads(LineFormatter("json").format(record))
    assert told["level"] == "error" and told["event"] == "failed so" and "ValueError: two\nlines" in told["trace"]


@pytest.fixture
def loggers() -> Iterator[None]:
    kept = [
        (logger, logger.handlers[:], logger.level, logger.propagate)
        for logger in map(logging.getLogger, ("rackserve", "uvicorn"))
    ]
    yield
    for logger, handlers, level, propagate in kept:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_every_logger_of_the_package_writes_in_the_form_that_was_asked_for(loggers: None) -> None:
    stream = io.StringIO()
    start_logging("none", stream)
    assert logging.getLogger("rackserve").handlers == []
    start_logging("json", stream)
    start_logging("json", stream)
    logging.getLogger("rackserve.live").warning("rank %s", "decode0")
    logging.getLogger("uvicorn.error").info("started")
    (told,) = stream.getvalue().splitlines()
    assert json.loads(told)["event"] == "rank decode0"
