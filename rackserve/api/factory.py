"""From a request body to requests the rack understands: the heavy part, made to run off the event loop."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable

import msgspec

from rackserve.api.ask import Ask
from rackserve.api.call import Call, Caller
from rackserve.api.keys import salt_of
from rackserve.api.limits import Limits
from rackserve.api.prompter import Prompter, Rendered, Wish
from rackserve.base.errors import RequestError
from rackserve.base.keys import TOKEN_BYTES, CacheNamespace, extend_chain
from rackserve.base.request import MAX_PROMPT_SCORES, Constraint, Request, SamplingParams
from rackserve.base.rng import draw_u64
from rackserve.text.chat import ChatTemplate
from rackserve.text.dsml import DsmlTemplate
from rackserve.text.parsers import ParserChoice
from rackserve.text.prompt_cache import Prompt, PromptCache, Scope
from rackserve.text.prompt_text import PromptText, Written
from rackserve.text.tokenizer import Vocabulary, pack, unpack

_PREFIXES = {"completion": "cmpl-", "chat": "chatcmpl-", "response": "resp_", "message": "msg_"}

_WISHES: dict[str, dict[Wish, str]] = {
    "completion": {},
    "chat": {"thinking": "chat_template_kwargs", "reasoning_effort": "reasoning_effort", "parallel": "parallel_tool_calls"},
    "response": {"reasoning_effort": "reasoning.effort", "parallel": "parallel_tool_calls"},
    "message": {
        "thinking": "thinking",
        "reasoning_effort": "output_config.effort",
        "parallel": "tool_choice.disable_parallel_tool_use",
    },
}
"""Where each dialect has the wishes that may have no effect."""

_NOT_WRITTEN = Written(PromptText.whole(""))
"""What is rendered of a prompt that is given as it is."""

PROMPT_CACHE_BYTES = 256 << 20


class RequestFactory:
    """Builds `Call`s for one served model. Safe to use from several threads.

    namespace      names the KV of the model; the tenant salt in it is replaced for each request
    max_model_len  positions in the context: prompt and output together
    parsers        which parsers read its answers
    vocab_size     ids the model knows (it may know more than the tokenizer)
    secret         what cache salts are derived with; empty: a fresh one, as caches end with the server
    unsupported    the field of a request that the model cannot do, or None
    check          raises RequestError for a constraint that cannot be kept to
    """

    __slots__ = (
        "_check_constraint", "_eos_ids", "_namespace", "_prompter", "_secret", "_unsupported", "_vocab_size", "kept", "limits",
        "max_model_len", "models", "tokenizer",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Vocabulary,
        namespace: CacheNamespace,
        *,
        max_model_len: int,
        models: tuple[str, ...],
        template: ChatTemplate | DsmlTemplate | None = None,
        parsers: ParserChoice | None = None,
        eos_ids: tuple[int, ...] | None = None,
        vocab_size: int | None = None,
        limits: Limits | None = None,
        secret: bytes = b"",
        unsupported: Callable[[Request], str | None] = lambda request: None,
        check: Callable[[Constraint], object] = lambda constraint: None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.models = models
        self.limits = limits or Limits()
        self.kept = PromptCache(tokenizer, max_bytes=PROMPT_CACHE_BYTES)
        self._namespace = namespace
        self._secret = secret or secrets.token_bytes(32)
        self._prompter = Prompter(template, parsers or ParserChoice(), tokenizer)
        self._eos_ids = tokenizer.eos_ids if eos_ids is None else eos_ids
        self._vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self._unsupported = unsupported
        self._check_constraint = check

    def prepare(self, ask: Ask, caller: Caller) -> Call:
        """The call that answers `ask`. Raises RequestError naming the field at fault."""
        rendered, prompts, root = self._read(ask, caller)
        return self._call(ask, rendered, prompts, root, caller.tenant)

    def prompts(self, ask: Ask, caller: Caller) -> list[bytes]:
        """The token ids of each prompt of `ask`. Raises RequestError naming the field at fault."""
        return [prompt.tokens for prompt in self._read(ask, caller)[1]]

    def _read(self, ask: Ask, caller: Caller) -> tuple[Rendered, list[Prompt], bytes]:
        """How answers are read, the prompts, and the root of their keys."""
        self._check(ask)
        salt = salt_of(self._secret, caller.tenant, ask.cache_salt)
        root = msgspec.structs.replace(self._namespace, tenant_salt=salt).root()
        scope = Scope(root, self._namespace.block_tokens, ask.session)
        if ask.conversation is None:
            prompts = [self._tokens(text, scope) for text in ask.prompts]
            return Rendered(_NOT_WRITTEN, constraint=ask.sampling.constraint), prompts, root
        try:
            rendered = self._prompter.render(ask.conversation, ask.sampling.constraint, self.kept.last(scope))
            found = self.kept.encode_written(rendered.written, scope)
        except RequestError as error:
            error.param = (error.param or "messages").replace("messages", ask.field, 1)
            raise
        if not found.tokens:
            text = f"{ask.field}: the chat template makes an empty prompt of them"
            raise RequestError(text, param=ask.field, code="empty_prompt")
        return rendered, [found], root

    def check_model(self, model: str | None) -> None:
        """Refuse (404) a model that is not served; none named is the one that is."""
        if model is not None and model not in self.models:
            raise RequestError(
                f"model {model[:100]!r} is not served here; served: {', '.join(self.models)}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def _check(self, ask: Ask) -> None:
        self.check_model(ask.model)
        messages = [] if ask.conversation is None else ask.conversation.messages
        if len(messages) > self.limits.messages:
            raise RequestError(f"{ask.field}: at most {self.limits.messages}, got {len(messages)}", param=ask.field)
        choices = max(1, len(ask.prompts)) * ask.n
        if choices > self.limits.choices:
            param = ask.field if len(ask.prompts) > 1 else "n"
            raise RequestError(f"{param}: at most {self.limits.choices} choices in one request, got {choices}", param=param)

    def _tokens(self, prompt: str | list[int], scope: Scope) -> Prompt:
        if isinstance(prompt, list):
            self._check_ids("prompt", prompt)
            tokens = pack(prompt)
            return Prompt(tokens, extend_chain(b"", scope.root, tokens, scope.block_tokens), 0, None)
        try:
            found = self.kept.encode(prompt, scope, specials=True)
        except RequestError as error:
            error.param = "prompt"
            raise
        if not found.tokens:
            raise RequestError("prompt must not be empty", param="prompt", code="empty_prompt")
        return found

    def _check_ids(self, field: str, ids: list[int] | tuple[int, ...]) -> None:
        for wrong in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= wrong < self._vocab_size:
                raise RequestError(f"{field}: token id {wrong} is not in 0 to {self._vocab_size - 1}", param=field)

    def _call(self, ask: Ask, rendered: Rendered, prompts: list[Prompt], root: bytes, tenant: str) -> Call:
        name = f"{_PREFIXES[ask.kind]}{uuid.uuid4().hex}"
        rooms = [self._room(len(prompt.tokens) // TOKEN_BYTES, ask.field) for prompt in prompts]
        wanted = ask.max_tokens
        stop_ids = ask.stop_token_ids if ask.ignore_eos else (*self._eos_ids, *ask.stop_token_ids)
        sampling = self._sampling(ask, rendered.constraint)
        requests: list[Request] = []
        for prompt, room in zip(prompts, rooms, strict=True):
            requests += [
                Request(
                    id=f"{name}-{len(requests) + choice}",
                    session=ask.session or name,
                    tokens=prompt.tokens,
                    chain=prompt.chain,
                    num_tokens=len(prompt.tokens) // TOKEN_BYTES,
                    max_tokens=min(room, room if wanted is None else max(1, wanted)),
                    sampling=sampling[choice],
                    stop_token_ids=stop_ids,
                    ignore_eos=ask.ignore_eos and not stop_ids,
                    logprobs=ask.logprobs,
                    prompt_logprobs=ask.prompt_logprobs,
                    root=root,
                    tenant=tenant,
                )
                for choice in range(ask.n)
            ]
        self._check_request(requests[0], ask)
        return Call(
            id=name,
            created=int(time.time()),
            model=ask.model or self.models[0],
            ask=msgspec.structs.replace(ask, ignored=(*ask.ignored, *(_WISHES[ask.kind][wish] for wish in rendered.ignored))),
            requests=tuple(requests),
            parser=rendered.parser,
            clamped=0 if wanted is None else ask.n * sum(wanted > room for room in rooms),
            reasoning_end=rendered.reasoning_end,
            left_at=tuple(prompt.left_at for prompt in prompts for _ in range(ask.n)),
        )

    def _sampling(self, ask: Ask, constraint: Constraint | None) -> list[SamplingParams]:
        """One per choice, alike but for the seed: the first keeps the client's, the others' follow from it."""
        seed = secrets.randbits(63) if ask.seed is None else ask.seed
        seeds = [seed, *(draw_u64("choice", seed, choice) >> 1 for choice in range(1, ask.n))]
        words = tuple(unpack(self.tokenizer.encode(word)) for word in ask.bad_words)
        return [msgspec.structs.replace(ask.sampling, seed=each, bad_words=words, constraint=constraint) for each in seeds]

    def _check_request(self, request: Request, ask: Ask) -> None:
        """What the model cannot do, and ids that it does not have. Raises RequestError naming the field."""
        sampling = request.sampling
        self._check_ids("logit_bias", [token for token, _ in sampling.logit_bias])
        self._check_ids("allowed_token_ids", sampling.allowed_token_ids)
        self._check_ids("stop_token_ids", ask.stop_token_ids)
        field = self._unsupported(request)
        if field is not None:
            names = {"constraint": "structured_outputs or response_format"}
            text = f"{names.get(field, field)} is not supported by the served model; leave it out"
            raise RequestError(text, param=names.get(field, field).split(" ")[0], code="unsupported_parameter")
        if request.prompt_logprobs >= 0 and request.num_tokens * (request.prompt_logprobs + 2) > MAX_PROMPT_SCORES:
            text = f"prompt_logprobs: the scores of {request.num_tokens} tokens are too many for one answer; ask for fewer"
            raise RequestError(text, param="prompt_logprobs")
        if sampling.constraint is not None:
            try:
                self._check_constraint(sampling.constraint)
            except RequestError as error:
                error.param = error.param or ("tool_choice" if ask.sampling.constraint is None else "response_format")
                raise

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
