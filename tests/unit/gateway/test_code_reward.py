"""The code reward, on real sandboxes: what is accepted, what is not, and what cannot fool it."""

import asyncio
import gzip
import json
import os
import textwrap
from pathlib import Path

import pytest

from gateway.components.shared_services import (
    NoOutbound,
    Program,
    ProgramResult,
    SharedServices,
)
from gateway.rewards.base import Answer, AsyncReward, make_reward
from gateway.rewards.code import extract_program
from gateway.rewards.code_compare import same_output, same_result
from gateway.sandbox.backends import BUBBLEWRAP
from headway.contracts.errors import ConfigError, DataError, RewardOutage
from headway.contracts.types import RewardResult
from tests.unit.gateway.sandboxes import open_pool, services_of

ASSERTS = {
    "test_list": [
        "assert double(3) == 6",
        "assert double(-1) == -2",
        "assert set(double([1, 2])) == {1, 2}",
        "import math",
        "assert math.isclose(double(0.1), 0.2, rel_tol=1e-3)",
        "assert not double(0)",
    ]
}
CHECK = {
    "prompt": 'import math\n\ndef helper(x):\n    return x * 2\n\ndef double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "test": "def check(candidate):\n    xs = [1, 2]\n    wanted = xs + xs\n"
    "    assert candidate(3) == 6, 'no'\n    assert candidate(xs) == wanted\n    assert True\n",
}
CALLS = {
    "input_output": {
        "fn_name": "double",
        "inputs": [[3], [[1]], [0.1]],
        "outputs": [6, [1, 1], 0.2],
    }
}
STDIN = {"input_output": json.dumps({"inputs": ["3\n", ["-1", ""]], "outputs": ["6\n", "-2"]})}
CALL_TEXTS = {"input_output": {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}}
RIGHT = "def double(x):\n    return x + x\n"
RIGHT_STDIN = "print(int(input()) * 2)"


@pytest.fixture
async def services():
    async with open_pool(BUBBLEWRAP, num_workers=2) as pool:
        yield services_of(pool)


@pytest.fixture
def judge(services):
    async def judged(row: dict, completion: str, **args) -> RewardResult:
        reward = make_reward("code", {"cpu_s": 2.0, **args})
        assert isinstance(reward, AsyncReward)
        result = await reward.score(Answer("", completion, row), services)
        assert isinstance(result, RewardResult)
        return result

    return judged


@pytest.mark.parametrize(
    ("row", "program"),
    [
        pytest.param(ASSERTS, RIGHT, id="asserts"),
        pytest.param(CHECK, RIGHT, id="check"),
        pytest.param(CHECK, "    return helper(x)\n", id="body-that-goes-on-from-the-prompt"),
        pytest.param(CHECK, "def double(x):\n    return helper(x)\n", id="leaning-on-the-prompt"),
        pytest.param(CALLS, RIGHT, id="calls"),
        pytest.param(CALLS, "class Solution:\n    def double(self, x): return x + x", id="method"),
        pytest.param(STDIN, RIGHT_STDIN, id="stdin"),
    ],
)
async def test_right_program_is_accepted(judge, row, program):
    result = await judge(row, f"Thus:\n```python\n{program}\n```\nDone.")
    assert (result.score, result.verdict) == (1.0, "accepted"), result
    assert result.details["passed"] == result.details["tests"]


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("def double(x): return x", "wrong_answer"),
        ("def double(x): return [x]", "wrong_answer"),
        ("def double(x): raise ValueError(x)", "runtime_error"),
        ("def triple(x): return x", "runtime_error"),
        ("1 / 0", "runtime_error"),
        ("def double(x:", "compile_error"),
        ("Twice x is x plus x.", "compile_error"),
        ("def double(x):\n    while True: pass", "timeout"),
        ("def double(x): return bytearray(10 ** 10)", "memory"),
        ("def double(x):\n    while True: print(x)", "output_limit"),
    ],
)
@pytest.mark.parametrize(
    "row", [pytest.param(ASSERTS, id="asserts"), pytest.param(CALLS, id="calls")]
)
async def test_verdict_names_what_went_wrong(judge, row, program, verdict):
    result = await judge(row, program, cpu_s=0.5)
    assert (result.score, result.verdict) == (0.0, verdict), result


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("print(7)", "wrong_answer"),
        ("print(1 / 0)", "runtime_error"),
        ("print(", "compile_error"),
        ("while True: pass", "timeout"),
        ("x = bytearray(10 ** 10)", "memory"),
        ("while True: print(6)", "output_limit"),
    ],
)
async def test_verdict_of_a_program_that_prints(judge, program, verdict):
    result = await judge(STDIN, program, cpu_s=0.5)
    assert (result.score, result.verdict) == (0.0, verdict), result


