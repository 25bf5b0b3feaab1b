"""Parts of an interrupted sequence become one, as if it had never been interrupted."""

from __future__ import annotations

import numpy as np
import pytest

from gateway.fleet.resume import cut_at_stop, generate_whole, join, rest_of
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import BackendError
from headway.contracts.routed_experts import RoutedExperts
from headway.contracts.sampling_mask import SamplingMask
from headway.contracts.types import LLMRequest, LLMResponse


def request(**gconfig) -> LLMRequest:
    fields = {
        name: gconfig.pop(name) for name in ("logprob_start", "top_logprobs") if name in gconfig
    }
    options = {"max_new_tokens": 8} | gconfig
    return LLMRequest(rid="r", input_ids=(1, 2), gconfig=SamplingConfig(**options), **fields)


def part(tokens: str | list[int], reason="interrupt", version=0, **fields) -> LLMResponse:
    ids = [ord(c) for c in tokens] if isinstance(tokens, str) else tokens
    options = {
        "version_runs": [(version, 0, len(ids))] if ids else [],
        "latency_s": 2.0,
        "ttft_s": 0.5,
    }
    return LLMResponse(
        rid="r",
        output_tokens=ids,
        output_logprobs=[-float(token) for token in ids],
        stop_reason=reason,
        **(options | fields),
    )


def decode(ids: list[int]) -> str:
    return "".join(chr(token) for token in ids)


class Script:
    """Answers one part after the other, and keeps what it was asked."""

    def __init__(self, *parts: LLMResponse) -> None:
        self.parts = list(parts)
        self.asked: list[LLMRequest] = []

    async def __call__(self, req: LLMRequest) -> LLMResponse:
        self.asked.append(req)
        return self.parts.pop(0)


async def test_a_whole_response_is_handed_on_as_it_is():
    whole = part([5, 6], "stop")
    assert await generate_whole(Script(whole), decode, request()) is whole


async def test_the_rest_is_asked_for_with_the_tokens_so_far_as_prompt():
    script = Script(part([5, 6, 7]), part([8], version=1), part([9, 10], "length", version=1))
    req = request(seed=40, min_new_tokens=2)
    response = await generate_whole(script, decode, req)
    assert [one.input_ids for one in script.asked] == [
        (1, 2),
        (1, 2, 5, 6, 7),
        (1, 2, 5, 6, 7, 8),
    ]
    configs = [one.gconfig for one in script.asked]
    assert [g.max_new_tokens for g in configs] == [8, 5, 4]
    assert [g.min_new_tokens for g in configs] == [2, 0, 0]
    assert [g.seed for g in configs] == [40, 43, 44]
    assert response.output_tokens == [5, 6, 7, 8, 9, 10]
    assert response.output_logprobs == [-5.0, -6.0, -7.0, -8.0, -9.0, -10.0]
    assert response.version_runs == [(0, 0, 3), (1, 3, 6)]
    assert response.output_versions == [0, 0, 0, 1, 1, 1]
    assert response.stop_reason == "length"


async def test_what_was_interrupted_at_its_last_token_has_its_length():
    script = Script(part([1] * 8))
    response = await generate_whole(script, decode, request())
    assert (response.stop_reason, len(response.output_tokens)) == ("length", 8)
    assert len(script.asked) == 1


async def test_what_was_interrupted_before_its_prompt_was_scored_is_scored_later():
    scored = part([], "length", prompt_logprobs=[None, -1.0])
    script = Script(part([]), scored)
    response = await generate_whole(script, decode, request(max_new_tokens=0, logprob_start=0))
    assert response.prompt_logprobs == [None, -1.0]
    assert [one.logprob_start for one in script.asked] == [0, 0]


def test_the_prompt_is_scored_once():
    so_far = part([5], prompt_logprobs=[None, -1.0], prompt_top_logprobs=[None, [(3, -0.1)]])
    assert rest_of(request(logprob_start=0), so_far).logprob_start is None
    whole = join(so_far, part([6], "stop", stop_match=6))
    assert whole.prompt_logprobs == [None, -1.0]
    assert whole.prompt_top_logprobs == [None, [(3, -0.1)]]
    assert (whole.stop_reason, whole.stop_match) == ("stop", 6)


def test_times_add_up_and_the_first_token_is_the_first():
    whole = join(part([5]), part([6], "stop"))
    assert (whole.latency_s, whole.ttft_s, whole.num_recomputes) == (4.0, 0.5, 1)
    late = join(part([], cached_tokens=0), part([6], "stop", cached_tokens=2))
    assert (late.ttft_s, late.cached_tokens, late.num_recomputes) == (2.5, 2, 0)


