"""What a generation server answers is input: believed only if it can be an answer to its request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from pydantic_core import to_json

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import BackendError
from headway.contracts.sampling_mask import SamplingMask
from headway.contracts.types import LLMRequest
from headway.runtime.server_calls import MAX_MESSAGE, MAX_TOKEN_ID, InvalidGeneration, post_generate

REQUEST = LLMRequest(rid="r", input_ids=(1, 2), gconfig=SamplingConfig(max_new_tokens=4))
ANSWER: dict[str, Any] = {
    "rid": "r#1",
    "output_tokens": [7, 8, 9],
    "output_logprobs": [-0.5, 0.0, 1e-6],
    "version_runs": [[3, 0, 2], [4, 2, 3]],
    "stop_reason": "stop",
    "latency_s": 0.1,
    "ttft_s": 0.1,
}
EMPTY = {"output_tokens": [], "output_logprobs": [], "version_runs": []}


def packed(*sets: list[int]) -> dict[str, str]:
    """A sampling mask in JSON."""
    mask = SamplingMask.of([np.array(ids, np.int32) for ids in sets])
    return TypeAdapter(SamplingMask).dump_python(mask, mode="json")


class Answering:
    """Connections to a server that answers this."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._content = to_json(answer)

    async def send(
        self, target: str, body: bytes, max_bytes: int, on_piece: None, method: bytes
    ) -> SimpleNamespace:
        assert len(self._content) <= max_bytes
        return SimpleNamespace(status=200, content=self._content, headers={})


async def ask(vocab_size: int = MAX_TOKEN_ID, **changes: Any):
    connections: Any = Answering(ANSWER | changes)
    return await post_generate(
        connections, "http://server", REQUEST, rid="r#1", vocab_size=vocab_size
    )


async def test_an_answer_comes_back_under_the_request_s_own_name():
    response = await ask()
    assert response.rid == "r"
    assert response.output_versions == [3, 3, 4]


@pytest.mark.parametrize("stop_reason", ["interrupt", "length"])
async def test_no_token_is_an_answer_of_what_nothing_stopped(stop_reason):
    assert (await ask(**EMPTY, stop_reason=stop_reason)).output_tokens == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rid": "another"}, "request 'another' was not asked, but 'r#1'"),
        (
            {"output_tokens": [7] * 5, "output_logprobs": [-1.0] * 5, "version_runs": [[3, 0, 5]]},
            "5 tokens, max_new_tokens is 4",
        ),
        ({"output_logprobs": [-1.0]}, "3 tokens with 1 logprobs"),
        ({"output_logprobs": [-1.0, 55.0, -1.0]}, "a logprob of 55"),
        ({"output_tokens": [7, -1, 9]}, "token ids from -1 to 9"),
        ({"output_tokens": [7, 2**31, 9]}, "token ids from 7 to 2147483648"),
        (EMPTY, "no token, which nothing can have stopped at"),
        ({"version_runs": [[-7, 0, 3]]}, "version -7 of the tokens 0 to 3"),
        ({"version_runs": [[0, 0, 20_000_000_000]]}, "versions of 20000000000 tokens"),
        ({"version_runs": [[0, 0, 2]]}, "versions of 2 tokens where there are 3"),
        ({"version_runs": [[0, 0, 2], [1, 1, 3]]}, "version 1 of the tokens 1 to 3"),
        ({"version_runs": [[0, 0, 0], [1, 0, 3]]}, "version 0 of the tokens 0 to 0"),
        ({"version_runs": []}, "versions of 0 tokens where there are 3"),
        ({"sampling_mask": packed([7], [8])}, "a sampling mask of 2 positions for 3 tokens"),
        (
            {"sampling_mask": packed([7], [8, 2], [3])},
            "a sampling mask without the token 9 that was drawn at 2",
        ),
        ({"sampling_mask": packed([7], [-1, 8], [9])}, "a sampling mask with ids from -1 to 9"),
    ],
)
async def test_what_cannot_have_been_sampled_is_the_server_s_fault(changes, reason):
    with pytest.raises(BackendError) as caught:
        await ask(**changes)
    assert "http://server/v1/generate answered with what it cannot have sampled" in str(
        caught.value
    )
    assert reason in str(caught.value)
    assert isinstance(caught.value.__cause__, InvalidGeneration)


async def test_a_token_that_the_model_has_not_is_the_server_s_fault():
    assert (await ask(vocab_size=10)).output_tokens == [7, 8, 9]
    with pytest.raises(BackendError, match="token ids from 7 to 9, ids are below 9") as caught:
        await ask(vocab_size=9)
    assert isinstance(caught.value.__cause__, InvalidGeneration)


async def test_what_is_no_generation_is_told_in_few_words():
    with pytest.raises(BackendError, match="answered with no generation") as caught:
        await ask(stop_reason="x" * 100_000)
    assert isinstance(caught.value.__cause__, InvalidGeneration)
    assert len(caught.value.message) <= MAX_MESSAGE


async def test_a_mask_comes_back_with_its_tokens():
    response = await ask(sampling_mask=packed([7, 9], [], [9]))
    assert response.sampling_mask.counts.tolist() == [2, 0, 1]
    with pytest.raises(BackendError, match="a sampling mask with ids from 9 to 12"):
        await ask(vocab_size=10, sampling_mask=packed([], [], [9, 12]))