EQUAL_TO_ALL = """
class Yes(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return False
    def __hash__(self): return 0
    def __sub__(self, other): return 0
    __rsub__ = __abs__ = __sub__
    def __float__(self): return 0.0
    def __repr__(self): return "6"
"""
READS_FRAMES = """
import sys
def double(x):
    frame = sys._getframe()
    while frame:
        seen = [*frame.f_code.co_consts, *frame.f_locals.values()]
        for constant in seen:
            if isinstance(constant, int) and constant not in (x, 0, 1, -1, 3) and constant < 100:
                return constant
        frame = frame.f_back
"""
READS_MEMORY = """
import gc
def double(x):
    for thing in gc.get_objects():
        if isinstance(thing, dict) and "expected" in thing: return thing["expected"]
        if isinstance(thing, str) and "assert double" in thing: return eval(thing.split("==")[1])
"""
FORGES_REPORT = """
import json, os
def double(x):
    for _ in range(9): os.write(3, b'{"result": {"value": true}}\\n')
    os.write(3, b'{"ended": "ok"}\\n')
    os._exit(0)
"""
PATCHES = """
import builtins, json, math
builtins.set = lambda *a: {1, 2}
math.isclose = lambda *a, **k: True
json.dumps = lambda *a, **k: '{"result": {"value": true}}'
builtins.bool = lambda *a: True
def double(x): return None
"""
HACKS = {
    "os-exit": "import os; os._exit(0)",
    "sys-exit": "import sys; sys.exit(0)",
    "exit-in-the-call": "import os\ndef double(x): os._exit(0)",
    "system-exit-in-the-call": "def double(x): raise SystemExit(0)",
    "equal-to-all": EQUAL_TO_ALL + "def double(x): return Yes(7)",
    "equal-list": EQUAL_TO_ALL + "def double(x): return [Yes(7)]",
    "reads-frames": READS_FRAMES,
    "reads-memory": READS_MEMORY,
    "forges-the-report": FORGES_REPORT,
    "patches-builtins": PATCHES,
    "catches-assertions": "def double(x): pass\n__builtins__.AssertionError = BaseException",
    "skips-the-tests": "def double(x): return 0\nif 1:\n    raise SystemExit\n'''",
    "prints-success": "print('OK')\nprint('accepted')\ndef double(x): return 'accepted'",
    "returns-nothing": "def double(x): return object()",
}


@pytest.mark.parametrize("name", sorted(HACKS))
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(ASSERTS, id="asserts"),
        pytest.param(CHECK, id="check"),
        pytest.param(CALLS, id="calls"),
        pytest.param(STDIN, id="stdin"),
    ],
)
async def test_hack_earns_nothing(judge, row, name):
    result = await judge(row, HACKS[name], fraction=False)
    assert result.score == 0.0, result


async def test_expected_values_never_enter_the_sandbox():
    """Whatever is sent along with the program holds inputs alone."""
    seen: list[Program] = []

    class Recorder:
        async def run(self, program: Program) -> ProgramResult:
            seen.append(program)
            return ProgramResult("ok", results=({"value": 1},) * len(program.calls))

    rows = [
        {"test_list": ["assert f(1) == 987654", "assert abs(f(2) - 987654) < 1e-3"]},
        {
            "test": "def check(candidate):\n    y = 987654\n    assert candidate(1) == y",
            "entry_point": "f",
        },
        {"input_output": {"fn_name": "f", "inputs": [[1]], "outputs": [987654]}},
        {"input_output": {"inputs": ["1"], "outputs": ["987654"]}},
    ]
    for row in rows:
        answer = Answer("", "def f(x): ...  # untrusted", row)
        await make_reward("code", {}).score(answer, SharedServices(Recorder(), NoOutbound()))
    untrusted = [program for program in seen if "untrusted" in program.source]
    assert len(untrusted) == 4
    assert not any("987654" in str(program) for program in untrusted)


async def test_fraction_counts_the_tests_that_passed(judge):
    half = "def double(x):\n    return 2 * x if x != 3 else 0"
    assert (await judge(CALLS, half, fraction=True)).score == pytest.approx(2 / 3)
    result = await judge(STDIN, "x = int(input())\nprint(2 * x if x > 0 else 1)", fraction=True)
    assert (result.score, result.verdict) == (0.5, "wrong_answer")
    assert result.details["first_failed"] == 1


async def test_max_tests_bounds_what_is_looked_at(judge):
    only_first = "def double(x):\n    return 6"
    assert (await judge(CALLS, only_first, max_tests=1)).score == 1.0
    assert (await judge(ASSERTS, only_first, max_tests=1)).score == 1.0
    assert (await judge(CALLS, only_first)).score == 0.0


LOOP = {"test_list": ["for x in range(3):\n    assert double(x) == x + x"]}


