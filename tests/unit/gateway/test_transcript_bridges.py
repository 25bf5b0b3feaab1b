"""What a chat template writes between two turns, found without touching what was sampled."""

import pytest

from gateway.workflows.conversation import Conversation
from headway.contracts.errors import DataError
from headway.contracts.types import Message, Prompt
from tests.unit.gateway.games import CHATML, byte_tokenizer

USER = "<|im_start|>user\n{}<|im_end|>\n"
OPEN = "<|im_start|>assistant\n"
EMPTY_THINKING = "<think>\n\n</think>\n\n"

# Thinking in the form of Qwen3: dropped from earlier turns, opened empty if it is switched off.
DROPS_THINKING = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- if loop.index0 > ns.last %}{% set content = '<think>\\n\\n</think>\\n\\n' + content %}{% endif %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
# In the form of minimind: every assistant message gets a thinking block, empty ones too.
ADDS_THINKING = """{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content + '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{% endif %}"""
# The newest user message is told apart from earlier ones, as where tools stand in front of it.
REWRITES = """{%- for message in messages %}
{%- if loop.last and message.role == 'user' %}[TOOLS]{% endif %}
{{- message.role + message.content }}{% endfor %}"""


def played(tmp_path, template, *turns, template_args=None):
    """The row of a chat: what was sampled, then what is said to it, in turn."""
    tokenizer = byte_tokenizer(tmp_path, template)
    prompt = Prompt(group_id="g", messages=(Message(role="user", content="2+2?"),))
    chat = Conversation(tokenizer, prompt, template_args=template_args)
    row = chat.opening()
    for sampled, said in turns:
        ids = tokenizer.encode(sampled, add_special_tokens=False)
        row += ids + chat.follow(ids, [Message(role="user", content=said)])
    return tokenizer.decode(row, skip_special_tokens=False), chat


THOUGHT = "<think>\nhm\n</think>\n\n5<|im_end|>"


@pytest.mark.parametrize(
    ("template", "template_args", "opening"),
    [
        (CHATML, None, OPEN),
        (DROPS_THINKING, None, OPEN),
        (DROPS_THINKING, {"enable_thinking": False}, OPEN + EMPTY_THINKING),
        (ADDS_THINKING, None, OPEN + EMPTY_THINKING),
    ],
    ids=["chatml", "drops thinking", "thinking switched off", "adds thinking"],
)
def test_what_was_sampled_stays_as_it_is(tmp_path, template, template_args, opening):
    turns = [(THOUGHT, "no"), ("4<|im_end|>", "yes")]
    row, chat = played(tmp_path, template, *turns, template_args=template_args)
    assert row == (
        USER.format("2+2?")
        + opening
        + THOUGHT
        + "\n"
        + USER.format("no")
        + opening
        + "4<|im_end|>\n"
        + USER.format("yes")
        + opening
    )
    assert [message["content"] for message in chat.messages] == [
        "2+2?",
        "<think>\nhm\n</think>\n\n5",
        "no",
        "4",
        "yes",
    ]


@pytest.mark.parametrize("sampled", ["fi", "", "fi\n", "fi<|im_end|>", "fi<|im_end|>\n"])
def test_a_turn_is_closed_exactly_once(tmp_path, sampled):
    row, _ = played(tmp_path, CHATML, (sampled, "no"))
    said = sampled.removesuffix("<|im_end|>\n").removesuffix("<|im_end|>")
    closed = f"{said}<|im_end|>\n"
    assert row == USER.format("2+2?") + OPEN + closed + USER.format("no") + OPEN


def test_a_turn_that_plays_the_user_too_keeps_what_it_wrote(tmp_path):
    sampled = f"5<|im_end|>\n{USER.format('no')}"
    row, _ = played(tmp_path, CHATML, (sampled, "no"))
    assert row == USER.format("2+2?") + OPEN + sampled + USER.format("no") + OPEN


def test_text_goes_on_with_text(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, None)
    chat = Conversation(tokenizer, Prompt(group_id="g", text="2+2="))
    row = chat.opening() + chat.follow([], [Message(role="user", content=" no: ")])
    assert tokenizer.decode(row) == "2+2= no: "


def test_token_ids_do_not_say_how_a_turn_is_written(tmp_path):
    with pytest.raises(DataError, match="group 'g' is token ids"):
        Conversation(byte_tokenizer(tmp_path), Prompt(group_id="g", input_ids=(1, 2)))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (REWRITES, r"rewrites earlier messages when others follow: '\[TOOLS\]user2\+2\?'"),
        ("{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}", "as it is"),
        ("{% for m in messages %}{{ m.content | upper | reverse }}{% endfor %}", "as it is"),
        ("{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}x", "failed: one"),
    ],
    ids=["rewrites", "forgets", "changes", "refuses"],
)
def test_a_template_that_does_more_than_append_is_refused(tmp_path, template, message):
    with pytest.raises(DataError, match=message):
        played(tmp_path, template, ("5", "no"))
