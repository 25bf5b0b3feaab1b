"""Tests of a programming task, as data sets write them.

- `input_output` (APPS, CodeContests, TACO): `{"inputs", "outputs"}`, as an object or as JSON text. With
  `fn_name` an input is a list of arguments, and its output the value that the call returns; if both are
  text (PRIME, LiveCodeBench), there is one argument a line and one value, each as JSON. Without `fn_name`
  they are standard input and output;
- `test_list` with `test_setup_code` or `test_imports` (MBPP): lines of `assert`;
- `test` and `entry_point` (HumanEval): a function `check(candidate)`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from gateway.rewards.code_asserts import AssertTests, Check, split_asserts
from gateway.sandbox.inside.execute import encode
from gateway.sandbox.values import read_value, write_source
from headway.contracts.errors import DataError

MAX_TESTS_CHARS = 1 << 20
"""Maximum characters of a row's tests, where they are text."""
_FIELDS = (
    "input_output",
    "test_list",
    "test_imports",
    "test_setup_code",
    "test",
    "entry_point",
)
_PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)


@dataclass(frozen=True, slots=True)
class StdinTests:
    """Standard input and what is to be printed for it."""

    cases: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CallTests:
    """Arguments of one function, as source, and what it is to return, in JSON's types."""

    function: str
    cases: tuple[tuple[str, Any], ...]


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
    """Return the code that a completion's function may rely on: the prompt above the definition of
    `entry_point`."""
    prompt, entry_point = data.get("prompt"), data.get("entry_point")
    if not isinstance(prompt, str) or entry_point is None:
        return ""
    above, found, _ = prompt.partition(f"def {entry_point}(")
    return above if found else ""


def fields_of_tests(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row that `read_tests` looks at."""
    return {name: data[name] for name in _FIELDS if name in data}


def encode_tests(fields: Mapping[str, Any], max_tests: int | None) -> dict[str, Any]:
    """The tests in JSON's types, to be read by `decode_tests` in another process.

    Raises:
        DataError: as `read_tests`, or there is more text than anybody reads.
    """
    length = sum(len(text) for value in fields.values() for text in _flat(value))
    if length > MAX_TESTS_CHARS:
        raise DataError(
            f"the row's tests have {length} characters, {MAX_TESTS_CHARS} are the most; leave some out"
        )
    tests = read_tests(fields, max_tests)
    if not isinstance(tests, AssertTests):
        return {"kind": type(tests).__name__, **asdict(tests)}
    encoded = asdict(replace(tests, checks=()))
    checks = [asdict(c) | {"expected": encode(c.expected)} for c in tests.checks]
    return {"kind": "AssertTests", **encoded, "checks": checks}


def decode_tests(encoded: Mapping[str, Any]) -> Tests:
    """The tests that `encode_tests` encoded."""
    fields = {name: value for name, value in encoded.items() if name != "kind"}
    if encoded["kind"] == "StdinTests":
        return StdinTests(tuple((given, wanted) for given, wanted in fields["cases"]))
    if encoded["kind"] == "CallTests":
        cases = tuple((given, wanted) for given, wanted in fields["cases"])
        return CallTests(fields["function"], cases)
    checks = [
        Check(tuple(c["calls"]), c["condition"], c["literal"], read_value(c["expected"]))
        for c in fields["checks"]
    ]
    return AssertTests(**fields | {"checks": tuple(checks), "inside": tuple(fields["inside"])})


def _flat(value: Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else [str(value)]


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
        return CallTests(function, tuple(_call(args, wanted) for args, wanted in cases))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"field 'input_output' of the row cannot be read ({error!r}); wanted `inputs` and "
            "`outputs` of one length"
        ) from error


def _lines(given: Any) -> str:
    """Standard input or output: text, or a list of lines."""
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _call(given: Any, wanted: Any) -> tuple[str, Any]:
    """Arguments of a call as source, and the value that it is to return.

    A row whose arguments are text, one JSON value per line, has its values as JSON text, too.
    """
    if isinstance(given, str):
        arguments = [json.loads(line) for line in given.splitlines() if line.strip()]
        return write_source(arguments), json.loads(wanted) if isinstance(wanted, str) else wanted
    if not isinstance(given, list):
        raise TypeError(f"arguments are a {type(given).__name__}, not a list")
    return write_source(given), wanted


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
        found = split_asserts(tests, setup, entry_point, max_tests)
    except _PARSE_ERRORS as error:
        raise DataError(f"the row's tests are no Python: {error}") from error
    if not found.checks and not found.inside:
        raise DataError("the row's tests hold no assert about the program")
    return found


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
