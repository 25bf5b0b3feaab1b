r"""The final answer of a solution: where it stands, and whether it surely is another one or the same.

Everything here runs on the event loop, in time linear in the text, and without sympy.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_ANSWER_CHARS = 50_000
"""Number of characters at a solution's end in which its answer is looked for."""
MAX_FORMULA_CHARS = 1000
"""Characters at a text's end in which its last formula is looked for: openings that nothing closes,
one after the other, are tried from each of them."""
MAX_SHOWN_CHARS = 200

_BRACES = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
_DIGITS = re.compile(r"[+-]?(?:\d{1,200}(?:\.\d{0,200})?|\.\d{1,200})")
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3}){1,60}(?:\.\d{1,200})?")
_INVISIBLE = re.compile(r"\\[!,;:]|\\left(?![a-z])|\\right(?![a-z])|\$|\\(?=\$)")
_LOOSE_SPACE = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")
_FRACTION = re.compile(r"\\[dt]frac(?![a-z])")
_SHORT_FRACTION = re.compile(r"\\frac\s?(\d)\s?(\d)")
_NEEDLESS_BRACES = re.compile(r"([\^_])\{([0-9A-Za-z])\}(?![0-9A-Za-z])")
_RATIO = re.compile(r"([+-]?)(?:\\frac\{([+-]?\d{1,200})\}\{(\d{1,200})\}|(\d{1,200})/(\d{1,200}))")
_WITH_UNIT = re.compile(r"([^%^\\]*|.*\})(\\?%|\^\{?\\circ\}?|\\text\{[^{}\\]{1,40}\})")
_LAST_FORMULA = re.compile(
    r"(?<![\\$])\$((?:[^$\\\n]|\\.)+)\$\Z"
    r"|\\\(((?:[^\\\n]|\\[^()])+)\\\)\Z"
    r"|\\\[((?:[^\\\n]|\\[^][])+)\\\]\Z"
)


def last_box(text: str) -> str | None:
    r"""Return the content of the `\boxed{}` that is closed last; None if there is none."""
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


def last_formula(text: str) -> str | None:
    """Return the formula that a text ends in, if it is the only one in its line."""
    text = text.rstrip(" \t\r\n.")
    begin = max(text.rfind("\n") + 1, len(text) - MAX_FORMULA_CHARS)
    match = _LAST_FORMULA.search(text, begin)
    return None if match is None else next(filter(None, match.groups())).strip()


def plain(text: str) -> str:
    """LaTeX without what changes only its look; two texts that are equal then are equal answers."""
    text = _INVISIBLE.sub("", text).replace("{,}", ",")
    text = _LOOSE_SPACE.sub("", _FRACTION.sub(r"\\frac", text))
    text = _NEEDLESS_BRACES.sub(r"\1\2", _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text))
    return text.strip().removesuffix(".")


def to_number(text: str) -> Fraction | None:
    """An integer, a decimal, thousands grouped or not, or a fraction of integers; None for the rest."""
    text = plain(text)
    if _DIGITS.fullmatch(text) or _GROUPED.fullmatch(text):
        return Fraction(text.replace(",", ""))
    ratio = _RATIO.fullmatch(text)
    if ratio is None:
        return None
    sign, *parts = ratio.groups()
    above, below = (int(part) for part in parts if part is not None)
    return Fraction(-above if sign == "-" else above, below) if below else None


def is_same(found: str, gold: str) -> bool | None:
    """Return whether two answers are equal; None where text and numbers do not decide.

    A decimal may be a rounded fraction, so these two are never called different.
    """
    found, gold = plain(found), plain(gold)
    if found == gold:
        return True
    (found, unit), (gold, wanted_unit) = _split_unit(found), _split_unit(gold)
    value, wanted = to_number(found), to_number(gold)
    if unit != wanted_unit or value is None or wanted is None:
        return None
    both = found + gold
    is_rounded = "." in both and ("/" in both or "frac" in both)
    return True if value == wanted else None if is_rounded else False


def _split_unit(text: str) -> tuple[str, str]:
    """A text and what is measured; degrees count as no unit."""
    match = _WITH_UNIT.fullmatch(text)
    if match is None:
        return text, ""
    return match[1], "" if "circ" in match[2] else match[2].lstrip("\\")
