"""The signatures that plain reward functions come in: how each is recognised, called and read.

| parameters | as in | filled from |
|---|---|---|
| `(answer)` | here | the answer |
| `(answer, services)`, `async` | here | the answer, and what it may call |
| `(prompts, completions, completion_ids, **columns)`, or some of them | TRL | lists of length one |
| `(data_source, solution_str, ground_truth, extra_info)` | verl | the row's fields of these names |
| `(prompt, completions, prompt_ids, completion_ids, **row)` | AReaL | the row's fields as keywords |

A function in TRL's signature is called once for each answer, so it cannot compare the answers of a batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_origin

from gateway.rewards.base import Answer
from headway.contracts.errors import ConfigError, DataError, RewardError
from headway.contracts.types import RewardResult


@dataclass(frozen=True)
class Convention:
    """One way to write a reward function."""

    shown: str
    """Description of the signature in messages."""
    is_followed: Callable[[tuple[str, ...]], bool]
    """Return True if a function with these parameters follows the convention."""
    fields: Callable[[Answer], dict[str, Any]]
    """Parameters that an answer fills."""
    result: Callable[[str, Any], Any]
    """Converts what a function with this signature returned to a result."""
    filled: frozenset[str] | None = None
    """Parameters that an answer fills, others being arguments; None if the row fills every one."""


def convention_of(signature: inspect.Signature) -> Convention | None:
    """The convention that a function follows; None for any other function."""
    names = tuple(signature.parameters)
    return next((known for known in _KNOWN if known.is_followed(names)), None)


def check_function(name: str, signature: inspect.Signature, is_async: bool) -> None:
    """Refuse a function that no answer could fill.

    Raises:
        ConfigError: with what is wrong, and the signatures that are known.
    """
    known = convention_of(signature)
    needed = required_of(signature)
    if known is _TRL and (unknown := needed & _TRAINERS_OWN):
        raise ConfigError(
            f"{name}{signature} wants {', '.join(sorted(unknown))}, which only a trainer of TRL has; "
            "give it a default, and take what you need from the row"
        )
    if known is _OURS and "services" in signature.parameters and not is_async:
        raise ConfigError(f"{name}{signature} takes services, which are awaited: make it async")
    if known is None and _is_reward(signature):
        raise ConfigError(f"{name}{signature} is no reward function: {known_signatures()}")


def known_signatures() -> str:
    """Return the known signatures, for the message about a function of another one."""
    shown = "; ".join(known.shown for known in _KNOWN)
    return f"a reward function takes one of {shown}"


def required_of(signature: inspect.Signature) -> frozenset[str]:
    """Parameters without a default."""
    return frozenset(
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )


def arguments_of(signature: inspect.Signature) -> inspect.Signature:
    """The parameters that are given where the reward is named."""
    known = convention_of(signature)
    filled = None if known is None else known.filled
    rest = [
        parameter
        for name, parameter in signature.parameters.items()
        if filled is not None and name not in filled
    ]
    return signature.replace(parameters=rest, return_annotation=inspect.Signature.empty)


def _is_reward(signature: inspect.Signature) -> bool:
    """Rather than what makes one: it takes what only an answer has, or returns a score."""
    returned = signature.return_annotation
    is_score = returned in _SCORES or get_origin(returned) in (list, dict)
    return is_score or not _ANSWERS_OWN.isdisjoint(signature.parameters)


def _our_fields(answer: Answer) -> dict[str, Any]:
    return {"answer": answer}


def _areal_fields(answer: Answer) -> dict[str, Any]:
    return {
        **answer.data,
        "prompt": answer.prompt,
        "completions": answer.completion,
        "prompt_ids": list(answer.prompt_ids),
        "completion_ids": list(answer.completion_ids),
    }


def _verl_fields(answer: Answer) -> dict[str, Any]:
    data = answer.data
    judged = data.get("reward_model")
    holder = judged if isinstance(judged, Mapping) and "ground_truth" in judged else data
    key = "ground_truth" if "ground_truth" in holder else "answer"
    if key not in holder:
        raise DataError(
            "the row has no reward_model.ground_truth, ground_truth or answer; "
            f"it has {sorted(data)}"
        )
    return {
        "data_source": data.get("data_source", ""),
        "solution_str": answer.completion,
        "ground_truth": holder[key],
        "extra_info": data.get("extra_info") or {},
    }


def _trl_fields(answer: Answer) -> dict[str, Any]:
    prompt: Any = answer.prompt
    completion: Any = answer.completion
    if answer.messages:
        prompt = [dict(message) for message in answer.messages]
        completion = [{"role": "assistant", "content": completion}]
    columns = {name: [value] for name, value in answer.data.items() if name not in _NO_COLUMNS}
    return {
        **columns,
        "prompts": [prompt],
        "completions": [completion],
        "completion_ids": [list(answer.completion_ids)],
    }


def _scored(_: str, returned: Any) -> Any:
    """A mapping with `score` is verl's way of telling more."""
    if isinstance(returned, Mapping) and "score" in returned:
        details = {name: value for name, value in returned.items() if name != "score"}
        return RewardResult(returned["score"], details)
    return returned


def _only_one(name: str, returned: Any) -> Any:
    """The number in TRL's list."""
    if isinstance(returned, str | Mapping) or not hasattr(returned, "__iter__"):
        raise RewardError(
            f"{name} returned {type(returned).__name__}; a list with the one completion's score is "
            "wanted, as TRL has it"
        )
    scores = list(returned)
    if len(scores) != 1:
        raise RewardError(
            f"{name} returned {len(scores)} scores for 1 completion; each answer is scored alone, so "
            "a score that compares completions cannot be computed here"
        )
    if scores[0] is None:
        raise RewardError(
            f"{name} returned None, so the answer has no score; return a number, or name another "
            "reward for rows like this one"
        )
    return scores[0]


_NO_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
"""Fields of a row that TRL keeps to itself."""
_TRAINERS_OWN = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})
_ANSWERS_OWN = frozenset(
    {
        "completion",
        "completions",
        "response",
        "responses",
        "solution_strs",
        "ground_truth",
        "ground_truths",
        "generated_text",
    }
)
_SCORES = (float, int, bool, RewardResult, "float", "int", "bool", "RewardResult")

_AREAL = Convention(
    shown="AReaL's (prompt, completions, prompt_ids, completion_ids, **row)",
    is_followed=lambda names: (
        names[:4] == ("prompt", "completions", "prompt_ids", "completion_ids")
    ),
    fields=_areal_fields,
    result=_scored,
)
_VERL = Convention(
    shown="verl's (data_source, solution_str, ground_truth, extra_info)",
    is_followed=lambda names: {"solution_str", "ground_truth"} <= set(names),
    fields=_verl_fields,
    result=_scored,
    filled=frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}),
)
_TRL = Convention(
    shown="TRL's (prompts, completions, **columns)",
    is_followed=lambda names: (
        "prompt" not in names and not {"prompts", "completions", "completion_ids"}.isdisjoint(names)
    ),
    fields=_trl_fields,
    result=_only_one,
)
_OURS = Convention(
    shown="(answer), or async (answer, services)",
    is_followed=lambda names: names[:1] == ("answer",),
    fields=_our_fields,
    result=_scored,
    filled=frozenset({"answer", "services"}),
)
_KNOWN = (_AREAL, _VERL, _TRL, _OURS)
