from __future__ import annotations

import json
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.text.json_scanner import MAX_DEPTH, JsonScanner, Scan


def scan(*parts: str) -> tuple[int, Scan]:
    """Characters taken of all parts, and what is known at last."""
    scanner, taken = JsonScanner(), 0
    for part in parts:
        end, known = scanner.scan(part)
        taken += end
        if known is not Scan.MORE:
            return taken, known
    return taken, Scan.MORE


def refuse(name: str) -> NoReturn:
    raise ValueError(name)


def whole(text: str) -> bool:
    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(_value, st.sampled_from([None, 1]), st.booleans(), st.sampled_from([",", "}", " x", "\n]"]))
def test_a_value_ends_where_it_ends(value: Any, indent: int | None, escaped: bool, after: str) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=escaped)
    assert scan(text + after) == (len(text), Scan.DONE)
    assert scan(*text, *after) == (len(text), Scan.DONE)
    assert all(scan(text[:end])[1] is not Scan.BROKEN for end in range(len(text)))


@settings(derandomize=True, max_examples=2000, deadline=None)
@given(st.text('{}[]:,"\\u0a1.-eEtrufalsn \n\x01é', max_size=12), st.sampled_from(["{", "[", '{"a":', '["', "-", "[1"]))
def test_what_it_calls_a_value_is_one_and_what_it_calls_broken_never_becomes_one(text: str, opener: str) -> None:
    text = opener + text
    end, known = scan(text)
    assert (end, known) == scan(*text)
    if known is Scan.DONE:
        assert whole(text[:end])
    elif known is Scan.BROKEN:
        assert not whole(text)
    else:
        assert end == len(text) and (not whole(text) or text[-1] not in "}]")


@pytest.mark.parametrize(
    "text", ["[1 2]", '{"a" 1}', '["\n"]', "[01]", "[+1]", "[1.]", "[.5]", "[tru]", "[NaN]", '["\\x"]', '["\\u12g4"]']
)
def test_near_json_is_broken(text: str) -> None:
    assert scan(text)[1] is Scan.BROKEN


def test_nesting_and_numbers_have_limits() -> None:
    assert scan("[" * MAX_DEPTH)[1] is Scan.MORE
    assert scan("[" * MAX_DEPTH + "[")[1] is Scan.BROKEN
    assert scan("[" + "1" * 1000)[1] is Scan.BROKEN
