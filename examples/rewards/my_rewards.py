"""Custom rewards, named in a gateway's config (`modules: [my_rewards]`).

A plain function is registered as it is, in the signature it already has (this project's, TRL's, AReaL's
or verl's); a class where a reward has arguments, a quick way, or awaits others.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field

from headway import Answer, RewardResult, SharedServices, register_reward


def brevity(answer: Answer, per_token: float = 0.001) -> float:
    """The row's answer somewhere in the text, less a little for every token."""
    is_right = str(answer.data["answer"]) in answer.completion
    return float(is_right) - per_token * len(answer.completion_ids)


def boxed(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """TRL's signature: lists, here of one answer; a chat's completion is a list of messages."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    found = [re.findall(r"\\boxed\{(.*?)\}", text) for text in texts]
    return [float(said[-1:] == [wanted]) for said, wanted in zip(found, answer, strict=True)]


def gsm8k_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    answer: str,
    **kwargs: Any,
) -> float:
    """AReaL's signature: the fields of the row come as keywords."""
    wanted = answer.rpartition("####")[2].strip().replace(",", "")
    numbers = re.findall(r"-?\d+", completions.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == wanted)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """verl's signature: `reward_model.ground_truth` of the row; a mapping may return details, too."""
    is_right = solution_str.strip() == ground_truth
    return {"score": float(is_right), "length": len(solution_str)}


class Keywords:
    """The share of the row's keywords that the answer names."""

    def __init__(
        self,
        key: Annotated[str, Field(description="Field of the row that lists them.")] = "keywords",
        ignore_case: bool = True,
    ) -> None:
        self._key = key
        self._ignore_case = ignore_case

    def quick(self, answer: Answer) -> RewardResult | None:
        """Runs on the event loop, so it must be sure to end soon."""
        return None if answer.completion else RewardResult(0.0, verdict="wrong_format")

    def __call__(self, answer: Answer) -> RewardResult:
        fold = str.casefold if self._ignore_case else str
        text = fold(answer.completion)
        wanted = [str(word) for word in answer.data[self._key]]
        named = [word for word in wanted if fold(word) in text]
        return RewardResult(len(named) / len(wanted), {"named": named})


class Judge:
    """Calls a service of your own, which `outbound.allow` of the gateway's config must name."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def score(self, answer: Answer, services: SharedServices) -> RewardResult:
        verdict = await services.outbound.post(self._url, {"text": answer.completion}, 30.0)
        return RewardResult(float(verdict["good"]), {"why": verdict.get("why", "")})


register_reward("brevity", brevity)
register_reward("boxed_trl", boxed)
register_reward("gsm8k_areal", gsm8k_reward_fn)
register_reward("my_compute_score", compute_score)
register_reward("keywords", Keywords)
register_reward("judge", Judge)
