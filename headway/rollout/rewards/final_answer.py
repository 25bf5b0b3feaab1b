r"""The final answer of a solution: its last `\boxed{}`, plain numbers, LaTeX that reads the same.

Everything here runs on the event loop, in time linear in the text, and without sympy.
"""

from __future__ import annotations

import re
from decimal import Decimal

MAX_ANSWER_CHARS = 50_000
"""A solution's answer is looked for in so many last characters."""
MAX_SHOWN_CHARS = 200

_BRACES = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
_DIGITS = re.compile(r"[+-]?(?:\d{1,200}(?:\.\d{0,200})?|\.\d{1,200})")
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3}){1,60}(?:\.\d{1,200})?")
_INVISIBLE = re.compile(r"\\[!,;:]|\\left(?![a-z])|\\right(?![a-z])|\$|\\(?=\$)")
_LOOSE_SPACE = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")
_FRACTION = re.compile(r"\\[dt]frac(?![a-z])")


def last_box(text: str) -> str | None:
    r"""What stands in the `\boxed{}` that is closed last; None if none is."""
    if "\\boxed" not in text:
        return None
    opened: list[int | None] = []  # where a box begins; None for any other brace
    found: tuple[int, int] | None = None
    for brace in _BRACES.finditer(text):
        if brace.group() == "}":
            start = opened.pop() if opened else None
            found = found if start is None else (start, brace.start())
        elif brace.group() == "{":
            opened.append(None)
        elif brace.group().startswith("\\boxed"):
            opened.append(brace.end())
    return None if found is None else text[slice(*found)].strip()


def plain(text: str) -> str:
    """LaTeX without what changes only its look; two texts that are equal then are equal answers."""
    text = _INVISIBLE.sub("", text).replace("{,}", ",")
    text = _LOOSE_SPACE.sub("", _FRACTION.sub(r"\\frac", text))
    return text.strip().removesuffix(".")


def to_number(text: str) -> Decimal | None:
    """An integer or a decimal, thousands grouped or not; None for anything else."""
    text = plain(text)
    if _DIGITS.fullmatch(text) or _GROUPED.fullmatch(text):
        return Decimal(text.replace(",", ""))
    return None
