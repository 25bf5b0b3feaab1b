"""vLLM's own routes over a `ServedModel`, as its development mode has them (0.32).

Completions and chats are OpenAI's. `/server_info`, `/tokenize` and `/update_weight_version` are also
SGLang's, and one answer serves both.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from headway import __version__
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.http import paths
from headway.contracts.types import LLMRequest, LLMResponse, TopLogprobs
from headway.dialects.error_shapes import FAILURES, InvalidField, route_in
from headway.dialects.event_stream import event_stream
from headway.dialects.openai.choice import FINISH_REASONS
from headway.dialects.openai.completion_plans import adapter_of
from headway.dialects.openai.errors import openai_error
from headway.dialects.openai.logprobs import finite
from headway.dialects.request_ids import request_ids
from headway.dialects.served_model import (
    Part,
    ServedModel,
    all_of,
    merged,
    routing_key,
    served_model,
)
from headway.dialects.sglang.routes import dialect_of
from headway.dialects.vllm.types import NO_TRANSFER, AbortRequestsBody, TokensBody
from headway.runtime.disconnect import unless_disconnected

ENGINE_ID = "generate-tokens-"
"""What vLLM puts in front of the id of a request."""
NAMES = {
    "max_new_tokens": "sampling_params.max_tokens",
    "min_new_tokens": "sampling_params.min_tokens",
    "input_ids": "token_ids",
    "rid": "request_id",
}
router = APIRouter(route_class=route_in(openai_error), responses=FAILURES)


@router.post(paths.VLLM_GENERATE, response_model=None)
async def generate(body: TokensBody, request: Request) -> Response:
    """Token ids in, token ids out; `weight_versions` says which weights sampled which."""
    model, claim = served_model(request), request_ids(request).claim
    asked = _requests_of(body, model, routing_key(request))
    rids = {body.request_id: [each.rid for each in asked]}
    if not body.stream:
        with claim(rids):
            return JSONResponse(await unless_disconnected(request, _answer(body, asked, model)))
    return await event_stream(request, _chunks(body, asked, model, claim(rids)), openai_error)


@router.post(paths.VLLM_ABORT)
async def abort(body: AbortRequestsBody, request: Request) -> dict[str, str]:
    """End requests with the tokens so far."""
    for each in body.request_ids or (None,):
        await request_ids(request).abort(each and each.removeprefix(ENGINE_ID))
    return {"status": "aborted"}


@router.post(paths.VLLM_PAUSE)
async def pause(
    request: Request,
    mode: Annotated[Literal["keep", "wait", "abort"], Query()] = "abort",
    clear_cache: Annotated[bool, Query()] = True,
) -> dict[str, str]:
    """Stop decoding; requests that `keep` freezes without their cache are prefilled again."""
    if mode == "wait":
        raise InvalidField(
            "mode=wait lets what runs end while new requests are held; send keep or abort", "mode"
        )
    kept: Literal["retract", "in_place"] = "retract" if clear_cache else "in_place"
    await served_model(request).pause("abort" if mode == "abort" else kept)
    return {"status": "paused"}


@router.post(paths.VLLM_RESUME)
async def resume(request: Request) -> dict[str, str]:
    await served_model(request).resume()
    return {"status": "resumed"}


@router.get(paths.VLLM_IS_PAUSED)
async def is_paused(request: Request) -> dict[str, bool]:
    return {"is_paused": served_model(request).is_paused}


@router.post(paths.VLLM_RESET_PREFIXES)
async def reset_prefix_cache(request: Request) -> dict[str, bool]:
    """Drop shared prefixes; `success` is false if sequences were running."""
    return {"success": await served_model(request).flush()}


@router.get(paths.VLLM_WEIGHT_INFO)
async def weight_info(request: Request) -> dict[str, str]:
    return {"weight_version": dialect_of(request).label}


@router.get(paths.VLLM_WORLD_SIZE)
async def world_size() -> dict[str, int]:
    """One: to its clients, what is behind this URL is one process."""
    return {"world_size": 1}


@router.get(paths.VLLM_VERSION)
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.post(paths.VLLM_INIT_TRANSFER)
@router.post(paths.VLLM_BEGIN_TRANSFER)
@router.post(paths.VLLM_END_TRANSFER)
async def refuse_transfer() -> None:
    """Refused: these go into vLLM's own processes."""
    raise InvalidField(NO_TRANSFER)


