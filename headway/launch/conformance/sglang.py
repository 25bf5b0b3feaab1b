"""What clients of SGLang's API rely on, played as they do."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from headway.launch.conformance.service import (
    PROMPT,
    Broken,
    LeftOut,
    Service,
    check_logprobs,
    expect,
    mean_error,
)
from headway.launch.conformance.sglang_requests import (
    GENERATE,
    LONG,
    body_of,
    generate,
    logprobs_of,
    rescored,
    spans_of,
)


async def an_answer_has_tokens_and_a_reason(service: Service) -> None:
    answer = await generate(service)
    meta = answer["meta_info"]
    expect(len(answer["output_ids"]) == meta["completion_tokens"] == 12, f"tokens of {meta}")
    expect(meta["prompt_tokens"] == len(PROMPT), f"prompt_tokens={meta['prompt_tokens']}")
    expect(meta["finish_reason"]["type"] == "length", f"finish_reason={meta['finish_reason']}")
    expect(meta.get("id"), "meta_info has no id")


async def every_token_has_a_logprob(service: Service) -> None:
    answer = await generate(service, sampling={"temperature": 1.0})
    check_logprobs(logprobs_of(answer), 12)


async def logprobs_are_those_of_the_weights_that_serve(service: Service) -> str:
    answer = await generate(service, 24, sampling={"temperature": 1.0})
    again = await rescored(service, answer["output_ids"])
    error = mean_error(logprobs_of(answer), again)
    expect(error <= service.tolerance, f"scored again they differ by {error:.2g} in the mean")
    return f"mean error {error:.1g}"


async def every_token_has_its_version(service: Service) -> None:
    spans_of(await generate(service))


async def samples_of_one_prompt_are_a_list(service: Service) -> None:
    answers = await generate(service, 4, sampling={"n": 3, "temperature": 1.0})
    expect(isinstance(answers, list) and len(answers) == 3, "n=3 did not give a list of three")


async def prompts_come_in_batches(service: Service) -> None:
    answers = await generate(service, 4, input_ids=[list(PROMPT), list(PROMPT[:3])])
    sizes = [each["meta_info"]["prompt_tokens"] for each in answers]
    expect(sizes == [len(PROMPT), 3], f"prompt_tokens={sizes}")


async def a_stream_grows_and_ends_as_an_answer_does(service: Service) -> str:
    whole = await generate(service, 24)
    shown: list[int] = []
    count = 0
    async for chunk in service.stream(GENERATE, body_of(24, stream=True)):
        tokens = chunk["output_ids"]
        if len(tokens) < len(shown) or tokens[: len(shown)] != shown:
            # With `incremental_streaming_output` each chunk has what is new.
            tokens = shown + tokens
        shown, count = tokens, count + 1
    expect(shown == whole["output_ids"], "the stream has other tokens than the answer")
    expect(count > 1, "the stream came in one piece")
    return f"{count} chunks"


async def an_abort_returns_the_tokens_so_far(service: Service) -> str:
    rid, seen = uuid.uuid4().hex, asyncio.Event()
    last: dict[str, Any] = {}

    async def follow() -> None:
        nonlocal last
        async for chunk in service.stream(GENERATE, body_of(LONG, stream=True, rid=rid)):
            last = chunk
            seen.set()

    task = asyncio.create_task(follow())
    try:
        await service.until(lambda: seen.is_set() or task.done(), "the first token")
        await service.post("/abort_request", {"rid": rid})
        await service.until(task.done, "the end of an aborted request")
        await task
    finally:
        task.cancel()
    reason = (last["meta_info"]["finish_reason"] or {}).get("type")
    if reason == "length":
        raise LeftOut(f"{LONG} tokens were there before the abort")
    expect(reason == "abort", f"finish_reason={reason}")
    return f"after {last['meta_info']['completion_tokens']} tokens"


async def a_stop_token_ends_a_sequence(service: Service) -> None:
    tokens = (await generate(service))["output_ids"]
    stop = tokens[5]
    answer = await generate(
        service, sampling={"stop_token_ids": [stop], "ignore_eos": False, "max_new_tokens": 12}
    )
    wanted = tokens[: tokens.index(stop) + 1]
    expect(answer["output_ids"] in (wanted, wanted[:-1]), f"{answer['output_ids']}, not {wanted}")
    reason = answer["meta_info"]["finish_reason"]
    expect(reason["type"] == "stop" and reason.get("matched") == stop, f"finish_reason={reason}")


async def a_seed_repeats_itself_or_is_refused(service: Service) -> str:
    body = body_of(24, sampling={"temperature": 1.0, "sampling_seed": 7})
    answers = [await service.status(GENERATE, body) for _ in range(2)]
    if all(400 <= answer.status_code < 500 for answer in answers):
        return "refused"
    first, second = (answer.json()["output_ids"] for answer in answers)
    expect(first == second, "the same seed gave other tokens")
    return "repeated"


async def null_is_the_same_as_absent(service: Service) -> None:
    nulls: dict[str, Any] = dict.fromkeys(
        ("image_data", "lora_path", "rid", "custom_logit_processor", "session_params", "text")
    )
    sampling = dict.fromkeys(("stop", "stop_token_ids", "regex", "json_schema", "logit_bias"))
    answer = await generate(service, sampling=sampling, **nulls)
    wanted = (await generate(service))["output_ids"]
    expect(answer["output_ids"] == wanted, "null for a field changed the tokens")


async def an_unknown_sampling_field_is_refused(service: Service) -> None:
    answer = await service.status(GENERATE, body_of(2, sampling={"no_such_field": 1}))
    expect(400 <= answer.status_code < 500, f"answered {answer.status_code}")
    expect("no_such_field" in answer.text, f"the error does not name it: {answer.text[:200]}")


async def the_server_says_what_it_is(service: Service) -> None:
    model = await service.get("/model_info")
    expect(model.get("model_path") and "weight_version" in model, f"/model_info: {model}")
    info = await service.get("/server_info")
    missing = {"tp_size", "pp_size", "dp_size", "context_length"} - info.keys()
    expect(not missing, f"/server_info has no {', '.join(sorted(missing))}")
    await service.get("/health_generate")


async def a_pause_holds_what_runs_and_loses_nothing(service: Service) -> None:
    wanted = (await generate(service, LONG))["output_ids"]
    shown: list[int] = []

    async def follow() -> None:
        nonlocal shown
        async for chunk in service.stream(GENERATE, body_of(LONG, stream=True)):
            shown = chunk["output_ids"]

    task = asyncio.create_task(follow())
    try:
        await service.until(lambda: bool(shown) or task.done(), "the first token")
        async with paused(service):
            await asyncio.sleep(0.3)  # what was on its way is here
            held = len(shown)
            await asyncio.sleep(0.5)
            expect(len(shown) == held, f"{len(shown) - held} tokens came during the pause")
        await service.until(task.done, "the end after a pause")
        await task
    finally:
        task.cancel()
    if held == LONG:
        raise LeftOut(f"{LONG} tokens were there before the pause")
    expect(shown == wanted, "after the pause there were other tokens")


@asynccontextmanager
async def paused(service: Service) -> AsyncIterator[None]:
    """Generation is paused in place."""
    await service.post("/pause_generation", {"mode": "in_place"})
    try:
        yield
    finally:
        await service.post("/continue_generation", {})


async def a_version_that_does_not_serve_yet_is_refused_for_now(service: Service) -> None:
    for wanted in ("min_version", "exact_version"):
        answer = await service.status(GENERATE, body_of(2, weight_version={wanted: 2**30}))
        if answer.is_success:
            raise Broken(f"{wanted} was ignored")
        if answer.status_code == 400:
            raise LeftOut("weight_version in a request is not known here")
        expect(answer.status_code == 409, f"answered {answer.status_code}, not 409")
        expect("retry-after" in answer.headers, "409 without Retry-After")


CHECKS = (
    an_answer_has_tokens_and_a_reason,
    every_token_has_a_logprob,
    logprobs_are_those_of_the_weights_that_serve,
    every_token_has_its_version,
    samples_of_one_prompt_are_a_list,
    prompts_come_in_batches,
    a_stream_grows_and_ends_as_an_answer_does,
    an_abort_returns_the_tokens_so_far,
    a_stop_token_ends_a_sequence,
    a_seed_repeats_itself_or_is_refused,
    null_is_the_same_as_absent,
    an_unknown_sampling_field_is_refused,
    the_server_says_what_it_is,
    a_pause_holds_what_runs_and_loses_nothing,
    a_version_that_does_not_serve_yet_is_refused_for_now,
)
