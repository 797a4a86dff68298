"""What of a conversation is up to the model: how its prompt is written, whether it reasons, how its answers are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from rackserve.api.ask import Conversation
from rackserve.base.errors import RequestError
from rackserve.base.request import Constraint
from rackserve.text.answers import AnswerParser, PlainParser
from rackserve.text.chat import ChatTemplate, Message
from rackserve.text.dsml import ChatOptions, DsmlTemplate, starts_reasoning
from rackserve.text.dsml_arguments import parameter_names
from rackserve.text.dsml_grammar import call_rules
from rackserve.text.hermes_parser import CLOSE, OPEN
from rackserve.text.parsers import ParserChoice
from rackserve.text.prompt_text import PromptText, Written
from rackserve.text.quoting import Piece
from rackserve.text.tokenizer import Vocabulary

THINK_END = "</think>"

MAX_CALLS = 8
"""Most calls of an answer that has to call; a weak model would not stop by itself."""


Wish = Literal["thinking", "reasoning_effort", "parallel"]
"""A field of a conversation that may have no effect."""


class Rendered(msgspec.Struct, frozen=True):
    """A prompt, and how the answer to it is read.

    written        the whole prompt, which tells the markup from what the client wrote
    parser         makes the parser of one answer
    reasoning_end  id of the token that ends the reasoning the answer begins with; -1: it begins with none
    constraint     what the answer must be
    ignored        what was asked for and has no effect with this model
    """

    written: Written
    parser: Callable[[], AnswerParser] = PlainParser
    reasoning_end: int = -1
    constraint: Constraint | None = None
    ignored: tuple[Wish, ...] = ()


class Prompter:
    """The prompt side of one model. No state: may run on any thread.

    template  None: the model has none, and takes no conversations
    choice    which parsers read its answers
    """

    __slots__ = ("_choice", "_end_id", "_quoting", "_template")

    def __init__(self, template: ChatTemplate | DsmlTemplate | None, choice: ParserChoice, vocabulary: Vocabulary) -> None:
        self._template = template
        self._choice = choice
        self._quoting = vocabulary.quoting
        self._end_id = _single_id(vocabulary, THINK_END) if choice.reasoning != "none" else -1

    def render(self, conversation: Conversation, constraint: Constraint | None, before: Written | None = None) -> Rendered:
        """The prompt for the next answer, which has to meet `constraint`; the same whatever was written `before`.

        Raises RequestError naming the field at fault.
        """
        if self._template is None:
            raise RequestError(
                "the served model has no chat template; use /v1/completions", param="messages", code="no_chat_template"
            )
        if not conversation.messages:
            raise RequestError("messages must hold at least one message", param="messages")
        messages, begun = _split(conversation)
        tools = [] if conversation.tool_choice == "none" else conversation.tools
        inside, ignored = False, _without_effect(conversation, tools)
        if isinstance(self._template, DsmlTemplate):
            written = self._template.write(messages, _options(conversation, tools, constraint), before)
            inside = starts_reasoning(written.text)
            if begun:
                written = Written(written.text.followed(PromptText.of([Piece(begun, False)])), written.stem)
            if not inside and conversation.reasoning_effort not in (None, "none"):
                ignored += ("reasoning_effort",)
        else:
            wished = {name: value for name, value in _wished(conversation).items() if self._template.takes(name)}
            pieces = self._quoting.followed(self._template.pieces(self._quoting, messages, tools or None, wished), begun)
            written = Written(PromptText.of(pieces))
            ignored += self._missed(conversation, wished)
        return Rendered(
            written,
            self._reader(tools, inside),
            self._end_id if inside else -1,
            self._form(conversation, tools, constraint),
            ignored,
        )

    def _missed(self, conversation: Conversation, taken: Mapping[str, Any]) -> tuple[Wish, ...]:
        """What was asked for that a template without such options cannot do, unless it is what the model does anyway."""
        reasons = self._choice.reasoning != "none"
        missed: list[Wish] = []
        if conversation.thinking is not None and not taken.keys() & {"thinking", "enable_thinking"}:
            missed += ["thinking"] if conversation.thinking or reasons else []
        if conversation.reasoning_effort is not None and "reasoning_effort" not in taken:
            missed += ["reasoning_effort"] if conversation.reasoning_effort != "none" or reasons else []
        return tuple(missed)

    def _reader(self, tools: list[dict[str, Any]], inside: bool) -> Callable[[], AnswerParser]:
        choice = self._choice
        if not tools and choice.tool_calls == "hermes":
            choice = ParserChoice("none", choice.reasoning)
        names = parameter_names([tool["function"] for tool in tools]) if tools else None
        return lambda: choice.parser(inside=inside, tools=names)

    def _form(
        self, conversation: Conversation, tools: list[dict[str, Any]], constraint: Constraint | None
    ) -> Constraint | None:
        """What the answer must be, calls that it has to or may make included."""
        tool_choice = conversation.tool_choice
        if tool_choice in ("auto", "none") and (constraint is None or not tools):
            return constraint
        if not tools:
            raise RequestError(f"tool_choice {tool_choice!r} needs tools", param="tool_choice")
        if self._choice.tool_calls == "none":
            text = "tool_choice can only be auto or none with this model, and not together with a response format"
            raise RequestError(text, param="tool_choice", code="unsupported_parameter")
        wanted = tool_choice.removeprefix("function:") if tool_choice.startswith("function:") else None
        named = [tool["function"] for tool in tools if wanted in (None, tool["function"]["name"])]
        if not named:
            raise RequestError(f"tool_choice names {wanted!r}, which is not among the tools", param="tool_choice")
        most = MAX_CALLS if conversation.parallel and wanted is None else 1
        rules = _hermes_rules(named, most) if self._choice.tool_calls == "hermes" else call_rules(named, most)
        return Constraint("grammar", _grammar(rules, constraint if tool_choice == "auto" else None))


def _split(conversation: Conversation) -> tuple[list[Message], str]:
    """The messages before an answer that is to be gone on with, and the beginning of that answer."""
    if not conversation.continue_last:
        return conversation.messages, ""
    *before, last = conversation.messages
    if not before or last.get("tool_calls") or not isinstance(last.get("content"), str):
        raise RequestError("messages: only a text answer to a message before it can be gone on with", param="messages")
    return before, last["content"]


def _options(conversation: Conversation, tools: list[dict[str, Any]], constraint: Constraint | None) -> ChatOptions:
    """Whether to reason: as asked, else unless the answer has a form or goes on, as both begin where reasoning would."""
    called = conversation.tool_choice not in ("auto", "none")
    formed = constraint is not None or conversation.continue_last or called
    thinking = conversation.thinking
    if thinking is None:
        thinking = conversation.reasoning_effort != "none" and not formed
    elif thinking and formed:
        text = "thinking: an answer that has a form, has to call, or goes on, cannot begin with reasoning; leave thinking out"
        raise RequestError(text, param="thinking")
    return ChatOptions(
        tools=tools or None,
        response_format=conversation.response_format,
        reasoning_effort=conversation.reasoning_effort,
        thinking_mode="thinking" if thinking else "chat",
    )


def _wished(conversation: Conversation) -> dict[str, Any]:
    """What a template may be told besides, by the names that templates have for it."""
    wished = {
        "thinking": conversation.thinking,
        "enable_thinking": conversation.thinking,
        "reasoning_effort": conversation.reasoning_effort,
    }
    return {name: value for name, value in wished.items() if value is not None}


def _without_effect(conversation: Conversation, tools: list[dict[str, Any]]) -> tuple[Wish, ...]:
    """An answer that is free to call is free to make several calls."""
    return () if conversation.parallel or not tools or conversation.tool_choice != "auto" else ("parallel",)


def _hermes_rules(functions: list[dict[str, Any]], most: int) -> list[str]:
    """Rules (Lark form) of which `calls` is 1 to `most` calls in Hermes style."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": function.get("parameters") or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return [
        f'calls: call ("\\n" call){{0,{most - 1}}}' if most > 1 else "calls: call",
        f'call: "{OPEN}\\n" body "\\n{CLOSE}"',
        f"body: %json {msgspec.json.encode({'anyOf': calls}).decode()}",
    ]


def _grammar(rules: list[str], otherwise: Constraint | None) -> str:
    """A grammar of the calls that `rules` describe, or instead of them what `otherwise` does."""
    if otherwise is None:
        return "\n".join(["start: calls", *rules])
    if otherwise.kind not in ("json_schema", "json_object"):
        text = "structured_outputs: only JSON can be asked for together with tools"
        raise RequestError(text, param="structured_outputs", code="unsupported_parameter")
    schema = otherwise.text if otherwise.kind == "json_schema" else '{"type":"object"}'
    return "\n".join(["start: calls | other", *rules, f"other: %json {schema}"])


def _single_id(vocabulary: Vocabulary, text: str) -> int:
    """The id of a token that is written `text`; -1 if it takes several."""
    found = vocabulary.token_id(text)
    return -1 if found is None else found