def _requests_of(body: TokensBody, model: ServedModel, session: str | None) -> list[LLMRequest]:
    sampling, home = body.sampling_params, {} if session is None else {"session_id": session}
    adapter = None if body.model is None else adapter_of(body.model, model)
    wanted = None if body.weight_version is None else body.weight_version.exact(model)
    try:
        return [
            LLMRequest(
                rid=body.request_id if sampling.n == 1 else f"{body.request_id}_{index}",
                input_ids=body.token_ids,
                gconfig=SamplingConfig(**sampling.given(index)),
                top_logprobs=max(sampling.logprobs or 0, sampling.prompt_logprobs or 0),
                logprob_start=None if sampling.prompt_logprobs is None else 0,
                adapter=adapter,
                version=wanted,
                metadata=home if sampling.n == 1 else {**home, "group_id": body.request_id},
            )
            for index in range(sampling.n)
        ]
    except ValidationError as error:
        raise InvalidField.of(error, NAMES) from error


async def _answer(
    body: TokensBody, asked: Sequence[LLMRequest], model: ServedModel
) -> dict[str, Any]:
    responses = await all_of(model, asked)
    choices = [
        {**_tokens(body, index, response), **_end(response)}
        for index, response in enumerate(responses)
    ]
    return {
        **_envelope(body, choices),
        "prompt_logprobs": _prompt_logprobs(body, responses[0]),
        "usage": _usage(body, responses),
    }


async def _chunks(
    body: TokensBody,
    asked: Sequence[LLMRequest],
    model: ServedModel,
    claim: AbstractContextManager[None],
) -> AsyncGenerator[dict[str, Any]]:
    """What is new, token by token; the last chunk of a choice has its end."""
    seen = [0] * len(asked)
    responses: dict[int, LLMResponse] = {}
    with claim:
        async with aclosing(merged(model, asked)) as parts:
            async for index, part in parts:
                is_end = isinstance(part, LLMResponse)
                choice = _tokens(body, index, part, seen[index] if is_end else 0)
                if isinstance(part, LLMResponse):
                    responses[index] = part
                    choice |= _end(part)
                else:
                    seen[index] += len(part.output_tokens)
                    choice |= {"finish_reason": None, "stop_reason": None, "weight_versions": None}
                yield _envelope(body, [choice])
    if body.stream_options is not None and body.stream_options.include_usage:
        usage = _usage(body, [responses[index] for index in range(len(asked))])
        yield {**_envelope(body, []), "usage": usage}


def _envelope(body: TokensBody, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"request_id": body.request_id, "choices": choices}


def _tokens(body: TokensBody, index: int, part: Part, seen: int = 0) -> dict[str, Any]:
    """The tokens of a choice from here on, with their logprobs."""
    tokens, num_top = part.output_tokens[seen:], body.sampling_params.logprobs
    logprobs = None
    if num_top is not None:
        tops: Sequence[TopLogprobs] = part.top_logprobs or [[] for _ in part.output_tokens]
        columns = zip(tokens, part.output_logprobs[seen:], tops[seen:], strict=True)
        logprobs = {
            "content": [
                {
                    **_scored(token, logprob),
                    "top_logprobs": [_scored(*each) for each in best[:num_top]],
                }
                for token, logprob, best in columns
            ]
        }
    return {"index": index, "token_ids": tokens, "logprobs": logprobs}


def _end(response: LLMResponse) -> dict[str, Any]:
    return {
        "finish_reason": FINISH_REASONS[response.stop_reason],
        "stop_reason": response.stop_match,
        "weight_versions": [
            {"version": str(version), "start": start, "end": end}
            for version, start, end in response.version_runs
        ],
    }


def _scored(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "token_id": token, "logprob": finite(logprob)}


def _prompt_logprobs(body: TokensBody, response: LLMResponse) -> list[Any] | None:
    """For each token of the prompt but the first, its own logprob and those of the most likely ones."""
    num_top = body.sampling_params.prompt_logprobs
    if num_top is None or response.prompt_logprobs is None:
        return None
    tops = response.prompt_top_logprobs or [None] * len(response.prompt_logprobs)
    rows: list[Any] = []
    for token, logprob, best in zip(body.token_ids, response.prompt_logprobs, tops, strict=True):
        if logprob is None:
            rows.append(None)
            continue
        scored = {token: logprob} | dict((best or [])[:num_top])
        rows.append({str(each): {"logprob": finite(value)} for each, value in scored.items()})
    return rows


def _usage(body: TokensBody, responses: Sequence[LLMResponse]) -> dict[str, Any]:
    completion = sum(len(response.output_tokens) for response in responses)
    prompt = len(body.token_ids)
    cached = min(response.cached_tokens for response in responses)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
