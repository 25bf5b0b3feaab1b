"""The form of an answer, and what a wrong one scores."""

from __future__ import annotations

import pytest

from trainer.algorithms.answer_format import answer_score, is_well_formed


@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think><answer>b</answer>",
        "  <think>a</think>\n\n<answer>b</answer>\n",
        "a</think><answer>b</answer>",  # the prompt ended with <think>
        "\na </think> <answer></answer>",
        "<think>if a < b && c > d: x<y>z</think><answer>&amp; </b> <![CDATA[</answer>",
        "<think>a\nb\x00\x0b</think><answer>é 🙂</answer>",
        "<thinking>a</think><answer>b</answer>",  # text after a <think> that was missing
    ],
)
def test_well_formed(text):
    assert is_well_formed(text)
    assert answer_score(0.0, text, check_xml_format=True) == -0.8
    assert answer_score(0.0, text) == -1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "b",
        "<answer>b</answer>",
        "<think>a</think>",
        "<think>a</think><answer>b",
        "<think>a<answer>b</answer></think>",
        "<answer>b</answer><think>a</think>",
        "<think>a</think>so<answer>b</answer>",
        "so <think>a</think><answer>b</answer>",
        "<think>a</think><answer>b</answer> done",
        "<think>a</think><answer>b</answer><answer>c</answer>",
        "<think>a</think><think>a</think><answer>b</answer>",
        "<think>the <answer> comes</think><answer>b</answer>",
        "<THINK>a</THINK><ANSWER>b</ANSWER>",
    ],
)
def test_ill_formed(text):
    assert not is_well_formed(text)
    assert answer_score(0.0, text, check_xml_format=True) == -1.0


@pytest.mark.parametrize("score", [1.0, 0.25, -0.5])
def test_what_is_not_quite_wrong_keeps_its_score(score):
    for text in ("b", "<think>a</think><answer>b</answer>"):
        assert answer_score(score, text, check_xml_format=True) == score
        assert answer_score(score, text) == score
