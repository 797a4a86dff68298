from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rackserve.base.errors import FileFormatError, RequestError
from rackserve.text.chat import ChatTemplate
from tests.text.small_model import CHATML, write_folder


def test_messages_are_framed_by_the_model_template() -> None:
    prompt = ChatTemplate(CHATML).render([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    assert prompt == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\nab<|im_end|>" in ChatTemplate(CHATML).render([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0]"),
        ({"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "messages[0].tool_calls"),
    ],
)
def test_a_message_the_model_cannot_read_is_refused_by_name(message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(CHATML).render([message])
    assert caught.value.param == param


def test_no_messages_are_refused() -> None:
    with pytest.raises(RequestError, match="at least one"):
        ChatTemplate(CHATML).render([])


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__ }}{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ nothing.at_all }}",
        "{{ 1 // 0 }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_that_objects_or_misbehaves_is_a_clear_refusal(source: str) -> None:
    with pytest.raises(RequestError, match="chat template") as caught:
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_json_in_prompts_is_not_escaped_for_html() -> None:
    prompt = ChatTemplate("{{ messages[0] | tojson }}").render([{"role": "user", "content": "<é&'>"}])
    assert prompt == """{"role": "user", "content": "<é&'>"}"""


def test_message_content_is_never_run_as_a_template() -> None:
    assert "{{ 6 * 7 }}" in ChatTemplate(CHATML).render([{"role": "user", "content": "{{ 6 * 7 }}"}])


def test_a_folder_gives_its_template_and_tokens(tmp_path: Path) -> None:
    write_folder(tmp_path, "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None and template.render([{"role": "user", "content": "x"}]) == "<|im_start|>x<|im_end|>"
    write_folder(tmp_path, [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}])
    named = ChatTemplate.from_folder(tmp_path)
    assert named is not None and named.render([{"role": "user", "content": "x"}]) == "d"


def test_a_template_file_beside_the_configuration_is_found(tmp_path: Path) -> None:
    write_folder(tmp_path, None)
    assert ChatTemplate.from_folder(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text("file")
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None and template.render([{"role": "user", "content": "x"}]) == "file"


def test_a_broken_template_names_its_file(tmp_path: Path) -> None:
    write_folder(tmp_path, "{% if %}")
    with pytest.raises(FileFormatError, match=r"tokenizer_config\.json"):
        ChatTemplate.from_folder(tmp_path)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x":  1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TALK = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "r"},
]


def test_a_template_without_tools_gets_them_written_in_the_system_prompt() -> None:
    template = ChatTemplate(CHATML)
    assert not template.takes_tools
    prompt = template.render(TALK, [TOOL])
    assert prompt.startswith("<|im_start|>system\n# Tools") and json.dumps(TOOL) in prompt
    assert '<tool_call>\n{"name": "f", "arguments": {"x":  1}}\n</tool_call><|im_end|>' in prompt
    assert "<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>" in prompt


def test_a_template_with_tools_gets_them_as_objects() -> None:
    source = (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(source)
    assert template.takes_tools and template.render(TALK, [TOOL]) == "f;1" and template.render(TALK) == "1"


def test_rendering_leaves_the_messages_as_they_are() -> None:
    before = json.dumps(TALK)
    for source in (
        CHATML,
        "{{ messages.append(1) }}{{ messages[1].pop('role') }}{{ messages[1].tool_calls.pop() }}{{ tools }}",
    ):
        ChatTemplate(source).render(TALK, [TOOL])
    assert json.dumps(TALK) == before


def test_a_template_that_cannot_be_bounded_needs_trust() -> None:
    source = "{{ '{}'.format(messages[0].content) }}"
    with pytest.raises(FileFormatError, match=r"str\.format"):
        ChatTemplate(source)
    assert ChatTemplate(source, trusted=True).render([{"role": "user", "content": "x"}]) == "x"
