"""Agents for the command line, started by `rackserve launch` as a user would: two runs, in each a tool is called and heard.

The scripted model asks for `cat note.txt` and, given the result, says so. What the agents print shows what they made of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from conformance.cases import Case, Pins, Site, Suite, case
from conformance.racks import Watch
from conformance.scripted_model import HEARD, NOTE

NOTE_TEXT = "a word that only the file has: quagmire"
ASKED = f"Read {NOTE} and tell what it says."
Lines = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Told:
    """What an agent's JSON says: its answers, what its tools gave, and how many prompt tokens it thinks came from a cache."""

    answers: list[str]
    results: str
    cached: int


@dataclass(frozen=True, slots=True)
class Agent:
    """`arguments`: so that it runs once, without questions, and writes JSON; `read`: that JSON."""

    name: str
    arguments: tuple[str, ...]
    read: Callable[[Lines], Told]
    variables: Mapping[str, str]

    def run(self, site: Site) -> list[Case]:
        """Two runs; the second finds the tokens of the first in the cache."""
        rack = site.rack("scripted")
        (site.scratch / NOTE).write_text(NOTE_TEXT)
        (site.scratch / "home").mkdir()
        cases: list[Case] = []
        for turn in ("first", "second"):
            watch = Watch(rack)
            command = [sys.executable, "-m", "rackserve", "launch", self.name, "--url", rack.url, "--"]
            done = site.run([*command, *self.arguments, ASKED], HOME=str(site.scratch / "home"), **self.variables)
            told, seen = self.read(_lines(done.stdout)), watch.seen()
            cases += [
                case(f"{turn} run: exit status 0", done.returncode == 0, f"{done.returncode}: {done.stderr}"),
                case(f"{turn} run: the answer arrives", told.answers and told.answers[-1] == HEARD, done.stdout or done.stderr),
                case(f"{turn} run: its tool ran and gave its result", NOTE_TEXT in told.results, done.stdout),
                case(f"{turn} run: no request fails", len(seen) >= 2 and not any(each.error for each in seen), seen),
                case(f"{turn} run: one session", len(seen) >= 2 and len({each.session for each in seen}) == 1, seen),
                case(
                    f"{turn} run: it is told how many tokens were cached",
                    told.cached == watch.cached() > 0,
                    f"it says {told.cached}, the server {watch.cached()}",
                ),
            ]
            if turn == "second" and seen:
                whole = sum(each.prompt for each in seen)
                text = "second run: three quarters of its prompts were cached"
                cases.append(case(text, told.cached >= 0.75 * whole, f"{told.cached} of {whole}"))
        return cases


def _lines(text: str) -> Lines:
    """The JSON objects in `text`, one a line, or a list of them."""
    found: Lines = []
    for line in text.splitlines():
        if line.startswith(("{", "[")):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            found += value if isinstance(value, list) else [value]
    return found


def _codex(lines: Lines) -> Told:
    items = [line["item"] for line in lines if line["type"] == "item.completed"]
    usage = [line["usage"] for line in lines if line["type"] == "turn.completed"]
    return Told(
        [item["text"] for item in items if item["type"] == "agent_message"],
        "".join(item["aggregated_output"] for item in items if item["type"] == "command_execution"),
        sum(each["cached_input_tokens"] for each in usage),
    )


def _qwen(lines: Lines) -> Told:
    messages = [line["message"] for line in lines if line["type"] in ("assistant", "user")]
    parts = list(_parts(messages))
    usage = [line["usage"] for line in lines if line["type"] == "result"]
    return Told(
        [part["text"] for part in parts if part["type"] == "text"],
        "".join(str(part["content"]) for part in parts if part["type"] == "tool_result"),
        sum(each["cache_read_input_tokens"] for each in usage),
    )


def _pi(lines: Lines) -> Told:
    messages = [line["message"] for line in lines if line["type"] == "message_end"]
    ours = [message for message in messages if message["role"] == "assistant"]
    results = [message for message in messages if message["role"] == "toolResult"]
    return Told(
        [part["text"] for part in _parts(ours) if part["type"] == "text"],
        "".join(part["text"] for part in _parts(results)),
        sum(message["usage"]["cacheRead"] for message in ours),
    )


def _parts(messages: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    return (part for message in messages if isinstance(message["content"], list) for part in message["content"])


CODEX = Agent("codex", ("exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access"), _codex, {})
QWEN = Agent("qwen", ("--yolo", "--output-format", "json", "-p"), _qwen, {"QWEN_CODE_SUPPRESS_YOLO_WARNING": "1"})
PI = Agent("pi", ("--mode", "json", "-p"), _pi, {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"})

_NO_SESSION = "it names its conversation to no server that it is not told to; placement does not need the name"


def _suite(agent: Agent, package: str, unnamed: bool) -> Suite:
    differences = {f"{turn} run: one session": _NO_SESSION for turn in ("first", "second")} if unnamed else {}
    pins = Pins("npm", (package,), agent.name)
    return Suite(agent.name, f"rackserve launch {agent.name}", agent.run, pins, 300.0, differences=differences)


SUITES = (
    _suite(CODEX, "@openai/codex@0.171.0", False),
    _suite(QWEN, "@qwen-code/qwen-code@0.24.4", True),
    _suite(PI, "@mariozechner/pi-coding-agent@0.73.1", False),
)
