from __future__ import annotations

from typing import Any

from rackserve.text.tokenizer import unpack
from tests.api.rig import Rig, run, text
from tests.text.small_model import small_tokenizer


def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async def scene() -> tuple[int, Any]:
        rig = Rig(text("x"))
        response = await rig.post(path, body)
        assert rig.frontend.submitted == []
        return response.status_code, response.json()

    return run(scene())


def test_text_and_ids_go_back_and_forth() -> None:
    ids = list(unpack(small_tokenizer().encode("the cat")))
    status, told = answer("/tokenize", {"prompt": "the cat", "return_token_strs": True})
    assert status == 200 and told["tokens"] == ids and told["count"] == len(ids) and "".join(told["token_strs"]) == "the cat"
    assert answer("/detokenize", {"tokens": ids}) == (200, {"prompt": "the cat"})


def test_messages_are_counted_as_they_would_be_served() -> None:
    messages = [{"role": "user", "content": "hi"}]
    _, told = answer("/tokenize", {"messages": messages})
    assert answer("/v1/messages/count_tokens", {"model": "tiny", "messages": messages}) == (
        200,
        {"input_tokens": told["count"]},
    )


def test_refusals_name_the_field_in_the_dialect_of_the_path() -> None:
    for body in ({}, {"prompt": "a", "messages": []}, {"prompt": ["a", "b"]}):
        status, told = answer("/tokenize", body)
        assert status == 400 and told["error"]["param"] == "prompt"
    assert answer("/detokenize", {"tokens": [10**6]})[1]["error"]["param"] == "tokens"
    assert answer("/detokenize", {"tokens": [-1]})[0] == 400
    status, told = answer("/v1/messages/count_tokens", {"model": "tiny", "messages": []})
    assert status == 400 and told["type"] == "error" and told["error"]["type"] == "invalid_request_error"
