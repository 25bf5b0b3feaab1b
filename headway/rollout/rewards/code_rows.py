"""Tests of a programming task, as data sets write them.

- `input_output` (APPS, CodeContests, TACO): `{"inputs", "outputs"}`, as an object or as JSON text; with
  `fn_name` each input is a list of arguments, else standard input;
- `test_list` with `test_setup_code` or `test_imports` (MBPP): lines of `assert`;
- `test` and `entry_point` (HumanEval): a function `check(candidate)`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.contracts.errors import DataError
from headway.rollout.rewards.code_asserts import AssertTests, split_asserts

_PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)


@dataclass(frozen=True, slots=True)
class StdinTests:
    """Standard input and what is to be printed for it."""

    cases: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CallTests:
    """Arguments of one function and what it is to return, both in JSON's types."""

    function: str
    cases: tuple[tuple[list[Any], Any], ...]


Tests = StdinTests | CallTests | AssertTests


def read_tests(data: Mapping[str, Any], max_tests: int | None) -> Tests:
    """The first `max_tests` tests of a row.

    Raises:
        DataError: the row has no tests, or what it has cannot be read.
    """
    if "input_output" in data:
        return _input_output(data["input_output"], max_tests)
    if "test_list" in data:
        lines = _texts(data, "test_list")[:max_tests]
        setup = "\n".join([*_texts(data, "test_imports"), str(data.get("test_setup_code", ""))])
        return _split("\n".join(lines), setup, None, max_tests)
    if "test" in data and "entry_point" in data:
        entry_point = _name(data["entry_point"])
        return _split(*_check_function(str(data["test"]), entry_point), entry_point, max_tests)
    raise DataError(
        "the row has no tests: `input_output`, `test_list`, or `test` with `entry_point` is wanted; "
        f"it has {sorted(data)}"
    )


def header_of(data: Mapping[str, Any]) -> str:
    """What a completion's function may lean on: the prompt above the definition of `entry_point`."""
    prompt, entry_point = data.get("prompt"), data.get("entry_point")
    if not isinstance(prompt, str) or entry_point is None:
        return ""
    above, found, _ = prompt.partition(f"def {entry_point}(")
    return above if found else ""


def _input_output(given: Any, max_tests: int | None) -> StdinTests | CallTests:
    try:
        table = json.loads(given) if isinstance(given, str) else given
        inputs, outputs = table["inputs"], table["outputs"]
        cases = list(zip(inputs, outputs, strict=True))[:max_tests]
        if not cases:
            raise ValueError("it is empty")
        if not table.get("fn_name"):
            return StdinTests(tuple((_lines(given), _lines(wanted)) for given, wanted in cases))
        function = _name(table["fn_name"])
        return CallTests(function, tuple((_arguments(args), wanted) for args, wanted in cases))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"field 'input_output' of the row cannot be read ({error!r}); wanted `inputs` and "
            "`outputs` of one length"
        ) from error


def _lines(given: Any) -> str:
    """Standard input or output: text, or a list of lines."""
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _arguments(given: Any) -> list[Any]:
    """Arguments of a call: a list, or text with one JSON value per line."""
    if isinstance(given, str):
        return [json.loads(line) for line in given.splitlines() if line.strip()]
    if not isinstance(given, list):
        raise TypeError(f"arguments are a {type(given).__name__}, not a list")
    return given


def _name(given: Any) -> str:
    if not isinstance(given, str) or not given.isidentifier():
        raise DataError(f"{given!r} is no name of a function")
    return given


def _texts(data: Mapping[str, Any], key: str) -> list[str]:
    texts = data.get(key, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"field {key!r} of the row is no list of texts")
    return texts


def _split(tests: str, setup: str, entry_point: str | None, max_tests: int | None) -> AssertTests:
    try:
        found = split_asserts(tests, setup, entry_point)
    except _PARSE_ERRORS as error:
        raise DataError(f"the row's tests are no Python: {error}") from error
    if not found.checks and not found.inside:
        raise DataError("the row's tests hold no assert about the program")
    return found.first(max_tests)


def _check_function(test: str, entry_point: str) -> tuple[str, str]:
    """The body of `check(candidate)` with the function's own name, and what stands around it."""
    try:
        module = ast.parse(test)
    except _PARSE_ERRORS as error:
        raise DataError(f"field 'test' of the row is no Python: {error}") from error
    for index, statement in enumerate(module.body):
        if isinstance(statement, ast.FunctionDef) and statement.name == "check":
            around = module.body[:index] + module.body[index + 1 :]
            candidate = statement.args.args[0].arg if statement.args.args else entry_point
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and node.id == candidate:
                    node.id = entry_point
            body = ast.Module(statement.body, [])
            return ast.unparse(body), ast.unparse(ast.Module(around, []))
    raise DataError("field 'test' of the row defines no function `check`")
