"""Who shares a prefix stays together while that is fair."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet import routing
from gateway.fleet.routing import SLACK, Router, bounds, choose
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.types import LLMRequest

LOAD = 10
FAR = 4 * SLACK * LOAD
"""Behind an idle server by more than what a home is worth."""


class Lane(NamedTuple):
    outstanding: int
    capacity: int = 0


def request(group: str | None = None, session: str | None = None) -> LLMRequest:
    """A load of 10 tokens."""
    named = {"group_id": group, "session_id": session}
    metadata = {name: value for name, value in named.items() if value is not None}
    gconfig = SamplingConfig(max_new_tokens=8)
    return LLMRequest(rid="r", input_ids=(1, 2), gconfig=gconfig, metadata=metadata)


def idle(*names: str) -> dict[str, Lane]:
    return {name: Lane(0) for name in names}


def with_work(**outstanding: int) -> dict[str, Lane]:
    return {name: Lane(tokens) for name, tokens in outstanding.items()}


@pytest.mark.parametrize(
    ("lanes", "homes", "chosen"),
    [
        ({"a": Lane(5), "b": Lane(4)}, (), "b"),
        ({"a": Lane(5), "b": Lane(4)}, ("a",), "a"),
        ({"a": Lane(5), "b": Lane(4)}, (None, "a"), "a"),
        ({"a": Lane(5), "b": Lane(4)}, ("gone", "a"), "a"),
        ({"a": Lane(5), "b": Lane(4)}, ("gone",), "b"),
        ({"a": Lane(FAR), "b": Lane(0)}, ("a",), "b"),
        ({"a": Lane(FAR), "b": Lane(9), "c": Lane(0)}, ("a", "b"), "b"),
        ({"a": Lane(1000), "b": Lane(900)}, ("a",), "a"),
        ({"a": Lane(3000), "b": Lane(900)}, ("a",), "b"),
        ({"a": Lane(30, capacity=8), "b": Lane(50, capacity=16)}, (), "b"),
        ({"a": Lane(30, capacity=8), "b": Lane(50, capacity=0)}, (), "a"),
        ({"a": Lane(200, capacity=8), "b": Lane(200, capacity=64)}, ("a",), "b"),
        ({"a": Lane(200, capacity=64), "b": Lane(60, capacity=8)}, ("a",), "a"),
    ],
    ids=[
        "least",
        "session",
        "group",
        "session_gone",
        "all_gone",
        "spill",
        "spill_to_group",
        "fair_under_load",
        "unfair_under_load",
        "less_for_its_size",
        "size_unknown",
        "small_home_spills",
        "big_home_keeps",
    ],
)
def test_choice(lanes: dict[str, Lane], homes: tuple[str | None, ...], chosen: str):
    assert choose(lanes, LOAD, *homes) == chosen


LANES = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.builds(Lane, st.integers(0, 100_000), st.sampled_from([0, 1, 8, 64])),
    min_size=1,
)


@given(LANES, st.integers(1, 10_000), st.lists(st.sampled_from("abcdefgh"), max_size=2))
def test_a_choice_is_one_of_the_servers_and_homes_stay_within_the_bound(
    lanes: dict[str, Lane], load: int, homes: list[str]
):
    chosen = choose(lanes, load, *homes)
    assert chosen in lanes
    least = choose(lanes, load)
    if chosen != least:
        assert chosen in homes
        assert lanes[chosen].outstanding + load <= bounds(lanes, load)[chosen]


@given(st.lists(st.tuples(st.sampled_from("gh"), st.sampled_from("stuv")), max_size=200))
def test_no_server_gets_more_than_its_bounded_share(names: list[tuple[str, str]]):
    router, held = Router(), {"a": 0, "b": 0, "c": 0, "d": 0}
    for group, session in names:
        lanes = {name: Lane(tokens) for name, tokens in held.items()}
        held[router.choose(request(group, session), lanes)] += LOAD
    mean = sum(held.values()) / len(held)
    assert max(held.values()) <= routing.SPILL * mean + SLACK * LOAD


def test_siblings_follow_the_first_one():
    router = Router()
    assert router.choose(request("g"), idle("a", "b")) == "a"
    assert router.choose(request("g"), with_work(a=50, b=0)) == "a"
    assert router.choose(request("other"), with_work(a=50, b=0)) == "b"


def test_a_group_moves_for_good_when_its_server_fell_behind():
    router = Router()
    router.choose(request("g"), idle("a", "b"))
    assert router.choose(request("g"), with_work(a=FAR, b=0)) == "b"
    assert router.choose(request("g"), with_work(a=0, b=10)) == "b"


def test_a_session_begins_at_its_group_and_moves_alone():
    router = Router()
    router.choose(request("g"), idle("a", "b"))
    assert router.choose(request("g", "s"), with_work(a=50, b=0)) == "a"
    router.choose(request(None, "s"), with_work(a=FAR, b=0))
    assert router.choose(request("g", "s"), with_work(a=0, b=50)) == "b"
    assert router.choose(request("g", "t"), with_work(a=50, b=0)) == "a"


def test_a_group_whose_server_is_gone_finds_another():
    router = Router()
    router.choose(request("g"), idle("a"))
    assert router.choose(request("g"), with_work(b=3, c=2)) == "c"


def test_new_weights_and_drains_end_homes():
    router = Router()
    router.choose(request("g"), idle("a", "b"))
    router.forget("b")
    assert router.choose(request("g"), with_work(a=9, b=0)) == "a"
    router.forget("a")
    assert router.choose(request("g"), with_work(a=9, b=0)) == "b"
    router.forget()
    assert router.choose(request("g"), with_work(a=0, b=9)) == "a"


def test_only_so_many_homes_are_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routing, "MAX_HOMES", 2)
    router = Router()
    for group in ("one", "two", "three"):
        router.choose(request(group), with_work(a=0, b=1))
    assert [name for _, name in router._homes] == ["two", "three"]
