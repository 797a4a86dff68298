from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from rackserve.api.ask import Conversation
from rackserve.api.prompter import Prompter, Rendered
from rackserve.base.errors import RequestError
from rackserve.base.request import Constraint
from rackserve.text.answers import ContentDelta, PlainParser
from rackserve.text.chat import ChatTemplate
from rackserve.text.constraints import ConstraintCompiler
from rackserve.text.dsml import DsmlTemplate
from rackserve.text.hermes_parser import HermesParser
from rackserve.text.parsers import ParserChoice
from rackserve.text.tokenizer import unpack
from tests.text.small_model import CHATML, small_tokenizer

USER = {"role": "user", "content": "hi"}
CITIES = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {**CITIES, "additionalProperties": False}}}
NOTHING = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False}
JSON = Constraint("json_schema", json.dumps(NOTHING))
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def hermes(constraint: Constraint | None = None, **fields: Any) -> Rendered:
    prompter = Prompter(ChatTemplate(CHATML), ParserChoice("hermes"), small_tokenizer())
    return prompter.render(Conversation(**{"messages": [USER], **fields}), constraint)


def deepseek(constraint: Constraint | None = None, **fields: Any) -> Rendered:
    prompter = Prompter(DsmlTemplate(), ParserChoice("deepseek_v41", "deepseek_v41"), small_tokenizer())
    return prompter.render(Conversation(**{"messages": [USER], **fields}), constraint)


def text(rendered: Rendered) -> str:
    return rendered.written.text.raw.decode()


@cache
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(small_tokenizer())


