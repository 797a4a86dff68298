"""Token ids without generating: /tokenize, /detokenize and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rackserve.api.call import Caller
from rackserve.api.dialects.body import Table
from rackserve.api.dialects.chat import Chat
from rackserve.api.dialects.completions import Completions
from rackserve.api.dialects.messages import Messages
from rackserve.api.endpoint import Endpoint, Service
from rackserve.api.exchange import Exchange
from rackserve.api.factory import RequestFactory
from rackserve.base.errors import RequestError
from rackserve.text.tokenizer import unpack

Json = dict[str, Any]
Work = Callable[[RequestFactory, bytes, Mapping[str, str], Caller], Json]

MAX_DETOKENIZED = 1 << 20


class TokenEndpoint(Endpoint):
    """Does `work` off the event loop and answers with what it returns."""

    def __init__(self, service: Service, work: Work) -> None:
        super().__init__(service)
        self._work = work

    async def answer(self, exchange: Exchange, raw: bytes) -> None:
        factory, headers = self.service.factory, dict(exchange.headers)
        caller = exchange.caller
        body = await self.read(lambda: self._work(factory, raw, headers, caller))
        await exchange.reply(msgspec.json.encode(body))


class TokenizeBody(msgspec.Struct, frozen=True):
    """Body of /tokenize: what /v1/completions or /v1/chat/completions would be sent, as far as it makes the prompt."""

    prompt: Any = None
    messages: Any = None
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, frozen=True):
    """Body of /detokenize."""

    tokens: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_DETOKENIZED)]
    model: str | None = None


TOKENIZE = Table(TokenizeBody)
DETOKENIZE = Table(DetokenizeBody, ("tokens",))


def tokenize(factory: RequestFactory, raw: bytes, headers: Mapping[str, str], caller: Caller) -> Json:
    """The ids of a prompt, as the generating endpoints would see it. Raises RequestError naming the field at fault."""
    body = TOKENIZE.read(raw).body
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    dialect = Completions() if body.messages is None else Chat()
    prompts = factory.prompts(dialect.parse(raw, headers), caller)
    if len(prompts) > 1:
        raise RequestError("prompt: one text at a time", param="prompt")
    ids = unpack(prompts[0])
    answer: Json = {"count": len(ids), "max_model_len": factory.max_model_len, "tokens": ids, "token_strs": None}
    if body.return_token_strs:
        answer["token_strs"] = [factory.tokenizer.piece(token).decode(errors="backslashreplace") for token in ids]
    return answer


def detokenize(factory: RequestFactory, raw: bytes, _headers: Mapping[str, str], _caller: Caller) -> Json:
    """The text of token ids. Raises RequestError naming the field at fault."""
    body = DETOKENIZE.read(raw).body
    factory.check_model(body.model)
    highest = max(body.tokens, default=0)
    if highest >= factory.tokenizer.vocab_size:
        raise RequestError(f"tokens: {highest} is not in 0 to {factory.tokenizer.vocab_size - 1}", param="tokens")
    return {"prompt": b"".join(factory.tokenizer.piece(token) for token in body.tokens).decode(errors="replace")}


def count_tokens(factory: RequestFactory, raw: bytes, headers: Mapping[str, str], caller: Caller) -> Json:
    """The number of tokens of a /v1/messages prompt."""
    (prompt,) = factory.prompts(Messages(counting=True).parse(raw, headers), caller)
    return {"input_tokens": len(unpack(prompt))}