async def test_tests_that_cannot_be_split_need_leave_to_run_beside_the_program(judge):
    with pytest.raises(DataError, match=r"for x in range.*allow_inside_asserts"):
        await judge(LOOP, RIGHT)
    assert (await judge(LOOP, RIGHT, allow_inside_asserts=True)).score == 1.0
    wrong = await judge(LOOP, "def double(x): return x", allow_inside_asserts=True)
    assert (wrong.score, wrong.verdict) == (0.0, "wrong_answer")
    left = await judge(LOOP, "import os\ndef double(x): os._exit(0)", allow_inside_asserts=True)
    assert (left.score, left.verdict) == (0.0, "runtime_error")


@pytest.mark.parametrize(
    "test",
    [
        "assert list(f(3)) == [0, 1, 2]",
        "assert [*f(2)][0] == 0",
        "assert f(3) is not None",
        "assert len(list(f(3))) == 3 and 5 not in f(4)",
        "assert sorted(f(3), key=lambda n: -n) == [2, 1, 0]",
        "assert sum(f(4)) == sum(n for n in range(4))",
    ],
)
async def test_conditions_of_all_kinds_are_judged(judge, test):
    assert (await judge({"test_list": [test]}, "def f(n): return iter(range(n))")).score == 1.0
    assert (await judge({"test_list": [test]}, "def f(n): return None")).score == 0.0


@pytest.mark.parametrize("test", ["assert f(g(1)) == 2", "assert f(P(1)) == 2"])
async def test_arguments_may_be_made_by_the_program(judge, test):
    program = "class P(int): pass\ndef g(x): return x\ndef f(x): return x + 1"
    assert (await judge({"test_list": [test]}, program)).score == 1.0


async def test_setup_is_run_where_the_calls_need_it(judge):
    row = {
        "test_setup_code": "root = Node(1)\nroot.left = Node(2)\nimport math",
        "test_list": ["assert total(root) == 3"],
    }
    program = """
        class Node:
            def __init__(self, x): self.x, self.left = x, None
        def total(node): return node.x + total(node.left) if node else 0
        """
    assert (await judge(row, textwrap.dedent(program))).score == 1.0


@pytest.mark.parametrize("test", ["assert f(1) == g(1)", "assert all(f(x) == x for x in [1])"])
async def test_two_names_of_the_program_cannot_vouch_for_each_other(judge, test):
    with pytest.raises(DataError, match="apart from the program"):
        await judge({"test_list": [test]}, "def f(x): return x")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "no tests"),
        ({"test_list": []}, "no assert"),
        ({"test_list": "assert f(1)"}, "no list"),
        ({"test_list": ["assert f(1) =="]}, "no Python"),
        ({"test": "x = 1", "entry_point": "f"}, "no function `check`"),
        ({"test": "", "entry_point": "os.system"}, "no name of a function"),
        ({"input_output": "not json"}, "input_output"),
        ({"input_output": {"inputs": ["1"], "outputs": []}}, "input_output"),
        (
            {"input_output": {"fn_name": "f", "inputs": ["1"], "outputs": ["no JSON"]}},
            "input_output",
        ),
        ({"input_output": {"inputs": [], "outputs": []}}, "empty"),
        ({"input_output": {"inputs": [1], "outputs": [1], "fn_name": "f"}}, "arguments"),
        ({"input_output": {"inputs": [[1]], "outputs": [1], "fn_name": "f()"}}, "no name"),
    ],
)
async def test_bad_row_is_an_error_and_no_score(row, message):
    with pytest.raises(DataError, match=message):
        await make_reward("code", {}).score(
            Answer("", RIGHT, row), SharedServices(Never(), NoOutbound())
        )


class Never:
    """A sandbox that always fails."""

    async def run(self, program: Program) -> ProgramResult:
        raise RewardOutage("no worker")


@pytest.mark.parametrize(
    "row", [pytest.param(ASSERTS, id="asserts"), pytest.param(STDIN, id="stdin")]
)
async def test_failing_sandbox_is_an_outage_and_no_score(row):
    with pytest.raises(RewardOutage):
        await make_reward("code", {}).score(
            Answer("", RIGHT, row), SharedServices(Never(), NoOutbound())
        )


@pytest.mark.parametrize(
    "args",
    [
        {"cpu_s": 0},
        {"max_tests": 0},
        {"memory_mb": -1},
        {"colour": 1},
        {"cpu_s": 1e9},
        {"memory_mb": 10**12},
    ],
)
def test_bad_argument_is_refused(args):
    with pytest.raises(ConfigError, match="code"):
        make_reward("code", args)


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nor\n```py\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\nprints\n```\n1\n```", "x = 1\n"),
        ("so\n```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\ny", "x = 1\ny"),
        ("a ``` b", "a ``` b"),
    ],
)
def test_program_is_the_last_python_block(completion, program):
    assert extract_program(completion) == program


