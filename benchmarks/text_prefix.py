"""A turn of 142 k tokens with 2 k new ones: what tokenising it and naming its blocks costs beside doing so for the whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from measure import CPU_TIME, Claim, Options, Result, at_most, figure, interleave, main, ns_per_call

from rackserve.api.call import Call, Caller
from rackserve.api.dialects.chat import Chat
from rackserve.api.factory import RequestFactory
from rackserve.base.keys import CacheNamespace, extend_chain
from rackserve.text.deepseek_tokenizer import complete
from rackserve.text.dsml import ChatOptions, DsmlTemplate
from rackserve.text.prompt_cache import PromptCache, Scope
from rackserve.text.tokenizer import Tokenizer

NUM_TOKENS = 142_000
NEW_TOKENS = 2_000
BLOCK_TOKENS = 64
LIMIT_MS = 10.0
CHARACTERS_PER_TOKEN = 4.65
"""Of the text below under this tokenizer, about; the figures name what came out."""


def run(options: Options) -> Result:
    scale = 10 if options.quick else 1
    draw = Random(options.seed)
    source = "".join(path.read_text() for path in sorted(Path(asyncio.__file__).parent.glob("*.py")))
    chat = _chat(draw, source, int((NUM_TOKENS - NEW_TOKENS) // scale * CHARACTERS_PER_TOKEN))
    longer = chat + _turn(draw, source, len(chat), int(NEW_TOKENS * CHARACTERS_PER_TOKEN))
    with TemporaryDirectory() as folder:
        complete(Path(folder))
        tokenizer = Tokenizer.from_folder(Path(folder))
    namespace = CacheNamespace("m", "0", BLOCK_TOKENS, "")
    scope = Scope(namespace.root(), BLOCK_TOKENS, "session")
    template, offered = DsmlTemplate(), ChatOptions()
    before, after = (template.pieces(messages, offered) for messages in (chat, longer))

    def whole() -> tuple[bytes, bytes]:
        tokens = tokenizer.encode_pieces(after)
        return tokens, extend_chain(b"", scope.root, tokens, BLOCK_TOKENS)

    def turn(session: str) -> float:
        cache = PromptCache(tokenizer)
        cache.encode_pieces(before, scope)
        asked = Scope(scope.root, BLOCK_TOKENS, session)
        return ns_per_call(lambda: cache.encode_pieces(after, asked), 1)

    bodies = [json.dumps({"model": "m", "messages": messages, "stream": True}).encode() for messages in (chat, longer)]

    def prepare(factory: RequestFactory, body: bytes) -> Call:
        return factory.prepare(Chat().parse(body, {"x-session-id": "session"}), Caller())

    def front(*seen: bytes) -> float:
        factory = RequestFactory(tokenizer, namespace, max_model_len=1 << 20, models=("m",), template=template)
        for body in seen:
            prepare(factory, body)
        return ns_per_call(partial(prepare, factory, bodies[1]), 1)

    variants: dict[str, Callable[[], float]] = {
        "whole": partial(ns_per_call, whole, 1),
        "turn": partial(turn, "session"),
        "child": partial(turn, "child"),
        "front": partial(front, bodies[0]),
        "front whole": front,
        "render": partial(ns_per_call, partial(template.write, longer, offered), 3),
        "render new": partial(ns_per_call, partial(template.write, longer, offered, template.write(chat, offered)), 3),
        "json": partial(ns_per_call, partial(json.loads, json.dumps(longer)), 3),
    }
    ns = interleave(variants, options.rounds)
    cache = PromptCache(tokenizer)
    cache.encode_pieces(before, scope)
    prompt = cache.encode_pieces(after, scope)
    num_tokens, new = len(prompt.tokens) // 4, len(prompt.tokens) // 4 - prompt.reused_tokens
    same = (prompt.tokens, prompt.chain) == whole()
    what = f"{num_tokens:,} tokens of which {new:,} are computed anew"
    ms = [value / 1e6 for value in ns["turn"]]
    claims = (
        Claim("the ids and keys are those of the whole prompt", same),
        at_most(f"tokenising the turn and naming its blocks takes at most {LIMIT_MS:g} ms", ms, LIMIT_MS),
    )
    ms = [value / 1e6 for value in ns["front"]]
    claims += (
        at_most(f"all of it, from the body's bytes to the request for the rack, takes at most {LIMIT_MS:g} ms", ms, LIMIT_MS),
    )
    figures = (
        figure(f"a whole prompt of {num_tokens:,} tokens", "ms", ns["whole"], scale=1e-6),
        figure(f"the session's next turn, {what}", "ms", ns["turn"], "the whole prompt", ns["whole"], 1e-6),
        figure("the same under a new session's name", "ms", ns["child"], "the whole prompt", ns["whole"], 1e-6),
        figure(f"its body to a request ({len(bodies[1]):,} bytes), nothing seen before", "ms", ns["front whole"], scale=1e-6),
        figure("its body to a request", "ms", ns["front"], "nothing seen before", ns["front whole"], 1e-6),
        figure(f"rendering its {len(longer)} messages", "ms", ns["render"], "reading their JSON", ns["json"], 1e-6),
        figure("rendering what is new in them", "ms", ns["render new"], "rendering them all", ns["render"], 1e-6),
    )
    question = "What does the next turn of a long session cost the front end, beside tokenising and naming its whole prompt?"
    return Result("text_prefix", question, CPU_TIME, claims, figures)


def _chat(draw: Random, source: str, characters: int) -> list[dict[str, Any]]:
    """An agent's conversation of about so many characters: source text, read by many tool calls."""
    messages = [
        {"role": "system", "content": _cut(draw, source, 12_000)},
        {"role": "user", "content": _cut(draw, source, 1_500)},
    ]
    rest = characters - 13_500
    while rest > 0:
        messages += _turn(draw, source, len(messages), min(rest, 4_000))
        rest -= 4_000
    return messages


def _turn(draw: Random, source: str, number: int, characters: int) -> list[dict[str, Any]]:
    """An answer that calls a tool, and the tool's result."""
    call = {"name": "edit", "arguments": json.dumps({"path": f"f{number}.py", "text": _cut(draw, source, characters // 8)})}
    answer = {
        "role": "assistant",
        "content": _cut(draw, source, characters // 16),
        "reasoning_content": _cut(draw, source, characters // 8),
        "tool_calls": [{"id": f"c{number}", "type": "function", "function": call}],
    }
    return [answer, {"role": "tool", "tool_call_id": f"c{number}", "content": _cut(draw, source, characters * 11 // 16)}]


def _cut(draw: Random, source: str, length: int) -> str:
    start = draw.randrange(len(source) - length)
    return source[start : start + length]


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
