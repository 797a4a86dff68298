"""Which parser reads the answers of a model: chosen by the names that other servers use for them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.text.answers import AnswerParser, PlainParser
from rackserve.text.dsml_parser import DsmlParser
from rackserve.text.hermes_parser import HermesParser
from rackserve.text.reasoning import ThinkParser

TOOL_PARSERS = ("none", "hermes", "deepseek_v41")
REASONING_PARSERS = ("none", "qwen3", "deepseek_r1", "deepseek_v41")


class ParserChoice(msgspec.Struct, frozen=True):
    """Names of the parsers for tool calls and for reasoning. Raises ConfigError for any others.

    tool_calls  none; hermes: JSON in `<tool_call>`; deepseek_v41: its markup, which has reasoning too
    reasoning   none; qwen3: from `<think>` at the beginning to `</think>`; deepseek_r1: the same, always begun; deepseek_v41
    """

    tool_calls: str = "none"
    reasoning: str = "none"

    def __post_init__(self) -> None:
        for field, names in (("tool_calls", TOOL_PARSERS), ("reasoning", REASONING_PARSERS)):
            if getattr(self, field) not in names:
                flag = "tool-call-parser" if field == "tool_calls" else "reasoning-parser"
                raise ConfigError(f"{flag}: must be one of {', '.join(names)}, got {getattr(self, field)!r}")
        if (self.tool_calls == "deepseek_v41") != (self.reasoning == "deepseek_v41"):
            raise ConfigError("tool-call-parser and reasoning-parser: deepseek_v41 reads both; name it for both or for neither")

    def parser(self, *, inside: bool = False, tools: Mapping[str, frozenset[str]] | None = None) -> AnswerParser:
        """A parser for one answer.

        inside  the prompt ends inside reasoning
        tools   parameter names by tool name (see `dsml_arguments.parameter_names`)
        """
        if self.tool_calls == "deepseek_v41":
            return DsmlParser(reasoning=inside, tools=tools)
        inner = HermesParser() if self.tool_calls == "hermes" else PlainParser()
        if self.reasoning == "none":
            return inner
        return ThinkParser(inner, inside=inside or self.reasoning == "deepseek_r1")
