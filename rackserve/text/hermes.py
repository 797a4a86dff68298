"""Tools for a model whose template knows none: described in the system prompt, called and answered in the markup of Hermes."""

from __future__ import annotations

import json
from typing import Any

from rackserve.text.hermes_parser import CLOSE, OPEN

Messages = list[dict[str, Any]]

BEFORE = (
    "# Tools\n\n"
    "You may call the tools described here, each by a JSON schema between <tools></tools> tags:\n<tools>\n"
)  # fmt: skip
AFTER = (
    "\n</tools>\n\n"
    "To call one, write a JSON object with its name and its arguments between tags, and nothing after the last call:\n"
    f'{OPEN}\n{{"name": "the name", "arguments": {{"parameter": "value"}}}}\n{CLOSE}\n'
    "The results come back between <tool_response></tool_response> tags."
)


def write_tools(messages: Messages, functions: list[dict[str, Any]]) -> Messages:
    """The conversation in messages that have a role and a text only.

    The description of `functions`, if there are any, ends the first system message, made if missing. Calls are written behind
    the text of their answer, with their arguments exactly as the client sent them: what the model wrote is read back from its
    cache. Results that follow each other are one user message.
    """
    written: Messages = []
    joins = False  # the last message is of results
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if joins:
                written[-1]["content"] += "\n" + text
            else:
                written.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            written.append({"role": "assistant", "content": _with_calls(message["content"], message["tool_calls"])})
        else:
            written.append({key: value for key, value in message.items() if key != "tool_calls"})
        joins = message["role"] == "tool"
    if functions:
        tools = (json.dumps({"type": "function", "function": function}, ensure_ascii=False) for function in functions)
        block = BEFORE + "\n".join(tools) + AFTER
        if written and written[0]["role"] in ("system", "developer"):
            written[0] = {**written[0], "content": f"{written[0]['content']}\n\n{block}"}
        else:
            written.insert(0, {"role": "system", "content": block})
    return written


def _with_calls(content: str, calls: list[dict[str, Any]]) -> str:
    """An answer as the model wrote it. Each call: {"function": {"name", "arguments": JSON text}}."""
    texts = []
    for call in calls:
        name = json.dumps(call["function"]["name"], ensure_ascii=False)
        texts.append(f'{OPEN}\n{{"name": {name}, "arguments": {call["function"]["arguments"]}}}\n{CLOSE}')
    return content + ("\n" if content and not content.endswith("\n") else "") + "\n".join(texts)
