"""Arithmetic, without running anything: the expression is read as a tree of numbers and operators."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from gateway.components.shared_services import SharedServices
from gateway.tools.base import ToolError, one_text, read_text

MAX_CHARS = 1024
MAX_BITS = 4096
"""Maximum bits of an intermediate whole number: larger ones take long to compute and to write."""
ALPHABET = re.compile(r"[0-9eE_.+\-*/%()\s]*")

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Calculator:
    """Numbers, `+ - * / // % **` and brackets, as Python reads them."""

    name = "calculator"
    description = "Evaluates an arithmetic expression with + - * / // % ** and brackets."
    parameters = one_text("expression", "The expression, for example (3 + 4) * 2.5")

    async def call(self, arguments: Mapping[str, Any], services: SharedServices) -> str:
        return str(calculate(read_text(arguments, "expression")))


def calculate(expression: str) -> Number:
    """The value of an expression.

    Raises:
        ToolError: it is no arithmetic, has no value, or is too large.
    """
    if len(expression) > MAX_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters, {MAX_CHARS} are allowed")
    if not ALPHABET.fullmatch(expression):
        raise ToolError(f"{expression[:80]!r} has more than numbers, + - * / // % ** and brackets")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolError(f"{expression[:80]!r} is no arithmetic expression") from error
    except ZeroDivisionError as error:
        raise ToolError("the expression divides by zero") from error
    except OverflowError as error:
        raise ToolError("a number is too large") from error


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=sign, operand=inner) if type(sign) in _UNARY:
            return _bounded(_UNARY[type(sign)](_value(inner)))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            first, second = _value(left), _value(right)
            if isinstance(sign, ast.Pow):
                _check_power(first, second)
            return _bounded(_BINARY[type(sign)](first, second))
    raise ToolError(f"{ast.unparse(node)[:80]!r} is no number and none of + - * / // % **")


def _check_power(base: Number, exponent: Number) -> None:
    """Refuse a power before it is computed."""
    if isinstance(base, int) and isinstance(exponent, int):
        if base.bit_length() * abs(exponent) > MAX_BITS and abs(base) > 1:
            raise ToolError("the power is too large")
    elif base < 0 and not float(exponent).is_integer():
        raise ToolError("a negative number has no such power")


def _bounded(number: Number) -> Number:
    if isinstance(number, int) and number.bit_length() > MAX_BITS:
        raise ToolError("a number is too large")
    if number != number or number in (float("inf"), float("-inf")):
        raise ToolError("a number is too large")
    return number