def test_alternatives_of_all_tokens_are_kept():
    first = part([5], top_logprobs=[[(5, -0.1)]])
    second = part([6], "stop", top_logprobs=[[(6, -0.2)]])
    assert join(first, second).top_logprobs == [[(5, -0.1)], [(6, -0.2)]]
    assert join(part([]), second).top_logprobs == [[(6, -0.2)]]
    assert join(part([5]), part([6])).top_logprobs is None


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_a_penalty_on_sampled_tokens_cannot_be_resumed_from_a_prefix(penalty):
    req = request(**{penalty: 0.5})
    assert rest_of(req, part([])).input_ids == req.input_ids
    with pytest.raises(BackendError, match="must start over"):
        rest_of(req, part([5]))


def test_seeds_stay_within_their_bounds():
    last = 2**63 - 1
    assert rest_of(request(seed=last), part([5, 6])).gconfig.seed == 1


async def test_a_stop_string_across_the_seam_ends_the_sequence():
    script = Script(part("abEN"), part("Dxyz", "length", version=1))
    response = await generate_whole(script, decode, request(stop=("END",)))
    assert decode(response.output_tokens) == "abEND"
    assert len(response.output_logprobs) == 5
    assert response.version_runs == [(0, 0, 4), (1, 4, 5)]
    assert (response.stop_reason, response.stop_match) == ("stop", "END")


@pytest.mark.parametrize("reason", ["length", "interrupt"])
async def test_a_stop_string_that_ends_with_the_last_token_is_found(reason):
    joined = join(part("abEN"), part("D", reason))
    cut = cut_at_stop(joined, ("END",), decode, seam=4)
    assert (cut.stop_reason, cut.stop_match) == ("stop", "END")
    assert decode(cut.output_tokens) == "abEND"


def test_other_stop_strings_are_left_to_the_servers():
    seen = join(part("ab"), part("cEND", "stop", stop_match="END"))
    assert cut_at_stop(seen, ("END",), decode, seam=2) is seen
    none = join(part("ab"), part("cd", "length"))
    assert cut_at_stop(none, ("END",), decode, seam=2) is none
    let_pass = join(part("aENDb"), part("cd", "length"))
    assert cut_at_stop(let_pass, ("END",), decode, seam=5) is let_pass


def mask(*sets: tuple[int, ...]) -> SamplingMask:
    return SamplingMask.of([np.array(ids, np.int32) for ids in sets])


def test_masks_of_both_parts_are_joined():
    first, second = part([5, 6], sampling_mask=mask((5, 9), (6,))), part([7], "stop")
    joined = join(first, part([7], "stop", sampling_mask=mask((7, 8))))
    assert joined.sampling_mask == mask((5, 9), (6,), (7, 8))
    assert join(first, second).sampling_mask == mask((5, 9), (6,), ())
    assert join(part([]), second).sampling_mask is None
    assert join(part([]), part([7], sampling_mask=mask((7,)))).sampling_mask == mask((7,))


async def test_a_mask_ends_with_its_sequence_at_a_stop_string():
    first = part("ab", sampling_mask=mask((97, 98), (98,)))
    rest = part("cd", "stop", sampling_mask=mask((99,), (99, 100)))
    script = Script(first, rest)
    req = request(stop=("bc",)).model_copy(update={"sampling_mask": True})
    response = await generate_whole(script, decode, req)
    assert decode(response.output_tokens) == "abc"
    assert response.sampling_mask == mask((97, 98), (98,), (99,))
    assert [asked.sampling_mask for asked in script.asked] == [True, True]


def experts(*ids: int) -> RoutedExperts:
    """Of one layer, one expert each."""
    return RoutedExperts(np.array(ids, np.int16).reshape(-1, 1, 1))


def test_experts_of_both_parts_are_those_that_computed_each_token_first():
    """The second request computes the first's tokens once more, with experts that sampled nothing."""
    first = part([5, 6], routed_experts=experts(1, 2, 3))
    second = part([7, 8], "stop", routed_experts=experts(9, 9, 9, 4, 5))
    assert join(first, second).routed_experts == experts(1, 2, 3, 4, 5)
    assert join(part([]), second).routed_experts == second.routed_experts


def test_experts_end_where_a_stop_string_ends_the_tokens():
    first, second = part("ab", routed_experts=experts(1, 2, 3)), part("cdef", "length")
    joined = join(first, second.model_copy(update={"routed_experts": experts(*range(7))}))
    cut = cut_at_stop(joined, ("bc",), decode, seam=2)
    assert decode(cut.output_tokens) == "abc"
    assert cut.routed_experts == experts(1, 2, 3, 3)