def meets(rendered: Rendered, answer: str) -> bool:
    """Whether the answer is whole under the constraint."""
    assert rendered.constraint is not None
    matcher = compiler()(rendered.constraint)
    try:
        for token in unpack(small_tokenizer().encode(answer)):
            matcher.accept(token)
    except RequestError:
        return False
    eos = small_tokenizer().eos_ids[0]
    return matcher.is_done or bool(matcher.mask()[eos // 8] >> eos % 8 & 1)


def test_tools_are_in_the_prompt_and_their_calls_are_read_unless_none_may_be_made() -> None:
    offered = hermes(tools=[WEATHER])
    assert "weather" in text(offered) and isinstance(offered.parser(), HermesParser) and offered.constraint is None
    barred = hermes(tools=[WEATHER], tool_choice="none")
    assert "weather" not in text(barred) and isinstance(barred.parser(), PlainParser)
    assert isinstance(hermes().parser(), PlainParser)


def test_an_answer_that_has_to_call_can_do_nothing_else() -> None:
    required = hermes(tools=[WEATHER], tool_choice="required")
    assert meets(required, CALL) and meets(required, f"{CALL}\n{CALL}")
    for wrong in ("Oslo is cold", CALL.replace("Oslo", "Bern"), CALL.replace('"weather"', '"whether"'), ""):
        assert not meets(required, wrong)
    assert not meets(hermes(tools=[WEATHER], tool_choice="required", parallel=False), f"{CALL}\n{CALL}")
    named = hermes(tools=[WEATHER], tool_choice="function:weather")
    assert meets(named, CALL) and not meets(named, f"{CALL}\n{CALL}")


def test_an_answer_with_a_form_may_still_call() -> None:
    both = hermes(JSON, tools=[WEATHER])
    assert meets(both, CALL) and meets(both, '{"a": null}') and not meets(both, "words")
    assert hermes(JSON).constraint == JSON and hermes(JSON, tools=[WEATHER], tool_choice="none").constraint == JSON


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "function:other"}, "tool_choice"),
        ({"tools": [WEATHER], "constraint": Constraint("regex", "a")}, "structured_outputs"),
        ({"messages": []}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": None}], "continue_last": True}, "messages"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        hermes(**fields)
    assert caught.value.param == param


def test_a_model_whose_calls_are_not_read_cannot_be_made_to_call() -> None:
    prompter = Prompter(ChatTemplate(CHATML), ParserChoice(), small_tokenizer())
    for choice, form in (("required", None), ("auto", JSON)):
        with pytest.raises(RequestError, match="tool_choice"):
            prompter.render(Conversation(messages=[USER], tools=[WEATHER], tool_choice=choice), form)


def test_deepseek_calls_in_its_own_markup_when_it_has_to_and_does_not_reason_first() -> None:
    call = (
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n<｜DSML｜ parameter name="city" string="true">Oslo'
        "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )
    assert deepseek(tools=[WEATHER]).constraint is None
    required = deepseek(tools=[WEATHER], tool_choice="required", reasoning_effort="high")
    assert meets(required, call) and meets(required, "\n\n" + call) and not meets(required, "so") and not meets(required, "")
    assert text(required).endswith("</think>") and required.ignored == ("reasoning_effort",)
    assert not meets(required, call.replace("Oslo", "Bonn")) and not meets(required, call.replace("weather", "whether"))
    either = deepseek(JSON, tools=[WEATHER])
    assert meets(either, call) and meets(either, '{"a": null}')
    with pytest.raises(RequestError, match="cannot begin with reasoning"):
        deepseek(tools=[WEATHER], tool_choice="function:weather", thinking=True)


def test_an_answer_can_be_gone_on_with() -> None:
    for render in (hermes, deepseek):
        begun = text(render(messages=[USER, {"role": "assistant", "content": "The"}], continue_last=True))
        assert begun.endswith("The") and begun[:-3] == text(render(thinking=False) if render is deepseek else render())


def test_a_model_reasons_as_asked_and_not_in_front_of_a_form() -> None:
    def reasons(rendered: Rendered) -> bool:
        return ContentDelta("x") not in rendered.parser().feed("x")

    assert reasons(deepseek()) and reasons(deepseek(thinking=True)) and reasons(deepseek(reasoning_effort="low"))
    assert (
        not reasons(deepseek(thinking=False)) and not reasons(deepseek(reasoning_effort="none")) and not reasons(deepseek(JSON))
    )
    with pytest.raises(RequestError) as caught:
        deepseek(JSON, thinking=True)
    assert caught.value.param == "thinking"


def test_without_a_template_there_are_no_conversations() -> None:
    with pytest.raises(RequestError) as caught:
        Prompter(None, ParserChoice(), small_tokenizer()).render(Conversation(messages=[USER]), None)
    assert caught.value.code == "no_chat_template"


def test_tokens_that_a_client_spells_are_text_and_a_prompt_without_any_stays_whole() -> None:
    assert len(hermes().written.text.pieces()) == 1
    spelt = hermes(messages=[{"role": "user", "content": "a<|im_end|>b"}])
    assert [piece.text for piece in spelt.written.text.pieces() if not piece.ours] == ["<|im_end|>"]
    begun = [USER, {"role": "assistant", "content": "so<|im_end|>"}]
    assert text(hermes(messages=begun, continue_last=True)).endswith("assistant\nso<|im_end|>")
    going_on = hermes(messages=[USER, {"role": "assistant", "content": "so"}], continue_last=True)
    assert len(going_on.written.text.pieces()) == 1


def test_a_template_is_told_whether_and_how_hard_to_reason_if_it_asks() -> None:
    asking = (
        CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ reasoning_effort }}"
    )
    prompter = Prompter(ChatTemplate(asking), ParserChoice("hermes", "qwen3"), small_tokenizer())
    rendered = prompter.render(Conversation(messages=[USER], thinking=False, reasoning_effort="low"), None)
    assert text(rendered).endswith("<think></think>low") and rendered.ignored == ()


def test_wishes_that_a_model_cannot_meet_are_told() -> None:
    assert hermes(thinking=True, reasoning_effort="high").ignored == ("thinking", "reasoning_effort")
    assert hermes(thinking=False, reasoning_effort="none").ignored == ()  # as it is
    assert hermes(tools=[WEATHER], parallel=False).ignored == ("parallel",)
    assert hermes(tools=[WEATHER], parallel=False, tool_choice="required").ignored == ()
    assert deepseek(thinking=True, reasoning_effort="high").ignored == ()
