"""What both OpenAI generation bodies share: their fields, what of them is refused, and how they become an `Ask`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rackserve.api.ask import Ask
from rackserve.api.dialects.formats import StructuredOutputs, constraint_of
from rackserve.base.errors import RequestError
from rackserve.base.request import Constraint, SamplingParams

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1024
MAX_SESSION_CHARACTERS = 256
MAX_N = 8
MAX_TOP_LOGPROBS = 20

MAX_BIASES = 1024
MAX_IDS = 1024
MAX_BAD_WORDS = 128

Count = Annotated[int, Meta(ge=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
TokenId = Annotated[int, Meta(ge=0)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Session = Annotated[str, Meta(min_length=1, max_length=MAX_SESSION_CHARACTERS)]


class StreamOptions(msgspec.Struct, frozen=True):
    """`include_usage`: one more chunk, with the usage of all choices, before the end."""

    include_usage: bool = False


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both endpoints share. None means the same as absent.

    max_tokens: at most this many output tokens, cut to the room left in the context; None = that room.
    temperature: 0 is greedy; None = 1. top_k: 0 and -1 = off. seed: None = a fresh one. The other ways to change what is
    drawn are those of `SamplingParams`. prompt_logprobs: for answers that are not streamed.
    """

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Seed | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Meta(ge=-100, le=100)]],
            Meta(max_length=MAX_BIASES, extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,6}$"}}),
        ]
        | None
    ) = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_IDS)] | None = None
    bad_words: Annotated[list[Stop], Meta(max_length=MAX_BAD_WORDS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_IDS)] | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: TopLogprobs | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    session_id: Session | None = None
    prompt_cache_key: Session | None = None
    cache_salt: str | None = None

    @property
    def token_limit(self) -> int | None:
        """The client's limit of output tokens per choice."""
        return self.max_tokens

    @property
    def num_top_logprobs(self) -> int:
        """Alternatives per token to report log-probabilities of; -1 = report none at all."""
        return -1

    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self) -> SamplingParams:
        """How tokens are chosen; seed and bad words are not decided here. Raises RequestError naming the field at fault."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            logit_bias=_biases(self.logit_bias or {}),
            min_tokens=self.min_tokens or 0,
            allowed_token_ids=tuple(sorted(self.allowed_token_ids or ())),
            constraint=self.constraint(),
        )

    def constraint(self) -> Constraint | None:
        """What form the answer must have."""
        return constraint_of(self.structured_outputs)

    def ask(
        self,
        kind: Literal["completion", "chat"],
        headers: Mapping[str, str],
        unknown: tuple[str, ...],
        ignored: tuple[str, ...],
    ) -> Ask:
        """All that both bodies say in the same way. Raises RequestError naming the field at fault."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs needs stream: false", param="prompt_logprobs")
        return Ask(
            kind=kind,
            field="prompt" if kind == "completion" else "messages",
            model=self.model,
            n=self.n or 1,
            max_tokens=self.token_limit,
            stops=self.stops(),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            sampling=self.sampling(),
            seed=self.seed,
            logprobs=self.num_top_logprobs,
            prompt_logprobs=-1 if self.prompt_logprobs is None else self.prompt_logprobs,
            ignore_eos=bool(self.ignore_eos),
            stream=bool(self.stream),
            usage=self.stream_options is not None and self.stream_options.include_usage,
            session=session_of(self.session_id, headers, self.prompt_cache_key),
            cache_salt=self.cache_salt or "",
            unknown=unknown,
            ignored=ignored,
        )


def _biases(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    try:
        return tuple(sorted((int(token), bias) for token, bias in biases.items()))
    except ValueError as error:
        raise RequestError("logit_bias: keys must be token ids", param="logit_bias") from error


SESSION_HEADERS = ("x-session-id", "x-session-affinity", "session-id", "x-correlation-id", "thread-id")
"""Where clients put the identity of a conversation, most specific first."""


def session_of(named: str | None, headers: Mapping[str, str], other: str | None = None) -> str:
    """The conversation the client says it belongs to: `named` in the body, else by a header, else `other`.

    It is "" if the client says nothing. Raises RequestError (param: the header) for an overlong name.
    """
    for name in SESSION_HEADERS:
        if len(headers.get(name, "")) > MAX_SESSION_CHARACTERS:
            raise RequestError(f"{name}: at most {MAX_SESSION_CHARACTERS} characters", param=name)
    return named or next(filter(None, map(headers.get, SESSION_HEADERS)), None) or other or ""


UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields with a known meaning that has no effect here, and the values that ask for nothing (besides null)."""

HARMLESS = frozenset({"metadata", "safety_identifier", "service_tier", "store", "user", "verbosity", "request_id"})
"""Fields accepted because they change nothing that a client could miss in the answer's form."""
