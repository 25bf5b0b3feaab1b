import json

import pytest

from headway.contracts.errors import DataError
from headway.contracts.types import Message, Prompt
from headway.text.chat_template import ChatTemplate
from headway.text.tokenizer import TextTokenizer

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BRANCHING = (
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}"
)
RECURSIVE = (
    "{% for i in [9, 9] recursive %}{% if loop.depth < 40 %}{{ loop([9, 9]) }}{% endif %}"
    "{% endfor %}"
)
DOUBLING = (
    "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}"
)
COUNTING = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}"
)
STEPS = "took more than .* steps"
CHARS = "writes more than .* characters"
NUMBER = "counts with"


def render(source, messages=CHAT):
    return ChatTemplate(source).render({"messages": messages})


def test_loops_know_their_place_and_length():
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}"
        "{% endfor %}"
    )
    assert render(source) == "1/2,2/2."


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "hello"),
        ("{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}", "world"),
        ("{% for i in [1, [2, 3]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}", "123"),
        ("{{ messages[0].content.replace('l', 'L') ~ '!' }}", "heLLo!"),
        ("{{ messages | map(attribute='content') | join(', ') }}", "hello, world"),
        (COUNTING, "2"),
        ("{{ 1700000000 | string }}{{ 1700000000 | tojson }}", "1700000000" * 2),
        ("{% macro f(x) %}{{ x }}{% endmacro %}{{ f(1700000000) }}", "1700000000"),
        ("{{ messages[0] | tojson(indent=2) }}", json.dumps(CHAT[0], indent=2)),
        ("{% macro twice(x) %}{{ x * 2 }}{% endmacro %}{{ twice('ab') }}", "abab"),
        ("{{ '%s-%s' % ('a', 'b') }}{{ '{}'.format(1) }}", "a-b1"),
        ("{{ missing | default('x') }}{{ messages | length }}{{ '  y '.strip() }}", "x2y"),
        ("{{ messages[::-1][0].content }}{{ messages[0].items() | list | length }}", "world2"),
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_what_templates_do_they_may_do(source, text):
    assert render(source) == text


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (ENDLESS, STEPS),
        (BRANCHING, STEPS),
        (RECURSIVE, STEPS),
        ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", CHARS),
        (DOUBLING, CHARS),
        (DOUBLING.replace("~", "+"), CHARS),
        ("{{ 'x' * 10 ** 9 }}", CHARS),
        ("{{ [1] * 10 ** 9 }}", CHARS),
        ("{% set x = 'a' * 99999 %}{{ x.replace('a', x) }}", CHARS),
        ("{% set x = 'a' * 99999 %}{{ x | replace('a', x) }}", CHARS),
        ("{% set x = 'a' * 99999 %}{{ x.join(x | list) }}", CHARS),
        ("{% set x = 'a' * 99999 %}{{ x | list | join(x) }}", CHARS),
        ("{{ 10 ** 10 ** 8 }}", NUMBER),
        ("{{ 'x'.ljust(10 ** 9) }}", NUMBER),
        ("{{ 'x' | center(10 ** 9) }}", NUMBER),
        ("{{ [1] | batch(10 ** 9, 1) | list }}", NUMBER),
        ("{{ '%1000000000d' % 1 }}", "formats with"),
        ("{{ '%*d' % (1000000000, 1) }}", "formats with"),
        ("{{ '%1000000000d' | format(1) }}", "formats with"),
        ("{{ '{:1000000000}'.format(1) }}", "formats with"),
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_a_template_without_bound_fails_by_name(source, why):
    with pytest.raises(DataError, match=why):
        render(source)


def test_a_longer_chat_may_take_more_steps():
    source = "{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}done"
    assert render(source, [{"role": "user", "content": "x" * 50_000}]) == "done"


def test_a_prompt_names_the_group_whose_template_never_ends(tokenizer_dir):
    (tokenizer_dir / "chat_template.jinja").write_text(ENDLESS)
    prompt = Prompt(group_id="g", messages=(Message(role="user", content="hello"),))
    with pytest.raises(DataError, match=r"steps over these messages.*on group 'g'"):
        TextTokenizer(str(tokenizer_dir)).encode_prompt(prompt)
