"""What a user's strict type checker says to this file: right uses pass, and each mistake is seen.

`warn_unused_ignores` is part of `--strict`: a mistake that is not seen is an error.
"""

from typing import assert_type

from headway import (
    Answer,
    ComponentConfig,
    Prompt,
    RemoteInferenceEngine,
    RewardResult,
    RolloutRequest,
    TrajectoryBatch,
    register_reward,
)


def brevity(answer: Answer, words: int = 20) -> RewardResult:
    """1 for an answer of at most `words` words."""
    assert_type(answer.completion, str)
    return RewardResult(float(len(answer.completion.split()) <= words))


register_reward("brevity", brevity)
request = RolloutRequest(
    rollout_id="sum-1",
    prompt=Prompt(group_id="sum-1", group_size=4, text="2 + 2 =", data={"answer": "4"}),
    reward=ComponentConfig(name="exact"),
)
engine = RemoteInferenceEngine("http://127.0.0.1:8000")
assert_type(engine.rollout([request], timeout=60.0), TrajectoryBatch)

engine.rollout("sum-1", timeout=60.0)  # type: ignore[arg-type]
engine.rolout([request])  # type: ignore[attr-defined]
Prompt(text="2 + 2 =")  # type: ignore[call-arg]
register_reward(1, brevity)  # type: ignore[arg-type]
