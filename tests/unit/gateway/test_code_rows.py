"""A row's tests, read by another process where there are many: the same tests, and bounded."""

import json
from contextlib import aclosing

import pytest

from gateway.components.shared_services import (
    NoOutbound,
    NoSandbox,
    Program,
    ProgramResult,
    SharedServices,
)
from gateway.rewards import pool
from gateway.rewards.base import Answer
from gateway.rewards.code_rows import (
    MAX_TESTS_CHARS,
    decode_tests,
    encode_tests,
    fields_of_tests,
    read_tests,
)
from gateway.rewards.scoring import Scorer
from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.gateway import ExecutorConfig
from headway.contracts.errors import DataError, RewardError
from tests.waiting import assert_loop_turns

ROWS = [
    {
        "test_list": [
            "import math",
            "EPS = 1e-3",
            "assert f(1) == (1, {2, 3}, b'x', 1.0, {4: [None, True]})",
            "assert math.isclose(f(1), 2, abs_tol=EPS)",
            "for x in range(3):\n    assert f(x)",
        ]
    },
    {"test": "def check(candidate):\n    assert candidate(1) == 2\n", "entry_point": "f"},
    {"input_output": json.dumps({"inputs": ["1\n", ["2", "3"]], "outputs": ["1", "5"]})},
    {"input_output": json.dumps({"fn_name": "f", "inputs": [[1, "x"]], "outputs": [{"a": 1.5}]})},
    {"input_output": {"fn_name": "f", "inputs": ['1\n"x"'], "outputs": ['{"a": 1.5}']}},
]
FIELDS = '"' + "{x}" * 90_000 + '"'


@pytest.mark.parametrize("max_tests", [None, 3], ids=str)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: next(iter(row)))
def test_tests_that_were_told_are_those_that_are_read(row, max_tests):
    told = json.loads(json.dumps(encode_tests(fields_of_tests(row | {"prompt": "x"}), max_tests)))
    assert decode_tests(told) == read_tests(row, max_tests)


def test_more_text_than_anybody_reads_is_refused():
    row = {"test_list": ["assert f(1) == 1"] * (MAX_TESTS_CHARS // 10)}
    with pytest.raises(DataError, match=f"{MAX_TESTS_CHARS} are the most"):
        encode_tests(row, None)


class Twos:
    """A sandbox in which every call gives 2."""

    async def run(self, program: Program) -> ProgramResult:
        return ProgramResult("ok", results=({"value": 2},) * len(program.calls))


@pytest.fixture
async def scorer():
    made = Scorer(ExecutorConfig(), SharedServices(Twos(), NoOutbound()))
    yield made
    await made.aclose()


async def test_a_row_of_many_tests_is_judged_like_one_of_few(scorer):
    row = {"test_list": [f"assert f({n}) == 2" for n in range(2000)]}
    result = await scorer.score(ComponentConfig(name="code"), Answer("", "def f(n): ...", row))
    assert (result.score, result.details["passed"]) == (1.0, 2000)


async def test_tests_that_take_too_long_to_read_are_an_error_and_the_loop_goes_on(monkeypatch):
    monkeypatch.setattr(pool.WorkerTaskPool.__init__, "__defaults__", (0.2,))
    scorer = Scorer(ExecutorConfig(), SharedServices(NoSandbox(), NoOutbound()))
    row = {"test_list": [f"assert f(1) == f{FIELDS}"]}
    async with aclosing(scorer), assert_loop_turns(50):
        with pytest.raises(RewardError, match=r"encode_tests ran longer than 0\.2 s"):
            await scorer.score(ComponentConfig(name="code"), Answer("", "def f(n): ...", row))
