"""The request bodies of the OpenAI dialect, and what of it is refused rather than ignored."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from rackserve.base.errors import RequestError

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


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """Body of /v1/completions. `prompt`: a text, a list of token ids, or a list of either."""

    prompt: Any = None
    logprobs: TopLogprobs | None = None

    @property
    def num_top_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_top_logprobs(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1


Body = TypeVar("Body", CompletionBody, ChatBody)

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
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

_WITHOUT_EFFECT = frozenset(
    {"metadata", "parallel_tool_calls", "safety_identifier", "service_tier", "store", "user", "verbosity", "reasoning_effort"}
)
"""Fields accepted because they change nothing that a client could miss in the answer's form."""


def parse(raw: bytes, kind: type[Body]) -> tuple[Body, tuple[str, ...]]:
    """The body in `raw` JSON and the names of fields nobody knows.

    Raises RequestError naming the field for a wrong type, a value out of range or a field that is known but unsupported.
    """
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        body = msgspec.json.decode(raw, type=kind)
        known = {field.encode_name for field in msgspec.structs.fields(kind)}
        unknown = [name for name in fields if name not in known]
        for name in unknown:
            if name in _UNSUPPORTED:
                _refuse_effect(name, msgspec.json.decode(fields[name]))
    except msgspec.ValidationError as error:
        message, param = _locate(str(error))
        raise RequestError(message, param=param, code="invalid_type") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    return body, tuple(name for name in unknown if name not in _UNSUPPORTED and name not in _WITHOUT_EFFECT)


def _refuse_effect(name: str, value: Any) -> None:
    if value is not None and value not in _UNSUPPORTED[name]:
        raise RequestError(f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")


def _locate(text: str) -> tuple[str, str | None]:
    """The validation message with the field first, and the field's name."""
    found = re.fullmatch(r"(.*?) - at `\$\.?(.*)`", text, re.DOTALL)
    if found is None or not found[2] or found[2].startswith("["):
        return f"the body is invalid: {text}", None
    where = found[2]
    return f"{where}: {found[1]}", where if where.startswith("messages[") else where.split("[")[0]


def prompts_of(value: Any) -> list[str] | list[list[int]]:
    """The prompts of a completion, all texts or all lists of token ids. Raises RequestError (param `prompt`)."""
    if value is None or value in ("", []):
        raise RequestError("prompt must not be empty", param="prompt", code="empty_prompt")
    single = isinstance(value, str) or (isinstance(value, list) and isinstance(value[0], int))
    try:
        prompts = msgspec.convert([value] if single else value, list[str] | None)
    except msgspec.ValidationError:
        try:
            return _filled(msgspec.convert([value] if single else value, list[list[int]]))
        except msgspec.ValidationError as error:
            raise RequestError(
                "prompt must be a string, a list of token ids, or a list of either (not mixed)", param="prompt"
            ) from error
    return _filled(prompts or [])


Prompts = TypeVar("Prompts", list[str], list[list[int]])


def _filled(prompts: Prompts) -> Prompts:
    if not all(prompts):
        raise RequestError("prompt must not be empty", param="prompt", code="empty_prompt")
    return prompts
