"""What both OpenAI generation bodies share: their fields, what of them is refused, and how they become an `Ask`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rackserve.api.ask import Ask
from rackserve.base.errors import RequestError
from rackserve.base.request import SamplingParams

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1024
MAX_SESSION_CHARACTERS = 256
MAX_N = 8
MAX_TOP_LOGPROBS = 20

Count = Annotated[int, Meta(ge=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Session = Annotated[str, Meta(min_length=1, max_length=MAX_SESSION_CHARACTERS)]


class StreamOptions(msgspec.Struct, frozen=True):
    """`include_usage`: one more chunk, with the usage of all choices, before the end."""

    include_usage: bool = False


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both endpoints share. None means the same as absent.

    max_tokens: at most this many output tokens, cut to the room left in the context; None = that room.
    temperature: 0 is greedy; None = 1. top_k: 0 and -1 = off. seed: None = a fresh one.
    """

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
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
        """The stop strings. Raises RequestError on too many, an empty or an overlong one."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS:
            raise RequestError(f"stop: at most {MAX_STOPS} strings, got {len(stops)}", param="stop")
        if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
            raise RequestError(f"stop: each string needs 1 to {MAX_STOP_CHARACTERS} characters", param="stop")
        return tuple(stops)

    def sampling(self) -> SamplingParams:
        """How tokens are chosen; the seed is not decided here."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
        )

    def ask(self, kind: Literal["completion", "chat"], headers: Mapping[str, str], unknown: tuple[str, ...]) -> Ask:
        """All that both bodies say in the same way. Raises RequestError naming the field at fault."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        return Ask(
            kind=kind,
            field="prompt" if kind == "completion" else "messages",
            model=self.model,
            n=self.n or 1,
            max_tokens=self.token_limit,
            stops=self.stops(),
            sampling=self.sampling(),
            seed=self.seed,
            logprobs=self.num_top_logprobs,
            ignore_eos=bool(self.ignore_eos),
            stream=bool(self.stream),
            usage=self.stream_options is not None and self.stream_options.include_usage,
            session=session_of(self, headers),
            cache_salt=self.cache_salt or "",
            unknown=tuple(name for name in unknown if name not in HARMLESS),
            ignored=tuple(name for name in unknown if name in HARMLESS),
        )


SESSION_HEADERS = ("x-session-id", "x-session-affinity", "session-id", "x-correlation-id")
"""Where clients put the identity of a conversation, most specific first."""


def session_of(body: GenerationBody, headers: Mapping[str, str]) -> str:
    """The conversation the client says it belongs to, or "" if it says nothing."""
    if body.session_id is not None:
        return body.session_id
    return session_header(headers) or body.prompt_cache_key or ""


def session_header(headers: Mapping[str, str]) -> str:
    """The conversation that a header names, or "". Raises RequestError (param: the header) for an overlong name."""
    for name in SESSION_HEADERS:
        value = headers.get(name, "")
        if len(value) > MAX_SESSION_CHARACTERS:
            raise RequestError(f"{name}: at most {MAX_SESSION_CHARACTERS} characters", param=name)
        if value:
            return value
    return ""


UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields with a known meaning that has no effect here, and the values that ask for nothing (besides null)."""

HARMLESS = frozenset(
    {"metadata", "parallel_tool_calls", "safety_identifier", "service_tier", "store", "user", "verbosity", "reasoning_effort"}
)
"""Fields accepted because they change nothing that a client could miss in the answer's form."""
