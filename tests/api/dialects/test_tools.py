from __future__ import annotations

import pytest

from rackserve.api.dialects.tools import sort_out
from rackserve.base.errors import RequestError


def test_tools_of_other_kinds_are_left_out_and_named_by_their_place() -> None:
    tools = [{"a": 1}, {"b": 2}, {"c": 3}]
    own, left_out = sort_out(tools, ["function", "x" * 50, "function"], "function")
    assert own == [(0, {"a": 1}), (2, {"c": 3})] and left_out == [f"tools[1]:{'x' * 40}"]


@pytest.mark.parametrize("kind", [None, 1, ["function"]])
def test_a_kind_that_is_no_text_is_refused_by_its_place(kind: object) -> None:
    with pytest.raises(RequestError) as error:
        sort_out([{}, {}], ["function", kind], "function")
    assert error.value.param == "tools[1].type"
