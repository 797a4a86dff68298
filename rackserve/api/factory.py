"""From a request body to requests the rack understands: the heavy part, made to run off the event loop."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Mapping

import msgspec

from rackserve.api.schema import (
    MAX_SESSION_CHARACTERS,
    Body,
    ChatBody,
    CompletionBody,
    GenerationBody,
    parse,
    prompts_of,
)
from rackserve.base.errors import RequestError
from rackserve.base.keys import TOKEN_BYTES, CacheNamespace, extend_chain
from rackserve.base.ranges import MAX_COUNT, MAX_SECONDS, MIN_SECONDS, require_range
from rackserve.base.request import Request, SamplingParams
from rackserve.base.rng import draw_u64
from rackserve.text.chat import ChatTemplate
from rackserve.text.dsml import ChatOptions, DsmlTemplate
from rackserve.text.tokenizer import Vocabulary, pack

SESSION_HEADERS = ("x-session-id", "x-session-affinity", "session-id", "x-correlation-id")
"""Where clients put the identity of a conversation, most specific first."""

MAX_BODY_BYTES = 1 << 40
MAX_THREADS = 1024


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one client may ask of the front end before anything heavy is done.

    body_bytes      length of a request body; more is 413
    messages        chat messages in one request
    choices         prompts x n in one request
    preparing       requests waiting to be parsed and tokenised; more are refused with 429
    threads         worker threads that parse and tokenise
    body_s, send_s  seconds to wait for the next part of a body, or for the client to take a part of the answer
    """

    body_bytes: int = 16 << 20
    messages: int = 8192
    choices: int = 32
    preparing: int = 64
    threads: int = 2
    body_s: float = 30.0
    send_s: float = 60.0

    def __post_init__(self) -> None:
        require_range("limits", self, ("body_bytes",), 1, MAX_BODY_BYTES)
        require_range("limits", self, ("messages", "choices", "preparing"), 1, MAX_COUNT)
        require_range("limits", self, ("threads",), 1, MAX_THREADS)
        require_range("limits", self, ("body_s", "send_s"), MIN_SECONDS, MAX_SECONDS)


class Call(msgspec.Struct, frozen=True):
    """One HTTP request, ready to run. `requests` are its choices: all `n` of the first prompt, then of the second ...

    `clamped`: choices whose limit of output tokens was cut to the room in the context; `unknown`: fields nobody knows.
    """

    id: str
    created: int
    model: str
    chat: bool
    stream: bool
    include_usage: bool
    requests: tuple[Request, ...]
    n: int
    stops: tuple[str, ...]
    clamped: int
    unknown: tuple[str, ...]