@pytest.mark.parametrize(
    ("printed", "wanted", "same"),
    [
        ("1 2\n3", "1  2 3\n", True),
        ("1 2", "1 2 3", False),
        ("0.3333333", "0.33333333", True),
        ("0.3334", "0.3333", False),
        ("1000000008", "1000000007", False),
        ("1e3", "1000.0", True),
        ("nan", "0.5", False),
        ("YES", "Yes", False),
        ("", "", True),
    ],
)
def test_output_is_compared_token_by_token(printed, wanted, same):
    assert same_output(printed, wanted) is same


@pytest.mark.parametrize(
    ("value", "wanted", "same"),
    [
        ([1, 2], [1, 2], True),
        (1, [1], True),
        ([0.1 + 0.2], [0.3], True),
        ({"a": [1]}, {"a": [1]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ("1", 1, False),
        (10**400, 1.5, False),
        (None, None, True),
    ],
)
def test_results_are_compared_as_json(value, wanted, same):
    assert same_result(value, wanted) is same


# --- data sets, where they are ---


def rows_of(name: str) -> list[dict]:
    folder = os.environ.get("HEADWAY_DATA_DIR")
    if folder is None or not (Path(folder) / name).exists():
        pytest.skip(f"HEADWAY_DATA_DIR names no directory with {name}")
    opened = gzip.open if name.endswith(".gz") else open
    with opened(Path(folder) / name, "rt") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("name", ["mbpp/mbpp.jsonl", "mbpp/sanitized-mbpp.jsonl"])
async def test_every_mbpp_reference_is_accepted(judge, name):
    # Task 123 counts amicable numbers for five seconds.
    rows = rows_of(name)
    results = await asyncio.gather(*(judge(row, row["code"], cpu_s=20.0) for row in rows))
    refused = [r["task_id"] for r, result in zip(rows, results, strict=True) if result.score != 1.0]
    assert refused == []


async def test_every_humaneval_reference_is_accepted(judge):
    rows = rows_of("humaneval/HumanEval.jsonl.gz")
    for row in rows:
        result = await judge(row, row["canonical_solution"], allow_inside_asserts=True)
        assert result.verdict == "accepted", row["task_id"]


async def test_every_codecontests_reference_is_accepted(judge):
    rows = [row for row in rows_of("codecontests/codecontests_sample.jsonl") if row["solutions"]]
    for row in rows:
        result = await judge(row, row["solutions"][0])
        assert result.verdict == "accepted", row["query_id"]


async def test_quixbugs_verdicts(judge):
    rows = rows_of("quixbugs/quixbugs.jsonl")

    async def differs(row: dict, program: str, verdict: str, cpu_s: float) -> str | None:
        found = (await judge(row, program, cpu_s=cpu_s)).verdict
        return None if found == verdict else f"{row['query_id']}: {found}, not {verdict}"

    right = [differs(row, row["solutions"][0], "accepted", 20.0) for row in rows]
    wrong = [
        differs(row, program, verdict, 4.0)
        for row in rows
        for program, verdict in zip(row["wrong_solutions"], row["wrong_verdicts"], strict=True)
    ]
    assert [found for found in await asyncio.gather(*right, *wrong) if found] == []


@pytest.mark.parametrize(
    ("row", "program", "score"),
    [
        (CALL_TEXTS, "def add(a, b): return a + b", 1.0),
        (CALL_TEXTS, "def add(a, b): return '3'", 0.0),
        ({"input_output": {"fn_name": "f", "inputs": ['"x"'], "outputs": ['"x"']}}, "f = str", 1.0),
        ({"input_output": {"fn_name": "f", "inputs": [["x"]], "outputs": ["3"]}}, "f = len", 0.0),
    ],
    ids=["sum", "its-text", "a-text", "arguments-as-lists"],
)
async def test_where_arguments_are_json_text_values_are_too(judge, row, program, score):
    assert (await judge(row, program)).score == score


@pytest.mark.parametrize(
    "program",
    [
        "class Solution:\n    def double(self, x: List[int]) -> Optional[int]: return x + x",
        "def double(x): return deque([x + x])[0] if math.inf == inf else heapq",
        '"""Twice."""\nfrom __future__ import annotations\ndef double(x: Unknown): return x + x',
        "def double(x: Dict) -> int: return int(str(pow(2, 1, 5))) * x",
    ],
    ids=["typing", "modules", "future", "pow-is-the-builtin"],
)
async def test_a_called_function_may_lean_on_the_usual_imports(judge, program):
    row = {"input_output": {"fn_name": "double", "inputs": [[3]], "outputs": [6]}}
    result = await judge(row, program)
    assert result.verdict == "accepted", result.details
