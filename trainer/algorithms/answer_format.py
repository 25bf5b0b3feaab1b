"""Scores of verified answers: right, wrong, or wrong in the form that was asked for."""

from __future__ import annotations

import re

from headway.contracts.config.ppo_settings import WRONG_SCORE

FORMED_SCORE = -0.8
"""Score of a wrong answer in the right form."""
FORM = ["<think>", "</think>", "<answer>", "</answer>"]
_TAG = re.compile(r"</?(?:think|answer)>")


def is_well_formed(text: str) -> bool:
    """True if the text is `<think>…</think><answer>…</answer>` with nothing but space around it.

    The text in the two may be anything except these four tags; `a < b` or other tags, too. The first
    one may be missing: a chat template may have written it as the end of the prompt.
    """
    whole = text if text.lstrip().startswith(FORM[0]) else FORM[0] + text
    if _TAG.findall(whole) != FORM:
        return False
    before, _, between, _, behind = _TAG.split(whole)
    return not (before.strip() or between.strip() or behind.strip())


def answer_score(score: float, text: str, check_xml_format: bool = False) -> float:
    """Return the score of an answer, before bias and scaling.

    Args:
        score: of the verifier: 1 is right, 0 is wrong; values between stay.
        text: of the completion, without special tokens.
        check_xml_format: a wrong answer that `is_well_formed` accepts scores more than another one.
    """
    if score != 0.0:
        return score
    return FORMED_SCORE if check_xml_format and is_well_formed(text) else WRONG_SCORE
