import threading

import pytest

from headway.contracts.types import Message
from headway.runtime.offload import SMALL, offload, size_of


async def test_what_is_small_is_done_where_it_is():
    assert await offload(SMALL, threading.get_ident) == threading.get_ident()


async def test_what_is_large_is_done_by_a_thread():
    assert await offload(SMALL + 1, threading.get_ident) != threading.get_ident()


async def test_what_is_raised_comes_back():
    with pytest.raises(ZeroDivisionError):
        await offload(SMALL + 1, lambda: 1 / 0)


@pytest.mark.parametrize(
    ("tree", "size"),
    [
        ("abc", 4),
        ({"ab": [1, "c"]}, 8),
        (Message(role="user", content="hello"), 12),
        (None, 1),
    ],
    ids=str,
)
def test_size_counts_characters_and_values(tree, size):
    assert size_of(tree) == size


def test_counting_ends_where_it_is_enough():
    assert SMALL < size_of([["x"] * 10**6]) <= SMALL + 2
