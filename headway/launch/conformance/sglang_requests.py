"""Greedy requests to SGLang's API, and what their answers hold."""

from __future__ import annotations

from typing import Any

from headway.launch.conformance.service import PROMPT, LeftOut, Service, expect

GENERATE = "/generate"
LONG = 200
"""Tokens of a sequence that goes on for a while."""


async def generate(service: Service, tokens: int = 12, **fields: Any) -> Any:
    """One greedy sequence of so many tokens, unless fields say otherwise."""
    return await service.post(GENERATE, body_of(tokens, **fields))


def body_of(tokens: int, **fields: Any) -> dict[str, Any]:
    """The body of a greedy request."""
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    sampling |= fields.pop("sampling", {})
    return {
        "input_ids": list(PROMPT),
        "sampling_params": sampling,
        "return_logprob": True,
        **fields,
    }


def logprobs_of(answer: dict[str, Any]) -> list[float]:
    """The logprobs of the output."""
    rows = answer["meta_info"]["output_token_logprobs"]
    expect(
        [row[1] for row in rows] == answer["output_ids"],
        "output_token_logprobs are of other tokens than output_ids",
    )
    return [row[0] for row in rows]


def spans_of(answer: dict[str, Any]) -> list[tuple[str, int, int]]:
    """The versions of the output's tokens.

    Raises:
        LeftOut: the service does not tell them.
        Broken: they do not cover the tokens.
    """
    reported = answer["meta_info"].get("weight_versions")
    if reported is None:
        raise LeftOut("meta_info has no weight_versions: versions of single tokens are not told")
    spans = [(str(each["version"]), each["start"], each["end"]) for each in reported]
    ends = [0, *(end for _, _, end in spans)]
    expect(
        [start for _, start, _ in spans] == ends[:-1] and ends[-1] == len(answer["output_ids"]),
        f"weight_versions {spans} of {len(answer['output_ids'])} tokens",
    )
    return spans


async def rescored(service: Service, tokens: list[int]) -> list[float | None]:
    """The logprobs that the weights that serve give to these tokens, after the prompt.

    None where another token was scored: SGLang 0.5.23 scores token 0 for the last one of a vocabulary.
    """
    ids = [*PROMPT, *tokens]
    fields = {"input_ids": ids, "logprob_start_len": len(PROMPT) - 1}
    answer = await generate(service, 1, **fields)
    rows = answer["meta_info"].get("input_token_logprobs") or []
    rows = rows[-len(tokens) :]
    expect(len(rows) == len(tokens), f"{len(rows)} input_token_logprobs of {len(tokens)} tokens")
    scores = [row[0] if row[1] == token else None for row, token in zip(rows, tokens, strict=True)]
    num_others = scores.count(None)
    expect(
        num_others < len(tokens) / 4,
        f"{num_others} of {len(tokens)} input_token_logprobs are of other tokens, or null",
    )
    return scores