class RequestFactory:
    """Builds `Call`s for one served model. Holds no state between calls; safe to use from several threads.

    namespace      names the KV of the model; a client's `cache_salt` becomes its tenant salt
    max_model_len  positions in the context: prompt and output together
    vocab_size     ids the model knows (it may know more than the tokenizer)
    """

    __slots__ = ("_eos_ids", "_namespace", "_template", "_vocab_size", "limits", "max_model_len", "models", "tokenizer")

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
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.models = models
        self.limits = limits or Limits()
        self._namespace = namespace
        self._template = template
        self._eos_ids = tokenizer.eos_ids if eos_ids is None else eos_ids
        self._vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size

    def completion(self, raw: bytes, headers: Mapping[str, str]) -> Call:
        """The call in a /v1/completions body. Raises RequestError naming the field at fault."""
        body, unknown = self._parse(raw, CompletionBody)
        prompts = prompts_of(body.prompt)
        self._check_choices(len(prompts), body)
        tokens = [self._tokens(prompt) for prompt in prompts]
        return self._call(body, tokens, "prompt", headers, unknown)

    def chat(self, raw: bytes, headers: Mapping[str, str]) -> Call:
        """The call in a /v1/chat/completions body. Raises RequestError naming the field at fault."""
        body, unknown = self._parse(raw, ChatBody)
        messages = body.messages or []
        if len(messages) > self.limits.messages:
            raise RequestError(f"messages: at most {self.limits.messages}, got {len(messages)}", param="messages")
        self._check_choices(1, body)
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if not messages:
            raise RequestError("messages must hold at least one message", param="messages")
        if self._template is None:
            raise RequestError(
                "the served model has no chat template; use /v1/completions", param="messages", code="no_chat_template"
            )
        try:
            if isinstance(self._template, DsmlTemplate):
                # Answers are handed on as one text so far, so the model must not be asked to reason in front of them.
                tokens = self.tokenizer.encode_pieces(self._template.pieces(messages, ChatOptions(thinking_mode="chat")))
            else:
                tokens = self.tokenizer.encode(self._template.render(messages))
        except RequestError as error:
            error.param = error.param or "messages"
            raise
        return self._call(body, [tokens], "messages", headers, unknown)

    def _parse(self, raw: bytes, kind: type[Body]) -> tuple[Body, tuple[str, ...]]:
        body, unknown = parse(raw, kind)
        if body.model is not None and body.model not in self.models:
            raise RequestError(
                f"model {body.model[:100]!r} is not served here; served: {', '.join(self.models)}",
                param="model",
                code="model_not_found",
                status=404,
            )
        if body.stream_options is not None and not body.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        return body, unknown

    def _check_choices(self, num_prompts: int, body: GenerationBody) -> None:
        choices = num_prompts * (body.n or 1)
        if choices > self.limits.choices:
            param = "prompt" if num_prompts > 1 else "n"
            raise RequestError(f"{param}: at most {self.limits.choices} choices in one request, got {choices}", param=param)

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

    def _call(
        self,
        body: GenerationBody,
        prompts: list[bytes],
        field: str,
        headers: Mapping[str, str],
        unknown: tuple[str, ...],
    ) -> Call:
        name = f"{'chatcmpl' if isinstance(body, ChatBody) else 'cmpl'}-{uuid.uuid4().hex}"
        rooms = [self._room(len(tokens) // TOKEN_BYTES, field) for tokens in prompts]
        n = body.n or 1
        wanted = body.token_limit
        namespace = msgspec.structs.replace(self._namespace, tenant_salt=body.cache_salt or self._namespace.tenant_salt)
        root = namespace.root()
        session = _session(body, headers) or name
        sampling = _sampling(body, n)
        requests: list[Request] = []
        for tokens, room in zip(prompts, rooms, strict=True):
            chain = extend_chain(b"", root, tokens, namespace.block_tokens)
            requests += [
                Request(
                    id=f"{name}-{len(requests) + choice}",
                    session=session,
                    tokens=tokens,
                    chain=chain,
                    num_tokens=len(tokens) // TOKEN_BYTES,
                    max_tokens=min(room, wanted or room),
                    sampling=sampling[choice],
                    stop_token_ids=self._eos_ids,
                    ignore_eos=bool(body.ignore_eos),
                    logprobs=body.num_top_logprobs,
                    root=root,
                )
                for choice in range(n)
            ]
        return Call(
            id=name,
            created=int(time.time()),
            model=body.model or self.models[0],
            chat=isinstance(body, ChatBody),
            stream=bool(body.stream),
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
            requests=tuple(requests),
            n=n,
            stops=body.stops(),
            clamped=0 if wanted is None else n * sum(wanted > room for room in rooms),
            unknown=unknown,
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


def _session(body: GenerationBody, headers: Mapping[str, str]) -> str:
    """The conversation the client says it belongs to, or "" if it says nothing."""
    if body.session_id is not None:
        return body.session_id
    for name in SESSION_HEADERS:
        value = headers.get(name, "")
        if len(value) > MAX_SESSION_CHARACTERS:
            raise RequestError(f"{name}: at most {MAX_SESSION_CHARACTERS} characters", param=name)
        if value:
            return value
    return body.prompt_cache_key or ""


def _sampling(body: GenerationBody, n: int) -> list[SamplingParams]:
    """One per choice, alike but for the seed: the first keeps the client's, the others' follow from it."""
    seed = secrets.randbits(63) if body.seed is None else body.seed
    first = SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        seed=seed,
    )
    others = [msgspec.structs.replace(first, seed=draw_u64("choice", seed, choice) >> 1) for choice in range(1, n)]
    return [first, *others]
