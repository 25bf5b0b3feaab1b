"""Programs scored by tests. The program runs in the sandbox; its tests are evaluated outside.

What is expected never enters the program's process, so that a program cannot read it, cannot answer
"equal" to everything, and gains nothing by leaving early; only a table of known answers still passes:
keep tests hidden. See `code_asserts` for how asserts are taken apart.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from gateway.components.shared_services import (
    MAX_CPU_S,
    MAX_MEMORY_BYTES,
    Program,
    ProgramResult,
    Sandbox,
    SharedServices,
    TaskPool,
)
from gateway.rewards.base import Answer
from gateway.rewards.code_asserts import VALUE_PREFIX, AssertTests, Check
from gateway.rewards.code_compare import same_output, same_result
from gateway.rewards.code_rows import (
    CallTests,
    StdinTests,
    Tests,
    decode_tests,
    encode_tests,
    fields_of_tests,
    header_of,
    read_tests,
)
from gateway.sandbox.values import read_value, write_source
from headway.contracts.errors import DataError
from headway.contracts.types import RewardResult, Verdict
from headway.runtime.offload import offload, size_of

FENCE = "```"
SMALL_TESTS = 2048
"""Characters of a row's tests that are read on the event loop, in a hundredth of a second."""
MIN_OUTPUT_CHARS = 65_536
SAID_CHARS = 500
PREAMBLE = (
    "import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator; "
    "import random, re, string, sys; from bisect import *; from collections import *; "
    "from copy import *; from functools import *; from heapq import *; from itertools import *; "
    "from math import *; from typing import *; from builtins import *\n"
)
"""Names that a program whose function is called may use without an import of its own.

The verifiers of APPS, TACO and LiveCodeBench import them, and solutions of these data sets rely on that.
The builtins come last: `pow` stays theirs.
"""
_SOLUTION_CLASS = re.compile(r"^class Solution\b", re.MULTILINE)
_FUTURE_IMPORT = re.compile(r"^from __future__ import .*\n", re.MULTILINE)


@dataclass
class Tally:
    """Results of one program's tests."""

    num_tests: int
    passed: int = 0
    verdict: Verdict = "accepted"
    """Verdict on the first test that failed."""
    said: str = ""
    """Output of the program for that test."""
    cpu_s: float = 0.0
    failed: list[int] = field(default_factory=list)

    def note(self, index: int, verdict: Verdict, said: str = "") -> None:
        """Record one test."""
        if verdict == "accepted":
            self.passed += 1
            return
        if not self.failed:
            self.verdict, self.said = verdict, said[-SAID_CHARS:]
        self.failed.append(index)


