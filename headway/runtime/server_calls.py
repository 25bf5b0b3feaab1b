"""Calls from one of our services to another: the data plane."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from headway.contracts.errors import BackendError, ErrorBody, NotFound, ServiceError
from headway.contracts.http import paths
from headway.contracts.types import LLMRequest, LLMResponse, PolicyVersion
from headway.runtime.connections import Connections

MAX_TOKEN_ID = 2**31
MAX_LOGPROB = 1e-3
"""Rounding makes the logprob of a certain token a little more than 0."""
_KINDS: Mapping[int, type[ServiceError]] = {
    404: NotFound,
    405: NotFound,
    502: BackendError,
    503: BackendError,
    504: BackendError,
}
"""For answers without an `ErrorBody`: not of ours, or a path that this process does not serve."""


async def post_generate(
    connections: Connections,
    url: str,
    req: LLMRequest,
    timeout_s: float | None = None,
    rid: str | None = None,
) -> LLMResponse:
    """One generation on one server.

    Args:
        rid: the id that the server knows the request by, if it is not the request's own.
    Raises:
        BackendError: the server did not answer, or answered with something else than a response.
        ServiceError: whatever the server raised.
    """
    target = url + paths.GENERATE
    # Neither is copied, which would take as long as writing the one and reading the other.
    body = to_json(req if rid is None else {**vars(req), "rid": rid})
    content = await _post(connections, target, body, timeout_s)
    try:
        response = LLMResponse.model_validate_json(content)
    except ValidationError as error:
        raise BackendError(f"{target} answered with no generation: {error}") from error
    problem = _problem(response, req, req.rid if rid is None else rid)
    if problem is not None:
        raise BackendError(f"{target} answered with what it cannot have sampled: {problem}")
    vars(response)["rid"] = req.rid  # frozen for all who will see it; nobody has yet
    return response


def _problem(response: LLMResponse, req: LLMRequest, rid: str) -> str | None:
    """Why a response is no answer to its request; None if it may be one. Nothing is expanded for it."""
    tokens, logprobs = response.output_tokens, response.output_logprobs
    most = req.gconfig.max_new_tokens
    if response.rid != rid:
        return f"request {response.rid!r} was not asked, but {rid!r}"
    if len(tokens) > most:
        return f"{len(tokens)} tokens, max_new_tokens is {most}"
    if len(tokens) != len(logprobs):
        return f"{len(tokens)} tokens with {len(logprobs)} logprobs"
    if not tokens and most and response.stop_reason == "stop":
        return "no token, which nothing can have stopped at"
    if tokens and not 0 <= min(tokens) <= max(tokens) < MAX_TOKEN_ID:
        return f"token ids from {min(tokens)} to {max(tokens)}"
    if logprobs and max(logprobs) > MAX_LOGPROB:
        return f"a logprob of {max(logprobs):g}"
    return _problem_of_runs(response.version_runs, len(tokens))


def _problem_of_runs(runs: Sequence[tuple[PolicyVersion, int, int]], count: int) -> str | None:
    """Why runs are not those of so many tokens; None if they are."""
    end_before = 0
    for version, start, end in runs:
        if version < 0 or start != end_before or end <= start:
            return f"version {version} of the tokens {start} to {end}, behind token {end_before}"
        end_before = end
    if end_before != count:
        return f"versions of {end_before} tokens where there are {count}"
    return None


async def post_order(
    connections: Connections, target: str, body: BaseModel, timeout_s: float
) -> bytes:
    """The answer to one order, as it came.

    Raises:
        BackendError: no answer within `timeout_s`, or none at all.
        ServiceError: whatever the server raised.
    """
    return await _post(connections, target, to_json(body), timeout_s)


async def _post(
    connections: Connections, target: str, body: bytes, timeout_s: float | None
) -> bytes:
    post = connections.post(target, body)
    try:
        answer = await (post if timeout_s is None else asyncio.wait_for(post, timeout_s))
    except TimeoutError as error:
        raise BackendError(f"{target} did not answer within {timeout_s} s") from error
    except OSError as error:
        raise BackendError(f"{target} failed: {type(error).__name__}: {error}") from error
    if answer.status >= 300:
        retry_after = answer.headers.get(b"retry-after", b"").decode("latin-1")
        raise error_of(answer.status, answer.content, target, retry_after)
    return answer.content


def error_of(
    status: int, content: bytes, target: str, retry_after: str | None = None
) -> ServiceError:
    """The error a server meant, as the class it raised there."""
    try:
        error = ServiceError.from_body(ErrorBody.model_validate_json(content))
    except ValidationError:
        error = _KINDS.get(status, ServiceError)(f"{target} answered {status}: {content[:200]!r}")
    if retry_after is not None and retry_after.isdigit():
        error.retry_after_s = float(retry_after)
    return error
