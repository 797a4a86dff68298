"""Prompts as the workers see them: read, rendered and tokenised by the code with which rackserve itself serves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from rackserve.api.ask import Ask
from rackserve.api.dialects.chat import Chat
from rackserve.api.dialects.completions import Completions
from rackserve.api.dialects.dialect import Dialect
from rackserve.api.dialects.messages import Messages
from rackserve.api.dialects.responses import Responses
from rackserve.api.prompter import Prompter
from rackserve.base.errors import RequestError
from rackserve.base.keys import TOKEN_BYTES, Chain, extend_chain
from rackserve.model.files import kind_of
from rackserve.text.chat import ChatTemplate
from rackserve.text.dsml import DsmlTemplate
from rackserve.text.numbers import NumberTokenizer
from rackserve.text.parsers import ParserChoice
from rackserve.text.prompt_cache import PromptCache, Scope
from rackserve.text.tokenizer import Tokenizer, pack

NUMBERS = "numbers"

Fields = dict[str, msgspec.Raw]
"""A body's fields, each as it was written."""

DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": Chat(),
    "/v1/completions": Completions(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}
"""What generates, and how its bodies are read."""

SHAPING: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": (
        "messages", "tools", "tool_choice", "response_format", "structured_outputs", "reasoning_effort", "chat_template_kwargs",
        "add_generation_prompt", "continue_final_message",
    ),
    "/v1/completions": ("prompt",),
    "/v1/responses": ("model", "input", "instructions", "tools", "tool_choice", "text", "reasoning"),
    "/v1/messages": ("model", "max_tokens", "messages", "system", "tools", "tool_choice", "thinking", "output_config"),
}  # fmt: skip
"""Fields that a prompt depends on, and those without which the dialect reads nothing. The others are the worker's to judge."""

BEYOND = ("chat_template", "documents", "truncate_prompt_tokens")
"""Fields by which a worker's prompt becomes another than any that is made here."""


class Untold(Exception):
    """The token ids of a prompt cannot be told, for the reason in the text."""


class Rendering:
    """One model's prompts. May be used from several threads."""

    def __init__(self, tokenizer: str, *, trust_template: bool = False) -> None:
        """`tokenizer`: a model's folder, or NUMBERS. Raises FileFormatError naming what lacks in the folder."""
        template: ChatTemplate | DsmlTemplate | None = None
        vocabulary: Tokenizer | NumberTokenizer
        choice = ParserChoice()
        if tokenizer == NUMBERS:
            vocabulary = NumberTokenizer(2**31 - 1)
        else:
            folder = Path(tokenizer)
            vocabulary = Tokenizer.from_folder(folder)
            if kind_of(tokenizer) == "deepseek_v41":
                template, choice = DsmlTemplate(), ParserChoice("deepseek_v41", "deepseek_v41")
            else:
                template, choice = ChatTemplate.from_folder(folder, trusted=trust_template), ParserChoice("hermes")
        self._cache = PromptCache(vocabulary)
        self._prompter = Prompter(template, choice, vocabulary)

    def tokens(self, path: str, fields: Fields, scope: Scope) -> tuple[bytes, Chain]:
        """Ids and keys of the (first) prompt of a body sent to `path`. Raises Untold where only the worker knows."""
        if any(bytes(fields.get(name, msgspec.Raw(b"null"))) != b"null" for name in BEYOND):
            raise Untold("fields")
        body = msgspec.json.encode({name: fields[name] for name in SHAPING[path] if name in fields})
        try:
            return self._tokens(DIALECTS[path].parse(body, _NO_HEADERS), scope)
        except RequestError as error:  # the worker will say what is wrong, or knows better
            raise Untold("no_template" if error.code == "no_chat_template" else "refused") from error
        except RecursionError as error:
            raise Untold("refused") from error

    def _tokens(self, ask: Ask, scope: Scope) -> tuple[bytes, Chain]:
        if ask.conversation is None:
            prompt = ask.prompts[0]
            if isinstance(prompt, list):
                ids = _packed(prompt)
                return ids, extend_chain(b"", scope.root, ids, scope.block_tokens)
            made = self._cache.encode(prompt, scope, specials=True)
        else:
            rendered = self._prompter.render(ask.conversation, ask.sampling.constraint, self._cache.last(scope))
            made = self._cache.encode_written(rendered.written, scope)
        if len(made.tokens) < TOKEN_BYTES:
            raise Untold("no_prompt")
        return made.tokens, made.chain


_NO_HEADERS: Mapping[str, str] = {}


def _packed(ids: list[int]) -> bytes:
    """Raises Untold for what is no id."""
    try:
        return pack(ids)
    except (OverflowError, TypeError) as error:
        raise Untold("refused") from error
