from __future__ import annotations

from typing import Any

import pytest

from rackserve.api.dialects.formats import StructuredOutputs, constraint_of, constraint_of_format
from rackserve.base.errors import RequestError
from rackserve.base.request import Constraint


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, Constraint("json_object")),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}},
            Constraint("json_schema", '{"type":"array"}'),
        ),
    ],
)
def test_a_response_format_is_a_constraint(given: Any, found: Constraint | None) -> None:
    assert constraint_of_format(given, "response_format") == found


@pytest.mark.parametrize(
    "given", [{}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": 3}}]
)
def test_a_format_nobody_knows_is_refused_by_name(given: Any) -> None:
    with pytest.raises(RequestError) as caught:
        constraint_of_format(given, "text.format")
    assert caught.value.param == "text.format"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (StructuredOutputs(), None),
        (StructuredOutputs(json={"type": "null"}), Constraint("json_schema", '{"type":"null"}')),
        (StructuredOutputs(json='{"type": "null"}'), Constraint("json_schema", '{"type": "null"}')),
        (StructuredOutputs(regex="a+"), Constraint("regex", "a+")),
        (StructuredOutputs(choice=["a", "b"]), Constraint("choice", '["a","b"]')),
        (StructuredOutputs(grammar='start: "a"'), Constraint("grammar", 'start: "a"')),
        (StructuredOutputs(json_object=True), Constraint("json_object")),
        (StructuredOutputs(json_object=False), None),
    ],
)
def test_structured_outputs_are_a_constraint(given: StructuredOutputs, found: Constraint | None) -> None:
    assert constraint_of(given) == found


@pytest.mark.parametrize(
    "given", [StructuredOutputs(regex="a", choice=["b"]), StructuredOutputs(choice=[]), StructuredOutputs(choice=["a", ""])]
)
def test_two_kinds_at_once_and_empty_choices_are_refused(given: StructuredOutputs) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        constraint_of(given)
