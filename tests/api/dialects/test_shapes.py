"""Each dialect's plain answers have exactly the fields of their shapes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rackserve.api.contract import CONTRACTS
from rackserve.api.dialects.messages import Messages
from rackserve.api.dialects.responses import Responses
from rackserve.api.dialects.shapes import ErrorAnswer, MessagesError
from tests.api.dialects.answers import called, deltas, whole
from tests.api.rig import Rig, run, text

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [{"messages": HI}, {"messages": HI, "logprobs": True, "top_logprobs": 1, "prompt_logprobs": 1}],
    "/v1/completions": [{"prompt": "a"}, {"prompt": "a", "logprobs": 1, "echo": True}, {"prompt": "a", "prompt_logprobs": 1}],
    "/v1/responses": [{"model": "tiny", "input": "hi"}, {"model": "tiny", "input": "hi", "max_output_tokens": 1}],
    "/v1/messages": [{"model": "tiny", "max_tokens": 5, "messages": HI}, {"model": "tiny", "max_tokens": 1, "messages": HI}],
    "/v1/messages/count_tokens": [{"model": "tiny", "messages": HI}],
    "/tokenize": [{"prompt": "a"}, {"messages": HI, "return_token_strs": True}],
    "/detokenize": [{"tokens": [2]}],
}  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
def test_answers_and_errors_have_their_shape(path: str) -> None:
    async def scene() -> None:
        rig = Rig(lambda request: text("answer", logprobs=max(request.logprobs, request.prompt_logprobs) >= 0))
        shape = CONTRACTS[path].answer
        assert shape is not None
        for body in BODIES[path]:
            response = await rig.post(path, body)
            assert response.status_code == 200, response.text
            msgspec.json.decode(response.content, type=shape)
        refused = await rig.post(
            path, {"model": "other", "max_tokens": 1, "prompt": "a", "tokens": [1], "messages": HI, "input": "a"}
        )
        assert refused.status_code in (400, 404)
        msgspec.json.decode(refused.content, type=MessagesError if path.startswith("/v1/messages") else ErrorAnswer)

    run(scene())


def test_answers_with_reasoning_and_calls_have_their_shape() -> None:
    bodies: list[tuple[str, Any, dict[str, Any]]] = [
        ("/v1/responses", Responses(), {"model": "tiny", "input": "hi"}),
        ("/v1/messages", Messages(), {"model": "tiny", "max_tokens": 5, "messages": HI}),
    ]
    for path, dialect, body in bodies:
        msgspec.convert(whole(dialect, called(dialect, body), deltas()), CONTRACTS[path].answer)


def test_an_answer_with_another_field_has_not_the_shape() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"error": {"message": "m", "type": "t", "param": None, "code": None}, "new": 1}, ErrorAnswer)
