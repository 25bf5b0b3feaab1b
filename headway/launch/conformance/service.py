"""The service that is checked, and what a check can say of it."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

PROMPT = tuple(range(10, 26))
"""Token ids that every vocabulary has."""
TICK_S = 0.02


class Broken(Exception):
    """A promise is not kept."""


class LeftOut(Exception):
    """The check cannot be made here."""


def expect(condition: object, seen: str) -> None:
    """Raise `Broken` unless the condition holds."""
    if not condition:
        raise Broken(seen)


@dataclass(frozen=True)
class Service:
    """What answers at a URL."""

    http: httpx.AsyncClient
    weights: tuple[Path, Path] | None
    """Two directories of weights that it may be given; None leaves its weights alone."""
    tolerance: float
    """Mean error of logprobs."""
    timeout_s: float

    async def get(self, path: str) -> Any:
        """Return the JSON of an answer.

        Raises:
            LeftOut: there is no such route.
            Broken: it failed.
        """
        return _content(path, await self.http.get(path))

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        """See `get`."""
        return _content(path, await self.http.post(path, json=body, headers=headers))

    async def status(self, path: str, body: Any, may_be_404: bool = False) -> httpx.Response:
        """The response, whatever it is.

        Args:
            may_be_404: 404 is an answer of the route, not the want of one.

        Raises:
            LeftOut: there is no such route.
        """
        answer = await self.http.post(path, json=body)
        if not (may_be_404 and answer.status_code == 404):
            _check_route(path, answer)
        return answer

    async def stream(self, path: str, body: Any) -> AsyncGenerator[dict[str, Any]]:
        """The events of a stream, which has to end with `[DONE]`.

        Raises:
            LeftOut, Broken: as `get`.
        """
        last = ""
        async with self.http.stream("POST", path, json=body) as answer:
            if not answer.is_success:
                await answer.aread()
                _content(path, answer)
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    last = line.removeprefix("data: ")
                    if last != "[DONE]":
                        yield json.loads(last)
        expect(last == "[DONE]", f"the stream ended with {last[:80]!r}, not with [DONE]")

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something.

        Raises:
            Broken: it did not happen in time.
        """
        deadline = time.monotonic() + self.timeout_s
        while not condition():
            expect(
                time.monotonic() < deadline, f"{what} did not happen within {self.timeout_s:g} s"
            )
            await asyncio.sleep(TICK_S)


def _check_route(path: str, answer: httpx.Response) -> None:
    if answer.status_code in (404, 405, 501):
        raise LeftOut(f"{path} is not there ({answer.status_code})")


def _content(path: str, answer: httpx.Response) -> Any:
    _check_route(path, answer)
    expect(answer.is_success, f"{path} answered {answer.status_code}: {answer.text[:200]}")
    try:
        return answer.json()
    except ValueError:
        return answer.text


def check_logprobs(logprobs: list[float], count: int) -> None:
    """Check that each token has one that can be a logprob."""
    expect(len(logprobs) == count, f"{len(logprobs)} logprobs of {count} tokens")
    wrong = [x for x in logprobs if not (math.isfinite(x) and x <= 1e-3)]
    expect(not wrong, f"logprobs such as {wrong[:3]}")


def mean_error(got: Sequence[float], wanted: Sequence[float | None]) -> float:
    """Mean absolute difference from those that are there."""
    errors = [abs(a - b) for a, b in zip(got, wanted, strict=True) if b is not None]
    return sum(errors) / max(1, len(errors))
