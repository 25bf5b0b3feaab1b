"""Asserts, split so that what they expect never meets the program.

Of `assert f(2) == 4` only the call `f(2)` is evaluated beside the program; its value comes out, and
the rest, with the value in its place, is evaluated without the program. A literal on the other side is
compared at once, anything else (`math.isclose(f(2), 4.0)`) in a second sandboxed run that holds the
tests alone. So an object that equals everything equals nothing here, and no expected value can be read
from a frame.

What cannot be split, `for` loops and asserts that mention two names of the program, is listed apart.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

_BUILTINS = frozenset(dir(builtins))
VALUE_PREFIX = "_value_"


@dataclass(frozen=True, slots=True)
class Check:
    """One assert: calls for the program, and a condition on their values."""

    calls: tuple[str, ...]
    condition: str
    """An expression over `_value_0`, `_value_1`, ..., one per call."""
    literal: bool = False
    """The condition is that the only value equals `expected`."""
    expected: Any = None


@dataclass(frozen=True, slots=True)
class AssertTests:
    """All tests of a row, with what each kind of them leans on."""

    checks: tuple[Check, ...]
    inside: tuple[str, ...]
    """Statements that only make sense beside the program."""
    call_setup: str
    """Statements for the calls of the checks."""
    condition_setup: str
    """Statements for their conditions, without the program."""
    inside_setup: str


class _Unsplittable(Exception):
    """The assert needs the program beside it."""


@lru_cache(maxsize=512)
def split_asserts(
    tests: str, setup: str, entry_point: str | None, max_tests: int | None = None
) -> AssertTests:
    """Split the tests of one row.

    Args:
        entry_point: the function under test; None takes the first name that the asserts call and that
            is not of the set-up, rather none of a builtin.
    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: this is no Python.
    """
    statements = ast.parse(tests).body
    before = ast.parse(setup).body
    bound = frozenset[str]().union(*map(_touched, before))
    known = bound | _BUILTINS | sys.stdlib_module_names
    entry_point = (
        entry_point
        or _first_called(statements, bound | _BUILTINS)
        or _first_called(statements, bound)  # it is named like a builtin
    )
    checks: list[Check] = []
    inside: list[str] = []
    for statement in statements:
        if entry_point not in _loaded(statement):
            if not isinstance(statement, ast.Pass | ast.Assert):
                before.append(statement)
                known |= _touched(statement)
            continue
        try:
            if not isinstance(statement, ast.Assert):
                raise _Unsplittable
            checks.append(_split(statement.test, str(entry_point), known))
        except _Unsplittable:
            inside.append(ast.unparse(statement))
    return _first(checks, inside, before, max_tests)


def _first(
    checks: Sequence[Check], inside: Sequence[str], setup: Sequence[ast.stmt], count: int | None
) -> AssertTests:
    """Return no more than this many tests."""
    checks = checks[:count]
    inside = inside if count is None else inside[: count - len(checks)]
    conditions = [check.condition for check in checks if not check.literal]
    return AssertTests(
        checks=tuple(checks),
        inside=tuple(inside),
        call_setup=_lean_on(setup, [call for check in checks for call in check.calls]),
        condition_setup=_modules_of(conditions) + _lean_on(setup, conditions),
        inside_setup=ast.unparse(ast.Module(list(setup), [])),
    )


def _split(test: ast.expr, entry_point: str, known: frozenset[str]) -> Check:
    extractor = _Extractor(entry_point, known)
    rest = extractor.visit(ast.parse(ast.unparse(test), mode="eval").body)
    calls = tuple(extractor.calls)
    check = Check(calls, ast.unparse(rest))
    if isinstance(rest, ast.Compare) and len(rest.ops) == 1 and isinstance(rest.ops[0], ast.Eq):
        sides = [rest.left, rest.comparators[0]]
        values = [side for side in sides if not _is_value(side)]
        if len(calls) == 1 and len(values) == 1:
            try:
                return replace(check, literal=True, expected=ast.literal_eval(values[0]))
            except (ValueError, TypeError):
                return check
    return check


def _is_value(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id.startswith(VALUE_PREFIX)


class _Extractor(ast.NodeTransformer):
    """Replaces what starts at the function under test by names for its values."""

    def __init__(self, entry_point: str, known: frozenset[str]) -> None:
        self.calls: list[str] = []
        self._entry_point = entry_point
        self._known = known
        self._bound: set[str] = set()

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr) and _root(node) == self._entry_point:
            if isinstance(node, ast.Name) or _loaded(node) & self._bound:
                raise _Unsplittable
            self.calls.append(ast.unparse(node))
            return ast.Name(f"{VALUE_PREFIX}{len(self.calls) - 1}", ast.Load())
        if isinstance(
            node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
        ):
            self._bound |= _touched(node)
        if isinstance(node, ast.NamedExpr):
            raise _Unsplittable
        if isinstance(node, ast.Name) and node.id not in self._known | self._bound:
            raise _Unsplittable  # it is the program's, like the function under test
        return self.generic_visit(node)


def _root(node: ast.expr) -> str | None:
    """`f` of `f`, `f(x)`, `f(x).y[0]`."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        else:
            return None
    return node.id


def _first_called(statements: Sequence[ast.stmt], known: frozenset[str]) -> str | None:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                root = _root(node)
                is_module = isinstance(node.func, ast.Attribute) and root in sys.stdlib_module_names
                if root is not None and root not in known and not is_module:
                    return root
    return None


def _loaded(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _touched(node: ast.AST) -> frozenset[str]:
    """Names that a statement binds or changes, or that an expression binds."""
    names: set[str] = set()
    for part in ast.walk(node):
        match part:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.add(name)
            case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
                names.add(_root(part) or "")
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add(other or name.partition(".")[0])
            case ast.Expr():
                names |= _loaded(part)
    return frozenset(names)


def _lean_on(setup: Sequence[ast.stmt], expressions: Iterable[str]) -> str:
    """The statements of the set-up that these expressions lean on, imports in any case."""
    needed = {name for text in expressions for name in _loaded(ast.parse(text, mode="eval"))}
    kept: list[ast.stmt] = []
    for statement in reversed(setup):
        is_import = isinstance(statement, ast.Import | ast.ImportFrom)
        if is_import or _touched(statement) & needed:
            kept.append(statement)
            needed |= _loaded(statement)
    return ast.unparse(ast.Module(kept[::-1], []))


def _modules_of(expressions: Iterable[str]) -> str:
    """Import lines for the modules of the standard library that these expressions name."""
    names = {name for text in expressions for name in _loaded(ast.parse(text, mode="eval"))}
    return "".join(f"import {name}\n" for name in sorted(names & sys.stdlib_module_names))