class CodeReward:
    """1.0 if the program passes all tests of the row, else 0.0.

    The program is the last block of the completion that is fenced as Python, else its last fenced
    block, else the whole completion. Rows: see `code_rows`.

    Args:
        fraction: the score is the share of tests that passed.
        max_tests: number of tests to look at, from the first; None looks at all.
        cpu_s: CPU seconds for each run of the program: one per row, or one per standard input.
        memory_mb: of one process of the program.
        allow_inside_asserts: tests that cannot be taken apart run beside the program, which can then
            read and outwit them; false refuses such rows.
    """

    def __init__(
        self,
        fraction: bool = False,
        max_tests: Annotated[int, Field(gt=0)] | None = None,
        cpu_s: Annotated[float, Field(gt=0.0, le=MAX_CPU_S)] = 4.0,
        memory_mb: Annotated[int, Field(gt=0, le=MAX_MEMORY_BYTES >> 20)] = 512,
        allow_inside_asserts: bool = False,
    ) -> None:
        self._fraction = fraction
        self._max_tests = max_tests
        self._cpu_s = cpu_s
        self._memory_bytes = memory_mb << 20
        self._allow_inside = allow_inside_asserts

    async def score(self, answer: Answer, services: SharedServices) -> RewardResult:
        """See `base.AsyncReward`.

        Raises:
            DataError: the row's tests cannot be read, or not be evaluated apart from the program.
        """
        tests = await self._read(answer.data, services.task_pool)
        source = extract_program(answer.completion)
        match tests:
            case StdinTests():
                tally = await self._judge_stdin(source, tests, services.sandbox)
            case CallTests():
                tally = await self._judge_calls(source, tests, services.sandbox)
            case AssertTests():
                source = complete(source, answer.data.get("entry_point"), answer.data)
                tally = await self._judge_asserts(source, tests, services.sandbox)
        return self._result(tally)

    async def _read(self, data: Mapping[str, Any], task_pool: TaskPool) -> Tests:
        fields = fields_of_tests(data)
        size = size_of(fields)
        if size <= SMALL_TESTS:
            return read_tests(data, self._max_tests)
        if not isinstance(fields.get("input_output", ""), str):
            return await offload(size, read_tests, data, self._max_tests)
        return decode_tests(await task_pool.call(encode_tests, fields, self._max_tests))

    def _result(self, tally: Tally) -> RewardResult:
        share = tally.passed / tally.num_tests
        details = {
            "passed": tally.passed,
            "tests": tally.num_tests,
            "first_failed": tally.failed[0] if tally.failed else None,
            "said": tally.said,
            "cpu_s": round(tally.cpu_s, 4),
        }
        score = share if self._fraction else float(share == 1.0)
        return RewardResult(score, details, tally.verdict)

    def _program(
        self, source: str, *, stdin: str = "", calls: Sequence[str] = (), wanted_chars: int = 0
    ) -> Program:
        return Program(
            source=source,
            stdin=stdin,
            calls=tuple(calls),
            cpu_s=self._cpu_s,
            memory_bytes=self._memory_bytes,
            max_output_chars=max(MIN_OUTPUT_CHARS, 4 * wanted_chars),
        )

    async def _judge_stdin(self, source: str, tests: StdinTests, sandbox: Sandbox) -> Tally:
        tally = Tally(len(tests.cases))
        for index, (stdin, wanted) in enumerate(tests.cases):
            program = self._program(source, stdin=stdin, wanted_chars=len(wanted))
            outcome = await sandbox.run(program)
            tally.cpu_s += outcome.cpu_s
            verdict = _verdict(outcome.status)
            size = len(outcome.stdout) + len(wanted)
            if verdict == "accepted" and not await offload(
                size, same_output, outcome.stdout, wanted
            ):
                verdict = "wrong_answer"
            tally.note(index, verdict, outcome.stderr)
            if tally.failed and (not self._fraction or verdict == "compile_error"):
                break  # the rest changes nothing
        return tally

    async def _judge_calls(self, source: str, tests: CallTests, sandbox: Sandbox) -> Tally:
        target = tests.function
        if _SOLUTION_CLASS.search(source):
            target = f"Solution().{target}"
        calls = [f"{target}(*{arguments})" for arguments, _ in tests.cases]
        size = size_of(tests.cases)
        wanted_chars = await offload(size, lambda: sum(len(str(w)) for _, w in tests.cases))
        program = self._program(with_preamble(source), calls=calls, wanted_chars=wanted_chars)
        outcome = await sandbox.run(program)
        return await offload(size, self._compare, tests, outcome)

    def _compare(self, tests: CallTests, outcome: ProgramResult) -> Tally:
        tally = Tally(len(tests.cases), cpu_s=outcome.cpu_s)
        for index, (_, wanted) in enumerate(tests.cases):
            result = _result_at(outcome, index)
            passed = "value" in result and same_result(result["value"], wanted)
            _note(tally, index, outcome, [result], passed)
        return tally

    async def _judge_asserts(self, source: str, tests: AssertTests, sandbox: Sandbox) -> Tally:
        if tests.inside and not self._allow_inside:
            raise DataError(
                f"{len(tests.inside)} of the row's tests cannot be evaluated apart from the program, for "
                f"example {tests.inside[0][:200]!r}; leave the row out, or set allow_inside_asserts"
            )
        tally = Tally(len(tests.checks) + bool(tests.inside))
        if tests.checks:
            await self._judge_checks(source, tests, sandbox, tally)
        if tests.inside and (self._fraction or not tally.failed):
            await self._judge_inside(source, tests, sandbox, tally)
        return tally

    async def _judge_checks(
        self, source: str, tests: AssertTests, sandbox: Sandbox, tally: Tally
    ) -> None:
        calls = [call for check in tests.checks for call in check.calls]
        wanted_chars = sum(len(check.condition) for check in tests.checks)
        together = f"{source}\n{tests.call_setup}"
        outcome = await sandbox.run(self._program(together, calls=calls, wanted_chars=wanted_chars))
        tally.cpu_s += outcome.cpu_s
        results = _by_check(tests.checks, outcome)
        passed = await self._conditions(tests, results, sandbox)
        for index, check_results in enumerate(results):
            _note(tally, index, outcome, check_results, passed[index])

    async def _conditions(
        self, tests: AssertTests, results: list[list[dict[str, Any]]], sandbox: Sandbox
    ) -> list[bool]:
        """Return which checks hold, given the values of their calls; those of literals are compared
        here."""
        passed = [False] * len(results)
        conditions: dict[int, str] = {}
        for index, (check, found) in enumerate(zip(tests.checks, results, strict=True)):
            values = _values(found)
            if values is None:
                continue
            if check.literal:
                passed[index] = _equal(values[0], check.expected)
            else:
                names = ", ".join(f"{VALUE_PREFIX}{n}" for n in range(len(values)))
                given = ", ".join(map(write_source, values))
                conditions[index] = f"(lambda {names}: bool({check.condition}))({given})"
        if conditions:
            source = tests.condition_setup
            outcome = await sandbox.run(self._program(source, calls=tuple(conditions.values())))
            for position, index in enumerate(conditions):
                result = _result_at(outcome, position)
                passed[index] = result.get("value") is True
                if not result or result.get("error", "").startswith("NameError"):
                    raise DataError(
                        f"the row's test `{tests.checks[index].condition[:200]}` cannot be evaluated:  "
                        f"{result.get('error', outcome.status)}"
                    )
        return passed

    async def _judge_inside(
        self, source: str, tests: AssertTests, sandbox: Sandbox, tally: Tally
    ) -> None:
        """Run statements beside the program; it has passed if what follows them is reached."""
        nonce = secrets.token_hex(16)
        together = "\n".join([source, tests.inside_setup, *tests.inside])
        outcome = await sandbox.run(self._program(together, calls=(repr(nonce),)))
        tally.cpu_s += outcome.cpu_s
        result = _result_at(outcome, 0)
        verdict = _verdict(outcome.status)
        if "AssertionError" in outcome.stderr and verdict == "runtime_error":
            verdict = "wrong_answer"
        elif verdict == "accepted" and result.get("value") != nonce:
            verdict = "runtime_error"
        tally.note(tally.num_tests - 1, verdict, outcome.stderr)


