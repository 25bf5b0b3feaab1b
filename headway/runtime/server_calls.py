"""Calls from one of our services to another: the data plane."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from headway.contracts.engines import OnDelta
from headway.contracts.errors import BackendError, ErrorBody, NotFound, ServiceError
from headway.contracts.generation_codec import MEDIA_TYPE, decode_response
from headway.contracts.http import paths
from headway.contracts.routed_experts import MAX_EXPERT_BYTES
from headway.contracts.sampling_mask import MAX_MASK_TOKENS, SamplingMask
from headway.contracts.types import LLMDelta, LLMRequest, LLMResponse, PolicyVersion
from headway.runtime.connections import MAX_RESPONSE_BYTES, Connections, HttpResponse, OnPiece
from headway.runtime.offload import offload
from headway.runtime.secret import authorization

MAX_TOKEN_ID = 2**31
MAX_MESSAGE = 4096
"""Characters of what a server says went wrong: it is stored and logged."""
TOKEN_BYTES = 128
"""Maximum bytes of a token's id, logprob and version run in a response."""
DELTA_BYTES = 512
"""Maximum bytes of an event with one token of a stream."""
TOP_BYTES = 48
"""Maximum bytes of one of a token's alternatives."""
MASK_TOKEN_BYTES = 6
"""Maximum bytes of an id, or of a position's count, in a sampling mask."""
MAX_GENERATION_BYTES = 256 << 20
MAX_LOGPROB = 1e-3
"""Rounding makes the logprob of a certain token a little more than 0."""
_KINDS: Mapping[int, type[ServiceError]] = {
    404: NotFound,
    405: NotFound,
    502: BackendError,
    503: BackendError,
    504: BackendError,
}
"""Error codes for answers without an `ErrorBody`: not of ours, or a path that this process does not
serve."""


_COLUMNS_TYPE = MEDIA_TYPE.encode()


def generation_headers(token: str | None) -> dict[str, str]:
    """Header fields of who asks for generations: large ones may come as columns."""
    return {**authorization(token), "accept": f"application/json, {MEDIA_TYPE}"}


class InvalidGeneration(ValueError):
    """A server's response cannot have been sampled for the request."""


async def post_generate(
    connections: Connections,
    url: str,
    req: LLMRequest,
    timeout_s: float | None = None,
    rid: str | None = None,
    vocab_size: int = MAX_TOKEN_ID,
    on_delta: OnDelta | None = None,
) -> LLMResponse:
    """One generation on one server.

    Args:
        rid: the id that the server knows the request by, if it is not the request's own.
        vocab_size: what is sampled is below it.
        on_delta: called with what each step added; None has it all come at the end.
    Raises:
        BackendError: the server did not answer, or answered with something else than a response.
        ServiceError: whatever the server raised.
    """
    events = None if on_delta is None else _Events(req, vocab_size, on_delta)
    target = url + (paths.GENERATE if events is None else paths.GENERATE_STREAM)
    # Neither is copied, which would take as long as writing the one and reading the other.
    body = to_json(req if rid is None else {**vars(req), "rid": rid})
    max_bytes = _most_bytes(req)
    if events is not None:
        max_bytes += req.gconfig.max_new_tokens * (DELTA_BYTES + req.top_logprobs * TOP_BYTES)
    answer = await _send(
        connections, target, body, timeout_s, max_bytes, None if events is None else events.feed
    )
    try:
        if events is not None:
            response = LLMResponse.from_response(events.response(target))
        elif answer.headers.get(b"content-type") == _COLUMNS_TYPE:
            content = answer.content
            response = await offload(len(content), decode_response, content)
        else:
            response = LLMResponse.from_response(answer.content)
    except ValueError as error:
        message = f"{target} answered with no generation: {error}"
        raise BackendError(message[:MAX_MESSAGE]) from InvalidGeneration()
    problem = _problem(response, req, req.rid if rid is None else rid, vocab_size)
    if events is not None and response.output_tokens[: len(events.tokens)] != events.tokens:
        problem = "other tokens at the end than on the way"
    if problem is not None:
        raise invalid_generation(target, problem)
    vars(response)["rid"] = req.rid  # frozen for all who will see it; nobody has yet
    return response


class _Events:
    """Reads a stream of server-sent events as it comes: `delta`s, then `response` or `error`."""

    def __init__(self, req: LLMRequest, vocab_size: int, on_delta: OnDelta) -> None:
        self.tokens: list[int] = []
        self._req = req
        self._vocab_size = vocab_size
        self._on_delta = on_delta
        self._rest = bytearray()
        self._last: tuple[bytes, bytes] = (b"", b"")

    def feed(self, piece: bytes) -> None:
        """Take a piece of the body.

        Raises:
            ValueError: it is no such stream.
        """
        searched = max(0, len(self._rest) - 1)
        self._rest += piece
        while (end := self._rest.find(b"\n\n", searched)) >= 0:
            event, searched = bytes(self._rest[:end]), 0
            del self._rest[: end + 2]
            self._take(event)

    def response(self, target: str) -> bytes:
        """The JSON of the response, once the stream has ended.

        Raises:
            BackendError: there is none.
            ServiceError: the server failed on the way.
        """
        name, content = self._last
        if name == b"error":
            raise _shortened(error_of(500, content, target))
        if name != b"response":
            raise BackendError(f"{target} ended its stream without a response")
        return content

    def _take(self, event: bytes) -> None:
        head, _, data = event.partition(b"\n")
        name, content = head.removeprefix(b"event: "), data.removeprefix(b"data: ")
        if name != b"delta":
            self._last = (name, content)
            return
        delta = LLMDelta.model_validate_json(content)
        tokens, logprobs = delta.output_tokens, delta.output_logprobs
        self.tokens += tokens
        if len(tokens) != len(logprobs) or len(self.tokens) > self._req.gconfig.max_new_tokens:
            raise ValueError(f"{len(tokens)} tokens more, with {len(logprobs)} logprobs")
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            raise ValueError(f"token ids from {min(tokens)} to {max(tokens)}")
        self._on_delta(delta)


