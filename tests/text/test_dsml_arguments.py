from __future__ import annotations

import json
from typing import Any

import pytest

from rackserve.text.dsml_arguments import Arguments, parameter_names

NONE: frozenset[str] = frozenset()


def read(parameters: list[tuple[str, str, str | None]], names: frozenset[str] = NONE, cut: int = 1) -> str:
    """The arguments that (name, text, string attribute) make; each text is taken `cut` characters at a time."""
    arguments, parts = Arguments(names), []
    for key, text, string in parameters:
        parts.append(arguments.open(key, string))
        parts += [arguments.take(text[start : start + cut]) for start in range(0, len(text), cut)]
        parts.append(arguments.close())
    return "".join([*parts, arguments.finish()])


@pytest.mark.parametrize(
    ("text", "string", "value"),
    [
        ("3", "true", "3"),
        ('a "quoted" \\ line\n\tend\x00', "true", 'a "quoted" \\ line\n\tend\x00'),
        ("3", "false", 3),
        (' {"a": [1, null]}\n', "false", {"a": [1, None]}),
        ("null", "false", None),
        ("not json", "false", "not json"),
        ("NaN", "false", "NaN"),
        ("", "false", ""),
        ("true", None, True),
        ("true story", None, "true story"),
        ("1", "maybe", 1),
    ],
)
def test_a_value_is_text_or_json_as_declared_and_text_if_it_is_no_json(text: str, string: str | None, value: Any) -> None:
    assert json.loads(read([("k", text, string)])) == {"k": value}


def test_json_is_passed_on_as_it_was_written() -> None:
    assert read([("a", "1.50", "false"), ("b", "é", "true"), ("c", "1e2", "false")]) == '{"a": 1.50, "b": "é", "c": 1e2}'


def test_no_parameters_are_an_empty_object() -> None:
    assert read([]) == "{}"


def test_text_is_passed_on_as_it_comes() -> None:
    arguments = Arguments(NONE)
    assert [arguments.open("k", "true"), arguments.take('a"'), arguments.take("b"), arguments.close(), arguments.finish()] == [
        '{"k": "', 'a\\"', "b", '"', "}",
    ]  # fmt: skip


def test_the_first_of_two_of_a_name_counts() -> None:
    assert read([("a", "1", "true"), ("a", "2", "true"), ("a", "3", "false"), ("b", "4", "true")]) == '{"a": "1", "b": "4"}'


KNOWN = frozenset({"x", "y"})


@pytest.mark.parametrize("wrapper", ["arguments", "input"])
@pytest.mark.parametrize("string", ["true", "false", None])
def test_a_lone_wrapper_is_unwrapped(wrapper: str, string: str | None) -> None:
    assert json.loads(read([(wrapper, '{"x": 1}', string)], KNOWN)) == {"x": 1}


@pytest.mark.parametrize(
    ("parameters", "names", "expected"),
    [
        ([("arguments", '{"x": 1}', "false")], NONE, {"arguments": {"x": 1}}),  # nothing is known of the tool
        ([("input", '{"x": 1}', "false")], KNOWN | {"input"}, {"input": {"x": 1}}),  # the tool has a parameter of that name
        ([("other", '{"x": 1}', "false")], KNOWN, {"other": {"x": 1}}),
        ([("input", '{"z": 1}', "false")], KNOWN, {"input": {"z": 1}}),  # not the tool's parameters
        ([("input", "text", "true")], KNOWN, {"input": "text"}),
        ([("input", "[1]", "false")], KNOWN, {"input": [1]}),
        ([("input", '{"x": 1}', "true"), ("y", "2", "false")], KNOWN, {"input": '{"x": 1}', "y": 2}),
        ([("y", "2", "false"), ("input", '{"x": 1}', "false")], KNOWN, {"input": {"x": 1}, "y": 2}),
        ([("input", "1", "true"), ("input", '{"x": 1}', "false")], KNOWN, {"input": "1"}),
    ],
)
def test_any_other_argument_of_that_name_stays(
    parameters: list[tuple[str, str, str | None]], names: frozenset[str], expected: dict[str, Any]
) -> None:
    assert json.loads(read(parameters, names)) == expected


@pytest.mark.parametrize(
    ("key", "string", "shown"),
    [
        ("k", "true", '{"k": "[1, '),
        ("k", "false", '{"k": [1, '),
        ("k", None, ""),
        ("input", "true", ""),
        ("input", "false", '{"input": [1, '),
    ],
)
def test_a_call_cut_short_shows_what_there_is(key: str, string: str | None, shown: str) -> None:
    arguments = Arguments(KNOWN)
    assert arguments.open(key, string) + arguments.take("[1, ") + arguments.cut() == shown


def test_parameters_are_named_by_the_schema() -> None:
    functions = [
        {"name": "f", "parameters": {"type": "object", "properties": {"x": {}, "y": {}}}},
        {"name": "g", "parameters": {"type": "object"}},
        {"name": "h"},
        {"name": "i", "parameters": {"properties": ["x"]}},
    ]
    assert parameter_names(functions) == {"f": {"x", "y"}, "g": NONE, "h": NONE, "i": NONE}
