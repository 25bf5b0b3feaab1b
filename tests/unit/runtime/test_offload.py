import asyncio
import sys
import threading

import pytest

from headway.contracts.types import Message
from headway.runtime.offload import SMALL, SWITCH_S, offload, size_of


async def test_what_is_small_is_done_where_it_is():
    assert await offload(SMALL, threading.get_ident) == threading.get_ident()


async def test_what_is_large_is_done_by_a_thread():
    assert await offload(SMALL + 1, threading.get_ident) != threading.get_ident()


async def test_what_is_raised_comes_back():
    with pytest.raises(ZeroDivisionError):
        await offload(SMALL + 1, lambda: 1 / 0)


async def test_the_loop_gets_its_turn_early_while_any_thread_computes():
    usual_s = sys.getswitchinterval()
    ends = [threading.Event() for _ in range(2)]

    def compute(end: threading.Event) -> float:
        assert end.wait(30)
        return sys.getswitchinterval()

    computing = [asyncio.ensure_future(offload(SMALL + 1, compute, end)) for end in ends]
    for end, task in zip(ends, computing, strict=True):
        end.set()
        assert await task == pytest.approx(SWITCH_S)
    with pytest.raises(ZeroDivisionError):
        await offload(SMALL + 1, lambda: 1 / 0)
    assert sys.getswitchinterval() == usual_s


@pytest.mark.parametrize(
    ("tree", "size"),
    [
        ("abc", 4),
        ({"ab": [1, "c"]}, 8),
        ([1, 2.0, None, [True, ["d"]]], 9),
        ([0] * 100, 101),
        (Message(role="user", content="hello"), 12),
        (None, 1),
    ],
    ids=str,
)
def test_size_counts_characters_and_values(tree, size):
    assert size_of(tree) == size


def test_counting_ends_where_it_is_enough():
    assert SMALL < size_of([["x"] * 10**6]) <= SMALL + 2
