"""What clients of SGLang's API rely on, played as they do."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
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

GENERATE = "/generate"
LONG = 200
"""Tokens of a sequence that goes on for a while."""
NUM_STREAMS = 4


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


async def update(service: Service, number: int, label: str | None) -> None:
    """Publish the first or the second directory."""
    assert service.weights is not None
    body: dict[str, Any] = {"model_path": str(service.weights[number])}
    body |= {} if label is None else {"weight_version": label}
    answer = await service.post("/update_weights_from_disk", body)
    expect(answer.get("success") is True, f"the update failed: {answer}")


async def an_update_serves_the_new_weights_alone(service: Service) -> str:
    """No prefix of the old weights is used, and the label is there."""
    await update(service, 0, "check-a")
    first = await generate(service, 24)
    await update(service, 1, "check-b")
    second = await generate(service, 24)
    expect(second["meta_info"]["weight_version"] == "check-b", "the label is not served")
    expect(
        logprobs_of(first) != logprobs_of(second), "the other weights gave the same logprobs: stale"
    )
    error = mean_error(logprobs_of(second), await rescored(service, second["output_ids"]))
    expect(error <= service.tolerance, f"scored again they differ by {error:.2g} in the mean")
    await update(service, 0, "check-c")
    third = await generate(service, 24)
    expect(third["output_ids"] == first["output_ids"], "the first weights gave other tokens again")
    return f"mean error {error:.1g}"


async def versions_are_true_at_a_swap_under_load(service: Service) -> str:
    """Each token of sequences that meet a swap, scored again by the weights that it is said to be of.

    An engine may go on over the keys and values of the old weights. Tokens behind the swap are then near
    to the version that they name, and nearer than to the other one.
    """
    await update(service, 0, "load-a")
    ended = await _generated_until(service, lambda: update(service, 1, "load-b"))
    lasts = sorted(ended, key=lambda last: -len(spans_of(last)))[: 2 * NUM_STREAMS]
    by_new = [await rescored(service, last["output_ids"]) for last in lasts]
    await update(service, 0, "load-c")
    by_old = [await rescored(service, last["output_ids"]) for last in lasts]
    return check_versions(lasts, {"load-a": by_old, "load-b": by_new}, service.tolerance)


async def _generated_until(
    service: Service, work: Callable[[], Awaitable[None]]
) -> list[dict[str, Any]]:
    """The last chunks of long sequences that ran while this work was done, and before."""
    body = body_of(LONG, stream=True, sampling={"temperature": 1.0})
    ended: list[dict[str, Any]] = []
    begun: set[int] = set()
    is_over = False

    async def follow(place: int) -> None:
        while not is_over:  # so that some run at the end, however long the work takes
            last: dict[str, Any] = {}
            async for chunk in service.stream(GENERATE, body):
                last = chunk
                begun.add(place)
            ended.append(last)

    tasks = [asyncio.create_task(follow(place)) for place in range(NUM_STREAMS)]
    try:
        await service.until(lambda: len(begun) == NUM_STREAMS, "the first tokens")
        await work()
        is_over = True
        await asyncio.wait_for(asyncio.gather(*tasks), service.timeout_s)
    finally:
        for task in tasks:
            task.cancel()
    return ended


def check_versions(
    answers: Sequence[dict[str, Any]],
    scores: Mapping[str, Sequence[Sequence[float | None]]],
    tolerance: float,
) -> str:
    """Compare the logprobs of answers with those of the versions that they name.

    Args:
        scores: logprobs of the answers' tokens under each of two versions.
    Raises:
        Broken: tokens are of another version than they name.
        LeftOut: nothing met the swap, or nobody can tell.
    """
    first, second = scores
    other_than = {first: second, second: first}
    mixed, worst = 0, 0.0
    own_after: list[float] = []
    named_after: list[float | None] = []
    other_after: list[float | None] = []
    for place, answer in enumerate(answers):
        own, spans = logprobs_of(answer), spans_of(answer)
        mixed += len(spans) > 1
        for version, start, end in spans:
            if version not in scores:
                continue
            named = scores[version][place][start:end]
            if start == 0:
                worst = max(worst, mean_error(own[:end], named))
            else:
                own_after += own[start:end]
                named_after += named
                other_after += scores[other_than[version]][place][start:end]
    expect(worst <= tolerance, f"tokens are not of the version they name: off by {worst:.2g}")
    if not mixed:
        raise LeftOut(
            "no sequence met the swap: the service lets what runs end first, or is too fast"
        )
    after, from_other = mean_error(own_after, named_after), mean_error(own_after, other_after)
    if after <= tolerance:
        return f"{mixed} sequences met the swap, mean error {max(worst, after):.1g}"
    off = f"off by {after:.2g} from the version they name, by {from_other:.2g} from the other"
    is_other = from_other <= tolerance or 2 * from_other <= after
    expect(not is_other, f"tokens after a swap are {off}")
    if 2 * after > from_other:
        raise LeftOut(
            f"old keys and values are kept, and the two directories differ too much: {off}"
        )
    return f"{mixed} sequences met the swap and kept their keys and values: {off}"


async def an_update_that_fails_changes_nothing(service: Service) -> None:
    await update(service, 0, "kept")
    before = await generate(service, 8)
    missing = {"model_path": "/nowhere/at/all", "weight_version": "wrong"}
    answer = await service.status("/update_weights_from_disk", missing)
    failed = not answer.is_success or answer.json().get("success") is False
    expect(failed, f"answered {answer.status_code}: {answer.text[:200]}")
    after = await generate(service, 8)
    expect(after["output_ids"] == before["output_ids"], "other tokens after a failed update")
    expect(after["meta_info"]["weight_version"] == "kept", "another label after a failed update")


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
WITH_WEIGHTS = (
    an_update_serves_the_new_weights_alone,
    versions_are_true_at_a_swap_under_load,
    an_update_that_fails_changes_nothing,
)