def extract_program(completion: str) -> str:
    """The last block fenced as Python, else the last fenced block, else the whole completion."""
    blocks = completion.split(FENCE)[1::2]
    for marked in (True, False):
        for block in reversed(blocks):
            language, found, program = block.partition("\n")
            if found and (language.strip().lower() in ("python", "py", "python3") or not marked):
                return program
    return completion


def with_preamble(source: str) -> str:
    """Put the usual imports above a program, and below its imports from the future."""
    begin = max((found.end() for found in _FUTURE_IMPORT.finditer(source)), default=0)
    return f"{source[:begin]}{PREAMBLE}{source[begin:]}"


def complete(source: str, entry_point: Any, data: Any) -> str:
    """Put in front what the prompt of a HumanEval row defines above the function.

    A source without the function goes on where the prompt ends.
    """
    if entry_point is None:
        return source
    if re.search(rf"^(async )?def {re.escape(str(entry_point))}\b", source, re.MULTILINE):
        return header_of(data) + source
    return f"{data.get('prompt') or ''}{source}"


def _verdict(status: str) -> Verdict:
    return "accepted" if status == "ok" else status  # type: ignore[return-value]


def _note(
    tally: Tally, index: int, outcome: ProgramResult, results: list[dict[str, Any]], passed: bool
) -> None:
    """Record a test that was evaluated by values.

    A program that did not end well has not passed the tests whose values are missing; those that came
    count.
    """
    if passed:
        tally.note(index, "accepted")
        return
    errors = [result["error"] for result in results if "error" in result]
    if all("value" in result for result in results):
        tally.note(index, "wrong_answer")
    elif errors or outcome.status == "ok":
        tally.note(index, "runtime_error", "; ".join(errors) or "left before the call")
    else:
        tally.note(index, _verdict(outcome.status), outcome.stderr)


def _result_at(outcome: ProgramResult, index: int) -> dict[str, Any]:
    return outcome.results[index] if index < len(outcome.results) else {}


def _by_check(checks: Iterable[Check], outcome: ProgramResult) -> list[list[dict[str, Any]]]:
    """The results of each check's calls, as far as they came."""
    found, position = [], 0
    for check in checks:
        count = len(check.calls)
        found.append([_result_at(outcome, position + offset) for offset in range(count)])
        position += count
    return found


def _values(results: list[dict[str, Any]]) -> list[Any] | None:
    try:
        return [read_value(result) for result in results]
    except (KeyError, ValueError):
        return None


def _equal(value: Any, expected: Any) -> bool:
    try:
        return bool(value == expected)
    except RecursionError:
        return False
