"""What clients of vLLM's own routes rely on."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from headway.launch.conformance.service import (
    PROMPT,
    LeftOut,
    Service,
    check_logprobs,
    expect,
)

GENERATE = "/inference/v1/generate"
LONG = 200


def body_of(tokens: int, **fields: Any) -> dict[str, Any]:
    """The body of a greedy request."""
    sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
    sampling |= fields.pop("sampling", {})
    return {
        "request_id": uuid.uuid4().hex,
        "token_ids": list(PROMPT),
        "sampling_params": sampling,
        **fields,
    }


async def generate(service: Service, tokens: int = 12, **fields: Any) -> dict[str, Any]:
    """The choice of one greedy request."""
    answer = await service.post(GENERATE, body_of(tokens, **fields))
    (choice,) = answer["choices"]
    return dict(choice)


async def tokens_come_with_logprobs(service: Service) -> None:
    choice = await generate(service, sampling={"temperature": 1.0})
    expect(len(choice["token_ids"]) == 12, f"{len(choice['token_ids'])} tokens, not 12")
    entries = choice["logprobs"]["content"]
    check_logprobs([entry["logprob"] for entry in entries], 12)
    expect(choice["finish_reason"] == "length", f"finish_reason={choice['finish_reason']}")


async def every_token_has_its_version(service: Service) -> None:
    choice = await generate(service)
    spans = choice.get("weight_versions")
    if spans is None:
        raise LeftOut("choices have no weight_versions")
    ends = [0, *(span["end"] for span in spans)]
    expect(
        [span["start"] for span in spans] == ends[:-1] and ends[-1] == 12,
        f"weight_versions={spans}",
    )


async def a_stream_brings_what_is_new(service: Service) -> None:
    wanted = (await generate(service, 24))["token_ids"]
    tokens: list[int] = []
    async for chunk in service.stream(GENERATE, body_of(24, stream=True)):
        for choice in chunk["choices"]:
            tokens += choice["token_ids"] or []
    expect(tokens == wanted, "the stream has other tokens than the answer")


async def an_abort_returns_the_tokens_so_far(service: Service) -> None:
    body = body_of(LONG)
    task = asyncio.create_task(service.post(GENERATE, body))
    try:
        await asyncio.sleep(0.2)
        ids = [body["request_id"], f"generate-tokens-{body['request_id']}"]
        await service.post("/abort_requests", {"request_ids": ids})
        await service.until(task.done, "the end of an aborted request")
        (choice,) = (await task)["choices"]
    finally:
        task.cancel()
    if choice["finish_reason"] == "length":
        raise LeftOut(f"{LONG} tokens were there before the abort")
    expect(choice["finish_reason"] == "abort", f"finish_reason={choice['finish_reason']}")


async def a_pause_is_told_and_ends(service: Service) -> None:
    await service.post("/pause?mode=keep&clear_cache=false", None)
    try:
        status = await service.get("/is_paused")
        expect(status.get("is_paused") is True, f"/is_paused: {status}")
    finally:
        await service.post("/resume", None)
    expect((await service.get("/is_paused")).get("is_paused") is False, "it is still paused")
    await generate(service)


async def the_prefix_cache_can_be_dropped(service: Service) -> None:
    await service.post("/reset_prefix_cache", None)


async def the_server_says_what_it_is(service: Service) -> None:
    info = await service.get("/server_info?config_format=json")
    config = info.get("vllm_config")
    if config is None:
        raise LeftOut("/server_info has no vllm_config: it is another engine's")
    expect(config.get("model_config"), f"vllm_config has {sorted(config)[:5]}")


CHECKS = (
    tokens_come_with_logprobs,
    every_token_has_its_version,
    a_stream_brings_what_is_new,
    an_abort_returns_the_tokens_so_far,
    a_pause_is_told_and_ends,
    the_prefix_cache_can_be_dropped,
    the_server_says_what_it_is,
)
