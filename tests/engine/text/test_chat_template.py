"""Chat templates: the same text as transformers', and bounds for those that compute for ever or take all memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine import pocket
from engine.errors import RequestError
from engine.text import chat_template
from engine.text.chat_template import render
from engine.text.chat_tokenizer import ChatTokenizer

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <b>brief</b>."},
    {"role": "user", "content": [{"type": "text", "text": "What is it?"}]},
    {"role": "assistant", "content": " An ocean ", "reasoning": "It is wet.", "tool_calls": [
        {"type": "function", "function": {"name": "look", "arguments": {"at": ["sea", 3, None, True, 1.5]}}}]},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks äround", "parameters": {"a": [1]}}}]
# the parts that published templates are made of
TEMPLATES = {
    "loop": "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ m.role }}{% if loop.last %}!{% endif %}\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}",
    "macro": "{% macro show(x, n=1) -%}{% if x is string %}{{ x | trim }}{% elif x is mapping %}"
             "{% for k, v in x.items() %}{{ k }}={{ show(v, n + 1) }};{% endfor %}{% else %}{{ n }}{% endif %}"
             "{%- endmacro %}{{ show(messages[0]) }}{{ show({'a': {'b': 'c'}}) }}",
    "namespace": "{% set ns = namespace(last=-1, text='') %}{% for m in messages[::-1] %}"
                 "{% set ns.last = ns.last + loop.index0 * 2 %}{% set ns.text = ns.text ~ m.role[0] + '%s' % loop.index %}"  # noqa: E501
                 "{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}{{ ns.last }}{{ ns.text }}",
    "json": "{{ tools | tojson }}{{ tools | tojson(indent=4) }}{{ messages[2].tool_calls | tojson(ensure_ascii=False) }}",  # noqa: E501
    "filters": "{{ messages | map(attribute='role') | join(', ') | upper }}{{ 'a,b'.split(',') | last }}{{ 'ab' | length }}"  # noqa: E501
               "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'a\n b' | indent(2) }}"
               "{{ 'x'.replace('x', 'yy') }}{{ '{:>5}'.format('a') }}{{ {'b': 1, 'a': 2} | dictsort }}{{ x | default('n') }}",  # noqa: E501
    "reasoning": "{{ messages[2].reasoning_content }}{{ messages[2].thinking }}{{ messages[2]['content'] }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
    "block": "{% set text %}a{{ messages[0].content }}b{% endset %}{{ text | trim }}{{ dict(a=1)['a'] }}{{ range(3) | list }}",  # noqa: E501
    "mixed": "{{ 1 }}{{ none }}{{ [1, 'a'] }}{{ (1, 2) }}{{ true }}{{ missing }}{{ 7 // 2 * 2 ** 3 % 5 }}{{ 'a' in ('a', 'b') }}",  # noqa: E501
}  # fmt: skip
ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops over a list": "{% set l = range(99999) | list %}{% for i in l %}{% for j in l %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "joins": "{% set l = ['a' * 100] * 10000 %}{% for i in range(99999) %}{{ l | join | length }}{% endfor %}",
}
START = "{% set ns = namespace(s='aaaaaaaaaa', l=[1]) %}{% for i in range(99) %}"
LONG = "{% set s = 'a' * 10**6 %}{% macro show(x) %}{{ x }}{% endmacro %}{% set l = [s] * 9999 %}"
LARGE = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "product": "{{ ('a' * 10**10) | length }}",
    "list": "{{ ([1] * 10**10) | length }}",
    "number": "{{ 10 ** (10 ** 9) > 1 }}",
    "printf": "{{ '%1000000000d' % 1 }}",
    "printf by a star": "{{ '%*d' % (10**9, 1) }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "nested format": "{{ '{:>{}}'.format(1, 10**9) }}",
    "filter of formats": "{{ '%1000000000d' | format(1) }}",
    "method": "{{ 'a'.ljust(10**9) }}",
    "centre": "{{ 'a' | center(10**9) }}",
    "indentation": "{{ ('\n' * 10**6) | indent(9999) }}",
    "indented JSON": "{{ [1] | tojson(indent=10**9) }}",
    "replacement": "{% set s = 'a' * 10**5 %}{{ s.replace('a', s) }}",
    "filter of replacements": "{% set s = 'a' * 10**5 %}{{ s | replace('a', s) }}",
    "text in a loop": "{% for i in range(99999) %}" + "x" * 200_000 + "{% endfor %}",
    "map": "{{ (['a' * 10**6] * 10**5) | map('upper') | list | length }}",
    "doubled text": START + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "added text": START + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "joined text": START + "{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
    "joined by a method": START + "{% set ns.s = ''.join([ns.s, ns.s]) %}{% endfor %}",
    "written text": START + "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}",
    "doubled list": START + "{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "nested lists": START + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | tojson }}",
    "nested tuples": START + "{% set ns.l = (ns.l, ns.l) %}{% endfor %}{{ ns.l | string }}",
    "nested objects": START + "{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ ns.l == ns.l }}",
    **{
        f"list of texts, {name}": LONG + way
        for name, way in {
            "written": "{{ l }}", "joined": "{{ (l ~ '') | length }}", "filtered": "{{ l | lower | length }}",
            "as JSON": "{{ l | tojson | length }}", "formatted": "{{ ('%s' % (l,)) | length }}",
            "formatted by a method": "{{ '{}'.format(l) | length }}", "raised": "{{ raise_exception(l) }}",
            "in a macro": "{{ show(l) | length }}", "in a list": "{{ [l] | join | length }}",
        }.items()
    },
    "list of numbers": "{% set l = [2 ** 9999] * 9999 %}{{ l | string | length }}",
    "list of views": "{% set l = [{'a': 'a' * 10**6}.items()] * 9999 %}{{ l | string | length }}",
    "list of namespaces": "{% set ns = namespace(s='a' * 10**6) %}{% set l = [ns] * 9999 %}"
                          "{{ 'a' * 10**7 if (l | string | length) < 10**6 }}",
    "source": "a" * 300_000,
}  # fmt: skip
OTHERS = {
    "attributes": "{{ ''.__class__.__mro__ }}",
    "attributes of a namespace": "{{ namespace(__class__=1) }}",
    "bytes": "{{ 'a'.encode() }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "deep source": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "another file": "{% include '/etc/passwd' %}",
    "its own error": "{{ raise_exception('no\n\nsystem') }}",
    "division": "{{ 1 // 0 }}",
}


def refusal(source: str) -> str:
    tokenizer = ChatTokenizer.from_folder(pocket.PATH, template=source)
    with pytest.raises(RequestError, match="the model's chat template refuses the messages") as refused:
        tokenizer.render_chat_template(MESSAGES)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 700
    return str(refused.value)


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_the_text_is_that_of_transformers(source):
    variables = {"add_generation_prompt": True, "bos_token": "<s>"}
    (expected,), _ = render_jinja_template([MESSAGES], TOOLS, chat_template=source, **variables)
    assert render(source, MESSAGES, TOOLS, **variables) == expected


@pytest.mark.parametrize("last", [" An ocean ", [{"type": "text", "text": "An"}], "An\n"])
@pytest.mark.parametrize("trim", ["", " | trim"])
def test_the_last_message_is_continued_as_by_transformers(last, trim):
    shown = "{{ m.content" + trim + " if m.content is string else m.content[0].text }}"
    source = "{% for m in messages %}<{{ m.role }}>" + shown + "</>{% endfor %}"
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": last}]
    (expected,), _ = render_jinja_template([messages], chat_template=source, continue_final_message=True)
    assert render(source, messages, None, continue_final_message=True) == expected


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_computes_for_ever_ends_in_time(source, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.1)
    assert "it computes for more than 0.1 s" in refusal(source)


@pytest.mark.parametrize("source", LARGE.values(), ids=LARGE)
def test_a_template_that_grows_ends_before_it_is_large(source, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 1 << 22)
    monkeypatch.setattr(chat_template, "MAX_ENTRIES", 1 << 14)
    tracemalloc.start()
    refusal(source)
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()


@pytest.mark.parametrize("source", OTHERS.values(), ids=OTHERS)
def test_what_a_template_may_not_do_is_the_requests_error(source):
    refusal(source)


@pytest.mark.parametrize(
    "attribute", ["raise_exception.__globals__", "(messages | map(attribute='__class__') | first)"]
)
def test_what_is_inside_python_is_not_there(attribute):
    assert render("<{{ " + attribute + " }}>", MESSAGES, None) == "<>"


def test_messages_that_are_nested_deeply_are_the_requests_error():
    content: list[Any] = []
    for _ in range(5000):
        content = [content]
    with pytest.raises(RequestError):
        ChatTokenizer.from_folder(pocket.PATH).render_chat_template([{"role": "user", "content": content}])
