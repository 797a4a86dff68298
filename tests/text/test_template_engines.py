from __future__ import annotations

import time

import pytest

from rackserve.base.errors import FileFormatError, RequestError
from rackserve.text.template_engines import BoundedTemplate, SandboxedTemplate
from tests.text.small_model import CHATML

VALUES = {
    "messages": [{"role": "system", "content": " <é&'>\n"}, {"role": "user", "content": "a-b"}],
    "tools": None,
    "add_generation_prompt": True,
    "bos_token": "<s>",
}
TEMPLATES = [
    CHATML,
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ 'x' }}{% endif %}"
    "{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}",
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "{%- set ns = namespace(found=false) -%}\n  {%- for m in messages if m.role == 'user' %}{% set ns.found = true %}"
    "{% endfor %}{{ ns.found }}",
    "{{ messages[1].content.split('-')[-1].strip() }}{{ messages[1:] | length }}{{ bos_token ~ messages[-1].content | upper }}",
    "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages[0].role) }}"
    "{% if tools %}t{% elif messages is iterable %}i{% endif %}",
    "{% for k, v in messages[0].items() %}{{ k }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "{{ messages[0].get('name', 'none') }}{{ tools is none }}{{ nothing is defined }}{{ messages[0].content is string }}\n",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_both_engines_render_the_same(source: str) -> None:
    assert BoundedTemplate(source, "t").render(100, VALUES) == SandboxedTemplate(source, "t").render(100, VALUES)


def test_marks_of_training_tools_change_nothing() -> None:
    template = BoundedTemplate("a {%- generation %} b {% endgeneration -%} c", "t")
    assert template.render(1, {}) == "a b c"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**10) %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ '%1000000000s' | format('x') }}",
        "{{ 'x' | indent(1000000000) }}",
        "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{% set a = 'x' * 1000 %}{% set b = a.replace('x', a) %}{% set c = b.replace('x', a) %}{{ c }}",
        "{% for i in range(99999) %}{{ messages[0].content * 50 }}{% endfor %}",
        "{% for m in messages %}{{ messages.append(m) }}{% endfor %}{% for i in range(9999) %}{{ messages }}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.x }}",
        "{{ nothing.at_all }}",
        "{{ 1 // 0 }}",
        "{{ raise_exception('no') }}",
        "{{ messages | tojson(indent='x') }}",
    ],
)
def test_a_template_that_misbehaves_is_stopped_soon(source: str) -> None:
    values = {**VALUES, "messages": [dict(message) for message in VALUES["messages"]]}
    template = BoundedTemplate(source, "t")
    start = time.process_time()
    with pytest.raises(RequestError, match="the chat template refuses"):
        template.render(100, values)
    assert time.process_time() - start < 0.5


def test_text_out_of_proportion_is_refused() -> None:
    template = BoundedTemplate("{% for i in range(40) %}{{ 'x' * 40000 }}{% endfor %}", "t")
    with pytest.raises(RequestError):
        template.render(10, {})
    assert len(template.render(500_000, {})) == 1_600_000


def test_attributes_of_python_are_not_there() -> None:
    assert BoundedTemplate("[{{ messages.__class__ }}{{ messages[0].__init__ }}]", "t").render(10, VALUES) == "[]"


@pytest.mark.parametrize("engine", [BoundedTemplate, SandboxedTemplate])
def test_a_template_that_does_not_parse_names_its_file(engine: type[BoundedTemplate | SandboxedTemplate]) -> None:
    with pytest.raises(FileFormatError, match="here: the chat template does not parse"):
        engine("{% if %}", "here")


def test_a_sandbox_keeps_what_it_is_given_and_where_it_is() -> None:
    for source in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ nothing.at_all }}"):
        with pytest.raises(RequestError):
            SandboxedTemplate(source, "t").render(1, VALUES)


def test_long_texts_have_fuel_in_proportion() -> None:
    long = [{"role": "user", "content": "x" * 100_000} for _ in range(100)]
    assert len(BoundedTemplate(CHATML, "t").render(10_000_000, {"messages": long})) > 10_000_000
