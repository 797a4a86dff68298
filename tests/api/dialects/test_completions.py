from __future__ import annotations

import msgspec
import pytest

from rackserve.api.dialects.chat import ChatBody
from rackserve.api.dialects.completions import OF_CHATS, CompletionBody, Completions, prompts_of
from rackserve.base.errors import RequestError
from tests.api.dialects.parsing import parse


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_a_prompt_is_a_text_or_ids_or_a_list_of_either(prompt: object, prompts: object) -> None:
    assert prompts_of(prompt) == prompts


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [""], [[]], ["a", ""], [[1], []], 3, {}, {"a": 1}, [1.5], [True], [1, "a"], ["a", 1], [[1], "a"], [None]],
)
def test_any_other_prompt_is_refused_by_name(prompt: object) -> None:
    with pytest.raises(RequestError) as caught:
        prompts_of(prompt)
    assert caught.value.param == "prompt"


def test_logprobs_mean_alternatives_per_token() -> None:
    assert [parse(raw, CompletionBody)[0].num_top_logprobs for raw in (b"{}", b'{"logprobs": 0}', b'{"logprobs": 3}')] == [
        -1,
        0,
        3,
    ]
    chats = (b"{}", b'{"logprobs": true}', b'{"logprobs": true, "top_logprobs": 2}', b'{"logprobs": false}')
    assert [parse(raw, ChatBody)[0].num_top_logprobs for raw in chats] == [-1, 0, 2, -1]


@pytest.mark.parametrize("field", sorted(OF_CHATS))
def test_fields_of_chats_are_refused_unless_they_ask_for_nothing(field: str) -> None:
    for value in OF_CHATS[field]:
        Completions().parse(msgspec.json.encode({"prompt": "a", field: value}), {})
    with pytest.raises(RequestError) as caught:
        Completions().parse(msgspec.json.encode({"prompt": "a", field: ["something"]}), {})
    assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")
