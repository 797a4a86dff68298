"""Every field of every dialect has an effect that can be seen, is refused, or is named in the answer's header.

The fields come from the tables that read requests, so none is forgotten. For each there is what to send and what can then be
seen of it, on the answer or on what the engine is asked; without the field it must not be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec
import pytest

from rackserve.api.ask import Ask
from rackserve.api.contract import CONTRACTS
from rackserve.api.endpoint import IGNORED, MAX_NAME, MAX_TOLD, MAX_UNKNOWN, without_effect
from rackserve.base.request import Constraint, Request, SamplingParams
from rackserve.text.chat import ChatTemplate
from rackserve.text.parsers import ParserChoice
from rackserve.text.tokenizer import unpack
from tests.api.rig import Rig, Script, run, text
from tests.text.small_model import CHATML, small_tokenizer

TEMPLATE = CHATML + "{% if enable_thinking %}THINK{% endif %}{% if thinking %}think{% endif %}{{ reasoning_effort }}"


class Seen(NamedTuple):
    """One exchange: the response, and what the engine was asked for."""

    status: int
    raw: str
    headers: dict[str, str]
    requests: list[Request]

    @property
    def answer(self) -> Any:
        return msgspec.json.decode(self.raw)

    @property
    def first(self) -> Request:
        return self.requests[0]

    @property
    def sampling(self) -> SamplingParams:
        return self.first.sampling

    @property
    def prompt(self) -> str:
        return small_tokenizer().decode(unpack(self.first.tokens))

    @property
    def choice(self) -> Any:
        return self.answer["choices"][0]

    @property
    def ignored(self) -> list[str]:
        return self.headers.get(IGNORED, "").split(", ")


Look = Callable[[Seen], bool]


class Effect(msgspec.Struct, frozen=True):
    """`sent` beside the base body has the effect; `base` beside it makes no difference by itself."""

    sent: dict[str, Any]
    seen: Look
    base: dict[str, Any] = {}


def _script(request: Request) -> Script:
    return text("<think>hm</think>one END two", logprobs=max(request.logprobs, request.prompt_logprobs) >= 0, cached=2)


@cache
def ask(path: str, raw: bytes) -> Seen:
    """What comes of the body in `raw`."""

    async def scene() -> Seen:
        rig = Rig(_script, template=ChatTemplate(TEMPLATE), parsers=ParserChoice("hermes", "qwen3"), max_model_len=4000)
        response = await rig.post(path, raw=raw)
        return Seen(response.status_code, response.text, dict(response.headers), rig.frontend.submitted)

    return run(scene())


USER: dict[str, Any] = {"role": "user", "content": "hi"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "so"}
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA}
MESSAGE_TOOL = {"name": "weather", "input_schema": SCHEMA}
LONG = 40

BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "the cat"},
    "/v1/responses": {"model": "tiny", "input": "hi"},
    "/v1/messages": {"model": "tiny", "max_tokens": LONG, "messages": [USER]},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [USER]},
    "/tokenize": {"prompt": "the cat"},
    "/detokenize": {"tokens": [70, 71]},
}


def _constraint(kind: str) -> Look:
    return lambda seen: seen.sampling.constraint is not None and seen.sampling.constraint.kind == kind


def _draws(**fields: Any) -> Look:
    return lambda seen: all(getattr(seen.sampling, name) == value for name, value in fields.items())


def _is_json(seen: Seen) -> bool:
    return seen.sampling.constraint == Constraint("json_schema", msgspec.json.encode(SCHEMA).decode())


def _calls(seen: Seen) -> bool:
    found = seen.sampling.constraint
    return found is not None and found.kind == "grammar" and "weather" in found.text


def _scores_prompt(seen: Seen) -> bool:
    return len(seen.choice.get("prompt_logprobs", ())) == seen.first.num_tokens


def _scores_text(seen: Seen) -> bool:
    return seen.choice["logprobs"] is not None and bool(seen.choice["logprobs"]["top_logprobs"][0])


def _tells_usage(seen: Seen) -> bool:
    return '"usage":{' in seen.raw


def _counts_more(seen: Seen) -> bool:
    path = "/v1/messages/count_tokens"
    return bool(seen.answer["input_tokens"] > ask(path, msgspec.json.encode(BASES[path])).answer["input_tokens"])


def _streams(seen: Seen) -> bool:
    return seen.headers["content-type"].startswith("text/event-stream")


UNKNOWN_MODEL = Effect({"model": "other"}, lambda seen: seen.status == 404)
SALT = Effect({"cache_salt": "mine"}, lambda seen: seen.first.root != ask("/v1/completions", b'{"prompt": "a"}').first.root)
SESSION = Effect({"session_id": "s1"}, lambda seen: seen.first.session == "s1")
CACHE_KEY = Effect({"prompt_cache_key": "s1"}, lambda seen: seen.first.session == "s1")
SEED = Effect({"seed": 7}, lambda seen: seen.sampling.seed == 7)
STREAM = Effect({"stream": True}, _streams)
USAGE = Effect({"stream_options": {"include_usage": True}}, _tells_usage, {"stream": True})
SAMPLING = {
    "temperature": Effect({"temperature": 0.5}, _draws(temperature=0.5)),
    "top_p": Effect({"top_p": 0.5}, _draws(top_p=0.5)),
    "presence_penalty": Effect({"presence_penalty": 1}, _draws(presence_penalty=1)),
    "frequency_penalty": Effect({"frequency_penalty": 1}, _draws(frequency_penalty=1)),
}

GENERATION = {
    **SAMPLING,
    "model": UNKNOWN_MODEL,
    "max_tokens": Effect({"max_tokens": 3}, lambda seen: seen.answer["usage"]["completion_tokens"] == 3),
    "top_k": Effect({"top_k": 4}, _draws(top_k=4)),
    "seed": SEED,
    "min_p": Effect({"min_p": 0.25}, _draws(min_p=0.25)),
    "repetition_penalty": Effect({"repetition_penalty": 1.5}, _draws(repetition_penalty=1.5)),
    "logit_bias": Effect({"logit_bias": {"5": -100}}, _draws(logit_bias=((5, -100.0),))),
    "min_tokens": Effect({"min_tokens": 3}, _draws(min_tokens=3)),
    "allowed_token_ids": Effect({"allowed_token_ids": [6, 5]}, _draws(allowed_token_ids=(5, 6))),
    "bad_words": Effect({"bad_words": ["cat"]}, lambda seen: seen.sampling.bad_words != ()),
    "stop_token_ids": Effect({"stop_token_ids": [9]}, lambda seen: 9 in seen.first.stop_token_ids),
    "structured_outputs": Effect({"structured_outputs": {"json": SCHEMA}}, _is_json),
    "structured_outputs.json": Effect({"structured_outputs": {"json": SCHEMA}}, _is_json),
    "structured_outputs.regex": Effect({"structured_outputs": {"regex": "a+"}}, _constraint("regex")),
    "structured_outputs.choice": Effect({"structured_outputs": {"choice": ["a"]}}, _constraint("choice")),
    "structured_outputs.grammar": Effect({"structured_outputs": {"grammar": 'start: "a"'}}, _constraint("grammar")),
    "structured_outputs.json_object": Effect({"structured_outputs": {"json_object": True}}, _constraint("json_object")),
    "prompt_logprobs": Effect({"prompt_logprobs": 1}, _scores_prompt),
    "stop": Effect({"stop": "END"}, lambda seen: "END" not in seen.raw and "one" in seen.raw),
    "stream": STREAM,
    "stream_options": USAGE,
    "stream_options.include_usage": USAGE,
    "ignore_eos": Effect({"ignore_eos": True}, lambda seen: seen.first.ignore_eos),
    "n": Effect({"n": 2}, lambda seen: len(seen.answer["choices"]) == 2),
    "session_id": SESSION,
    "prompt_cache_key": CACHE_KEY,
    "cache_salt": SALT,
}  # fmt: skip

MESSAGES_FIELDS = {
    "model": UNKNOWN_MODEL,
    "messages": Effect({"messages": [USER, ANSWER, USER]}, lambda seen: "so" in seen.prompt),
    "max_tokens": Effect({"max_tokens": 3}, lambda seen: seen.answer["stop_reason"] == "max_tokens"),
    "system": Effect({"system": "be brief"}, lambda seen: "system\nbe brief" in seen.prompt),
    "tools": Effect({"tools": [MESSAGE_TOOL]}, lambda seen: "weather" in seen.prompt),
    "tool_choice": Effect({"tool_choice": {"type": "any"}}, _calls, {"tools": [MESSAGE_TOOL]}),
    "thinking": Effect({"thinking": {"type": "enabled"}}, lambda seen: "THINKthink" in seen.prompt),
    "thinking.type": Effect({"thinking": {"type": "adaptive"}}, lambda seen: "THINKthink" in seen.prompt),
    "thinking.budget_tokens": Effect(
        {"thinking": {"type": "disabled", "budget_tokens": 1024}}, lambda seen: "thinking.budget_tokens" in seen.ignored
    ),
    "thinking.display": Effect(
        {"thinking": {"type": "disabled", "display": "omitted"}}, lambda seen: "thinking.display" in seen.ignored
    ),
    "output_config": Effect({"output_config": {"effort": "low"}}, lambda seen: seen.prompt.endswith("low")),
    "output_config.effort": Effect({"output_config": {"effort": "max"}}, lambda seen: seen.prompt.endswith("max")),
    "output_config.format": Effect({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, _is_json),
    "stop_sequences": Effect({"stop_sequences": ["END"]}, lambda seen: seen.answer["stop_sequence"] == "END"),
    "stream": STREAM,
    "temperature": Effect({"temperature": 0.5}, _draws(temperature=0.5)),
    "top_p": Effect({"top_p": 0.5}, _draws(top_p=0.5)),
    "top_k": Effect({"top_k": 4}, _draws(top_k=4)),
    "metadata": Effect({"metadata": {"user_id": "u"}}, lambda seen: seen.first.session == "u"),
    "metadata.user_id": Effect({"metadata": {"user_id": "u"}}, lambda seen: seen.first.session == "u"),
    "seed": SEED,
    "session_id": SESSION,
    "cache_salt": SALT,
}

EFFECTS: dict[str, dict[str, Effect]] = {
    "/v1/chat/completions": {
        **GENERATION,
        "messages": Effect({"messages": [{"role": "user", "content": "the cat"}]}, lambda seen: "the cat" in seen.prompt),
        "max_completion_tokens": Effect({"max_completion_tokens": 3}, lambda seen: seen.first.max_tokens == 3),
        "logprobs": Effect({"logprobs": True}, lambda seen: bool(seen.choice["logprobs"])),
        "top_logprobs": Effect(
            {"top_logprobs": 1},
            lambda seen: bool(seen.choice["logprobs"]["content"][0]["top_logprobs"]) and seen.first.logprobs == 1,
            {"logprobs": True},
        ),
        "tools": Effect({"tools": [CHAT_TOOL]}, lambda seen: "weather" in seen.prompt),
        "tool_choice": Effect({"tool_choice": "required"}, _calls, {"tools": [CHAT_TOOL]}),
        "parallel_tool_calls": Effect(
            {"parallel_tool_calls": False},
            lambda seen: "{0,7}" not in str(seen.sampling.constraint),
            {"tools": [CHAT_TOOL], "tool_choice": "required"},
        ),
        "response_format": Effect(
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, _is_json
        ),
        "reasoning_effort": Effect({"reasoning_effort": "low"}, lambda seen: seen.prompt.endswith("low")),
        "chat_template_kwargs": Effect({"chat_template_kwargs": {"thinking": True}}, lambda seen: "think" in seen.prompt),
        "chat_template_kwargs.thinking": Effect(
            {"chat_template_kwargs": {"thinking": True}}, lambda seen: "think" in seen.prompt
        ),
        "chat_template_kwargs.enable_thinking": Effect(
            {"chat_template_kwargs": {"enable_thinking": True}}, lambda seen: "THINK" in seen.prompt
        ),
        "add_generation_prompt": Effect(
            {"add_generation_prompt": True},
            lambda seen: seen.status == 400 and seen.answer["error"]["param"] == "add_generation_prompt",
            {"messages": [USER, ANSWER], "continue_final_message": True},
        ),
        "continue_final_message": Effect(
            {"continue_final_message": True},
            lambda seen: seen.prompt.endswith("assistant\nso"),
            {"messages": [USER, ANSWER]},
        ),
    },
    "/v1/completions": {
        **GENERATION,
        "prompt": Effect({"prompt": ["one", "two"]}, lambda seen: len(seen.answer["choices"]) == 2),
        "logprobs": Effect({"logprobs": 1}, _scores_text),
        "echo": Effect({"echo": True}, lambda seen: seen.choice["text"].startswith("the cat")),
    },
    "/v1/responses": {
        **SAMPLING,
        "model": UNKNOWN_MODEL,
        "input": Effect({"input": [{"role": "user", "content": "the cat"}]}, lambda seen: "the cat" in seen.prompt),
        "instructions": Effect({"instructions": "be brief"}, lambda seen: "system\nbe brief" in seen.prompt),
        "tools": Effect({"tools": [TOOL]}, lambda seen: "weather" in seen.prompt),
        "tool_choice": Effect({"tool_choice": {"type": "function", "name": "weather"}}, _calls, {"tools": [TOOL]}),
        "parallel_tool_calls": Effect(
            {"parallel_tool_calls": False}, lambda seen: "parallel_tool_calls" in seen.ignored, {"tools": [TOOL]}
        ),
        "text": Effect({"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}, _is_json),
        "text.format": Effect({"text": {"format": {"type": "json_object"}}}, _constraint("json_object")),
        "text.verbosity": Effect({"text": {"verbosity": "low"}}, lambda seen: "text.verbosity" in seen.ignored),
        "reasoning": Effect({"reasoning": {"effort": "low"}}, lambda seen: seen.prompt.endswith("low")),
        "reasoning.effort": Effect({"reasoning": {"effort": "low"}}, lambda seen: seen.answer["reasoning"]["effort"] == "low"),
        **{
            f"reasoning.{name}": Effect(
                {"reasoning": {name: "auto"}}, lambda seen, name=name: f"reasoning.{name}" in seen.ignored  # type: ignore[misc]
            )
            for name in ("summary", "generate_summary", "context")
        },
        "max_output_tokens": Effect({"max_output_tokens": 3}, lambda seen: seen.answer["status"] == "incomplete"),
        "top_logprobs": Effect({"top_logprobs": 1}, lambda seen: seen.first.logprobs == 1 and '"logprob"' in seen.raw),
        "seed": SEED,
        "stream": STREAM,
        "prompt_cache_key": CACHE_KEY,
        "session_id": SESSION,
        "cache_salt": SALT,
        "metadata": Effect({"metadata": {"a": "b"}}, lambda seen: seen.answer["metadata"] == {"a": "b"}),
        "include": Effect({"include": ["message.output_text.logprobs"]}, lambda seen: '"logprob"' in seen.raw),
    },
    "/v1/messages": MESSAGES_FIELDS,
    "/v1/messages/count_tokens": {
        "model": UNKNOWN_MODEL,
        **{
            name: Effect(MESSAGES_FIELDS[name].sent, _counts_more, MESSAGES_FIELDS[name].base)
            for name in ("messages", "system", "tools", "thinking", "thinking.type", "output_config", "output_config.effort")
        },
    },
    "/tokenize": {
        "prompt": Effect({"prompt": "zoo"}, lambda seen: "z" in seen.answer["token_strs"], {"return_token_strs": True}),
        "messages": Effect({"prompt": None, "messages": [USER]}, lambda seen: seen.answer["count"] > 10),
        "return_token_strs": Effect({"return_token_strs": True}, lambda seen: seen.answer["token_strs"] is not None),
    },
    "/detokenize": {
        "tokens": Effect({"tokens": [72]}, lambda seen: len(seen.answer["prompt"]) == 1),
        "model": UNKNOWN_MODEL,
    },
}  # fmt: skip

OF_GENERATING = {
    "max_tokens", "tool_choice", "thinking.budget_tokens", "thinking.display", "output_config.format", "stop_sequences",
    "stream", "temperature", "top_p", "top_k", "metadata", "metadata.user_id", "seed", "session_id", "cache_salt",
}  # fmt: skip
"""Fields that count_tokens takes because it is sent what /v1/messages would be; they make no prompt, so they count nothing."""


def fields(kind: type[msgspec.Struct], before: str = "") -> Iterator[str]:
    """The names of the fields of a body, and of those of the objects in it."""
    hints = get_type_hints(kind)
    for field in msgspec.structs.fields(kind):
        yield f"{before}{field.encode_name}"
        for part in (hints[field.name], *get_args(hints[field.name])):
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                yield from fields(part, f"{before}{field.encode_name}.")


def tables(path: str) -> list[Any]:
    contract = CONTRACTS[path]
    return [contract.extra] if contract.extra is not None else list(contract.bodies)


PATHS = [path for path, contract in CONTRACTS.items() if contract.bodies]


@pytest.mark.parametrize("path", PATHS)
def test_no_field_is_forgotten_here(path: str) -> None:
    known = {name for table in tables(path) for name in fields(table.kind)}
    apart = OF_GENERATING if path.endswith("count_tokens") else set()
    assert known == set(EFFECTS[path]) | apart


@pytest.mark.parametrize(("path", "field"), [(path, field) for path, effects in EFFECTS.items() for field in effects])
def test_a_field_has_its_effect_and_without_it_there_is_none(path: str, field: str) -> None:
    effect = EFFECTS[path][field]
    base = {**BASES[path], **effect.base}
    sent = {name: value for name, value in {**base, **effect.sent}.items() if value is not None}
    assert effect.seen(ask(path, msgspec.json.encode(sent))), field
    assert not effect.seen(ask(path, msgspec.json.encode(base))), f"{field}: seen without it"


@pytest.mark.parametrize("path", [path for path in PATHS if path in BASES])
def test_fields_without_effect_are_refused_or_told(path: str) -> None:
    for table in tables(path):
        for name in table.refused.keys() - {field.encode_name for field in msgspec.structs.fields(table.kind)}:
            refused = ask(path, msgspec.json.encode({**BASES[path], name: {"asks": "something"}}))
            assert refused.status == 400 and refused.answer["error"]["param"] == name and refused.requests == []
        for name in table.harmless:
            taken = ask(path, msgspec.json.encode({**BASES[path], name: "x"}))
            assert taken.status == 200 and (name in taken.ignored or CONTRACTS[path].media == ("application/json",))


def test_a_misspelt_field_is_let_through_named_and_counted() -> None:
    async def scene() -> None:
        rig = Rig(text("x"))
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
            before = rig.metric("rackserve_unknown_fields_total")
            response = await rig.post(path, {**BASES[path], "temprature": 0})
            assert response.status_code == 200 and response.headers[IGNORED] == "temprature"
            assert rig.metric("rackserve_unknown_fields_total") == before + 1

    run(scene())


def test_what_had_no_effect_is_told_once_and_what_nobody_knows_within_bounds() -> None:
    def told(ignored: tuple[str, ...], unknown: tuple[str, ...] = ()) -> str:
        return without_effect(Ask(kind="message", field="messages", ignored=ignored, unknown=unknown))

    assert told(("thinking.budget_tokens", "user", "thinking", "user")) == "user, thinking"
    assert told(("thinking.display", "thinking_x"), ("temprature",)) == "thinking.display, thinking_x, temprature"
    assert told((), ("a,b\r\nc: d", "é")) == "a?b??c: d, ?"
    many = told((), tuple(f"{number:04}" + "x" * 100 for number in range(500))).split(", ")
    assert len(many) == MAX_UNKNOWN and {len(name) for name in many[:-1]} == {MAX_NAME}
    assert len(told(tuple(map(str, range(9999))))) == MAX_TOLD