def invalid_generation(target: str, problem: str) -> BackendError:
    """The error of a server whose answer cannot be one; its cause says so."""
    error = BackendError(f"{target} answered with what it cannot have sampled: {problem}")
    error.__cause__ = InvalidGeneration(problem)
    return error


def _most_bytes(req: LLMRequest) -> int:
    """Return the maximum bytes of the response to a request."""
    scored = 0 if req.logprob_start is None else len(req.input_ids)
    size = (req.gconfig.max_new_tokens + scored) * (TOKEN_BYTES + req.top_logprobs * TOP_BYTES)
    if req.sampling_mask:
        size += (MAX_MASK_TOKENS + req.gconfig.max_new_tokens) * MASK_TOKEN_BYTES
    if req.routed_experts:
        size += MAX_EXPERT_BYTES
    return min(MAX_RESPONSE_BYTES + size, MAX_GENERATION_BYTES)


def _problem(response: LLMResponse, req: LLMRequest, rid: str, vocab_size: int) -> str | None:
    """Why a response is no answer to its request; None if it may be one. Nothing is expanded for it."""
    tokens, logprobs = response.output_tokens, response.output_logprobs
    most = req.gconfig.max_new_tokens
    if response.rid != rid:
        return f"request {response.rid[:128]!r} was not asked, but {rid!r}"
    if len(tokens) > most:
        return f"{len(tokens)} tokens, max_new_tokens is {most}"
    if len(tokens) != len(logprobs):
        return f"{len(tokens)} tokens with {len(logprobs)} logprobs"
    if not tokens and most and response.stop_reason == "stop":
        return "no token, which nothing can have stopped at"
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        return f"token ids from {min(tokens)} to {max(tokens)}, ids are below {vocab_size}"
    if logprobs and max(logprobs) > MAX_LOGPROB:
        return f"a logprob of {max(logprobs):g}"
    experts, num_tokens = response.routed_experts, len(req.input_ids) + len(tokens)
    if experts is not None and len(experts) >= num_tokens:
        return f"experts of {len(experts)} tokens, {num_tokens - 1} were computed"
    if (mask := response.sampling_mask) is not None:
        problem = _problem_of_mask(mask, tokens, vocab_size)
        if problem is not None:
            return problem
    return _problem_of_runs(response.version_runs, len(tokens))


def _problem_of_mask(mask: SamplingMask, tokens: Sequence[int], vocab_size: int) -> str | None:
    if len(mask.tokens) and not 0 <= mask.tokens.min() <= mask.tokens.max() < vocab_size:
        return f"a sampling mask with ids from {mask.tokens.min()} to {mask.tokens.max()}"
    return mask.problem(tokens)


def _problem_of_runs(runs: Sequence[tuple[PolicyVersion, int, int]], count: int) -> str | None:
    """Return why runs do not add up to this many tokens; None if they do."""
    end_before = 0
    for version, start, end in runs:
        if version < 0 or start != end_before or end <= start:
            return f"version {version} of the tokens {start} to {end}, behind token {end_before}"
        end_before = end
    if end_before != count:
        return f"versions of {end_before} tokens where there are {count}"
    return None


async def send_order(
    connections: Connections,
    target: str,
    body: BaseModel | None,
    timeout_s: float,
    method: str = "POST",
) -> bytes:
    """The answer to one order, as it came.

    Args:
        body: None sends none.
    Raises:
        BackendError: no answer within `timeout_s`, or none at all.
        ServiceError: whatever the server raised.
    """
    content = b"" if body is None else to_json(body)
    answer = await _send(connections, target, content, timeout_s, method=method.encode())
    return answer.content


async def _send(
    connections: Connections,
    target: str,
    body: bytes,
    timeout_s: float | None,
    max_bytes: int = MAX_RESPONSE_BYTES,
    on_piece: OnPiece | None = None,
    method: bytes = b"POST",
) -> HttpResponse:
    call = connections.send(target, body, max_bytes, on_piece, method)
    try:
        if timeout_s is None:
            answer = await call
        else:
            async with asyncio.timeout(timeout_s):
                answer = await call
    except TimeoutError as error:
        raise BackendError(f"{target} did not answer within {timeout_s} s") from error
    except OSError as error:
        raise BackendError(f"{target} failed: {type(error).__name__}: {error}") from error
    if answer.status >= 300:
        retry_after = answer.headers.get(b"retry-after", b"").decode("latin-1")
        raise _shortened(error_of(answer.status, answer.content, target, retry_after))
    return answer


def _shortened(error: ServiceError) -> ServiceError:
    """An error whose message can be logged and stored."""
    if len(error.message) > MAX_MESSAGE:
        error.args = (error.message[:MAX_MESSAGE],)
    return error


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
