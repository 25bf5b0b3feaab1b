"""What makes a dataflow, and what does not."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.contracts.errors import ConfigError
from trainer.dataflow.call import Call
from trainer.dataflow.graph import Dataflow

GEN = Call("gen", "generate", "rollout", (), ("tokens", "scores"))
REF = Call("ref", "inference", "reference", ("tokens",), ("reference",), "reference")
CRITIC = Call("critic", "inference", "ppo_critic", ("tokens",), ("values",), "critic")
JUDGE = Call("judge", "compute", "advantages", ("scores", "values", "reference"), ("advantages",))
CRITIC_TRAIN = Call("critic_train", "train_step", "ppo_critic", ("values",), (), "critic")
TRAIN = Call("train", "train_step", "ppo_actor", ("tokens", "advantages"), (), "model")
ALL = (GEN, REF, CRITIC, JUDGE, CRITIC_TRAIN, TRAIN)


def test_edges_follow_from_keys_whatever_the_order_of_declaration():
    expected = {
        ("gen", "ref"): ("tokens",),
        ("gen", "critic"): ("tokens",),
        ("gen", "judge"): ("scores",),
        ("critic", "judge"): ("values",),
        ("ref", "judge"): ("reference",),
        ("critic", "critic_train"): ("values",),
        ("gen", "train"): ("tokens",),
        ("judge", "train"): ("advantages",),
    }
    for calls in (ALL, ALL[::-1]):
        assert Dataflow(calls).edges == expected


def test_levels_are_the_longest_ways_from_a_source():
    levels = [sorted(call.name for call in level) for level in Dataflow(ALL[::-1]).levels]
    assert levels == [["gen"], ["critic", "ref"], ["critic_train", "judge"], ["train"]]


def test_calls_on_one_model_and_updates_follow_one_another():
    waits = Dataflow(ALL).waits
    assert waits["critic_train"] == {"critic"}
    assert waits["train"] >= {"gen", "judge", "critic_train"}
    twice = Call("again", "inference", "x", ("tokens",), ("more",), "critic")
    both = Dataflow((*ALL, twice)).waits
    order = [call.name for call in Dataflow((*ALL, twice)).calls if call.model == "critic"]
    for before, after in itertools.pairwise(order):
        assert before in both[after]


def test_a_key_that_nobody_outputs_is_named_with_the_nearest():
    wrong = Call("x", "inference", "y", ("reference_logprob",), ("z",))
    ref = Call("ref", "inference", "reference", ("tokens",), ("reference_logprobs",))
    with pytest.raises(ConfigError, match=r"'x' reads 'reference_logprob'.*'reference_logprobs'"):
        Dataflow((GEN, ref, wrong))
    with pytest.raises(ConfigError, match="name a call that outputs it"):
        Dataflow((Call("x", "inference", "y", ("qqq",), ("z",)),))


def test_two_producers_of_a_key_are_named():
    with pytest.raises(ConfigError, match="'scores' is output by 'gen' and by 'rew'"):
        Dataflow((GEN, Call("rew", "inference", "reward", ("tokens",), ("scores",))))


def test_a_cycle_is_named():
    a = Call("a", "inference", "x", ("of_c",), ("of_a",))
    b = Call("b", "inference", "x", ("of_a",), ("of_b",))
    c = Call("c", "inference", "x", ("of_b",), ("of_c",))
    with pytest.raises(ConfigError, match=r"wait for one another: (a|b|c) -> "):
        Dataflow((a, b, c))


def test_a_name_is_used_once():
    with pytest.raises(ConfigError, match=r"\['gen'\]"):
        Dataflow((GEN, Call("gen", "inference", "x", ("tokens",), ("other",))))


@given(st.data())
def test_every_order_of_declaration_runs_after_its_sources(data):
    count = data.draw(st.integers(1, 8))
    calls = []
    for at in range(count):
        sources = data.draw(st.sets(st.integers(0, at - 1))) if at else set()
        reads = tuple(f"k{source}" for source in sorted(sources))
        model = data.draw(st.sampled_from([None, "a", "b"]))
        calls.append(Call(f"c{at}", "inference", "x", reads, (f"k{at}",), model))
    flow = Dataflow(data.draw(st.permutations(calls)))
    seen: set[str] = set()
    for call in flow.calls:
        assert flow.waits[call.name] <= seen
        seen.add(call.name)
