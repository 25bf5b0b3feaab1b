"""Siblings stay together while that is fair."""

from __future__ import annotations

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.types import LLMRequest
from headway.rollout import routing
from headway.rollout.routing import SLACK, Router


def request(group: str | None = None) -> LLMRequest:
    """A load of 10 tokens."""
    metadata = {} if group is None else {"group_id": group}
    gconfig = SamplingConfig(max_new_tokens=8)
    return LLMRequest(rid="r", input_ids=(1, 2), gconfig=gconfig, metadata=metadata)


def test_the_least_loaded_server_is_taken():
    router = Router()
    assert router.choose(request(), {"a": 5, "b": 4}) == "b"
    assert router.choose(request("g"), {"a": 5, "b": 4}) == "b"


def test_siblings_follow_the_first_one_within_the_slack():
    router = Router()
    assert router.choose(request("g"), {"a": 0, "b": 0}) == "a"
    assert router.choose(request("g"), {"a": SLACK * 10, "b": 0}) == "a"
    assert router.choose(request("other"), {"a": 10, "b": 0}) == "b"


def test_a_group_moves_for_good_when_its_server_fell_behind():
    router = Router()
    router.choose(request("g"), {"a": 0, "b": 0})
    assert router.choose(request("g"), {"a": SLACK * 10 + 1, "b": 0}) == "b"
    assert router.choose(request("g"), {"a": 0, "b": 10}) == "b"


def test_a_group_whose_server_is_gone_finds_another():
    router = Router()
    router.choose(request("g"), {"a": 0})
    assert router.choose(request("g"), {"b": 3, "c": 2}) == "c"


def test_only_so_many_groups_are_remembered(monkeypatch):
    monkeypatch.setattr(routing, "MAX_GROUPS", 2)
    router = Router()
    for group in ("one", "two", "three"):
        router.choose(request(group), {"a": 0, "b": 1})
    assert list(router._homes) == ["two", "three"]
