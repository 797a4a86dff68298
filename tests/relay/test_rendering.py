"""The router's ids of a prompt are those of the server that renders it, for every form in which clients ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rackserve.api.call import Caller
from rackserve.api.contract import CONTRACTS
from rackserve.api.dialects.dialect import Dialect
from rackserve.api.factory import RequestFactory
from rackserve.base.errors import RequestError
from rackserve.base.keys import CacheNamespace, count, extend_chain
from rackserve.model.deepseek_v41.config import MODEL_TYPE
from rackserve.relay.ledger import root_key
from rackserve.relay.prompts import PromptReader
from rackserve.relay.rendering import DIALECTS, SHAPING, Rendering
from rackserve.text.chat import ChatTemplate
from rackserve.text.dsml import DsmlTemplate
from rackserve.text.parsers import ParserChoice
from rackserve.text.tokenizer import Tokenizer
from tests.api.test_every_field import BASES, EFFECTS, TEMPLATE
from tests.text.small_model import CHATML, write_folder

CHAT, COMPLETIONS, RESPONSES, MESSAGES = DIALECTS
SAID = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the cat sat on the mat " * 4}]
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL = {"type": "function", "function": {"name": "read", "description": "reads a file", "parameters": PARAMETERS}}
ANSWER = {"role": "tool", "tool_call_id": "c1", "content": "1"}
CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
RESULT = [
    *SAID,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "1"},
]

FORMS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": SAID}),
    (CHAT, {"messages": SAID[:1]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello there"}]}]}),
    (CHAT, {"messages": SAID, "tools": [TOOL]}),
    (CHAT, {"messages": SAID, "tools": [TOOL, {"type": "web_search"}], "tool_choice": "none"}),
    (CHAT, {"messages": RESULT, "tools": [TOOL]}),
    (CHAT, {"messages": [{"role": "user", "content": "<|im_end|> <think> two words"}]}),
    (CHAT, {"messages": [*SAID, {"role": "assistant", "content": "that is"}], "continue_final_message": True,
            "add_generation_prompt": False}),
    (CHAT, {"messages": SAID, "n": 10**9, "temperature": "hot", "odd": 1}),
    (COMPLETIONS, {"prompt": "<|im_start|>the cat<|im_end|>" * 5}),
    (COMPLETIONS, {"prompt": ["hello there, hello you " * 3, "another"]}),
    (COMPLETIONS, {"prompt": list(range(40))}),
    (COMPLETIONS, {"prompt": [list(range(40)), [1]]}),
    (RESPONSES, {"model": "m", "instructions": "be brief", "input": "the cat sat on the mat " * 4}),
    (RESPONSES, {"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
                 "tools": [{"type": "function", "name": "read", "parameters": PARAMETERS}, {"type": "web_search"}]}),
    (MESSAGES, {"model": "m", "max_tokens": 5, "system": "be brief", "messages": SAID[1:]}),
    (MESSAGES, {"model": "m", "max_tokens": 5, "messages": SAID[1:],
                "tools": [{"name": "read", "input_schema": PARAMETERS}]}),
]  # fmt: skip


class Server:
    """What serves the model in `folder`, and the router's reader of its prompts."""

    def __init__(self, folder: Path, template: ChatTemplate | DsmlTemplate | None, parsers: ParserChoice) -> None:
        self.factory = RequestFactory(
            Tokenizer.from_folder(folder),
            CacheNamespace("m", "0", 16, "kv"),
            max_model_len=100_000,
            models=("m",),
            template=template,
            parsers=parsers,
        )
        self.rendering = Rendering(str(folder))

    def ids(self, dialect: Dialect, body: dict[str, Any]) -> bytes:
        """Of the first prompt, as the server computes them."""
        known = {name: value for name, value in body.items() if name not in ("n", "temperature", "odd")}
        return self.factory.prompts(dialect.parse(msgspec.json.encode(known), {}), Caller())[0]


@pytest.fixture
def small(tmp_path: Path) -> Server:
    write_folder(tmp_path)
    return Server(tmp_path, ChatTemplate.from_folder(tmp_path), ParserChoice("hermes"))


@pytest.mark.parametrize("block_tokens", [4, 16])
@pytest.mark.parametrize(("path", "body"), FORMS)
def test_router_and_server_name_the_same_blocks(path: str, body: dict[str, Any], block_tokens: int, small: Server) -> None:
    reader = PromptReader(block_tokens, small.rendering)
    call = reader.read(path, msgspec.json.encode(body), {})
    ids = small.ids(DIALECTS[path], body)
    assert call.by_tokens and call.tokens == len(ids) // 4 and not reader.fallbacks
    assert call.chain == extend_chain(b"", root_key(block_tokens), ids, block_tokens)
    assert count(call.chain) == call.tokens // block_tokens


@pytest.mark.parametrize(("path", "body"), [form for form in FORMS if form[0] != COMPLETIONS])
def test_the_markup_of_deepseek_is_rendered_too(path: str, body: dict[str, Any], tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text(f'{{"model_type": "{MODEL_TYPE}"}}')
    server = Server(tmp_path, DsmlTemplate(), ParserChoice("deepseek_v41", "deepseek_v41"))
    call = PromptReader(16, server.rendering).read(path, msgspec.json.encode(body), {})
    ids = server.ids(DIALECTS[path], body)
    assert call.chain == extend_chain(b"", root_key(16), ids, 16) and call.tokens == len(ids) // 4


def test_a_prompt_too_deep_to_be_rendered_is_keyed_by_its_text(small: Server) -> None:
    nested = b'{"a":' * 600 + b"{}" + b"}" * 600
    raw = b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"function": {"name": "f", "parameters": %b}}]}' % nested
    reader = PromptReader(16, small.rendering)
    assert not reader.read(CHAT, raw, {}).by_tokens and reader.fallbacks == {"refused": 1}


def test_another_template_than_the_worker_s_gives_other_keys(small: Server, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_folder(other, CHATML.replace("im_start|>{{", "im_start|> {{"))
    raw = msgspec.json.encode({"messages": SAID})
    ours, theirs = (PromptReader(4, each).read(CHAT, raw, {}).chain for each in (small.rendering, Rendering(str(other))))
    assert ours and theirs and ours[:16] != theirs[:16]


@pytest.mark.parametrize(("path", "field"), [(path, field) for path in SHAPING for field in EFFECTS[path] if "." not in field])
def test_every_field_that_makes_another_prompt_is_known_to_the_router(path: str, field: str, tmp_path: Path) -> None:
    write_folder(tmp_path, TEMPLATE)
    server = Server(tmp_path, ChatTemplate.from_folder(tmp_path), ParserChoice("hermes"))
    effect = EFFECTS[path][field]
    base = {**BASES[path], **effect.base, **({"model": "m"} if "model" in BASES[path] else {})}
    try:
        differs = server.ids(DIALECTS[path], base) != server.ids(DIALECTS[path], {**base, **effect.sent})
    except RequestError:  # nobody computes what is refused
        return
    assert field in SHAPING[path] or not differs


def test_the_router_knows_no_field_that_no_dialect_has() -> None:
    for path, names in SHAPING.items():
        (table,) = CONTRACTS[path].bodies
        assert set(names) <= {field.encode_name for field in msgspec.structs.fields(table.kind)}
