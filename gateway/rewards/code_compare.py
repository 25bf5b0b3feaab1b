"""Is what a program printed or returned what was wanted?"""

from __future__ import annotations

import math
import re
from typing import Any

TOLERANCE = 1e-6
"""Absolute below 1, relative above."""
_FLOAT = re.compile(r"[+-]?(\d{1,40}\.\d{0,40}|\.\d{1,40}|\d{1,40}(?=[eE]))([eE][+-]?\d{1,4})?")


def same_output(printed: str, wanted: str) -> bool:
    """Token by token; what is wanted as a decimal fraction may differ by TOLERANCE."""
    tokens, wanted_tokens = printed.split(), wanted.split()
    return len(tokens) == len(wanted_tokens) and all(map(_same_token, tokens, wanted_tokens))


def same_result(value: Any, wanted: Any) -> bool:
    """JSON values; a list of one value also stands for that value, as in APPS."""
    if _same_json(value, wanted):
        return True
    return isinstance(wanted, list) and len(wanted) == 1 and _same_json(value, wanted[0])


def _same_token(token: str, wanted: str) -> bool:
    if token == wanted:
        return True
    if not _FLOAT.fullmatch(wanted) or len(token) > 100:
        return False
    try:
        return _close(float(token), float(wanted))
    except ValueError:
        return False


def _same_json(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, float) and isinstance(value, int | float):
        return _close(value, wanted)
    if isinstance(wanted, list) and isinstance(value, list):
        return len(value) == len(wanted) and all(map(_same_json, value, wanted))
    if isinstance(wanted, dict) and isinstance(value, dict):
        return value.keys() == wanted.keys() and all(
            _same_json(value[key], wanted[key]) for key in wanted
        )
    return bool(value == wanted)


def _close(value: float, wanted: float) -> bool:
    try:
        return math.isclose(value, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer beyond every float
        return False
