"""What clients rely on that give a server of SGLang's API new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from headway.launch.conformance.service import LeftOut, Service, expect, mean_error
from headway.launch.conformance.sglang_requests import (
    GENERATE,
    LONG,
    body_of,
    generate,
    logprobs_of,
    rescored,
    spans_of,
)

NUM_STREAMS = 4


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
    an_update_serves_the_new_weights_alone,
    versions_are_true_at_a_swap_under_load,
    an_update_that_fails_changes_nothing,
)
