"""From a request body to requests the rack understands: the heavy part, made to run off the event loop."""

from __future__ import annotations

import secrets
import time
import uuid

import msgspec

from rackserve.api.ask import Ask, Conversation
from rackserve.api.call import Call, Caller
from rackserve.api.keys import salt_of
from rackserve.api.limits import Limits
from rackserve.base.errors import RequestError
from rackserve.base.keys import TOKEN_BYTES, CacheNamespace, extend_chain
from rackserve.base.request import Request, SamplingParams
from rackserve.base.rng import draw_u64
from rackserve.text.answers import PlainParser
from rackserve.text.chat import ChatTemplate
from rackserve.text.dsml import ChatOptions, DsmlTemplate
from rackserve.text.tokenizer import Vocabulary, pack

_PREFIXES = {"completion": "cmpl-", "chat": "chatcmpl-", "response": "resp_", "message": "msg_"}


class RequestFactory:
    """Builds `Call`s for one served model. Holds no state between calls; safe to use from several threads.

    namespace      names the KV of the model; the tenant salt in it is replaced for each request
    max_model_len  positions in the context: prompt and output together
    vocab_size     ids the model knows (it may know more than the tokenizer)
    secret         what cache salts are derived with; empty: a fresh one, as caches end with the server
    """

    __slots__ = (
        "_eos_ids",
        "_namespace",
        "_secret",
        "_template",
        "_vocab_size",
        "limits",
        "max_model_len",
        "models",
        "tokenizer",
    )

    def __init__(
        self,
        tokenizer: Vocabulary,
        namespace: CacheNamespace,
        *,
        max_model_len: int,
        models: tuple[str, ...],
        template: ChatTemplate | DsmlTemplate | None = None,
        eos_ids: tuple[int, ...] | None = None,
        vocab_size: int | None = None,
        limits: Limits | None = None,
        secret: bytes = b"",
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.models = models
        self.limits = limits or Limits()
        self._namespace = namespace
        self._secret = secret or secrets.token_bytes(32)
        self._template = template
        self._eos_ids = tokenizer.eos_ids if eos_ids is None else eos_ids
        self._vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size

    def prepare(self, ask: Ask, caller: Caller) -> Call:
        """The call that answers `ask`. Raises RequestError naming the field at fault."""
        return self._call(ask, caller, self.prompts(ask))

    def prompts(self, ask: Ask) -> list[bytes]:
        """The token ids of each prompt of `ask`. Raises RequestError naming the field at fault."""
        self._check(ask)
        if ask.conversation is not None:
            return [self._rendered(ask.conversation)]
        return [self._tokens(prompt) for prompt in ask.prompts]

    def _check(self, ask: Ask) -> None:
        if ask.model is not None and ask.model not in self.models:
            raise RequestError(
                f"model {ask.model[:100]!r} is not served here; served: {', '.join(self.models)}",
                param="model",
                code="model_not_found",
                status=404,
            )
        messages = [] if ask.conversation is None else ask.conversation.messages
        if len(messages) > self.limits.messages:
            raise RequestError(f"{ask.field}: at most {self.limits.messages}, got {len(messages)}", param=ask.field)
        choices = max(1, len(ask.prompts)) * ask.n
        if choices > self.limits.choices:
            param = ask.field if len(ask.prompts) > 1 else "n"
            raise RequestError(f"{param}: at most {self.limits.choices} choices in one request, got {choices}", param=param)

    def _rendered(self, conversation: Conversation) -> bytes:
        if not conversation.messages:
            raise RequestError("messages must hold at least one message", param="messages")
        if self._template is None:
            raise RequestError(
                "the served model has no chat template; use /v1/completions", param="messages", code="no_chat_template"
            )
        try:
            if isinstance(self._template, DsmlTemplate):
                # Answers are handed on as one text so far, so the model must not be asked to reason in front of them.
                pieces = self._template.pieces(conversation.messages, ChatOptions(thinking_mode="chat"))
                return self.tokenizer.encode_pieces(pieces)
            return self.tokenizer.encode(self._template.render(conversation.messages))
        except RequestError as error:
            error.param = error.param or "messages"
            raise

    def _tokens(self, prompt: str | list[int]) -> bytes:
        if isinstance(prompt, list):
            low, high = min(prompt), max(prompt)
            if low < 0 or high >= self._vocab_size:
                wrong = low if low < 0 else high
                raise RequestError(f"prompt: token id {wrong} is not in 0 to {self._vocab_size - 1}", param="prompt")
            return pack(prompt)
        try:
            tokens = self.tokenizer.encode(prompt, specials=True)
        except RequestError as error:
            error.param = "prompt"
            raise
        if not tokens:
            raise RequestError("prompt must not be empty", param="prompt", code="empty_prompt")
        return tokens

    def _call(self, ask: Ask, caller: Caller, prompts: list[bytes]) -> Call:
        name = f"{_PREFIXES[ask.kind]}{uuid.uuid4().hex}"
        rooms = [self._room(len(tokens) // TOKEN_BYTES, ask.field) for tokens in prompts]
        wanted = ask.max_tokens
        salt = salt_of(self._secret, caller.tenant, ask.cache_salt)
        namespace = msgspec.structs.replace(self._namespace, tenant_salt=salt)
        root = namespace.root()
        sampling = _sampling(ask)
        requests: list[Request] = []
        for tokens, room in zip(prompts, rooms, strict=True):
            chain = extend_chain(b"", root, tokens, namespace.block_tokens)
            requests += [
                Request(
                    id=f"{name}-{len(requests) + choice}",
                    session=ask.session or name,
                    tokens=tokens,
                    chain=chain,
                    num_tokens=len(tokens) // TOKEN_BYTES,
                    max_tokens=min(room, wanted or room),
                    sampling=sampling[choice],
                    stop_token_ids=self._eos_ids,
                    ignore_eos=ask.ignore_eos,
                    logprobs=ask.logprobs,
                    root=root,
                )
                for choice in range(ask.n)
            ]
        return Call(
            id=name,
            created=int(time.time()),
            model=ask.model or self.models[0],
            ask=ask,
            requests=tuple(requests),
            parser=PlainParser,
            clamped=0 if wanted is None else ask.n * sum(wanted > room for room in rooms),
        )

    def _room(self, num_tokens: int, field: str) -> int:
        """Output tokens that fit behind a prompt of `num_tokens`."""
        room = self.max_model_len - num_tokens
        if room < 1:
            raise RequestError(
                f"{field}: the prompt has {num_tokens} tokens and the context holds {self.max_model_len}, which leaves no room "
                f"for output; shorten the prompt by at least {1 - room} tokens",
                param=field,
                code="context_length_exceeded",
            )
        return room


def _sampling(ask: Ask) -> list[SamplingParams]:
    """One per choice, alike but for the seed: the first keeps the client's, the others' follow from it."""
    seed = secrets.randbits(63) if ask.seed is None else ask.seed
    seeds = [seed, *(draw_u64("choice", seed, choice) >> 1 for choice in range(1, ask.n))]
    return [msgspec.structs.replace(ask.sampling, seed=each) for each in seeds]
